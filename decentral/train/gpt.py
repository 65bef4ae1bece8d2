"""A Llama-style decoder, cut into layers: embedding, blocks, head.

RMSNorm, rotary positions, SwiGLU, grouped-query attention (Touvron et al., arXiv 2307.09288). A layer is an
`nn.Module` from one tensor to one tensor, and a model is a list of them, so a span is a slice of that list. The
names inside a layer are those of Hugging Face's Llama; `named_weights` adds the prefix. Mistral and Qwen have the same
names, and a few options more (core/model_families.py).

Shapes: B sequences, T positions, D width, H heads, K key-value heads, E channels of a head, V vocabulary, S positions
that are attended to.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from decentral.core import config
from decentral.core.errors import UserError
from decentral.train import lora, rotary, start_weights


def build(
    model: config.ModelConfig, seed: int, first: int = 0, last: int | None = None, drawn: bool = True
) -> list[nn.Module]:
    """Layers [first, last) with their initial weights, on the CPU, the same on every peer of a run, whatever its span.

    The weights are those of the folder `model.from`, or else drawn; with `model.lora` they are frozen, and there is an
    adapter beside each matrix that has one. For that, layers outside are built too, one at a
    time, and let go, so that only one more layer's memory is needed (a user's own function returns all at once).
    Without `drawn` what is trained of them is whatever the memory holds, for others will take its place.

    Raises UserError if `model.layers` names no function that returns modules, and StartWeightsError where the folder is
    not here, or is not what it should be.
    """
    given = model.weights is not None or model.start_from is not None
    filled = drawn or model.lora is not None  # no donor gives frozen weights
    with torch.random.fork_rng(devices=[]), nullcontext() if filled and not given else Undrawn():
        torch.manual_seed(seed)
        if model.layers is not None:
            return _users_layers(model)[first:last]
        inside = range(model.depth + 2)[first:last]
        kept = {index: layer for index, layer in _ours(model) if index in inside}
    layers = [kept[index] for index in inside]
    if filled and given:
        start_weights.fill(model, named_weights(layers, model.depth, inside.start))
    if model.lora is not None:
        lora.freeze(layers)
        for number, layer in zip(inside, layers, strict=True):
            if 0 < number <= model.depth:
                lora.adapt(layer, model.lora, seed, number)
    return layers


def placed(layers: Sequence[nn.Module], run: config.Config, device: torch.device) -> list[nn.Module]:
    """The layers on this device, frozen weights in `train.weights`; train/inner.py does the same to what is trained."""
    if run.model.lora is not None:
        lora.convert(layers, getattr(torch, run.train.weights))
    return [layer.to(device) for layer in layers]


class Undrawn(TorchFunctionMode):
    """Within it, layers are built and their weights keep whatever the memory holds, for others will take their place.

    To draw the initial weights takes most of the time of building a large model.
    """

    DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.trunc_normal_)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _: object,
        values: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        return named["tensor"] if function in self.DRAWS else function(*values, **named)


def parameters(model: config.ModelConfig) -> list[int]:
    """The number of parameters of each layer that are trained; no weights are made."""
    if model.layers is None:
        return [sum(one.matrices) + sum(one.gains) for one in sizes(model)]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return [sum(p.numel() for p in layer.parameters()) for layer in _users_layers(model)]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The numbers of parameters of a layer's tensors."""

    matrices: tuple[int, ...]
    larger: tuple[int, ...] = ()  # of tensors with more than two dimensions
    gains: tuple[int, ...] = ()  # and biases


def sizes(model: config.ModelConfig) -> list[LayerSizes]:
    """The sizes of each layer's tensors that are trained; no weights are made."""
    if model.lora is not None:
        nothing, block = LayerSizes(()), LayerSizes(tuple(model.block_factors))
        return [nothing, *[block] * model.depth, nothing]
    if model.layers is None:
        width, table = model.d_model, model.vocabulary * model.d_model
        block = LayerSizes(tuple(model.block_matrices), gains=tuple(model.block_vectors))
        return [LayerSizes((table,)), *[block] * model.depth, LayerSizes((table,), gains=(width,))]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        shapes = [[p.shape for p in layer.parameters()] for layer in _users_layers(model)]
    kinds: list[Callable[[int], bool]] = [lambda ndim: ndim == 2, lambda ndim: ndim > 2, lambda ndim: ndim < 2]
    return [LayerSizes(*(tuple(s.numel() for s in own if kind(len(s))) for kind in kinds)) for own in shapes]


def widths(model: config.ModelConfig) -> list[int]:
    """Numbers a token that enter each layer: D of its hidden_BTD, or 1 for the first layer, which tokens_BT enter."""
    if model.layers is None:
        return [1] + [model.d_model] * (model.depth + 1)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        entering, found = torch.zeros(1, model.context, dtype=torch.int64), []
        for layer in _users_layers(model):
            found.append(entering.numel() // model.context)
            entering = layer(entering)
    return found


def _ours(model: config.ModelConfig) -> Iterator[tuple[int, nn.Module]]:
    """Each layer with its index, in the order in which they draw their weights, on which a seed's weights depend."""
    for block in range(1, model.depth + 1):
        yield block, Block(model)
    yield 0, Embedding(model)
    yield model.depth + 1, Head(model)


class Embedding(nn.Module):
    """tokens_BT -> hidden_BTD"""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocabulary, model.d_model)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD: Tensor = self.embed_tokens(tokens_BT)
        return hidden_BTD


class Block(nn.Module):
    """hidden_BTD -> hidden_BTD: attention, then a gated feed-forward, each added to what came in."""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.mlp = FeedForward(model)
        for out in (self.self_attn.o_proj, self.mlp.down_proj):  # GPT-2: residual branches start small
            nn.init.normal_(out.weight, std=0.02 / (2 * model.depth) ** 0.5)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD))
        hidden_BTD = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return hidden_BTD


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (RoFormer, arXiv 2104.09864)."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.channels = model.n_heads, model.n_kv_heads, model.d_head
        self.window = model.window
        bias = model.options.query_bias
        self.q_proj = _linear(model.d_model, model.d_queries, bias)
        self.k_proj = _linear(model.d_model, model.d_keys, bias)
        self.v_proj = _linear(model.d_model, model.d_keys, bias)
        self.o_proj = _linear(model.d_queries, model.d_model)
        normed = model.options.query_norm
        self.q_norm = nn.RMSNorm(model.d_head, eps=model.norm_eps) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(model.d_head, eps=model.norm_eps) if normed else nn.Identity()
        cos_TE, sin_TE = rotary.tables(model)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        T = hidden_BTD.shape[1]
        windowed = self.window is not None and self.window < T
        mask_TT = _within_window(T, self.window, hidden_BTD.device) if windowed else None
        return self.attend(*self.heads_of(hidden_BTD), mask_TT)

    def heads_of(self, hidden_BTD: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries q_BHTE, keys k_BKTE and values v_BKTE of positions [first, first + T)."""
        B, T, _ = hidden_BTD.shape
        q_BHTE = self.q_norm(self.q_proj(hidden_BTD).view(B, T, self.heads, self.channels)).transpose(1, 2)
        k_BKTE = self.k_norm(self.k_proj(hidden_BTD).view(B, T, self.kv_heads, self.channels)).transpose(1, 2)
        v_BKTE = self.v_proj(hidden_BTD).view(B, T, self.kv_heads, self.channels).transpose(1, 2)
        return self._rotate(q_BHTE, first), self._rotate(k_BKTE, first), v_BKTE

    def attend(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask_TS: Tensor | None) -> Tensor:
        """out_BTD of T queries over S positions: those that mask_TS has, or, without one, each query's and all before.

        Without a mask the queries are those of all S positions.
        """
        out_BHTE = F.scaled_dot_product_attention(
            q_BHTE,
            k_BKSE,
            v_BKSE,
            attn_mask=mask_TS,
            is_causal=mask_TS is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        out_BTD: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out_BTD

    def _rotate(self, x_BHTE: Tensor, first: int) -> Tensor:
        last, dtype = first + x_BHTE.shape[-2], x_BHTE.dtype
        left_BHTF, right_BHTF = x_BHTE.chunk(2, dim=-1)  # F: half of E
        turned_BHTE = torch.cat((-right_BHTF, left_BHTF), dim=-1)
        return x_BHTE * self.cos_TE[first:last].to(dtype) + turned_BHTE * self.sin_TE[first:last].to(dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(model.d_model, model.d_hidden)
        self.up_proj = _linear(model.d_model, model.d_hidden)
        self.down_proj = _linear(model.d_hidden, model.d_model)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))
        return out_BTD


class Head(nn.Module):
    """hidden_BTD -> logits_BTV"""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.lm_head = _linear(model.d_model, model.vocabulary)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.norm(hidden_BTD))
        return logits_BTV


MASKED = -100
"""A target that nothing is learned from, such as a token of a prompt: it counts neither in a loss nor as a token that
was trained. torch's cross_entropy and transformers have the same number for it."""


def trained_tokens(targets_BT: Tensor) -> int:
    """How many of the targets are learned from."""
    return int((targets_BT != MASKED).sum())


def loss_of(logits_BTV: Tensor, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats per trained token, a scalar, computed in fp32; `reduction`: their "mean" or their "sum"."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=MASKED, reduction=reduction
    )


def last_loss(run: config.Config, head: Callable[[Tensor], Tensor], hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy of what the last layer makes of hidden_BTD; about `train.logits_at_once` logits exist at once.

    More are computed in parts, and once more in the backward pass (Chen et al., arXiv 1604.06174).
    Our own head works on each position by itself, so they are cut anywhere; a user's last layer gets whole sequences.
    """
    parts = -(-targets_BT.numel() * run.model.vocabulary // run.train.logits_at_once)
    if parts <= 1:
        return loss_of(head(hidden_BTD), targets_BT)
    if run.model.layers is None:
        hidden_BTD, targets_BT = hidden_BTD.flatten(0, 1)[:, None], targets_BT.flatten()[:, None]
    size = -(-len(targets_BT) // min(parts, len(targets_BT)))

    def summed(part_BTD: Tensor, part_BT: Tensor) -> Tensor:
        return loss_of(head(part_BTD), part_BT, "sum")

    pairs = zip(torch.split(hidden_BTD, size), torch.split(targets_BT, size), strict=True)
    losses = [checkpoint(summed, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum() / (targets_BT != MASKED).sum()


def recomputed(run: config.Config, layers: Sequence[nn.Module], first: int) -> list[nn.Module]:
    """Layers [first, ...) as this run computes them: with `train.recompute` those between its first and last layer
    keep little for their backward pass."""
    if not run.train.recompute:
        return list(layers)
    last = len(parameters(run.model)) - 1
    return [Recomputed(one) if 0 < number < last else one for number, one in enumerate(layers, first)]


class Recomputed(nn.Module):
    """A layer that keeps nothing but its input for its backward pass, and computes the rest again there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = checkpoint(self.layer, hidden_BTD, use_reentrant=False)
        return out_BTD


def named_weights(layers: Sequence[nn.Module], depth: int, first: int = 0) -> dict[str, Tensor]:
    """The weights of layers [first, ...) of a model with so many blocks, under the names that Hugging Face's models
    have for them; they share their memory with the layers."""
    names = {}
    for number, layer in enumerate(layers, first):
        prefix = f"model.layers.{number - 1}." if 0 < number <= depth else "model."
        for name, tensor in layer.state_dict().items():
            names[name if name.startswith("lm_head.") else prefix + name] = tensor
    return names


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias)
    nn.init.normal_(linear.weight, std=0.02)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


@lru_cache(maxsize=4)  # all blocks have the same one, and their backward passes keep it
def _within_window(positions: int, window: int, device: torch.device) -> Tensor:
    """mask_TT: which positions each position attends to, the last `window` ones up to itself."""
    ones_TT = torch.ones(positions, positions, dtype=torch.bool, device=device)
    return ones_TT.tril().triu(1 - window)


def _users_layers(model: config.ModelConfig) -> list[nn.Module]:
    assert model.layers is not None
    module, colon, function = model.layers.partition(":")
    if not colon:
        raise UserError(f"model.layers expects package.module:function; got {model.layers!r}")
    try:
        layers = getattr(importlib.import_module(module), function)(model)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"model.layers: calling {model.layers} failed: {error}") from None
    if not isinstance(layers, list) or not layers or not all(isinstance(one, nn.Module) for one in layers):
        raise UserError(f"model.layers: {model.layers} must return a list of nn.Module")
    return layers

"""A Llama-style decoder, cut into layers: embedding, blocks, head.

RMSNorm, rotary positions, SwiGLU, grouped-query attention (Touvron et al., arXiv 2307.09288). A layer is an
`nn.Module` from one tensor to one tensor, and a model is a list of them, so a span is a slice of that list. The
names inside a layer are those of Hugging Face's Llama; `named_weights` adds the prefix. Other families have the same
names, and a few options more (model/families.py).

Shapes: B sequences, T positions, D width, H heads, K key-value heads, E channels of a head, V vocabulary, S positions
that are attended to.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from decentral.core import config
from decentral.core.errors import UserError
from decentral.model import lora, rotary, start_weights

LOGITS_AT_ONCE = 1 << 25  # tokens times vocabulary; the loss of more is computed part by part


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
    """The layers on this device, frozen weights in `train.weights`; engine/fragment.py does the same to what is
    trained."""
    if run.model.lora is not None:
        lora.convert(layers, getattr(torch, run.train.weights))
    return [layer.to(device) for layer in layers]


class Undrawn(BaseTorchFunctionMode):
    """Within it, layers are built and their weights keep whatever the memory holds, for others will take their place.

    To draw the initial weights takes most of the time of building a large model.
    """

    DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.trunc_normal_)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in self.DRAWS and kwargs:
            return kwargs["tensor"]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


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
    return [
        LayerSizes(
            matrices=tuple(shape.numel() for shape in own if len(shape) == 2),
            larger=tuple(shape.numel() for shape in own if len(shape) > 2),
            gains=tuple(shape.numel() for shape in own if len(shape) < 2),
        )
        for own in shapes
    ]


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
        yield block, Block(model, rotated=block - 1 not in model.block.unrotated)
    yield 0, Embedding(model)
    yield model.depth + 1, Head(model)


class Embedding(nn.Module):
    """tokens_BT -> hidden_BTD"""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocabulary, model.d_model)
        self.multiplier = model.block.embedding_multiplier
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD: Tensor = self.embed_tokens(tokens_BT)
        return hidden_BTD if self.multiplier == 1 else hidden_BTD * self.multiplier


class Block(nn.Module):
    """hidden_BTD -> hidden_BTD: attention, then a gated feed-forward, each added to what came in."""

    def __init__(self, model: config.ModelConfig, rotated: bool = True) -> None:
        """Build the block. `rotated`: its queries and keys know their positions."""
        super().__init__()
        self.norm_after, self.multiplier = model.options.norm_after, model.block.residual_multiplier
        if not self.norm_after:
            self.input_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.self_attn = Attention(model, rotated)
        self.post_attention_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.mlp = FeedForward(model)
        if self.norm_after:
            self.post_feedforward_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        for out in (self.self_attn.o_proj, self.mlp.down_proj):  # GPT-2: residual branches start small
            nn.init.normal_(out.weight, std=0.02 / (2 * model.depth) ** 0.5)

    def forward(self, hidden_BTD: Tensor, attend: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return what the next layer gets. `attend`: what stands in for `self_attn`, as it has kept keys and values."""
        attend = attend or self.self_attn
        if self.norm_after:
            hidden_BTD = self._sum(hidden_BTD, self.post_attention_layernorm(attend(hidden_BTD)))
            return self._sum(hidden_BTD, self.post_feedforward_layernorm(self.mlp(hidden_BTD)))
        hidden_BTD = self._sum(hidden_BTD, attend(self.input_layernorm(hidden_BTD)))
        return self._sum(hidden_BTD, self.mlp(self.post_attention_layernorm(hidden_BTD)))

    def _sum(self, hidden_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return torch.add(hidden_BTD, branch_BTD, alpha=self.multiplier)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (RoFormer, arXiv 2104.09864)."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, model: config.ModelConfig, rotated: bool = True) -> None:
        super().__init__()
        self.model, self.rotated = model, rotated
        self.heads, self.kv_heads, self.channels = model.n_heads, model.n_kv_heads, model.d_head
        self.window, self.scale = model.window, model.block.attention_multiplier
        bias = model.options.query_bias or model.block.attention_bias
        self.q_proj = _linear(model.d_model, model.d_queries, bias)
        self.k_proj = _linear(model.d_model, model.d_keys, bias)
        self.v_proj = _linear(model.d_model, model.d_keys, bias)
        self.o_proj = _linear(model.d_queries, model.d_model, model.block.attention_bias)
        normed = {"heads": (model.d_head, model.d_head), "all": (model.d_queries, model.d_keys)}
        self.norms_all = model.options.query_norm == "all"
        queries, keys = normed.get(model.options.query_norm, (0, 0))
        self.q_norm = nn.RMSNorm(queries, eps=model.norm_eps) if queries else nn.Identity()
        self.k_norm = nn.RMSNorm(keys, eps=model.norm_eps) if keys else nn.Identity()
        cos_TE, sin_TE = rotary.tables(model, model.context)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        T = hidden_BTD.shape[1]
        windowed = self.window is not None and self.window < T
        mask_TT = _within_window(T, self.window, hidden_BTD.device) if windowed else None
        q_BHTE, k_BKTE, v_BKTE = self.heads_of(hidden_BTD, self.cos_TE[:T], self.sin_TE[:T])
        return self.attend(q_BHTE, k_BKTE, v_BKTE, mask_TT)

    def heads_of(self, hidden_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries q_BHTE, keys k_BKTE and values v_BKTE, rotated by the angles of these tables."""
        q_BHTE = self._split(self.q_proj(hidden_BTD), self.q_norm)
        k_BKTE = self._split(self.k_proj(hidden_BTD), self.k_norm)
        v_BKTE = self._split(self.v_proj(hidden_BTD), nn.Identity())
        if self.rotated:
            q_BHTE, k_BKTE = _rotate(q_BHTE, cos_TE, sin_TE), _rotate(k_BKTE, cos_TE, sin_TE)
        return q_BHTE, k_BKTE, v_BKTE

    def _split(self, x_BTC: Tensor, norm: nn.Module) -> Tensor:
        """Return x_BHTE of x_BTC (C = H * E), normalised over all channels or within each head."""
        x_BTC = norm(x_BTC) if self.norms_all else x_BTC
        B, T = x_BTC.shape[:2]
        x_BTHE = x_BTC.view(B, T, -1, self.channels)
        x_BTHE = x_BTHE if self.norms_all else norm(x_BTHE)
        return x_BTHE.transpose(1, 2)

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
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        out_BTD: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out_BTD


def _rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate the first channels of each head, as many as the tables have; the rest stay."""
    dtype, channels = x_BHTE.dtype, cos_TE.shape[-1]
    turned_BHTE, rest_BHTE = x_BHTE[..., :channels], x_BHTE[..., channels:]
    left_BHTF, right_BHTF = turned_BHTE.chunk(2, dim=-1)  # F: half of E
    across_BHTE = torch.cat((-right_BHTF, left_BHTF), dim=-1)
    turned_BHTE = turned_BHTE * cos_TE.to(dtype) + across_BHTE * sin_TE.to(dtype)
    return torch.cat((turned_BHTE, rest_BHTE), dim=-1) if rest_BHTE.shape[-1] else turned_BHTE


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(model.d_model, model.d_hidden, model.block.mlp_bias)
        self.up_proj = _linear(model.d_model, model.d_hidden, model.block.mlp_bias)
        self.down_proj = _linear(model.d_hidden, model.d_model, model.block.mlp_bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))
        return out_BTD


class Head(nn.Module):
    """hidden_BTD -> logits_BTV"""

    def __init__(self, model: config.ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.lm_head = _linear(model.d_model, model.vocabulary)
        self.divisor = model.block.logits_scaling

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.norm(hidden_BTD))
        return logits_BTV if self.divisor == 1 else logits_BTV / self.divisor


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
    """Mean cross-entropy of what the last layer makes of hidden_BTD; about LOGITS_AT_ONCE logits exist at once.

    More are computed in parts, and once more in the backward pass (Chen et al., arXiv 1604.06174).
    Our own head works on each position by itself, so they are cut anywhere; a user's last layer gets whole sequences.
    """
    parts = -(-targets_BT.numel() * run.model.vocabulary // LOGITS_AT_ONCE)
    if parts <= 1:
        return loss_of(head(hidden_BTD), targets_BT)
    if run.model.layers is None:
        hidden_BTD, targets_BT = hidden_BTD.flatten(0, 1)[:, None], targets_BT.flatten()[:, None]
    size = -(-len(targets_BT) // min(parts, len(targets_BT)))

    def summed(part_BTD: Tensor, part_BT: Tensor) -> Tensor:
        return loss_of(head(part_BTD), part_BT, "sum")

    pairs = zip(torch.split(hidden_BTD, size), torch.split(targets_BT, size), strict=True)
    losses = [checkpoint(summed, part_BTD, part_BT, use_reentrant=False) for part_BTD, part_BT in pairs]
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

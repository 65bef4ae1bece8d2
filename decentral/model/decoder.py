"""A Llama-style decoder, cut into layers: embedding, blocks, head.

It has RMSNorm, rotary positions, SwiGLU and grouped-query attention (Touvron et al., arXiv 2307.09288). A layer is an
`nn.Module` from one tensor to one tensor, and a model is a list of layers, so a peer's span is a slice of that list.
The names inside a layer are those of Hugging Face's Llama; `named_weights` adds the prefix. Other families use the same
names, and have a few more options (`Family`). Start reading at `build`.

Shapes: B sequences, T positions, D width, H heads, K key-value heads, E channels of a head, V vocabulary, S positions
that are attended to.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from decentral.core import config
from decentral.core.errors import UserError
from decentral.model import lora, rotary, start_weights
from decentral.model.bottleneck import TokenFeatures
from decentral.model.undrawn import Undrawn

LOGITS_AT_ONCE = 1 << 25  # the loss of a micro-batch with more logits (tokens times vocabulary) is computed in parts


def build(
    model: config.ModelConfig, seed: int, first: int = 0, last: int | None = None, drawn: bool = True
) -> list[nn.Module]:
    """Return layers [first, last) with their initial weights, on the CPU. Arguments and errors as for `each`."""
    found = dict(each(model, seed, first, last, drawn))
    return [found[number] for number in sorted(found)]


def each(
    model: config.ModelConfig, seed: int, first: int = 0, last: int | None = None, drawn: bool = True
) -> Iterator[tuple[int, nn.Module]]:
    """Yield layers [first, last), each with its index and its initial weights, on the CPU, in a fixed order.

    The weights are read from the folder `model.from`, if there is one; otherwise they are sampled. With `model.lora`
    these weights are frozen, and adapters are added. All layers are built, so that all peers get the same weights for a
    layer: one layer at a time, or all layers at once if they are a user's own (`model.layers`).

    Args:
        model: The section `model` of the config.
        seed: The run's seed.
        first: Index of the first layer; 0 is the embedding.
        last: Index after the last layer; None: the model's last layer is included.
        drawn: False: leave trained weights uninitialised, since others will replace them; this saves most of the time.

    Raises:
        UserError: If `model.layers` does not name a function that returns modules.
        StartWeightsError: If the folder `model.from` is missing, or has other weights than the run's.
    """
    given = model.weights is not None or model.start_from is not None
    filled = drawn or model.lora is not None  # peers cannot send frozen weights to each other
    with torch.random.fork_rng(devices=[]), nullcontext() if filled and not given else Undrawn():
        torch.manual_seed(seed)
        if model.layers is not None:
            yield from list(enumerate(_users_layers(model)))[first:last]
            return
        for number, layer in _ours(model):
            if number in range(model.depth + 2)[first:last]:
                if filled and given:
                    start_weights.fill(model, named_weights([layer], model.depth, number))
                if model.lora is not None:
                    lora.freeze([layer])
                    with torch.random.fork_rng(devices=[]):  # later layers must not depend on the adapters
                        lora.adapt(layer, model.lora, seed, number)
                yield number, layer
            del layer  # free a layer that the caller does not keep before the next one is built


def placed(layers: Sequence[nn.Module], run: config.Config, device: torch.device) -> list[nn.Module]:
    """Move the layers to a device and return them; only frozen weights are converted to the dtype `train.weights`."""
    if run.model.lora is not None:
        lora.convert(layers, getattr(torch, run.train.weights))
    return [layer.to(device) for layer in layers]


def parameters(model: config.ModelConfig) -> list[int]:
    """Return the number of trained parameters of each layer, without allocating weights."""
    if model.layers is None:
        return [sum(one.matrices) + sum(one.gains) for one in sizes(model)]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return [sum(p.numel() for p in layer.parameters()) for layer in _users_layers(model)]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The number of parameters of each trained tensor of a layer, by kind of tensor."""

    matrices: tuple[int, ...]
    larger: tuple[int, ...] = ()
    gains: tuple[int, ...] = ()  # vectors: gains of norms, and biases


def sizes(model: config.ModelConfig) -> list[LayerSizes]:
    """Return the sizes of each layer's trained tensors, without allocating weights."""
    if model.lora is not None:
        nothing, block = LayerSizes(()), LayerSizes(tuple(model.block_factors))
        return [nothing, *[block] * model.depth, nothing]
    if model.layers is None:
        width, vocabulary = model.d_model, model.vocabulary
        block = LayerSizes(tuple(model.block_matrices), gains=tuple(model.block_vectors))
        embedding, head = vocabulary * model.d_written, vocabulary * width
        return [LayerSizes((embedding,)), *[block] * model.depth, LayerSizes((head,), gains=(width,))]
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
    """Return how many numbers per token a peer sends for each layer's input.

    These are 1 for the first layer (tokens), then the width, or fewer if the model has a bottleneck.
    """
    if model.layers is None:
        return [1] + [model.d_written] * (model.depth + 1)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        entering, found = torch.zeros(1, model.context, dtype=torch.int64), []
        for layer in _users_layers(model):
            found.append(entering.numel() // model.context)
            entering = layer(entering)
    return found


def _ours(model: config.ModelConfig) -> Iterator[tuple[int, nn.Module]]:
    """Yield each layer of the built-in model with its index. The order is fixed, since sampled weights depend on it."""
    for block in range(1, model.depth + 1):
        yield block, Block(model, rotated=block - 1 not in model.block.unrotated)
    yield 0, Embedding(model)
    yield model.depth + 1, Head(model)


class Embedding(nn.Module):
    """The first layer: tokens_BT -> hidden_BTD."""

    def __init__(self, model: config.ModelConfig) -> None:
        """Build the layer with sampled weights."""
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocabulary, model.d_written)
        self.multiplier = model.block.embedding_multiplier
        self.features = TokenFeatures(model) if model.bottleneck else None
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return hidden_BTD."""
        hidden_BTD: Tensor = self.embed_tokens(tokens_BT)
        if self.features is not None:
            return self.features(hidden_BTD, tokens_BT)  # type: ignore[no-any-return]
        return hidden_BTD if self.multiplier == 1 else hidden_BTD * self.multiplier


class Block(nn.Module):
    """A block, hidden_BTD -> hidden_BTD: attention, then a gated feed-forward, each added to its input."""

    def __init__(self, model: config.ModelConfig, rotated: bool = True) -> None:
        """Build the block with sampled weights. `rotated`: apply rotary positions to queries and keys."""
        super().__init__()
        self.norm_after, self.multiplier = model.options.norm_after, model.block.residual_multiplier
        self.kept = model.d_model - model.d_written  # channels that the block does not change
        if not self.norm_after:
            self.input_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.self_attn = Attention(model, rotated)
        self.post_attention_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.mlp = FeedForward(model)
        if self.norm_after:
            self.post_feedforward_layernorm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        for out in (self.self_attn.o_proj, self.mlp.down_proj):  # as in GPT-2, residual branches start small
            nn.init.normal_(out.weight, std=0.02 / (2 * model.depth) ** 0.5)

    def forward(self, hidden_BTD: Tensor, attend: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return hidden_BTD for the next layer. `attend`: replaces `self_attn`, for example with a key-value cache."""
        attend = attend or self.self_attn
        if self.norm_after:
            hidden_BTD = self._sum(hidden_BTD, self.post_attention_layernorm(attend(hidden_BTD)))
            return self._sum(hidden_BTD, self.post_feedforward_layernorm(self.mlp(hidden_BTD)))
        hidden_BTD = self._sum(hidden_BTD, attend(self.input_layernorm(hidden_BTD)))
        return self._sum(hidden_BTD, self.mlp(self.post_attention_layernorm(hidden_BTD)))

    def _sum(self, hidden_BTD: Tensor, branch_BTK: Tensor) -> Tensor:
        branch_BTD = F.pad(branch_BTK, (0, self.kept)) if self.kept else branch_BTK
        return torch.add(hidden_BTD, branch_BTD, alpha=self.multiplier)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (RoFormer, arXiv 2104.09864)."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, model: config.ModelConfig, rotated: bool = True) -> None:
        """Build the projections with sampled weights. `rotated`: apply rotary positions to queries and keys."""
        super().__init__()
        self.model, self.rotated = model, rotated
        self.heads, self.kv_heads, self.channels = model.n_heads, model.n_kv_heads, model.d_head
        self.window, self.scale = model.window, model.block.attention_multiplier
        bias = model.options.query_bias or model.block.attention_bias
        self.q_proj = _linear(model.d_model, model.d_queries, bias)
        self.k_proj = _linear(model.d_model, model.d_keys, bias)
        self.v_proj = _linear(model.d_model, model.d_keys, bias)
        self.o_proj = _linear(model.d_queries, model.d_written, model.block.attention_bias)
        normed = {"heads": (model.d_head, model.d_head), "all": (model.d_queries, model.d_keys)}
        self.norms_all = model.options.query_norm == "all"
        queries, keys = normed.get(model.options.query_norm, (0, 0))
        self.q_norm = nn.RMSNorm(queries, eps=model.norm_eps) if queries else nn.Identity()
        self.k_norm = nn.RMSNorm(keys, eps=model.norm_eps) if keys else nn.Identity()
        cos_TE, sin_TE = rotary.tables(model, model.context)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return out_BTD. Each position attends to itself and earlier positions, within the window if one is set."""
        T = hidden_BTD.shape[1]
        windowed = self.window is not None and self.window < T
        mask_TT = _within_window(T, self.window, hidden_BTD.device) if windowed else None
        q_BHTE, k_BKTE, v_BKTE = self.heads_of(hidden_BTD, self.cos_TE[:T], self.sin_TE[:T])
        return self.attend(q_BHTE, k_BKTE, v_BKTE, mask_TT)

    def heads_of(self, hidden_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries q_BHTE, keys k_BKTE and values v_BKTE; the tables rotate the queries and keys."""
        q_BHTE = self._split(self.q_proj(hidden_BTD), self.q_norm)
        k_BKTE = self._split(self.k_proj(hidden_BTD), self.k_norm)
        v_BKTE = self._split(self.v_proj(hidden_BTD))
        if self.rotated:
            cos_TE, sin_TE = cos_TE.to(q_BHTE.dtype), sin_TE.to(q_BHTE.dtype)
            q_BHTE, k_BKTE = _rotate(q_BHTE, cos_TE, sin_TE), _rotate(k_BKTE, cos_TE, sin_TE)
        return q_BHTE, k_BKTE, v_BKTE

    def _split(self, x_BTC: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Normalise x_BTC over all channels or over each head's channels, and return it as x_BHTE (C = H * E)."""
        if norm is not None and self.norms_all:
            x_BTC = norm(x_BTC)
        B, T = x_BTC.shape[:2]
        x_BTHE = x_BTC.view(B, T, -1, self.channels)
        if norm is not None and not self.norms_all:
            x_BTHE = norm(x_BTHE)
        return x_BTHE.transpose(1, 2)

    def attend(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask_TS: Tensor | None) -> Tensor:
        """Return out_BTD, the attention of T queries over S positions.

        Args:
            q_BHTE: Queries.
            k_BKSE: Keys.
            v_BKSE: Values.
            mask_TS: True where a query attends to a position. None: T equals S, and each query attends to its own
                position and all earlier positions; or T is 1, and the query attends to all S positions.
        """
        out_BHTE = F.scaled_dot_product_attention(
            q_BHTE,
            k_BKSE,
            v_BKSE,
            attn_mask=mask_TS,
            is_causal=mask_TS is None and q_BHTE.shape[2] > 1,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        out_BTD: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out_BTD


def _rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Return x_BHTE with the first channels of each head rotated: as many channels as the tables have columns."""
    channels = cos_TE.shape[-1]
    turned_BHTE, rest_BHTE = x_BHTE[..., :channels], x_BHTE[..., channels:]
    left_BHTF, right_BHTF = turned_BHTE.chunk(2, dim=-1)  # F is half the number of rotated channels
    across_BHTE = torch.cat((-right_BHTF, left_BHTF), dim=-1)
    turned_BHTE = turned_BHTE * cos_TE + across_BHTE * sin_TE
    return torch.cat((turned_BHTE, rest_BHTE), dim=-1) if rest_BHTE.shape[-1] else turned_BHTE


class FeedForward(nn.Module):
    """The gated feed-forward of a block: SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: config.ModelConfig) -> None:
        """Build the projections with sampled weights."""
        super().__init__()
        self.gate_proj = _linear(model.d_model, model.d_hidden, model.block.mlp_bias)
        self.up_proj = _linear(model.d_model, model.d_hidden, model.block.mlp_bias)
        self.down_proj = _linear(model.d_hidden, model.d_written, model.block.mlp_bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return out_BTD = down(silu(gate(hidden)) * up(hidden))."""
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))
        return out_BTD


class Head(nn.Module):
    """The last layer: hidden_BTD -> logits_BTV."""

    def __init__(self, model: config.ModelConfig) -> None:
        """Build the layer with sampled weights."""
        super().__init__()
        self.norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.lm_head = _linear(model.d_model, model.vocabulary)
        self.divisor = model.block.logits_scaling

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits_BTV."""
        logits_BTV: Tensor = self.lm_head(self.norm(hidden_BTD))
        return logits_BTV if self.divisor == 1 else logits_BTV / self.divisor


MASKED = -100
"""The value of a target that the loss leaves out, such as a token of a prompt. `trained_tokens` does not count it.
torch's cross_entropy and transformers use the same value."""


def trained_tokens(targets_BT: Tensor) -> int:
    """Return the number of targets that count for the loss: those that are not MASKED."""
    return int((targets_BT != MASKED).sum())


def loss_of(logits_BTV: Tensor, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats over the targets that are not MASKED, a scalar, computed in fp32.

    Args:
        logits_BTV: Logits of any floating-point dtype.
        targets_BT: Target tokens, or MASKED.
        reduction: "mean" over the targets that are not MASKED, or "sum".
    """
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=MASKED, reduction=reduction
    )


def last_loss(run: config.Config, head: Callable[[Tensor], Tensor], hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Compute the last layer, and return the mean cross-entropy in nats.

    An input with more than LOGITS_AT_ONCE logits is computed in parts, of which only one is in memory at a time. The
    backward pass computes each part again (Chen et al., arXiv 1604.06174).
    The built-in head treats each position independently, so its input may be cut anywhere; a user's last layer gets
    whole sequences.

    Args:
        run: The run's config.
        head: The last layer, hidden_BTD -> logits_BTV.
        hidden_BTD: Input of the last layer.
        targets_BT: Target tokens, or MASKED.
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
    """Return the layers for training: with `train.recompute`, each block is wrapped in `Recomputed`.

    Args:
        run: The run's config.
        layers: Consecutive layers of the model.
        first: Index in the model of the first of `layers`.
    """
    if not run.train.recompute:
        return list(layers)
    last = len(parameters(run.model)) - 1
    return [Recomputed(one) if 0 < number < last else one for number, one in enumerate(layers, first)]


class Recomputed(nn.Module):
    """A layer that stores only its input for the backward pass, which computes the layer's forward pass again."""

    def __init__(self, layer: nn.Module) -> None:
        """Wrap a layer."""
        super().__init__()
        self.layer = layer

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the layer's output."""
        out_BTD: Tensor = checkpoint(self.layer, hidden_BTD, use_reentrant=False)
        return out_BTD


def named_weights(layers: Sequence[nn.Module], depth: int, first: int = 0) -> dict[str, Tensor]:
    """Return the layers' weights by their names in Hugging Face's models, as tensors that share the layers' memory.

    Args:
        layers: Consecutive layers of the model.
        depth: Number of blocks of the whole model.
        first: Index of the first of these layers in the model; 0 is the embedding.
    """
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


@lru_cache(maxsize=4)
def _within_window(positions: int, window: int, device: torch.device) -> Tensor:
    """Return mask_TT, which is True where a position attends: to itself and the `window - 1` positions before it."""
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
        raise UserError(f"model.layers: calling {model.layers} failed: {error}; correct this function") from None
    if not isinstance(layers, list) or not layers or not all(isinstance(one, nn.Module) for one in layers):
        raise UserError(f"model.layers: {model.layers} must return a non-empty list of nn.Module")
    return layers

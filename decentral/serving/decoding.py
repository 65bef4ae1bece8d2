"""Generate tokens one at a time with a key-value cache, so that a new token costs the work of one position.

    prompt -> read -> logits -> sampled token -> read -> ...

Start reading at `generate`. A text has at most `most_positions` tokens: as many as the model's folder allows, or as
the model was trained with. When a text reaches this length, its last `most_positions / 2` tokens are read again from
position 0 on, and earlier tokens are forgotten: cached keys are rotated for their positions, so they cannot be moved.
With `dynamic` and `longrope` scaling the rotary angles change when a text becomes longer than the texts of the model's
first training; then the whole text is read again.

Shapes: B = 1 sequence, T positions read now, S cached positions, H query heads, K key-value heads, E channels of a
head, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from decentral.core.config import ModelConfig
from decentral.core.errors import UserError
from decentral.core.sampling import Sampling
from decentral.engine import memory
from decentral.engine.step import Device
from decentral.model import decoder, rotary

READ_AT_ONCE = 512  # longer prompts are read in passes of this many tokens, to bound the memory of the attention mask


def generate(
    layers: Sequence[nn.Module], prompt: Sequence[int], sampling: Sampling, device: Device
) -> Iterator[int | None]:
    """Yield `sampling.tokens` tokens that continue a prompt of at least one token.

    The layers are converted in place to the device and its dtype.
    While a long text is read, yield None after every READ_AT_ONCE tokens, so that the caller can do other work.

    Raises:
        UserError: If the model's logits are not finite.
    """
    reader = CachedReader(layers, len(prompt) + sampling.tokens, device)
    chance = torch.Generator().manual_seed(sampling.seed)
    seen, unread, begin = list(prompt), list(prompt), 0  # the model's cache begins with token number `begin` of `seen`
    for _ in range(sampling.tokens):
        if len(seen) - begin > reader.most:
            begin = len(seen) - max(1, reader.most // 2)
        if reader.length + len(unread) > len(seen) - begin or len(seen) - begin > reader.reach:
            reader.clear(len(seen) - begin)
            unread = seen[begin:]
        while len(unread) > READ_AT_ONCE:
            reader.read(unread[:READ_AT_ONCE])
            unread = unread[READ_AT_ONCE:]
            yield None
        token = sample(reader.read(unread)[: sampling.below], sampling, chance)
        unread = [token]
        seen.append(token)
        yield token


def use_one_thread() -> None:
    """Make torch compute with one thread, so that the other cores stay free for training."""
    torch.set_num_threads(1)


def check_memory(
    model: ModelConfig, prompt: int, tokens: int, memory_bytes: int, dtype: torch.dtype, readers: int = 1
) -> None:
    """Raise UserError if a device lacks the memory for the weights, key-value caches and a prompt's activations.

    This allocates nothing, so it is safe even if a stranger chose the model's shape.

    Args:
        model: The model's shape.
        prompt: Number of tokens of the prompt.
        tokens: Number of tokens to generate.
        memory_bytes: Memory of the device in bytes.
        dtype: The dtype of weights and caches.
        readers: Number of texts that are generated at the same time, each with a key-value cache.

    Raises:
        UserError: If the memory is too small.
    """
    kept, at_once = min(prompt + tokens, model.most_positions), min(prompt, READ_AT_ONCE)
    passing = max(memory.activation_bytes(model)[1:-1]) + memory.WEIGHT_BYTES * model.n_heads * kept
    keys_and_values = 2 * (model.depth * model.d_keys + model.d_rotary) * kept * readers
    needed = dtype.itemsize * (sum(model.layer_parameters) + keys_and_values) + at_once * passing
    if needed > memory_bytes:
        size = f"{sum(model.layer_parameters)} parameters and a text of {kept} tokens"
        raise UserError(f"model: {size} take {needed} bytes; the device has {memory_bytes}; try fewer --max-tokens")


def sample(logits_V: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """Sample a token by temperature and nucleus sampling (Holtzman et al., arXiv 1904.09751, section 3.1).

    Args:
        logits_V: (vocabulary,) fp32 on the CPU.
        sampling: `temperature` 0 selects the token with the largest logit; `top_p` is the probability of the nucleus.
        chance: The random number generator.

    Raises:
        UserError: If the logits are not finite.
    """
    if not torch.isfinite(logits_V).all():
        raise UserError("the model's logits are not finite; use weights of another peer, or of several peers")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V - logits_V.max()).double() / sampling.temperature  # at most 0, so exp cannot overflow
    sorted_V, tokens_V = scaled_V.softmax(dim=0).sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(dim=0) - sorted_V
    sorted_V[1:][before_V[1:] >= sampling.top_p] = 0.0
    return int(tokens_V[torch.multinomial(sorted_V, 1, generator=chance)])


class CachedReader:
    """The built-in model's layers with a key-value cache of all positions that have been read."""

    def __init__(self, layers: Sequence[nn.Module], positions: int, device: Device) -> None:
        """Convert the layers to the device and its dtype, and allocate the cache.

        Args:
            layers: Embedding, decoder blocks and head, in this order; converted in place. So all readers of these
                layers share their weights, which are converted only once.
            positions: Size of the cache in tokens; the model's `most_positions` is the upper limit.
            device: The device on which the layers compute.
        """
        self.embedding, *blocks, self.head = (layer.to(device.device, device.dtype).eval() for layer in layers)
        self.blocks = [block for block in blocks if isinstance(block, decoder.Block)]
        assert len(self.blocks) == len(blocks), "the layers are the built-in model's"
        self.device, self.model = device, self.blocks[0].self_attn.model
        self.most = min(positions, self.model.most_positions)
        self.kept = [KeysAndValues(block.self_attn, self.most, device) for block in self.blocks]
        self.clear(0)

    def clear(self, positions: int) -> None:
        """Empty the cache, and compute rotary angles for a text of at least `positions` tokens."""
        self.length, self.reach = 0, rotary.reach(self.model, positions, self.most)
        tables = rotary.tables(self.model, self.reach)
        self.cos_TE, self.sin_TE = (table_TE.to(self.device.device, self.device.dtype) for table_TE in tables)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the next tokens of the text; return logits_V for the token after them, fp32 on the CPU."""
        tokens_BT = torch.tensor([tokens], device=self.device.device)
        logits_BTV: Tensor = self.head(self._through(tokens_BT)[:, -1:])
        return logits_BTV[0, 0].float().cpu()

    def _through(self, tokens_BT: Tensor) -> Tensor:
        """Return hidden_BTD of the last block for these tokens, and cache their keys and values."""
        first, last = self.length, self.length + tokens_BT.shape[1]
        angles = self.cos_TE[first:last], self.sin_TE[first:last]
        mask_TS = seen_from(first, last, self.model.window, tokens_BT.device)
        hidden_BTD: Tensor = self.embedding(tokens_BT)
        for block, kept in zip(self.blocks, self.kept, strict=True):
            hidden_BTD = block(hidden_BTD, partial(kept.attend, first=first, angles=angles, mask_TS=mask_TS))
        self.length = last
        return hidden_BTD


class KeysAndValues:
    """One block's attention, with its cache of keys and values."""

    def __init__(self, attention: decoder.Attention, positions: int, device: Device) -> None:
        """Allocate a cache for `positions` tokens on the device."""
        self.attention = attention
        shape = (1, attention.kv_heads, positions, attention.channels)
        self.keys_BKSE = torch.zeros(shape, dtype=device.dtype, device=device.device)
        self.values_BKSE = torch.zeros(shape, dtype=device.dtype, device=device.device)

    def attend(self, hidden_BTD: Tensor, first: int, angles: tuple[Tensor, Tensor], mask_TS: Tensor | None) -> Tensor:
        """Return the attention's output_BTD for positions [first, first + T), and cache their keys and values.

        Args:
            hidden_BTD: The block's normalised input at these positions.
            first: The first of these positions; the cache has all positions before it.
            angles: cos_TE and sin_TE of the rotary angles at these positions.
            mask_TS: The result of `seen_from`.
        """
        q_BHTE, k_BKTE, v_BKTE = self.attention.heads_of(hidden_BTD, angles[0], angles[1])
        last = first + hidden_BTD.shape[1]
        self.keys_BKSE[:, :, first:last] = k_BKTE
        self.values_BKSE[:, :, first:last] = v_BKTE
        keys_BKSE, values_BKSE = self.keys_BKSE[:, :, :last], self.values_BKSE[:, :, :last]
        return self.attention.attend(q_BHTE, keys_BKSE, values_BKSE, mask_TS)


def seen_from(first: int, last: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return mask_TS: True where position t of [first, last) attends to position s of [0, last).

    A position attends to itself and all earlier positions; with `window`, only to the last `window` of these.

    Returns:
        The mask; None if `Attention.attend` needs no mask. It needs none if `first` is 0 or there is only one position,
        unless `window` is less than `last`.
    """
    if (first == 0 or last - first == 1) and (window is None or last <= window):
        return None
    own_T1 = torch.arange(first, last, device=device)[:, None]
    others_1S = torch.arange(last, device=device)[None]
    seen_TS = others_1S <= own_T1
    return seen_TS if window is None else seen_TS & (others_1S > own_T1 - window)

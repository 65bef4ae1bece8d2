"""Generate tokens one at a time: a layer's keys and values are kept, so that a new token costs one position's work.

    prompt -> read -> logits -> drawn token -> read -> ...

A model reads `most_positions` at once: those that its folder names, or those that it is trained with. When they are all
taken, the last half of them is read again from position 0 on, and what was before it is forgotten. (Angles are fixed to
positions, so kept keys cannot be moved.) With `dynamic` and `longrope` scaling the angles change when a text grows
beyond the positions of the first training; then the whole text is read again.

Shapes: B = 1 sequence, T positions that are read, S positions that are kept, K key-value heads, E channels of a head,
D width, V vocabulary.
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

READ_AT_ONCE = 512  # positions of a prompt: their attention mask has so many rows


def generate(
    layers: Sequence[nn.Module], prompt: Sequence[int], sampling: Sampling, device: Device
) -> Iterator[int | None]:
    """Yield `sampling.tokens` tokens that continue `prompt` (at least one token); move the layers to the device.

    Yields None after each part of READ_AT_ONCE tokens of a long prompt, so that the caller can stop in between.

    Raises:
        UserError: If the weights give numbers that are not finite.
    """
    reader = CachedReader(layers, len(prompt) + sampling.tokens, device)
    chance = torch.Generator().manual_seed(sampling.seed)
    seen, unread, begin = list(prompt), list(prompt), 0  # where the text begins that the reader knows
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
        token = draw(reader.read(unread)[: sampling.below], sampling, chance)
        unread = [token]
        seen.append(token)
        yield token


def use_one_thread() -> None:
    """From now on torch computes in this thread alone, and leaves the other cores to those who train."""
    torch.set_num_threads(1)


def check_memory(model: ModelConfig, prompt: int, tokens: int, memory_bytes: int, readers: int = 1) -> None:
    """Raises UserError if a device has no room for the weights in fp32 and for what so many tokens take of each reader.
    A model from a stranger may be small and have very wide heads. This is arithmetic: nothing is made yet."""
    kept, at_once = min(prompt + tokens, model.most_positions), min(prompt, READ_AT_ONCE)
    passing = max(memory.activation_bytes(model)[1:-1]) + memory.WEIGHT_BYTES * model.n_heads * kept
    keys_and_values = 2 * (model.depth * model.d_keys + model.d_rotary) * kept * readers
    needed = memory.WEIGHT_BYTES * (sum(model.layer_parameters) + keys_and_values) + at_once * passing
    if needed > memory_bytes:
        size = f"{sum(model.layer_parameters)} parameters and {kept} positions"
        raise UserError(f"model: {size} take {needed} bytes, and the device has {memory_bytes}; try fewer --max-tokens")


def draw(logits_V: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """A token by temperature and nucleus sampling (Holtzman et al., arXiv 1904.09751). `logits_V`: fp32 on the CPU.

    Raises UserError where they are not finite.
    """
    if not torch.isfinite(logits_V).all():
        raise UserError("these weights give numbers that are not finite; take those of another peer, or of several")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V - logits_V.max()).double() / sampling.temperature  # the largest is 0: no overflow
    sorted_V, tokens_V = scaled_V.softmax(dim=0).sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(dim=0) - sorted_V
    sorted_V[1:][before_V[1:] >= sampling.top_p] = 0.0  # the likeliest token stays, however small top_p is
    return int(tokens_V[torch.multinomial(sorted_V, 1, generator=chance)])


class CachedReader:
    """The built-in model's layers, and the keys and values of the positions that they have read."""

    def __init__(self, layers: Sequence[nn.Module], positions: int, device: Device) -> None:
        """Move the layers to the device. `positions`: tokens to read at most, within `model.most_positions`."""
        self.embedding, *blocks, self.head = (layer.to(device.device).eval() for layer in layers)
        self.blocks = [block for block in blocks if isinstance(block, decoder.Block)]
        assert len(self.blocks) == len(blocks), "these are the built-in model's layers"
        self.device, self.model = device, self.blocks[0].self_attn.model
        self.most = min(positions, self.model.most_positions)
        self.kept = [KeysAndValues(block.self_attn, self.most, device) for block in self.blocks]
        self.clear(0)

    def clear(self, positions: int) -> None:
        """Forget all that was read. `positions`: how many are read next."""
        self.length, self.reach = 0, rotary.reach(self.model, positions, self.most)
        tables = rotary.tables(self.model, self.reach)
        self.cos_TE, self.sin_TE = (table_TE.to(self.device.device) for table_TE in tables)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads the next positions' tokens. Gives logits_V of the one after them, fp32 on the CPU."""
        tokens_BT = torch.tensor([tokens], device=self.device.device)
        with self.device.autocast():
            logits_BTV: Tensor = self.head(self._through(tokens_BT)[:, -1:])
        return logits_BTV[0, 0].float().cpu()

    def _through(self, tokens_BT: Tensor) -> Tensor:
        """Return the last block's output for these tokens, and keep their keys and values."""
        first, last = self.length, self.length + tokens_BT.shape[1]
        angles = self.cos_TE[first:last], self.sin_TE[first:last]
        hidden_BTD: Tensor = self.embedding(tokens_BT)
        for block, kept in zip(self.blocks, self.kept, strict=True):
            hidden_BTD = block(hidden_BTD, partial(kept.attend, first=first, angles=angles))
        self.length = last
        return hidden_BTD


class KeysAndValues:
    """One block's attention, and the keys and values of all positions that it has seen."""

    def __init__(self, attention: decoder.Attention, positions: int, device: Device) -> None:
        self.attention = attention
        shape = (1, attention.kv_heads, positions, attention.channels)
        self.keys_BKSE = torch.zeros(shape, dtype=device.dtype, device=device.device)
        self.values_BKSE = torch.zeros(shape, dtype=device.dtype, device=device.device)

    def attend(self, hidden_BTD: Tensor, first: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return what the attention gives for positions [first, first + T), which it keeps; `angles`: their tables."""
        q_BHTE, k_BKTE, v_BKTE = self.attention.heads_of(hidden_BTD, angles[0], angles[1])
        last = first + hidden_BTD.shape[1]
        self.keys_BKSE[:, :, first:last] = k_BKTE
        self.values_BKSE[:, :, first:last] = v_BKTE
        mask_TS = seen_from(first, last, self.attention.window, hidden_BTD.device)
        keys_BKSE, values_BKSE = self.keys_BKSE[:, :, :last], self.values_BKSE[:, :, :last]
        return self.attention.attend(q_BHTE.to(keys_BKSE.dtype), keys_BKSE, values_BKSE, mask_TS)


def seen_from(first: int, last: int, window: int | None, device: torch.device) -> Tensor:
    """mask_TS: which of the positions [0, last) each of [first, last) attends to."""
    own_T1 = torch.arange(first, last, device=device)[:, None]
    others_1S = torch.arange(last, device=device)[None]
    seen_TS = others_1S <= own_T1
    return seen_TS if window is None else seen_TS & (others_1S > own_T1 - window)

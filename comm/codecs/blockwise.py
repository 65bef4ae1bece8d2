"""Blockwise quantisation: pure functions from fp32 vectors to bytes and back.

    codec   levels      block   bytes for n numbers          error within a block of largest magnitude a
    q1      -7, 7       128     ceil(n/8) + 2 ceil(n/128)    at most a, s = bf16_down(mean magnitude / 7)
    q4      -7..7       128     ceil(n/2) + 2 ceil(n/128)    at most s/2, s = bf16_up(a/7)
    int8    -127..127   256     n + 2 ceil(n/256)            at most s/2, s = bf16_up(a/127)
    bf16                        2 n                          a relative 2^-9
    fp32                        4 n                          none

Scales are bf16 rounded up: bf16 has fp32's range, so the small deltas of a late training stage do not underflow
as they do in fp16; rounding up keeps the largest number of a block within the levels. The scales come first,
then the levels. Bytes that no encoder can have written, or that are not finite, are refused.

q1 keeps a sign and the block's mean magnitude (EF-signSGD: Karimireddy et al., arXiv 1901.09847), so its error is as
large as its numbers: it is for what feeds its error back. The levels are bits, the first number's the highest of its
byte (numpy.packbits), set for a number that is not below zero. Its values are +-7 s, which are q4's with the same
scale: so a q1 blob is widened into a q4 blob, exactly, and narrowed back (`widened`, `narrowed`). Its scale is the same
whatever the order of the sum: the sum is one of integers, of magnitudes rounded to 2^-15 of the largest power of two
that is not above a. It is rounded down, so that no value overflows, and is zero where a is below 2^-126.

CODECS has the formulas, in torch, for vectors on any device. What is in host memory takes the compiled versions of
them (comm/codecs/compiled_blocks.py), which give the same bits; numbers that are not finite have no bytes to agree on
but those of the formulas, and partners refuse them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decentral.comm.codecs import compiled_blocks
from decentral.comm.codecs.compiled_blocks import Bytes
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason


class Codec(Protocol):
    """The formulas of one codec."""

    def size(self, n: int) -> int:
        """Return the bytes that n numbers take."""

    def pack(self, values: Tensor) -> bytes:
        """Return the bytes of fp32 [n] on any device."""

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        """Return fp32 [n] of those bytes."""


def encode(codec: str, values: Tensor) -> bytes:
    """The bytes of fp32 [n], on any device. Raises KeyError for an unknown codec."""
    if codec in COMPILED_PACK and values.device.type == "cpu" and values.dtype == torch.float32:
        blob = np.empty(size(codec, values.numel()), np.uint8)
        if COMPILED_PACK[codec](values.detach().contiguous().numpy(), blob) < compiled_blocks.INFINITE:
            return blob.tobytes()
    return CODECS[codec].pack(values)


def size(codec: str, elements: int) -> int:
    """The bytes that `elements` numbers take on the wire."""
    return CODECS[codec].size(elements)


def decode(codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
    """fp32 [elements] on the CPU. Raises ProtocolError for an unknown codec, a wrong size, or numbers not finite.

    Of fp32 in memory that can be written it is that memory: a large state is not copied once more.
    """
    if codec not in CODECS:
        raise ProtocolError(Reason.CODEC, f"{codec!r} is none of {', '.join(CODECS)}")
    read = as_bytes(codec, blob, elements)
    if codec == "fp32" and not memoryview(blob).readonly:
        values = torch.frombuffer(blob, dtype=torch.float32) if elements else torch.empty(0)
    elif codec in COMPILED_UNPACK:
        unpacked = np.empty(elements, np.float32)
        refuse(codec, COMPILED_UNPACK[codec](read, unpacked))
        return torch.from_numpy(unpacked)
    else:
        values = CODECS[codec].unpack(read, elements)
    if compiled_blocks.largest(values.numpy()) >= compiled_blocks.INFINITE:
        refuse(codec, compiled_blocks.NOT_FINITE)
    return values


def decode_by_formula(codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
    """As `decode`, of a known codec and without machine code."""
    values = CODECS[codec].unpack(as_bytes(codec, blob, elements), elements)
    if not bool(torch.isfinite(values).all()):
        refuse(codec, compiled_blocks.NOT_FINITE)
    return values


def warm_up() -> None:
    """Compiles what is compiled, so that nothing is while training. Seconds where numba's cache is empty."""
    for codec in CODECS:
        decode(codec, encode(codec, torch.zeros(1)), 1)
    narrowed(widened(encode("q1", torch.zeros(1)), 1), 1)


def widened(blob: bytes | memoryview, elements: int) -> bytes:
    """The q4 bytes of the numbers in a q1 blob. Raises ProtocolError for a blob of the wrong size.

    A scale that no encoder writes stays as it is: whoever reads the q4 bytes refuses it.
    """
    signs = as_bytes("q1", blob, elements)[_scale_bytes(elements) :]
    levels = np.empty(len(signs), np.uint32)
    compiled_blocks.widen(signs, levels)
    pairs = levels.view(np.uint8)[: math.ceil(elements / 2)]
    if elements % 2:
        pairs[-1] = pairs[-1] & 15 | 128  # the level beyond the last is zero
    return _with_scales_of(blob, elements, pairs)


def narrowed(blob: bytes | memoryview, elements: int) -> bytes:
    """The q1 bytes of a q4 blob whose levels are 7 and -7, or zero under a scale of zero."""
    pairs = as_bytes("q4", blob, elements)[_scale_bytes(elements) :]
    levels, signs = np.zeros(math.ceil(elements / 8), np.uint32), np.empty(math.ceil(elements / 8), np.uint8)
    levels.view(np.uint8)[: len(pairs)] = pairs
    compiled_blocks.narrow(levels, signs)
    if elements % 8:
        signs[-1] &= 0x100 - (1 << (8 - elements % 8))  # no bit is set beyond the last number
    return _with_scales_of(blob, elements, signs)


def _scale_bytes(elements: int) -> int:
    """Of a q1 or a q4 blob."""
    return 2 * math.ceil(elements / BLOCKS["q4"])


def _with_scales_of(blob: bytes | memoryview, elements: int, levels: Bytes) -> bytes:
    return bytes(blob[: _scale_bytes(elements)]) + levels.tobytes()


def as_bytes(codec: str, blob: bytes | memoryview, elements: int) -> Bytes:
    """The blob as an array that cannot be written. Raises ProtocolError unless it has the size of so many numbers."""
    read, expected = np.frombuffer(blob, np.uint8) if blob else np.empty(0, np.uint8), size(codec, elements)
    if elements < 0 or len(read) != expected:
        raise ProtocolError(Reason.SHAPE, f"{elements} numbers in {codec} take {expected} bytes; got {len(read)}")
    read.flags.writeable = False
    return read


def stretches(codec: str, blob: bytes | memoryview, elements: int, begins: Sequence[int], numbers: int) -> bytes:
    """Of a blockwise codec's bytes: those of the numbers [begin, begin + numbers) for each begin, as a blob of theirs.

    Each begin, and `numbers`, is a multiple of the codec's block. Raises ProtocolError for a blob of the wrong size.
    """
    read, block = as_bytes(codec, blob, elements), BLOCKS[codec]
    scales, levels = read[: 2 * math.ceil(elements / block)], read[2 * math.ceil(elements / block) :]
    each = size(codec, numbers) - 2 * (numbers // block)  # bytes of levels
    places = [(begin // block * 2, begin // numbers * each) for begin in begins]
    parts = [scales[at : at + 2 * (numbers // block)] for at, _ in places]
    parts += [levels[at : at + each] for _, at in places]
    return np.concatenate(parts).tobytes()


def refuse(codec: str, fault: int) -> None:
    """Raises ProtocolError if `fault`, what a compiled function found wrong with a section, is not zero."""
    if fault & compiled_blocks.BAD_LEVEL:
        raise ProtocolError(Reason.LEVELS, f"a {codec} section holds a level that is none, or a negative scale")
    if fault & compiled_blocks.NOT_FINITE:
        raise ProtocolError(Reason.NAN, f"a {codec} section holds numbers that are not finite")


@dataclass(frozen=True, slots=True)
class LevelCodec:
    """Levels of 4 or 8 bits, and a bf16 scale for each block."""

    bits: int
    block: int

    @property
    def highest(self) -> int:
        """The highest level; the lowest one is as far below zero."""
        return (1 << (self.bits - 1)) - 1

    def size(self, n: int) -> int:
        return self._scale_bytes(n) + math.ceil(n * self.bits / 8)

    def pack(self, values: Tensor) -> bytes:
        padded, highest = _blocks(values, self.block), self.highest
        peaks = padded.abs().amax(dim=1)
        scales = _bf16_up(peaks / torch.full_like(peaks, highest))  # CUDA multiplies by a plain number's reciprocal
        divisor = scales.float().masked_fill(scales == 0, 1.0)
        levels = (padded / divisor[:, None]).round_().clamp_(-highest, highest).to(torch.int8)
        own = levels.view(-1)[: values.numel()].cpu()
        return _bytes(scales.cpu()) + _bytes(_fold_pairs(own) if self.bits == 4 else own)

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        cut = self._scale_bytes(n)
        scales, read = _tensor(blob[:cut], torch.bfloat16), _tensor(blob[cut:], torch.uint8)
        levels = _unfold_pairs(read)[:n] if self.bits == 4 else read.view(torch.int8)
        if n and (int(levels.min()) < -self.highest or bool((scales.isfinite() & (scales < 0)).any())):
            raise ProtocolError(Reason.LEVELS, f"outside -{self.highest}..{self.highest}, or a negative scale")
        return (_blocks(levels.float(), self.block) * scales.float()[:, None]).view(-1)[:n]

    def _scale_bytes(self, n: int) -> int:
        return 2 * math.ceil(n / self.block)


def _blocks(values: Tensor, block: int) -> Tensor:
    """The numbers as rows of one block each, the last one filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)


def _bf16_up(values: Tensor) -> Tensor:
    """The smallest bf16 that is not below each (non-negative) value."""
    rounded = values.to(torch.bfloat16)
    low = rounded.float() < values
    return torch.where(low, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded)


class SignCodec:
    """q1: signs, and the mean magnitude of each block."""

    def size(self, n: int) -> int:
        return _scale_bytes(n) + math.ceil(n / 8)

    def pack(self, values: Tensor) -> bytes:
        block = BLOCKS["q1"]
        padded = _blocks(values, block)
        peaks = padded.abs().amax(dim=1).view(torch.int32)
        unit = (peaks & compiled_blocks.INFINITE).view(torch.float32) / compiled_blocks.UNITS
        counted = (padded.abs() / unit.masked_fill(unit == 0, 1.0)[:, None]).round_().to(torch.int64).sum(dim=1)
        counts = (values.numel() - block * torch.arange(len(padded), device=values.device)).clamp_max(block)
        scales = _bf16_down(counted.float() / (7 * counts).float() * unit)
        signs = (padded >= 0) | (scales == 0)[:, None]
        return _bytes(scales.cpu()) + np.packbits(signs.view(-1)[: values.numel()].cpu().numpy()).tobytes()

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        return CODECS["q4"].unpack(widened(bytes(blob), n), n)


def _bf16_down(values: Tensor) -> Tensor:
    """The largest bf16 that is not above each (non-negative) value."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _fold_pairs(levels: Tensor) -> Tensor:
    nibbles = torch.nn.functional.pad(levels + 8, (0, levels.numel() % 2), value=8).view(-1, 2).to(torch.uint8)
    return nibbles[:, 0] | (nibbles[:, 1] << 4)


def _unfold_pairs(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1).to(torch.int8) - 8


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """The numbers themselves in this type."""

    dtype: torch.dtype

    def size(self, n: int) -> int:
        return self.dtype.itemsize * n

    def pack(self, values: Tensor) -> bytes:
        return _bytes(values.to(self.dtype).cpu())

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        return _tensor(blob, self.dtype).float()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(blob: bytes | Bytes, dtype: torch.dtype) -> Tensor:
    return (
        torch.from_numpy(np.frombuffer(blob, np.uint8).copy()).view(dtype) if len(blob) else torch.empty(0, dtype=dtype)
    )


BLOCKS = {"q1": 128, "q4": 128, "int8": 256}
CODECS: dict[str, Codec] = {
    "q1": SignCodec(),
    "q4": LevelCodec(4, BLOCKS["q4"]),
    "int8": LevelCodec(8, BLOCKS["int8"]),
    "bf16": FloatCodec(torch.bfloat16),
    "fp32": FloatCodec(torch.float32),
}
COMPILED_PACK = {"q4": compiled_blocks.pack_q4, "int8": compiled_blocks.pack_int8}
COMPILED_UNPACK = {"q4": compiled_blocks.unpack_q4, "int8": compiled_blocks.unpack_int8}

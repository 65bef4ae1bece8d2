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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decentral.comm.codecs import compiled_blocks
from decentral.comm.codecs.compiled_blocks import Bytes, Floats
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason


@dataclass(frozen=True, slots=True)
class Codec:
    """`pack` takes fp32 [n] on any device and gives bytes; `unpack` takes those bytes and n, and gives fp32 [n]."""

    name: str
    size: Callable[[int], int]
    pack: Callable[[Tensor], bytes]
    unpack: Callable[[bytes | Bytes, int], Tensor]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A codec's functions of comm/codecs/compiled_blocks.py."""

    pack: Callable[[Floats, Bytes], int]
    unpack: Callable[[Bytes, Floats], int]


def encode(codec: str, values: Tensor) -> bytes:
    """The bytes of fp32 [n], on any device. Raises KeyError for an unknown codec."""
    if codec in COMPILED and values.device.type == "cpu" and values.dtype == torch.float32:
        blob = np.empty(size(codec, values.numel()), np.uint8)
        if COMPILED[codec].pack(values.detach().contiguous().numpy(), blob) < compiled_blocks.INFINITE:
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
    elif codec in COMPILED:
        unpacked = np.empty(elements, np.float32)
        refuse(codec, COMPILED[codec].unpack(read, unpacked))
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


def _blockwise(
    name: str, bits: int, block: int, fold: Callable[[Tensor], Tensor], unfold: Callable[[Tensor], Tensor]
) -> Codec:
    """Levels of so many bits, and a bf16 scale for each block. `fold` takes int8 levels [n] to bytes, `unfold` back."""
    highest = 2 ** (bits - 1) - 1

    def scale_bytes(n: int) -> int:
        return 2 * math.ceil(n / block)

    def blocks(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)

    def pack(values: Tensor) -> bytes:
        padded = blocks(values)
        peaks = padded.abs().amax(dim=1)
        scales = _bf16_up(peaks / torch.full_like(peaks, highest))  # CUDA multiplies by a plain number's reciprocal
        divisor = scales.float().masked_fill(scales == 0, 1.0)
        levels = (padded / divisor[:, None]).round_().clamp_(-highest, highest).to(torch.int8)
        return _bytes(scales.cpu()) + _bytes(fold(levels.view(-1)[: values.numel()].cpu()))

    def unpack(blob: bytes | Bytes, n: int) -> Tensor:
        cut = scale_bytes(n)
        scales, levels = _tensor(blob[:cut], torch.bfloat16), unfold(_tensor(blob[cut:], torch.uint8))[:n]
        if n and (int(levels.min()) < -highest or bool((scales.isfinite() & (scales < 0)).any())):
            raise ProtocolError(Reason.LEVELS, f"outside -{highest}..{highest}, or a negative scale")
        return (blocks(levels.float()) * scales.float()[:, None]).view(-1)[:n]

    return Codec(name, lambda n: scale_bytes(n) + math.ceil(n * bits / 8), pack, unpack)


def _bf16_up(values: Tensor) -> Tensor:
    """The smallest bf16 that is not below each (non-negative) value."""
    rounded = values.to(torch.bfloat16)
    low = rounded.float() < values
    return torch.where(low, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded)


def _pack_q1(values: Tensor) -> bytes:
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCKS["q1"])).view(-1, BLOCKS["q1"])
    peaks = padded.abs().amax(dim=1).view(torch.int32)
    unit = (peaks & compiled_blocks.INFINITE).view(torch.float32) / compiled_blocks.UNITS
    counted = (padded.abs() / unit.masked_fill(unit == 0, 1.0)[:, None]).round_().to(torch.int64).sum(dim=1)
    counts = (values.numel() - BLOCKS["q1"] * torch.arange(len(padded), device=values.device)).clamp_max(BLOCKS["q1"])
    scales = _bf16_down(counted.float() / (7 * counts).float() * unit)
    signs = (padded >= 0) | (scales == 0)[:, None]
    return _bytes(scales.cpu()) + np.packbits(signs.view(-1)[: values.numel()].cpu().numpy()).tobytes()


def _unpack_q1(blob: bytes | Bytes, n: int) -> Tensor:
    return CODECS["q4"].unpack(widened(bytes(blob), n), n)


def _bf16_down(values: Tensor) -> Tensor:
    """The largest bf16 that is not above each (non-negative) value."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _fold_pairs(levels: Tensor) -> Tensor:
    nibbles = torch.nn.functional.pad(levels + 8, (0, levels.numel() % 2), value=8).view(-1, 2).to(torch.uint8)
    return nibbles[:, 0] | (nibbles[:, 1] << 4)


def _unfold_pairs(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1).to(torch.int8) - 8


def _floats(name: str, dtype: torch.dtype) -> Codec:
    def pack(values: Tensor) -> bytes:
        return _bytes(values.to(dtype).cpu())

    return Codec(name, lambda n: dtype.itemsize * n, pack, lambda blob, n: _tensor(blob, dtype).float())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(blob: bytes | Bytes, dtype: torch.dtype) -> Tensor:
    return (
        torch.from_numpy(np.frombuffer(blob, np.uint8).copy()).view(dtype) if len(blob) else torch.empty(0, dtype=dtype)
    )


BLOCKS = {"q1": 128, "q4": 128, "int8": 256}
CODECS = {
    codec.name: codec
    for codec in (
        Codec("q1", lambda n: 2 * math.ceil(n / BLOCKS["q1"]) + math.ceil(n / 8), _pack_q1, _unpack_q1),
        _blockwise("q4", 4, BLOCKS["q4"], _fold_pairs, _unfold_pairs),
        _blockwise("int8", 8, BLOCKS["int8"], lambda levels: levels, lambda levels: levels.view(torch.int8)),
        _floats("bf16", torch.bfloat16),
        _floats("fp32", torch.float32),
    )
}
COMPILED = {
    "q4": Compiled(compiled_blocks.pack_q4, compiled_blocks.unpack_q4),
    "int8": Compiled(compiled_blocks.pack_int8, compiled_blocks.unpack_int8),
}

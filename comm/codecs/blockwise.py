"""Blockwise quantisation: pure functions from fp32 vectors to bytes and back. Start at `encode` and `decode`.

    codec   levels      block   bytes for n numbers          error within a block of largest magnitude a
    q1      -7, 7       128     ceil(n/8) + 2 ceil(n/128)    at most a, s = bf16_down(mean magnitude / 7)
    sparse  -7..7       4096    about 0.063 n: see below     at most a
    q4      -7..7       128     ceil(n/2) + 2 ceil(n/128)    at most s/2, s = bf16_up(a/7)
    int8    -127..127   256     n + 2 ceil(n/256)            at most s/2, s = bf16_up(a/127)
    bf16                        2 n                          a relative 2^-9
    fp32                        4 n                          none

Each number is stored as an integer level, and decoded as level * s, where s is the scale of its block. A blob holds all
scales, then all levels. bf16_up and bf16_down round a scale to bf16. bf16 has the exponent range of fp32, so the small
pseudo-gradients late in training do not underflow as they would in fp16. q4 and int8 round the scale up, so that the
largest number of a block fits the levels. `decode` refuses levels, scales and numbers that no encoder writes.

q1 keeps signs and the block's mean magnitude (EF-signSGD: Karimireddy et al., arXiv 1901.09847). Its error may be as
large as its numbers, so it is only for vectors with error feedback. A level is one bit, which is 1 for a number >= 0;
numpy.packbits gives the order of bits. q1 decodes to 7 s or -7 s, which q4 can store with the same scale, so a q1 blob
can be converted to q4 and back without loss (`widened`, `narrowed`). The mean is computed from integers, so it does not
depend on the order of summation: magnitudes are rounded to multiples of 2^-15 p, where p is the largest power of two
not above a. The scale is rounded down, so that 7 s does not overflow, and is zero if a is below 2^-126.

`sparse` sends one number of 16 (BUCKET): of each group of 4096 numbers (GROUP) the 256 with the largest magnitudes, and
of equal ones the first; of an incomplete group of m numbers ceil(m/16). Like q1, it is only for vectors with error
feedback (Stich et al., arXiv 1809.07599). A number that is sent has two bits: its sign, and whether it is large,
that is, not below the mean magnitude of the numbers that are sent. Large numbers decode to +-49 t and small ones to
+-7 m t:

    t = (mean magnitude of the large numbers) / 49, rounded down to 5 significant bits
    m = round(7 (mean magnitude of the small numbers) / (mean magnitude of the large ones)), at most 6

So q4 can store both with the scale 7 t, or m t in a block without large numbers, since both have 8 significant bits: a
sparse blob converts to q4 and back. Means are computed as for q1; if t is zero, so is m. Chosen numbers that
decode to zero are replaced by the first of the group's numbers that decode to zero, sent as small and positive.

A blob in which K = ceil(n/16) numbers are sent has four parts, in the bit order of numpy.packbits:

    headers     2 bytes a group     the bf16 bits of t, of which the last 3 are m
    buckets     2 K bits            bit at//16 + i is 1 if the i-th number sent is number `at` of the vector
    low bits    4 K bits            at % 16 of each number sent
    levels      2 K bits            of each number sent: 1 if it is >= 0, and 1 if it is large

So a place takes 6 bits (code of Elias and Fano), 1.11 times the entropy of a choice of one number in 16.

The codecs in CODECS compute these formulas in torch, for vectors on any device. Compiled functions, which return the
same bits, encode and decode vectors in host memory (comm/codecs/compiled_blocks.py). Vectors with NaN or infinity are
always encoded by the formulas; partners refuse the resulting blobs.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decentral.comm.codecs import compiled_blocks, compiled_sparse
from decentral.comm.codecs.compiled_blocks import Bytes
from decentral.comm.codecs.compiled_sparse import BUCKET, GROUP, HIGH, LOW_BITS, MOST_SMALL, Parts
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason


class Codec(Protocol):
    """Interface of the codecs in CODECS; implemented in torch by LevelCodec, SignCodec, SparseCodec and FloatCodec."""

    def size(self, n: int) -> int:
        """Return the number of bytes that n encoded numbers take."""

    def pack(self, values: Tensor) -> bytes:
        """Encode fp32 values [n], on any device, and return the bytes."""

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        """Decode a blob of `size(n)` bytes, and return its numbers as fp32 [n] on the CPU."""


def encode(codec: str, values: Tensor) -> bytes:
    """Encode fp32 values [n], on any device, and return the bytes.

    Raises:
        KeyError: If the codec is unknown.
    """
    if codec in COMPILED_PACK and values.device.type == "cpu" and values.dtype == torch.float32:
        blob = np.empty(size(codec, values.numel()), np.uint8)
        if COMPILED_PACK[codec](values.detach().contiguous().numpy(), blob) < compiled_blocks.INFINITE:
            return blob.tobytes()
    return CODECS[codec].pack(values)


def size(codec: str, elements: int) -> int:
    """Return the number of bytes that `elements` numbers take when encoded with this codec."""
    return CODECS[codec].size(elements)


def decode(codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
    """Decode a blob, and return its numbers as fp32 [elements] on the CPU.

    If the codec is fp32 and the blob is writable, the tensor shares the blob's memory, to save a copy of a large state.

    Raises:
        ProtocolError: If the codec is unknown, the blob's size is wrong, a level or scale is out of range, or a
            number is not finite.
    """
    if codec not in CODECS:
        raise ProtocolError(Reason.CODEC, f"codec {codec!r} is unknown; expected one of {', '.join(CODECS)}")
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
    """Decode a blob with torch operations only, and return its numbers as fp32; `codec` must be a key of CODECS."""
    values = CODECS[codec].unpack(as_bytes(codec, blob, elements), elements)
    if not bool(torch.isfinite(values).all()):
        refuse(codec, compiled_blocks.NOT_FINITE)
    return values


def warm_up() -> None:
    """Run each codec once, so that numba compiles it now and not during training; this may take seconds."""
    for codec in CODECS:
        decode(codec, encode(codec, torch.zeros(1)), 1)
    for codec in SHORTER_CODECS:
        narrowed(codec, widened(codec, encode(codec, torch.zeros(1)), 1), 1)


def widened(codec: str, blob: bytes | memoryview, elements: int) -> bytes:
    """Re-encode a q1 or sparse blob as q4 without changing the numbers, and return the q4 blob.

    Scales are copied without a check, because `decode` refuses invalid scales.

    Raises:
        ProtocolError: If the blob does not have the size of `elements` numbers, or a place in a sparse blob is out of
            range or out of order.
    """
    read = as_bytes(codec, blob, elements)
    if codec == "sparse":
        wide = np.empty(size("q4", elements), np.uint8)
        refuse(codec, compiled_sparse.widen(_sparse_parts(read, elements), elements, wide))
        return wide.tobytes()
    signs = read[_scale_bytes(elements) :]
    levels = np.empty(len(signs), np.uint32)
    compiled_blocks.widen(signs, levels)
    pairs = levels.view(np.uint8)[: math.ceil(elements / 2)]
    if elements % 2:
        pairs[-1] = pairs[-1] & 15 | 128  # an odd count leaves the last high nibble unused: 8 encodes zero
    return _with_scales_of(blob, elements, pairs)


def narrowed(codec: str, blob: bytes | memoryview, elements: int) -> bytes:
    """Re-encode a q4 blob as q1 or sparse without changing the numbers, and return the new blob.

    The q4 blob must be one that `widened` returns, or that CompiledKernels or CudaKernels have closed with this code.
    This is not checked.

    Raises:
        ProtocolError: If the blob does not have the size of `elements` numbers.
    """
    read = as_bytes("q4", blob, elements)
    if codec == "sparse":
        sparse = np.zeros(size(codec, elements), np.uint8)
        compiled_sparse.narrow(read, elements, _sparse_parts(sparse, elements))
        return sparse.tobytes()
    pairs = read[_scale_bytes(elements) :]
    levels, signs = np.zeros(math.ceil(elements / 8), np.uint32), np.empty(math.ceil(elements / 8), np.uint8)
    levels.view(np.uint8)[: len(pairs)] = pairs
    compiled_blocks.narrow(levels, signs)
    if elements % 8:
        signs[-1] &= 0x100 - (1 << (8 - elements % 8))  # clear the unused bits of the last byte
    return _with_scales_of(blob, elements, signs)


def _sparse_parts(blob: Bytes, elements: int) -> Parts:
    """Return views of a sparse blob's headers, buckets, low bits of the places, and levels."""
    sent = math.ceil(elements / BUCKET)
    ends = [2 * math.ceil(elements / GROUP)]
    for bits in (2, LOW_BITS):
        ends.append(ends[-1] + math.ceil(bits * sent / 8))
    return blob[: ends[0]], blob[ends[0] : ends[1]], blob[ends[1] : ends[2]], blob[ends[2] :]


def _scale_bytes(elements: int) -> int:
    """Return the number of bytes that the scales of `elements` numbers take in a q1 or q4 blob."""
    return 2 * math.ceil(elements / BLOCKS["q4"])


def _with_scales_of(blob: bytes | memoryview, elements: int, levels: Bytes) -> bytes:
    return bytes(blob[: _scale_bytes(elements)]) + levels.tobytes()


def as_bytes(codec: str, blob: bytes | memoryview, elements: int) -> Bytes:
    """Return the blob as a read-only array of its bytes, without a copy.

    Raises:
        ProtocolError: If the blob does not have the size of `elements` numbers in this codec.
    """
    read, expected = np.frombuffer(blob, np.uint8) if blob else np.empty(0, np.uint8), size(codec, elements)
    if elements < 0 or len(read) != expected:
        fault = f"expected {expected} bytes for {elements} numbers in {codec}; got {len(read)}"
        raise ProtocolError(Reason.SHAPE, fault)
    read.flags.writeable = False
    return read


def refuse(codec: str, fault: int) -> None:
    """Raise ProtocolError if `fault`, the fault code that a compiled function returned for a blob, is not 0."""
    if fault & compiled_blocks.BAD_LEVEL:
        expected = "levels and places in their range and order, and no negative scale"
        raise ProtocolError(Reason.LEVELS, f"expected {expected} in the {codec} blob")
    if fault & compiled_blocks.NOT_FINITE:
        raise ProtocolError(Reason.NAN, f"expected finite numbers in a {codec} blob; got NaN or infinity")


@dataclass(frozen=True, slots=True)
class LevelCodec:
    """The codecs q4 and int8: each number is a level of `bits` bits, and each `block` numbers share a bf16 scale."""

    bits: int
    block: int

    @property
    def highest(self) -> int:
        """Return the highest level; the lowest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def size(self, n: int) -> int:
        """Return the number of bytes that n encoded numbers take."""
        return self._scale_bytes(n) + math.ceil(n * self.bits / 8)

    def pack(self, values: Tensor) -> bytes:
        """Encode fp32 values [n], on any device, and return the bytes."""
        padded, highest = _blocks(values, self.block), self.highest
        peaks = padded.abs().amax(dim=1)
        # Divide by a tensor: for a scalar divisor CUDA multiplies by its reciprocal, which may round differently.
        scales = _bf16_up(peaks / torch.full_like(peaks, highest))
        divisor = scales.float().masked_fill(scales == 0, 1.0)
        levels = (padded / divisor[:, None]).round_().clamp_(-highest, highest).to(torch.int8)
        own = levels.view(-1)[: values.numel()].cpu()
        return _bytes(scales.cpu()) + _bytes(_fold_pairs(own) if self.bits == 4 else own)

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        """Decode a blob into fp32 [n]; raise ProtocolError if a level or scale is out of range."""
        cut = self._scale_bytes(n)
        scales, read = _tensor(blob[:cut], torch.bfloat16), _tensor(blob[cut:], torch.uint8)
        levels = _unfold_pairs(read)[:n] if self.bits == 4 else read.view(torch.int8)
        if n and (int(levels.min()) < -self.highest or bool((scales.isfinite() & (scales < 0)).any())):
            raise ProtocolError(Reason.LEVELS, f"a level is outside +-{self.highest}, or a scale is negative")
        return (_blocks(levels.float(), self.block) * scales.float()[:, None]).view(-1)[:n]

    def _scale_bytes(self, n: int) -> int:
        return 2 * math.ceil(n / self.block)


def _blocks(values: Tensor, block: int) -> Tensor:
    """Return values [n] as a matrix with one block in each row; the last row is padded with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)


def _bf16_up(values: Tensor) -> Tensor:
    """Round non-negative fp32 values up to bf16."""
    rounded = values.to(torch.bfloat16)
    low = rounded.float() < values
    return torch.where(low, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded)


class SignCodec:
    """The codec q1: it stores the sign of each number, and for each block a scale computed from the mean magnitude."""

    def size(self, n: int) -> int:
        """Return the number of bytes that n encoded numbers take."""
        return _scale_bytes(n) + math.ceil(n / 8)

    def pack(self, values: Tensor) -> bytes:
        """Encode fp32 values [n], on any device, and return the bytes."""
        block = BLOCKS["q1"]
        padded = _blocks(values, block)
        unit, units = _units(padded)
        counts = (values.numel() - block * torch.arange(len(padded), device=values.device)).clamp_max(block)
        scales = _bf16_down(units.sum(dim=1).float() / (7 * counts).float() * unit)
        signs = (padded >= 0) | (scales == 0)[:, None]
        return _bytes(scales.cpu()) + np.packbits(signs.view(-1)[: values.numel()].cpu().numpy()).tobytes()

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        """Decode a blob into fp32 [n]; raise ProtocolError if a scale is negative."""
        return CODECS["q4"].unpack(widened("q1", bytes(blob), n), n)


class SparseCodec:
    """The codec `sparse`: places, signs and one of two magnitudes of each group's largest numbers."""

    def size(self, n: int) -> int:
        """Return the number of bytes that n encoded numbers take."""
        sent = math.ceil(n / BUCKET)
        return 2 * math.ceil(n / GROUP) + sum(math.ceil(bits * sent / 8) for bits in (2, LOW_BITS, 2))

    def pack(self, values: Tensor) -> bytes:
        """Encode fp32 values [n], on any device, and return the bytes."""
        n, padded_CN = values.numel(), _blocks(values, GROUP)
        places_N = torch.arange(GROUP, device=values.device)
        counts_C1 = (n - GROUP * torch.arange(len(padded_CN), device=values.device)).clamp_max(GROUP)[:, None]
        sent_C1 = (counts_C1 + BUCKET - 1).div(BUCKET, rounding_mode="floor")
        bits_CN = padded_CN.abs().view(torch.int32).masked_fill(places_N >= counts_C1, -1)
        chosen_CN = _first(bits_CN, sent_C1)
        unit_C, units_CN = _units(padded_CN)
        units_CN = units_CN.masked_fill(~chosen_CN, 0)
        large_CN = chosen_CN & (units_CN * sent_C1 >= units_CN.sum(dim=1, keepdim=True))
        large_C, of_large_C = large_CN.sum(dim=1), units_CN.masked_fill(~large_CN, 0).sum(dim=1)
        mean_C = of_large_C.float() / (HIGH * HIGH * large_C).float() * unit_C
        header_C = mean_C.view(torch.int32) >> 19 << 3
        times_C = (units_CN.sum(dim=1) - of_large_C) * large_C
        most_C = (of_large_C * (sent_C1[:, 0] - large_C)).clamp_min(1)
        small_C = (2 * HIGH * times_C + most_C).div(2 * most_C, rounding_mode="floor").clamp(0, MOST_SMALL)
        small_C = small_C.masked_fill(header_C == 0, 0).to(torch.int32)
        level_CN = torch.where(large_CN, HIGH, chosen_CN * small_C[:, None]).masked_fill(header_C[:, None] == 0, 0)
        at = _first((level_CN != 0).int(), sent_C1).view(-1).nonzero()[:, 0]
        level, positive = (one.view(-1)[at].cpu().numpy() for one in (level_CN, (padded_CN >= 0) | (level_CN == 0)))
        found = at.cpu().numpy()
        buckets = np.zeros(2 * len(found), np.bool_)
        buckets[found // BUCKET + np.arange(len(found))] = True
        low = found[:, None] >> np.arange(LOW_BITS - 1, -1, -1) & 1
        parts = buckets, low > 0, np.stack((positive, level == HIGH), axis=1)
        headers = (header_C | small_C).to(torch.int16).cpu()
        return _bytes(headers) + b"".join(np.packbits(part).tobytes() for part in parts)

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        """Decode a blob into fp32 [n]; raise ProtocolError if a place, level or scale is out of range."""
        parts, sent = _sparse_parts(as_bytes("sparse", bytes(blob), n), n), math.ceil(n / BUCKET)
        headers, order = parts[0].view(np.uint16).astype(np.int32), np.arange(sent)
        buckets, low, levels = (
            np.unpackbits(part, count=bits * sent) for part, bits in zip(parts[1:], (2, LOW_BITS, 2), strict=True)
        )
        scales = HIGH * torch.from_numpy((headers & 0xFFF8) << 16).view(torch.float32)
        small, ones, (positive, large) = headers & 7, buckets.nonzero()[0], levels.reshape(sent, 2).T
        if len(ones) != sent or (small > MOST_SMALL).any() or bool((scales.isfinite() & (scales < 0)).any()):
            refuse("sparse", compiled_blocks.BAD_LEVEL)
        at = (ones - order) * BUCKET + low.reshape(sent, LOW_BITS) @ (1 << np.arange(LOW_BITS - 1, -1, -1))
        groups = order // (GROUP // BUCKET)
        if (np.diff(at) <= 0).any() or (at >= n).any() or (at // GROUP != groups).any():
            refuse("sparse", compiled_blocks.BAD_LEVEL)
        signed = np.where(large, HIGH, small[groups]) * np.where(positive, 1, -1)
        values = torch.zeros(n)
        values[torch.from_numpy(at)] = torch.from_numpy(signed).float() * scales[torch.from_numpy(groups)]
        return values


def _first(keys_CN: Tensor, sent_C1: Tensor) -> Tensor:
    """Return which numbers of each row have its `sent` largest keys; of equal keys, the first count."""
    return keys_CN.argsort(dim=1, descending=True, stable=True).argsort(dim=1) < sent_C1


def _units(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's unit, fp32, and its magnitudes as integer multiples of the unit (see q1 above), int64."""
    peaks = values.abs().amax(dim=1).view(torch.int32)
    unit = (peaks & compiled_blocks.INFINITE).view(torch.float32) / compiled_blocks.UNITS
    return unit, (values.abs() / unit.masked_fill(unit == 0, 1.0)[:, None]).round_().to(torch.int64)


def _bf16_down(values: Tensor) -> Tensor:
    """Round non-negative fp32 values down to bf16."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _fold_pairs(levels: Tensor) -> Tensor:
    nibbles = torch.nn.functional.pad(levels + 8, (0, levels.numel() % 2), value=8).view(-1, 2).to(torch.uint8)
    return nibbles[:, 0] | (nibbles[:, 1] << 4)


def _unfold_pairs(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1).to(torch.int8) - 8


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """The codecs bf16 and fp32: each number is stored as a float of type `dtype`."""

    dtype: torch.dtype

    def size(self, n: int) -> int:
        """Return the number of bytes that n encoded numbers take."""
        return self.dtype.itemsize * n

    def pack(self, values: Tensor) -> bytes:
        """Encode fp32 values [n], on any device, and return the bytes."""
        return _bytes(values.to(self.dtype).cpu())

    def unpack(self, blob: bytes | Bytes, n: int) -> Tensor:
        """Decode a blob into fp32 [n]."""
        return _tensor(blob, self.dtype).float()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(blob: bytes | Bytes, dtype: torch.dtype) -> Tensor:
    return (
        torch.from_numpy(np.frombuffer(blob, np.uint8).copy()).view(dtype) if len(blob) else torch.empty(0, dtype=dtype)
    )


BLOCKS = {"q1": 128, "q4": 128, "int8": 256}  # by codec: how many consecutive numbers share one scale
CODECS: dict[str, Codec] = {
    "q1": SignCodec(),
    "q4": LevelCodec(4, BLOCKS["q4"]),
    "int8": LevelCodec(8, BLOCKS["int8"]),
    "bf16": FloatCodec(torch.bfloat16),
    "fp32": FloatCodec(torch.float32),
    "sparse": SparseCodec(),
}
SHORTER_CODECS = ("q1", "sparse")  # codecs that `widened` and `narrowed` convert to q4 and back
COMPILED_PACK = {"q4": compiled_blocks.pack_q4, "int8": compiled_blocks.pack_int8}
COMPILED_UNPACK = {"q4": compiled_blocks.unpack_q4, "int8": compiled_blocks.unpack_int8}

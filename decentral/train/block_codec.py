"""The blockwise codecs of train/compress.py as machine code for vectors in host memory, each in one pass.

They give the bytes and the numbers that torch's formulas give, bit for bit, for numbers that are finite; others they
only find. The GIL is free while they run. What keeps the loops as fast as memory:

- A block's largest magnitude is the largest of its bit patterns without the sign, as an integer: a maximum of floats
  would not be vectorised, and this one finds what is not finite as well.
- Adding and subtracting 1.5 2^23 rounds a number below 2^22 half to even, as `round` does.
- Indexes are unsigned, since a signed one is checked for being negative.
- A pair of nibbles is cut out of, or put into, a 16-bit number that is two bytes, one level in each.
"""

import numpy as np
import numpy.typing as npt

from decentral.core.machine_code import compiled, inner

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Q4_BLOCK, INT8_BLOCK = 128, 256
INFINITE = 0x7F800000  # the bit pattern of infinity: those of numbers that are not finite are this, or above it
BAD_LEVEL, NOT_FINITE = 1, 2  # what `unpack_...` gives, added up; zero if all is well

_ROUNDER = np.float32(1.5 * 2**23)
_1, _2, _4 = np.uint64(1), np.uint64(2), np.uint64(4)
_Q4_BLOCK, _INT8_BLOCK, _HALF_BLOCK = np.uint64(Q4_BLOCK), np.uint64(INT8_BLOCK), np.uint64(Q4_BLOCK // 2)


@inner
def peak_of(values: Floats) -> np.int32:
    """The largest bit pattern of the values' magnitudes."""
    bits = values.view(np.int32)
    peak = np.int32(0)
    for i in range(np.uint64(len(values))):
        peak = max(peak, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return peak


@inner
def put_scale(peak: np.int32, highest: np.float32, blob: Bytes, block: np.uint64) -> np.float32:
    """bf16_up(peak / highest), written as the block's scale. `peak` is a bit pattern."""
    share = np.int32(peak).view(np.float32) / highest
    upper = np.int32((np.float32(share).view(np.int32) + np.int32(0xFFFF)) >> np.int32(16))
    blob[_2 * block] = np.uint8(upper & np.int32(255))
    blob[_2 * block + _1] = np.uint8(upper >> np.int32(8))
    return np.int32(upper << np.int32(16)).view(np.float32)


@inner
def scale_of(blob: Bytes, block: np.uint64) -> np.float32:
    """The block's scale."""
    upper = np.int32(blob[_2 * block]) | (np.int32(blob[_2 * block + _1]) << np.int32(8))
    return np.int32(upper << np.int32(16)).view(np.float32)


@inner
def quantise(values: Floats, scale: np.float32, levels: Floats) -> None:
    """Rounds each value / scale to a level. A scale of zero has values so small that all round to zero."""
    divisor = scale if scale != np.float32(0.0) else np.float32(1.0)
    for i in range(np.uint64(len(values))):
        levels[i] = (values[i] / divisor + _ROUNDER) - _ROUNDER


@inner
def put_q4(levels: Floats, count: np.uint64, blob: Bytes, at: np.uint64, nibbles: Bytes) -> np.int32:
    """Writes a block's levels, and gives the sum of their squares. `nibbles` is scratch of a block's length."""
    squares = np.int32(0)
    for i in range(_Q4_BLOCK):
        level = np.int32(levels[i])
        squares += level * level
        nibbles[i] = np.uint8(level + np.int32(8))
    pairs = nibbles.view(np.uint16)
    for i in range((count + _1) // _2):
        blob[at + i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))
    return squares


@inner
def get_q4(blob: Bytes, at: np.uint64, count: np.uint64, nibbles: Bytes) -> None:
    """Reads a block's levels, each with 8 added; those beyond `count` are zero."""
    pairs = nibbles.view(np.uint16)
    if count < _Q4_BLOCK:
        nibbles[:] = np.uint8(8)
    for i in range((count + _1) // _2):
        pair = np.uint16(blob[at + i])
        pairs[i] = np.uint16((pair & np.uint16(15)) | ((pair & np.uint16(240)) << np.uint16(4)))
    if count & _1:
        nibbles[count] = np.uint8(8)


@inner
def fault_of(highest: np.int32, peak: np.int32, scale: np.float32) -> np.int32:
    """What is wrong with a block whose levels are `peak` at most; infinity times a level of zero is not a number."""
    fault = np.int32(0)
    if peak > highest or (scale < np.float32(0.0) and np.isfinite(scale)):
        fault |= np.int32(BAD_LEVEL)
    if not np.isfinite(np.float32(peak) * scale):
        fault |= np.int32(NOT_FINITE)
    return fault


@inner
def q4_peak(nibbles: Bytes) -> np.int32:
    """The largest magnitude of a block's levels."""
    peak = np.int32(0)
    for i in range(_Q4_BLOCK):
        peak = max(peak, abs(np.int32(nibbles[i]) - np.int32(8)))
    return peak


@inner
def int8_peak(blob: Bytes, at: np.uint64, count: np.uint64) -> np.int32:
    """The largest magnitude of a block's levels."""
    peak = np.int32(0)
    for i in range(count):
        peak = max(peak, abs(np.int32(np.int8(blob[at + i]))))
    return peak


@compiled
def pack_q4(values: Floats, blob: Bytes) -> np.int32:
    """Fills the blob; gives the largest magnitude's bit pattern, with which the blob is void if it is not finite."""
    n, blocks = np.uint64(len(values)), np.uint64((len(values) + Q4_BLOCK - 1) // Q4_BLOCK)
    block_values, levels = np.zeros(Q4_BLOCK, np.float32), np.empty(Q4_BLOCK, np.float32)
    nibbles = np.empty(Q4_BLOCK, np.uint8)
    largest = np.int32(0)
    for block in range(blocks):
        start = block * _Q4_BLOCK
        count = min(_Q4_BLOCK, n - start)
        if count < _Q4_BLOCK:
            block_values[:] = np.float32(0.0)
        for i in range(count):
            block_values[i] = values[start + i]
        peak = peak_of(block_values)
        largest = max(largest, peak)
        scale = put_scale(peak, np.float32(7.0), blob, block)
        quantise(block_values, scale, levels)
        put_q4(levels, count, blob, _2 * blocks + block * _HALF_BLOCK, nibbles)
    return largest


@compiled
def pack_int8(values: Floats, blob: Bytes) -> np.int32:
    """As pack_q4."""
    n, blocks = np.uint64(len(values)), np.uint64((len(values) + INT8_BLOCK - 1) // INT8_BLOCK)
    block_values, levels = np.zeros(INT8_BLOCK, np.float32), np.empty(INT8_BLOCK, np.float32)
    largest = np.int32(0)
    for block in range(blocks):
        start = block * _INT8_BLOCK
        count = min(_INT8_BLOCK, n - start)
        if count < _INT8_BLOCK:
            block_values[:] = np.float32(0.0)
        for i in range(count):
            block_values[i] = values[start + i]
        peak = peak_of(block_values)
        largest = max(largest, peak)
        scale = put_scale(peak, np.float32(127.0), blob, block)
        quantise(block_values, scale, levels)
        for i in range(count):
            blob[_2 * blocks + start + i] = np.uint8(np.int32(levels[i]))
    return largest


@compiled
def unpack_q4(blob: Bytes, values: Floats) -> np.int32:
    """Fills the values; gives what is wrong with the blob, whose size is right."""
    n, blocks = np.uint64(len(values)), np.uint64((len(values) + Q4_BLOCK - 1) // Q4_BLOCK)
    nibbles = np.empty(Q4_BLOCK, np.uint8)
    fault = np.int32(0)
    for block in range(blocks):
        start = block * _Q4_BLOCK
        count = min(_Q4_BLOCK, n - start)
        scale = scale_of(blob, block)
        get_q4(blob, _2 * blocks + block * _HALF_BLOCK, count, nibbles)
        fault |= fault_of(np.int32(7), q4_peak(nibbles), scale)
        for i in range(count):
            values[start + i] = np.float32(np.int32(nibbles[i]) - np.int32(8)) * scale
    return fault


@compiled
def unpack_int8(blob: Bytes, values: Floats) -> np.int32:
    """As unpack_q4."""
    n, blocks = np.uint64(len(values)), np.uint64((len(values) + INT8_BLOCK - 1) // INT8_BLOCK)
    fault = np.int32(0)
    for block in range(blocks):
        start = block * _INT8_BLOCK
        at, count = _2 * blocks + start, min(_INT8_BLOCK, n - start)
        scale = scale_of(blob, block)
        fault |= fault_of(np.int32(127), int8_peak(blob, at, count), scale)
        for i in range(count):
            values[start + i] = np.float32(np.int8(blob[at + i])) * scale
    return fault

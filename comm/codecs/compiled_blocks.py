"""Codecs and outer steps as machine code over arrays in host memory, each in one pass, the GIL free meanwhile.

They give the bytes and the numbers that torch's formulas give (comm/codecs/blockwise.py, comm/gossip/outer_kernels.py),
bit for bit, for numbers that are finite; others they only find. What keeps them at the speed of memory:

- A whole block is worked on by loops whose trip count is a constant, and whose scratch stays in the nearest cache; the
  same code, inlined a second time, takes the part of a block at the end.
- A block's largest magnitude is the largest of its bit patterns without the sign, as an integer: a maximum of floats
  would not be vectorised, and this one finds what is not finite as well.
- Adding and subtracting 1.5 2^23 rounds a number below 2^22 half to even, as `round` does.
- Indexes are unsigned: a signed one is compared with zero each time.
- Two levels are cut out of a byte, or put into one, as the two bytes of a 16-bit number; eight signs are, as the eight
  levels of a 32-bit number.

All is in one file: numba keeps the machine code on disk until the file of the function that was called changes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from decentral.core.compiled import compiled, inlined

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Number = Any  # a scalar, whose type numba infers
Scratch = tuple[Floats, npt.NDArray[np.int32], Floats, Bytes, npt.NDArray[np.uint16]]

INFINITE = 0x7F800000  # the bit pattern of infinity; that of a number that is not finite is this or above it
UNITS = 1 << 15  # parts of the power of two below a block's peak, in which q1 counts magnitudes
BAD_LEVEL, NOT_FINITE = 1, 2  # what can be wrong with a blob, added up; zero if all is well

_ROUNDER = np.float32(1.5 * 2**23)
_1, _2 = np.uint64(1), np.uint64(2)
_64, _128, _256 = np.uint64(64), np.uint64(128), np.uint64(256)  # bytes of a q4 block, blocks of q4 and of int8


@inlined
def _scratch() -> Scratch:
    """A block's values, the same as bit patterns, levels, levels of 4 bits with 8 added, and the same in pairs."""
    values, levels, nibbles = np.zeros(256, np.float32), np.zeros(256, np.float32), np.zeros(128, np.uint8)
    return values, values.view(np.int32), levels, nibbles, nibbles.view(np.uint16)


@inlined
def _put_scale(
    scratch: Scratch, block_size: Number, highest: Number, blob: Bytes, block: Number
) -> tuple[Number, Number]:
    """Writes bf16_up(peak / highest) as the block's scale; gives it, and the bit pattern of the peak."""
    bits = scratch[1]
    peak = np.int32(0)
    for i in range(block_size):
        peak = max(peak, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    share = np.float32(np.int32(peak).view(np.float32) / highest)
    upper = np.int32((share.view(np.int32) + np.int32(0xFFFF)) >> np.int32(16))
    blob[_2 * block] = np.uint8(upper & np.int32(255))
    blob[_2 * block + _1] = np.uint8(upper >> np.int32(8))
    return np.int32(upper << np.int32(16)).view(np.float32), peak


@inlined
def _quantise(scratch: Scratch, block_size: Number, scale: Number) -> None:
    """Rounds values to levels. Under a scale of zero all values are so small that they round to zero."""
    values, _, levels, _, _ = scratch
    divisor = scale if scale != np.float32(0.0) else np.float32(1.0)
    for i in range(block_size):
        levels[i] = (values[i] / divisor + _ROUNDER) - _ROUNDER


@inlined
def _put_q4(scratch: Scratch, count: Number, blob: Bytes, at: Number) -> Number:
    """Writes a block's levels from the byte `at`; gives the sum of their squares. Levels beyond `count` are zero."""
    _, _, levels, nibbles, pairs = scratch
    squares = np.int32(0)
    for i in range(_128):
        level = np.int32(levels[i])
        squares += level * level
        nibbles[i] = np.uint8(level + np.int32(8))
    for i in range((count + _1) // _2):
        blob[at + i] = np.uint8(pairs[i] | (pairs[i] >> np.uint16(4)))
    return squares


@inlined
def _encode_q4(
    scratch: Scratch, count: Number, blob: Bytes, block: Number, blocks: Number
) -> tuple[Number, Number, Number]:
    """Writes a block's values; gives scale, peak, and the sum of squared levels. Values beyond `count` are zero."""
    scale, peak = _put_scale(scratch, _128, np.float32(7.0), blob, block)
    _quantise(scratch, _128, scale)
    return scale, peak, _put_q4(scratch, count, blob, _2 * blocks + block * _64)


@inlined
def _encode_signs(
    scratch: Scratch, count: Number, blob: Bytes, block: Number, blocks: Number
) -> tuple[Number, Number, Number]:
    """As _encode_q4, with those levels of q4 that q1 has: 7 or -7, by the sign; all are zero under a scale of zero.

    The sum of magnitudes is one of integers, so its order is free: comm/codecs/blockwise.py has the formula.
    """
    values, bits, levels, _, _ = scratch
    peak, total = np.int32(0), np.int32(0)
    for i in range(_128):
        peak = max(peak, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    unit = np.float32(np.int32(peak & np.int32(INFINITE)).view(np.float32) / np.float32(UNITS))
    divisor = unit if unit != np.float32(0.0) else np.float32(1.0)
    for i in range(_128):
        total += np.int32((abs(values[i]) / divisor + _ROUNDER) - _ROUNDER)
    mean = np.float32(np.float32(total) / np.float32(np.uint64(7) * count))
    upper = np.int32(np.float32(mean * unit).view(np.int32) >> np.int32(16))
    blob[_2 * block] = np.uint8(upper & np.int32(255))
    blob[_2 * block + _1] = np.uint8(upper >> np.int32(8))
    scale = np.int32(upper << np.int32(16)).view(np.float32)
    level = np.float32(7.0) if scale != np.float32(0.0) else np.float32(0.0)
    for i in range(_128):
        levels[i] = level if values[i] >= np.float32(0.0) else -level
    for i in range(count, _128):
        levels[i] = np.float32(0.0)
    return scale, peak, _put_q4(scratch, count, blob, _2 * blocks + block * _64)


@inlined
def _get_scale(blob: Bytes, block: Number) -> Number:
    upper = np.int32(blob[_2 * block]) | (np.int32(blob[_2 * block + _1]) << np.int32(8))
    return np.int32(upper << np.int32(16)).view(np.float32)


@inlined
def _get_q4(scratch: Scratch, count: Number, blob: Bytes, at: Number) -> None:
    """Reads a block's levels; those beyond `count` are zero."""
    _, _, _, nibbles, pairs = scratch
    for i in range((count + _1) // _2):
        pair = np.uint16(blob[at + i])
        pairs[i] = np.uint16((pair & np.uint16(15)) | ((pair & np.uint16(240)) << np.uint16(4)))
    for i in range(count, _128):
        nibbles[i] = np.uint8(8)


@inlined
def _q4_peak(scratch: Scratch) -> Number:
    """The largest magnitude of the levels that were read."""
    nibbles = scratch[3]
    low, high = np.uint8(8), np.uint8(8)
    for i in range(_128):
        low, high = np.uint8(min(low, nibbles[i])), np.uint8(max(high, nibbles[i]))
    return max(np.int32(8) - np.int32(low), np.int32(high) - np.int32(8))


@inlined
def _fault(peak: Number, highest: Number, scale: Number) -> Number:
    """What is wrong with a block whose levels reach `peak`. An infinite scale makes not a number of a zero level."""
    fault = np.int32(0)
    if peak > highest or (scale < np.float32(0.0) and np.isfinite(scale)):
        fault |= np.int32(BAD_LEVEL)
    if not np.isfinite(np.float32(np.float32(peak) * scale)):
        fault |= np.int32(NOT_FINITE)
    return fault


@compiled
def largest(values: Floats) -> Number:
    """The bit pattern of the largest magnitude: INFINITE or above if a number is not finite."""
    bits, peak = values.view(np.int32), np.int32(0)
    for i in range(np.uint64(len(values))):
        peak = max(peak, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return peak


@inlined
def _load(values: Floats, start: Number, count: Number, block_size: Number, scratch: Scratch) -> None:
    loaded = scratch[0]
    for i in range(count):
        loaded[i] = values[start + i]
    for i in range(count, block_size):
        loaded[i] = np.float32(0.0)


@compiled
def pack_q4(values: Floats, blob: Bytes) -> Number:
    """Fills the blob; gives the bit pattern of the largest magnitude. The blob is void unless that is finite."""
    n, scratch, largest = np.uint64(len(values)), _scratch(), np.int32(0)
    whole, blocks = n // _128, (n + _128 - _1) // _128
    for block in range(whole):
        _load(values, block * _128, _128, _128, scratch)
        largest = max(largest, _encode_q4(scratch, _128, blob, block, blocks)[1])
    if whole < blocks:
        count = n - whole * _128
        _load(values, whole * _128, count, _128, scratch)
        largest = max(largest, _encode_q4(scratch, count, blob, whole, blocks)[1])
    return largest


@inlined
def _pack_int8(values: Floats, blob: Bytes, block: Number, count: Number, scratch: Scratch) -> Number:
    start, blocks = block * _256, (np.uint64(len(values)) + _256 - _1) // _256
    _load(values, start, count, _256, scratch)
    scale, peak = _put_scale(scratch, _256, np.float32(127.0), blob, block)
    _quantise(scratch, _256, scale)
    levels, at = scratch[2], _2 * blocks + start
    for i in range(count):
        blob[at + i] = np.uint8(np.int32(levels[i]))
    return peak


@compiled
def pack_int8(values: Floats, blob: Bytes) -> Number:
    """As pack_q4."""
    n, scratch, largest = np.uint64(len(values)), _scratch(), np.int32(0)
    for block in range(n // _256):
        largest = max(largest, _pack_int8(values, blob, block, _256, scratch))
    if n % _256:
        largest = max(largest, _pack_int8(values, blob, n // _256, n % _256, scratch))
    return largest


@inlined
def _unpack_q4(blob: Bytes, values: Floats, block: Number, count: Number, scratch: Scratch) -> Number:
    start, blocks = block * _128, (np.uint64(len(values)) + _128 - _1) // _128
    scale, nibbles = _get_scale(blob, block), scratch[3]
    _get_q4(scratch, count, blob, _2 * blocks + block * _64)
    for i in range(count):
        values[start + i] = np.float32(np.int32(nibbles[i]) - np.int32(8)) * scale
    return _fault(_q4_peak(scratch), 7, scale)


@compiled
def unpack_q4(blob: Bytes, values: Floats) -> Number:
    """Fills the values; gives what is wrong with the blob, whose size is right."""
    n, scratch, fault = np.uint64(len(values)), _scratch(), np.int32(0)
    for block in range(n // _128):
        fault |= _unpack_q4(blob, values, block, _128, scratch)
    if n % _128:
        fault |= _unpack_q4(blob, values, n // _128, n % _128, scratch)
    return fault


@inlined
def _int8_peak(blob: Bytes, at: Number, count: Number) -> Number:
    """The largest magnitude of a block's levels."""
    low, high = np.int8(0), np.int8(0)
    for i in range(count):
        level = np.int8(blob[at + i])
        low, high = np.int8(min(low, level)), np.int8(max(high, level))
    return max(-np.int32(low), np.int32(high))


@inlined
def _unpack_int8(blob: Bytes, values: Floats, block: Number, count: Number) -> Number:
    start, blocks = block * _256, (np.uint64(len(values)) + _256 - _1) // _256
    at, scale = _2 * blocks + start, _get_scale(blob, block)
    for i in range(count):
        values[start + i] = np.float32(np.int8(blob[at + i])) * scale
    return _fault(_int8_peak(blob, at, count), 127, scale)


@compiled
def unpack_int8(blob: Bytes, values: Floats) -> Number:
    """As unpack_q4."""
    n, fault = np.uint64(len(values)), np.int32(0)
    for block in range(n // _256):
        fault |= _unpack_int8(blob, values, block, _256)
    if n % _256:
        fault |= _unpack_int8(blob, values, n // _256, n % _256)
    return fault


@inlined
def _close(
    vectors: tuple[Floats, Floats, Floats], blob: Bytes, block: Number, count: Number, signs: Number, scratch: Scratch
) -> tuple[Number, Number]:
    snapshot, baseline, residual = vectors
    start, blocks = block * _128, (np.uint64(len(residual)) + _128 - _1) // _128
    owed, _, levels, _, _ = scratch
    for i in range(count):
        owed[i] = residual[start + i] + (baseline[start + i] - snapshot[start + i])
    for i in range(count, _128):
        owed[i] = np.float32(0.0)
    if signs:
        scale, peak, squares = _encode_signs(scratch, count, blob, block, blocks)
    else:
        scale, peak, squares = _encode_q4(scratch, count, blob, block, blocks)
    for i in range(count):
        residual[start + i] = owed[i] - levels[i] * scale
    return squares * (np.float64(scale) * np.float64(scale)), peak


@compiled
def widen(signs: Bytes, levels: npt.NDArray[np.uint32]) -> None:
    """Levels of q4, eight in a number, from the signs of q1, eight in a byte: 7 where the bit is set, else -7."""
    for i in range(np.uint64(len(signs))):
        eight, row = np.uint32(signs[i]), np.uint32(0)
        for k in range(8):
            sign = (eight >> np.uint32(7 - k)) & np.uint32(1)
            row |= (np.uint32(1) + np.uint32(14) * sign) << np.uint32(4 * k)
        levels[i] = row


@compiled
def narrow(levels: npt.NDArray[np.uint32], signs: Bytes) -> None:
    """The way back: the bit of a level is set unless it is below zero."""
    for i in range(np.uint64(len(signs))):
        row, eight = np.uint32(levels[i]) >> np.uint32(3), np.uint32(0)
        for k in range(8):
            eight |= ((row >> np.uint32(4 * k)) & np.uint32(1)) << np.uint32(7 - k)
        signs[i] = np.uint8(eight)


@compiled
def close(vectors: tuple[Floats, Floats, Floats], blob: Bytes, signs: bool) -> tuple[Number, Number]:
    """Of snapshot, baseline and residual: fills the residual and the q4 blob, on request with q1's two levels alone.

    Gives the squared length of what the blob says, and the bit pattern of the largest magnitude of what was owed.
    """
    n, scratch, total, largest = np.uint64(len(vectors[0])), _scratch(), 0.0, np.int32(0)
    for block in range(n // _128):
        squares, peak = _close(vectors, blob, block, _128, signs, scratch)
        total, largest = total + squares, max(largest, peak)
    if n % _128:
        squares, peak = _close(vectors, blob, n // _128, n % _128, signs, scratch)
        total, largest = total + squares, max(largest, peak)
    return total, largest


@inlined
def _length(blob: Bytes, blocks: Number, block: Number, count: Number, scratch: Scratch) -> tuple[Number, Number]:
    scale, nibbles, squares = _get_scale(blob, block), scratch[3], np.int32(0)
    _get_q4(scratch, count, blob, _2 * blocks + block * _64)
    for i in range(_128):
        level = np.int32(nibbles[i]) - np.int32(8)
        squares += level * level
    return squares * (np.float64(scale) * np.float64(scale)), _fault(_q4_peak(scratch), 7, scale)


@compiled
def length(blob: Bytes, elements: Number) -> tuple[Number, Number]:
    """The squared length of what a q4 blob of the right size says, and what is wrong with the blob."""
    n, scratch, total, fault = np.uint64(elements), _scratch(), 0.0, np.int32(0)
    blocks = (n + _128 - _1) // _128
    for block in range(n // _128):
        squares, found = _length(blob, blocks, block, _128, scratch)
        total, fault = total + squares, fault | found
    if n % _128:
        squares, found = _length(blob, blocks, n // _128, n % _128, scratch)
        total, fault = total + squares, fault | found
    return total, fault


@inlined
def _distance(phi: Floats, blob: Bytes, block: Number, count: Number, sums: npt.NDArray[np.float64]) -> Number:
    start, blocks = block * _256, (np.uint64(len(phi)) + _256 - _1) // _256
    at, scale = _2 * blocks + start, _get_scale(blob, block)
    for i in range(count):
        apart = np.float64(np.float32(np.float32(np.int8(blob[at + i])) * scale - phi[start + i]))
        sums[i] += apart * apart
    return _fault(_int8_peak(blob, at, count), 127, scale)


@compiled
def distance(phi: Floats, blob: Bytes) -> tuple[Number, Number]:
    """The squared distance of phi from what an int8 blob of the right size says, and what is wrong with the blob."""
    n, sums, fault = np.uint64(len(phi)), np.zeros(256, np.float64), np.int32(0)  # one sum would not be vectorised
    for block in range(n // _256):
        fault |= _distance(phi, blob, block, _256, sums)
    if n % _256:
        fault |= _distance(phi, blob, n // _256, n % _256, sums)
    return sums.sum(), fault


@inlined
def _sum_q4(
    blobs: Bytes,
    weights: Floats,
    elements: Number,
    block: Number,
    count: Number,
    first: Number,
    scratch: Scratch,
) -> None:
    """Adds the weighted values of one q4 block of all blobs to the scratch values from `first`."""
    values, _, _, nibbles, _ = scratch
    blocks = (elements + _128 - _1) // _128
    for j in range(len(blobs)):
        blob, weight = blobs[j], weights[j]
        scale = _get_scale(blob, block)
        _get_q4(scratch, count, blob, _2 * blocks + block * _64)
        for i in range(_128):
            values[first + i] += weight * (np.float32(np.int32(nibbles[i]) - np.int32(8)) * scale)


@inlined
def _merge(
    vectors: tuple[Floats, Floats, Floats],
    blobs: tuple[Bytes, Bytes],
    factors: tuple[Floats, Floats],
    rho: np.float32,
    block: Number,
    count: Number,
    scratch: Scratch,
) -> None:
    """One int8 block, which is two q4 blocks."""
    phi, baseline, correction = vectors
    (steps, towards), (step_weights, towards_weights) = blobs, factors
    n, start, step, apart = np.uint64(len(phi)), block * _256, scratch[0], scratch[2]
    for i in range(_256):
        step[i], apart[i] = np.float32(0.0), np.float32(0.0)
    _sum_q4(steps, step_weights, n, _2 * block, min(count, _128), np.uint64(0), scratch)
    if count > _128:
        _sum_q4(steps, step_weights, n, _2 * block + _1, count - _128, _128, scratch)
    at = _2 * ((n + _256 - _1) // _256) + start
    for k in range(len(towards)):
        blob, weight = towards[k], towards_weights[k]
        scale = _get_scale(blob, block)
        for i in range(count):
            apart[i] += weight * (phi[start + i] - np.float32(np.int8(blob[at + i])) * scale)
    for i in range(count):
        slow = (phi[start + i] - step[i]) - apart[i]
        taken = rho * (slow - baseline[start + i])
        phi[start + i] = slow
        correction[start + i] = taken
        baseline[start + i] += taken


@compiled
def merge(
    vectors: tuple[Floats, Floats, Floats],
    blobs: tuple[Bytes, Bytes],
    factors: tuple[Floats, Floats],
    rho: np.float32,
) -> None:
    """Takes the outer step on phi, baseline and correction, in place.

    The blobs are q4 [J, size] and int8 [K, size]; the factors are their weights [J] and [K].
    """
    n, scratch = np.uint64(len(vectors[0])), _scratch()
    for block in range(n // _256):
        _merge(vectors, blobs, factors, rho, block, _256, scratch)
    if n % _256:
        _merge(vectors, blobs, factors, rho, n // _256, n % _256, scratch)

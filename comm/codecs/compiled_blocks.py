"""Codecs and outer steps, compiled by numba. Each function reads arrays in host memory in one pass, without the GIL.

For finite numbers the functions return the same bits as the formulas in torch (comm/codecs/blockwise.py,
comm/gossip/outer_kernels.py). If a number is NaN or infinite, the returned fault code or bit pattern says so, and the
other results are meaningless. Techniques that let the functions run at the speed of the memory:

- Loops over a whole block have a constant length, and their scratch arrays stay in the L1 cache. The same code, inlined
  a second time, processes the incomplete block at the end.
- A block's largest magnitude (its peak) is computed as an integer: the maximum of the bit patterns without the sign
  bit. A maximum of floats would not be vectorised, and would miss NaN.
- Adding 1.5 * 2^23 to a number below 2^22, and subtracting it again, rounds half to even, as `round` does.
- Array indexes are unsigned, since numba compares a signed index with zero at each access.
- A byte of two 4-bit levels is converted through a 16-bit number with one level in each byte, and a byte of eight signs
  through a 32-bit number of eight 4-bit levels.
- All code is in one file, because numba's disk cache notices changes only in the file of the called function.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from decentral.core.compiled import compiled, inlined

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Number = Any  # a scalar; numba infers its type
Scratch = tuple[Floats, npt.NDArray[np.int32], Floats, Bytes, npt.NDArray[np.uint16]]

INFINITE = 0x7F800000  # fp32 bits of +infinity; the bits of any infinity or NaN, without the sign, are at least this
UNITS = 1 << 15  # q1 rounds magnitudes to multiples of p / UNITS; p is the largest power of two <= the block's peak
BAD_LEVEL, NOT_FINITE = 1, 2  # bit flags of a fault code; the code of a valid blob is 0

_ROUNDER = np.float32(1.5 * 2**23)
_1, _2 = np.uint64(1), np.uint64(2)
_64, _128, _256 = np.uint64(64), np.uint64(128), np.uint64(256)


@inlined
def _scratch() -> Scratch:
    """Return arrays for one block: values, their memory as int32, levels, level + 8 as bytes, these bytes as uint16."""
    values, levels, nibbles = np.zeros(256, np.float32), np.zeros(256, np.float32), np.zeros(128, np.uint8)
    return values, values.view(np.int32), levels, nibbles, nibbles.view(np.uint16)


@inlined
def _put_scale(
    scratch: Scratch, block_size: Number, highest: Number, blob: Bytes, block: Number
) -> tuple[Number, Number]:
    """Write block `block`'s scale: peak / highest, rounded up to bf16. Return the scale, and the peak's bit pattern."""
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
    """Set the scratch levels to round(value / scale), or to 0 if the scale is 0."""
    values, _, levels, _, _ = scratch
    divisor = scale if scale != np.float32(0.0) else np.float32(1.0)
    for i in range(block_size):
        levels[i] = (values[i] / divisor + _ROUNDER) - _ROUNDER


@inlined
def _put_q4(scratch: Scratch, count: Number, blob: Bytes, at: Number) -> Number:
    """Write a block's first `count` levels to the blob from byte `at` on; return the sum of the squared levels.

    Scratch levels beyond `count` must be zero.
    """
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
    """Write a block in q4; return its scale, the bit pattern of its peak, and the sum of its squared levels.

    Scratch values beyond `count` must be zero.
    """
    scale, peak = _put_scale(scratch, _128, np.float32(7.0), blob, block)
    _quantise(scratch, _128, scale)
    return scale, peak, _put_q4(scratch, count, blob, _2 * blocks + block * _64)


@inlined
def _encode_signs(
    scratch: Scratch, count: Number, blob: Bytes, block: Number, blocks: Number
) -> tuple[Number, Number, Number]:
    """Write a block in q4 with q1's levels (7 or -7 by sign, all 0 if the scale is 0); return the same as `_encode_q4`.

    Magnitudes are summed as integers, so the order does not matter: comm/codecs/blockwise.py has the formula.
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
    """Read `count` levels from byte `at` of a q4 blob into scratch, and set the block's other levels to zero."""
    _, _, _, nibbles, pairs = scratch
    for i in range((count + _1) // _2):
        pair = np.uint16(blob[at + i])
        pairs[i] = np.uint16((pair & np.uint16(15)) | ((pair & np.uint16(240)) << np.uint16(4)))
    for i in range(count, _128):
        nibbles[i] = np.uint8(8)


@inlined
def _q4_peak(scratch: Scratch) -> Number:
    """Return the largest magnitude of the 4-bit levels in scratch."""
    nibbles = scratch[3]
    low, high = np.uint8(8), np.uint8(8)
    for i in range(_128):
        low, high = np.uint8(min(low, nibbles[i])), np.uint8(max(high, nibbles[i]))
    return max(np.int32(8) - np.int32(low), np.int32(high) - np.int32(8))


@inlined
def _fault(peak: Number, highest: Number, scale: Number) -> Number:
    """Return a block's fault code, given its largest level magnitude `peak`; a scale of NaN or infinity is a fault."""
    fault = np.int32(0)
    if peak > highest or (scale < np.float32(0.0) and np.isfinite(scale)):
        fault |= np.int32(BAD_LEVEL)
    if not np.isfinite(np.float32(np.float32(peak) * scale)):
        fault |= np.int32(NOT_FINITE)
    return fault


@compiled
def largest(values: Floats) -> Number:
    """Return the bit pattern of the largest magnitude in `values`; it is >= INFINITE if a value is not finite."""
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
    """Encode fp32 values into a q4 blob; return the bit pattern of the largest magnitude.

    If the bit pattern is INFINITE or above, a value is not finite and the blob is meaningless.
    """
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
    """Encode fp32 values into an int8 blob; return the fp32 bit pattern of the largest magnitude."""
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
    """Decode a q4 blob of the right size into `values`; return the blob's fault code."""
    n, scratch, fault = np.uint64(len(values)), _scratch(), np.int32(0)
    for block in range(n // _128):
        fault |= _unpack_q4(blob, values, block, _128, scratch)
    if n % _128:
        fault |= _unpack_q4(blob, values, n // _128, n % _128, scratch)
    return fault


@inlined
def _int8_peak(blob: Bytes, at: Number, count: Number) -> Number:
    """Return the largest magnitude of a block's int8 levels, which begin at byte `at`."""
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
    """Decode an int8 blob of the right size into `values`; return the blob's fault code."""
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
    """Convert each byte of eight q1 signs to a uint32 of eight q4 levels: bit 1 becomes level 7, and bit 0 level -7."""
    for i in range(np.uint64(len(signs))):
        eight, row = np.uint32(signs[i]), np.uint32(0)
        for k in range(8):
            sign = (eight >> np.uint32(7 - k)) & np.uint32(1)
            row |= (np.uint32(1) + np.uint32(14) * sign) << np.uint32(4 * k)
        levels[i] = row


@compiled
def narrow(levels: npt.NDArray[np.uint32], signs: Bytes) -> None:
    """Convert each uint32 of eight q4 levels to a byte of eight q1 signs: a level >= 0 becomes bit 1, else bit 0."""
    for i in range(np.uint64(len(signs))):
        row, eight = np.uint32(levels[i]) >> np.uint32(3), np.uint32(0)
        for k in range(8):
            eight |= ((row >> np.uint32(4 * k)) & np.uint32(1)) << np.uint32(7 - k)
        signs[i] = np.uint8(eight)


@compiled
def close(vectors: tuple[Floats, Floats, Floats], blob: Bytes, signs: bool) -> tuple[Number, Number]:
    """Encode v = residual + (baseline - snapshot) into a q4 blob, and set residual to v - (v as decoded).

    `vectors` are (snapshot, baseline, residual). If `signs` is True, levels are 7, -7 or 0 as in `_encode_signs`.
    Return the squared L2 norm of the decoded vector, and the bit pattern of the largest magnitude in v.
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
    """Return the squared L2 norm of the vector in a q4 blob of the right size, and the blob's fault code."""
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
        difference = np.float64(np.float32(np.float32(np.int8(blob[at + i])) * scale - phi[start + i]))
        sums[i] += difference * difference
    return _fault(_int8_peak(blob, at, count), 127, scale)


@compiled
def distance(phi: Floats, blob: Bytes) -> tuple[Number, Number]:
    """Return the squared L2 distance of phi from the vector in an int8 blob of the right size, and its fault code."""
    n, sums, fault = np.uint64(len(phi)), np.zeros(256, np.float64), np.int32(0)
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
    """Add block `block` of every q4 blob, times the blob's weight, to the scratch values from index `first` on."""
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
    """Do the work of `merge` for one int8 block, which has as many numbers as two q4 blocks."""
    phi, baseline, correction = vectors
    (steps, towards), (step_weights, towards_weights) = blobs, factors
    n, start, step, consensus = np.uint64(len(phi)), block * _256, scratch[0], scratch[2]
    for i in range(_256):
        step[i], consensus[i] = np.float32(0.0), np.float32(0.0)
    _sum_q4(steps, step_weights, n, _2 * block, min(count, _128), np.uint64(0), scratch)
    if count > _128:
        _sum_q4(steps, step_weights, n, _2 * block + _1, count - _128, _128, scratch)
    at = _2 * ((n + _256 - _1) // _256) + start
    for k in range(len(towards)):
        blob, weight = towards[k], towards_weights[k]
        scale = _get_scale(blob, block)
        for i in range(count):
            consensus[i] += weight * (phi[start + i] - np.float32(np.int8(blob[at + i])) * scale)
    for i in range(count):
        slow = (phi[start + i] - step[i]) - consensus[i]
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
    """Take the outer step on `vectors` (phi, baseline, correction) in place, as comm/gossip/outer_kernels.py says.

    `blobs`: pseudo-gradients in q4 [J, bytes], slow weights in int8 [K, bytes]. `factors`: their weights [J] and [K].
    """
    n, scratch = np.uint64(len(vectors[0])), _scratch()
    for block in range(n // _256):
        _merge(vectors, blobs, factors, rho, block, _256, scratch)
    if n % _256:
        _merge(vectors, blobs, factors, rho, n // _256, n % _256, scratch)

"""The rotated codes h4 and h3 as machine code over arrays in host memory, each in one pass, the GIL free meanwhile.

They give the bytes and the numbers of the formulas in train/rotated_codes.py, bit for bit, for numbers that are finite:
the rotation adds and subtracts the same pairs in the same order, a tile's sums are added in the same tree, and scales
are rounded alike. What keeps them fast is what block_kernels.py lists: loops whose trip count is a constant, over
scratch that stays in the nearest cache.

The rotation is the fast Walsh-Hadamard transform in its constant geometry (Pease, 1968): each of the seven stages
adds and subtracts the two halves of the tile and writes the results side by side, so that every stage is one loop.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from decentral.core.machine_code import compiled, inlined, inner
from decentral.train.block_kernels import BAD_LEVEL, INFINITE, NOT_FINITE, Bytes, Floats

Number = Any  # a scalar, whose type numba infers
Tile = tuple[Floats, Floats, npt.NDArray[np.int32], Floats]

TILE = 128
STAGES = 7  # of a transform of 128 numbers
# The signs of the rotation: one bit for each number of a tile, 1 for minus. They are the first bits of pi's fraction.
SIGN_BITS = 0x243F6A8885A308D313198A2E03707344
SIGNS: Floats = np.array([-1.0 if SIGN_BITS >> (TILE - 1 - at) & 1 else 1.0 for at in range(TILE)], np.float32)
# Half the distance between two levels, over the mean magnitude of a tile's rotated numbers: of Gaussian numbers, as
# rotated ones nearly are, these leave the least squared error (Max, 1960: steps of 0.3352 and 0.5860 deviations).
HALF_STEP = {4: np.float32(0.3352 / 2 / 0.79788456), 3: np.float32(0.5860 / 2 / 0.79788456)}

_ROTATED_ONCE = np.float32(1 / 128)  # before the first transform: two of them make 128 times what it was
_1, _2, _3, _8 = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(8)
_64, _128 = np.uint64(64), np.uint64(128)
_HALF_4, _HALF_3 = HALF_STEP[4], HALF_STEP[3]


@inlined
def _tile() -> Tile:
    """Scratch: the tile's numbers, a second place for them, its levels (odd numbers), and the terms of a sum."""
    return np.zeros(128, np.float32), np.zeros(128, np.float32), np.zeros(128, np.int32), np.zeros(128, np.float32)


@inlined
def _stage(before: Floats, after: Floats) -> None:
    for i in range(_64):
        upper, lower = before[i], before[i + _64]
        after[_2 * i] = upper + lower
        after[_2 * i + _1] = upper - lower


@inner
def _transform(tile: Tile) -> None:
    """The tile's numbers, transformed, are in its second place afterwards."""
    first, second = tile[0], tile[1]
    for _ in range(3):
        _stage(first, second)
        _stage(second, first)
    _stage(first, second)


@inner
def _sum(terms: Floats) -> Number:
    """Adds halves until one number is left. The terms are used up."""
    width = _64
    while width >= _1:
        for i in range(width):
            terms[i] = terms[i] + terms[i + width]
        width = width // _2
    return terms[0]


@inlined
def _nearest_bf16(value: Number) -> Number:
    """The upper half of the bits of a non-negative number, rounded to even."""
    bits = np.float32(value).view(np.int32)
    return np.int32((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))


@inlined
def _levels(tile: Tile, ratio: Number, highest: Number) -> Number:
    """Rotates what the tile holds into levels -highest, ..., -1, 1, ..., highest; gives the scale as bf16 bits.

    The scale is the one with which these levels have the least squared error.
    """
    _, rotated, levels, terms = tile
    _transform(tile)
    for i in range(_128):
        terms[i] = abs(rotated[i])
    half_step = np.float32(_sum(terms) * np.float32(1 / 128)) * ratio
    divisor = half_step if half_step != np.float32(0.0) else np.float32(1.0)
    squares = np.int32(0)
    for i in range(_128):
        place = np.floor(np.float32(rotated[i] / divisor) * np.float32(0.5))
        place = min(max(place, np.float32(-highest - 1) * np.float32(0.5)), np.float32(highest - 1) * np.float32(0.5))
        level = np.int32(2) * np.int32(place) + np.int32(1)
        levels[i] = level
        squares += level * level
        terms[i] = np.float32(level) * rotated[i]
    return _nearest_bf16(np.float32(_sum(terms) / np.float32(squares)))


@inlined
def _load(values: Floats, start: Number, count: Number, tile: Tile) -> Number:
    """Takes a tile of values, padded with zeros; gives the bit pattern of their largest magnitude."""
    loaded, peak = tile[0], np.int32(0)
    bits = loaded.view(np.int32)
    for i in range(count):
        loaded[i] = values[start + i]
    for i in range(count, _128):
        loaded[i] = np.float32(0.0)
    for i in range(_128):
        peak = max(peak, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    for i in range(_128):
        loaded[i] = loaded[i] * SIGNS[i] * _ROTATED_ONCE
    return peak


@inlined
def _put_scale(bits: Number, blob: Bytes, number: Number) -> None:
    blob[_2 * number] = np.uint8(bits & np.int32(255))
    blob[_2 * number + _1] = np.uint8(bits >> np.int32(8))


@inlined
def _scale_of(blob: Bytes, number: Number) -> Number:
    upper = np.int32(blob[_2 * number]) | (np.int32(blob[_2 * number + _1]) << np.int32(8))
    return np.int32(upper << np.int32(16)).view(np.float32)


@inlined
def _pack_tile(values: Floats, blob: Bytes, place: tuple[Number, Number, Number], tile: Tile, bits: Number) -> Number:
    """`place`: the tile's number, how many there are, and how many numbers it has of the values."""
    number, tiles, count = place
    peak = _load(values, number * _128, count, tile)
    levels = tile[2]
    if bits == 4:
        _put_scale(_levels(tile, _HALF_4, 15), blob, number)
        at = _2 * tiles + number * _64
        for i in range(_64):
            low, high = (levels[_2 * i] + np.int32(15)) >> 1, (levels[_2 * i + _1] + np.int32(15)) >> 1
            blob[at + i] = np.uint8(low | (high << 4))
    else:
        _put_scale(_levels(tile, _HALF_3, 7), blob, number)
        at = _2 * tiles + number * np.uint64(48)
        for i in range(np.uint64(16)):
            group = np.int32(0)
            for k in range(_8):
                group |= ((levels[_8 * i + k] + np.int32(7)) >> 1) << np.int32(_3 * k)
            blob[at + _3 * i] = np.uint8(group & 255)
            blob[at + _3 * i + _1] = np.uint8((group >> 8) & 255)
            blob[at + _3 * i + _2] = np.uint8(group >> 16)
    return peak


@inlined
def _pack(values: Floats, blob: Bytes, bits: Number) -> Number:
    n, tile, largest = np.uint64(len(values)), _tile(), np.int32(0)
    tiles = (n + _128 - _1) // _128
    for number in range(tiles):
        count = min(_128, n - number * _128)
        largest = max(largest, _pack_tile(values, blob, (number, tiles, count), tile, bits))
    return largest


@compiled
def pack_h4(values: Floats, blob: Bytes) -> Number:
    """Fills the blob; gives the bit pattern of the largest magnitude. The blob is void unless that is finite."""
    return _pack(values, blob, 4)


@compiled
def pack_h3(values: Floats, blob: Bytes) -> Number:
    """As pack_h4."""
    return _pack(values, blob, 3)


@inlined
def _unpack_tile(blob: Bytes, values: Floats, place: tuple[Number, Number, Number], tile: Tile, bits: Number) -> Number:
    number, tiles, count = place
    scale, (first, second, _, _) = _scale_of(blob, number), tile
    if bits == 4:
        at = _2 * tiles + number * _64
        for i in range(_64):
            pair = np.int32(blob[at + i])
            first[_2 * i] = np.float32(np.int32(2) * (pair & 15) - np.int32(15)) * scale
            first[_2 * i + _1] = np.float32(np.int32(2) * (pair >> 4) - np.int32(15)) * scale
    else:
        at = _2 * tiles + number * np.uint64(48)
        for i in range(np.uint64(16)):
            group = np.int32(blob[at + _3 * i]) | (np.int32(blob[at + _3 * i + _1]) << 8)
            group |= np.int32(blob[at + _3 * i + _2]) << 16
            for k in range(_8):
                level = np.int32(2) * ((group >> np.int32(_3 * k)) & 7) - np.int32(7)
                first[_8 * i + k] = np.float32(level) * scale
    _transform(tile)
    start = number * _128
    for i in range(count):
        values[start + i] = second[i] * SIGNS[i]
    bits_of, peak = second.view(np.int32), np.int32(0)
    for i in range(count):
        peak = max(peak, np.int32(bits_of[i] & np.int32(0x7FFFFFFF)))
    fault = np.int32(NOT_FINITE) if peak >= np.int32(INFINITE) else np.int32(0)
    return fault | (np.int32(BAD_LEVEL) if scale < np.float32(0.0) and np.isfinite(scale) else np.int32(0))


@inlined
def _unpack(blob: Bytes, values: Floats, bits: Number) -> Number:
    n, tile, fault = np.uint64(len(values)), _tile(), np.int32(0)
    tiles = (n + _128 - _1) // _128
    for number in range(tiles):
        fault |= _unpack_tile(blob, values, (number, tiles, min(_128, n - number * _128)), tile, bits)
    return fault


@compiled
def unpack_h4(blob: Bytes, values: Floats) -> Number:
    """Fills the values; gives what is wrong with the blob, whose size is right."""
    return _unpack(blob, values, 4)


@compiled
def unpack_h3(blob: Bytes, values: Floats) -> Number:
    """As unpack_h4."""
    return _unpack(blob, values, 3)

"""The codec `sparse`, compiled by numba: choose each group's largest numbers, and encode their places.

Start at `close`. comm/codecs/blockwise.py has the format, and the formulas in torch, whose numbers these functions
return as long as all are finite. Each group of GROUP numbers is processed alone, in arrays that stay in the L1 cache.

A group's k-th largest magnitude is found by radix selection: count how many magnitudes have each value of the 11
highest bits, descend to the value of the k-th, and do the same with the next bits of the magnitudes that have this
value. Neighbouring groups are alike, so magnitudes below 0.7 times the previous group's k-th largest are left out, if
k others are left.
"""

import numpy as np
import numpy.typing as npt

from decentral.comm.codecs.compiled_blocks import BAD_LEVEL, INFINITE, UNITS, Bytes, Floats, Number
from decentral.core.compiled import compiled, inlined

GROUP = 4096  # numbers with one header, of which the largest are sent
BUCKET = 16  # one number per BUCKET is sent; a power of two
LOW_BITS = 4  # log2(BUCKET): bits of a place within its bucket
HIGH = 7  # level of large numbers in q4
MOST_SMALL = 6  # highest level of small numbers in q4

Ints = npt.NDArray[np.int32]
Scratch = tuple[Floats, Ints, Ints, Ints, Ints]
Parts = tuple[Bytes, Bytes, Bytes, Bytes]  # of a sparse blob: headers, buckets, low bits of the places, levels

_SENT = GROUP // BUCKET  # numbers that a whole group sends
_BLOCK = 128  # numbers with one scale in q4
_ZEROS = 0x88  # a byte of q4 with two levels of 0
_DIGITS = ((20, 11), (10, 10), (0, 10))  # the lowest bit, and the number of bits, of each digit of a magnitude
_NEAR = 1 << 22  # what is subtracted from the bits of a k-th largest magnitude, to get a bound about 0.7 times as large


@inlined
def _scratch() -> Scratch:
    """Return arrays for a group: values, their memory as int32, magnitudes to choose from, counts, and places."""
    values = np.empty(GROUP, np.float32)
    counts, places = np.empty(2048, np.int32), np.empty(GROUP, np.int32)
    return values, values.view(np.int32), np.empty(GROUP, np.int32), counts, places


@inlined
def _magnitude(bits: Number) -> Number:
    return np.int32(bits & np.int32(0x7FFFFFFF))


@inlined
def _candidates(scratch: Scratch, count: Number, floor: Number) -> Number:
    """Write places and magnitudes of a group's numbers of at least `floor` to scratch; return how many there are."""
    _, bits, left, _, places = scratch
    size = np.int32(0)
    for i in range(count):
        left[size], places[size] = _magnitude(bits[i]), np.int32(i)
        size += np.int32(_magnitude(bits[i]) >= floor)
    return size


@inlined
def _kth_largest(scratch: Scratch, size: Number, kth: Number) -> tuple[Number, Number]:
    """Return the bits of the k-th largest of `size` magnitudes, and how many of the k largest have this magnitude."""
    _, _, left, counts, _ = scratch
    found, wanted = np.int32(0), np.int32(kth)
    for low, width in _DIGITS:
        highest = np.int32((1 << width) - 1)
        counts[: highest + 1] = 0
        for i in range(size):
            counts[(left[i] >> low) & highest] += 1
        digit = highest
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= np.int32(1)
        found |= np.int32(digit << low)
        kept = np.int32(0)
        for i in range(size):
            left[kept] = left[i]
            kept += np.int32(((left[i] >> low) & highest) == digit)
        size = kept
    return found, wanted


@inlined
def _choose(scratch: Scratch, count: Number, sent: Number, floor: Number) -> Number:
    """Write the places of a group's `sent` largest magnitudes to scratch, in order; return the smallest one's bits.

    Of equal magnitudes the first are chosen. `floor` is a guessed lower bound; a wrong guess only costs time.
    """
    _, bits, _, _, places = scratch
    size = _candidates(scratch, count, floor)
    if size < sent:
        size = _candidates(scratch, count, np.int32(0))
    threshold, equal = _kth_largest(scratch, size, sent)
    found = np.int32(0)
    for j in range(size):
        at = places[j]
        is_equal = _magnitude(bits[at]) == threshold
        places[found] = at
        found += np.int32(_magnitude(bits[at]) > threshold or (is_equal and equal > 0))
        equal -= np.int32(is_equal)
    return threshold


@inlined
def _levels(scratch: Scratch, sent: Number) -> tuple[Number, Number, Number]:
    """Compute a group's header from the numbers at the first `sent` places, and write their units to scratch.

    Return the header, the sum of the units (a number is large if its units times `sent` are at least this sum), and the
    bits of the largest magnitude. comm/codecs/blockwise.py has the formulas.
    """
    values, bits, units, _, places = scratch
    peak, total = np.int32(0), np.int32(0)
    for j in range(sent):
        peak = max(peak, _magnitude(bits[places[j]]))
    unit = np.float32(np.int32(peak & np.int32(INFINITE)).view(np.float32) / np.float32(UNITS))
    divisor = unit if unit != np.float32(0.0) else np.float32(1.0)
    for j in range(sent):
        units[j] = np.int32(np.rint(np.float32(abs(values[places[j]]) / divisor)))
        total += units[j]
    large, of_large = np.int64(0), np.int64(0)
    for j in range(sent):
        if units[j] * sent >= total:
            large += 1
            of_large += units[j]
    mean = np.float32(np.float32(of_large) / np.float32(HIGH * HIGH * large))
    header = np.int32((np.float32(mean * unit).view(np.int32) >> np.int32(19)) << np.int32(3))
    times, most = (np.int64(total) - of_large) * large, of_large * (np.int64(sent) - large)
    if header != 0 and most > 0:
        header |= np.int32(min(np.int64(MOST_SMALL), (2 * HIGH * times + most) // (2 * most)))
    return header, total, peak


@inlined
def _scale(header: Number) -> Number:
    """Return the scale of a group's levels in q4: 7 t, exact in bf16."""
    return np.float32(np.float32(HIGH) * np.int32((header & np.int32(0xFFF8)) << np.int32(16)).view(np.float32))


@inlined
def _put_scales(blob: Bytes, group: Number, blocks: Number, scale: Number) -> None:
    """Write a group's scale to each of its blocks in a q4 blob of `blocks` blocks."""
    upper = np.float32(scale).view(np.int32) >> np.int32(16)
    for block in range(group * (GROUP // _BLOCK), min((group + 1) * (GROUP // _BLOCK), blocks)):
        blob[2 * block], blob[2 * block + 1] = np.uint8(upper & 255), np.uint8((upper >> 8) & 255)


@inlined
def _put_level(blob: Bytes, blocks: Number, at: Number, level: Number) -> None:
    """Change the level of number `at` in a q4 blob of `blocks` blocks from 0 to `level`."""
    byte = 2 * blocks + (at >> 1)
    blob[byte] = np.uint8(blob[byte] ^ ((8 ^ (level + 8)) << (4 * (at & 1))))


@inlined
def _get_level(blob: Bytes, blocks: Number, at: Number) -> Number:
    return np.int32((blob[2 * blocks + (at >> 1)] >> (4 * (at & 1))) & 15) - np.int32(8)


@compiled
def close(vectors: tuple[Floats, Floats, Floats], blob: Bytes) -> tuple[Number, Number]:
    """Encode v = residual + (baseline - snapshot) as `sparse` does, into a q4 blob; set residual to v - (v as decoded).

    `vectors` are (snapshot, baseline, residual). Return the squared L2 norm of the decoded vector, and the bit pattern
    of the largest magnitude in v; if it is INFINITE or above, blob and residual are meaningless.
    """
    snapshot, baseline, residual = vectors
    n, scratch, largest, squares, floor = np.uint64(len(residual)), _scratch(), np.int32(0), 0.0, np.int32(0)
    values, _, units, _, places = scratch
    blocks = (len(residual) + _BLOCK - 1) // _BLOCK
    blob[2 * blocks :] = _ZEROS
    for group in range((len(residual) + GROUP - 1) // GROUP):
        start = np.uint64(group * GROUP)
        count = min(np.uint64(GROUP), n - start)
        sent = np.int32((count + np.uint64(BUCKET - 1)) // np.uint64(BUCKET))
        for i in range(count):
            values[i] = residual[start + i] + (baseline[start + i] - snapshot[start + i])
        for i in range(count):
            residual[start + i] = values[i]
        floor = max(np.int32(0), np.int32(_choose(scratch, count, sent, floor) - np.int32(_NEAR)))
        header, total, peak = _levels(scratch, sent)
        largest, scale, small = max(largest, peak), _scale(header), header & np.int32(7)
        _put_scales(blob, group, blocks, scale)
        found: Number = 0  # sum of squared levels
        for j in range(sent):
            level = np.int32(HIGH) if units[j] * sent >= total else small
            if scale == np.float32(0.0) or level == 0:
                continue
            value, at = values[places[j]], group * GROUP + places[j]
            level = level if value >= np.float32(0.0) else -level
            _put_level(blob, blocks, at, level)
            residual[at] = value - np.float32(level) * scale
            found += level * level
        squares += found * (np.float64(scale) * np.float64(scale))
    return squares, largest


@compiled
def widen(parts: Parts, elements: int, blob: Bytes) -> int:
    """Convert a sparse blob of `elements` numbers, in parts, to a q4 blob; return the fault code."""
    headers, buckets, low_bits, levels = parts
    sent, found, before = (elements + BUCKET - 1) // BUCKET, 0, -1
    blocks, small = (elements + _BLOCK - 1) // _BLOCK, np.int32(0)
    blob[2 * blocks :] = _ZEROS
    for bit in range(2 * sent):
        if not (buckets[bit >> 3] >> (7 - (bit & 7))) & 1:
            continue
        if found == sent:
            return BAD_LEVEL
        group = found // _SENT
        if found % _SENT == 0:
            header = np.int32(headers[2 * group]) | (np.int32(headers[2 * group + 1]) << np.int32(8))
            small = header & np.int32(7)
            if small > MOST_SMALL:
                return BAD_LEVEL
            _put_scales(blob, group, blocks, _scale(header))
        at = (bit - found) * BUCKET + ((low_bits[found >> 1] >> (4 - 4 * (found & 1))) & 15)
        if at <= before or at >= elements or at // GROUP != group:
            return BAD_LEVEL
        pair = levels[found >> 2] >> (6 - 2 * (found & 3))
        level = np.int32(HIGH) if pair & 1 else small
        _put_level(blob, blocks, at, level if pair & 2 else -level)
        found, before = found + 1, at
    return 0 if found == sent else BAD_LEVEL


@compiled
def narrow(blob: Bytes, elements: int, parts: Parts) -> None:
    """Convert a q4 blob that `close` or `widen` has written to a sparse one: fill its `parts`, which must be zero."""
    headers, buckets, low_bits, levels = parts
    blocks, found, places = (elements + _BLOCK - 1) // _BLOCK, 0, np.empty(GROUP, np.int32)
    for group in range((elements + GROUP - 1) // GROUP):
        start, count = group * GROUP, min(GROUP, elements - group * GROUP)
        block = group * (GROUP // _BLOCK)
        upper = np.int32(blob[2 * block]) | (np.int32(blob[2 * block + 1]) << np.int32(8))
        scale = np.int32(upper << np.int32(16)).view(np.float32)
        header = np.float32(scale / np.float32(HIGH)).view(np.int32) >> np.int32(16)
        sent = (count + BUCKET - 1) // BUCKET
        if _nonzero(blob, 2 * blocks + start // 2, count, places) < sent:
            _fill(blob, blocks, start, sent, places)
        for j in range(sent):
            at = start + places[j]
            level = _get_level(blob, blocks, at)
            magnitude = abs(level)
            if magnitude != 0 and magnitude != HIGH:
                header = np.int32((header & np.int32(0xFFF8)) | magnitude)
            bit, pair = at // BUCKET + found, 2 * (level >= 0) + (magnitude == HIGH)
            buckets[bit >> 3] |= np.uint8(128 >> (bit & 7))
            low_bits[found >> 1] |= np.uint8((at & (BUCKET - 1)) << (4 - 4 * (found & 1)))
            levels[found >> 2] |= np.uint8(pair << (6 - 2 * (found & 3)))
            found += 1
        headers[2 * group], headers[2 * group + 1] = np.uint8(header & 255), np.uint8((header >> 8) & 255)


@inlined
def _nonzero(blob: Bytes, first: Number, count: Number, places: Ints) -> Number:
    """Write the places of a group's levels other than 0 to `places`; return how many there are.

    The group's levels begin at byte `first`.
    """
    found = np.int32(0)
    for byte in range(np.uint64((count + 1) // 2)):
        pair = blob[np.uint64(first) + byte]
        places[found] = np.int32(np.uint64(2) * byte)
        found += np.int32((pair & np.uint8(15)) != np.uint8(8))
        places[found] = np.int32(np.uint64(2) * byte + np.uint64(1))
        found += np.int32((pair >> np.uint8(4)) != np.uint8(8))
    return found


@inlined
def _fill(blob: Bytes, blocks: Number, start: Number, sent: Number, places: Ints) -> None:
    """Write the places of `sent` numbers of a group: of levels other than 0, and of the first zeros.

    The group begins at number `start`.
    """
    zeros, at, found = sent, start, 0
    for other in range(start, min(start + GROUP, 2 * (len(blob) - 2 * blocks))):
        zeros -= _get_level(blob, blocks, other) != 0
    while found < sent:
        is_zero = _get_level(blob, blocks, at) == 0
        if not is_zero or zeros > 0:
            places[found] = at - start
            found += 1
            zeros -= is_zero
        at += 1

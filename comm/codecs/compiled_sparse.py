"""The codec `sparse`, compiled by numba: choose each group's largest numbers, and encode their places.

Start at `close`. comm/codecs/blockwise.py has the format, and the formulas in torch, whose numbers these functions
return as long as all are finite. Each group of GROUP numbers is processed alone, in arrays that stay in the L1 cache.

A group's k-th largest magnitude is found by radix selection: count how many magnitudes lie in each of 256 equal ranges,
descend to the range of the k-th, and divide this range again. Neighbouring groups are alike, so magnitudes below 0.92
times the previous group's k-th largest are left out, if k others are left. Loops do not branch on the numbers, since
CPUs mispredict half of such branches; instead each place is written, and the list's length grows by 0 or 1.
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
Scratch = tuple[Ints, Ints, Ints, Floats, Ints]
Parts = tuple[Bytes, Bytes, Bytes, Bytes]  # of a sparse blob: headers, buckets, low bits of the places, levels

_SENT = GROUP // BUCKET  # numbers that a whole group sends
_BLOCK = 128  # numbers with one scale in q4
_1, _2, _3, _4, _6, _7 = (np.uint64(one) for one in (1, 2, 3, 4, 6, 7))
_ZEROS = 0x88  # a byte of q4 with two levels of 0
_BINS = 256  # equal ranges of magnitudes among which the k-th largest is searched
_NEAR = 1 << 20  # subtracted from the bits of a k-th largest magnitude, to get a bound about 0.92 times as large


@inlined
def _scratch() -> Scratch:
    """Return arrays for a group: places, magnitudes to choose from, counts, and the chosen numbers and their units."""
    places, left, counts = np.empty(GROUP + 1, np.int32), np.empty(GROUP, np.int32), np.empty(_BINS, np.int32)
    return places, left, counts, np.empty(GROUP, np.float32), np.empty(GROUP, np.int32)


@inlined
def _magnitude(bits: Number) -> Number:
    return np.int32(bits & np.int32(0x7FFFFFFF))


@inlined
def _candidates(scratch: Scratch, bits: Ints, floor: Number) -> Number:
    """Write the places of a group's numbers with magnitudes of at least `floor` to scratch; return their count.

    `bits` are the group's numbers as int32.
    """
    places, size = scratch[0], np.uint64(0)
    for i in range(np.uint64(len(bits))):
        places[size] = np.int32(i)
        size += np.uint64(_magnitude(bits[i]) >= floor)
    return size


@inlined
def _kth_largest(scratch: Scratch, size: Number, kth: Number, lowest: Number, highest: Number) -> tuple[Number, Number]:
    """Return the bits of the k-th largest of `size` magnitudes, and how many of the k largest have this magnitude.

    All magnitudes lie from `lowest` to `highest`.
    """
    _, left, counts, _, _ = scratch
    wanted = np.int32(kth)
    while True:
        shift = np.int32(0)
        while (highest - lowest) >> shift >= _BINS:
            shift += np.int32(1)
        counts[:] = 0
        for i in range(size):
            counts[np.uint64((left[i] - lowest) >> shift)] += np.int32(1)
        found = np.uint64((highest - lowest) >> shift)
        while counts[found] < wanted:
            wanted -= counts[found]
            found -= _1
        kept = np.uint64(0)
        for i in range(size):
            left[kept] = left[i]
            kept += np.uint64(np.uint64((left[i] - lowest) >> shift) == found)
        size = kept
        lowest = np.int32(lowest + np.int32(found << np.uint64(shift)))
        if shift == 0:
            return lowest, wanted
        highest = np.int32(lowest + (np.int32(1) << shift) - np.int32(1))


@inlined
def _choose(scratch: Scratch, bits: Ints, sent: Number, floor: Number) -> tuple[Number, Number]:
    """Write the places of a group's `sent` largest magnitudes to scratch, in order.

    Of equal magnitudes the first are chosen. `floor` is a guessed lower bound; a wrong guess only costs time. Return
    the bits of the smallest and of the largest chosen magnitude.
    """
    places, left, _, _, _ = scratch
    size = _candidates(scratch, bits, floor)
    if size < sent:
        floor = np.int32(0)
        size = _candidates(scratch, bits, floor)
    peak = np.int32(0)
    for j in range(size):
        left[j] = _magnitude(bits[np.uint64(places[j])])
        peak = max(peak, left[j])
    threshold, equal = _kth_largest(scratch, size, sent, floor, peak)
    found = np.uint64(0)
    for j in range(size):
        at = places[j]
        magnitude = _magnitude(bits[np.uint64(at)])
        is_equal = magnitude == threshold
        places[found] = at
        found += np.uint64((magnitude > threshold) | (is_equal & (equal > 0)))
        equal -= np.int32(is_equal)
    return threshold, peak


@inlined
def _levels(scratch: Scratch, values: Floats, sent: Number, peak: Number) -> tuple[Number, Number]:
    """Compute a group's header from the numbers at the first `sent` places; write them and their units to scratch.

    Return the header, and the sum of the units: a number is large if its units times `sent` are at least this sum.
    `peak` is the bits of the largest magnitude. comm/codecs/blockwise.py has the formulas.
    """
    places, _, _, chosen, units = scratch
    unit = np.float32(np.int32(peak & np.int32(INFINITE)).view(np.float32) / np.float32(UNITS))
    divisor = unit if unit != np.float32(0.0) else np.float32(1.0)
    total, large, of_large = np.int32(0), np.int64(0), np.int64(0)
    for j in range(sent):
        chosen[j] = values[np.uint64(places[j])]
    for j in range(sent):
        units[j] = np.int32(np.rint(np.float32(abs(chosen[j]) / divisor)))
        total += units[j]
    for j in range(sent):
        is_large = np.int64(units[j]) * np.int64(sent) >= total
        large += is_large
        of_large += units[j] * is_large
    mean = np.float32(np.float32(of_large) / np.float32(HIGH * HIGH * large))
    header = np.int32((np.float32(mean * unit).view(np.int32) >> np.int32(19)) << np.int32(3))
    times, most = (np.int64(total) - of_large) * large, of_large * (np.int64(sent) - large)
    if header != 0 and most > 0:
        header |= np.int32(min(np.int64(MOST_SMALL), (2 * HIGH * times + most) // (2 * most)))
    return header, total


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
    byte = _2 * blocks + (at >> _1)
    blob[byte] ^= np.uint8((8 ^ (level + 8)) << np.int32(_4 * (at & _1)))


@inlined
def _get_level(blob: Bytes, blocks: Number, at: Number) -> Number:
    return np.int32((blob[_2 * blocks + (at >> _1)] >> np.uint8(_4 * (at & _1))) & np.uint8(15)) - np.int32(8)


@compiled
def close(vectors: tuple[Floats, Floats, Floats], blob: Bytes) -> tuple[Number, Number]:
    """Encode v = residual + (baseline - snapshot) as `sparse` does, into a q4 blob; set residual to v - (v as decoded).

    `vectors` are (snapshot, baseline, residual). Return the squared L2 norm of the decoded vector, and the bit pattern
    of the largest magnitude in v; if it is INFINITE or above, blob and residual are meaningless.
    """
    snapshot, baseline, residual = vectors
    n, scratch, largest, squares, floor = np.uint64(len(residual)), _scratch(), np.int32(0), 0.0, np.int32(0)
    places, _, _, chosen, units = scratch
    blocks = np.uint64((len(residual) + _BLOCK - 1) // _BLOCK)
    for group in range(np.uint64((len(residual) + GROUP - 1) // GROUP)):
        start = group * np.uint64(GROUP)
        stop = min(start + np.uint64(GROUP), n)
        values = residual[start:stop]
        for i in range(start, stop):
            residual[i] += baseline[i] - snapshot[i]
        sent = (stop - start + np.uint64(BUCKET - 1)) // np.uint64(BUCKET)
        smallest, peak = _choose(scratch, values.view(np.int32), sent, floor)
        floor, largest = max(np.int32(0), np.int32(smallest - np.int32(_NEAR))), max(largest, peak)
        header, total = _levels(scratch, values, sent, peak)
        scale, small = _scale(header), header & np.int32(7)
        _put_scales(blob, group, blocks, scale)
        blob[_2 * blocks + (start >> _1) : _2 * blocks + ((stop + _1) >> _1)] = _ZEROS
        if scale == np.float32(0.0):
            continue
        found = np.int64(0)  # sum of squared levels
        for j in range(sent):
            is_large, is_negative = np.int64(units[j]) * np.int64(sent) >= total, chosen[j] < np.float32(0.0)
            level = small + (np.int32(HIGH) - small) * np.int32(is_large)
            level -= np.int32(2) * level * np.int32(is_negative)
            at = np.uint64(places[j])
            _put_level(blob, blocks, start + at, level)
            values[at] = chosen[j] - np.float32(level) * scale
            found += level * level
        squares += found * (np.float64(scale) * np.float64(scale))
    return squares, largest


@compiled
def widen(parts: Parts, elements: int, blob: Bytes) -> int:
    """Convert a sparse blob of `elements` numbers, in parts, to a q4 blob; return the fault code."""
    headers, buckets, low_bits, levels = parts
    sent, blocks = np.uint64((elements + BUCKET - 1) // BUCKET), np.uint64((elements + _BLOCK - 1) // _BLOCK)
    found, below, small, ones = np.uint64(0), np.uint64(0), np.int32(0), np.empty(GROUP + 1, np.int32)
    blob[_2 * blocks :] = _ZEROS
    for first in range(np.uint64(0), _2 * sent, np.uint64(GROUP)):
        count = np.uint64(0)
        for bit in range(min(np.uint64(GROUP), _2 * sent - first)):
            ones[count] = np.int32(bit)
            count += np.uint64((buckets[(first + bit) >> _3] >> np.uint8(_7 - (bit & _7))) & np.uint8(1))
        for k in range(count):
            if found == sent:
                return BAD_LEVEL
            group = found // np.uint64(_SENT)
            if found % np.uint64(_SENT) == 0:
                header = np.int32(headers[_2 * group]) | (np.int32(headers[_2 * group + _1]) << np.int32(8))
                small = header & np.int32(7)
                if small > MOST_SMALL:
                    return BAD_LEVEL
                _put_scales(blob, group, blocks, _scale(header))
            bucket = first + np.uint64(ones[k]) - found
            low = (low_bits[found >> _1] >> np.uint8(_4 - _4 * (found & _1))) & np.uint8(15)
            at = (bucket << np.uint64(LOW_BITS)) + np.uint64(low)
            if at < below or at >= np.uint64(elements) or at // np.uint64(GROUP) != group:
                return BAD_LEVEL
            pair = np.int32(levels[found >> _2] >> np.uint8(_6 - _2 * (found & _3)))
            level = small + (np.int32(HIGH) - small) * (pair & np.int32(1))
            _put_level(blob, blocks, at, level * ((pair & np.int32(2)) - np.int32(1)))
            found, below = found + _1, at + _1
    return 0 if found == sent else BAD_LEVEL


@compiled
def narrow(blob: Bytes, elements: int, parts: Parts) -> None:
    """Convert a q4 blob that `close` or `widen` has written to a sparse one: fill its `parts`, which must be zero."""
    headers, buckets, low_bits, levels = parts
    blocks, found = (elements + _BLOCK - 1) // _BLOCK, np.uint64(0)
    places, bytes_used = np.empty(GROUP + 1, np.int32), np.empty(GROUP // 2 + 1, np.int32)
    for group in range((elements + GROUP - 1) // GROUP):
        start, count = group * GROUP, min(GROUP, elements - group * GROUP)
        block = group * (GROUP // _BLOCK)
        upper = np.int32(blob[2 * block]) | (np.int32(blob[2 * block + 1]) << np.int32(8))
        scale = np.int32(upper << np.int32(16)).view(np.float32)
        header = np.float32(scale / np.float32(HIGH)).view(np.int32) >> np.int32(16)
        sent = (count + BUCKET - 1) // BUCKET
        if _nonzero(blob, 2 * blocks + start // 2, count, places, bytes_used) < sent:
            _fill(blob, blocks, start, sent, places)
        small = np.int32(0)
        for j in range(np.uint64(sent)):
            at = np.uint64(start) + np.uint64(places[j])
            level = _get_level(blob, np.uint64(blocks), at)
            is_large = abs(level) == np.int32(HIGH)
            small = max(small, abs(level) * np.int32(not is_large))
            pair = (np.uint8(level >= np.int32(0)) << np.uint8(1)) | np.uint8(is_large)
            bit = (at >> np.uint64(LOW_BITS)) + found
            buckets[bit >> _3] |= np.uint8(np.uint64(128) >> (bit & _7))
            low_bits[found >> _1] |= np.uint8((at & np.uint64(BUCKET - 1)) << (_4 - _4 * (found & _1)))
            levels[found >> _2] |= np.uint8(pair << (_6 - _2 * (found & _3)))
            found += _1
        headers[2 * group], headers[2 * group + 1] = np.uint8((header | small) & 255), np.uint8((header >> 8) & 255)


@inlined
def _nonzero(blob: Bytes, first: Number, count: Number, places: Ints, bytes_used: Ints) -> Number:
    """Write the places of a group's levels other than 0 to `places`; return how many there are.

    The group's levels begin at byte `first`. `bytes_used` is scratch memory.
    """
    used, found = np.uint64(0), np.uint64(0)
    for byte in range(np.uint64((count + 1) // 2)):
        bytes_used[used] = np.int32(byte)
        used += np.uint64(blob[np.uint64(first) + byte] != np.uint8(_ZEROS))
    for k in range(used):
        place = _2 * np.uint64(bytes_used[k])
        pair = blob[np.uint64(first) + (place >> _1)]
        places[found] = np.int32(place)
        found += np.uint64((pair & np.uint8(15)) != np.uint8(8))
        places[found] = np.int32(place + _1)
        found += np.uint64((pair >> np.uint8(4)) != np.uint8(8))
    return np.int64(found)


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

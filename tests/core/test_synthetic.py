"""Synthetic blobs behave as real blobs do, whose bytes are the numbers of their segments."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from decentral.core.synthetic import SyntheticBlob, gathered, joined

Lengths = list[int]
lengths = st.lists(st.integers(1, 20), min_size=1, max_size=6)
cuts = st.lists(st.integers(0, 130), max_size=5)


def both(sizes: Lengths) -> tuple[SyntheticBlob, bytes]:
    """Segment n has the content n, and in the real blob n in every byte."""
    synthetic = SyntheticBlob((size, bytes([number])) for number, size in enumerate(sizes))
    return synthetic, b"".join(bytes([number]) * size for number, size in enumerate(sizes))


def pieces(blob: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut for cut in at if cut < len(blob)}), len(blob)]
    return [blob[start:stop] for start, stop in itertools.pairwise(edges)]


@given(lengths)
def test_its_length_is_the_real_ones(sizes: Lengths) -> None:
    synthetic, real = both(sizes)
    assert len(synthetic) == len(real)


@given(lengths, st.integers(-30, 130), st.integers(-30, 130))
def test_a_slice_is_as_long_as_the_real_ones(sizes: Lengths, start: int, stop: int) -> None:
    synthetic, real = both(sizes)
    assert len(synthetic[start:stop]) == len(real[start:stop])
    assert bool(synthetic[start:stop]) == bool(real[start:stop])


@given(lengths, st.integers(0, 130), st.integers(0, 130))
def test_a_slice_holds_what_begins_inside_it(sizes: Lengths, start: int, stop: int) -> None:
    synthetic, _ = both(sizes)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    expected = bytes(number for number, begin in enumerate(begins) if start <= begin < stop)
    assert bytes(memoryview(synthetic[start:stop])) == expected


@given(lengths, cuts)
def test_cut_and_joined_it_is_itself(sizes: Lengths, at: list[int]) -> None:
    synthetic, real = both(sizes)
    assert joined(pieces(synthetic, at)) == synthetic
    assert joined(pieces(real, at)) == real


@given(lengths, cuts)
def test_a_whole_segment_cut_out_is_that_segment(sizes: Lengths, at: list[int]) -> None:
    synthetic, _ = both(sizes)
    again, start = joined(pieces(synthetic, at)), 0
    for number, size in enumerate(sizes):
        assert again[start : start + size] == SyntheticBlob([(size, bytes([number]))])
        start += size


@given(lengths, lengths)
def test_joined_blobs_are_as_long_as_both(first: Lengths, second: Lengths) -> None:
    parts = [both(first), both(second)]
    assert len(joined(synthetic for synthetic, _ in parts)) == len(joined(real for _, real in parts))


def test_a_real_part_among_synthetic_ones_has_its_own_length() -> None:
    row = joined([SyntheticBlob([(1000, b"ab")]), b"xyz"])
    assert (len(row), bytes(memoryview(row))) == (1003, b"abxyz")


def test_same_contents_at_other_lengths_are_another_blob() -> None:
    assert SyntheticBlob([(10, b"a")]) != SyntheticBlob([(11, b"a")])
    assert SyntheticBlob([(10, b"a")]) == SyntheticBlob([(10, b"a")])
    assert len({SyntheticBlob([(10, b"a")]), SyntheticBlob([(10, b"a")]), SyntheticBlob([(11, b"a")])}) == 2


def test_a_synthetic_blob_equals_no_real_one() -> None:
    assert SyntheticBlob([(1, b"a")]) != b"a"


def test_gathered_bytes_can_be_written_without_changing_their_parts() -> None:
    part = bytes(3)
    blob = gathered([part])
    assert isinstance(blob, bytearray)
    blob[0] = 1
    assert part == bytes(3)


def test_gathered_synthetic_blobs_are_joined() -> None:
    parts = [SyntheticBlob([(5, b"a")]), SyntheticBlob([(7, b"b")])]
    assert gathered(parts) == joined(parts)

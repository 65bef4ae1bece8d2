"""Numbers of micro-batches: none is given out twice, whatever the disk does and however often the peer restarts."""

import itertools
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.engine.micro_batch_names import SPACE, MicroBatchNames
from decentral.engine.micro_batch_numbers import ELSEWHERE, RESERVED, MicroBatchNumbers


class Disk:
    """Keeps the one number that it was told last, unless it is full."""

    def __init__(self) -> None:
        self.reserved, self.full = 0, False

    def write(self, reserved: int) -> None:
        if self.full:
            raise OSError("No space left on device")
        self.reserved = reserved

    def life(self, chance: int) -> MicroBatchNumbers:
        names = MicroBatchNames.known("peer")
        return MicroBatchNumbers(self.reserved, self.write, names, Random(chance).randrange)


def test_a_full_disk_stops_no_micro_batch() -> None:
    disk = Disk()
    numbers = disk.life(1)
    before = [numbers.take(0) for _ in range(RESERVED)]
    disk.full = True
    during = [numbers.take(before[-1] + 1) for _ in range(3)]
    assert min(during) >= ELSEWHERE
    disk.full = False
    left = [numbers.take(before[-1] + 1) for _ in range(RESERVED)]
    assert left[-3:] == [RESERVED, RESERVED + 1, RESERVED + 2]  # its block is used up, and the disk takes numbers again
    assert len({*before, *during, *left}) == 2 * RESERVED + 3


Life = st.tuples(st.booleans(), st.integers(1, 3000), st.integers(0, 5000))


@given(st.lists(Life, min_size=1, max_size=6))
def test_no_life_repeats_a_number_of_another(lives: list[tuple[bool, int, int]]) -> None:
    """Each life has a disk that is full or not, draws so many numbers, and its checkpoint may be older by so many."""
    disk, given_out, position = Disk(), set[int](), 0
    for chance, (full, count, forgotten) in enumerate(lives, 1):
        disk.full = full
        numbers, wished = disk.life(chance), max(0, position - forgotten)
        for _ in range(count):
            number = numbers.take(wished)
            wished = max(wished, numbers.least)
            assert number not in given_out
            given_out.add(number)
        position = wished


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff"])
def test_a_damaged_file_costs_no_number(tmp_path: Path, content: bytes) -> None:
    first = MicroBatchNumbers.of(tmp_path)
    given_out = {first.take(0) for _ in range(5)}
    (tmp_path / "position.json").write_bytes(content)
    again = MicroBatchNumbers.of(tmp_path)
    numbers = {again.take(0) for _ in range(5)}
    assert len(numbers) == 5
    assert not numbers & given_out
    assert MicroBatchNumbers.of(tmp_path).take(0) > max(numbers)


def test_names_tell_neither_the_next_one_nor_an_order_and_none_is_given_twice() -> None:
    names, others = MicroBatchNames.known("a"), MicroBatchNames.known("b")
    pairs = [names.pair(number) for number in (*range(500), SPACE - 1)]
    assert len(set(pairs)) == 501
    assert all(pair % 2 == 0 and 0 <= pair < 1 << 53 for pair in pairs)
    rising = sum(after > before for before, after in itertools.pairwise(pairs))
    assert 200 < rising < 300
    assert pairs != [others.pair(number) for number in (*range(500), SPACE - 1)]


def test_a_restart_goes_on_with_the_same_names_which_only_the_user_can_read(tmp_path: Path) -> None:
    first, again = MicroBatchNumbers.of(tmp_path), MicroBatchNumbers.of(tmp_path)
    assert first.names == again.names != MicroBatchNumbers.of(tmp_path / "other").names
    assert (tmp_path / "names.key").stat().st_mode & 0o077 == 0
    (tmp_path / "names.key").write_bytes(b"cut")
    assert MicroBatchNumbers.of(tmp_path).names == MicroBatchNumbers.of(tmp_path).names != first.names

"""How the self-test takes a rate from what has arrived by when."""

import pytest

from benchmarks.wan.probe import best_rate


def test_the_best_two_seconds_count_and_not_the_slow_start() -> None:
    slow = [(number / 10, 10 * number) for number in range(31)]  # 100 bytes/s for 3 s
    fast = [(3 + number / 10, 300 + 100 * number) for number in range(1, 31)]  # then 1000 bytes/s for 3 s
    assert best_rate(slow + fast) == pytest.approx(1000)


def test_a_burst_counts_only_as_a_part_of_its_two_seconds() -> None:
    marks = [(number / 10, 10 * number + (1000 if number > 20 else 0)) for number in range(61)]
    assert best_rate(marks) == pytest.approx(600)


def test_a_short_measurement_counts_as_a_whole() -> None:
    assert best_rate([(0.0, 0), (0.5, 100), (1.0, 200)]) == pytest.approx(200)

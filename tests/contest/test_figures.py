"""The figures of the contest's report, from curves by hand."""

import pytest

from benchmarks.contest.figures import (
    Point,
    busy_until,
    longest_pause,
    loss_at,
    sooner,
    spread,
    stretches,
    time_to_loss,
    tokens_until,
)

CURVE = [Point(3, 100, 3.0), Point(6, 200, 2.0), Point(9, 400, 1.5)]


def test_the_time_to_a_loss_lies_on_the_line_between_two_points() -> None:
    assert time_to_loss(CURVE, 2.5) == pytest.approx(4.5)


def test_a_point_on_the_target_is_the_time() -> None:
    assert time_to_loss(CURVE, 2.0) == 6


def test_a_run_that_begins_below_the_target_has_its_first_point_s_time() -> None:
    assert time_to_loss(CURVE, 3.5) == 3


def test_a_run_that_never_reaches_has_no_time() -> None:
    assert time_to_loss(CURVE, 1.4) is None
    assert time_to_loss([], 1.4) is None


def test_the_first_time_counts_where_the_loss_rises_again() -> None:
    assert time_to_loss([*CURVE, Point(12, 500, 2.4), Point(15, 600, 1.0)], 1.9) == pytest.approx(6.6)


def test_a_loss_at_tokens_and_at_seconds_is_read_off_the_line() -> None:
    assert loss_at(CURVE, tokens=300) == pytest.approx(1.75)
    assert loss_at(CURVE, seconds=4.5) == pytest.approx(2.5)


def test_there_is_no_loss_after_the_end_or_before_the_first_point() -> None:
    assert loss_at(CURVE, tokens=401) is None
    assert loss_at(CURVE, seconds=2.9) is None


def test_points_without_progress_have_a_loss() -> None:
    stalled = [Point(3, 100, 3.0), Point(6, 100, 2.9), Point(9, 100, 2.8)]
    assert loss_at(stalled, tokens=100) == 2.9


def test_the_spread_has_median_least_and_most() -> None:
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 0)


def test_a_repetition_that_never_reached_counts_as_the_worst() -> None:
    assert spread([1.0, None, 2.0]) == (2.0, 1.0, 2.0, 1)
    assert spread([1.0, None, None]) == (None, 1.0, 1.0, 2)
    assert spread([None]) == (None, None, None, 1)


def test_one_that_never_reached_is_later_by_at_least_the_run() -> None:
    assert sooner(10.0, 25.0, 45.0) == (2.5, False)
    assert sooner(10.0, None, 45.0) == (4.5, True)
    assert sooner(None, 25.0, 45.0) == (None, False)


LINES = [{"t": 12.0, "tokens": 100, "busy_s": 2.0}, {"t": 17.0, "tokens": 400, "busy_s": 4.0}]


def test_tokens_and_busy_time_within_a_line_are_spread_evenly() -> None:
    peers = [stretches(LINES, 5.0), stretches(LINES[:1], 11.0)]
    assert peers[0][0].begin == 10.0
    assert peers[1][0].begin == 11.0
    assert tokens_until(peers, 10.5) == pytest.approx(25)
    assert tokens_until(peers, 14.5) == pytest.approx(100 + 200 + 100)
    assert tokens_until(peers, 99.0) == 600
    assert busy_until(peers, 14.5) == pytest.approx(2 + 2 + 2)


def test_the_longest_pause_is_before_between_or_after() -> None:
    own = stretches(LINES, 5.0)
    assert longest_pause(own, 5.0, 17.0) == 5.0
    assert longest_pause(own, 10.0, 17.0) == 1.0
    assert longest_pause(own, 10.0, 25.0) == 8.0
    assert longest_pause([], 10.0, 25.0) == 15.0

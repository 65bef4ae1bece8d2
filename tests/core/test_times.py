"""Times and durations as people read them."""

import pytest

from decentral.core.times import ago, clock_time, duration, precise


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-5, "0 s"), (0.4, "0 s"), (47.2, "47 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min")),
        *((7200, "2 h"), (259_200, "3 d"), (7500, "2 h 5 min"), (172_799, "47 h 59 min"), (273_600, "3 d 4 h")),
    ],
)
def test_a_duration_has_one_or_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert ago(1000.0, 1000.0 + seconds) == f"{text} ago"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.31416, "0.314 s"), (59.9, "59.9 s"), (-3.0, "-3 s"), (-7200.0, "-2 h"), (5400.0, "90 min")]
)
def test_a_precise_duration_has_three_digits_below_a_minute_and_a_sign(seconds: float, text: str) -> None:
    assert precise(seconds) == text


def test_a_clock_time_has_its_date() -> None:
    assert len(clock_time(1.7e9)) == len("2026-11-28 03:46:23")
    assert clock_time(1.7e9)[:8] == "2023-11-"

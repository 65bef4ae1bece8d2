"""Transfers that begin slowly: how long they take, and what that says of the link."""

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.wire.slow_start import INITIAL_BYTES, rate_of, transfer_s
from decentral.core.units import KiB, MiB

HOME = 20e6 / 8  # bytes/s


def test_what_is_sent_at_first_takes_no_round_trip() -> None:
    assert transfer_s(INITIAL_BYTES, HOME, 10.0) == pytest.approx(INITIAL_BYTES / HOME)


def test_a_short_transfer_over_a_long_way_takes_its_round_trips_at_whatever_rate() -> None:
    assert transfer_s(7 * INITIAL_BYTES, 1e12, 0.1) == pytest.approx(0.2)


def test_a_long_transfer_goes_on_at_the_link_s_rate() -> None:
    assert transfer_s(101 * MiB, HOME, 0.1) - transfer_s(MiB, HOME, 0.1) == pytest.approx(100 * MiB / HOME)


def test_a_quarter_of_a_megabyte_in_half_a_second_does_not_mean_half_a_megabyte_a_second() -> None:
    """Over 20 Mb/s and 100 ms it took that long because it began slowly."""
    seconds = transfer_s(256 * KiB, HOME, 0.1)
    assert 256 * KiB / seconds < HOME / 1.5
    assert 1.5 * 256 * KiB / seconds < rate_of(256 * KiB, seconds, 0.1) < HOME
    assert rate_of(4 * MiB, transfer_s(4 * MiB, HOME, 0.1), 0.1) == pytest.approx(HOME)


@given(st.integers(1, 1 << 30), st.floats(1e3, 1e9), st.floats(0.0, 1.0))
def test_no_rate_is_above_the_link_s(size: int, rate: float, latency_s: float) -> None:
    seconds = transfer_s(size, rate, latency_s)
    assert size / seconds <= rate_of(size, seconds, latency_s) * 1.001
    assert rate_of(size, seconds, latency_s) <= 1.001 * rate


@given(st.integers(1, 1 << 30), st.floats(1e3, 1e9), st.floats(0.0, 1.0))
def test_the_rate_of_a_long_transfer_is_found_again(size: int, rate: float, latency_s: float) -> None:
    seconds = transfer_s(size, rate, latency_s)
    if seconds > 2 * latency_s * (2 + log2(1 + rate * latency_s / INITIAL_BYTES)):
        assert rate_of(size, seconds, latency_s) == pytest.approx(rate, rel=0.01)


def test_a_latency_that_is_measured_too_long_excuses_no_more_than_half_of_a_transfer() -> None:
    """A ping that waited behind others' bytes made 25 Mb/s of an uplink of 5."""
    seconds = transfer_s(MiB, HOME / 4, 0.15)
    assert rate_of(MiB, seconds, 1.0) < 2 * HOME / 4


def test_without_latency_a_rate_is_bytes_over_seconds() -> None:
    assert rate_of(10 * MiB, 2.0, 0.0) == pytest.approx(5 * MiB)

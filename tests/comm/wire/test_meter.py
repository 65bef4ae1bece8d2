"""Links as they were measured, and the deadlines that follow."""

import pytest

from decentral.comm.wire.meter import DEADLINE_FLOOR_S, DEADLINE_TOP_S, MOST_LINKS, Meter
from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")


def measured(latency_s: float, seconds: float, received: int) -> Meter:
    meter = Meter()
    meter.saw(A, latency_s, 100, 100)
    meter.saw(A, seconds, 100, received)
    return meter


def test_a_large_transfer_measures_bandwidth_without_the_delay() -> None:
    assert measured(0.5, 2.5, 10 * MiB).bandwidth(A) == pytest.approx(5 * MiB)


def test_up_and_down_are_measured_apart() -> None:
    meter = Meter()
    meter.saw(A, 1.0, 8 * MiB, 100)
    meter.saw(A, 2.0, 100, 8 * MiB)
    assert (meter.links[A].up, meter.links[A].down) == (8 * MiB, 4 * MiB)


def test_small_messages_say_nothing_about_bandwidth() -> None:
    meter = measured(0.01, 1.01, 10 * MiB)
    before = meter.bandwidth(A)
    for _ in range(50):
        meter.saw(A, 2.0, 64 * KiB - 1, 200)
    assert meter.bandwidth(A) == before
    assert meter.latency_s(A) == pytest.approx(2.0, rel=0.01)


def test_large_messages_say_nothing_about_delay() -> None:
    meter = measured(0.05, 9.0, 10 * MiB)
    assert meter.latency_s(A) == 0.05


def test_the_newest_counts_for_a_fifth() -> None:
    meter = Meter()
    meter.saw(A, 1.0, 0, 10 * MiB)
    meter.saw(A, 1.0, 0, 20 * MiB)
    assert meter.bandwidth(A) == pytest.approx(12 * MiB)


def test_an_unknown_link_has_no_bandwidth_and_a_patient_deadline() -> None:
    meter = Meter()
    assert meter.bandwidth(A) is None
    assert meter.deadline_s(A, 4 * MiB) > 4 * 4.0


def test_a_deadline_is_several_times_what_is_expected() -> None:
    assert measured(1.0, 11.0, 10 * MiB).deadline_s(A, 5 * MiB) == pytest.approx(4 * (1 + 5))


def test_a_deadline_has_a_floor_and_a_top() -> None:
    assert measured(0.001, 0.01, 10 * MiB).deadline_s(A, 100) == DEADLINE_FLOOR_S
    assert measured(1.0, 11.0, 10 * MiB).deadline_s(A, 1 << 40) == DEADLINE_TOP_S


def test_what_is_typical_is_the_median_of_what_is_known() -> None:
    meter = Meter()
    assert meter.typical_down() is None
    for peer, received in ((A, 1), (B, 2), (C, 100)):
        meter.saw(peer, 1.0, 0, received * MiB)
    meter.saw(PeerId("D"), 0.1, 10, 10)
    assert meter.typical_down() == 2 * MiB
    assert meter.typical_up() is None


def test_an_instant_transfer_divides_by_nothing() -> None:
    meter = Meter()
    meter.saw(A, 0.0, 0, MiB)
    assert 0 < (meter.bandwidth(A) or 0) < 1e12


def test_links_of_peers_that_are_long_gone_are_forgotten() -> None:
    meter = measured(0.1, 1.0, MiB)
    for number in range(MOST_LINKS):
        meter.saw(PeerId(f"Q{number}"), 0.1, 10, 10)
    assert meter.bandwidth(A) is None
    assert len(meter.links) == MOST_LINKS

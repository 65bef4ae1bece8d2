"""Links as they were measured, and the deadlines that follow."""

import pytest

from decentral.comm.wire.meter import (
    DEADLINE_FLOOR_S,
    DEADLINE_TOP_S,
    LATENCIES,
    MOST_LINKS,
    PACED,
    UPLOADS,
    WARM_UP_BYTES,
    Meter,
)
from decentral.comm.wire.slow_start import transfer_s
from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB

A, B, C, D = map(PeerId, "ABCD")


def measured(latency_s: float, seconds: float, received: int) -> Meter:
    meter = Meter()
    meter.saw(A, latency_s, latency_s, 100, 100)
    meter.saw(A, seconds, latency_s, 100, received)
    return meter


def test_a_large_transfer_measures_the_rate_without_latency_and_slow_start() -> None:
    seconds = 0.5 + transfer_s(40 * MiB, 5 * MiB, 0.5)
    assert seconds > 9.0
    assert measured(0.5, seconds, 40 * MiB).bandwidth(A) == pytest.approx(5 * MiB, rel=0.2)


def test_a_partner_that_waits_for_its_device_makes_no_link_slow() -> None:
    meter = measured(0.1, 0.3, 100 * KiB)
    known, latency_s = meter.bandwidth(A), meter.latency_s(A)
    meter.saw(A, 7.2, 7.0, 100, 100 * KiB)
    assert meter.bandwidth(A) == pytest.approx(known)
    assert meter.latency_s(A) == latency_s


def test_a_latency_that_has_risen_is_known_after_some_answers() -> None:
    meter = measured(0.01, 1.0, 10 * MiB)
    for _ in range(LATENCIES):
        meter.saw(A, 0.3, 0.2, 100, 100)
    assert meter.latency_s(A) == 0.2


def test_up_and_down_are_measured_apart() -> None:
    meter = Meter()
    meter.saw(A, 1.0, 0.0, 8 * MiB, 100)
    meter.saw(A, 2.0, 0.0, 100, 8 * MiB)
    assert (meter.links[A].up, meter.links[A].down.known) == (8 * MiB, 4 * MiB)


def test_small_messages_say_nothing_about_bandwidth() -> None:
    meter = measured(0.01, 1.01, 10 * MiB)
    before = meter.bandwidth(A)
    for _ in range(50):
        meter.saw(A, 2.0, 2.0, 64 * KiB - 1, 200)
    assert meter.bandwidth(A) == before


def test_a_large_question_says_nothing_about_latency() -> None:
    meter = measured(0.05, 9.0, 10 * MiB)
    meter.saw(A, 0.04, 0.04, MiB, 100)
    assert meter.latency_s(A) == 0.05


def test_a_rate_is_that_of_the_last_transfers_byte_by_byte() -> None:
    meter = Meter()
    meter.saw(A, 1.0, 0.0, 0, 10 * MiB)
    meter.saw(A, 1.0, 0.0, 0, 30 * MiB)
    assert meter.bandwidth(A) == pytest.approx(20 * MiB)  # 40 MiB in two seconds
    for _ in range(60):
        meter.saw(A, 1.0, 0.0, 0, 10 * MiB)
    assert meter.bandwidth(A) == pytest.approx(10 * MiB, rel=0.02)
    meter.saw(A, 1.0, 0.0, 0, 20 * MiB)
    assert meter.bandwidth(A) == pytest.approx(100 * MiB / 9.0, rel=0.02)  # eight of 10 MiB, and that of 20


def test_processing_in_a_latency_does_not_make_an_uplink_fast() -> None:
    """20 Mb/s and 100 ms, where a ping takes 117 ms: 118 to 143 Mb/s were believed."""
    meter = Meter()
    meter.saw(A, 0.117, 0.117, 100, 100)
    meter.saw(A, 0.117 + transfer_s(MiB, 2.5e6, 0.1, WARM_UP_BYTES), 0.117, MiB, 100)
    assert meter.typical_up() == pytest.approx(2.5e6, rel=0.25)


def test_an_unknown_link_has_no_bandwidth_and_a_patient_deadline() -> None:
    meter = Meter()
    assert meter.bandwidth(A) is None
    assert meter.deadline_s(A, 4 * MiB) > 4 * 4.0


def test_a_deadline_is_several_times_what_is_expected() -> None:
    meter = measured(1.0, 1.0 + transfer_s(10 * MiB, MiB, 1.0), 10 * MiB)
    assert meter.deadline_s(A, 5 * MiB) == pytest.approx(4 * (1 + transfer_s(5 * MiB, MiB, 1.0)), rel=0.1)


def test_a_deadline_has_a_floor_and_a_top() -> None:
    assert measured(0.001, 0.01, 10 * MiB).deadline_s(A, 100) == DEADLINE_FLOOR_S
    assert measured(1.0, 11.0, 10 * MiB).deadline_s(A, 1 << 40) == DEADLINE_TOP_S


def test_deadlines_that_were_missed_grow_until_an_answer_comes_in_time() -> None:
    """A link of which nothing is known but that answers are late would else stay unknown for ever (seed 28)."""
    meter, size = Meter(), MiB
    first = meter.deadline_s(A, size)
    deadlines = []
    for _ in range(5):
        meter.missed(A)
        deadlines.append(meter.deadline_s(A, size))
    assert deadlines == [min(DEADLINE_TOP_S, first * times) for times in (2, 4, 8, 8, 8)]
    assert meter.deadline_s(B, size) == first
    meter.saw(A, 0.01, 0.01, 100, 100)
    assert DEADLINE_FLOOR_S < meter.deadline_s(A, size) < DEADLINE_TOP_S
    meter.saw(A, 0.02, 0.01, 100, MiB)
    assert meter.deadline_s(A, size) == DEADLINE_FLOOR_S


def test_what_is_typical_is_the_median_of_what_is_known() -> None:
    meter = Meter()
    assert meter.typical_down() is None
    for peer, received in ((A, 1), (B, 2), (C, 100)):
        meter.saw(peer, 1.0, 0.0, 0, received * MiB)
    meter.saw(PeerId("D"), 0.1, 0.0, 10, 10)
    assert meter.typical_down() == 2 * MiB
    assert meter.typical_up() is None


def test_an_uplink_carries_what_its_best_transfer_had() -> None:
    meter = Meter()
    for peer, sent in ((A, 1), (B, 3), (C, 2)):
        meter.saw(peer, 1.0, 1.0, sent * MiB, 0)
    assert meter.typical_up() == 3 * MiB


def uploaded(*rates: tuple[PeerId, float]) -> Meter:
    """A megabyte to each peer, over 100 ms."""
    meter = Meter()
    for peer, rate in rates:
        meter.saw(peer, 0.1, 0.1, 100, 100)
        meter.saw(peer, 0.1 + transfer_s(MiB, rate, 0.1, WARM_UP_BYTES), 0.1, MiB, 100)
    return meter


def test_we_pace_what_we_send_where_two_peers_tell_of_the_same_thin_uplink() -> None:
    assert uploaded((A, 0.6e6), (B, 0.62e6)).pace() == pytest.approx(PACED * 0.6e6, rel=0.1)


def test_an_upload_that_a_latency_measured_too_long_has_excused_is_judged_again_by_a_better_one() -> None:
    meter = Meter()
    meter.saw(A, 0.4, 0.4, 100, 100)  # while others' probes filled the links
    meter.saw(A, 0.1 + transfer_s(MiB, 0.6e6, 0.1, WARM_UP_BYTES), 0.1, MiB, 100)
    assert (meter.typical_up() or 0.0) > 0.7e6
    meter.saw(A, 0.1, 0.1, 100, 100)
    assert meter.typical_up() == pytest.approx(0.6e6, rel=0.1)


def test_an_upload_is_not_judged_again_by_a_latency_that_a_busy_uplink_has_made_longer() -> None:
    """Of four far homes of 10 M, one uplink counted as 2.5 times as fast as it was."""
    meter = uploaded((A, 0.6e6))
    for _ in range(LATENCIES):
        meter.saw(A, 1.0, 1.0, 100, 100)
    assert meter.latency_s(A) == 1.0
    assert meter.typical_up() == pytest.approx(0.6e6, rel=0.1)
    assert meter.pace() == pytest.approx(PACED * 0.6e6, rel=0.1)


def test_where_uploads_differ_the_others_downlinks_were_the_limit() -> None:
    assert uploaded((A, 0.6e6), (B, 1.2e6)).pace() is None


def test_to_the_only_peer_that_we_know_its_downlink_is_as_good_a_limit() -> None:
    assert uploaded((A, 0.6e6)).pace() == pytest.approx(PACED * 0.6e6, rel=0.1)


def test_what_slow_start_has_limited_is_no_pace() -> None:
    assert uploaded((A, 100e6), (B, 100e6)).pace() is None


def housed(near: float, far: float) -> Meter:
    """Uploads to two housemates at `near` bytes/s and two distant peers at `far`; a third housemate is only known."""
    meter = Meter()
    for peer, latency_s, rate in ((A, 0.001, near), (C, 0.06, far), (B, 0.001, near), (D, 0.06, far)):
        meter.saw(peer, latency_s, latency_s, 100, 100)
        meter.saw(peer, latency_s + transfer_s(MiB, rate, 0.7 * latency_s, WARM_UP_BYTES), 0.1, MiB, 100)
    meter.saw(PeerId("E"), 0.001, 0.001, 100, 100)
    return meter


def test_a_housemate_gets_its_bytes_faster_than_a_distant_peer_and_the_mean_counts_both() -> None:
    """The uplink of a home of four counted as 120 MB/s, since three of its last uploads had gone to housemates."""
    assert housed(120e6, 6e6).typical_up() == pytest.approx(5 / (3 / 120e6 + 2 / 6e6), rel=0.05)


def test_uploads_to_housemates_never_displace_those_to_distant_peers() -> None:
    meter = housed(120e6, 6e6)
    for _ in range(10):
        meter.saw(A, 0.001 + transfer_s(MiB, 120e6, 0.0007, WARM_UP_BYTES), 0.001, MiB, 100)
    assert meter.typical_up() == pytest.approx(5 / (3 / 120e6 + 2 / 6e6), rel=0.05)


def test_peers_that_have_left_no_longer_count() -> None:
    meter = housed(120e6, 6e6)
    for peer in (C, D):
        meter.left(peer)
    assert meter.typical_up() == pytest.approx(120e6, rel=0.05)
    meter.saw(C, 0.06 + transfer_s(MiB, 6e6, 0.042, WARM_UP_BYTES), 0.06, MiB, 100)
    assert meter.typical_up() == pytest.approx(4 / (3 / 120e6 + 1 / 6e6), rel=0.05)


def test_peers_that_turn_out_to_be_far_leave_no_more_than_the_last_uploads() -> None:
    meter = Meter()
    peers = [PeerId(f"{number}") for number in range(20)]
    for peer in peers:
        meter.saw(peer, 0.0, 0.0, 100, 100)
        meter.saw(peer, 0.01, 0.0, MiB, 100)
    for peer in peers:
        for _ in range(LATENCIES):
            meter.saw(peer, 0.05, 0.05, 100, 100)
    meter.saw(A, 0.06, 0.06, 100, 100)
    meter.saw(A, 1.0, 0.06, MiB, 100)
    assert len(meter.uploads) == UPLOADS


def test_an_upload_that_took_no_longer_than_its_latency_is_no_proof_of_a_fast_link() -> None:
    """With a latency that was measured while others' probes filled the link, such a rate was 10 GB/s."""
    meter = Meter()
    meter.saw(A, 0.2, 0.2, 100, 100)
    meter.saw(A, 0.2, 0.1, MiB, 100)
    assert (meter.typical_up() or 0.0) < 20e6


def test_fast_uplinks_and_unknown_ones_have_no_pace() -> None:
    assert Meter().pace() is None
    meter = Meter()
    for peer in (A, B):
        meter.saw(peer, 0.001, 0.0, MiB, 100)
    assert meter.pace() is None


def test_an_instant_transfer_divides_by_nothing() -> None:
    meter = Meter()
    meter.saw(A, 0.0, 0.0, 0, MiB)
    assert 0 < (meter.bandwidth(A) or 0) < 1e12


def test_links_of_peers_that_are_long_gone_are_forgotten() -> None:
    meter = measured(0.1, 1.0, MiB)
    for number in range(MOST_LINKS):
        meter.saw(PeerId(f"Q{number}"), 0.1, 0.0, 10, 10)
    assert meter.bandwidth(A) is None
    assert len(meter.links) == MOST_LINKS

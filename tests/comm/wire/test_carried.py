"""An uplink carries at least what it has carried, however small a share of a busy link a probe gets."""

import pytest

from decentral.comm.wire.carried import KEPT_S, SPAN_S
from decentral.comm.wire.meter import Meter
from decentral.comm.wire.slow_start import MOST_BYTES
from decentral.core.ids import PeerId

A, B, NEAR = PeerId("A"), PeerId("B"), PeerId("NEAR")
EVERY_S = 10.0


class Sender:
    """Sends so many bytes/s to each peer, as its meter sees them every ten seconds."""

    def __init__(self) -> None:
        self.meter, self.now = Meter(), 0.0
        for peer, latency_s in ((A, 0.06), (B, 0.06), (NEAR, 0.001)):
            self.meter.saw(peer, latency_s, latency_s, 100, 100)
        self.rates: dict[PeerId, float] = {}
        self.meter.follow(lambda: {peer: round(rate * EVERY_S) for peer, rate in self.rates.items()})
        self.meter.sample_sent(0.0)

    def send(self, seconds: float, **rates: float) -> None:
        self.rates = {PeerId(peer): rate for peer, rate in rates.items()}
        for _ in range(round(seconds / EVERY_S)):
            self.now += EVERY_S
            self.meter.sample_sent(self.now)

    def typical_up(self) -> float:
        return self.meter.typical_up() or 0.0


def test_an_uplink_is_as_fast_as_all_its_transfers_together() -> None:
    """One of eight peers behind a router, each with several transfers, whose probe got the share of one."""
    sender = Sender()
    sender.meter.saw(A, 10.0, 0.06, 1 << 20, 100)
    assert sender.typical_up() == pytest.approx(0.1e6, rel=0.1)
    sender.send(120, A=5e6, B=5e6)
    assert sender.typical_up() == pytest.approx(10e6 - 2 * MOST_BYTES / SPAN_S)


def test_what_a_fast_probe_has_measured_counts_still() -> None:
    sender = Sender()
    sender.meter.saw(A, 0.26, 0.06, 4 << 20, 100)
    before = sender.typical_up()
    sender.send(120, A=1e6)
    assert sender.typical_up() == before > 10e6


def test_what_may_wait_in_a_buffer_does_not_count() -> None:
    """A slow uplink takes a few megabytes at once, and sends them over the next minute."""
    sender = Sender()
    sender.send(10, A=MOST_BYTES / EVERY_S, B=MOST_BYTES / EVERY_S)
    assert sender.typical_up() == 0.0


def test_near_and_far_peers_count_apart() -> None:
    sender = Sender()
    sender.send(120, NEAR=100e6, A=5e6)
    near, far = 100e6 - MOST_BYTES / SPAN_S, 5e6 - MOST_BYTES / SPAN_S
    assert sender.typical_up() == pytest.approx(3 / (1 / near + 2 / far))


def test_an_uplink_that_has_become_slower_is_known_to_be_so_after_some_minutes() -> None:
    sender = Sender()
    sender.send(120, A=10e6)
    sender.send(KEPT_S + SPAN_S, A=2e6)
    assert sender.typical_up() == pytest.approx(2e6 - MOST_BYTES / SPAN_S)


def test_bytes_from_before_the_first_look_do_not_count() -> None:
    meter = Meter()
    meter.follow(lambda: {A: 1_000_000_000})
    meter.sample_sent(5.0)
    assert meter.typical_up() is None

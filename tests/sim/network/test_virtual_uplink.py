"""A simulated peer's messages leave in the order and at the pace of a real one's (tests/comm/net/test_uplink.py)."""

from collections.abc import Callable

import pytest

from decentral.comm.net.uplink_queue import BURST_S, PROBE_HOLD_S, TURN_BYTES
from decentral.comm.wire import messages
from decentral.comm.wire.codec import Envelope
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.virtual_uplink import MOST_PIECES, PacedMessage, VirtualUplink

RATE = float(TURN_BYTES)  # a piece a second


class Peer:
    """Its transfers take no time, so that what is seen is the pace. `begun` and `through` say when, by name."""

    def __init__(self, rate: float | None = RATE) -> None:
        self.agenda = Agenda()
        self.uplink = VirtualUplink(self.agenda)
        self.uplink.queue.rate = lambda: rate
        self.begun, self.through = dict[str, float](), dict[str, float]()

    def send(self, name: str, pieces: int, message: messages.Message | None = None) -> PacedMessage:
        envelope = Envelope(message or messages.Refused("busy", ""), bytes(pieces * TURN_BYTES))

        def begin(arrived: Callable[[], None]) -> None:
            self.begun[name] = self.agenda.now
            self.agenda.after(0.0, arrived)

        def through() -> None:
            self.through[name] = self.agenda.now

        return self.uplink.send(envelope, pieces * TURN_BYTES, begin, through)


def test_a_message_is_through_when_its_last_piece_is() -> None:
    peer = Peer()
    peer.send("alone", 5)
    peer.agenda.run(10.0)
    assert peer.begun["alone"] == 0.0
    assert peer.through["alone"] == pytest.approx(5.0, abs=BURST_S)


def test_a_message_is_through_when_its_transfer_is_where_that_takes_longer() -> None:
    peer = Peer()
    done = list[float]()
    late = peer.uplink.send(
        Envelope(messages.Refused("busy", ""), bytes(TURN_BYTES)),
        TURN_BYTES,
        lambda arrived: void(peer.agenda.after(7.0, arrived)),
        lambda: done.append(peer.agenda.now),
    )
    peer.agenda.run(10.0)
    assert done == [7.0]
    assert not late.under_way


def test_a_small_message_does_not_wait_for_a_large_one_but_no_message_waits_for_ever() -> None:
    peer = Peer()
    peer.send("large", 12)
    peer.agenda.run(2.5)
    peer.send("small", 2)
    peer.agenda.run(8.5)
    peer.send("later", 6)  # due after the large one
    peer.agenda.run(30.0)
    assert peer.through == pytest.approx({"small": 5.0, "large": 14.0, "later": 20.0}, abs=2 * BURST_S)


def test_a_message_that_was_given_up_takes_no_time_of_the_uplink() -> None:
    peer = Peer()
    peer.send("first", 1)
    peer.send("given up", 9).given_up = True
    peer.send("last", 1)
    peer.agenda.run(30.0)
    assert peer.through == pytest.approx({"first": 1.0, "last": 2.0}, abs=BURST_S)


def test_a_probe_has_the_uplink_for_itself_when_what_has_left_is_through() -> None:
    peer = Peer()
    peer.send("before", 1)
    probed = list[float]()

    def begin() -> bool:
        probed.append(peer.agenda.now)
        return True

    peer.uplink.pause(begin)
    peer.send("after", 1)
    peer.agenda.run(3.0)
    assert probed == pytest.approx([1.0], abs=BURST_S)
    assert "after" not in peer.begun
    peer.uplink.resume()
    peer.agenda.run(10.0)
    assert peer.begun["after"] == pytest.approx(3.0)


def test_a_probe_gets_the_uplink_however_much_waits_for_it() -> None:
    peer = Peer()
    for name in ("first", "second"):
        peer.send(name, 100)
    probed = list[float]()

    def begin() -> bool:
        probed.append(peer.agenda.now)
        return True

    peer.agenda.at(2.5, lambda: peer.uplink.pause(begin))
    peer.agenda.run(20.0)
    assert probed == pytest.approx([3.0], abs=1.0)


def test_a_probe_that_is_forgotten_holds_nobody_for_ever() -> None:
    peer = Peer()
    peer.uplink.pause(lambda: True)
    peer.send("after", 1)
    peer.agenda.run(10.0)
    assert peer.begun["after"] == pytest.approx(PROBE_HOLD_S)


def test_a_probe_that_is_over_before_its_turn_holds_nobody() -> None:
    peer = Peer()
    peer.send("before", 1)
    peer.uplink.pause(lambda: False)
    peer.send("after", 1)
    peer.agenda.run(10.0)
    assert peer.begun["after"] == pytest.approx(1.0, abs=BURST_S)


def test_a_large_message_costs_few_events() -> None:
    peer = Peer()
    peer.send("large", 100 * MOST_PIECES)
    peer.agenda.run(1e6)
    assert peer.through["large"] == pytest.approx(100.0 * MOST_PIECES, abs=BURST_S)
    assert peer.agenda.events < 3 * MOST_PIECES


def test_where_no_rate_is_known_nothing_waits() -> None:
    peer = Peer(rate=None)
    assert not peer.uplink.paces(Envelope(messages.Refused("busy", ""), bytes(TURN_BYTES)))
    assert Peer().uplink.paces(Envelope(messages.Refused("busy", ""), bytes(TURN_BYTES)))


def void(_: object) -> None:
    """For callbacks that give nothing."""

"""Transfers in virtual time begin slowly, wait in queues and lose packets, as TCP's do."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from decentral.comm.wire.slow_start import MOST_BYTES, transfer_s
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.congestion import FIRST_WINDOW, WITH_HEADERS, CongestionWindow
from decentral.sim.network.shared_links import QUEUE_S, SharedLinks, SiteLink

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
RATE = 1e6
ROUND_TRIP_S = 0.1
PAUSE_S = 0.01
SIZE = 50e3  # three windows, if the connection is new


@dataclass
class Homes:
    """1 MB/s up, no limit down, and 100 ms there and back."""

    ups: dict[PeerId, float] = field(default_factory=dict)

    def up(self, peer: PeerId) -> float:
        return self.ups.get(peer, RATE)

    def down(self, peer: PeerId) -> float:
        return float("inf")

    def site_links(self, source: PeerId, target: PeerId) -> list[SiteLink]:
        return []

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        return ROUND_TRIP_S / 2

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        return ROUND_TRIP_S

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        return float("inf")


class World:
    def __init__(self) -> None:
        self.agenda, self.homes = Agenda(), Homes()
        self.links = SharedLinks(self.agenda, self.homes)
        self.took_s: dict[str, Seconds] = {}

    def send(self, name: str, size: float, source: PeerId = A, target: PeerId = B) -> None:
        self.links.start(source, target, size, self._noting(name, self.agenda.now))

    def after(self, pause_s: Seconds) -> None:
        self.agenda.run(self.agenda.now + pause_s)

    def alone(self, name: str, size: float) -> Seconds:
        """The duration of a transfer that nothing else disturbs."""
        self.send(name, size)
        while name not in self.took_s:
            self.after(PAUSE_S)
        return self.took_s[name]

    def _noting(self, name: str, began: Seconds) -> Callable[[], None]:
        return lambda: self.took_s.update({name: self.agenda.now - began})


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("size", [5e3, 30e3, 100e3, 1e6])
def test_a_transfer_on_a_new_connection_takes_what_the_meter_expects(world: World, size: float) -> None:
    """The meter reads rates off transfers by comm/wire/slow_start.py: both must mean the same slow start."""
    expected_s = transfer_s(int(size), RATE / WITH_HEADERS, ROUND_TRIP_S)
    assert world.alone("one", size * WITH_HEADERS) == pytest.approx(expected_s, rel=0.02)


def test_a_connection_that_was_just_used_does_not_begin_slowly_again(world: World) -> None:
    first_s = world.alone("first", SIZE)
    assert world.alone("second", SIZE) == pytest.approx(SIZE / RATE)
    assert first_s > 2 * ROUND_TRIP_S


def test_a_connection_that_was_not_used_for_long_does(world: World) -> None:
    first_s = world.alone("first", SIZE)
    world.after(10.0)
    assert world.alone("second", SIZE) == pytest.approx(first_s)


def test_small_messages_keep_a_connection_from_idling(world: World) -> None:
    world.alone("first", SIZE)
    for _ in range(50):
        world.after(0.2)
        world.links.use(A, B)
    assert world.alone("second", SIZE) == pytest.approx(SIZE / RATE)


def test_an_idle_connection_loses_half_of_its_window_in_each_time_out() -> None:
    window = CongestionWindow(8 * FIRST_WINDOW)
    window.use(0.65, ROUND_TRIP_S)
    assert window.size == 2 * FIRST_WINDOW
    window.use(100.0, ROUND_TRIP_S)
    assert window.size == FIRST_WINDOW


def test_another_connection_of_the_same_peer_begins_slowly(world: World) -> None:
    first_s = world.alone("first", SIZE)
    world.send("to C", SIZE, A, C)
    world.after(1.0)
    assert world.took_s["to C"] == pytest.approx(first_s)


def test_while_one_waits_for_acknowledgements_another_has_the_whole_link(world: World) -> None:
    world.alone("warming up", 1e6)
    world.send("new", SIZE, A, C)
    world.after(FIRST_WINDOW / RATE + 1e-6)  # it has sent its first window
    world.send("warm", 50e3)
    world.after(1.0)
    assert world.took_s["warm"] == pytest.approx(50e3 / RATE)


def test_two_transfers_on_one_connection_share_its_window(world: World) -> None:
    alone_s = World().alone("one", FIRST_WINDOW)
    world.send("one", FIRST_WINDOW)
    world.send("two", FIRST_WINDOW)
    world.after(1.0)
    assert alone_s < ROUND_TRIP_S < world.took_s["two"]


def test_when_transfers_end_one_by_one_the_last_has_the_whole_window_of_the_connection(world: World) -> None:
    """It kept its own part, so that fourteen transfers at once left a fourteenth of the window to the next one."""
    world.links.windows[A, B] = CongestionWindow(140e3, ceiling=140e3)
    for number in range(14):
        world.send(f"{number}", (number + 1) * 20e3)
    world.after(30.0)
    assert len(world.took_s) == 14
    assert world.links.windows[A, B].size >= 140e3


def test_transfers_that_begin_together_have_no_more_in_flight_than_the_window() -> None:
    window = CongestionWindow(8 * FIRST_WINDOW)
    for _ in range(8):
        window.sender(SIZE, RATE, ROUND_TRIP_S)
    assert window.whole == pytest.approx(8 * FIRST_WINDOW)


def test_other_transfers_do_not_count_as_a_pause_of_a_connection() -> None:
    window = CongestionWindow(8 * FIRST_WINDOW)
    window.sender(SIZE, RATE, ROUND_TRIP_S)
    window.use(100.0, ROUND_TRIP_S)
    assert window.whole == 8 * FIRST_WINDOW


def test_slow_start_after_a_pause_goes_up_to_three_quarters_of_the_window_before_it() -> None:
    window = CongestionWindow(8 * FIRST_WINDOW, ceiling=FIRST_WINDOW)
    window.use(100.0, ROUND_TRIP_S)
    assert window.ceiling == 6 * FIRST_WINDOW


def test_a_small_message_waits_behind_what_is_in_the_queue(world: World) -> None:
    world.send("bulk", 5e6)
    world.after(3.0)
    assert 0.01 < world.links.queue_s(A, C) < QUEUE_S
    assert world.links.queue_s(B, A) == 0.0
    world.after(10.0)
    assert world.links.queue_s(A, C) == 0.0


def test_acknowledgements_wait_behind_what_the_receiver_sends(world: World) -> None:
    alone_s = World().alone("one", SIZE)
    world.homes.ups[B] = 0.2 * RATE
    world.send("bulk", 1e6, B, C)
    world.after(2.0)
    assert world.alone("one", SIZE) > alone_s + 0.05


def test_a_burst_that_the_queue_cannot_hold_costs_a_recovery_and_a_part_of_the_window(world: World) -> None:
    """Six windows of 50 kB at once, and the queue holds 250 kB."""
    peers = [PeerId(f"P{number}") for number in range(6)]
    for peer in peers:
        world.links.windows[A, peer] = CongestionWindow(4 * FIRST_WINDOW)
        world.send(peer, SIZE, A, peer)
    world.after(5.0)
    took_s = [world.took_s[peer] for peer in peers]
    assert took_s[0] == pytest.approx(6 * SIZE / RATE, rel=0.1)
    assert took_s[-1] >= QUEUE_S + ROUND_TRIP_S
    assert took_s[-1] > took_s[0] + PAUSE_S
    assert world.links.windows[A, peers[-1]].ceiling < world.links.windows[A, peers[0]].ceiling == MOST_BYTES

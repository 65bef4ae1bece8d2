"""Transfers that share links run at the least of their shares, and each byte is sent once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.shared_links import SharedLinks, SiteLink, Transfer
from tests.sim.network.next_action import next_at

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
PEERS = (A, B, C)


@dataclass
class Plain:
    """100 MB/s up, 200 down, no delay; a link does what its ends do unless it is named. Figures are in MB/s."""

    ups: dict[PeerId, float] = field(default_factory=dict)
    links: dict[tuple[PeerId, PeerId], float] = field(default_factory=dict)
    sites: dict[tuple[PeerId, PeerId], list[SiteLink]] = field(default_factory=dict)

    def up(self, peer: PeerId) -> float:
        return 1e6 * self.ups.get(peer, 100.0)

    def down(self, peer: PeerId) -> float:
        return 200e6

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        return 0.0

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        return 0.0

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        return 1e6 * self.links.get((source, target), float("inf"))

    def site_links(self, source: PeerId, target: PeerId) -> Sequence[SiteLink]:
        return self.sites.get((source, target), [])


class Wires:
    """Transfers, with the time at which each was done."""

    def __init__(self) -> None:
        self.agenda, self.geography = Agenda(), Plain()
        self.links = SharedLinks(self.agenda, self.geography)
        self.done: dict[str, Seconds] = {}

    def send(self, name: str, source: PeerId, target: PeerId, megabytes: float) -> Transfer:
        return self.links.start(source, target, 1e6 * megabytes, self.noting(name))

    def share_anew(self, peer: PeerId) -> None:
        """Lets a transfer come and go at once, so that the peer's links are shared as they are now."""
        self.links.stop(self.send("nothing", peer, peer, 1))

    def noting(self, name: str) -> Callable[[], None]:
        return lambda: self.done.update({name: self.agenda.now})


@pytest.fixture
def wires() -> Wires:
    return Wires()


def test_alone_a_transfer_has_the_uplink(wires: Wires) -> None:
    wires.send("one", A, B, 1000)
    wires.agenda.run(100)
    assert wires.done == {"one": pytest.approx(10)}


def test_two_from_one_peer_share_its_uplink(wires: Wires) -> None:
    wires.send("to B", A, B, 1000)
    wires.send("to C", A, C, 1000)
    wires.agenda.run(100)
    assert wires.done == {"to B": pytest.approx(20), "to C": pytest.approx(20)}


def test_all_that_leave_a_site_share_its_link(wires: Wires) -> None:
    leaves = SiteLink("lab", True, 50e6)
    wires.geography.sites |= {(A, C): [leaves], (B, C): [leaves]}
    wires.send("A to C", A, C, 500)
    wires.send("B to C", B, C, 250)
    wires.agenda.run(100)
    assert wires.done == {"A to C": pytest.approx(15), "B to C": pytest.approx(10)}


def test_many_to_one_peer_share_its_downlink(wires: Wires) -> None:
    wires.geography.ups = {A: 300.0, B: 300.0}
    wires.send("from A", A, C, 1000)
    wires.send("from B", B, C, 1000)
    wires.agenda.run(100)
    assert wires.done == {"from A": pytest.approx(10), "from B": pytest.approx(10)}


def test_what_a_slow_link_cannot_use_of_the_uplink_others_get(wires: Wires) -> None:
    wires.geography.links = {(A, B): 20.0}
    wires.send("slow", A, B, 100)
    wires.send("slow too", A, B, 100)
    wires.send("fast", A, C, 100)
    wires.agenda.run(100)
    assert wires.done == {"fast": pytest.approx(1.25), "slow": pytest.approx(10), "slow too": pytest.approx(10)}


def test_what_a_slow_sender_cannot_use_of_a_downlink_others_get(wires: Wires) -> None:
    wires.geography.ups = {A: 20.0, B: 300.0}
    wires.send("slow", A, C, 100)
    wires.send("fast", B, C, 900)
    wires.agenda.run(100)
    assert wires.done == {"slow": pytest.approx(5), "fast": pytest.approx(5)}


def test_a_transfer_with_more_than_its_share_gives_way_to_one_that_becomes_faster(wires: Wires) -> None:
    wires.geography.ups = {A: 300.0, B: 100.0}
    wires.send("slow", B, C, 1000)
    wires.send("beside", B, A, 50)
    wires.send("borrows", A, C, 1000)  # until "beside" ends after 1 s, "slow" has 50 MB/s and this one 150
    wires.agenda.run(100)
    assert wires.done["beside"] == pytest.approx(1)
    assert wires.done["borrows"] == pytest.approx(1 + 850 / 100)


def test_what_a_transfer_leaves_behind_the_others_get(wires: Wires) -> None:
    wires.send("short", A, B, 100)
    wires.send("long", A, C, 1000)
    wires.agenda.run(100)
    assert wires.done == {"short": pytest.approx(2), "long": pytest.approx(11)}


def test_a_transfer_that_is_stopped_is_never_done_and_gives_its_share_back(wires: Wires) -> None:
    stopped = wires.send("stopped", A, B, 1000)
    wires.send("other", A, C, 1000)
    wires.agenda.run(10)
    wires.links.stop(stopped)
    wires.links.stop(stopped)
    wires.agenda.run(100)
    assert wires.done == {"other": pytest.approx(15)}


def test_a_wire_that_gets_slower_slows_what_is_under_way(wires: Wires) -> None:
    wires.send("one", A, B, 1000)
    wires.agenda.run(5)
    wires.geography.ups[A] = 10.0
    wires.share_anew(A)
    wires.agenda.run(100)
    assert wires.done == {"one": pytest.approx(55)}


def test_a_dead_wire_holds_a_transfer_until_it_lives_again(wires: Wires) -> None:
    wires.geography.ups[A] = 0.0
    wires.send("one", A, B, 100)
    wires.agenda.run(50)
    wires.geography.ups[A] = 100.0
    wires.share_anew(A)
    wires.agenda.run(100)
    assert wires.done == {"one": pytest.approx(51)}


def test_equal_transfers_are_done_in_the_order_in_which_they_began(wires: Wires) -> None:
    for name in ("first", "second", "third"):
        wires.send(name, A, B, 50)
    wires.agenda.run(100)
    assert list(wires.done) == ["first", "second", "third"]


Sent = tuple[float, int, int, int]
sent = st.tuples(st.floats(0, 20), st.sampled_from(range(3)), st.sampled_from([1, 2]), st.integers(1, 5000))


def play(transfers: list[Sent]) -> tuple[Wires, list[Transfer]]:
    wires, begun = Wires(), list[Transfer]()
    wires.geography.ups = {A: 50.0, B: 100.0, C: 400.0}
    wires.geography.links = {(A, C): 30.0}
    put_down(wires, transfers, begun)
    wires.agenda.run(1e6)
    return wires, begun


def put_down(wires: Wires, transfers: list[Sent], begun: list[Transfer]) -> None:
    """On the agenda, each for its time."""

    def beginning(number: int, source: int, hop: int, size: int) -> Callable[[], None]:
        return lambda: begun.append(wires.send(str(number), PEERS[source], PEERS[(source + hop) % 3], size))

    for number, (at, *transfer) in enumerate(transfers):
        wires.agenda.at(at, beginning(number, *transfer))


@given(st.lists(sent, min_size=1, max_size=8))
def test_a_transfer_never_finishes_sooner_than_alone(transfers: list[Sent]) -> None:
    together, _ = play(transfers)
    for number, transfer in enumerate(transfers):
        alone, _ = play([transfer])
        assert together.done[str(number)] >= alone.done["0"] - 1e-6


@given(st.lists(sent, min_size=1, max_size=8))
def test_every_byte_arrives_once_and_nothing_is_left(transfers: list[Sent]) -> None:
    wires, begun = play(transfers)
    assert len(wires.done) == len(transfers)
    assert all(transfer.sender.left == pytest.approx(0, abs=1e-2) for transfer in begun)
    assert not any(wires.links.sending.values())
    assert not any(wires.links.receiving.values())


@given(st.lists(sent, min_size=1, max_size=8))
def test_no_wire_ever_carries_more_than_it_can(transfers: list[Sent]) -> None:
    wires = Wires()
    put_down(wires, transfers, [])
    while (due := next_at(wires.agenda)) is not None:
        wires.agenda.run(due)
        for peer in PEERS:
            assert sum(transfer.rate for transfer in wires.links.sending.get(peer, ())) <= 100e6 * (1 + 1e-9)
            assert sum(transfer.rate for transfer in wires.links.receiving.get(peer, ())) <= 200e6 * (1 + 1e-9)


def test_bytes_of_transfers_under_way_count_as_sent_once() -> None:
    wires = Wires()
    wires.send("whole", A, B, 100)
    wires.send("part", A, C, 100)
    wires.agenda.run(1.0)
    assert wires.links.take_sent(A) == {B: 50_000_000, C: 50_000_000}
    wires.agenda.run(3.0)
    assert wires.links.take_sent(A) == {B: 50_000_000, C: 50_000_000}
    assert wires.links.take_sent(A) == {}

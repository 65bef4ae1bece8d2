"""Virtual time shows what no real network can in a test: minutes of silence, frozen processes, damage on the way."""

from collections.abc import Callable
from random import Random

import pytest

from decentral.comm.net.streams import STREAM_ANSWER_S, WRITE_S
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message, Ping, Pong, Probe, Probed, Refused
from decentral.comm.wire.transport import Answer, Ask, AskError, Tag
from decentral.core.ids import PeerId
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.congestion import WITH_HEADERS
from decentral.sim.network.network_faults import NetworkFaults
from decentral.sim.network.shared_links import SiteLink
from decentral.sim.network.virtual_network import Network, Outcome, Port, Respond
from tests.comm.net.virtual_transport import plugged

A, B = PeerId("A"), PeerId("B")
DELAY_S = 0.5
RATE = 100_000.0  # bytes/s
LONG_S = 1000.0


class Wires:
    def up(self, peer: PeerId) -> float:
        return RATE

    def down(self, peer: PeerId) -> float:
        return RATE

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        return DELAY_S

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        return 0.0

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        return float("inf")

    def site_links(self, source: PeerId, target: PeerId) -> list[SiteLink]:
        return []


class Bad(NetworkFaults):
    """Faults that a test changes; none at first."""

    def __init__(self) -> None:
        super().__init__(Agenda(), Random(0), jitter=0.0)
        self.change: Callable[[bytes], bytes] | None = None
        self.times = 1
        self.lost = False

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        return float("inf") if self.lost else delay_s

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        return self.change(wire()) if self.change else None

    def copies(self, source: PeerId, target: PeerId) -> int:
        return self.times


class World:
    """A asks, and B answers a Ping with a Pong. It notes the times of questions, and all outcomes."""

    def __init__(self) -> None:
        self.agenda, self.faults = Agenda(), Bad()
        self.network = Network(self.agenda, Wires(), self.faults)
        self.a, self.b = plugged(self.network, A), plugged(self.network, B)
        self.b.bound = bound
        self.a.serve = self.b.serve = self.serve
        self.answers: Callable[[Respond], None] = lambda respond: respond(Envelope(Pong(1)))
        self.asked: list[Seconds] = []
        self.came: list[tuple[Seconds, str]] = []

    def serve(self, sender: PeerId, envelope: Envelope, respond: Respond) -> None:
        self.asked.append(self.agenda.now)
        self.answers(respond)

    def ask(self, envelope: Envelope | None = None, deadline_s: Seconds = LONG_S, bytes_back: int = 10**8) -> None:
        ask = Ask(Tag(), B, envelope or Envelope(Ping(1)), deadline_s, bytes_back)
        self.network.ask(self.a, ask, self._note)

    def _note(self, outcome: Outcome) -> None:
        what = outcome.reason if isinstance(outcome, AskError) else _said(outcome)
        self.came.append((round(self.agenda.now, 3), what))

    def play(self, until: Seconds = LONG_S) -> list[tuple[Seconds, str]]:
        self.agenda.run(until)
        return self.came

    def at_rest(self, port: Port) -> bool:
        return not port.open and not port.asked


def bound(message: Message) -> int:
    return 100_000 if isinstance(message, Probe) else 0


def _said(answer: Answer) -> str:
    message = answer.envelope.message
    return message.reason if isinstance(message, Refused) else type(message).__name__.lower()


@pytest.fixture
def world() -> World:
    return World()


def test_a_question_and_its_answer_take_a_delay_each(world: World) -> None:
    world.ask()
    assert (world.play(), world.asked) == ([(1.0, "pong")], [0.5])
    assert world.at_rest(world.a)
    assert world.at_rest(world.b)


def test_a_blob_takes_its_time_on_the_wire(world: World) -> None:
    world.answers = lambda respond: respond(Envelope(Probed(0), bytes(5_000_000)))
    world.ask()
    ((at, what),) = world.play()
    assert what == "probed"
    assert at == pytest.approx(1.0 + 50 * WITH_HEADERS, abs=0.2)


def test_a_synthetic_blob_takes_the_time_of_its_length(world: World) -> None:
    world.answers = lambda respond: respond(Envelope(Probed(0), SyntheticBlob([(5_000_000, b"few")])))
    world.ask()
    ((at, _),) = world.play()
    assert at == pytest.approx(1.0 + 50 * WITH_HEADERS, abs=0.2)


# Silence


def test_behind_a_partition_there_is_nothing_until_the_deadline(world: World) -> None:
    world.faults.one_way = {(A, B): 0.0, (B, A): 0.0}
    world.ask(deadline_s=20)
    assert (world.play(), world.asked) == ([(20.0, "deadline")], [])


def test_a_partition_that_heals_before_the_deadline_costs_a_retry(world: World) -> None:
    world.faults.one_way = {(A, B): 0.0, (B, A): 0.0}
    world.ask(deadline_s=60)
    world.play(10)
    world.faults.one_way.clear()
    ((at, what),) = world.play()
    assert what == "pong"
    assert 10 < at < 25


def test_an_answer_that_cannot_leave_ends_at_the_write_deadline(world: World) -> None:
    world.ask(deadline_s=200)
    world.play(0.2)  # the question is on its way
    world.faults.one_way = {(B, A): 0.0}
    world.play(WRITE_S)
    assert world.b.open
    world.play(WRITE_S + 1)
    assert not world.b.open
    assert world.b.refused == {"deadline": 1}
    assert world.play() == [(200.0, "deadline")]


def test_a_slow_reader_holds_its_answerer_for_write_s_and_no_longer(world: World) -> None:
    world.answers = lambda respond: respond(Envelope(Probed(0), SyntheticBlob([(90_000_000, b"few")])))
    world.ask()
    world.play(WRITE_S)
    assert world.b.open
    world.play(WRITE_S + 1)
    assert not world.b.open
    assert world.b.refused == {"deadline": 1}
    assert world.play()[0][1] == "cut"


def test_a_peer_that_finds_no_answer_in_time_ends_the_stream(world: World) -> None:
    world.answers = lambda respond: None
    world.ask(deadline_s=2 * STREAM_ANSWER_S)
    assert world.play(2 * STREAM_ANSWER_S) == [(STREAM_ANSWER_S + 2 * DELAY_S, "cut")]
    assert world.b.refused == {"deadline": 1}


def test_an_answer_after_that_is_lost(world: World) -> None:
    held: list[Respond] = []
    world.answers = held.append
    world.ask(deadline_s=2 * STREAM_ANSWER_S)
    world.play(STREAM_ANSWER_S + 10)
    held[0](Envelope(Pong(1)))
    assert [what for _, what in world.play(2 * STREAM_ANSWER_S)] == ["cut"]


# Processes that die


def test_a_peer_that_dies_while_it_answers_cuts_the_stream(world: World) -> None:
    world.answers = lambda respond: None
    world.ask()
    world.play(10)
    world.network.unplug(B)
    assert world.play() == [(10.5, "cut")]


def test_where_nobody_listens_the_refusal_is_at_once(world: World) -> None:
    world.network.unplug(B)
    world.ask()
    assert world.play() == [(1.0, "unreachable")]


def test_a_peer_that_dies_hears_nothing_more(world: World) -> None:
    world.ask()
    world.play(0.2)
    world.network.unplug(A)
    assert world.play() == []
    assert not world.b.open


# Processes that are stopped


def test_a_stopped_process_answers_when_it_goes_on(world: World) -> None:
    world.b.frozen = True
    world.ask()
    world.play(30)
    assert world.asked == []
    world.b.thaw()
    assert world.play() == [(30.5, "pong")]


def test_a_stopped_asker_finds_its_answer_when_it_goes_on(world: World) -> None:
    world.ask()
    world.play(0.2)
    world.a.frozen = True
    assert world.play(30) == []
    world.a.thaw()
    assert world.came == [(30.0, "pong")]


def test_a_deadline_that_passed_while_it_was_stopped_is_told_once_it_goes_on(world: World) -> None:
    world.answers = lambda respond: None
    world.ask(deadline_s=10)
    world.play(5)
    world.a.frozen = True
    assert world.play(30) == []
    world.a.thaw()
    assert [what for _, what in world.came] == ["deadline"]


# Damage


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        pytest.param(lambda wire: wire[:-2], {"cut"}, id="truncated"),
        pytest.param(lambda wire: b"\xff" + wire[1:], {"oversize"}, id="an impossible length"),
        pytest.param(lambda wire: wire[:4] + b"\xc1" + wire[5:], {"garbage"}, id="no msgpack"),
    ],
)
def test_a_damaged_question_is_refused_by_the_real_codec(
    world: World, change: Callable[[bytes], bytes], reasons: set[str]
) -> None:
    world.faults.change = change
    world.ask()
    world.play(0.5)
    world.faults.change = None
    assert set(world.b.refused) == reasons
    assert world.asked == []


def test_a_flipped_bit_in_a_blob_is_a_wrong_digest(world: World) -> None:
    world.faults.change = lambda wire: wire[:-1] + bytes([wire[-1] ^ 1])
    world.ask(Envelope(Probe(0), b"some bytes"))
    world.play(0.5)
    assert world.b.refused == {"digest": 1}


def test_a_synthetic_blob_that_was_damaged_is_as_bad_as_a_real_one(world: World) -> None:
    world.answers = lambda respond: respond(Envelope(Probed(0), SyntheticBlob([(5_000_000, b"few")])))
    world.ask()
    world.play(0.4)
    world.faults.change = lambda wire: wire[:-1] + bytes([wire[-1] ^ 1])
    ((_, what),) = world.play()
    assert what == "digest"


def test_a_question_that_comes_twice_is_answered_once(world: World) -> None:
    world.faults.times = 2
    world.ask()
    assert [what for _, what in world.play()] == ["pong"]
    assert len(world.asked) == 2
    assert world.at_rest(world.b)


def test_a_stream_that_is_reset_is_cut(world: World) -> None:
    world.faults.lost = True
    world.ask()
    assert world.play() == [(1.0, "cut")]

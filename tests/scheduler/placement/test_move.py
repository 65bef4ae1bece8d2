"""A peer changes its layers: it fetches, gets replica leases, drains, switches. A move that fails changes nothing."""

from collections.abc import Sequence
from random import Random

import pytest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, LeaseRequest, Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Event, Reply
from decentral.core.fragments import Fragment, Section
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import ChangeSpan, SpanChanged
from decentral.core.journal.events import MoveLine
from decentral.core.machine import Log, Woke
from decentral.core.memory_needs import MemoryNeeds
from decentral.peers.joining.fetch import FAILURES, PIECE_BYTES
from decentral.scheduler.placement.move import (
    DRAIN_MOST_S,
    FETCH_STALLED_S,
    LEASE_S,
    LEASE_WAIT_S,
    MOVE_RETRY_S,
    Drained,
    MemoryBudget,
    MoveCause,
    MoveEffect,
    MovePhase,
    SpanMove,
    UseSpan,
)

RUN = RunId("gpt-3fa2c1")
CUTS = tuple(Fragment(index, 2 * index, 2 * index + 2, 100) for index in range(4))
BUDGET = MemoryBudget(MemoryNeeds(CUTS, (10,) * 4, (0,) * 4, (0,) * 4), 20, ((Section("phi", "fp32", 25, 100),),) * 4)
STATE = bytes(100)


class Swarm:
    """Peers that hold fragments, and their open questions, which a test delivers in the order it likes."""

    def __init__(self, replicas: int = 1, **held: range) -> None:
        self.now = 100.0
        self.spans = {PeerId(name): span for name, span in held.items()}
        self.peers = {
            name: SpanMove(RUN, name, BUDGET, Seen(self, name), Random(0), replicas, span)
            for name, span in self.spans.items()
        }
        self.asks: list[tuple[PeerId, Ask]] = []
        self.effects: dict[PeerId, list[MoveEffect]] = {name: [] for name in self.peers}
        self.retained: dict[int, list[PeerId]] = {}
        self.plan: dict[PeerId, range] = {}
        self.alone: set[PeerId] = set()  # peers that compute for no other peer

    def __getitem__(self, name: str) -> SpanMove:
        return self.peers[PeerId(name)]

    def carry(self, name: PeerId, effects: Sequence[MoveEffect]) -> None:
        self.asks += [(name, effect) for effect in effects if isinstance(effect, Ask)]
        self.effects[name] += [effect for effect in effects if not isinstance(effect, Ask)]
        self.spans[name] = self.peers[name].held

    def begin(
        self, name: str, target: range, may_initialise: bool = False, cause: MoveCause = MoveCause.RECOVERY
    ) -> None:
        self.carry(PeerId(name), self[name].begin(target, cause, self.now, may_initialise))

    def follow_plan(self, name: str) -> None:
        self.begin(name, self.plan[PeerId(name)], cause=MoveCause.PLAN)

    def tell(self, name: str, event: Event | Drained) -> None:
        self.carry(PeerId(name), self[name].handle(event, self.now))

    def wake(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.tell(name, Woke())

    def deliver(self, asker: PeerId, ask: Ask) -> None:
        """The question arrives, and so does its answer."""
        message = ask.envelope.message
        if isinstance(message, StateRequest):
            chunk = StateChunk(RUN, message.fragment, 0, 100, 7, BUDGET.layouts[0])
            answer = Envelope(chunk, STATE)
        else:
            self.tell(ask.to, Asked(1, asker, ask.envelope))
            reply = self.effects[ask.to].pop()
            assert isinstance(reply, Reply)
            answer = reply.envelope
        self.tell(asker, Answered(ask.tag, ask.to, answer, 0.1, 0.1, 10, 10))

    def deliver_all(self) -> None:
        while self.asks:
            self.deliver(*self.asks.pop(0))

    def job(self, name: str) -> ChangeSpan:
        """The job for the compute thread when no stage execution is under way any more."""
        assert self[name].drains
        self.tell(name, Drained())
        job = self.effects[PeerId(name)].pop()
        assert isinstance(job, ChangeSpan)
        return job

    def arrive(self, name: str) -> None:
        self.job(name)
        self.tell(name, SpanChanged(True))

    def said(self, name: str) -> list[tuple[str, str]]:
        lines = [effect.event for effect in self.effects[PeerId(name)] if isinstance(effect, Log)]
        return [(line.outcome, line.reason) for line in lines if isinstance(line, MoveLine)]


class Seen:
    """What a peer knows of the others, which here is always true."""

    def __init__(self, swarm: Swarm, own: PeerId) -> None:
        self.swarm, self.own = swarm, own

    def holders(self, fragment: int) -> list[PeerId]:
        return [name for name, span in self.swarm.spans.items() if name != self.own and fragment in span]

    def takers(self, fragment: int) -> list[PeerId]:
        there = (name for name in self.swarm.plan if name != self.own and self.swarm.spans[name])
        return [name for name in there if fragment in self.swarm.plan[name]]

    def servers(self, fragment: int, parts_only: bool = False) -> list[PeerId]:
        there = [name for name in self.holders(fragment) if name not in self.swarm.alone]
        return [name for name in there if not parts_only or len(self.swarm.spans[name]) < len(CUTS)]

    def retainers(self, fragment: int) -> list[PeerId]:
        return [name for name in self.swarm.retained.get(fragment, []) if not self.retains(fragment)]

    def retains(self, fragment: int) -> bool:
        return self.own in self.swarm.retained.get(fragment, [])


def test_the_new_layers_are_fetched_before_leases_are_asked_for_and_both_before_the_switch() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.begin("B", range(1, 3))
    assert [(ask.to, type(ask.envelope.message)) for _, ask in swarm.asks] == [("C", StateRequest)]
    swarm.deliver(*swarm.asks.pop())
    assert [(ask.to, ask.envelope.message) for _, ask in swarm.asks] == [("A", LeaseRequest(RUN, 0))]
    swarm.deliver_all()
    assert swarm.job("B") == ChangeSpan(2, 6, ((2, BUDGET.layouts[2], STATE),), 7)
    assert swarm["B"].held == range(0, 2)
    swarm.tell("B", SpanChanged(True))
    assert swarm["B"].held == range(1, 3)
    assert swarm.effects[PeerId("B")][-1] == UseSpan(range(1, 3))
    assert swarm.said("B") == [("done", "")]


@pytest.mark.parametrize("first", ["A", "B"])
def test_two_holders_never_give_up_the_last_two_copies(first: str) -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(1, 3), D=range(2, 4))
    second = "B" if first == "A" else "A"
    for name in (first, second):
        swarm.begin(name, range(2, 4))
    swarm.deliver_all()
    assert swarm["B"].drains  # the one with the higher id moves, whichever began
    assert swarm.said("A") in ([("failed", "yielded")], [("failed", "needed")])
    swarm.begin("A", range(2, 4))
    assert swarm.said("A")[-1] == ("failed", "promised")
    swarm.arrive("B")
    swarm.begin("A", range(2, 4))
    swarm.deliver_all()
    assert swarm.said("A")[-1] == ("failed", "needed")
    assert swarm["A"].held == range(0, 2)


@pytest.mark.parametrize("seed", range(30))
def test_every_layer_keeps_a_holder_whatever_moves_begin_in_whatever_order(seed: int) -> None:
    rng = Random(seed)
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(1, 3), D=range(2, 4), E=range(2, 4))
    moved = 0
    for _ in range(200):
        name = rng.choice("ABCDE")
        if swarm[name].drains:
            swarm.tell(name, Drained())
            if swarm[name].phase is MovePhase.SWITCHING:  # else those that granted a lease are gone
                swarm.tell(name, SpanChanged(True))
                moved += 1
        elif swarm.asks and rng.random() < 0.7:
            swarm.deliver(*swarm.asks.pop(rng.randrange(len(swarm.asks))))
        else:
            begin = rng.randrange(3)
            swarm.begin(name, range(begin, begin + 2))
            swarm.now += rng.choice([0.0, LEASE_S])
        for index in range(4):
            assert any(index in span for span in swarm.spans.values())
    assert moved > 0


def relief(**held: range) -> Swarm:
    """A moves to layers that whole-model peers alone hold, and has fetched them."""
    swarm = Swarm(2, W=range(0, 4), V=range(0, 4), A=range(0, 2), **held)
    swarm.begin("A", range(2, 4), cause=MoveCause.RELIEF)
    for fetched in [ask for ask in swarm.asks if isinstance(ask[1].envelope.message, StateRequest)]:
        swarm.asks.remove(fetched)
        swarm.deliver(*fetched)
    return swarm


def test_who_takes_layers_from_whole_model_peers_does_not_leave_them_others() -> None:
    assert relief(B=range(0, 2)).said("A") == [("failed", "needed")]
    swarm = relief(B=range(0, 2), C=range(0, 2))
    assert {ask.to for _, ask in swarm.asks} == {"B", "C"}
    swarm.deliver_all()
    assert swarm["A"].drains


def test_parts_that_are_gone_by_then_keep_it_from_moving() -> None:
    swarm = relief(B=range(0, 2), C=range(0, 2))
    swarm.deliver_all()
    del swarm.spans[PeerId("C")]
    swarm.tell("A", Drained())
    assert swarm.said("A") == [("failed", "needed")]


def test_the_last_holder_stays() -> None:
    swarm = Swarm(A=range(0, 2), B=range(1, 3), C=range(2, 4))
    swarm.begin("A", range(1, 3))
    swarm.deliver_all()
    assert swarm.said("A") == [("failed", "needed")]
    assert swarm["A"].held == range(0, 2)


def test_a_whole_model_that_computes_for_nobody_is_no_other_holder() -> None:
    """Parts beside it gave up layers that no route could then pass, or never took over those that were lost."""
    swarm = Swarm(A=range(0, 2), B=range(0, 4), C=range(1, 3))
    swarm.alone = {PeerId("B")}
    swarm.begin("A", range(1, 3))
    swarm.deliver_all()
    assert swarm.said("A") == [("failed", "needed")]


def test_relief_leaves_a_layer_as_many_holders_as_the_run_asks_for() -> None:
    swarm = Swarm(2, A=range(0, 2), B=range(0, 2), C=range(1, 3))
    swarm.begin("A", range(1, 3), cause=MoveCause.RELIEF)
    swarm.deliver_all()
    assert swarm.said("A") == [("failed", "needed")]


def test_for_lost_layers_one_other_holder_of_what_is_given_up_has_to_do() -> None:
    swarm = Swarm(2, A=range(0, 2), B=range(0, 2), C=range(1, 3))
    swarm.begin("A", range(1, 3))
    swarm.deliver_all()
    swarm.wake("A", 1.0)
    assert ("failed", "needed") not in swarm.said("A")
    assert swarm["A"].phase is not MovePhase.IDLE or swarm["A"].held == range(1, 3)


def test_a_donor_that_dies_leaves_the_old_span_serving() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.begin("B", range(1, 3))
    for _ in range(20):
        while swarm.asks:
            asker, ask = swarm.asks.pop()
            swarm.tell(asker, AskFailed(ask.tag, ask.to, "unreachable", 0.1))
        swarm.wake("B", MOVE_RETRY_S)
    assert swarm.said("B") == [("failed", "donors")]
    assert swarm["B"].phase is MovePhase.IDLE
    assert MOVE_RETRY_S * 20 > FETCH_STALLED_S
    assert FAILURES < 20


def test_a_state_that_the_device_refuses_leaves_the_old_span_serving() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    swarm.job("B")
    swarm.tell("B", SpanChanged(False, "nan"))
    assert swarm.said("B") == [("failed", "nan")]
    assert swarm.effects[PeerId("B")][-1] == UseSpan(range(0, 2))


def test_what_does_not_fit_is_not_begun() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 4))
    swarm.begin("A", range(0, 3))
    assert swarm.said("A") == [("failed", "memory")]
    assert not swarm.asks


def test_executions_that_do_not_end_keep_us_where_we_are() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    swarm.wake("B", DRAIN_MOST_S)
    assert swarm.said("B") == [("failed", "not-drained")]
    assert not swarm["B"].drains


@pytest.mark.parametrize("drained", [True, False])
def test_a_draining_peer_goes_on_serving_when_the_holders_that_granted_leases_have_died(drained: bool) -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    assert swarm["B"].drains
    swarm.spans[PeerId("A")] = range(0)
    if drained:
        swarm.tell("B", Drained())
    else:
        swarm.wake("B", MOVE_RETRY_S)
    assert swarm.said("B") == [("failed", "needed")]
    assert swarm["B"].held == range(0, 2)
    assert not swarm["B"].drains


def test_what_nobody_holds_or_retains_is_initialised_only_on_request() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2))
    swarm.begin("B", range(1, 3))
    assert swarm.said("B") == [("failed", "donors")]
    swarm.begin("B", range(1, 3), may_initialise=True)
    swarm.deliver_all()
    assert swarm.job("B").blobs == ()


def test_what_nobody_holds_but_somebody_retains_comes_from_there() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2))
    swarm.retained[2] = [PeerId("A")]
    swarm.begin("B", range(1, 3))
    (_, ask) = swarm.asks[0]
    assert (ask.to, ask.envelope.message) == ("A", StateRequest(RUN, 2, 0, PIECE_BYTES, kept=True))
    swarm.deliver_all()
    assert [index for index, _, _ in swarm.job("B").blobs] == [2]


def test_what_only_our_own_disk_retains_needs_no_donor() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2))
    swarm.retained[2] = [PeerId("B")]
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    assert swarm.job("B").blobs == ()


def test_leases_are_given_back_when_the_move_is_over() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4), D=range(0, 2))
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    assert swarm["A"].granted.until == {0: {"B": swarm.now + LEASE_S}}
    swarm.arrive("B")
    swarm.deliver_all()
    assert swarm["A"].granted.until == {0: {}}


def test_a_move_under_way_is_given_up_for_a_new_target_but_not_while_it_switches() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    swarm.carry(PeerId("B"), swarm["B"].abandon_unless_to(range(1, 3), swarm.now))
    assert swarm["B"].drains
    swarm.carry(PeerId("B"), swarm["B"].abandon_unless_to(range(0, 2), swarm.now))
    assert swarm.said("B") == [("failed", "replanned")]
    swarm.begin("B", range(1, 3))
    swarm.deliver_all()
    swarm.job("B")
    assert swarm["B"].abandon_unless_to(range(0, 2), swarm.now) == []


def test_a_lease_ends_with_its_time() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(0, 2))
    swarm.tell("A", Asked(1, PeerId("B"), Envelope(LeaseRequest(RUN, 0))))
    swarm.begin("A", range(1, 3), may_initialise=True)
    assert swarm.said("A") == [("failed", "promised")]
    swarm.now += LEASE_S
    swarm.begin("A", range(1, 3), may_initialise=True)
    swarm.deliver_all()
    assert swarm["A"].drains


def test_a_peer_that_does_not_hold_a_fragment_grants_no_lease() -> None:
    swarm = Swarm(A=range(0, 2), B=range(1, 4))
    swarm.tell("A", Asked(1, PeerId("B"), Envelope(LeaseRequest(RUN, 3))))
    assert swarm.effects[PeerId("A")] == [Reply(1, Envelope(Refused("fragment")))]
    swarm.tell("A", Asked(2, PeerId("B"), Envelope(LeaseRequest(RUN, 1))))
    assert swarm.effects[PeerId("A")][-1] == Reply(2, Envelope(Done()))


def test_a_move_that_skips_a_phase_is_a_broken_invariant() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2))
    with pytest.raises(AssertionError, match="cannot go from IDLE to DRAINING"):
        swarm["A"]._enter(MovePhase.DRAINING)


def test_a_lease_request_of_a_peer_that_does_not_hold_the_fragment_stops_no_move() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(1, 3))
    swarm.begin("A", range(1, 3))
    swarm.tell("A", Asked(1, PeerId("stranger"), Envelope(LeaseRequest(RUN, 0))))
    assert swarm.effects[PeerId("A")][-1] == Reply(1, Envelope(Refused("span")))
    assert swarm["A"].phase is MovePhase.FETCHING
    assert swarm.said("A") == []


def test_one_holder_cannot_keep_another_from_moving_for_ever() -> None:
    swarm = Swarm(A=range(0, 2), B=range(0, 2))
    bound_s = 0
    for _ in range(1000):
        swarm.tell("A", Asked(1, PeerId("B"), Envelope(LeaseRequest(RUN, 0))))
        bound_s += swarm["A"].granted.bind(0, {PeerId("B")}, swarm.now)
        swarm.now += 1.0
    assert 0 < bound_s <= 0.55 * 1000
    assert len(swarm["A"].granted.rests) <= 1


def exchange() -> Swarm:
    """A plan lets A and B, single holders, exchange their layers; A has fetched its new layers."""
    swarm = Swarm(A=range(0, 2), B=range(2, 4))
    swarm.plan = {PeerId("A"): range(2, 4), PeerId("B"): range(0, 2)}
    swarm.follow_plan("A")
    swarm.deliver_all()
    return swarm


def promised_exchange() -> Swarm:
    """The same, and B has a lease from A, by which it gives up its layers."""
    swarm = exchange()
    swarm.wake("A", MOVE_RETRY_S)
    swarm.deliver_all()
    swarm.follow_plan("B")
    swarm.deliver_all()
    return swarm


def test_single_holders_exchange_layers_once_both_have_fetched_what_they_get() -> None:
    swarm = exchange()
    for _ in range(3):
        swarm.wake("A", MOVE_RETRY_S)
        swarm.deliver_all()
    assert swarm["A"].phase is MovePhase.LEASING
    swarm.follow_plan("B")
    swarm.deliver_all()
    assert swarm["B"].drains
    swarm.wake("A", MOVE_RETRY_S)
    swarm.deliver_all()
    assert not swarm["A"].drains  # its executions need B's layers
    swarm.arrive("B")
    swarm.wake("A", MOVE_RETRY_S)
    swarm.deliver_all()
    swarm.arrive("A")
    assert (swarm["A"].held, swarm["B"].held) == (range(2, 4), range(0, 2))


def test_a_peer_whose_promise_lets_another_give_up_layers_goes_on_with_its_move() -> None:
    """A new plan, or leases that A does not get, would leave B's layers without a holder."""
    swarm = promised_exchange()
    assert swarm["B"].drains
    assert swarm["A"].abandon_unless_to(range(2), swarm.now) == []
    swarm.wake("A", LEASE_WAIT_S)
    swarm.deliver_all()
    assert swarm["A"].phase is MovePhase.LEASING


def test_a_peer_whose_promise_lets_another_give_up_layers_moves_even_if_its_executions_do_not_end() -> None:
    swarm = promised_exchange()
    swarm.arrive("B")
    swarm.wake("A", MOVE_RETRY_S)
    swarm.deliver_all()
    assert swarm["A"].drains
    assert not swarm["A"].gives_up(swarm.now)
    swarm.wake("A", DRAIN_MOST_S)
    assert swarm["A"].gives_up(swarm.now)
    swarm.arrive("A")
    assert swarm["A"].held == range(2, 4)


def test_a_peer_moves_by_a_plan_even_if_its_executions_do_not_end() -> None:
    """Else it drained for 30 s again and again, and the peer that waited for it never moved."""
    swarm = Swarm(A=range(0, 2), B=range(0, 2), C=range(2, 4))
    swarm.plan = {PeerId("B"): range(1, 3)}
    swarm.follow_plan("B")
    swarm.deliver_all()
    swarm.wake("B", DRAIN_MOST_S - 1)
    assert not swarm["B"].gives_up(swarm.now)
    swarm.wake("B", 1.0)
    assert swarm["B"].gives_up(swarm.now)
    swarm.arrive("B")
    assert swarm.said("B") == [("done", "")]


def test_without_a_plan_single_holders_exchange_nothing() -> None:
    swarm = exchange()
    swarm.begin("B", range(0, 2))
    assert swarm.said("B") == [("failed", "needed")]


def test_a_layer_is_given_up_only_when_the_peer_that_gets_it_holds_it() -> None:
    """B gets layer 0 of A, and needs nothing of A for that."""
    swarm = Swarm(A=range(0, 2), B=range(2, 4), C=range(1, 3), D=range(2, 4))
    swarm.plan = {PeerId("A"): range(1, 3), PeerId("B"): range(0, 2)}
    swarm.follow_plan("A")
    swarm.deliver_all()
    swarm.follow_plan("B")
    swarm.deliver_all()
    assert swarm["B"].drains
    swarm.wake("A", MOVE_RETRY_S)
    swarm.deliver_all()
    assert swarm["A"].phase is MovePhase.LEASING
    swarm.arrive("B")
    swarm.wake("A", MOVE_RETRY_S)
    swarm.deliver_all()
    swarm.arrive("A")
    assert (swarm["A"].held, swarm["B"].held) == (range(1, 3), range(0, 2))


def test_a_peer_to_which_the_plan_gives_a_layer_and_that_does_not_come_is_not_waited_for_for_ever() -> None:
    swarm = exchange()
    swarm.wake("A", LEASE_WAIT_S)
    swarm.deliver_all()
    assert swarm.said("A") == [("failed", "needed")]
    assert swarm["A"].held == range(0, 2)
    assert LEASE_WAIT_S + DRAIN_MOST_S < LEASE_S


def test_a_peer_that_gets_a_layer_and_dies_leaves_the_old_span_serving() -> None:
    swarm = exchange()
    swarm.follow_plan("B")
    swarm.deliver_all()
    swarm.spans[PeerId("A")] = range(0)
    swarm.tell("B", Drained())
    assert swarm.said("B") == [("failed", "needed")]
    assert swarm["B"].held == range(2, 4)

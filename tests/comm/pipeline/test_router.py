"""Routes in virtual time: whatever is lost, late, killed or asked twice, no layer counts a micro-batch twice."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from decentral.comm.pipeline.admission import MOST_HELD
from decentral.comm.pipeline.commits import COMMIT_QUERY_S, IN_DOUBT_S, LEAST_IN_DOUBT_S, LOST_S
from decentral.comm.pipeline.execution import ExecutionState, Sent
from decentral.comm.pipeline.ledger import GradientLedger
from decentral.comm.pipeline.next_peer import HOP_DEADLINE_FLOOR_S, LOOK_FLOOR_S, RoutingWeights
from decentral.comm.pipeline.router import Router
from decentral.comm.pipeline.tags import ForwardStatusTag, ForwardTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    BackwardResponse,
    CommitDecision,
    CommitQuery,
    Done,
    ExecutionId,
    ForwardRequest,
    ForwardStatusQuery,
    Hop,
    Load,
    Offer,
    Refused,
)
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.journal.micro_batch_counts import CountAudit
from decentral.core.reasons import Reason
from decentral.scheduler.throughput import routing
from tests.comm.pipeline.route_world import RUN, TOKENS, Device, Peer, World, cuts_of, is_decision, layout
from tests.journal_lines import audited

CUTS = cuts_of([100, 100, 100, 100])


def two_pipelines(delay_s: float = 0.01) -> World:
    """A and B start; C and D end; M and N lie in the middle, across."""
    world = World(CUTS, delay_s)
    for name, first, last in (("A", 0, 2), ("B", 0, 2), ("C", 2, 4), ("D", 2, 4), ("M", 1, 3), ("N", 1, 3)):
        world.add(name, first, last)
    return world


def two_ends(overlap: bool = True) -> World:
    """A starts; C and D hold the same last layers."""
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("C", 2, 4), ("D", 2, 4)):
        world.add(name, first, last, overlap=overlap)
    return world


def result(world: World) -> CountAudit:
    return audited(world.lines(), len(CUTS))


def counted(peer: Peer) -> int:
    """How many executions the peer's steps have taken, by its journal."""
    return sum(len(line["of"]) for line in peer.lines if line["event"] == "counted")


def finish(world: World) -> None:
    """No new micro-batches begin, those under way end, and all decisions are told."""
    for peer in world.peers.values():
        peer.routes.own.quota = 0
    world.run(200.0)


def test_every_layer_counts_every_micro_batch_once() -> None:
    world = two_pipelines()
    world.start()
    world.run(30.0)
    completed = sum(peer.routes.completed for peer in world.peers.values())
    finish(world)
    found = result(world)
    assert found.sound
    assert found.in_part == 0
    assert found.everywhere >= completed > 300
    assert found.dropped == 0


def test_the_journal_says_what_the_devices_took() -> None:
    world = two_pipelines()
    world.start()
    world.run(5.0)
    finish(world)
    for peer in world.peers.values():
        executions = [one for line in peer.lines if line["event"] == "counted" for one in line["of"]]
        taken: list[tuple[int, ...]] = peer.device.taken  # type: ignore[attr-defined]
        assert sum(map(len, taken)) == len(executions)


def test_origin_peers_that_hand_on_to_each_other_do_not_wait_for_each_other() -> None:
    """Exact gradients: A's micro-batches go on at B, and B's at A, while both have gradients that wait for a step."""
    world = World(CUTS)
    for name, first, last in (("A", 0, 3), ("B", 0, 3), ("C", 3, 4)):
        peer = world.add(name, first, last, overlap=False)
        peer.routes.load.view.weights = RoutingWeights(ends={0: {2: 1.0}, 2: {3: 1.0}})
    world.start()
    completed = [0]
    for _ in range(20):
        world.run(1.0)
        completed.append(sum(peer.routes.completed for peer in world.peers.values()))
    assert min(after - before for before, after in pairwise(completed)) > 0
    finish(world)
    assert result(world).sound
    assert result(world).in_part == 0


@pytest.mark.parametrize("victim", ["B", "C", "M"])
def test_a_peer_that_is_killed_costs_no_micro_batch_twice_and_the_others_go_on(victim: str) -> None:
    world = two_pipelines()
    world.start()
    world.run(10.0)
    world.kill(victim)
    origin = world.peers[PeerId("A")].routes
    before = origin.completed
    world.run(10.0)
    assert origin.completed > before + 50
    finish(world)
    assert result(world).sound


def test_what_a_frozen_peer_has_goes_to_others_as_soon_as_the_roster_has_dropped_it() -> None:
    world = two_ends()
    world.start()
    world.run(10.0)
    origin, known_after_s = world.peers[PeerId("A")].routes, LOOK_FLOOR_S  # it has just been asked whether it computes

    def at_the_frozen_one() -> int:
        sent = (execution.next_hop for execution in origin.executions.values())
        return sum(hop is not None and hop.to == "C" for hop in sent)

    world.freeze("C", known_after_s)
    world.run(known_after_s - 0.1)
    assert at_the_frozen_one() > 0
    world.run(0.2)
    assert at_the_frozen_one() == 0
    before = origin.completed
    world.run(5.0)
    assert origin.completed > before + 25
    finish(world)
    assert result(world).sound


def with_a_silent_end(overlap: bool = True) -> World:
    """One of two ends, C, answers no more, and nobody knows it."""
    world = two_ends(overlap)
    world.start()
    world.run(10.0)
    world.freeze("C", known_after_s=1000.0)
    return world


def test_a_silent_peer_is_found_out_after_two_seconds_and_then_has_nothing_for_more_than_two() -> None:
    """Steps wait for it. It was asked after 2 s whether it still computed, and had 2 s more to say so."""
    world, found_out_s = with_a_silent_end(), 2 * LOOK_FLOOR_S + 0.2
    origin = world.peers[PeerId("A")].routes
    world.run(found_out_s)
    assert PeerId("C") in origin.forwarding.scheduler.suspended
    world.run(found_out_s)
    assert not any(hop.to == "C" for one in origin.executions.values() if (hop := one.next_hop) is not None)
    finish(world)


def at(world: World, peer: str) -> list[float]:
    """When the micro-batches of A that this peer has were sent to it."""
    origin = world.peers[PeerId("A")].routes
    hops = (one.next_hop for one in origin.executions.values())
    return [hop.place.at for hop in hops if hop is not None and isinstance(hop.place, Sent) and hop.place.to == peer]


def test_where_gradients_are_exact_all_that_a_silent_peer_has_goes_to_others_with_one_question() -> None:
    """Steps wait for it. It was asked for each micro-batch in turn, 1 s after that was sent, and had 1 s to answer."""
    world = with_a_silent_end(overlap=False)
    world.run(LOOK_FLOOR_S + 0.2)
    sent = at(world, "C")
    assert sent
    world.run(LOOK_FLOOR_S - 0.3)
    assert at(world, "C") == sent, "while it owes an answer it gets nothing"
    world.run(0.4)
    assert not at(world, "C")
    assert PeerId("C") in world.peers[PeerId("A")].routes.forwarding.scheduler.suspended
    finish(world)
    assert result(world).sound


def test_who_has_answered_since_is_not_silent_for_one_answer_that_was_lost() -> None:
    world = with_a_silent_end(overlap=False)
    world.run(0.3)
    lifecycle, there = world.peers[PeerId("A")].routes.lifecycle, at(world, "C")
    assert there
    lifecycle.answered(heard("C"), world.now)
    lifecycle.answered(unanswered("C", 0.5), world.now + 0.1)
    assert at(world, "C") == there
    lifecycle.answered(unanswered("C", 0.5), world.now + 0.6)
    assert not at(world, "C")


def heard(peer: str) -> Answered:
    """An answer that is for no execution that is here."""
    return Answered(ForwardTag(0, 0), PeerId(peer), Envelope(Done()), 0.1, 0.1, 0, 0)


def unanswered(peer: str, seconds: float) -> AskFailed:
    return AskFailed(ForwardStatusTag(0, 0), PeerId(peer), Reason.DEADLINE, seconds)


def test_a_peer_that_takes_longer_than_usual_is_asked_and_keeps_its_turns_until_its_deadline() -> None:
    world, asked_after, slow = World(CUTS), Counter[str](), PeerId("C")
    for name, first, last in (("A", 0, 2), ("C", 2, 4)):
        world.add(name, first, last)
    world.start()
    world.run(10.0)

    def seen(now: float, ask: Ask) -> bool:
        asked_after[ask.to] += isinstance(ask.envelope.message, ForwardStatusQuery)
        return False

    scheduler, world.loses = world.peers[PeerId("A")].routes.forwarding.scheduler, seen
    expected_s, world.peers[slow].seconds = scheduler.seconds[slow], 4 * HOP_DEADLINE_FLOOR_S
    world.run(HOP_DEADLINE_FLOOR_S - 0.1)
    assert asked_after[slow] > 0
    assert scheduler.seconds[slow] == pytest.approx(expected_s, rel=0.2)
    world.run(HOP_DEADLINE_FLOOR_S)
    assert scheduler.seconds[slow] > 1.9 * expected_s, "now it is late"


def test_a_silent_peer_gets_no_more_time_for_its_next_micro_batch_than_one_that_answers() -> None:
    world = with_a_silent_end()
    world.run(30.0)
    origin = world.peers[PeerId("A")].routes
    at_c = [one.next_hop for one in origin.executions.values() if one.next_hop is not None and one.next_hop.to == "C"]
    assert all(hop.place.due <= world.now + HOP_DEADLINE_FLOOR_S or hop.place.due == float("inf") for hop in at_c)
    before = origin.completed
    world.run(30.0)
    assert origin.completed > before + 100
    finish(world)
    assert result(world).sound


def test_a_silent_peer_gets_no_micro_batch_before_it_says_that_it_is_there() -> None:
    """In a swarm whose steps wait for all that is under way, each micro-batch that it got stopped everybody for 6 s."""
    world = with_a_silent_end()
    world.run(10.0)
    origin, at_c = world.peers[PeerId("A")].routes, set[int]()
    for _ in range(500):
        world.run(0.1)
        at_c |= {
            local_id
            for local_id, one in origin.executions.items()
            if one.next_hop is not None and one.next_hop.to == "C"
        }
    assert not at_c
    assert origin.forwarding.scheduler.suspended[PeerId("C")].seconds > 30.0, (
        "it was asked whether it is there, ever more rarely"
    )
    finish(world)


@pytest.mark.parametrize("whole", [1, 5])  # few holders are asked at once, of many some are first asked for offers
def test_peers_that_train_alone_are_asked_where_nobody_else_can_be(whole: int) -> None:
    world, asked = World(CUTS), Counter[str]()
    world.add("A", 0, 2)
    world.add("C", 2, 4)
    for number in range(whole):
        world.add(f"W{number}", 0, 4)

    def seen(now: float, ask: Ask) -> bool:
        asked[ask.to[0]] += isinstance(ask.envelope.message, ForwardRequest | Offer)
        return False

    world.loses = seen
    origin = world.peers[PeerId("A")].routes
    speeds = {(0, 2): 1.0, (2, 4): 1.0, (0, 4): float(whole)}
    origin.load.view.weights = routing.solve(CUTS, speeds, (0, 2), whole_alone=True)
    world.start()
    world.run(10.0)
    assert asked["C"] > 50
    assert asked["W"] == 0
    world.kill("C")
    before = origin.completed
    world.run(10.0)
    assert origin.completed > before + 50
    finish(world)
    assert result(world).sound


class Hoarder:
    """Offers to take every micro-batch at once, says that it is at work when it is asked, and never answers; or, if it
    is `late`, answers just before it is too late."""

    def __init__(self, routes: Router, late: bool) -> None:
        self.stage, self.taken, self.late = routes.stage, 0, late
        self.executions, self.waiting = dict[int, Any](), list[tuple[float, Reply]]()

    def start(self) -> None: ...

    @property
    def wake_at(self) -> float | None:
        return min((at for at, _ in self.waiting), default=None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Asked(request, _, Envelope(Offer() as offer)):
                return [Reply(request, Envelope(Load(offer.run, 0.0, 0.0, self.stage.last)))]
            case Asked(request, _, Envelope(ForwardStatusQuery() | CommitDecision())):
                return [Reply(request, Envelope(Done()))]
            case Asked(request, _, Envelope(ForwardRequest() as asked)):
                self.taken += 1
                hop = Hop(self.stage.peer, asked.first, self.stage.last)
                answer = Envelope(BackwardResponse(RUN, 1.0, TOKENS, (hop,), layout(0, 1)[:1]), bytes(16))
                self.waiting += [(now + asked.patience_s - 0.1, Reply(request, answer))] if self.late else []
        due = [reply for at, reply in self.waiting if at <= now]
        self.waiting = [(at, reply) for at, reply in self.waiting if at > now]
        return [*due]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("honest", [2, 5])  # few holders are asked at once, of many some are first asked for offers
def test_who_takes_micro_batches_and_does_not_answer_in_time_gets_ever_fewer_of_them(honest: int, late: bool) -> None:
    world = World(CUTS)
    for name in "AB":
        world.add(name, 0, 2, seconds=1.0)
    for number in range(honest):
        world.add(f"H{number}", 2, 4, seconds=1.0)
    liar = world.add("L", 2, 4)
    hoarder = Hoarder(liar.routes, late)
    liar.routes = hoarder  # type: ignore[assignment]
    origins = [world.peers[PeerId(name)].routes for name in "AB"]
    for origin in origins:
        origin.load.view.usual_speed = TOKENS / 1.0
    world.start()
    world.run(200.0)
    first, completed = hoarder.taken, sum(origin.completed for origin in origins)
    assert first < 0.06 * completed
    world.run(200.0)
    assert hoarder.taken - first < 0.04 * completed
    assert sum(origin.completed for origin in origins) > 1.9 * completed


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_or_killed_nothing_counts_twice(seed: int) -> None:
    rng = Random(seed)
    world = two_pipelines(delay_s=rng.choice([0.001, 0.05, 0.3]))
    world.loses = lambda now, ask: rng.random() < 0.03
    world.start()
    for victim in rng.sample("BCM", 2):
        world.run(rng.uniform(1.0, 8.0))
        world.kill(victim)
    world.run(20.0)
    finish(world)
    found = result(world)
    assert found.sound
    assert found.everywhere > 0
    for peer in world.peers.values():
        assert not peer.routes.executions
        assert not peer.device.held  # type: ignore[attr-defined]


def lost(ask: Ask) -> bool:
    """Whether this is about an origin peer's decision on held gradients, by itself or when it is asked."""
    return isinstance(ask.envelope.message, CommitDecision | CommitQuery)


def test_a_commit_decision_that_is_lost_is_asked_for() -> None:
    world = World(CUTS)
    world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.loses = lambda now, ask: is_decision(ask)
    world.start()
    world.run(60.0)
    finish(world)
    found = result(world)
    assert found.sound
    assert found.in_part == found.dropped == 0
    assert found.everywhere > 100


def test_without_a_word_of_its_origin_peer_a_layer_stays_uncounted_and_nothing_stops() -> None:
    world = World(CUTS)
    world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.loses = lambda now, ask: lost(ask) and now < 2.0
    world.start()
    world.run(120.0)
    finish(world)
    found = result(world)
    assert found.sound
    assert found.in_part > 0
    assert found.everywhere > 100


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_an_origin_peer_that_was_killed_hold_up_the_others_until_it_has_not_answered_for_them(
    overlap: bool,
) -> None:
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("B", 0, 2), ("C", 2, 4), ("D", 2, 4)):
        world.add(name, first, last, seconds=2.0, overlap=overlap)  # slow, so that executions are held for long
    world.start()
    world.run(20.0)
    world.kill("B")
    killed_at = world.now
    origin = world.peers[PeerId("A")]
    before, steps = counted(origin), []
    while world.now < killed_at + 20.0:
        world.run(0.1)
        if counted(origin) > before:
            before = counted(origin)
            steps.append(world.now)
    gaps = [late - early for early, late in pairwise([killed_at, *steps, world.now])]
    assert max(gaps) < IN_DOUBT_S + COMMIT_QUERY_S + 1.0
    finish(world)
    assert result(world).sound


def test_an_origin_peer_that_falls_silent_holds_up_the_steps_of_a_hop_for_less_than_three_seconds() -> None:
    """Exact gradients: C takes no step while B's micro-batches in its sum are not decided, but computes for A."""
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("B", 0, 2), ("C", 2, 4)):
        world.add(name, first, last, seconds=0.1, overlap=False)
    hop = world.peers[PeerId("C")]
    world.start()
    world.run(10.0)
    while (ExecutionState.IN_DOUBT, "B") not in {(one.state, one.id.origin) for one in hop.routes.executions.values()}:
        world.run(0.01)
    world.freeze("B", known_after_s=1000.0)
    peers = [world.peers[PeerId(name)] for name in "AC"]
    before, steps = [counted(peer) for peer in peers], [[world.now], [world.now]]
    while world.now < steps[0][0] + 10.0:
        world.run(0.1)
        for at, peer in enumerate(peers):
            if counted(peer) > before[at]:
                before[at] = counted(peer)
                steps[at].append(world.now)
    origin_s, hop_s = (max(late - early for early, late in pairwise(one)) for one in steps)
    assert origin_s < hop_s
    assert LEAST_IN_DOUBT_S < hop_s < LEAST_IN_DOUBT_S + LOST_S + 0.5
    finish(world)
    assert result(world).sound


def test_a_restarted_origin_peer_does_not_know_its_old_routes_and_says_so() -> None:
    world = World(CUTS)
    origin = world.add("A", 0, 2)
    world.start()
    executions = (ExecutionId("A", 7, 2), ExecutionId("B", 8, 2))
    effects = origin.routes.handle(Asked(1, PeerId("C"), Envelope(CommitQuery(RUN, executions))), 1.0)
    assert [one for one in effects if isinstance(one, Reply)] == [
        Reply(1, Envelope(CommitDecision(RUN, (), executions[:1])))
    ]


def test_a_hop_that_the_route_left_aside_is_told_so_when_it_asks() -> None:
    world = World(CUTS)
    origin = world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.start()
    world.run(5.0)
    execution = ExecutionId("A", 7, 2)
    origin.routes.commits.commit(ExecutionId("A", 7, 0), [Hop("C", 2, 4)], 8)
    for asker, answer in (("C", CommitDecision(RUN, (execution,), ())), ("D", CommitDecision(RUN, (), (execution,)))):
        effects = origin.routes.handle(Asked(9, PeerId(asker), Envelope(CommitQuery(RUN, (execution,)))), world.now)
        assert Reply(9, Envelope(answer)) in effects


def test_an_execution_that_is_asked_for_again_is_computed_once_and_its_gradient_sent_again() -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4)
    world.start()
    request = ForwardRequest(RUN, "S", 7, 2, 1, 5.0, 20.0, layout(2, 1))
    seen: list[Reply] = []
    keep = world._perform

    def watched(peer: object, effect: object) -> None:
        if isinstance(effect, Reply):
            seen.append(effect)
        keep(peer, effect)  # type: ignore[arg-type]

    world._perform = watched  # type: ignore[method-assign]
    for number, asker in ((1, "M"), (2, "S")):
        world._handle(last, Asked(number, PeerId(asker), Envelope(request, bytes(20))))
        world.run(0.2)  # before it asks S, which is not there, for its decision
    assert [reply.request for reply in seen] == [1, 2]
    assert seen[0].envelope == seen[1].envelope
    assert isinstance(seen[0].envelope.message, BackwardResponse)
    assert seen[0].envelope.message.hops == (Hop("C", 2, 4),)
    assert last.device.executions == [] or len(last.device.executions) == 1  # type: ignore[attr-defined]
    decision = CommitDecision(RUN, (ExecutionId("S", 7, 2),), ())
    world._handle(last, Asked(3, PeerId("X"), Envelope(decision)))  # not its origin peer
    world.run(0.2)
    assert not [line for line in last.lines if line["event"] == "counted"]
    world._handle(last, Asked(4, PeerId("S"), Envelope(decision)))
    world._handle(last, Asked(5, PeerId("S"), Envelope(decision)))
    world.run(0.2)
    assert [line["of"] for line in last.lines if line["event"] == "counted"] == [(("S", 7, 2, 4, 8),)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": 0}, "span"),
        ({"first": 1}, "span"),
        ({"first": 4}, "span"),
        ({"origin": "C"}, "span"),
        ({"sequences": 65}, "span"),
        ({"layout": layout(2, 1)[:1]}, "shape"),
        ({"patience_s": 0.0}, "late"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_word(change: dict[str, object], reason: str) -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4)
    world.start()
    fields = {"run": RUN, "origin": "S", "number": 7, "first": 2, "sequences": 1, "patience_s": 5.0, "hold_s": 20.0}
    request = ForwardRequest(**{**fields, "layout": layout(2, 1), **change})  # type: ignore[arg-type]
    effects = last.routes.handle(Asked(1, PeerId("M"), Envelope(request, bytes(20))), 1.0)
    assert effects == [Reply(1, Envelope(Refused(reason)))]


def test_more_executions_than_the_memory_takes_are_refused() -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4, capacity=3)
    world.start()
    replies = []
    for number in range(5):
        request = ForwardRequest(RUN, "S", number, 2, 1, 5.0, 20.0, layout(2, 1))
        effects = last.routes.handle(Asked(number, PeerId("M"), Envelope(request, bytes(20))), 1.0)
        replies += [effect for effect in effects if isinstance(effect, Reply)]
    assert replies == [Reply(3, Envelope(Refused("busy"))), Reply(4, Envelope(Refused("busy")))]


def test_executions_through_a_part_of_the_span_take_as_much_less_memory() -> None:
    world = World(CUTS)
    last = world.add("C", 1, 4, capacity=2, activations=(1, 6, 2, 2))
    world.start()

    def refused(number: int, first: int) -> bool:
        request = ForwardRequest(RUN, "S", number, first, 1, 5.0, 20.0, layout(first, 1))
        effects = last.routes.handle(Asked(number, PeerId("M"), Envelope(request, bytes(20))), 1.0)
        return Reply(number, Envelope(Refused("busy"))) in effects

    assert [refused(number, 2) for number in range(4)] == [False] * 4  # 4 times 4/10 of the span
    assert refused(4, 1)
    assert not refused(5, 2)


def test_executions_that_are_only_held_leave_their_memory_to_others_up_to_a_limit() -> None:
    world = World(CUTS)
    last = world.add("C", 2, 4, capacity=2)
    world.start()

    def ask(number: int) -> list[object]:
        request = ForwardRequest(RUN, "S", number, 2, 1, 5.0, 50.0, layout(2, 1))
        seen = last.routes.handle(Asked(number, PeerId("M"), Envelope(request, bytes(20))), world.now)
        for effect in seen:
            world._perform(last, effect)
        world.run(0.1)  # forward, backward, answered: now it is held until its origin peer has committed it
        return [effect for effect in seen if isinstance(effect, Reply)]

    assert [ask(number) for number in range(MOST_HELD * 2)] == [[]] * (MOST_HELD * 2)
    assert ask(99) == [Reply(99, Envelope(Refused("busy")))]


@pytest.mark.parametrize(
    ("number", "stages"), [(7, [ExecutionState.IN_DOUBT]), (8, [ExecutionState.IN_DOUBT, ExecutionState.IN_DOUBT])]
)
def test_what_is_held_of_a_micro_batch_does_not_keep_it_waiting_when_it_comes_by_another_route(
    number: int, stages: list[ExecutionState]
) -> None:
    """Else its sum would wait for the origin peer, that peer for this execution, and this for a step with the sum."""
    world = World(CUTS)
    last = world.add("C", 0, 4, overlap=False)
    world.start()

    def ask(number: int, first: int) -> None:
        request = ForwardRequest(RUN, "S", number, first, 1, 5.0, 50.0, layout(first, 1))
        for effect in last.routes.handle(Asked(first, PeerId("M"), Envelope(request, bytes(20))), world.now):
            world._perform(last, effect)
        world.run(0.5)

    ask(7, 2)  # held: its origin peer has not committed it
    ask(number, 1)
    assert [execution.state for execution in last.routes.executions.values()] == stages


def test_a_backward_pass_goes_before_forward_passes() -> None:
    world = World(CUTS)
    middle = world.add("M", 1, 3)
    world.add("C", 2, 4)
    world.start()

    def asked(number: int) -> list[Effect]:
        request = ForwardRequest(RUN, "S", number, 1, 1, 5.0, 20.0, layout(1, 1))
        return middle.routes.handle(Asked(number, PeerId("A"), Envelope(request, bytes(20))), 1.0)

    assert [type(effect) for effect in asked(1)] == [jobs.Forward]
    (ask,) = (
        e for e in middle.routes.handle(middle.device.do(jobs.Forward(1, 1, 3, 1, (), b"")), 1.1) if isinstance(e, Ask)
    )
    assert [type(effect) for number in (2, 3, 4) for effect in asked(number)] == [jobs.Forward, jobs.Forward]
    returned = Envelope(BackwardResponse(RUN, 1.0, 8, (Hop("C", 3, 4),), layout(3, 1)[:1]), bytes(16))
    assert middle.routes.handle(Answered(ask.tag, ask.to, returned, 0.1, 0.1, 0, 0), 1.2) == []
    done = middle.device.do(jobs.Forward(2, 1, 3, 1, (), b""))
    effects = middle.routes.handle(done, 1.3)
    assert [type(effect) for effect in effects if not isinstance(effect, Ask)] == [jobs.Backward]


def test_own_micro_batches_do_not_leave_before_a_layer_that_only_their_origin_peer_holds() -> None:
    """No route returns to its origin peer. The flow of all peers lets A's micro-batches leave at layer 1, too: they
    waited at B for another holder of layer 2, and A, with memory for four, stood still."""
    world = World(CUTS)
    origin = world.add("A", 0, 3)
    world.add("B", 1, 2)
    world.add("C", 3, 4)
    origin.routes.forwarding.view.weights = RoutingWeights(ends={0: {1: 1.0, 3: 1.0}})
    assert {origin.routes.forwarding.choose_end(0) for _ in range(4)} == {3}
    assert origin.routes.forwarding.choose_end(1) == 3
    world.add("D", 2, 3)
    assert {origin.routes.forwarding.choose_end(0) for _ in range(4)} == {1, 3}


@pytest.mark.parametrize(("overlap", "asked"), [(False, []), (True, ["D"])])
def test_where_steps_wait_a_refused_micro_batch_waits_for_peers_with_weight(overlap: bool, asked: list[str]) -> None:
    """The flow leaves D out, which is slow. C's memory was often full: steps of A waited for what D got instead."""
    world = World(CUTS)
    routes, device = world.add("A", 0, 2, overlap=overlap).routes, world.peers[PeerId("A")].device
    world.add("C", 2, 4)
    world.add("D", 1, 4)
    routes.forwarding.view.weights = RoutingWeights(nexts={2: {(2, 4): 1.0}}, spans=[(2, 4), (1, 4)])
    world.start()
    execution = next(iter(routes.executions.values()))
    (ask,) = (e for e in routes.handle(device.do(jobs.Draw(execution.local_id, 2)), 0.1) if isinstance(e, Ask))
    assert ask.to == "C"
    effects = routes.handle(Answered(ask.tag, ask.to, Envelope(Refused("busy")), 0.1, 0.1, 0, 0), 0.2)
    assert [effect.to for effect in effects if isinstance(effect, Ask)] == asked


@pytest.mark.parametrize(
    "hops",
    [
        (),
        (Hop("C", 2, 3),),
        (Hop("C", 3, 4),),
        (Hop("D", 2, 4),),
        (Hop("C", 2, 3), Hop("D", 2, 4)),
        (Hop("C", 2, 2), Hop("D", 2, 4)),
    ],
)
def test_a_route_with_a_gap_is_no_answer(hops: tuple[Hop, ...]) -> None:
    world = World(CUTS)
    origin = world.add("A", 0, 2)
    world.add("C", 2, 4)
    world.start()
    routes = origin.routes
    execution = next(iter(routes.executions.values()))
    (ask,) = (e for e in routes.handle(origin.device.do(jobs.Draw(execution.local_id, 2)), 0.1) if isinstance(e, Ask))
    returned = Envelope(BackwardResponse(RUN, 1.0, 8, hops, layout(2, 1)[:1]), bytes(16))
    effects = routes.handle(Answered(ask.tag, ask.to, returned, 0.1, 0.1, 0, 0), 0.2)
    assert not [effect for effect in effects if isinstance(effect, jobs.Backward)]
    tags = [effect.tag for effect in effects if isinstance(effect, Ask)]
    assert [tag.local_id for tag in tags if isinstance(tag, ForwardTag)] == [execution.local_id]


def test_without_overlap_no_weights_change_between_a_forward_and_its_backward_pass() -> None:
    world = World(CUTS)
    peers = [world.add(name, *span, overlap=False) for name, span in (("A", (0, 2)), ("C", (2, 4)), ("M", (1, 3)))]
    versions: dict[tuple[str, int], int] = {}
    backward_passes = 0
    for peer in peers:
        keep = peer.device.do

        def watched(job: object, keep: object = keep, name: str = peer.name, device: object = peer.device) -> object:
            nonlocal backward_passes
            taken = len(device.taken)  # type: ignore[attr-defined]
            if isinstance(job, jobs.Draw | jobs.Forward):
                versions[name, job.local_id] = taken
            if isinstance(job, jobs.Backward):
                backward_passes += 1
                assert versions[name, job.local_id] == taken
            return keep(job)  # type: ignore[operator]

        peer.device.do = watched  # type: ignore[method-assign]
    world.start()
    world.run(20.0)
    assert backward_passes > 50
    assert result(world).sound


def test_without_overlap_lost_questions_do_not_stop_it_for_good() -> None:
    rng = Random(5)
    world = World(CUTS)
    for name, span in (("A", (0, 2)), ("B", (0, 2)), ("C", (2, 4)), ("D", (2, 4)), ("M", (1, 3))):
        world.add(name, *span, overlap=False)
    world.loses = lambda now, ask: now < 20.0 and rng.random() < 0.05
    world.start()
    world.run(100.0)
    before = sum(peer.routes.completed for peer in world.peers.values())
    world.run(20.0)
    assert sum(peer.routes.completed for peer in world.peers.values()) > before + 50
    assert result(world).sound


def test_an_execution_that_is_only_late_is_asked_after_and_not_sent_twice() -> None:
    world = World(CUTS)
    for name, first, last in (("A", 0, 2), ("C", 2, 4), ("D", 2, 4)):
        world.add(name, first, last, seconds=1.0)
    sent: list[ExecutionId] = []
    asked_after: list[Ask] = []

    def seen(now: float, ask: Ask) -> bool:
        match ask.envelope.message:
            case ForwardRequest() as request:
                sent.append(ExecutionId(request.origin, request.number, request.first))
            case ForwardStatusQuery():
                asked_after.append(ask)
        return False

    world.loses = seen
    world.start()
    world.run(60.0)
    world.peers[PeerId("C")].seconds = world.peers[PeerId("D")].seconds = 4.0  # both later than any deadline
    world.run(60.0)
    assert asked_after
    assert len(sent) == len(set(sent))
    finish(world)
    assert result(world).sound


def test_a_peer_that_does_not_know_an_execution_any_more_says_so_and_another_gets_it() -> None:
    world = two_ends()
    world.start()
    world.run(5.0)
    origin, restarted = world.peers[PeerId("A")].routes, world.peers[PeerId("C")]
    assert restarted.routes.executions
    old = restarted.routes
    restarted.routes, restarted.device = Router(old.stage, old.forwarding.view, GradientLedger(1)), Device(end=4)
    restarted.routes.start()
    world.forget_what_was_for("C")
    before = origin.completed
    world.run(HOP_DEADLINE_FLOOR_S + 20.0)
    assert origin.completed > before + 50
    finish(world)
    assert result(world).sound


def test_a_question_that_took_so_long_that_its_execution_is_counted_is_refused() -> None:
    world = World(CUTS)
    end = world.add("C", 2, 4)
    world.start()
    question = Asked(1, PeerId("M"), Envelope(ForwardRequest(RUN, "S", 1, 2, 1, 5.0, 20.0, layout(2, 1)), bytes(20)))
    end.routes.handle(question, 1.0)
    world.run(2.0)
    end.routes.handle(jobs.BackwardDone(1, 8, 1.0, layout(2, 1)[:1], bytes(16)), 2.0)
    end.routes.handle(Asked(2, PeerId("S"), Envelope(CommitDecision(RUN, (ExecutionId("S", 1, 2),), ()))), 3.0)
    (reply,) = end.routes.handle(replace(question, request=3), 4.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.message == Refused("counted")


def test_an_origin_peer_keeps_memory_for_executions_that_enter_behind_its_first_layer_and_for_its_own() -> None:
    world = World(CUTS)
    origin = world.add("A", 0, 3, capacity=16).routes
    origin.start()
    origin.own.quota = 0
    for _ in range(14):
        origin.own._new(3, 0.0)
    assert not origin.admission.has_memory(0)
    assert origin.admission.has_memory(1)
    for execution in list(origin.executions.values())[10:]:
        origin.executions.pop(execution.local_id)
    origin.in_flight.size = 16
    for number in range(2):
        request = ForwardRequest(RUN, "B", number, 1, 1, 5.0, 20.0, layout(1, 1))
        origin.handle(Asked(number, PeerId("B"), Envelope(request, bytes(20))), 0.0)
    assert origin.admission.has_memory(0)
    assert not origin.admission.has_memory(1)  # what is left is wanted for micro-batches that only it can begin
    origin.in_flight.size = 10
    assert origin.admission.has_memory(1)
    assert len(origin.executions) == 12


@pytest.mark.parametrize(("begins", "accepted", "begun"), [(15.0, 2, 1), (1.0, 14, 0)])
def test_an_origin_peer_leaves_to_others_the_part_of_its_memory_and_time_that_the_weights_give_them(
    begins: float, accepted: int, begun: int
) -> None:
    """Of two origin peers, the one that alone had a later layer, too, filled it with micro-batches of its own."""
    world = World(CUTS)
    world.add("C", 3, 4)
    origin = world.add("A", 0, 3, capacity=16).routes
    origin.load.view.weights = RoutingWeights(ends={0: {3: begins}, 1: {3: 16.0 - begins}})
    origin.in_flight.size, effects = 16, list[Effect]()
    origin.start()
    for number in range(24):
        request = ForwardRequest(RUN, f"B{number}", number, 1, 1, 5.0, 20.0, layout(1, 1))
        origin.handle(Asked(number, PeerId("B"), Envelope(request, bytes(20))), 0.0)
    assert sum(not one.own for one in origin.executions.values()) == accepted
    for execution in list(origin.executions.values())[2:]:
        origin.executions.pop(execution.local_id)
    for token in list(origin.executions):
        effects += origin.handle(jobs.ForwardDone(token, 1, 3, TOKENS, layout(3, 1), bytes(20)), 1.0)
    assert sum(isinstance(one, jobs.Draw) for one in effects) == begun


def test_who_begins_an_execution_in_another_s_name_chooses_nothing_of_it() -> None:
    """A peer named the next micro-batches of another to the holders of the next layers, with activations of its own:
    the origin peer got gradients for those, and its audits blamed the holders."""
    computed: list[bytes] = []

    class Noting(Device):
        def do(self, job: Any) -> Any:
            computed.extend([job.blob[:1]] if isinstance(job, jobs.Forward) else [])
            return super().do(job)

    world = World(cuts_of([100, 100, 100]))
    world.add("S", 0, 2)
    world.add("Z", 1, 2)
    last = world.add("C", 2, 3, device=Noting(end=3))
    last.routes.start()
    for number in range(1, 9):  # the names that this World's origin peers give
        request = ForwardRequest(RUN, "S", number, 2, 1, 60.0, 60.0, layout(2, 1))
        world._handle(last, Asked(10_000 + number, PeerId("Z"), Envelope(request, b"Z" * 20)))
    world.start()
    world.run(3.0)
    origin, of_holder = (
        {tuple(one[:2]) for line in peer.lines if line["event"] == "counted" for one in line["of"]}
        for peer in (world.peers[PeerId("S")], last)
    )
    assert len(origin & of_holder) > 8
    assert sum(blob != b"Z" for blob in computed) >= len(of_holder)  # none of Z's is counted


def test_naming_an_execution_takes_it_from_nobody() -> None:
    """A peer that cannot be before this one got the gradient, and the one that waited was told that it had moved."""
    world = World(CUTS)
    last = world.add("C", 2, 4)
    world.add("M", 0, 2)
    world.add("thief", 2, 4)
    world.add("other", 0, 1)
    last.routes.start()
    replies: list[Reply] = []
    keep = world._perform

    def watched(peer: object, effect: object) -> None:
        replies.extend([effect] if isinstance(effect, Reply) else [])
        keep(peer, effect)  # type: ignore[arg-type]

    world._perform = watched  # type: ignore[method-assign]
    request = ForwardRequest(RUN, "S", 7, 2, 1, 5.0, 20.0, layout(2, 1))
    world._handle(last, Asked(1, PeerId("M"), Envelope(request, bytes(20))))
    (execution,) = last.routes.table.by_id.values()
    until = execution.until
    for number, thief in ((2, "thief"), (3, "other")):
        theft = replace(request, hold_s=0.0, patience_s=3000.0)
        world._handle(last, Asked(number, PeerId(thief), Envelope(theft, bytes(20))))
        abort = CommitDecision(RUN, (), (ExecutionId("S", 7, 2),))
        world._handle(last, Asked(10 + number, PeerId(thief), Envelope(abort)))
    assert execution.until == until
    world.run(0.5)
    answers = {reply.request: type(reply.envelope.message) for reply in replies}
    assert answers[1] is BackwardResponse
    assert answers[2] is answers[3] is Refused

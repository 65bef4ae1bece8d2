"""Synchronous rounds: peers with unequal, overlapping spans train as one process does while peers come, go and die."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from decentral.comm.pipeline.next_peer import HOP_DEADLINE_FLOOR_S
from decentral.comm.rounds.collection import GONE_S
from decentral.comm.rounds.search import FollowTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import RoundQuery
from decentral.comm.wire.transport import Ask
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.journal.micro_batch_counts import CountAudit
from decentral.engine.compute import ComputeSetup
from decentral.sim.swarm import RUN
from tests.comm.net.virtual_transport import plugged
from tests.journal_lines import audited
from tests.peers.runtime.round_world import Make, Span, World, alone, equal, gradients

MakeSetup = Callable[..., ComputeSetup]
LAYERS = 5  # embedding, three blocks, head
UNEQUAL: list[Span] = [(0, 3), (1, 4), (2, 5)]
FIVE: list[Span] = [*UNEQUAL, (0, 2), (3, 5)]


@pytest.fixture
def make_of(setup_of: MakeSetup) -> Callable[[int], Make]:
    """`make_of(micro_batches)` makes a run with so many in a round, a clip that never binds, and fp32 between peers."""

    def of(micro_batches: int) -> Make:
        def make(peer: PeerId) -> ComputeSetup:
            setup = setup_of(peer, algorithm="synchronous")
            run = setup.config
            train: dict[str, object] = {"clip_norm": 1e9, "accumulate": micro_batches, "micro_batch": 2}
            train |= {"optimizer": "adamw", "learning_rate": 3e-3}  # AdamW, as its first moment shows the gradient
            changed = {
                "model": run.model.model_copy(update={"depth": 3}),
                "routes": config.RoutesConfig(wire="fp32"),
                "train": run.train.model_copy(update=train),
            }
            return replace(setup, config=run.model_copy(update=changed))

        return make

    return of


def run_rounds(world: World, rounds: int) -> float:
    """Runs so many more rounds, and returns the virtual seconds that they took."""
    began = world.agenda.now
    world.until_round(max(world.rounds(member.number).number for member in world.living) + rounds)
    return world.agenda.now - began


def until_all_are_members(world: World) -> None:
    """Who comes late may be let in some rounds later."""
    for _ in range(100):
        run_rounds(world, 1)
        rounds = [world.rounds(member.number).now_in for member in world.living]
        if all(one is not None and len(one.members) == len(rounds) for one in rounds):
            return
    raise AssertionError("some are in no round after a hundred rounds")


def all_equal(world: World) -> bool:
    """Whether all living peers with the same fragment hold the same bits of it. They must be in one round."""
    living = [member.number for member in world.living]
    assert len({world.rounds(number).number for number in living}) == 1
    pairs = [(world.weights(a), world.weights(b)) for a in living for b in living if a < b]
    return all(equal(one, other) for one, other in pairs if one.keys() & other.keys())


def audit_of(world: World) -> CountAudit:
    return audited(world.lines.values(), LAYERS)


@pytest.mark.parametrize("spans", [UNEQUAL, [None, (0, 3), (2, 5)], [None, None]])
def test_a_rounds_gradients_are_those_of_one_process(make_of: Callable[[int], Make], spans: list[Span]) -> None:
    make = make_of(12)
    world = World(make, spans, job_s=0.05)
    world.start_all(1.0)
    run_rounds(world, 3)  # by then all peers have measured the others
    number = world.rounds(0).number
    held = [live for compute in world.computes.values() for live in compute.span.inner.lives]
    weights = {live.fragment.index: live.theta.clone() for live in held}
    before = [live.state.exp_avg.clone() for live in held]
    run_rounds(world, 1)
    expected, loss = gradients(make(PeerId("alone")), weights, world.drawn()[number])
    assert len({peer for peer, executions in world.carried(number).items() if executions}) == len(spans), (
        "all have executed something"
    )
    for live, old in zip(held, before, strict=True):
        gradient = (live.state.exp_avg - 0.9 * old) / 0.1  # AdamW's first moment before and after
        exact = expected[live.fragment.index]
        assert (gradient - exact).norm() < 1e-5 * exact.norm()
    assert {abs(seen[number] - loss) < 1e-5 for seen in world.losses.values()} == {True}


def test_a_run_loses_what_one_process_loses_in_every_round(make_of: Callable[[int], Make]) -> None:
    make = make_of(2)
    world = World(make, UNEQUAL)
    world.start_all(0.1)
    world.until_round(106)
    drawn = world.drawn()
    rounds = sorted(drawn)
    losses = dict(zip(rounds, alone(make(PeerId("alone")), [drawn[number] for number in rounds]), strict=True))
    assert len(losses) > 100
    for seen in world.losses.values():
        assert max(abs(seen[number] - losses[number]) for number in seen if number in losses) < 1e-3
    assert losses[rounds[-1]] < losses[rounds[0]] - 3
    assert len(world.routes_taken()) > 2
    assert all_equal(world)
    assert (audit_of(world).in_part, audit_of(world).dropped) == (0, 0)


def test_every_holder_takes_part_and_each_round_has_as_many_micro_batches_as_it_should(
    make_of: Callable[[int], Make],
) -> None:
    world = World(make_of(5), FIVE, job_s=0.02)
    world.start_all(0.5)
    until_all_are_members(world)
    run_rounds(world, 5)  # a newcomer's first rounds have the others' micro-batches
    first = world.rounds(0).number
    run_rounds(world, 21)
    for number in range(first, first + 20):
        origins = [origin for origin, _ in world.drawn()[number]]
        assert len(origins) == 5
        assert {origins.count(world.members[peer].peer) for peer in (0, 3)} == {2, 3}, "they draw the odd one in turns"
    active = [
        peer for number in range(first, first + 20) for peer, executions in world.carried(number).items() if executions
    ]
    assert len(set(active)) == 5
    assert all_equal(world)


def test_a_newcomer_that_missed_a_holder_looks_it_up_before_it_fetches_again(make_of: Callable[[int], Make]) -> None:
    """The second peer trains when the third has read its record, which says that it is joining."""
    world = World(make_of(2), UNEQUAL)
    world.start_all(0.1)
    world.until_round(10)
    assert len(world.rounds(2).now_in.members) == 3  # type: ignore[union-attr]
    assert len(world.of(2, "behind")) <= 1
    assert world.drawn().keys() >= {6, 7, 8}


# Peers that die


@pytest.mark.parametrize("victim", range(5))
def test_a_peer_that_dies_in_a_round_costs_two_deadlines_and_the_others_stay_equal(
    make_of: Callable[[int], Make], victim: int
) -> None:
    world = World(make_of(6), FIVE, job_s=0.02)
    world.start_all(0.5)
    until_all_are_members(world)
    world.agenda.run(world.agenda.now + 0.15)  # micro-batches are under way
    peer = world.members[victim].peer
    world.crash(world.members[victim])
    assert run_rounds(world, 2) < 2 * (GONE_S + HOP_DEADLINE_FLOOR_S)
    run_rounds(world, 2)
    assert all_equal(world)
    assert audit_of(world).sound
    for member in world.living:
        assert peer in {line["peer"] for line in world.of(member.number, "without")}
        assert peer not in {one.peer for one in world.rounds(member.number).now_in.members}  # type: ignore[union-attr]


def test_a_peer_that_comes_back_is_let_in_again_and_equals_the_others(make_of: Callable[[int], Make]) -> None:
    world = World(make_of(6), FIVE, job_s=0.2)
    world.start_all(0.5)
    run_rounds(world, 3)
    world.crash(world.members[1])
    world.agenda.run(world.agenda.now + 1.0)  # the others have not noticed yet
    world.start(world.members[1])
    world.agenda.run(world.agenda.now + 25.0)
    run_rounds(world, 4)
    newest = world.rounds(1).number
    assert any(world.carried(number)[world.members[1].peer] for number in range(newest - 4, newest))
    assert all_equal(world)
    assert audit_of(world).sound


def test_a_peer_that_was_taken_for_dead_notices_and_fetches_the_state_anew(make_of: Callable[[int], Make]) -> None:
    world = World(make_of(6), FIVE, job_s=0.2)
    world.start_all(0.5)
    run_rounds(world, 3)
    world.freeze(world.members[2])
    world.agenda.run(world.agenda.now + 20.0)
    world.thaw(world.members[2])
    world.agenda.run(world.agenda.now + 10.0)
    run_rounds(world, 2)
    assert world.of(2, "behind")
    assert len(world.rounds(0).now_in.members) == 5  # type: ignore[union-attr]
    assert all_equal(world)


def test_peers_that_all_die_at_once_go_on_together_from_their_checkpoints(make_of: Callable[[int], Make]) -> None:
    world = World(make_of(6), UNEQUAL, job_s=0.12)
    world.start_all(0.5)
    world.agenda.run(40.0)
    saved = max(line["step"] for number in range(3) for line in world.of(number, "checkpoint"))
    for member in world.members:
        world.crash(member)
    for number, member in enumerate(world.members):
        world.agenda.after(2.0 + number, partial(world.start, member))
    world.agenda.run(world.agenda.now + 30.0)
    run_rounds(world, 2)
    assert saved >= 10
    assert all(world.rounds(number).number > saved for number in range(3))
    assert len(world.rounds(0).now_in.members) == 3  # type: ignore[union-attr]
    assert all_equal(world)
    assert audit_of(world).sound


def test_two_parts_of_a_swarm_that_went_on_apart_become_one_again(make_of: Callable[[int], Make]) -> None:
    world = World(make_of(4), [None, None, None], job_s=0.2)
    world.start_all(0.5)
    run_rounds(world, 2)
    world.network_faults.sides, world.network_faults.parted_at = {world.members[2].peer: 1}, world.agenda.now
    world.agenda.run(world.agenda.now + 20.0)
    apart = world.rounds(2).now_in
    assert apart is not None
    assert [one.peer for one in apart.members] == [world.members[2].peer]
    world.network_faults.sides.clear()
    world.agenda.run(world.agenda.now + 30.0)
    run_rounds(world, 1)
    assert len(world.rounds(0).now_in.members) == 3  # type: ignore[union-attr]
    assert world.of(2, "behind")[0]["reason"] == "apart"  # then rounds may begin while it fetches their state
    assert all_equal(world)


@pytest.mark.night
def test_a_stranger_that_asks_to_be_let_in_stops_no_round(make_of: Callable[[int], Make]) -> None:
    """One key without a record, with a question a second: the members waited for its report in every round."""
    world, stranger = World(make_of(6), [None, None]), PeerId("0stranger")
    world.start_all()
    world.until_round(5)
    quiet = rounds_in(world, 2.0)
    world.network.geography._own[stranger] = world.network.geography._own[world.members[0].peer]  # type: ignore[attr-defined]
    port = plugged(world.network, stranger)
    port.serve = lambda sender, envelope, reply: None

    def ask() -> None:
        query = Envelope(RoundQuery(RUN, 0, 0, LAYERS, joining=True))
        for member in world.living:
            world.network.ask(port, Ask(FollowTag(), member.peer, query, 5.0), lambda outcome: None)
        world.agenda.after(1.0, ask)

    ask()
    assert rounds_in(world, 4.0) >= 1.8 * quiet
    assert [one.peer for one in world.rounds(0).now_in.members] == [one.peer for one in world.members]  # type: ignore[union-attr]


def rounds_in(world: World, seconds: float) -> int:
    before = world.rounds(0).number
    world.agenda.run(world.agenda.now + seconds)
    return world.rounds(0).number - before

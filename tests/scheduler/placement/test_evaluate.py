"""Plans are evaluated by figures that others publish, so no figure that a record may carry ends the evaluation."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from decentral.core.config import Config, GossipConfig, ModelConfig, TrainConfig
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.layer_work import KindCost, KindCosts
from decentral.core.memory_needs import MemoryNeeds
from decentral.engine.fragment import fragments_of
from decentral.peers.membership.records import MOST_PER_S
from decentral.scheduler.placement.evaluate import (
    DRAIN_COST_S,
    HORIZON_S,
    EvaluatePlans,
    PlanTask,
    TrainingPeer,
    evaluate_plans,
    without_useless_moves,
    work_of,
)
from decentral.scheduler.throughput import max_flow
from decentral.scheduler.throughput.link_limits import TokenLinks
from decentral.scheduler.throughput.planned_in_flight import Pipeline

CUTS = tuple(Fragment(index, index, index + 1, 10**6) for index in range(4))
NEEDS = MemoryNeeds(CUTS, (10**7,) * 4, (10**6,) * 4, (10**6,) * 4, (10**6,) * 4)
A = PeerId("a")
HONEST = {
    A: TrainingPeer(range(2), 10**9, 100.0, 1e7),
    PeerId("b"): TrainingPeer(range(2, 4), 10**9, 100.0, 1e7),
}


def task(stranger: TrainingPeer) -> PlanTask:
    return PlanTask(NEEDS, tuple(sorted({**HONEST, PeerId("z"): stranger}.items())), TokenLinks(1024.0, 0.8, 128), 1)


@pytest.mark.parametrize(
    ("tokens_per_s", "rate"), [*product((0.0, 1e-300, 100.0, MOST_PER_S, 9e17), (0.0, 1e-300, 1e7, MOST_PER_S, 9e17))]
)
def test_no_speed_and_no_rate_that_one_peer_publishes_ends_the_evaluation(tokens_per_s: float, rate: float) -> None:
    for held in (range(2), range(1, 3), range(0)):
        found = evaluate_plans(
            EvaluatePlans(1, task(TrainingPeer(held, 10**9, tokens_per_s, rate)), (), searches=False, seed=1)
        )
        assert 0 <= found.stay_tokens < float("inf")


@pytest.mark.parametrize("seconds", [1e-12, 1e4])
def test_no_costs_that_one_peer_publishes_end_the_evaluation(seconds: float) -> None:
    other = KindCost(1e-6, 1e-6, 0, 0)
    for costs in (KindCosts(KindCost(seconds, seconds, 0, 0), other, other), KindCosts(other, other, other)):
        stranger = TrainingPeer(range(2), 10**9, 100.0, 1e7, costs=costs)
        found = evaluate_plans(EvaluatePlans(1, task(stranger), (), searches=True, seed=1))
        assert 0 <= found.found_tokens < float("inf")


# A model with a heavy head: depth 6, width 64, 32,768 tokens. Four equal peers, each with memory for four layers. On a
# CPU a token takes 9 us in the embedding, 12 us in a block and 396 us in the head.
HEAVY = ModelConfig(depth=6, width=64, vocabulary=32768, context=128)
HEAVY_COSTS = KindCosts(KindCost(0.5e-6, 8.9e-6, 8, 92 << 20), KindCost(4.8e-6, 6.9e-6, 5648, 2 << 20),
                        KindCost(153e-6, 243e-6, 131852, 92 << 20))  # fmt: skip
HEAVY_SPEED = 1 / sum(cost.seconds * count for cost, count in zip(HEAVY_COSTS, (1, 6, 1), strict=True) if cost)


def heavy(costs: KindCosts, by_parameters: bool = False) -> PlanTask:
    """The swarm as peers see it that have measured these costs, or that go by the parameters of the layers."""
    cuts = tuple(fragments_of(Config(model=HEAVY, gossip=GossipConfig(fragment_parameters=1))))
    cuts = tuple(replace(cut, work=()) for cut in cuts) if by_parameters else cuts
    needs = MemoryNeeds(cuts, (10,) * 8, (0,) * 8, (0,) * 8)
    held = (range(4), range(4), range(4, 8), range(4, 8))
    members = [TrainingPeer(one, 69, HEAVY_SPEED, 1e9, costs=costs) for one in held]
    named = tuple((PeerId(str(number)), one) for number, one in enumerate(members))
    return PlanTask(needs, named, TokenLinks(128.0, 0.8), 1)


def test_a_heavy_head_gets_more_peers_by_measured_times_than_by_parameters_and_the_swarm_is_faster() -> None:
    measured, by_parameters = heavy(HEAVY_COSTS), heavy(HEAVY_COSTS, by_parameters=True)
    rates, holders = [], []
    for seen in (measured, by_parameters):
        found = evaluate_plans(EvaluatePlans(1, seen, (), searches=True, seed=1)).found
        spans = np.array([(begin, end) for _, begin, end in found or [(p, m.held.start, m.held.stop)
                          for p, m in seen.members]])  # fmt: skip
        rates.append(max_flow.maximum(work_of(measured), spans).tokens_per_s)
        holders.append(int((spans[:, 1] == 8).sum()))
    assert holders == [3, 2]
    assert rates[0] > 1.4 * rates[1]


def test_who_only_donates_is_planned_where_others_begin_nothing() -> None:
    """At first the others hold the last layers, and nobody begins."""
    donor = TrainingPeer(range(2), 4 * 10**7, 100.0, 1e9, originates=False)
    trainer = TrainingPeer(range(2, 4), 4 * 10**7, 100.0, 1e9)
    peers = {PeerId("a"): donor, PeerId("b"): trainer, PeerId("c"): trainer, PeerId("d"): trainer}
    asked = PlanTask(NEEDS, tuple(sorted(peers.items())), TokenLinks(1024.0, 0.8), 1)
    found = evaluate_plans(EvaluatePlans(1, asked, (), searches=True, seed=1))
    assert found.stay_tokens < 100
    spans = {peer: range(begin, end) for peer, begin, end in found.found}
    assert [0 in spans[peer] for peer in ("a", "b", "c", "d")].count(True) == 2
    assert 0 not in spans["a"]
    assert found.found_tokens > 0.98 * 400 * HORIZON_S


def test_a_swarm_whose_flow_cannot_be_solved_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        status, message, nit = 4, "numerical difficulties", 0

    monkeypatch.setattr(max_flow, "linprog", lambda *given, **named: Failed())
    asked = EvaluatePlans(1, task(TrainingPeer(range(2), 10**9, 50.0, 1e7)), (), searches=True, seed=1)
    found = evaluate_plans(asked)
    assert (found.stay_tokens, found.found, found.found_tokens) == (0.0, (), 0.0)
    assert np.all(max_flow.maximum(work_of(asked.task), np.array([(0, 2), (2, 4), (0, 2)])).computed_NL == 0)


def test_a_plan_in_which_equal_peers_change_places_moves_as_few_as_it_can() -> None:
    """Three peers hold the first part and one the second: one of the three moves. A search had moved four of six."""
    spans = ["abc", "d", "ef"]
    parts = {peer: range(at, at + 1) for at, row in enumerate(spans) for peer in row}
    held = {peer: TrainingPeer(part, 18 * 10**6, 100.0, 1e7) for peer, part in parts.items()}
    cuts, each = CUTS[:3], (10**6,) * 3
    asked = PlanTask(
        MemoryNeeds(cuts, (10**7,) * 3, each, each),
        tuple((PeerId(peer), one) for peer, one in held.items()),
        TokenLinks(2.0, 0.8),
        holders=1,
    )
    old = np.array([(one.held.start, one.held.stop) for one in held.values()])
    new, tokens = without_useless_moves(asked, work_of(asked), old, old[[0, 3, 4, 5, 0, 3]], most=10)
    assert (new != old).any(axis=1).sum() == 1
    assert tokens > 1.9 * max_flow.maximum(work_of(asked), old).tokens_per_s * (HORIZON_S - DRAIN_COST_S)


@pytest.mark.parametrize("memory_bytes", [23 * 10**6, 27 * 10**6, 35 * 10**6, 10**9])
def test_a_plan_counts_as_many_micro_batches_beside_layers_as_the_peer_does(memory_bytes: int) -> None:
    """A peer keeps memory free for the scratch of one fragment, 1 MB here: half of a micro-batch."""
    members = {PeerId("a"): TrainingPeer(range(2), memory_bytes, 100.0, 1e8), PeerId("b"): HONEST[PeerId("b")]}
    work = work_of(PlanTask(NEEDS, tuple(members.items()), TokenLinks(1024.0, 0.8, 128), 1))
    pipeline = Pipeline(work, np.zeros((2, 2)), context=128, sequences=1)
    for begin, end in (0, 1), (0, 2), (1, 3):
        assert pipeline.capacity((0, begin, end), (begin, end)) == NEEDS.capacity(begin, end, memory_bytes)


def test_a_peer_with_little_memory_is_worth_more_at_the_last_layers_where_micro_batches_stay_for_less_time() -> None:
    """The flow is 200 tokens/s either way. A micro-batch occupies the first peer for 2 s, the second for 1 s."""
    tight = {PeerId("a"): TrainingPeer(range(2), 27 * 10**6, 100.0, 1e8), PeerId("b"): HONEST[PeerId("b")]}
    asked = PlanTask(NEEDS, tuple(tight.items()), TokenLinks(1024.0, 0.8, 100), 1)
    found = evaluate_plans(EvaluatePlans(1, asked, ((("a", 2, 4), ("b", 0, 2)),), searches=False, seed=1))
    assert found.stay_tokens < 100 * HORIZON_S < 190 * (HORIZON_S - 20) < found.proposed[0]


def test_a_peer_that_begins_few_micro_batches_at_a_time_is_worth_less_with_exact_gradients() -> None:
    """The flow is 200 tokens/s either way, and the second peer of a route has room for as many."""
    links = TokenLinks.of(Config(model=ModelConfig(context=100), train=TrainConfig(micro_batch=1)))
    assert (links.micro_batch_tokens, links.accumulate) == (100, 1)
    worth = []
    for memory_bytes in (27 * 10**6, 10**9):
        origin = TrainingPeer(range(2), memory_bytes, 100.0, 1e8)
        asked = PlanTask(NEEDS, ((PeerId("a"), origin), (PeerId("b"), HONEST[PeerId("b")])), links, 1)
        worth.append(evaluate_plans(EvaluatePlans(1, asked, (), searches=False, seed=1)).stay_tokens)
    assert 0 < worth[0] < 0.9 * worth[1] < 0.9 * 200 * HORIZON_S


def test_a_peer_that_alone_holds_a_layer_computes_its_own_micro_batches_up_to_there() -> None:
    """Its flow of 200 tokens/s passes through the second peer and back, but no route returns to its origin peer."""
    held = {"a": range(3), "b": range(1, 2), "c": range(3, 4)}
    members = tuple((PeerId(peer), TrainingPeer(one, 10**9, 100.0, 1e8)) for peer, one in held.items())
    asked = PlanTask(NEEDS, members, TokenLinks(2.0, 0.8, 128), 1)
    found = evaluate_plans(EvaluatePlans(1, asked, (), searches=False, seed=1))
    assert found.stay_tokens / HORIZON_S == pytest.approx(100 / 0.75, rel=0.01)

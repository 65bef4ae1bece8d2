"""The synchronous objective: exact costs, searches that reach proven optima, and properties of every layout."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import planner_published
from decentral.core.errors import UserError
from decentral.scheduler.sync import annealing, evolve, exact, gcma, layouts, local_search, matching
from decentral.scheduler.sync.layout_cost import Problem, best_layout, cost_of_pipelines, problem_of
from decentral.scheduler.sync.local_search import Cooling
from decentral.scheduler.sync.sync_plan import sync_plan
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import LinkMatrices, Topology, Workload, regions_of
from tests.scheduler.swarms import subset

OPTIMA = {
    "data-centre": 3.43980,
    "universities": 16.08684,
    "four-regions": 34.80204,
    "eight-cities": 49.21838,
    "spot": 31.63416,
}


def random_problem(seed: int, stages: int = 3, replicas: int = 2, unused: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    count = stages * replicas + unused
    return Problem(symmetric(rng.random((count, count))), symmetric(rng.random((count, count))), stages, replicas)


def symmetric(square: Floats) -> Floats:
    both: Floats = square + square.T
    np.fill_diagonal(both, 0.0)
    return both


def one_region(problem: Problem) -> Ints:
    return np.zeros(problem.peers, np.int64)


def swarm(rate: Floats) -> Topology:
    count = len(rate)
    ids = tuple(f"p{i}" for i in range(count))
    unknown = np.zeros(count)
    np.fill_diagonal(rate, np.inf)
    links = LinkMatrices(np.zeros_like(rate), rate, np.zeros_like(rate))
    limits = (unknown + np.inf, unknown + np.inf)
    return Topology(ids, ("here",) * count, ("gpu",) * count, unknown, unknown, links, *limits, Workload(3, 2))


@pytest.mark.parametrize("case", OPTIMA)
def test_genetic_reaches_the_proven_optimum_of_each_published_case(case: str) -> None:
    plan = sync_plan(topology.load(case), "genetic", seed=1, budget=SearchBudget(rounds=4))
    assert plan.cost["total"] == pytest.approx(OPTIMA[case], abs=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_searches_equal_exact_on_small_swarms(seed: int) -> None:
    problem = random_problem(seed, 4, 2)
    best = best_layout(
        problem, exact.search(problem, one_region(problem), SearchBudget(rounds=1), np.random.default_rng(0))
    ).cost.total
    for solver in (evolve.search, annealing.search):
        found = best_layout(
            problem, solver(problem, one_region(problem), SearchBudget(rounds=8), np.random.default_rng(seed))
        )
        assert found.cost.total == pytest.approx(best)


@pytest.mark.parametrize(
    ("seed", "stages", "unused"), [(0, 3, 0), (1, 3, 0), (2, 3, 0), (3, 2, 2), (4, 2, 2), (5, 1, 4)]
)
def test_exact_is_the_least_of_all_layouts(seed: int, stages: int, unused: int) -> None:
    problem = random_problem(seed, stages, 2, unused)
    problem = problem._replace(
        pipe_NN=problem.pipe_NN + 1 - np.eye(6)
    )  # so that the floor of the pipeline's cost matters
    every = (best_layout(problem, np.array(order)).cost.total for order in permutations(range(6)))
    found = best_layout(
        problem, exact.search(problem, one_region(problem), SearchBudget(rounds=1), np.random.default_rng(0))
    )
    assert found.cost.total == pytest.approx(min(every))


def test_gcma_claims_what_its_pipelines_cost() -> None:
    problem = random_problem(5, 4, 4)
    found = best_layout(
        problem, gcma.search(problem, one_region(problem), SearchBudget(rounds=4), np.random.default_rng(0))
    )
    assert found.cost.total == pytest.approx(cost_of_pipelines(problem, found.stages_SR).total)


def test_gcma_walks_as_the_published_loops_do() -> None:
    rate = symmetric(np.random.default_rng(4).uniform(1e8, 1e9, (16, 16)))
    pool = replace(swarm(rate), workload=Workload(4, 4))
    walk = planner_published.Search(planner_published.case_of(pool, Workload(4, 4)), 100, np.random.default_rng(0))
    for _ in range(4):
        walk.trials()
    problem = problem_of(pool, Workload(4, 4))
    found = best_layout(
        problem, gcma.search(problem, one_region(problem), SearchBudget(rounds=4), np.random.default_rng(0))
    )
    assert found.cost.total == pytest.approx(walk.best)


def test_gcma_children_stay_balanced() -> None:
    rng = np.random.default_rng(0)
    problem = random_problem(6, 4, 4)
    parents = [rng.permutation(16) // 4 for _ in range(2)]
    for _ in range(50):
        child = gcma._cyclic(problem, gcma._crossover(problem, parents[0], parents[1], rng.permutation(16)[:5]))
        assert (np.bincount(child, minlength=4) == 4).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_bottleneck_matching_is_the_least_maximum(seed: int, size: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 6, (size, size)).astype(float)
    partner = np.empty(size, np.int64)
    value = matching.bottleneck_matching(cost, np.inf, partner)
    assert value == min(max(cost[i, p[i]] for i in range(size)) for p in permutations(range(size)))
    assert sorted(partner) == list(range(size))
    assert max(cost[partner[column], column] for column in range(size)) == value


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_held_karp_is_the_shortest_open_path(seed: int, size: int) -> None:
    edge = symmetric(np.random.default_rng(seed).random((size, size)))

    def length(path: tuple[int, ...]) -> float:
        return float(sum(edge[a, b] for a, b in pairwise(path)))

    order = tuple(int(stage) for stage in matching.held_karp(edge))
    assert length(order) == pytest.approx(min(map(length, permutations(range(size)))))
    improved = matching.improved_path(edge, np.arange(size))
    assert sorted(improved) == list(range(size))
    assert length(tuple(improved)) <= length(tuple(range(size))) + 1e-12


@pytest.mark.parametrize("unused", [0, 3])
def test_delta_evaluation_equals_full_evaluation_after_thousands_of_moves(unused: int) -> None:
    problem = random_problem(8, 5, 4, unused)
    rng = np.random.default_rng(1)
    state = local_search.initial_state(problem, rng.permutation(problem.peers))
    best, proposals = state.slots.copy(), local_search.proposals(problem, rng)
    for hot in np.geomspace(3.0, 0.1, 80).tolist():  # compared often: a later move may repair an earlier one's error
        local_search.anneal(problem, state, best, np.inf, Cooling(100, hot, hot / 2, 0.3), proposals)
        fresh = local_search.initial_state(problem, state.slots.copy())
        for kept, full in zip(state[2:], fresh[2:], strict=True):
            np.testing.assert_allclose(kept, full, atol=1e-9)
        np.testing.assert_allclose(state[1], fresh[1], atol=1e-9)
        assert sorted(state[0]) == list(range(problem.peers))


@pytest.mark.parametrize("start", [*layouts.STARTS.values(), layouts.random_blocks])
def test_every_start_uses_every_peer_once(start: layouts.Start) -> None:
    rng = np.random.default_rng(0)
    region = rng.integers(0, 5, 50)
    for _ in range(5):
        assert sorted(start(region, 6, 8, rng)) == list(range(50))


def test_a_long_pipeline_costs_less_than_any_hand_layout() -> None:
    groups = {city: {"count": count} for city, count in (("Tokyo", 11), ("Ohio", 14), ("London", 9), ("Sydney", 14))}
    cities = topology.parse({"regions": groups, "based_on": "ten-cities", "workload": {"stages": 16, "replicas": 3}})
    plan = sync_plan(cities, "genetic", 0, SearchBudget(rounds=1))
    assert plan.cost["total"] < 0.97 * min(plan.baselines.values())


def test_crossover_keeps_a_stage_on_which_the_parents_agree() -> None:
    one = np.arange(12)
    two = np.concatenate((np.arange(4), np.array([8, 5, 10, 7, 4, 9, 6, 11])))
    child = evolve.crossover(one, two, np.arange(12), 3, 4, np.random.default_rng(0)).reshape(3, 4)
    assert {0, 1, 2, 3} in [set(stage) for stage in child]


def test_crossover_knows_twins_as_one_kind_and_a_pipeline_walked_backwards() -> None:
    twin = np.arange(12) // 3 * 3
    one = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    two = np.array([11, 9, 10, 8, 7, 6, 4, 3, 5, 2, 1, 0])  # the same kinds in each stage, from the other end
    child = evolve.crossover(one, two, twin, 4, 3, np.random.default_rng(0)).reshape(4, 3)
    kinds = [set(twin[stage].tolist()) for stage in child]
    assert kinds in ([{0}, {3}, {6}, {9}], [{9}, {6}, {3}, {0}])


def test_the_same_seed_and_rounds_give_the_same_plan() -> None:
    swarm = topology.load("spot")
    plans = [sync_plan(swarm, "genetic", 7, SearchBudget(rounds=3)) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()


def test_a_search_finishes_its_last_child_within_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, now = random_problem(3, 4, 4), [0.0]

    def clock() -> float:
        now[0] += 0.1
        return now[0]

    def slow_order(cost_SS: Floats, start_S: Ints) -> Ints:
        now[0] += 7.0
        return matching.stage_order(cost_SS, start_S)

    monkeypatch.setattr(evolve, "stage_order", slow_order)
    for seconds in (40.0, 43.0, 46.0):
        now[0] = 0.0
        evolve.search(problem, one_region(problem), SearchBudget(seconds, clock=clock), np.random.default_rng(0))
        assert seconds - 7.5 < now[0] < seconds + 1.0


def test_permuting_peers_changes_nothing_but_names() -> None:
    rate = symmetric(np.random.default_rng(2).uniform(1e8, 1e9, (6, 6)))
    original = swarm(rate)
    shuffled = subset(original, [3, 1, 5, 0, 2, 4])
    plans = [sync_plan(one, "exact", 0, SearchBudget(rounds=1)) for one in (original, shuffled)]
    assert plans[0].cost == pytest.approx(plans[1].cost)
    assert plans[0].digest == plans[1].digest


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 5), st.integers(0, 5))
def test_a_faster_link_never_makes_the_optimum_worse(seed: int, a: int, b: int) -> None:
    rate = symmetric(np.random.default_rng(seed).uniform(1e8, 1e9, (6, 6)))
    faster = rate.copy()
    faster[a, b] *= 3
    before, after = (sync_plan(swarm(one), "exact", 0, SearchBudget(rounds=1)).cost for one in (rate, faster))
    assert after["total"] <= before["total"] + 1e-12


def test_a_plan_uses_every_peer_at_most_once_and_costs_what_it_claims() -> None:
    swarm = subset(topology.load("eight-cities"), range(61))
    swarm = replace(swarm, workload=Workload(6, 10))
    plan = sync_plan(swarm, "genetic", 0, SearchBudget(rounds=2))
    index = {name: i for i, name in enumerate(swarm.ids)}
    placed = np.array([[index[name] for name in stage] for stage in plan.stages])
    assert len(set(placed.ravel())) == 60
    assert swarm.workload is not None
    assert cost_of_pipelines(problem_of(swarm, swarm.workload), placed).total == pytest.approx(plan.cost["total"])


def test_a_swarm_too_small_for_its_workload_is_refused() -> None:
    with pytest.raises(UserError, match="need 64 peers; the topology has 10"):
        sync_plan(replace(topology.load("ten-cities"), workload=Workload()), "genetic", 0, SearchBudget(rounds=1))


def test_regions_are_numbered_in_order() -> None:
    assert list(regions_of(topology.load("four-regions"))[[0, 16, 32, 48]]) == [0, 1, 2, 3]

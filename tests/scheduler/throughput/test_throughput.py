"""The throughput objective: flows, spans, their exact optimum, gossip partners, and what is refused."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import planner_layouts
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.layer_work import KindCost, KindCosts
from decentral.scheduler.partners import mixing
from decentral.scheduler.spans import moves
from decentral.scheduler.throughput import layer_costs, link_limits, max_flow, milp, planning, routes, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import MOST_SOLVING_S, RESERVE, SearchBudget, SearchProgress
from tests.scheduler.swarms import subset
from tests.scheduler.throughput.plain_flow import plain_flow


def small(seed: int, peers: int = 4, layers: int = 5) -> LayerCosts:
    """A few unequal peers that can hold between two and all layers, on slow links."""
    rng = np.random.default_rng(seed)
    link = rng.lognormal(0, 1, (peers, peers)) * 6e5
    link = np.minimum(link, link.T)
    np.fill_diagonal(link, 0.0)
    speed = rng.choice([1.0, 2.0, 4.0, 8.0], peers)
    memory = rng.choice([2.5, 4.0, 6.0], peers)
    ones = np.ones(layers)
    seconds, nowhere = np.outer(1 / speed, ones) / 200, np.full(peers, -1)
    rate, none = rng.lognormal(0, 1, peers) * 2e6, np.zeros(0)
    link = np.minimum(link, np.minimum.outer(rate, rate))
    return LayerCosts(seconds, ones, ones / 9, ones * 0.1, ones * 1e3, memory, link, 2000.0, 1, rate, nowhere, none)


def regions(costs: LayerCosts) -> Ints:
    return np.arange(costs.peers) % 2


def some_spans(costs: LayerCosts, seed: int) -> Ints:
    problem = FlowProblem(costs, regions(costs))
    return problem.repaired(moves.filled(problem, np.random.default_rng(seed)))


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_the_search_equals_the_exact_optimum(seed: int) -> None:
    costs = small(seed)
    exact = milp.best_spans(costs)
    assert exact is not None
    found = span_search.search(FlowProblem(costs, regions(costs)), SearchBudget(rounds=40), np.random.default_rng(0))
    best = max_flow.maximum(costs, exact).tokens_per_s
    assert max_flow.maximum(costs, found).tokens_per_s == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_optimum_is_the_best_of_all_spans(seed: int) -> None:
    costs = small(seed, peers=3, layers=3)
    costs = replace(costs, memory_N=np.array([2.5, 2.5, 3.5]))
    spans = [[(0, 0)] + [(a, b) for a in range(3) for b in range(a + 1, costs.reach(p, a) + 1)] for p in range(3)]
    every = [np.array(chosen) for chosen in itertools.product(*spans) if costs.valid(np.array(chosen))]
    best = max(plain_flow(costs, chosen) for chosen in every)
    assert planner_layouts.best_flow(costs, 0.0)[0] == pytest.approx(best, rel=5e-3)
    exact = milp.best_spans(costs)
    assert exact is not None
    assert max_flow.maximum(costs, exact).tokens_per_s == pytest.approx(best, rel=5e-3)


def test_the_exact_solver_has_nodes_for_half_of_the_budget_and_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[float, int | None]]()

    def best_spans(costs: LayerCosts, seconds: float, nodes: int | None) -> Ints | None:
        asked.append((seconds, nodes))
        return None

    monkeypatch.setattr(milp, "best_spans", best_spans)
    costs = replace(small(1), link_NN=small(1).link_NN / 10)
    for budget in (SearchBudget(rounds=2), SearchBudget(6.0, 2, clock=lambda: 0.0)):
        span_search.search(FlowProblem(costs, regions(costs)), budget, np.random.default_rng(0))
    nodes = milp.nodes_within(costs, 3.0 / RESERVE)
    assert nodes > 0
    assert asked == [(MOST_SOLVING_S, span_search.EXACT_NODES), (6.0, nodes)]


def test_the_exact_solver_ends_with_its_nodes_and_finds_the_same_again() -> None:
    one, again = (milp.best_spans(small(2, peers=3, layers=4), nodes=1) for _ in range(2))
    assert one is not None
    assert again is not None
    np.testing.assert_array_equal(one, again)


def test_the_search_keeps_what_it_has_found_where_the_exact_solver_finds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = replace(small(1), link_NN=small(1).link_NN / 10)
    problem = FlowProblem(costs, regions(costs))
    poor = min(problem.starts(np.random.default_rng(0)), key=lambda spans: problem.evaluate(spans).value)
    monkeypatch.setattr(milp, "best_spans", lambda *_: poor)
    found = span_search.search(problem, SearchBudget(rounds=20), np.random.default_rng(0))
    assert problem.evaluate(found).value > problem.evaluate(poor).value


def test_a_chain_along_links_follows_the_fastest_ones() -> None:
    costs, link = small(0, layers=8), np.full((4, 4), 1e5)
    for i, j in ((0, 2), (2, 1), (1, 3)):
        link[i, j] = link[j, i] = 9e5
    costs = replace(costs, link_NN=link, memory_N=np.full(4, 2.5), seconds_NL=np.full((4, 8), 0.01))
    problem = FlowProblem(costs, regions(costs))
    orders = {
        tuple(span_search.chains(problem, [np.arange(4)], np.random.default_rng(seed), linked=True)[:, 0].tolist())
        for seed in range(20)
    }
    assert {(0, 4, 2, 6), (6, 2, 4, 0)} <= orders


def test_a_flow_that_would_end_too_late_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, now = replace(small(1), link_NN=small(1).link_NN / 10), [0.0]
    maximum = max_flow.maximum

    def slow(costs: LayerCosts, chosen: Ints, progress: SearchProgress | None = None) -> max_flow.MaxFlow:
        now[0] += 3.0
        return maximum(costs, chosen)

    monkeypatch.setattr(max_flow, "maximum", slow)
    monkeypatch.setattr(span_search, "SMALL_SWARM", 0)
    for seconds in (10.0, 62.5, 64.0):
        now[0] = 0.0
        span_search.search(
            FlowProblem(costs, regions(costs)), SearchBudget(seconds, clock=lambda: now[0]), np.random.default_rng(0)
        )
        assert seconds - 3.0 <= now[0] <= seconds


@pytest.mark.parametrize("seed", range(4))
def test_a_flow_obeys_time_links_and_conservation(seed: int) -> None:
    costs = small(seed, peers=6)
    chosen = some_spans(costs, seed)
    found = max_flow.maximum(costs, chosen)
    holds = max_flow.held(costs, chosen)
    assert (found.idle_N > -1e-6).all()
    assert (found.computed_NL[~holds] == 0).all()
    np.testing.assert_allclose(found.computed_NL.sum(axis=0), found.tokens_per_s, rtol=1e-6)
    used = np.zeros_like(costs.link_NN)
    for i, j, _, rate in found.transfers:
        used[[i, j], [j, i]] += costs.hidden_bytes * rate
    assert (used <= costs.link_NN * (1 + 1e-6)).all()
    gossip = costs.rate_N - link_limits.peer_left(costs, holds)
    assert (used.sum(axis=1) + gossip <= costs.rate_N * (1 + 1e-6)).all()


@pytest.mark.parametrize("seed", range(3))
def test_routes_carry_the_flow_through_every_layer_in_order(seed: int) -> None:
    costs = small(seed, peers=6)
    chosen = some_spans(costs, seed)
    found = max_flow.maximum(costs, chosen)
    paths = routes.routes(found)
    assert sum(share for share, _ in paths) == pytest.approx(1.0, abs=1e-6)
    for _, hops in paths:
        assert [hop[1] for hop in hops] == [0, *(hop[2] for hop in hops[:-1])]
        assert hops[-1][2] == costs.layers
        assert all(chosen[peer][0] <= first < last <= chosen[peer][1] for peer, first, last in hops)
    again = routes.flow_of(paths, found, costs.seconds_NL)
    np.testing.assert_allclose(again.computed_NL, found.computed_NL, atol=1e-6 * found.tokens_per_s)
    np.testing.assert_allclose(again.bytes_between(1.0), found.bytes_between(1.0), atol=1e-6 * found.tokens_per_s)
    np.testing.assert_allclose(again.idle_N, found.idle_N, atol=1e-6)


def test_spans_respect_memory_and_holders() -> None:
    costs = replace(small(1, peers=6), holders=2)
    found = span_search.search(FlowProblem(costs, regions(costs)), SearchBudget(rounds=30), np.random.default_rng(0))
    assert costs.valid(found)
    assert (max_flow.held(costs, found).sum(axis=0) >= 2).all()
    for peer, (first, last) in enumerate(found):
        assert costs.bytes_of(first, last, 1) <= costs.memory_N[peer]


@pytest.mark.parametrize("seed", [0, 5])
def test_a_faster_device_or_link_never_makes_the_optimum_worse(seed: int) -> None:
    costs = small(seed, peers=3, layers=4)
    costs = replace(costs, memory_N=costs.memory_N + 1)
    faster = costs.seconds_NL.copy()
    faster[0] /= 2
    variants = [
        costs,
        replace(costs, seconds_NL=faster),
        replace(costs, link_NN=costs.link_NN * 2, rate_N=costs.rate_N * 2),
    ]
    rates = []
    for variant in variants:
        best = milp.best_spans(variant)
        assert best is not None
        rates.append(max_flow.maximum(variant, best).tokens_per_s)
    assert min(rates[1:]) >= rates[0] * (1 - 1e-5)


def test_permuting_peers_changes_nothing_but_names() -> None:
    costs = small(3, peers=3, layers=4)
    costs = replace(costs, memory_N=costs.memory_N + 1)
    turn = np.array([2, 0, 1])
    turned = replace(
        costs,
        seconds_NL=costs.seconds_NL[turn],
        memory_N=costs.memory_N[turn],
        link_NN=costs.link_NN[np.ix_(turn, turn)],
        rate_N=costs.rate_N[turn],
    )
    rates = [
        max_flow.maximum(one, best).tokens_per_s
        for one in (costs, turned)
        if (best := milp.best_spans(one)) is not None
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-5)


def test_peers_that_fit_the_whole_model_need_no_links() -> None:
    costs = small(0)
    costs = replace(costs, memory_N=np.full(4, 100.0), link_NN=np.zeros((4, 4)))
    found = span_search.search(FlowProblem(costs, regions(costs)), SearchBudget(rounds=2), np.random.default_rng(0))
    assert max_flow.maximum(costs, found).tokens_per_s == pytest.approx(costs.compute_bound())


def test_the_plan_of_a_model_has_spans_routes_batches_and_partners() -> None:
    plan = planning.throughput_plan(
        topology.load("ten-cities"), config.load(None), "genetic", 0, SearchBudget(rounds=3)
    )
    shown = plan.to_json()
    assert shown["throughput"]["tokens_per_s"] <= shown["throughput"]["bound"] * (1 + 1e-9)
    assert set(shown["spans"]) == set(shown["micro_batches"]) == set(topology.load("ten-cities").ids)
    assert shown["gossip"]["mixing_per_s"]["plan"] >= shown["gossip"]["mixing_per_s"]["uniform"]
    assert "purely data-parallel" in shown["reason"]


def live(count: int) -> topology.Topology:
    """Equal peers of a running swarm, with 2.5 MB/s up, as their records describe them."""
    profile = {"device": "gpu", "memory_bytes": 8e9, "flops": 1e13, "up": 2.5e6, "down": 1e7, "latency_s": 0.02}
    return topology.topology_from_profiles({f"peer{i}": profile for i in range(count)}, {})


@pytest.mark.parametrize("now", [{f"peer{i}": (0, 4) for i in range(4)}, None])
def test_equal_peers_that_can_hold_the_whole_model_keep_it_and_pass_nothing_on(
    now: dict[str, tuple[int, int]] | None,
) -> None:
    model = config.load(None, ["model.depth=2"])
    plan = planning.throughput_plan(live(4), model, "genetic", 0, SearchBudget(rounds=3), 1, 1.0, now)
    assert plan.reason.startswith("Stay as you are") == (now is not None)
    assert set(map(tuple, plan.spans.values())) == {(0, 4)}
    assert sorted(route["hops"] for route in plan.routes) == [[[f"peer{i}", 0, 4]] for i in range(4)]


def test_peers_move_where_a_plan_promises_more_than_staying() -> None:
    model = config.load(None, ["model.depth=2"])
    now = {"peer0": (0, 2), "peer1": (2, 4), "peer2": (2, 4), "peer3": (2, 4)}
    plan = planning.throughput_plan(live(4), model, "genetic", 0, SearchBudget(rounds=3), 1, 1.0, now)
    assert set(map(tuple, plan.spans.values())) == {(0, 4)}
    assert "Stay" not in plan.reason


def test_a_judge_chooses_among_different_plans_and_says_what_the_plan_reaches() -> None:
    """No peer holds the whole model; two are twice as fast, and are offered alone as well."""
    profile = {"device": "gpu", "memory_bytes": 2.4e6, "up": 2.5e6, "down": 1e7, "latency_s": 0.02}
    speeds = {"fast0": 2e8, "slow0": 1e8, "fast1": 2e8, "slow1": 1e8}
    swarm = topology.topology_from_profiles({name: {**profile, "flops": one} for name, one in speeds.items()}, {})
    model, offered = config.load(None, ["model.depth=4", "model.width=32", "model.context=32"]), list[ThroughputPlan]()

    def judge(plans: Sequence[ThroughputPlan]) -> planning.Verdict | None:
        offered.extend(plans)
        return planning.Verdict(len(plans) - 1, 123.0, "Played: 123 tokens/s.")

    plan = planning.throughput_plan(swarm, model, "genetic", 0, SearchBudget(rounds=5), judge=judge)
    assert 1 < len(offered) <= 1 + planning.FINALISTS
    assert len({str(one.spans) for one in offered}) == len(offered)
    assert {"fast0", "fast1"} in [set(one.spans) for one in offered]
    assert plan.spans == offered[-1].spans
    assert plan.throughput["estimated"] == offered[-1].throughput["tokens_per_s"]
    assert plan.throughput["tokens_per_s"] == 123.0
    assert plan.reason.startswith("Played: 123 tokens/s. Estimated: ")
    assert plan.gossip["weights"]


def test_a_plan_says_for_which_model_and_speeds_it_is_made() -> None:
    plan = planning.throughput_plan(live(2), config.load(None), "flow", 0, SearchBudget(rounds=1))
    assert plan.planned_for["layers"] == 4
    assert plan.planned_for["utilisation"] == 0.35
    assert "stdlib-gpt" in plan.reason
    assert "at 35% of the devices' peak FLOP/s" in plan.reason
    assert "Greatest use: device 100.0%" in plan.reason


HEAVY = config.load(None, ["model.depth=2", "model.width=64", "model.vocabulary=32768", "model.context=128"])
MEASURED = KindCosts(KindCost(1e-6, 9e-6, 0, 0), KindCost(4e-6, 8e-6, 0, 0), KindCost(150e-6, 216e-6, 0, 0))


def test_measured_layers_take_the_place_of_flops_where_a_peer_has_them() -> None:
    swarm = replace(live(2), costs=(MEASURED, KindCosts()))
    found = layer_costs.of_model(swarm, HEAVY)
    assert found.seconds_NL[0] == pytest.approx([10e-6, 12e-6, 12e-6, 366e-6])
    assert found.seconds_NL[1] == pytest.approx(layer_costs.of_model(live(2), HEAVY).seconds_NL[1])
    plan = planning.throughput_plan(swarm, HEAVY, "flow", 0, SearchBudget(rounds=1))
    assert plan.planned_for["measured"] == 1
    assert "1 of 2 peers measured and, for the other peers, 35% of the devices' peak FLOP/s" in plan.reason


def test_the_bytes_of_a_layer_are_the_median_of_those_that_peers_measured() -> None:
    known = [KindCosts(block=KindCost(1e-6, 1e-6, activation, 5000)) for activation in (10, 20, 1 << 49)]
    found = layer_costs.of_model(replace(live(3), costs=tuple(known)), HEAVY)
    usual = layer_costs.of_model(live(3), HEAVY)
    assert found.activation_L[1:3].tolist() == [20 * 128] * 2
    assert found.state_L[1:3].tolist() == [5000.0] * 2
    assert found.activation_L[[0, 3]].tolist() == usual.activation_L[[0, 3]].tolist()


def test_layers_that_were_measured_once_are_scaled_to_the_speed_of_now() -> None:
    now = layer_costs.at_speed(MEASURED, HEAVY, 1250.0)  # a token took 400 us, and takes 800 us now
    assert [one.seconds for one in now if one] == pytest.approx([20e-6, 24e-6, 732e-6])
    assert layer_costs.at_speed(MEASURED, HEAVY, 0.0) == MEASURED
    assert layer_costs.at_speed(KindCosts(), HEAVY, 1250.0) == KindCosts()


def test_the_budget_covers_the_baseline_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now, maximum = [0.0], max_flow.maximum

    def slow(costs: LayerCosts, chosen: Ints, progress: SearchProgress | None = None) -> max_flow.MaxFlow:
        seconds = np.inf if progress is None or progress.best == np.inf else progress.clock_left_s()
        now[0] += min(3.0, seconds)
        return (
            maximum(costs, chosen)
            if seconds >= 3.0
            else max_flow.MaxFlow(0.0, costs.seconds_NL, (), costs.rate_N, costs.state_L)
        )

    monkeypatch.setattr(max_flow, "maximum", slow)
    whole = span_search.equal_random
    monkeypatch.setattr(span_search, "equal_random", lambda costs, rng: whole(costs, rng) * (rng.random((10, 1)) < 0.9))
    for seconds, draws in ((5.0, False), (60.0, True)):
        now[0] = 0.0
        budget = SearchBudget(seconds, clock=lambda: now[0])
        plan = planning.throughput_plan(topology.load("ten-cities"), config.load(None), "genetic", 0, budget)
        assert now[0] <= seconds
        assert bool(plan.baselines) == draws


def test_a_pool_with_too_little_memory_is_refused_in_one_line() -> None:
    large = config.load(None, ["model.depth=96", "model.width=12288"])
    with pytest.raises(UserError, match=r"the peers together have 160\.0 GB") as refused:
        planning.throughput_plan(topology.load("ten-cities"), large, "genetic", 0, SearchBudget(rounds=1))
    assert "\n" not in str(refused.value)


def test_gossip_partners_mix_at_least_as_fast_as_the_simple_rules() -> None:
    swarm = subset(topology.load("eight-cities"), range(0, 64, 4))
    holds = np.ones((16, 1), dtype=bool)
    found = mixing.partners(swarm, holds, np.array([1e8]), np.zeros((16, 16)), 0.8, SearchBudget(rounds=4))
    assert found.mixing_per_s >= max(found.uniform_per_s, found.bandwidth_per_s)
    np.testing.assert_allclose(found.weight_NN.sum(axis=1), 1.0)
    assert (np.diag(found.weight_NN) == 0).all()


def test_two_peers_gossip_with_each_other_all_the_time() -> None:
    seconds = np.array([[np.inf, 2.0], [2.0, np.inf]])
    slow = np.array([[0.0, 0.01], [0.01, 0.0]])
    rate = mixing.fastest(seconds, [np.array([0, 1])], slow, SearchBudget(rounds=3))
    assert rate[0, 1] == pytest.approx(1 / 2.0)
    assert mixing.slowest(rate, [np.array([0, 1])]) == pytest.approx(1.0)


@pytest.mark.parametrize("search", [mixing.ascended, mixing.fastest])
def test_rates_fill_nobodys_links_and_mix_faster_than_where_they_began(search: Callable[..., Floats]) -> None:
    swarm = topology.load("ten-cities")
    seconds = swarm.delay_s + 1e8 / swarm.bandwidth
    np.fill_diagonal(seconds, np.inf)
    everyone = [np.arange(10)]
    start = mixing.scaled(np.isfinite(seconds).astype(float), seconds)
    rate = search(seconds, everyone, start, SearchBudget(rounds=mixing.ASCENT_ROUNDS))
    assert mixing.slowest(rate, everyone) > 1.05 * mixing.slowest(start, everyone)
    np.testing.assert_allclose(rate, rate.T)
    busy = (rate * np.where(np.isfinite(seconds), seconds, 0.0)).sum(axis=1)
    assert (busy <= 1 + 1e-6).all()


def test_the_search_for_partners_ends_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0  # evaluations of the slope, each of which takes a second
    slope = mixing._slope

    def slow(rate: Floats, groups: Sequence[Ints]) -> tuple[float, Floats]:
        nonlocal looks
        looks += 1
        return slope(rate, groups)

    monkeypatch.setattr(mixing, "_slope", slow)
    holds = np.ones((64, 1), dtype=bool)
    budget = SearchBudget(10.0, clock=lambda: float(looks))
    mixing.partners(topology.load("eight-cities"), holds, np.array([1e8]), np.zeros((64, 64)), 0.8, budget)
    assert looks <= 11


def test_a_layer_with_too_few_holders_is_not_valid() -> None:
    costs = replace(small(0, peers=2, layers=4), memory_N=np.array([9.0, 9.0]))
    spans_N2 = np.array([[0, 4], [1, 4]])
    assert costs.valid(spans_N2)
    assert not replace(costs, holders=2).valid(spans_N2)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 7), st.integers(1, 2))
def test_any_spans_found_fit_memory_and_cover_every_layer_with_its_holders(seed: int, peers: int, holders: int) -> None:
    costs = small(seed, peers)
    costs = replace(costs, memory_N=costs.memory_N + 5.0 / peers * holders, holders=holders)
    found = span_search.search(FlowProblem(costs, regions(costs)), SearchBudget(rounds=2), np.random.default_rng(seed))
    held = np.zeros(costs.layers, np.int64)
    for peer, (first, last) in enumerate(found):
        assert 0 <= first <= last <= costs.layers
        assert costs.state_L[first:last].sum() + costs.activation_L[first:last].sum() <= costs.memory_N[peer]
        held[first:last] += 1
    assert (held >= holders).all()

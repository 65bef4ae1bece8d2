"""A large swarm is planned in groups of peers that hold the model each; bounds say what no plan can exceed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from decentral.scheduler.throughput import max_flow, peer_groups, rows, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts, reaches
from decentral.scheduler.throughput.max_flow import MaxFlow
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

LAYERS = 8


def swarm(held: list[int], rates: list[float], sites: list[int], site_rate: float = 1e6) -> LayerCosts:
    """Peers with 80 tokens/s and memory for so many layers; a token has 10 bytes, and gossip sends none."""
    count, ones, rate_N = len(held), np.ones(LAYERS), np.array(rates)
    site_N = np.array(sites)
    link = np.where(np.equal.outer(site_N, site_N), 1e6, 1e4)
    link = np.minimum(link, np.minimum.outer(rate_N, rate_N))
    np.fill_diagonal(link, 0.0)
    memory = np.array(held) + 0.5
    return LayerCosts(
        np.full((count, LAYERS), 1 / 80 / LAYERS), ones, ones, 0 * ones, 0 * ones, memory, link, 10.0, 1, rate_N,
        site_N, np.full(int(site_N.max()) + 1, site_rate),
    )  # fmt: skip


def problem(costs: LayerCosts) -> FlowProblem:
    return FlowProblem(costs, costs.site_N)


def named(groups: list[Ints]) -> list[list[int]]:
    return sorted(group.tolist() for group in groups)


def test_peers_with_memory_for_the_whole_model_are_a_group_of_their_own() -> None:
    costs = swarm([8, 8, 4, 4, 4], [1e6] * 5, [0, 0, 0, 0, 0])
    assert named(peer_groups.groups(problem(costs), costs.site_N)) == [[0, 1], [2, 3, 4]]


def test_sites_that_hold_the_model_stay_apart_and_two_that_do_not_are_joined() -> None:
    costs = swarm([4] * 3 + [2] * 2 + [3] * 2 + [4] * 3, [1e6] * 10, [0] * 3 + [1] * 2 + [2] * 2 + [3] * 3)
    groups = peer_groups.groups(problem(costs), costs.site_N)
    assert named(groups) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]


def test_two_sites_that_hold_the_model_only_with_a_range_of_layers_each_are_a_group() -> None:
    costs = swarm([3] * 3 + [2] * 2 + [1] * 4, [1e6] * 9, [0] * 3 + [1] * 2 + [2] * 4)
    assert named(peer_groups.groups(problem(costs), costs.site_N)) == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]


def test_a_solver_that_evaluates_nothing_leaves_no_finalists_of_a_search() -> None:
    assert problem(swarm([4] * 4, [100.0] * 4, [-1] * 4)).finalists(4) == []


def test_homes_form_rows_wherever_they_are() -> None:
    costs = swarm([4] * 4, [100.0] * 4, [-1] * 4)
    spans = rows.in_rows_of_regions(problem(costs), np.arange(4), np.arange(4))
    assert sorted(map(tuple, spans.tolist())) == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_a_chain_gives_no_peer_more_layers_than_it_can_hold() -> None:
    costs = swarm([1, 6, 6], [1e6] * 3, [-1] * 3)
    costs = replace(costs, seconds_NL=costs.seconds_NL * np.array([[0.1], [1.0], [1.0]]))
    spans = span_search.chains(problem(costs), [np.arange(3)], np.random.default_rng(0))
    assert costs.valid(spans)
    assert (spans[0, 1] - spans[0, 0]) == 1


def test_homes_are_one_group_wherever_they_are() -> None:
    costs = swarm([4] * 3 + [2] * 6, [1e6] * 3 + [100.0] * 6, [0] * 3 + [-1] * 6)
    groups = peer_groups.groups(problem(costs), np.array([0, 0, 0, 1, 2, 3, 4, 5, 6]))
    assert named(groups) == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]


def test_a_swarm_without_enough_memory_in_any_region_is_one_group() -> None:
    costs = swarm([2, 2, 2, 2], [1e6] * 4, [0, 1, 2, 3])
    assert named(peer_groups.groups(problem(costs), costs.site_N)) == [[0, 1, 2, 3]]


def test_rows_have_peers_of_equal_memory_whose_spans_end_where_others_begin() -> None:
    costs = swarm([4, 2, 4, 2, 2, 2], [100.0] * 6, [-1] * 6)
    spans = rows.in_rows(problem(costs), np.arange(6), 0, LAYERS)
    assert sorted(map(tuple, spans[[0, 2]].tolist())) == [(0, 4), (4, 8)]
    assert sorted(map(tuple, spans[[1, 3, 4, 5]].tolist())) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_segment_in_the_middle_gets_more_peers_as_they_send_twice_for_each_token() -> None:
    costs = swarm([3] * 8, [100.0] * 8, [-1] * 8)
    spans = rows.in_rows(problem(costs), np.arange(8), 0, LAYERS)
    assert [spans.tolist().count(one) for one in ([0, 3], [3, 6], [6, 8])] == [2, 4, 2]


def test_peers_that_complete_no_row_join_the_segments_that_supply_least() -> None:
    costs = swarm([4, 4, 4, 1], [1e6, 1e6, 1e6, 1e6], [-1] * 4)
    spans = rows.in_rows(problem(costs), np.arange(4), 0, LAYERS)
    assert spans[3].tolist() == [4, 5]
    assert sorted(map(tuple, spans[:3].tolist())) == [(0, 4), (0, 4), (4, 8)]


def test_regions_get_ranges_of_layers_by_their_speed_and_memory() -> None:
    costs = swarm([2] * 6, [1e6] * 6, [0, 0, 0, 0, 1, 1])
    spans = rows.in_rows_of_regions(problem(costs), costs.site_N, np.arange(6))
    assert spans[:4].min() == 0
    assert spans[:4].max() == 5
    assert (spans[4:].min(), spans[4:].max()) == (5, 8)
    assert costs.valid(replaced_by_grown(costs, spans))


def replaced_by_grown(costs: LayerCosts, spans_N2: Ints) -> Ints:
    return FlowProblem(costs, costs.site_N).repaired(spans_N2)


def test_the_groups_flows_are_a_flow_of_the_swarm_and_tokens_between_groups_only_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_search, "MOST_AT_ONCE", 4)
    monkeypatch.setattr(span_search, "SMALL_SWARM", 0)
    costs = swarm([4] * 5 + [3] * 4, [1e6] * 5 + [500.0] * 4, [0] * 5 + [-1] * 4)
    whole = problem(costs)
    spans = span_search.search(whole, SearchBudget(rounds=20), np.random.default_rng(0))
    assert costs.valid(spans)
    assert whole.flow(spans).tokens_per_s == pytest.approx(max_flow.maximum(costs, spans).tokens_per_s)
    groups = peer_groups.groups(whole, costs.site_N)
    parts = [(group, max_flow.maximum(costs.of_peers(group), spans[group])) for group in groups]
    apart = max_flow.together(costs, parts)
    assert apart.tokens_per_s == pytest.approx(sum(flow.tokens_per_s for _, flow in parts))
    assert 0 < apart.tokens_per_s <= whole.flow(spans).tokens_per_s * (1 + 1e-6)
    assert all({i, j} <= set(groups[0]) or {i, j} <= set(groups[1]) for i, j, _, _ in apart.transfers)


def test_the_groups_flows_are_the_plan_where_no_time_is_left_for_a_flow_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, maximum, limits = [0.0], max_flow.maximum, list[float]()

    def slow(costs: LayerCosts, spans_N2: Ints, progress: SearchProgress | None = None) -> MaxFlow:
        if costs.peers == 9:
            assert progress is not None
            limits.append(progress.clock_left_s())
            return MaxFlow(0.0, costs.seconds_NL, (), costs.rate_N, costs.state_L)
        now[0] += 1.0
        return maximum(costs, spans_N2)

    monkeypatch.setattr(max_flow, "maximum", slow)
    monkeypatch.setattr(span_search, "MOST_AT_ONCE", 4)
    monkeypatch.setattr(span_search, "SMALL_SWARM", 0)
    costs = swarm([4] * 5 + [3] * 4, [1e6] * 5 + [500.0] * 4, [0] * 5 + [-1] * 4)
    whole = problem(costs)
    budget = SearchBudget(20.0, clock=lambda: now[0])
    spans = span_search.search(whole, budget, np.random.default_rng(0))
    assert now[0] <= 20.0 * (1 + span_search.GROUPS_SHARE) / 2 + 1.0  # the first half of the clock does not count
    assert limits == [20.0 - now[0]]
    assert whole.flow(spans).tokens_per_s > 0


def test_a_flow_that_is_not_solved_in_its_seconds_is_nothing_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = list[float | None]()

    def limited(*given: Any, options: dict[str, float], **named: Any) -> Any:
        limits.append(options.get("time_limit"))
        return linprog(*given, **named) if limits[-1] is None else SimpleNamespace(status=1, nit=0)

    monkeypatch.setattr(max_flow, "linprog", limited)
    whole, spans = problem(swarm([4, 4], [1e6, 1e6], [-1, -1])), np.array([[0, 4], [4, 8]])
    budget = SearchBudget(2.5, clock=lambda: 7.0)
    assert whole.evaluate(spans, SearchProgress(budget, 0.0)).value == 0.0
    assert whole.evaluate(spans).value == pytest.approx(160.0)
    assert limits == [2.5, None]


def test_each_token_begins_and_ends_once_so_that_most_visits_of_small_peers_cross_links_twice() -> None:
    """Three quarters of the visits are in the middle or at an end; 4 peers, 4 visits a token, 6 crossings of 40."""
    costs = swarm([2] * 4, [40.0] * 4, [-1] * 4)
    assert problem(costs).bound() == pytest.approx(4 * 40.0 / 10.0 / 6)


def test_what_a_site_can_send_bounds_the_tokens_of_its_peers() -> None:
    """Two sites with half of the model each: every token crosses both links once."""
    costs = swarm([2] * 4, [1e6] * 4, [0, 0, 1, 1], site_rate=200.0)
    assert problem(costs).bound() == pytest.approx(20.0)
    assert problem(replace(costs, site_rate_Z=np.full(2, 1e6))).bound() == pytest.approx(320.0)


def test_the_longest_spans_follow_from_the_memory() -> None:
    assert reaches(swarm([2, 8, 2], [1.0] * 3, [-1] * 3)).tolist() == [
        [2, 3, 4, 5, 6, 7, 8, 8],
        [8] * 8,
        [2, 3, 4, 5, 6, 7, 8, 8],
    ]

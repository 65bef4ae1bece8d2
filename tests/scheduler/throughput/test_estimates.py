"""Estimates of the throughput: no flow exceeds the limit, and it is exact where one resource is scarce."""

from dataclasses import replace

import numpy as np
import pytest

from decentral.scheduler.spans import moves
from decentral.scheduler.throughput import max_flow
from decentral.scheduler.throughput.estimates import Estimates
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.span_search import FlowProblem

FAST = 1e9  # bytes/s


def equal(peers: int, layers: int, link: float = FAST) -> LayerCosts:
    """Peers with 100 tokens/s in one layer alone; a token has 10 bytes, and gossip sends none."""
    ones, link_NN = np.ones(layers), np.full((peers, peers), link)
    np.fill_diagonal(link_NN, 0.0)
    return LayerCosts(
        np.full((peers, layers), 0.01), ones, ones, 0 * ones, 0 * ones, np.full(peers, layers + 0.5), link_NN, 10.0, 1,
        np.full(peers, FAST), np.full(peers, -1), np.zeros(0),
    )  # fmt: skip


def limit(costs: LayerCosts, *spans: tuple[int, int]) -> float:
    return Estimates(costs).of(np.array(spans))[0]


def test_peers_whose_spans_overlap_share_the_layers_in_between() -> None:
    assert limit(equal(3, 4), (0, 2), (1, 3), (2, 4)) == pytest.approx(75.0)


def test_layers_that_lie_apart_are_scarce_together_where_one_peer_holds_both() -> None:
    assert limit(equal(4, 3), (0, 3), (1, 2), (1, 2), (1, 2)) == pytest.approx(50.0)


def test_links_limit_what_the_holders_of_the_next_layer_receive() -> None:
    costs = equal(3, 2, link=200.0)
    assert limit(costs, (0, 1), (1, 2), (1, 2)) == pytest.approx(40.0)
    assert limit(costs, (0, 1), (0, 0), (1, 2)) == pytest.approx(20.0)
    assert limit(replace(costs, rate_N=np.array([250.0, FAST, FAST])), (0, 1), (1, 2), (1, 2)) == pytest.approx(25.0)


def test_gossip_about_its_layers_takes_a_part_of_a_peers_uplink() -> None:
    costs = replace(equal(2, 2), rate_N=np.array([500.0, FAST]), snapshot_L=np.array([100.0, 0.0]))
    assert limit(costs, (0, 1), (1, 2)) == pytest.approx(40.0)


def test_a_layer_without_a_holder_limits_the_flow_to_nothing() -> None:
    assert limit(equal(2, 3), (0, 1), (2, 3)) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_no_flow_exceeds_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = equal(5, 6)
    link_NN = rng.lognormal(0, 1, (5, 5)) * 500
    link_NN = np.minimum(link_NN, link_NN.T)
    np.fill_diagonal(link_NN, 0.0)
    speeds, memory = rng.choice([1.0, 2.0, 4.0], 5), rng.choice([1.5, 2.5, 3.5, 4.5], 5)
    costs = replace(costs, link_NN=link_NN, memory_N=memory, seconds_NL=costs.seconds_NL / speeds[:, None])
    problem = FlowProblem(costs, np.zeros(5, np.int64))
    for _ in range(5):
        spans = problem.repaired(moves.filled(problem, rng))
        flow = max_flow.maximum(costs, spans).tokens_per_s
        assert flow <= problem.limit(spans) * (1 + 1e-6)

"""Chains in which a micro-batch is on its way for the shortest time."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from decentral.core import config
from decentral.core import rng as chance
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.planned_in_flight import Pipeline, with_steps
from decentral.scheduler.throughput.planning import problem_of
from decentral.scheduler.throughput.short_chains import short_chains
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.arrays import Floats, Ints

WAITS = 8  # micro-batches in a step
DEVICE = 1000.0  # tokens/s of a device with one layer


def pipeline(delay_NN: Floats, layers: int, fit: float = 1.0) -> Pipeline:
    """Return the costs of micro-batches of ten tokens for equal peers, each with memory for `fit` layers."""
    peers, ones = len(delay_NN), np.ones(layers)
    link_NN = np.where(np.eye(peers) > 0, 0.0, 1e9)
    costs = LayerCosts(
        seconds_NL=np.full((peers, layers), 1 / DEVICE),
        state_L=1000 * ones,
        fetched_L=ones,
        activation_L=ones,
        snapshot_L=ones,
        memory_N=np.full(peers, 1100.0 * fit),
        link_NN=link_NN,
        hidden_bytes=100.0,
        holders=1,
        rate_N=np.full(peers, 1e9),
        site_N=np.full(peers, -1),
        site_rate_Z=np.zeros(0),
    )
    return Pipeline(costs, delay_NN, context=10, sequences=1)


def apart(seed: int, peers: int) -> Floats:
    """Return the delays between peers at random places."""
    places_N2 = chance.arrays(seed, "places").random((peers, 2))
    return np.asarray(0.3 * np.linalg.norm(places_N2[:, None] - places_N2[None, :], axis=2))


def chained(costs: Pipeline, waits: int | None = WAITS) -> list[Ints]:
    """Return both forms of chains of all peers."""
    problem = FlowProblem(costs.costs, np.zeros(costs.costs.peers, np.int64))
    return short_chains(problem, [[np.arange(costs.costs.peers)]], costs, waits)[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_chain_is_the_fastest_of_all_orders(seed: int) -> None:
    costs = pipeline(apart(seed, 6), layers=4)
    ways = [[(peer, at, at + 1) for at, peer in enumerate(order)] for order in itertools.permutations(range(6), 4)]
    best = max(with_steps(costs, [(DEVICE, hops)], WAITS)[0] for hops in ways)
    spans_N2 = chained(costs)[0]
    order = [peer for peer in np.argsort(spans_N2[:, 0]).tolist() if spans_N2[peer, 1]]
    found = with_steps(costs, [(DEVICE, [(peer, *spans_N2[peer].tolist()) for peer in order])], WAITS)[0]
    assert found == pytest.approx(best)


def test_a_chain_of_steps_that_wait_for_none_uses_memory_where_it_is_short() -> None:
    """Peer 0 keeps one micro-batch, so it is the last hop: there a micro-batch stays for the shortest time."""
    costs = pipeline(np.full((3, 3), 0.1), layers=3)
    memory_N = costs.costs.memory_N
    memory_N[0] = 1002.0
    assert chained(costs, waits=None)[0][0].tolist() == [2, 3]


def test_peers_form_as_many_chains_as_they_can() -> None:
    """Six peers in two places, with two layers each: a chain of three in each place."""
    here = np.array([0, 1, 0, 1, 0, 1])
    delay_NN = np.where(here[:, None] == here[None, :], 0.001, 0.2)
    alone_N2, beside_N2 = chained(pipeline(delay_NN, layers=6, fit=2.0))
    for place in (0, 1):
        assert sorted(alone_N2[here == place].tolist()) == [[0, 2], [2, 4], [4, 6]]
    np.testing.assert_array_equal(alone_N2, beside_N2)


def test_chains_exchange_peers_where_both_together_gain() -> None:
    """The first chain takes the nearest peers, and would leave the second one only peers that are far apart."""
    places = np.array([0.0, 0.1, 0.3, 0.9])
    delay_NN = np.abs(places[:, None] - places[None, :])
    delay_NN[0, 2] = delay_NN[2, 0] = delay_NN[1, 3] = delay_NN[3, 1] = 0.11
    alone_N2 = chained(pipeline(delay_NN, layers=2))[0]
    assert sorted(alone_N2[[0, 2]].tolist()) == sorted(alone_N2[[1, 3]].tolist()) == [[0, 1], [1, 2]]


def test_a_peer_left_over_takes_the_place_with_the_smallest_detour() -> None:
    """Peer 2 is near peer 0 and far from peer 1, so it takes the place of peer 1 beside peer 0."""
    delay_NN = np.array([[0.0, 0.01, 0.05], [0.01, 0.0, 0.2], [0.05, 0.2, 0.0]])
    alone_N2, beside_N2 = chained(pipeline(delay_NN, layers=2))
    assert not alone_N2[2].any()
    assert beside_N2[2].tolist() == beside_N2[1].tolist()


def test_plain_chains_share_no_peer_and_the_fastest_come_alone_too() -> None:
    """Two fast peers and two that are ten times slower, each with memory for three of the four layers."""
    costs = pipeline(np.full((4, 4), 0.01), layers=4, fit=3.0)
    seconds_NL = costs.costs.seconds_NL * np.array([1, 10, 1, 10])[:, None]
    costs = replace(costs, costs=replace(costs.costs, seconds_NL=seconds_NL))
    problem = FlowProblem(costs.costs, np.zeros(4, np.int64))
    fast, everyone = short_chains(problem, [[np.arange(4)]], costs, WAITS)[1]
    assert sorted(fast.tolist()) == [[0, 0], [0, 0], [0, 2], [2, 4]]
    assert not fast[1].any()
    assert sorted(everyone.tolist()) == [[0, 2], [0, 2], [2, 4], [2, 4]]


def test_peers_that_cannot_hold_the_model_form_no_chain() -> None:
    assert not np.any(chained(pipeline(apart(0, 3), layers=4)))


def test_a_search_begins_from_chains_where_no_peer_holds_much_of_the_model() -> None:
    """Two of 34 layers fit on each of 24 devices in ten cities: the first starts reach most of what searches find.

    Without short chains, starts reached at most 128 tokens/s, and searches of 10 s 117 to 153, by the seed. Peers
    beside a chain make its steps wait for those of others.
    """
    keys = ["model.depth=32", "model.width=4096", "model.vocabulary=32000", "model.context=2048"]
    problem = problem_of(topology.load("24-in-ten-cities"), config.load(None, keys), 1, 0.35)
    first, second, *_ = problem.starts(chance.arrays(0, "starts"))
    assert problem.evaluate(first).value > 150
    assert problem.evaluate(first).value > problem.evaluate(second).value

"""Replanning spans: what moves, who is placed, and what moves cost."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from decentral.scheduler.throughput import max_flow, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget

AHEAD_S = 600.0


def equal(peers: int, layers: int, held: int) -> LayerCosts:
    """Equal peers on equal links; each can hold so many of the layers."""
    ones, link = np.ones(layers), np.full((peers, peers), 1e6)
    np.fill_diagonal(link, 0.0)
    seconds, memory = np.full((peers, layers), 0.01), np.full(peers, held * 1.1)
    free, nowhere = np.full(peers, np.inf), np.full(peers, -1)
    return LayerCosts(seconds, ones, ones / 9, ones * 0.01, ones, memory, link, 100.0, 1, free, nowhere, np.zeros(0))


def replanned(costs: LayerCosts, old: list[tuple[int, int]], seconds_ahead: float = AHEAD_S) -> tuple[Ints, float]:
    region_N = np.zeros(costs.peers, np.int64)
    return span_search.spans_replan(costs, region_N, np.array(old), SearchBudget(rounds=20), 0, seconds_ahead)


def test_nothing_moves_when_the_spans_are_the_best_already() -> None:
    spans, tokens = replanned(equal(4, 4, 2), [(0, 2), (2, 4), (0, 2), (2, 4)])
    assert spans.tolist() == [[0, 2], [2, 4], [0, 2], [2, 4]]
    assert tokens == pytest.approx(100 * AHEAD_S)


def test_a_newcomer_takes_the_layers_that_the_fewest_hold() -> None:
    spans, _ = replanned(equal(4, 4, 2), [(0, 2), (2, 4), (0, 2), (0, 0)])
    assert spans[3].tolist() == [2, 4]


def test_a_layer_without_a_holder_gets_one() -> None:
    costs = equal(3, 4, 2)
    spans, _ = replanned(costs, [(0, 2), (0, 2), (1, 3)])
    assert (max_flow.held(costs, spans).sum(axis=0) >= 1).all()


def test_the_slowest_download_of_new_layers_costs_its_time() -> None:
    costs = equal(4, 4, 2)
    old, new = np.array([[0, 2], [2, 4], [0, 2], [0, 0]]), np.array([[0, 2], [2, 4], [0, 2], [2, 4]])
    rate = max_flow.maximum(costs, new).tokens_per_s
    download_s = 2 / 9 / 1e6  # two layers of a ninth of a byte
    assert span_search.tokens_ahead(costs, old, new, 1e-6) == pytest.approx(rate * (1e-6 - download_s))
    assert span_search.tokens_ahead(costs, old, new, download_s / 2) == 0.0


def test_spans_are_valid_where_each_fits_with_its_least_micro_batches_in_flight() -> None:
    costs = replace(equal(1, 6, 3), holders=0, memory_N=np.array([3.05]))
    found = set()
    for first, last in itertools.combinations(range(7), 2):
        fits = costs.bytes_of(first, last, costs.least_in_flight(first, last)) <= costs.memory_N[0]
        assert costs.fits(0, first, last) == costs.valid(np.array([[first, last]])) == fits
        found.add((fits, costs.bytes_of(first, last, 1) <= costs.memory_N[0]))
    assert (False, True) in found  # of one span, one micro-batch fits, and those in flight do not

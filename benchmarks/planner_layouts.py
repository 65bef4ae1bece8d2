"""The greatest throughput of a small swarm, over all spans that fit: `best_flow`, by enumeration with bounds.

A layout gives each peer a span. A peer with a part of its span computes and sends no more than before, except that
gossip takes less of its uplink. So the flow of a layout, without gossip of the peers that are still undecided, bounds
that of all layouts whose decided peers hold the same, and whose other peers hold a part of their spans. The enumeration
begins with the layouts of longest spans, none decided, the highest bound first, and decides one peer after another.
"""

import heapq
import itertools
from dataclasses import replace

import numpy as np

from decentral.scheduler.throughput import link_limits, max_flow
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.max_flow import MOVE_COST
from decentral.scheduler.topology.arrays import Ints

TOLERANCE = 1e-3  # no layout exceeds the flow found by a larger share

Layout = tuple[tuple[int, int], ...]


def best_flow(costs: LayerCosts, known: float) -> tuple[float, int]:
    """Return the tokens/s of the best spans, within TOLERANCE, and the number of linear programmes that showed it.

    Args:
        costs: What layers cost each peer; no peer has a site.
        known: tokens/s of some layout, below which none is looked at.
    """
    longest = [
        [(first, last) for first, last in _spans(costs, peer) if not _fits_longer(costs, peer, first, last)]
        for peer in range(costs.peers)
    ]
    best, solved, number = known, 0, itertools.count()
    waiting: list[tuple[float, int, Layout, int]] = []  # less the bound, a number, the spans, how many are decided
    for layout in itertools.product(*longest):
        waiting.append((-_bound(costs, layout, 0), next(number), layout, 0))
        solved += 1
    heapq.heapify(waiting)
    while waiting and -waiting[0][0] > best * (1 + TOLERANCE):
        _, _, layout, decided = heapq.heappop(waiting)
        first, last = layout[decided]
        parts = [(0, 0), *((a, b) for a in range(first, last) for b in range(a + 1, last + 1))]
        for part in parts:
            chosen = (*layout[:decided], part, *layout[decided + 1 :])
            solved += 1
            if decided + 1 == costs.peers:
                valid = costs.valid(np.array(chosen))
                best = max(best, max_flow.maximum(costs, np.array(chosen)).tokens_per_s) if valid else best
                continue
            bound = _bound(costs, chosen, decided + 1)
            if bound > best * (1 + TOLERANCE):
                heapq.heappush(waiting, (-bound, next(number), chosen, decided + 1))
    return best, solved


def _spans(costs: LayerCosts, peer: int) -> list[tuple[int, int]]:
    return [(first, last) for first in range(costs.layers) for last in range(first + 1, costs.reach(peer, first) + 1)]


def _fits_longer(costs: LayerCosts, peer: int, first: int, last: int) -> bool:
    before = first > 0 and costs.fits(peer, first - 1, last)
    return before or (last < costs.layers and costs.fits(peer, first, last + 1))


def _bound(costs: LayerCosts, layout: Layout, decided: int) -> float:
    """Return tokens/s that no layout exceeds in which the peers after the first `decided` hold parts of their spans."""
    spans_N2: Ints = np.array(layout)
    holds_NL = max_flow.held(costs, spans_N2)
    holds_NL[decided:] = False
    rate_N = link_limits.peer_left(costs, holds_NL)
    link_NN = np.minimum(link_limits.pair_left(costs, np.arange(costs.peers)), np.minimum.outer(rate_N, rate_N))
    np.fill_diagonal(link_NN, 0.0)
    silent = replace(costs, rate_N=rate_N, link_NN=link_NN, snapshot_L=0 * costs.snapshot_L)
    return max_flow.maximum(silent, spans_N2).tokens_per_s / (1 - MOVE_COST * (costs.layers - 1))

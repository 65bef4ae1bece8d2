"""Find spans with which a swarm's memory holds all layers of a model, however tight it is. See `covering`."""

from collections import defaultdict

import numpy as np

from decentral.scheduler.throughput.layer_costs import LayerCosts, reaches
from decentral.scheduler.topology.arrays import Ints

# Of the partial layouts with equally many peers, this many are kept; fewer if there are many kinds of peers.
LAYOUTS_KEPT = 1024
LAYOUTS_TRIED = 20_000  # about this many partial layouts are tried for each number of peers
LEAST_LAYOUTS_KEPT = 16

Reach = tuple[tuple[int, int], ...]
"""For each layer: of the spans in a peer's memory that begin at this layer or before it, the one that ends last."""

Layout = tuple[tuple[int, tuple[int, int]], ...]
"""The spans placed so far, which hold the model's first layers, each with the kind of its peer."""


def covering(costs: LayerCosts) -> Ints | None:
    """Return spans that together hold each layer and fit into memory, or None if none are found.

    Peers are placed one after another, from the first layer on, each with the span that reaches farthest. Peers whose
    memories allow the same spans are one kind. Of the layouts with equally many peers, those that reach farthest are
    kept (beam search); with up to 12 peers all are kept, so the search is complete. Peers that are not needed get
    (0, 0).
    """
    by_reach = _by_reach(costs)
    reaches, peers = list(by_reach), list(by_reach.values())
    most = min(LAYOUTS_KEPT, max(LEAST_LAYOUTS_KEPT, LAYOUTS_TRIED // len(reaches)))
    kept: list[tuple[int, Layout]] = [(0, ())]
    while kept:
        longer: dict[tuple[int, ...], tuple[int, Layout]] = {}
        for reached, layout in kept:
            placed = sorted(kind for kind, _ in layout)
            for kind, reach in enumerate(reaches):
                span = reach[reached]
                if span[1] <= reached or placed.count(kind) == len(peers[kind]):
                    continue
                if span[1] == costs.layers:
                    return _spans(costs.peers, peers, (*layout, (kind, span)))
                state = tuple(sorted((*placed, kind)))
                if span[1] > longer.get(state, (0, ()))[0]:
                    longer[state] = span[1], (*layout, (kind, span))
        kept = sorted(longer.values(), reverse=True)[:most]
    return None


def _by_reach(costs: LayerCosts) -> dict[Reach, list[int]]:
    """Return the peers' numbers, grouped by the spans that fit into their memories."""
    peers: dict[Reach, list[int]] = defaultdict(list)
    known: dict[bytes, Reach] = {}
    for peer, reach_L in enumerate(reaches(costs)):
        key = reach_L.tobytes()
        if key not in known:
            spans, best = [], (0, 0)
            for first, last in enumerate(reach_L.tolist()):
                best = (first, last) if last > max(first, best[1]) else best
                spans.append(best)
            known[key] = tuple(spans)
        peers[known[key]].append(peer)
    return peers


def _spans(count: int, peers: list[list[int]], layout: Layout) -> Ints:
    spans, unplaced = np.zeros((count, 2), np.int64), [iter(some) for some in peers]
    for kind, span in layout:
        spans[next(unplaced[kind])] = span
    return spans

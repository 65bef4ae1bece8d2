"""New spans from old ones, after peers left, joined, or changed their speed: moving layers costs time too.

    worth of spans = tokens/s * (seconds ahead - the seconds that their moves take)

A peer that keeps its layers downloads nothing. Others download what they did not hold, all at the same time, and so the
slowest download counts.
"""

import numpy as np

from decentral.core import rng as chance
from decentral.scheduler.throughput import max_flow, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget


def spans_replan(
    costs: LayerCosts, region_N: Ints, old_N2: Ints, budget: SearchBudget, seed: int, seconds_ahead: float
) -> tuple[Ints, float]:
    """Spans after a change, N x 2, and the tokens that they train within `seconds_ahead`.

    `old_N2` has (0, 0) for newcomers. The candidates are the old spans with newcomers placed and layers without enough
    holders repaired, and what a search finds from there.
    """
    kept = np.array([span if costs.fits(i, *map(int, span)) else (0, 0) for i, span in enumerate(old_N2)])
    patched = span_search.repaired(costs, _newcomers_placed(costs, kept))
    found = span_search.search(costs, region_N, budget, chance.arrays(seed, "replan"), first=patched)
    options = [spans for spans in (patched, found) if costs.valid(spans)] or [found]
    scored = [(tokens_ahead(costs, old_N2, spans, seconds_ahead), i) for i, spans in enumerate(options)]
    tokens, best = max(scored)
    return options[best], tokens


def tokens_ahead(costs: LayerCosts, old_N2: Ints, new_N2: Ints, seconds_ahead: float) -> float:
    """Tokens that the new spans train in `seconds_ahead`, of which the slowest download of layers is lost."""
    before_NL, after_NL = max_flow.held(costs, old_N2), max_flow.held(costs, new_N2)
    fetched = ((after_NL & ~before_NL) * costs.state_L).sum(axis=1) / 3  # weights and two moments of nine values
    rate = np.maximum(costs.link_NN.max(axis=1), 1.0)
    pause = float((fetched / rate).max())
    return max_flow.maximum(costs, new_N2).tokens_per_s * max(0.0, seconds_ahead - pause)


def _newcomers_placed(costs: LayerCosts, kept_N2: Ints) -> Ints:
    """Peers without a span take the layers that the fewest hold."""
    placed = kept_N2.copy()
    for peer in np.flatnonzero(kept_N2[:, 0] >= kept_N2[:, 1]):
        layer = int(np.argmin(max_flow.held(costs, placed).sum(axis=0)))
        placed[peer] = span_search.grown(costs, int(peer), layer, layer + 1)
    return placed

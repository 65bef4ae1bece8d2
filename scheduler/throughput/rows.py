"""Place peers in rows: spans that end where the next begin, so that tokens change peers seldom. Start at `in_rows`.

Spans of different lengths seldom end together, and a token that enters a span in its middle crosses the links of its
peer for few layers. So peers of equal memory form rows of their own. In each row, a segment of the model gets as many
peers as it needs to supply as many tokens/s as every other segment. In a group of regions (`in_rows_of_regions`), each
region gets a range of layers first, in proportion to its speed, so that tokens cross between regions seldom; then the
region's peers form rows within that range.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.peer_kinds import anywhere
from decentral.scheduler.topology.arrays import Floats, Ints


class Supplies(Protocol):
    """The part of a search problem's interface that rows need; `FlowProblem` (span_search.py) implements it."""

    @property
    def costs(self) -> LayerCosts:
        """Return what layers cost each peer."""

    @property
    def reach_NL(self) -> Ints:
        """Return the end of each peer's longest span from each layer."""

    def supplies(self, peers_P: Ints, spans_P2: Ints) -> Floats:
        """Return the tokens/s, (P,), of peers that always compute these spans, as their links allow."""


def in_rows(problem: Supplies, peers_G: Ints, first: int, last: int) -> Ints:
    """Return spans, (G, 2), in which these peers form rows from layer `first` to `last`; (0, 0) for a peer left over.

    Peers with too little memory for a row with their equals join the row of the next smaller memory. Peers that cannot
    complete a row take the segments of other rows that they can hold and that supply least.
    """
    spans_G2, reach_GL = np.zeros((len(peers_G), 2), np.int64), problem.reach_NL[peers_G]
    supply_L = np.zeros(problem.costs.layers)
    length_G = np.maximum(0, np.minimum(reach_GL[:, first:last], last) - np.arange(first, last)).sum(axis=1)
    order = np.argsort(-length_G, kind="stable")
    row: list[int] = []
    edges = {first}
    for end, place in enumerate(order.tolist(), 1):
        row.append(place)
        if end < len(order) and length_G[order[end]] == length_G[place]:
            continue
        cuts = _cuts(reach_GL[place], first, last)
        if cuts[-1] == last and len(row) >= len(cuts) - 1:
            segments = np.column_stack((cuts[:-1], cuts[1:]))
            _dealt(problem, peers_G, row, segments, spans_G2, supply_L)
            edges |= set(cuts[:-1])
            row = []
    starts = np.array(sorted(edges))
    for place in row:
        fitting = starts[reach_GL[place, starts] > starts]
        if len(fitting):
            ends = np.minimum(reach_GL[place, fitting], last)
            least = int(np.argmin([supply_L[a:b].mean() for a, b in zip(fitting, ends, strict=True)]))
            span = spans_G2[place] = fitting[least], ends[least]
            supply_L[span[0] : span[1]] += problem.supplies(peers_G[[place]], np.array([span]))[0]
    return spans_G2


def in_rows_of_groups(problem: Supplies, region_N: Ints, groups: Sequence[Ints]) -> Ints:
    """Return spans_N2 in which each group of peers forms rows, by `in_rows_of_regions`."""
    spans_N2 = np.zeros((problem.costs.peers, 2), np.int64)
    for group in groups:
        spans_N2[group] = in_rows_of_regions(problem, region_N[group], group)
    return spans_N2


def in_rows_of_regions(problem: Supplies, region_G: Ints, peers_G: Ints) -> Ints:
    """Return spans, (G, 2), of a group of peers: each region has a range of layers, and its peers form rows within it.

    Peers that may be anywhere (peer_kinds.py) count as one region.

    Args:
        problem: The whole swarm.
        region_G: Each peer's region as a number.
        peers_G: The indices of the group's peers.
    """
    costs = problem.costs
    region_G = np.where(anywhere(costs)[peers_G], -1, region_G)
    regions = np.unique(region_G)
    longest_G = (problem.reach_NL[peers_G] - np.arange(costs.layers)).max(axis=1)
    speed_G = 1 / costs.seconds_NL[peers_G].sum(axis=1)
    most_R, speed_R = (
        np.array([float(of_peers[region_G == region].sum()) for region in regions]) for of_peers in (longest_G, speed_G)
    )
    share_R = shared(costs.layers, most_R, speed_R)
    ends = np.round(np.cumsum(share_R)).astype(np.int64)
    spans_G2, begin = np.zeros((len(peers_G), 2), np.int64), 0
    for region, end in zip(regions, np.minimum(ends, costs.layers).tolist(), strict=True):
        inside = np.flatnonzero(region_G == region)
        if end > begin:
            spans_G2[inside] = in_rows(problem, peers_G[inside], begin, end)
            begin = end
    return spans_G2


def _cuts(reach_L: Ints, first: int, last: int) -> list[int]:
    """Return the edges of the fewest spans from `first` to `last` that fit; they end early if a layer does not fit."""
    cuts = [first]
    while cuts[-1] < last and (end := min(last, int(reach_L[cuts[-1]]))) > cuts[-1]:
        cuts.append(end)
    return cuts


def _dealt(problem: Supplies, peers_G: Ints, row: list[int], segments: Ints, spans_G2: Ints, supply_L: Floats) -> None:
    """Give each peer of a row the segment that supplies least so far, the peers that supply most first."""
    count = len(segments)
    rates_RS = problem.supplies(np.repeat(peers_G[row], count), np.tile(segments, (len(row), 1))).reshape(-1, count)
    total_S = np.zeros(count)
    for at in np.argsort(-rates_RS.max(axis=1), kind="stable").tolist():
        segment = int(np.argmin(total_S))
        total_S[segment] += rates_RS[at, segment]
        spans_G2[row[at]] = segments[segment]
    for (first, last), supply in zip(segments.tolist(), total_S.tolist(), strict=True):
        supply_L[first:last] += supply


def shared(amount: float, most_R: Floats, weight_R: Floats) -> Floats:
    """Divide `amount` in proportion to `weight_R`, so that no share exceeds its limit in `most_R`.

    If the limits together are below `amount`, return the limits.
    """
    if most_R.sum() <= amount:
        return most_R
    share_R, free = np.zeros(len(most_R)), np.ones(len(most_R), np.bool_)
    while True:
        share_R[free] = (amount - share_R[~free].sum()) * weight_R[free] / weight_R[free].sum()
        over = free & (share_R > most_R)
        if not over.any():
            return share_R
        share_R[over], free[over] = most_R[over], False

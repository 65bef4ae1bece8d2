"""Bottleneck perfect matching of two stages, and the cheapest open path through all stages.

Start at `bottleneck_matching` and `stage_order`. Both are parts of the cost of Yuan et al. (arXiv 2206.01288, section
3.2): the devices of two neighbouring stages are matched so that the slowest of their links is as fast as possible, and
the stages are ordered along the cheapest open path (travelling salesman without return).
"""

import numpy as np

from decentral.core.compiled import compiled, inner
from decentral.scheduler.topology.arrays import Floats, Ints

EXACT_STAGES = 14  # for more stages, their order is found by a heuristic; 14 * 14 * 2**14 steps take 10 ms


def order_s(stages: int) -> float:
    """Return the seconds in which `held_karp` finds the best order of stages on a quiet core."""
    return 2.5e-9 * float(stages**2 << stages)


@compiled
def bottleneck_matching(cost_RR: Floats, limit: float, partner_R: Ints) -> float:
    """Find the perfect matching whose largest edge cost is smallest; return that cost, or inf if it exceeds `limit`.

    `cost_RR` has the edge costs in seconds. The row that is matched with each column is written to `partner_R`.
    """
    return matching_above(cost_RR, _lower_bound(cost_RR), limit, partner_R)


@inner
def matching_above(cost_RR: Floats, bound: float, limit: float, partner_R: Ints) -> float:
    """Find the perfect matching whose largest edge cost is smallest; return that cost, or inf if it exceeds `limit`.

    `bound` must be a lower bound on the result. The time is O(R^3), mostly near O(R^2).
    From each unmatched row an alternating tree grows by its cheapest edge (Dijkstra's algorithm with max in place of
    +). The largest edge cost therefore rises only as far as Hall's condition requires.
    """
    size = cost_RR.shape[0]
    value = bound
    if value > limit:
        return np.inf
    row_of = partner_R
    slack = np.empty(size)
    came_from = np.empty(size, np.int64)
    column_of_row = np.empty(size, np.int64)
    for i in range(size):
        row_of[i] = column_of_row[i] = -1
    for row in range(size):  # match greedily along edges that cost no more than the lower bound
        for column in range(size):
            if row_of[column] < 0 and cost_RR[row, column] <= value:
                row_of[column] = row
                column_of_row[row] = column
                break
    for root in range(size):
        if column_of_row[root] >= 0:
            continue
        done = np.zeros(size, np.bool_)
        row = root
        for column in range(size):
            slack[column] = np.inf
        while True:
            best = -1
            for column in range(size):
                if not done[column]:
                    if cost_RR[row, column] < slack[column]:
                        slack[column] = cost_RR[row, column]
                        came_from[column] = row
                    if best < 0 or slack[column] < slack[best]:
                        best = column
            if slack[best] > value:
                value = slack[best]
                if value > limit:
                    return np.inf
            done[best] = True
            if row_of[best] < 0:
                break
            row = row_of[best]
        column = best
        while column >= 0:  # flip the alternating path from the free column back to the root
            row = came_from[column]
            before = column_of_row[row]
            row_of[column] = row
            column_of_row[row] = column
            column = before
    return value


@inner
def _lower_bound(cost_RR: Floats) -> float:
    """Return a lower bound of the largest edge in any perfect matching: the maximum of all row and column minima."""
    size = cost_RR.shape[0]
    bound = 0.0
    for i in range(size):
        row, column = np.inf, np.inf
        for j in range(size):
            row = min(row, cost_RR[i, j])
            column = min(column, cost_RR[j, i])
        bound = max(bound, row, column)
    return bound


@compiled
def held_karp(cost_SS: Floats) -> Ints:
    """Return the stages in the order of the cheapest open path, exactly (Held and Karp 1962).

    `cost_SS` has the cost of each pair of neighbouring stages. Time grows as S^2 2^S.
    """
    count = cost_SS.shape[0]
    full = 1 << count
    best = np.full((full, count), np.inf)
    before = np.full((full, count), -1, np.int64)
    for last in range(count):
        best[1 << last, last] = 0.0
    for visited in range(full):
        for last in range(count):
            here = best[visited, last]
            if here == np.inf:
                continue
            for following in range(count):
                if not visited >> following & 1:
                    there = visited | 1 << following
                    cost = here + cost_SS[last, following]
                    if cost < best[there, following]:
                        best[there, following] = cost
                        before[there, following] = last
    order = np.empty(count, np.int64)
    visited = full - 1
    last = int(np.argmin(best[visited]))
    for position in range(count - 1, -1, -1):
        order[position] = last
        visited, last = visited & ~(1 << last), before[visited, last]
    return order


@compiled
def improved_path(cost_SS: Floats, order_S: Ints) -> Ints:
    """Return the open path `order_S`, improved by 2-opt and Or-opt moves until neither helps.

    It replaces `held_karp` if there are more than EXACT_STAGES stages.
    """
    order = order_S.copy()
    count = order.size
    better = True
    while better:
        better = False
        for first in range(count):
            for last in range(first + 1, count):
                gain = 0.0
                if first > 0:
                    gain += cost_SS[order[first - 1], order[first]] - cost_SS[order[first - 1], order[last]]
                if last < count - 1:
                    gain += cost_SS[order[last], order[last + 1]] - cost_SS[order[first], order[last + 1]]
                if gain > 1e-12:
                    order[first : last + 1] = order[first : last + 1][::-1].copy()
                    better = True
        for source in range(count):
            moved = _best_insertion(cost_SS, order, source)
            if moved >= 0:
                stage = order[source]
                rest = np.concatenate((order[:source], order[source + 1 :]))
                order[:moved], order[moved], order[moved + 1 :] = rest[:moved], stage, rest[moved:]
                better = True
    return order


@inner
def _best_insertion(cost_SS: Floats, order: Ints, source: int) -> int:
    """Return the cheapest position in the path for the stage at `source`; -1 if its present position is as cheap."""
    count = order.size
    stage = order[source]
    rest = np.concatenate((order[:source], order[source + 1 :]))
    best, place = _insertion_cost(cost_SS, rest, source, stage) - 1e-12, -1
    for position in range(count):
        cost = _insertion_cost(cost_SS, rest, position, stage)
        if cost < best:
            best, place = cost, position
    return place


@inner
def _insertion_cost(cost_SS: Floats, rest: Ints, position: int, stage: int) -> float:
    """Return the cost that inserting `stage` before rest[position] adds to the path."""
    added = 0.0
    if position > 0:
        added += cost_SS[rest[position - 1], stage]
    if position < rest.size:
        added += cost_SS[stage, rest[position]]
    if 0 < position < rest.size:
        added -= cost_SS[rest[position - 1], rest[position]]
    return added


def stage_order(cost_SS: Floats, start_S: Ints) -> Ints:
    """Return the cheapest order of the stages: exact for up to EXACT_STAGES stages, else improved from `start_S`."""
    if cost_SS.shape[0] <= EXACT_STAGES:
        return held_karp(cost_SS)
    return improved_path(cost_SS, start_S)

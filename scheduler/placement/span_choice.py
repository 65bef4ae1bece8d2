"""Which layers a peer takes when it joins: the span within its memory that raises the swarm's flow most.

As long as a layer has no holder nothing trains, so such layers come first. Then comes the span with which the holders'
speeds carry the most tokens. Several spans may raise the flow equally, or, while several cuts are equally tight, not at
all; of those the one is chosen whose layers have the least computing behind them. The flow through given spans counts
computing, not links, and has a closed form: a cut S of fragments cannot carry more than the peers that hold any of S
compute,

    tokens/s = min over S of  sum of the speeds of the peers that hold some of S / share of the model that S is

(Hall's theorem with capacities). A peer's span is an interval, so the peers that hold nothing of S are those that lie
within one gap of S, and the best gaps are found by a walk over the fragments (Dinkelbach's iteration for the ratio).

A peer that has chosen announces its span in the DHT and reads the records once more: of two peers that chose at the
same time the later one yields.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decentral.core.fragments import Fragment

Floats = NDArray[np.float64]

DINKELBACH_ROUNDS = 50  # at most; a handful is usual
EQUAL_FLOWS = 1e-6  # relative difference below which two flows, or speeds, count as equal


@dataclass(frozen=True, slots=True)
class Holder:
    """A peer with fragments [begin, end), and its speed in tokens/s if it computed the whole model."""

    begin: int
    end: int
    tokens_per_s: float


def holder_of(fragments: Sequence[Fragment], first: int, last: int, tokens_per_s: float) -> Holder:
    """A peer with layers [first, last) as a holder of the whole fragments among them."""
    begin = bisect.bisect_left(fragments, first, key=lambda one: one.first)
    end = bisect.bisect_right(fragments, last, key=lambda one: one.last)
    return Holder(begin, end, tokens_per_s) if begin < end else Holder(0, 0, tokens_per_s)


def choose(
    fragments: Sequence[Fragment], others: Sequence[Holder], tokens_per_s: float, reach: Callable[[int], int]
) -> Holder:
    """The best of the widest spans that fit. `reach(begin)`: the end of the widest span that begins there.

    Ties go to the earliest span. `others` and `tokens_per_s` have speeds in tokens/s of the whole model.
    """
    count, share_F = len(fragments), _shares(fragments)
    options = [Holder(begin, reach(begin), tokens_per_s) for begin in range(count) if reach(begin) > begin]
    widest = [one for one in options if not any(o.begin < one.begin and one.end <= o.end for o in options)]
    behind_F, uncovered_F = np.zeros(count), np.ones(count, dtype=bool)
    for other in others:  # a peer's speed is taken as spread evenly over its span
        span = slice(other.begin, other.end)
        behind_F[span] += other.tokens_per_s / max(1e-300, share_F[span].sum())
        uncovered_F[span] = False
    flow_O = _flows(share_F, others, widest)
    top, most = max(1e-300, float(flow_O.max())), max(1e-300, float(behind_F.max()))

    def worth(index: int) -> tuple[int, int, int, int]:
        span = slice(widest[index].begin, widest[index].end)
        carried, behind = flow_O[index] / top, share_F[span] @ behind_F[span] / share_F[span].sum() / most
        uncovered = int(uncovered_F[span].sum())
        return uncovered, round(float(carried) / EQUAL_FLOWS), -round(float(behind) / EQUAL_FLOWS), -span.start

    return widest[max(range(len(widest)), key=worth)]


def flow(fragments: Sequence[Fragment], holders: Sequence[Holder]) -> float:
    """Tokens/s that these spans can carry, if each peer computes where it is needed most and links cost nothing."""
    return float(_flows(_shares(fragments), holders, [Holder(0, 0, 0.0)])[0])


def _shares(fragments: Sequence[Fragment]) -> Floats:
    parameters = np.array([one.parameters for one in fragments], dtype=np.float64)
    shares: Floats = parameters / parameters.sum()
    return shares


def _flows(share_F: Floats, holders: Sequence[Holder], options: Sequence[Holder]) -> Floats:
    """The flow (tokens/s) of the holders together with each single one of the options."""
    speed_AB = np.zeros((len(share_F) + 1, len(share_F) + 1))
    for holder in holders:
        speed_AB[holder.begin, holder.end] += holder.tokens_per_s if holder.end > holder.begin else 0.0
    # Entry [a, b] of an option's table is the speed of the peers whose spans lie within fragments [a, b).
    within_AB = speed_AB[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    within_OAB = np.repeat(within_AB[None], len(options), axis=0)
    for index, one in enumerate(options):
        within_OAB[index, : one.begin + 1, one.end :] += one.tokens_per_s if one.end > one.begin else 0.0
    total_O = within_OAB[:, 0, -1].copy()
    rate_O = total_O.copy()
    for _ in range(DINKELBACH_ROUNDS):
        speed_O, part_O = _tightest(share_F, within_OAB, total_O, rate_O)
        tighter_O = (part_O > 0) & (speed_O < rate_O * part_O * (1 - 1e-9))
        if not tighter_O.any():
            break
        rate_O = np.where(tighter_O, speed_O / np.maximum(part_O, 1e-300), rate_O)
    return rate_O


def _tightest(share_F: Floats, within_OAB: Floats, total_O: Floats, rate_O: Floats) -> tuple[Floats, Floats]:
    """For each option (speed, share) of the non-empty cut S that has the least speed - rate * share."""
    count, many = len(share_F), np.arange(len(rate_O))
    before_F = np.concatenate(([0.0], share_F.cumsum()))
    # The last axis has the cost of the gaps up to b, the speed within them, and their share. `closed_OB3` is the best
    # choice of gaps in which fragment b - 1 belongs to S, or b is 0.
    closed_OB3 = np.zeros((len(rate_O), count + 1, 3))
    best_O3 = np.zeros((len(rate_O), 3))
    for b in range(1, count + 1):
        closed_OB3[:, b] = best_O3
        first = 1 if b == count else 0  # a gap over everything would leave S empty
        part_A = before_F[b] - before_F[first:b]
        speed_OA = within_OAB[:, first:b, b]
        cost_OA = closed_OB3[:, first:b, 0] + rate_O[:, None] * part_A - speed_OA
        best_O3 = closed_OB3[:, b].copy()
        if not part_A.size:
            continue
        gap_O = cost_OA.argmin(axis=1)
        better_O = cost_OA[many, gap_O] < best_O3[:, 0]
        opened_O3 = closed_OB3[many, first + gap_O]
        gapped_O3 = np.stack(
            [cost_OA[many, gap_O], opened_O3[:, 1] + speed_OA[many, gap_O], opened_O3[:, 2] + part_A[gap_O]], axis=1
        )
        best_O3 = np.where(better_O[:, None], gapped_O3, best_O3)
    return np.maximum(0.0, total_O - best_O3[:, 1]), before_F[-1] - best_O3[:, 2]

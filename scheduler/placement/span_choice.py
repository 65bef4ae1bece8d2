"""Choose a joining peer's layers: the span within its memory that raises the swarm's tokens/s most. See `choose`.

Nothing trains unless each layer has a holder, so `choose` prefers spans with the most layers without a holder. Of such
spans, it returns the span that lets the swarm train the most tokens/s (the flow). If several spans give the same flow,
it returns the span whose layers have the least computing power. The flow counts computing, not links, and has a closed
form. For any set S of fragments, the peers that hold some fragment of S must do all computing for S, so

    flow = min over S of  (sum of the speeds of the peers that hold some of S) / (share of a token's time in S)

(Hall's theorem with capacities). A peer's span is an interval, so a peer that holds nothing of S lies within one gap of
S. Dynamic programming over the fragments finds the best gaps, and Dinkelbach's iteration the minimum of the ratio.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decentral.core.fragments import Fragment
from decentral.core.layer_work import Shape, shape_of, shares_of

Floats = NDArray[np.float64]

DINKELBACH_ROUNDS = 50
EQUAL_FLOWS = 1e-6  # two flows or speeds that differ by a smaller share than this count as equal


@dataclass(frozen=True, slots=True)
class Holder:
    """A peer's fragments [begin, end) and its speed, as input to the choice of spans."""

    begin: int
    end: int
    tokens_per_s: float


def holder_of(fragments: Sequence[Fragment], first: int, last: int, tokens_per_s: float) -> Holder:
    """Return a Holder with this speed and with the fragments that lie within layers [first, last)."""
    begin = bisect.bisect_left(fragments, first, key=lambda one: one.first)
    end = bisect.bisect_right(fragments, last, key=lambda one: one.last)
    return Holder(begin, end, tokens_per_s) if begin < end else Holder(0, 0, tokens_per_s)


def choose(
    fragments: Sequence[Fragment],
    others: Sequence[Holder],
    tokens_per_s: float,
    reach: Callable[[int], int],
    shape: Shape | None = None,
) -> Holder:
    """Return the span that helps the swarm most, out of the widest spans that fit into the peer's memory.

    Of equally good spans, the earliest span is returned.

    Args:
        fragments: The fragments of the whole model.
        others: The other peers' spans and speeds.
        tokens_per_s: The peer's speed through the whole model.
        reach: Function that maps the first fragment of a span to the end of the widest span that fits into memory.
        shape: The shares of a token's time by kind of layer, for all peers; None: those of the layers' FLOPs.
    """
    count, share_F = len(fragments), _shares(fragments, shape)
    options = [Holder(begin, reach(begin), tokens_per_s) for begin in range(count) if reach(begin) > begin]
    widest = [one for one in options if not any(o.begin < one.begin and one.end <= o.end for o in options)]
    behind_F, uncovered_F = np.zeros(count), np.ones(count, dtype=bool)
    for other in others:  # assume that a peer's speed is spread evenly over its span
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
    """Return the highest tokens/s that peers with these spans can reach together, if links cost no time."""
    return float(_flows(_shares(fragments), holders, [Holder(0, 0, 0.0)])[0])


def _shares(fragments: Sequence[Fragment], shape: Shape | None = None) -> Floats:
    return np.array(shares_of(tuple(fragments), shape or shape_of(tuple(fragments))))


def _flows(share_F: Floats, holders: Sequence[Holder], options: Sequence[Holder]) -> Floats:
    """Return, for each option (a span that the joining peer may take), the flow in tokens/s of all peers together."""
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
    """Return, for each option, the speed and share of the set S of fragments that minimises speed - rate * share.

    S is not empty. Its speed is the sum of the speeds of the peers that hold some fragment of S, in tokens/s. Its share
    is the share of a token's time in S.
    """
    count, many = len(share_F), np.arange(len(rate_O))
    before_F = np.concatenate(([0.0], share_F.cumsum()))
    # The last axis has three entries for the best gaps among fragments [0, b): their cost, the speed of the peers
    # within them, and their share of a token's time. In `closed_OB3`, fragment b - 1 belongs to S, or b is 0.
    closed_OB3 = np.zeros((len(rate_O), count + 1, 3))
    best_O3 = np.zeros((len(rate_O), 3))
    for b in range(1, count + 1):
        closed_OB3[:, b] = best_O3
        first = 1 if b == count else 0  # a gap over all fragments would leave S empty
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

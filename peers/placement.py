"""Which layers a peer takes when it joins: the span within its memory that raises the swarm's flow most.

As long as layers are without a holder nothing trains, so those come first; then the span with which the holders'
speeds carry the most tokens. The flow through given spans counts computing, not links, and has a closed form: a cut S
of fragments cannot carry more than the peers that hold any of S compute,

    tokens/s = min over S of  sum of the speeds of the peers that hold some of S / share of the model that S is

(Hall's theorem with capacities). A peer's span is an interval, so the peers that hold nothing of S are those that lie
within one gap of S, and the best gaps are found by a walk over the fragments (Dinkelbach's iteration for the ratio).

A peer that has chosen says so in the DHT, and looks again: of two that chose at the same time the later one yields.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decentral.core.jobs import Fragment

ROUNDS = 50  # of Dinkelbach's iteration, which takes a handful


@dataclass(frozen=True, slots=True)
class Holder:
    """Fragments [begin, end), and how fast: tokens/s if the peer computed the whole model."""

    begin: int
    end: int
    tokens_per_s: float


def holder_of(fragments: Sequence[Fragment], first: int, last: int, tokens_per_s: float) -> Holder:
    """Of layers [first, last): the whole fragments among them."""
    inside = [index for index, one in enumerate(fragments) if first <= one.first and one.last <= last]
    return Holder(inside[0], inside[-1] + 1, tokens_per_s) if inside else Holder(0, 0, tokens_per_s)


def choose(
    fragments: Sequence[Fragment], others: Sequence[Holder], tokens_per_s: float, reach: Callable[[int], int]
) -> Holder:
    """The best of the widest spans; `reach(begin)` is where one from there must end. Ties go to the earliest."""
    count = len(fragments)
    ends = {begin: reach(begin) for begin in range(count)}
    options = [Holder(begin, end, tokens_per_s) for begin, end in ends.items() if end > begin]
    widest = [one for one in options if not any(o.begin < one.begin and one.end <= o.end for o in options)]
    uncovered = [index for index in range(count) if not any(o.begin <= index < o.end for o in others)]

    def worth(option: Holder) -> tuple[int, float, int]:
        covers = sum(option.begin <= index < option.end for index in uncovered)
        return covers, flow(fragments, [*others, option]), -option.begin

    return max(widest, key=worth)


def flow(fragments: Sequence[Fragment], holders: Sequence[Holder]) -> float:
    """Tokens/s through these spans, each peer computing where it is needed most; links cost nothing."""
    count, whole = len(fragments), sum(one.parameters for one in fragments)
    share = [one.parameters / whole for one in fragments]
    speeds = [holder for holder in holders if holder.end > holder.begin]
    total = sum(holder.tokens_per_s for holder in speeds)
    within = _within(count, speeds)
    rate = total
    for _ in range(ROUNDS):
        speed, part = _tightest(count, share, within, total, rate)
        if part <= 0 or speed / part >= rate * (1 - 1e-9):
            break
        rate = speed / part
    return rate


def _within(count: int, holders: Sequence[Holder]) -> list[list[float]]:
    """[a][b]: the speed of the peers whose spans lie within fragments [a, b)."""
    table = [[0.0] * (count + 1) for _ in range(count + 1)]
    for holder in holders:
        table[holder.begin][holder.end] += holder.tokens_per_s
    for length in range(1, count + 1):
        for a in range(count - length + 1):
            b = a + length
            inner = table[a + 1][b - 1] if length > 1 else 0.0
            table[a][b] += table[a + 1][b] + table[a][b - 1] - inner
    return table


def _tightest(
    count: int, share: Sequence[float], within: Sequence[Sequence[float]], total: float, rate: float
) -> tuple[float, float]:
    """(speed, share) of the cut S, not empty, that has the least of speed - rate * share."""
    before = [0.0]
    for part in share:
        before.append(before[-1] + part)
    nothing = (0.0, 0.0, 0.0)  # of the gaps up to here: cost, speed within them, their share
    stands = [nothing]  # [b]: the best where fragment b - 1 is in S, or b is 0
    best = [nothing]  # [b]: the best where it may also be in a gap
    for b in range(1, count + 1):
        stands.append(best[b - 1])
        gaps = [_plus(stands[a], within[a][b], before[b] - before[a], rate) for a in range(b) if b - a < count]
        best.append(min([stands[b], *gaps]))
    _, speed, part = best[count]
    return max(0.0, total - speed), before[-1] - part


def _plus(gaps: tuple[float, float, float], speed: float, part: float, rate: float) -> tuple[float, float, float]:
    return gaps[0] + rate * part - speed, gaps[1] + speed, gaps[2] + part

"""The figures of a run, from its curve: pure functions, which tests/contest/test_figures.py holds.

A point of a curve is a moment: seconds since training began, tokens of all peers until then, and the held-out loss of
what a user would keep then.
"""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple


class Point(NamedTuple):
    seconds: float
    tokens: float
    loss: float


class Spread(NamedTuple):
    """Of several repetitions. A repetition without a figure counts as worse than all others."""

    middle: float | None
    least: float | None
    most: float | None
    missing: int  # repetitions without a figure


def time_to_loss(curve: Sequence[Point], target: float) -> float | None:
    """Seconds until the loss is first at or below the target, on straight lines between points. None: never.

    Nothing is known before the first point, so a run that begins below the target has the first point's time.
    """
    for before, after in zip([None, *curve], curve, strict=False):
        if after.loss <= target:
            if before is None:
                return after.seconds
            share = (before.loss - target) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def loss_at(curve: Sequence[Point], *, seconds: float | None = None, tokens: float | None = None) -> float | None:
    """The loss after so many seconds, or so many tokens of all peers, on straight lines. None: the run ends before."""
    key, wanted = (0, seconds) if tokens is None else (1, tokens)
    assert wanted is not None, "name seconds or tokens"
    for before, after in itertools.pairwise(curve):
        if before[key] <= wanted <= after[key]:
            share = (wanted - before[key]) / (after[key] - before[key]) if after[key] > before[key] else 1.0
            return before.loss + share * (after.loss - before.loss)
    return None


def spread(values: Sequence[float | None]) -> Spread:
    """Median, least and most. The median is None where most repetitions have no figure, as those that never reached."""
    there = [value for value in values if value is not None]
    missing = len(values) - len(there)
    if not there:
        return Spread(None, None, None, missing)
    ranked = median([*there, *[float("inf")] * missing])
    return Spread(ranked if ranked != float("inf") else None, min(there), max(there), missing)


def sooner(ours: float | None, theirs: float | None, seconds: float) -> tuple[float | None, bool]:
    """How many times sooner we are, and whether that is only a bound, as the other never reached within `seconds`.

    None: neither can be said, because we never reached.
    """
    if ours is None:
        return None, False
    if theirs is None:
        return seconds / ours, True
    return theirs / ours, False


class Stretch(NamedTuple):
    """What a line of a peer's journal sums up: from the line before it until it was written (Unix time)."""

    begin: float
    end: float
    tokens: float
    busy_s: float

    def until(self, moment: float) -> float:
        """Which share of it had passed at this moment."""
        if moment >= self.end:
            return 1.0
        return max(0.0, moment - self.begin) / (self.end - self.begin)


def stretches(lines: Sequence[Mapping[str, Any]], began: float) -> list[Stretch]:
    """Those of a peer's lines, each `t`, `tokens`, `busy_s`. The first begins where its training did, not before
    `began`."""
    found: list[Stretch] = []
    for line in lines:
        begin = found[-1].end if found else max(began, line["t"] - line["busy_s"])
        found.append(Stretch(begin, line["t"], line["tokens"], line["busy_s"]))
    return found


def tokens_until(peers: Sequence[Sequence[Stretch]], moment: float) -> float:
    """Of all peers. Within a stretch tokens count as evenly spread, as some journals have few lines."""
    return sum(one.tokens * one.until(moment) for own in peers for one in own)


def busy_until(peers: Sequence[Sequence[Stretch]], moment: float) -> float:
    """Seconds of all peers."""
    return sum(one.busy_s * one.until(moment) for own in peers for one in own)


def longest_pause(own: Sequence[Stretch], began: float, ended: float) -> float:
    """The most seconds without training in one stretch of a peer, before its first, or after its last."""
    if not own:
        return ended - began
    inside = [one.end - one.begin - one.busy_s for one in own]
    return max(own[0].begin - began, *inside, ended - own[-1].end, 0.0)

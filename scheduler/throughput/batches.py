"""Uneven micro-batches: how large, and how many of a step's sequences each peer takes (Poplar, Whale, HetSeq).

A peer's curve is what it measured: seconds per micro-batch at some sizes, straight lines between them. Its best size
is the one of most sequences per second that fits its memory; a step's sequences are then dealt so that the last
peer is done as early as possible.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from decentral.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for a micro-batch, measured at increasing `sizes` (sequences). The last size is the memory's limit."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or min(self.seconds) <= 0:
            raise UserError("curve: expected as many seconds above 0 as sizes; measure the peer again")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise UserError(f"curve: sizes must increase from at least 1; got {list(self.sizes)}")

    def time(self, size: int) -> float:
        """Seconds for one micro-batch of this size, between the measured ones."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return float("inf")  # it does not fit
        if self.sizes[at] == size or at == 0:
            return self.seconds[at]
        share = (size - self.sizes[at - 1]) / (self.sizes[at] - self.sizes[at - 1])
        return self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1])

    def best_size(self) -> int:
        """Most sequences per second; the smallest of equals, for its memory."""
        return max(range(self.sizes[0], self.sizes[-1] + 1), key=lambda size: (size / self.time(size), -size))

    def step_time(self, sequences: int) -> float:
        """Seconds for this many sequences: whole micro-batches of the best size, and one for the rest."""
        size = self.best_size()
        rest = sequences % size
        return sequences // size * self.time(size) + (self.time(max(rest, self.sizes[0])) if rest else 0.0)

    def done_in(self, seconds: float) -> int:
        """How many sequences fit into this time."""
        size = self.best_size()
        whole = int(seconds / self.time(size) + 1e-12)
        left = seconds - whole * self.time(size) + 1e-12
        return whole * size + max(
            (rest for rest in range(size) if self.time(max(rest, self.sizes[0])) <= left), default=0
        )


def deal(curves: Sequence[Curve], sequences: int) -> list[int]:
    """How many sequences each peer takes so that the slowest is done soonest: exact, by bisection over the time."""
    low, high = 0.0, max(curve.step_time(sequences) for curve in curves)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(curve.done_in(middle) for curve in curves) >= sequences:
            high = middle
        else:
            low = middle
    share = [min(sequences, curve.done_in(high)) for curve in curves]
    while (surplus := sum(share) - sequences) > 0:  # hand back where it takes longest
        slowest = max((i for i in range(len(share)) if share[i]), key=lambda i: curves[i].step_time(share[i]))
        share[slowest] -= min(surplus, 1)
    return share

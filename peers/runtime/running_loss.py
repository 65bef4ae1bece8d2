"""The loss that a peer shows: an average over steps, which one bad step cannot spoil for ever."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WEIGHT = 0.05  # of the latest step in the average


@dataclass(slots=True)
class RunningLoss:
    mean: float | None = None  # of the steps whose loss was finite
    lost: int = 0  # steps since the last one whose loss was finite

    def add(self, loss: float) -> None:
        if not math.isfinite(loss):
            self.lost += 1
            return
        self.lost = 0
        self.mean = loss if self.mean is None else (1 - WEIGHT) * self.mean + WEIGHT * loss

    def __str__(self) -> str:
        """What the user sees: while losses are not finite, that, and not what they were before."""
        if self.lost:
            return f"not finite for {self.lost} steps"
        return "-" if self.mean is None else f"{self.mean:.3f}"


def mean_loss(losses: Iterable[float]) -> tuple[float | None, int]:
    """Return the mean of those losses that are finite, None if none is, and how many are not."""
    known = list(losses)
    finite = [loss for loss in known if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None, len(known) - len(finite)

"""Average the losses of a peer's steps for the user; losses that are not finite are left out. See `RunningLoss`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WEIGHT = 0.05  # the average gives the latest loss this weight, so it covers about 20 steps


@dataclass(slots=True)
class RunningLoss:
    """An exponential average of the steps' finite losses."""

    mean: float | None = None  # in nats per token; None before the first finite loss
    lost: int = 0  # steps in a row without a finite loss, up to now

    def add(self, loss: float) -> None:
        """Add a step's loss in nats per token to the average; if it is not finite, count it in `self.lost` instead."""
        if not math.isfinite(loss):
            self.lost += 1
            return
        self.lost = 0
        self.mean = loss if self.mean is None else (1 - WEIGHT) * self.mean + WEIGHT * loss

    def __str__(self) -> str:
        """Return the mean as text, "-" before the first loss, or `not finite for 3 steps` after such losses."""
        if self.lost:
            return f"not finite for {self.lost} steps"
        return "-" if self.mean is None else f"{self.mean:.3f}"


def mean_loss(losses: Iterable[float]) -> tuple[float | None, int]:
    """Return the mean of the finite losses (None if none is finite), and the number of losses that are not finite."""
    known = list(losses)
    finite = [loss for loss in known if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None, len(known) - len(finite)

"""Whether a partner's progress differs from ours in the same direction window after window.

Honest peers' windows differ by the noise of their data. The optimizer's momentum carries that on for some windows, and
after ten there is next to nothing of it left: the cosine of what differs now with the sum of what differed then is 0.0
to 0.2. Whoever pulls the model somewhere has to pull there for long, in each window by little: then it is 0.4 to 0.7,
however near to the others each of its windows is (a little is enough: Baruch et al., arXiv 1902.06156; why only history
helps: Karimireddy et al., arXiv 2012.10333). A direction that changes hides this, and averages out like noise.

Partners whose data are of another kind than ours deviate for good as well; each is judged by what is usual among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median_low

import torch
from torch import Tensor

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

MOST_KNOWN = 16  # partners whose deviations are kept, or all of a window, if they are more
COMPARED_NUMBERS = 8192  # of a window that are looked at: chance alone makes a cosine of 0.02 of so many
NOISE = 2.0  # standard deviations of a cosine of unrelated vectors: what chance may make of one
PERIOD_WINDOWS = 5  # of ours: deviations are compared with those before the last period, 5 to 10 windows old or older
OLD_SUM_KEPT = 0.9  # of the sum of old deviations, with each period
ALLOWED_COSINE = 0.175  # and what chance makes: the cosine up to which a partner counts whole, whatever is usual
TIMES_USUAL_COSINE = 1.5  # or up to so many times the usual one; from twice that on it counts for nothing


@dataclass(slots=True)
class Deviation:
    """How one partner's windows differed from ours: vectors of lengths up to 2 each, summed by period."""

    fresh: Tensor
    waiting: Tensor
    old: Tensor
    persistence: float | None = None  # the last cosine with the old ones; None: nothing is old yet

    @classmethod
    def none(cls, elements: int) -> "Deviation":
        return cls(torch.zeros(elements), torch.zeros(elements), torch.zeros(elements))

    def add(self, found: Tensor) -> None:
        if bool(self.old.any()):
            self.persistence = float(torch.nn.functional.cosine_similarity(found, self.old, dim=0))
        self.fresh += found

    def end_period(self) -> None:
        self.old.mul_(OLD_SUM_KEPT).add_(self.waiting)
        self.fresh, self.waiting = self.waiting.zero_(), self.fresh


@dataclass(slots=True)
class Deviations:
    """Of all partners in one fragment."""

    known: dict[PeerId, Deviation] = field(default_factory=dict)
    windows: int = 0

    def unbiased(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        """How much of each partner's progress counts by this, from 0 to 1. `window`: ours, none of them zero."""
        self.windows += 1
        if self.windows % PERIOD_WINDOWS == 0:
            for deviation in self.known.values():
                deviation.end_period()
        ours = _direction(window)
        for peer, vector in partners:
            deviation = self.known.get(peer) or Deviation.none(len(ours))
            deviation.add(_direction(vector) - ours)
            keep_latest(self.known, peer, deviation, max(MOST_KNOWN, len(partners)))
        found = [one.persistence for one in self.known.values() if one.persistence is not None]
        always = ALLOWED_COSINE + chance_of(ours)
        allowed = max(always, TIMES_USUAL_COSINE * median_low(found)) if found else 1.0
        return [part_that_is_allowed(self.known[peer].persistence, allowed) for peer, _ in partners]


def chance_of(vector: Tensor) -> float:
    """What chance may make of the cosine of two vectors that are as long as this one and have nothing in common."""
    return NOISE / sqrt(len(vector))


def part_that_is_allowed(persistence: float | None, allowed: float) -> float:
    return 1.0 if persistence is None else min(1.0, max(0.0, 2.0 - persistence / allowed))


def _direction(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector[:COMPARED_NUMBERS], dim=0)

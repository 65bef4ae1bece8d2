"""A detector of partners that always differ from us in one direction. Start at `Deviations`.

It computes the factor `unbiased` of the trust in a partner (comm/gossip/trust.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median_low

import torch
from torch import Tensor

from decentral.comm.gossip.influence import COMPARED_NUMBERS, MOST_KNOWN
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

NOISE = 2.0  # a cosine of up to this many standard deviations counts as chance: 0.02 for vectors of 8192 numbers
PERIOD_WINDOWS = 5  # a period has this many of our windows; a deviation is compared with those of earlier periods only
OLD_SUM_KEPT = 0.9  # at the end of each period, the sum of old deviations is multiplied by this
ALLOWED_COSINE = 0.175  # a partner has full weight up to the chance level + this * sqrt(share of numbers sent)
TIMES_USUAL_COSINE = 1.5  # a partner also has full weight up to this multiple of the median persistence of all partners


@dataclass(slots=True)
class Deviation:
    """Sums, by period, of the differences between the directions (unit vectors) of one partner's windows and ours."""

    fresh: Tensor | None = None  # sum of the differences in the current period; None before its first window
    waiting: Tensor | None = None  # sum of the differences in the previous period; None if it had no window
    old: Tensor | None = None  # sum of the differences in all earlier periods; older periods have less weight
    persistence: float | None = None  # cosine of the newest window with `old` (`add`); None while `old` is None

    def add(self, theirs: Tensor, ours: Tensor) -> None:
        """Add a window, given the directions of the partner's pseudo-gradient and ours, and update `persistence`.

        It is the cosine of `old` with the newest difference or, if smaller, with `theirs`. Each contains something
        unrelated to an attack: the difference our own noise, and `theirs` the progress common to all peers.
        """
        found = theirs - ours
        if self.old is not None and bool(self.old.any()):
            along = (torch.nn.functional.cosine_similarity(one, self.old, dim=0) for one in (found, theirs))
            self.persistence = min(map(float, along))
        self.fresh = found if self.fresh is None else self.fresh.add_(found)

    def end_period(self) -> None:
        """Begin a new period: add the sum `waiting` to `old`, and move the sum `fresh` to `waiting`."""
        if self.old is not None:
            self.old.mul_(OLD_SUM_KEPT)
        if self.waiting is not None:
            self.old = self.waiting if self.old is None else self.old.add_(self.waiting)
        self.fresh, self.waiting = None, self.fresh


@dataclass(slots=True)
class Deviations:
    """Detector of partners whose progress in one fragment differs from ours in the same direction over many windows.

    Honest peers' windows differ by the noise of their data. The optimizer's momentum prolongs a difference for a few
    windows, but little is left after ten: the cosine of the newest difference with the sum of old differences is 0.0 to
    0.2. An attacker that changes each window only a little must push in one direction for long. Its cosine is 0.4 to
    0.7, even if each of its windows is close to honest windows ("a little is enough": Baruch et al., arXiv 1902.06156;
    only history reveals it: Karimireddy et al., arXiv 2012.10333). In sparse windows the medians are 0.14 for attacks
    and 0.04 for honest peers. A changing direction averages out like noise. Honest partners with other data also differ
    persistently, so each partner is compared with the median partner.
    """

    known: dict[PeerId, Deviation] = field(default_factory=dict)
    windows: int = 0

    def unbiased(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        """Record one more pseudo-gradient of each partner, and return how much each partner counts, from 0 to 1.

        `window` is a sample of our own pseudo-gradient, fp32 [m], not zero; `partners` has each partner's sample.
        """
        self.windows += 1
        if self.windows % PERIOD_WINDOWS == 0:
            for deviation in self.known.values():
                deviation.end_period()
        ours = _direction(window)
        for peer, vector in partners:
            deviation = self.known.get(peer) or Deviation()
            deviation.add(_direction(vector), ours)
            keep_latest(self.known, peer, deviation, max(MOST_KNOWN, len(partners)))
        found = [one.persistence for one in self.known.values() if one.persistence is not None]
        usual = TIMES_USUAL_COSINE * median_low(found) if found else 1.0
        return [
            part_that_is_allowed(self.known[peer].persistence, max(usual, allowed_cosine(window, vector)))
            for peer, vector in partners
        ]


def chance_of(vector: Tensor) -> float:
    """Return the chance level: the largest cosine expected of two unrelated vectors of `len(vector)` numbers."""
    return NOISE / sqrt(len(vector))


def allowed_cosine(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest persistence of a partner with full weight, given both pseudo-gradients' samples, fp32 [m].

    A window that sends a share s of its numbers shows less of a lasting difference: the direction of what it holds back
    is missing, and noise takes its place. So the limit above chance falls with sqrt(s); s is the windows' mean.
    """
    share = float(torch.count_nonzero(ours) + torch.count_nonzero(theirs)) / (2 * len(ours))
    return ALLOWED_COSINE * sqrt(share) + chance_of(ours[:COMPARED_NUMBERS])


def part_that_is_allowed(persistence: float | None, allowed: float) -> float:
    """Return 1 if `persistence` is unknown or at most `allowed`, 0 from twice `allowed` on; linear in between."""
    return 1.0 if persistence is None else min(1.0, max(0.0, 2.0 - persistence / allowed))


def _direction(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector[:COMPARED_NUMBERS], dim=0)

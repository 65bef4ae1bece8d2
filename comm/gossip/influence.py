"""How far one partner may move us: a bound for each thing that a partner says, from what honest training explains.

    tokens       a claim counts as at most TIMES_USUAL_TOKENS the usual one, and TIMES_EXPLAINED what the length of the
                 pseudo-gradient explains; a partner has at most MOST_SHARE of a merge
    direction    what points against ours counts for nothing, and less what pulls one way for long
                 (comm/gossip/trust.py)
    length       a pseudo-gradient is at most TIMES_USUAL as long as is usual; IMPLAUSIBLE times that counts for
                 nothing. A length over IMPLAUSIBLE times ours is not remembered as usual.
    slow weights pull us by at most TIMES_USUAL the usual distance, and by the partner's share of that
    places       slow weights far from the median of all partners and us pull us nowhere (`Outliers`)

What is usual is the median of the partners and us, or ours where that is more: less than half of the partners cannot
raise it. Of lengths and distances each recent partner's last one counts, as a window may have hostile partners only.
Our own progress is known before any partner's is merged, so the first window ever is bounded like any other: after a
start, a restart, a join or a gained fragment. One partner moves our slow weights in a window by at most MOST_SHARE *
TIMES_USUAL * (usual progress + usual distance of slow weights).

Clipping towards our own weights: He, Karimireddy and Jaggi, arXiv 2202.01545, after centred clipping (Karimireddy et
al., arXiv 2012.10333).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

TIMES_USUAL_TOKENS = 4.0  # times the usual claim of a window's tokens, or ours where that is more
TIMES_EXPLAINED = 2.0  # times our tokens, where a pseudo-gradient is as long as ours; more or fewer as it is longer
MOST_SHARE = 0.5  # of a merge's weight that one partner has: never more than we and the others
TIMES_USUAL = 1.5  # times what is usual: the length of a pseudo-gradient, and the way towards slow weights
IMPLAUSIBLE = 1000.0  # times the usual length: a lie, or a model that has diverged; no honest device is so much faster
RECENT_WINDOWS = 16  # of ours, whose lengths are kept
RECENT_PARTNERS = 16  # whose last lengths and distances are kept, one for each: nobody fills the list alone
LEAST_PARTNERS = 4  # of whom distances are known, or who count as near: slow weights come from few partners

MOST_KNOWN = 16  # partners whose history or places are kept, or all of a merge, if they are more
COMPARED_NUMBERS = 8192  # of a vector that are kept and compared, at most
HONEST_PART = 0.75  # of a peer and its partners, who are taken to be honest: the farthest of them is usual
EARLY_MERGES = 5  # the first ones with partners' weights: a fast device leaves others behind that have hardly moved


def token_shares(own: int, claims: Sequence[float], trust: Sequence[float] = ()) -> list[float]:
    """Each partner's share of a merge; the rest is ours. Honest claims of peers that are alike weigh as they are.

    Who claims no tokens moves nobody, unless nobody has any: then all weigh the same. `trust`: of each, 0 to 1.
    """
    most = max(1.0, TIMES_USUAL_TOKENS * usual(own, claims))
    trusted = trust or [1.0] * len(claims)
    if own or any(claims):
        believed = [one * min(float(claim), most) for one, claim in zip(trusted, claims, strict=True)]
        total = own + sum(believed)
    else:
        believed, total = list(trusted), 1.0 + sum(trusted)
    return [min(MOST_SHARE, one / total) if one else 0.0 for one in believed]


def token_weights(tokens: Sequence[float]) -> list[float]:
    """Return each window's share of all tokens; equal shares when nobody has trained."""
    total = sum(tokens)
    return [count / total for count in tokens] if total else [1 / len(tokens)] * len(tokens)


def explained_tokens(length: float, own: int, own_length: float) -> float:
    """How many tokens a pseudo-gradient of this length may stand for, where our own stands for `own`.

    Progress grows with tokens, at least like their root: who claims far more than ours made of them takes the place of
    others' progress in a merge and gives none.
    """
    return TIMES_EXPLAINED * own * length / own_length if own_length else float("inf")


def usual(own: float, others: Sequence[float]) -> float:
    """The lower median of all, or ours where that is more: one other alone never raises it."""
    return max(own, median_low([own, *others]))


def scale(length: float, usual_length: float) -> float:
    """What to multiply something of this length by, so that it is no longer than TIMES_USUAL what is usual."""
    limit = TIMES_USUAL * usual_length
    return limit / length if length > limit else 1.0


def plausible(length: float, usual_length: float) -> float:
    """1, or 0 for a pseudo-gradient that is longer than any honest one could be."""
    return float(not usual_length or length <= IMPLAUSIBLE * usual_length)


@dataclass(slots=True)
class Experience:
    """What one fragment's windows and partners have been like, as one peer knows it."""

    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_WINDOWS))  # of own pseudo-gradients
    moved: dict[PeerId, float] = field(default_factory=dict)  # the last length of each partner's
    apart: dict[PeerId, float] = field(default_factory=dict)  # the last distance from each partner

    def closed(self, length: float) -> None:
        """A window of ours has ended, with so much progress."""
        self.lengths.append(length)

    @property
    def progress(self) -> float:
        """How long a pseudo-gradient of ours usually is: the last one, or the median where that is more."""
        return max(self.lengths[-1], median(self.lengths)) if self.lengths else 0.0

    def possible(self, length: float) -> bool:
        """Whether a device could have made a pseudo-gradient of this length, measured by ours. Of whoever sends another
        one nothing is remembered, or, of two partners that have lied, the later one would say what is usual."""
        return plausible(length, self.progress) > 0.0

    def usual_progress(self, partners: Sequence[tuple[PeerId, float]]) -> float:
        """Takes how long these partners' pseudo-gradients are; gives what is usual."""
        return self._usual(self.moved, partners)

    def usual_distance(self, partners: Sequence[tuple[PeerId, float]]) -> float:
        """Takes how far these partners' weights are from ours; gives what is usual.

        Slow weights are pulled rarely. Where there are more partners than have told, the others count as no further
        than our own progress is long, or the first two to tell, who may be liars, would say what is usual.
        """
        unknown = max(0, min(LEAST_PARTNERS, len(self.moved)) - len(self.apart.keys() | {peer for peer, _ in partners}))
        return self._usual(self.apart, partners, [self.progress] * unknown)

    def _usual(
        self, last: dict[PeerId, float], partners: Sequence[tuple[PeerId, float]], besides: Sequence[float] = ()
    ) -> float:
        for peer, found in partners:
            keep_latest(last, peer, found, RECENT_PARTNERS)
        return usual(self.progress, [*last.values(), *besides])


class Tolerance(NamedTuple):
    """Up to how far from the median a partner's weights count whole; from twice that on they count for nothing."""

    times: float  # the usual distance, or the steps below where they are more
    steps: float  # of the partner: its progress in a window


EARLY, LATER = Tolerance(3.0, 1.0), Tolerance(2.0, 0.5)
FAR = 3.3  # times what counts whole: as far from the others no honest device falls behind, or gets ahead


@dataclass(slots=True)
class Outliers:
    """Whether a partner's weights are among those of the others; one fragment's. Weights far away move us nowhere.

    Honest replicas differ by a part of a window's progress, or, where devices are unequal, by how far the slow ones are
    behind. A liar's weights are where it wants ours to be. From our own place the two cannot be told once we have been
    moved: then all honest ones are as far. So each partner's last known difference from us is kept, and judged by its
    distance from the median of all of them and us in each coordinate (Yin et al., arXiv 1803.01498). While most are
    honest, that is among them, wherever we are.

    A common step changes no difference between peers. A step only we take must be subtracted from all differences:
    `moved`. Vectors are samples of what partners differ from us by, fp32 [m].
    """

    apart: dict[PeerId, Tensor] = field(default_factory=dict)
    found: dict[PeerId, float] = field(default_factory=dict)  # each partner's last distance, by what counts whole
    merges: int = 0  # with weights of partners, so far

    def trust(self, partners: Sequence[tuple[PeerId, Tensor]], steps: Sequence[float]) -> list[float]:
        """How much the weights of each of these partners count, from 0 to 1. `steps`: how long its windows are.

        With one partner nobody can tell which of the two is outside, nor where most are equal to the bit.
        """
        if not partners:
            return []
        most = max(MOST_KNOWN, len(partners))
        for peer, vector in partners:
            keep_latest(self.apart, peer, _thinned(vector).clone(), most)
        self.merges += 1
        tolerance = EARLY if self.merges <= EARLY_MERGES else LATER
        distances = self._distances()
        usual = sorted(distances.values())[int(HONEST_PART * (len(distances) - 1))] if len(distances) > 2 else 0.0
        for (peer, _), step in zip(partners, steps, strict=True):
            whole = tolerance.times * max(usual, tolerance.steps * step)
            keep_latest(self.found, peer, distances[peer] / whole if usual else 0.0, most)
        return [min(1.0, max(0.0, 2.0 - self.found[peer])) for peer, _ in partners]

    def forget(self) -> None:
        """Forget where partners are, because our own weights have been replaced."""
        self.apart, self.found, self.merges = {}, {}, 0

    def _distances(self) -> dict[PeerId | None, float]:
        """How far each partner is from the median of all; None: we."""
        places = torch.stack([torch.zeros_like(next(iter(self.apart.values()))), *self.apart.values()])
        apart = places - places.double().quantile(0.5, dim=0)
        return dict(zip([None, *self.apart], torch.linalg.vector_norm(apart, dim=1).tolist(), strict=True))

    def is_far(self, peer: PeerId) -> bool:
        """Whether its weights, when they were last seen, were nowhere near anybody's: what it sends is of no use."""
        return self.found.get(peer, 0.0) > FAR

    def moved(self, way: Tensor) -> None:
        """Partners have moved us by this."""
        way = _thinned(way)
        for vector in self.apart.values():
            vector -= way


def _thinned(vector: Tensor) -> Tensor:
    """Every so many-th number: the first ones may all be of one layer, whose weights are small beside the others'."""
    return vector[:: -(-len(vector) // COMPARED_NUMBERS)]

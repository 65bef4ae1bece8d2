"""Bounds on how far one partner's window may move our weights, derived from honest training.

    tokens       A token claim is cut to TIMES_USUAL_TOKENS times the usual claim, and to the claim that the length of
                 the pseudo-gradient explains (`explained_tokens`). A partner's share of a merge is at most MOST_SHARE.
    direction    A pseudo-gradient that points against ours has weight 0 (comm/gossip/trust.py); a lasting difference
                 from ours in one direction lowers a partner's weight (`Deviations`).
    length       A pseudo-gradient is scaled to at most TIMES_USUAL times the usual length. Above IMPLAUSIBLE times the
                 usual length, its weight is 0. Lengths above IMPLAUSIBLE times ours are left out of the usual length.
    distance     The difference of slow weights from ours is scaled to at most TIMES_USUAL times the usual distance;
                 above TIMES_NEAR times, its weight falls.
    outliers     Slow weights far from the median of all peers have weight 0 (`Outliers`).

A length is the L2 norm of a vector. The usual value of a quantity is the lower median over the partners and this peer,
or this peer's own value if that is larger, so a minority of the partners cannot raise it. For lengths and distances the
median includes the last value of each recent partner, since all partners of one window may be hostile. This peer knows
its own progress before any merge, so the bounds hold from the first window on, also after a restart, a join or a gained
fragment. In one window, one partner moves our slow weights by at most MOST_SHARE * TIMES_USUAL * (usual progress +
usual distance of slow weights).

Source: clipping towards one's own weights, He, Karimireddy and Jaggi, arXiv 2202.01545, after centred clipping
(Karimireddy et al., arXiv 2012.10333).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

TIMES_USUAL_TOKENS = 4.0  # a partner's token claim counts only up to this multiple of the usual claim in the merge
TIMES_EXPLAINED = 2.0  # a partner whose pseudo-gradient is as long as ours may claim up to this multiple of our tokens
MOST_SHARE = 0.5  # largest share of a merge for one partner, so that it never outweighs all other peers together
TIMES_USUAL = 1.5  # pseudo-gradients and distances longer than this multiple of the usual value are scaled down to it
TIMES_NEAR = 4.0  # slow weights above this multiple of the usual distance count less, from twice as far nothing
IMPLAUSIBLE = 1000.0  # a pseudo-gradient longer than this multiple of the usual length is an attack, and not merged
RECENT_WINDOWS = 16
RECENT_PARTNERS = 16  # for this many partners we store the last pseudo-gradient's length, and slow weights' distance
LEAST_PARTNERS = 4  # if fewer distances of slow weights are known, our own progress replaces each missing distance

MOST_KNOWN = 16  # we keep the history of this many partners, or of all partners in a merge if it has more
COMPARED_NUMBERS = 8192  # at most this many numbers of a vector are sampled, to compare it with other peers' vectors
HONEST_PART = 0.75  # assumed share of honest peers; this quantile of all peers' distances is the usual distance
# The tolerance EARLY is used in the first EARLY_MERGES merges of slow weights: slow devices have hardly moved by then.
EARLY_MERGES = 5

NOISE = 2.0  # a cosine of up to this many standard deviations counts as chance: 0.02 for vectors of 8192 numbers
PERIOD_WINDOWS = 5  # a period has this many of our windows; a deviation is compared with those of earlier periods only
OLD_SUM_KEPT = 0.9  # at the end of each period, the sum of old deviations is multiplied by this
ALLOWED_COSINE = 0.175  # a partner has full weight up to the chance level + this * sqrt(share of numbers sent)
TIMES_USUAL_COSINE = 1.5  # a partner also has full weight up to this multiple of the median persistence of all partners


def token_shares(own: int, claims: Sequence[float], trust: Sequence[float] = ()) -> list[float]:
    """Return each partner's share of a merge, proportional to tokens times trust; the rest of the merge is ours.

    Args:
        own: Tokens of our window.
        claims: Number of tokens that each partner claims; tokens above TIMES_USUAL_TOKENS times the usual claim do not
            count. If neither we nor any partner has tokens, all windows count alike.
        trust: Trust in each partner, 0 to 1; if empty, the trust in all partners is 1.

    Returns:
        Shares from 0 to MOST_SHARE.
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
    """Return each window's share of all tokens; equal shares if no window has tokens."""
    total = sum(tokens)
    return [count / total for count in tokens] if total else [1 / len(tokens)] * len(tokens)


def explained_tokens(length: float, own: int, own_length: float) -> float:
    """Return the largest token claim that we accept for a pseudo-gradient of this `length` (L2 norm).

    `own` is the number of tokens of our own window, and `own_length` its pseudo-gradient's length; the result is inf if
    `own_length` is 0. Honest pseudo-gradients get longer with more tokens. Without this bound, a partner that claims
    many tokens for a short pseudo-gradient would displace other partners in the merge.
    """
    return TIMES_EXPLAINED * own * length / own_length if own_length else float("inf")


def usual(own: float, others: Sequence[float]) -> float:
    """Return the lower median of `own` and `others`, or `own` if it is larger, so no partner alone can raise it."""
    return max(own, median_low([own, *others]))


def scale(length: float, usual_length: float) -> float:
    """Return the factor that scales a vector of this length to at most TIMES_USUAL times the usual length."""
    limit = TIMES_USUAL * usual_length
    return limit / length if length > limit else 1.0


def plausible(length: float, usual_length: float) -> float:
    """Return 0 for a length above IMPLAUSIBLE times the usual length, else 1; 1 if `usual_length` is 0 (unknown)."""
    return float(not usual_length or length <= IMPLAUSIBLE * usual_length)


@dataclass(slots=True)
class Experience:
    """Lengths of recent pseudo-gradients (ours and partners') and partners' distances from us, in one fragment.

    The medians of these values, the usual length and the usual distance, bound a partner's influence.
    """

    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_WINDOWS))
    moved: dict[PeerId, float] = field(default_factory=dict)  # L2 norm of each partner's last pseudo-gradient
    distances: dict[PeerId, float] = field(default_factory=dict)  # of each partner's last slow weights from ours

    def closed(self, length: float) -> None:
        """Record the length of our own pseudo-gradient at the end of a window."""
        self.lengths.append(length)

    @property
    def progress(self) -> float:
        """Return the larger of the last and the median length of our pseudo-gradients; 0 before the first window."""
        return max(self.lengths[-1], median(self.lengths)) if self.lengths else 0.0

    def possible(self, length: float) -> bool:
        """Return whether a partner's pseudo-gradient of this L2 norm is at most IMPLAUSIBLE times as long as ours.

        The caller must not pass a longer one to `usual_progress`: two hostile partners with such lengths would make the
        usual length implausible. Before our first window, the result is True.
        """
        return plausible(length, self.progress) > 0.0

    def usual_progress(self, partners: Sequence[tuple[PeerId, float]]) -> float:
        """Record the lengths of these partners' pseudo-gradients, and return the usual length."""
        return self._usual(self.moved, partners)

    def usual_distance(self, partners: Sequence[tuple[PeerId, float]]) -> float:
        """Record the distances of these partners' slow weights from ours, and return the usual distance.

        Slow weights are pulled rarely. While fewer than LEAST_PARTNERS distances are known, our own progress replaces
        each missing distance. Otherwise the first two partners, which may be hostile, would set the usual distance.
        """
        unknown = max(
            0, min(LEAST_PARTNERS, len(self.moved)) - len(self.distances.keys() | {peer for peer, _ in partners})
        )
        return self._usual(self.distances, partners, [self.progress] * unknown)

    def nearness(self, distance: float, usual_distance: float) -> float:
        """Return the weight (0 to 1) of slow weights at this distance from ours: `scale`, but less above TIMES_NEAR.

        Slices of honest peers are at up to 3.2 times the usual distance. A slice can be compared with the median of
        all peers (`Outliers`) only after two others have sent it. With one partner, the result is that of `scale`.
        """
        whole = TIMES_NEAR * usual_distance
        falls = min(1.0, max(0.0, 2.0 - distance / whole)) if whole and len(self.moved) > 1 else 1.0
        return falls * scale(distance, usual_distance)

    def _usual(
        self, last: dict[PeerId, float], partners: Sequence[tuple[PeerId, float]], besides: Sequence[float] = ()
    ) -> float:
        for peer, found in partners:
            keep_latest(last, peer, found, RECENT_PARTNERS)
        return usual(self.progress, [*last.values(), *besides])


class Tolerance(NamedTuple):
    """The largest distance from the median at which a partner's slow weights still have their full weight.

    The tolerated distance is `times` the usual distance or, if larger, `times * steps` times the length of the
    partner's pseudo-gradient. At greater distances the weight falls, down to 0 at twice the tolerated distance.
    """

    times: float
    steps: float


EARLY, LATER = Tolerance(3.0, 1.0), Tolerance(2.0, 0.5)
# A partner's pseudo-gradient has weight 0 if its slow weights are over FAR tolerated distances from the median.
FAR = 3.3


@dataclass(slots=True)
class Outliers:
    """Detector of partners whose slow weights in one fragment are far from the slow weights of all other peers.

    Honest replicas differ by part of a window's progress, or by as much as slow devices are behind. A hostile peer
    sends the weights to which it wants to move us. Once it has moved us, its distance from us no longer identifies it.
    So each partner's last difference from us is kept, and the partner is judged by its distance from the
    coordinate-wise median of all partners and us (Yin et al., arXiv 1803.01498). The median lies among the honest peers
    while they are the majority.

    Vectors are samples of differences from our weights, fp32 [m]; a number that a partner has not sent is NaN. A step
    that all peers take does not change the differences. If only this peer takes a step, the caller must call `moved`.
    """

    differences: dict[PeerId, Tensor] = field(default_factory=dict)  # each partner's last slow weights minus ours
    # How far each number was from the median when it came last, by peer (None: us); NaN: fewer than two have sent it.
    away: dict[PeerId | None, Tensor] = field(default_factory=dict)
    # Each partner's last distance, as a multiple of the tolerated distance.
    found: dict[PeerId, float] = field(default_factory=dict)
    merges: int = 0  # number of merges so far that included slow weights

    def trust(self, partners: Sequence[tuple[PeerId, Tensor]], steps: Sequence[float]) -> list[float]:
        """Record partners' differences, and return how much each partner's slow weights count, from 0 to 1.

        With one known partner, or if most peers' weights are bit-identical, all partners count 1.

        Args:
            partners: Each partner with the difference of its slow weights from ours, fp32 [m].
            steps: Length of each partner's pseudo-gradient.
        """
        if not partners:
            return []
        most = max(MOST_KNOWN, len(partners))
        came = torch.zeros_like(_thinned(partners[0][1]), dtype=torch.bool)
        for peer, vector in partners:
            new = _thinned(vector)
            came |= new.isfinite()
            keep_latest(self.differences, peer, torch.where(new.isnan(), self.differences.get(peer, new), new), most)
        self.merges += 1
        tolerance = EARLY if self.merges <= EARLY_MERGES else LATER
        distances = self._distances(came.nonzero()[:, 0])
        usual = sorted(distances.values())[int(HONEST_PART * (len(distances) - 1))] if len(distances) > 2 else 0.0
        for (peer, _), step in zip(partners, steps, strict=True):
            whole = tolerance.times * max(usual, tolerance.steps * step)
            keep_latest(self.found, peer, distances[peer] / whole if usual else 0.0, most)
        return [min(1.0, max(0.0, 2.0 - self.found[peer])) for peer, _ in partners]

    def forget(self) -> None:
        """Forget all partners' differences, because our own weights have been replaced."""
        self.differences, self.away, self.found, self.merges = {}, {}, {}, 0

    def _distances(self, came: Tensor) -> dict[PeerId | None, float]:
        """Return the distance of each peer from the median of all peers, given new numbers at the indices `came`.

        The key None is this peer. The distance is that of all m numbers if a peer is as far off in those not judged.
        """
        places = torch.stack(
            [torch.zeros_like(came, dtype=torch.float32), *(one[came] for one in self.differences.values())]
        )
        ordered, known_by = places.double().sort(dim=0).values, places.isfinite().sum(dim=0)  # a sort ends with NaNs
        low, high = (ordered.gather(0, (known_by - odd).div(2, rounding_mode="floor")[None])[0] for odd in (1, 0))
        off = (places - torch.lerp(low, high, 0.5)).float().abs()  # as `nanquantile`, which takes four times as long
        off[:, known_by <= 2] = torch.nan
        unknown = torch.full_like(next(iter(self.differences.values())), torch.nan)
        self.away = {peer: self.away.get(peer, unknown.clone()) for peer in (None, *self.differences)}
        for known, found in zip(self.away.values(), off, strict=True):
            known[came] = found
        return {peer: _length(known[known.isfinite()], len(known)) for peer, known in self.away.items()}

    def is_far(self, peer: PeerId) -> bool:
        """Return whether a partner has weight 0: its last slow weights were over FAR tolerated distances away."""
        return self.found.get(peer, 0.0) > FAR

    def moved(self, way: Tensor) -> None:
        """Subtract `way`, a step that only our weights have taken, from all recorded differences."""
        way = _thinned(way).nan_to_num()
        for vector in self.differences.values():
            vector -= way


def _length(numbers: Tensor, elements: int) -> float:
    """Return the L2 norm of a vector of `elements` numbers of which these are known; 0 if none is."""
    known = max(1, len(numbers))
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) * sqrt(elements / known)


def _thinned(vector: Tensor) -> Tensor:
    """Return at most COMPARED_NUMBERS numbers of a vector, evenly spaced, so that they come from all layers."""
    return vector[:: -(-len(vector) // COMPARED_NUMBERS)]


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

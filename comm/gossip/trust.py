"""How much a partner counts in a merge of `pull`. Start at `PartnerHistory.believed`, at the end.

A peer whose window q_0 has n_0 tokens merges partners with pseudo-gradients q_i and slow weights phi_i:

    phi    <- phi - (1 - sum_i s_i) q_0 - sum_i s_i clip(|q_i|) q_i - sum_i s_i a_i clip(|phi - phi_i|) (phi - phi_i)
    s_i     = min(MOST_SHARE, t_i c_i / (n_0 + sum_j t_j c_j))                     the share of the merge
    t_i     = with_us_i min(unbiased_i, useful_i) plausible_i not_far_i new_i      trust in the window, from 0 to 1
    c_i     = min(tokens_i, explained_i, copied_i, TIMES_USUAL_TOKENS usual tokens)     the claim
    clip(x) = min(1, TIMES_USUAL usual(x) / x)

`TokenClaims` has limited tokens_i before. copied_i is the claim of the window that i's is a copy of, or the usual one
if that is more. comm/gossip/influence.py has s, explained, plausible and clip, and in `Outliers` not_far_i and a_i, the
trust in slow weights; the other factors are here. Where our window has no step nothing can be compared: then t_i = 1
and c_i = tokens_i.

`saves` is the loss with one liar of five, over the loss without a liar: before the factor, and with all factors (for
with_us, s and clip: without any factor, and with all). `costs` is measured where nobody lies; its losses are over the
loss without the factor. All factors cost 0.2% of the loss and, with invitations, 0.2% of the time
(docs/results/security.md).

    factor       rule, and its source                      saves                  costs
    with_us      no negative cosine                        flipped 1.076, 1.001   0.8 ms of a worker in each merge, with
                 (FLTrust, arXiv 2012.13995)               opposed 1.055, 1.001   unbiased and useful
    unbiased     no lasting difference in one direction    little 1.030, 1.001    loss: 1.000 where devices are equal,
                 (1902.06156; history: 2012.10333)                                1.000 to 1.004 at speeds of 1 to 1/10,
    useful       some common progress over windows         random 1.014, 1.004    with useful
                                                           zero 1.012, 1.002
    new, copied  the same window counts once               copied 1.055, 1.005    0.3 ms in each merge; loss: 0.988 to
                                                           belated 1.029, 1.008   1.008
    a, not_far   slow weights near the median              hidden 1.164, 1.004    1.8 ms in a merge with slow weights of
                 (1803.01498)                              astray 1.413, 1.001    4 partners, 18 ms of 16; loss: 0.999
    s, clip      bounds from honest training               tokens 1.89, 1.001     not measured alone
                 (2202.01545, 2012.10333)                  grown 410, 0.999

A copy under noise that is twice as long (`blurred`) costs 3.8%, and no factor prevents that. What factors know of
earlier windows is lost in a restart; with_us, s and clip need none of it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median_high, median_low
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip import influence
from decentral.comm.gossip.influence import COMPARED_NUMBERS, MOST_KNOWN, Experience, Outliers
from decentral.comm.gossip.update_rules import Parts, Window
from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

STRETCHES = 128
STRETCH_NUMBERS = 256
SECRET_NUMBERS = 64  # of our residual, from which the sample's places follow
NOISE = 2.0  # standard deviations of a cosine of unrelated vectors: chance makes 0.02 of COMPARED_NUMBERS

# with_us
MOST_TIMES_OURS = 10.0  # a partner's window is no longer than so many of ours: no product of the two is too large
AGAINST = 3.0  # times what chance makes: further below zero is none, though a model's numbers are not independent

# unbiased
PERIOD_WINDOWS = 5  # of ours: deviations are compared with those before the last period, 5 to 10 windows old or older
OLD_SUM_KEPT = 0.9  # of the sum of old deviations, with each period
ALLOWED_COSINE = 0.175  # and what chance makes: the cosine up to which a partner counts whole, whatever is usual
TIMES_USUAL_COSINE = 1.5  # or up to so many times the usual one; from twice that on it counts for nothing

# useful
KEPT = 0.95  # of what earlier windows weigh, with each one: the mean of about twenty
WINDOWS_NEEDED = 5.0  # weight of the windows before a partner is judged
WHOLE = 0.2  # of the usual mean cosine, from which a partner counts whole

# new
DIFFERENT = 0.3  # of the way from the usual cosine to 1, up to which two windows count as two
SAME = 0.5  # and from which they count as one
BY_CHANCE = 3.0  # times what chance makes of the cosine of two unrelated windows
MERGES_KEPT = 8  # whose windows are known again; who waits longer sends what has become useless


@dataclass(frozen=True, slots=True)
class WindowSample:
    """The numbers [begin, begin + STRETCH_NUMBERS) of a vector of `elements`, for each begin; without any: all.

    The places, and the order of the stretches, follow from what quantisation has kept back of our own progress, which
    no other peer knows. Nobody can predict which parameters are sampled, not even the first ones read. Stretches are
    whole blocks of the codec, so they are decoded like any other section.
    """

    elements: int
    begins: tuple[int, ...] = ()

    @classmethod
    def drawn(cls, elements: int, secret: Tensor) -> "WindowSample":
        """`secret`: a vector [elements] that only this peer knows. A last stretch that is not whole is left out."""
        if elements <= COMPARED_NUMBERS:
            return cls(elements)
        chance = rng.stream(0, "sample", secret[:SECRET_NUMBERS].numpy().tobytes().hex())
        places = range(elements // STRETCH_NUMBERS)
        return cls(elements, tuple(STRETCH_NUMBERS * at for at in chance.sample(places, min(STRETCHES, len(places)))))

    def read(self, codec: str, codecs: Codecs, blob: bytes | memoryview) -> Tensor:
        """The sampled numbers of a vector in this blockwise codec, fp32. Its size must be theirs."""
        if not self.begins:
            return codecs.decode(codec, blob, self.elements)
        part = blockwise.stretches(codec, blob, self.elements, self.begins, STRETCH_NUMBERS)
        return codecs.decode(codec, part, len(self.begins) * STRETCH_NUMBERS)

    def take(self, vector: Tensor) -> Tensor:
        """Likewise of a vector that is not encoded, which this shares no memory with."""
        if not self.begins:
            return vector.clone()
        return torch.cat([vector[begin : begin + STRETCH_NUMBERS] for begin in self.begins])


@dataclass(slots=True)
class Deviation:
    """How one partner's windows differed from ours: vectors of lengths up to 2 each, summed by period.

    A sum is None where no window is in it.
    """

    fresh: Tensor | None = None
    waiting: Tensor | None = None
    old: Tensor | None = None
    persistence: float | None = None  # the last cosine with the old ones; None: nothing is old yet

    def add(self, found: Tensor) -> None:
        """Take a window's difference, which is this object's from now on."""
        if self.old is not None and bool(self.old.any()):
            self.persistence = float(torch.nn.functional.cosine_similarity(found, self.old, dim=0))
        self.fresh = found if self.fresh is None else self.fresh.add_(found)

    def end_period(self) -> None:
        if self.old is not None:
            self.old.mul_(OLD_SUM_KEPT)
        if self.waiting is not None:
            self.old = self.waiting if self.old is None else self.old.add_(self.waiting)
        self.fresh, self.waiting = None, self.fresh


@dataclass(slots=True)
class Deviations:
    """Whether a partner's progress differs from ours in the same direction window after window; one fragment's.

    Honest peers' windows differ by the noise of their data. The optimizer's momentum carries that on for some windows,
    and after ten there is next to nothing of it left: the cosine of what differs now with the sum of what differed then
    is 0.0 to 0.2. A peer that pulls the model somewhere has to pull there for long, in each window by little: then it
    is 0.4 to 0.7, however near to the others each of its windows is (a little is enough: Baruch et al., arXiv
    1902.06156; why only history helps: Karimireddy et al., arXiv 2012.10333). A direction that changes hides this, and
    averages out like noise.

    Partners whose data are of another kind than ours deviate for good as well; each is judged by what is usual among
    them.
    """

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
            deviation = self.known.get(peer) or Deviation()
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


@dataclass(slots=True)
class CommonProgress:
    """Whether a partner's progress has anything in common with ours, over many windows; one fragment's.

    In one window an honest partner's cosine with ours is 0.1 or so, and that of noise is 0 give or take 0.01: too near
    for a verdict. Over twenty windows the mean tells them apart: honest partners of about our speed have 0.07 to 0.18,
    one that sends noise, or nothing, 0.00. Such a partner does not pull us anywhere, but takes the place of one that
    would help. A device ten times slower or faster than ours has little in common with us as well, though it is honest:
    what counts is how much is usual among our partners, and a partner with a fifth of that counts whole.
    """

    sums: dict[PeerId, tuple[float, float]] = field(default_factory=dict)  # of cosines with us, and how many windows

    def useful(self, cosines: Sequence[tuple[PeerId, float]], chance: float) -> list[float]:
        """How much of each partner's progress counts by this, from 0 to 1.

        `chance`: what chance makes of a cosine. Where no more than that is usual, nobody is judged.
        """
        for peer, found in cosines:
            total, windows = self.sums.get(peer, (0.0, 0.0))
            known = KEPT * total + found, KEPT * windows + 1.0
            keep_latest(self.sums, peer, known, max(MOST_KNOWN, len(cosines)))
        means, usual = self._means(), self.usual()
        if usual is None or usual < chance:
            return [1.0] * len(cosines)
        return [min(1.0, max(0.0, means.get(peer, usual) / (WHOLE * usual))) for peer, _ in cosines]

    def usual(self) -> float | None:
        """The mean cosine with us of the median partner, if any can be judged; of two partners, of the lesser one."""
        means = self._means()
        return median_low(means.values()) if means else None

    def usual_at_most(self) -> float | None:
        """Likewise; of two partners, of the better one, as the other may be useless."""
        means = self._means()
        return median_high(means.values()) if means else None

    def _means(self) -> dict[PeerId, float]:
        return {peer: total / windows for peer, (total, windows) in self.sums.items() if windows >= WINDOWS_NEEDED}


@dataclass(slots=True)
class Agreement:
    """How far one fragment's windows agree with ours: with_us, unbiased and useful.

    In one window most of an honest pseudo-gradient is the noise of its own data: its cosine with ours is 0.1 or so, and
    that of unrelated vectors as long as a model is nearly zero. So a negative one is no chance (trust by the cosine
    with one's own update: FLTrust, Cao et al., arXiv 2012.13995). What a liar hides in that noise shows over windows.
    How far sums over windows agree with ours says less: what a fast device has contributed by chance the others take
    back in the windows after, so that their sums and its own are at odds though all are honest.
    """

    deviations: Deviations = field(default_factory=Deviations)
    common: CommonProgress = field(default_factory=CommonProgress)

    def trust(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        """How much of each partner's progress counts, from 0 to 1. Vectors are samples of the windows, fp32 [m].

        What points against our own window counts for nothing at once. A window without a step of ours says nothing.
        """
        if not bool(window.any()):
            return [1.0] * len(partners)
        ours, chance = _length(window), chance_of(window)
        partners = [(peer, _at_most(vector, MOST_TIMES_OURS * ours)) for peer, vector in partners]
        cosines = [(peer, _cosine(window, ours, vector)) for peer, vector in partners]
        unbiased, useful = self.deviations.unbiased(window, partners), self.common.useful(cosines, chance)
        return [
            min(one, other) if found >= -AGAINST * chance else 0.0
            for (_, found), one, other in zip(cosines, unbiased, useful, strict=True)
        ]


def _at_most(vector: Tensor, length: float) -> Tensor:
    found = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    return vector * (length / found) if found > length else vector


def _length(vector: Tensor) -> float:
    return sqrt(float(vector @ vector))


def _cosine(ours: Tensor, length: float, theirs: Tensor) -> float:
    """Zero where one of them is zero. `length`: of ours."""
    lengths = length * _length(theirs)
    return float(ours @ theirs) / lengths if lengths else 0.0


class CopiedParts(NamedTuple):
    """How far the windows of partners are copies, each from 0 to 1: the same progress counts once.

    Windows of honest peers have a direction in common, and each has the noise of its own data, which averages out as
    far as there are several. A copy brings none of its own: it makes that of one peer count twice, and takes it back to
    the peer it is from, which then goes the same way again. Nobody can tell which of two is the copy, so both count
    half; and neither claims more tokens than the other or, if that is more, than is usual. Of a window that has counted
    in one of the last merges it is plain: a copy that comes after it counts for nothing.

    How alike honest windows are depends on their length and on how far training is: cosines of 0.05 to 0.7. So what
    counts is (cosine - usual) / (1 - usual). Usual is what is so among us and the partners of a merge, or with us over
    many windows (`CommonProgress`) if that is more: one partner that sends noise must not make copies of all others. Of
    honest pairs 97 in 100 are below 0.05 where devices are equal, and below 0.3 where one is ten times as fast as
    another; only in the first ten windows of all they can be anywhere. In a model of few numbers chance alone makes any
    cosine, so what it makes counts as usual.
    """

    counted: list[float]  # of our own window, or of one that has counted before
    others: list[list[float]]  # of each other's; 1 of its own

    def new(self) -> list[float]:
        """How much of each partner's progress is new to us."""
        return [(1.0 - copied) / sum(row) for copied, row in zip(self.counted, self.others, strict=True)]

    def claims(self, tokens: Sequence[float], usual: float) -> list[float]:
        """The tokens that each may claim: what its copies claim, or is usual; the more, the less they are copies."""
        return [
            min([claim, *(max(usual, other) / alike for alike, other in zip(row, tokens, strict=True) if alike)])
            for claim, row in zip(tokens, self.others, strict=True)
        ]


@dataclass(slots=True)
class CountedWindows:
    """What one fragment's last merges were made of: whose windows, ours first, and their directions.

    Of samples the first COMPARED_NUMBERS are compared, or all if they are fewer: fp32 [windows, numbers].
    """

    merges: deque[tuple[list[PeerId | None], Tensor]] = field(default_factory=lambda: deque(maxlen=MERGES_KEPT))

    def copied_parts(
        self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]], known: float | None
    ) -> CopiedParts:
        """As the function below, for one merge more: what of it is new has counted from now on."""
        peers, vectors = [peer for peer, _ in partners], [vector for _, vector in partners]
        merge = normalize(torch.stack([vector[:COMPARED_NUMBERS] for vector in (window, *vectors)]), dim=1)
        found = copied_parts(window, vectors, known, self._most_alike(peers, merge[1:]))
        fresh = [0, *(at for at, new in enumerate(found.new(), start=1) if new)]
        counted = merge if len(fresh) == len(merge) else merge[fresh]
        self.merges.append(([[None, *peers][at] for at in fresh], counted))
        return found

    def _most_alike(self, peers: Sequence[PeerId], directions: Tensor) -> list[float]:
        """The largest cosine of each partner's window with one that has counted: ours, or another partner's."""
        most = [-1.0] * len(peers)
        for whose, counted in self.merges:
            for other, row in zip(whose, (counted @ directions.T).tolist(), strict=True):
                most = [
                    found if other == peer else max(found, cosine)
                    for peer, found, cosine in zip(peers, most, row, strict=True)
                ]
        return most


def copied_parts(
    window: Tensor, partners: Sequence[Tensor], known: float | None, before: Sequence[float] | None = None
) -> CopiedParts:
    """`window`: ours. All are samples of the same numbers, fp32 [m]. `known`: partners' usual cosine with us; without
    that, or with one partner, nobody can tell what is usual here. `before`: the most alike of those that have counted.
    """
    count, chance = len(partners), BY_CHANCE * chance_of(window)
    directions = normalize(torch.stack([window, *partners]), dim=1)
    cosines: list[list[float]] = (directions @ directions.T).tolist()
    usual = 1.0
    if known is not None and count > 1:
        among = median_low([cosines[one][other] for one in range(count + 1) for other in range(one)])
        usual = max(known, among) + chance
    ours = [row[0] for row in cosines[1:]]
    counted = ours if before is None else map(max, ours, before)
    return CopiedParts(
        [_copied(cosine, usual) for cosine in counted],
        [
            [1.0 if one == other else _copied(row[other], usual) for other in range(1, count + 1)]
            for one, row in enumerate(cosines[1:], start=1)
        ],
    )


def _copied(cosine: float, usual: float) -> float:
    """From 0 to 1. Where all windows are the same there are no copies."""
    if usual >= 1.0:
        return 0.0
    above = (cosine - usual) / (1.0 - usual)
    return min(1.0, max(0.0, (above - DIFFERENT) / (SAME - DIFFERENT)))


@dataclass(frozen=True, slots=True)
class PulledWindow(Parts):
    """A partner's window: its sections stay encoded until the merge, which reads them once."""

    pseudo_gradient: bytes | memoryview = b""  # in q4, whatever it was on the wire
    length: float = 0.0  # of the pseudo-gradient
    phi: bytes | memoryview | None = None  # where the slow weights were pulled
    distance: float = 0.0  # of those from ours


@dataclass(slots=True)
class PartnerHistory:
    """What one fragment's windows, ours and our partners', have shown of each partner."""

    experience: Experience = field(default_factory=Experience)
    agreement: Agreement = field(default_factory=Agreement)
    outliers: Outliers = field(default_factory=Outliers)
    counted: CountedWindows = field(default_factory=CountedWindows)

    def believed(
        self,
        closed: tuple[Window, bytes],
        partners: Sequence[PulledWindow],
        progress: float,
        read: Callable[[bytes | memoryview], Tensor],
    ) -> tuple[list[float], list[float]]:
        """Return the tokens credited to each partner (c_i), and the trust in it from 0 to 1 (t_i).

        Args:
            closed: Our window and its pseudo-gradient, encoded. Without tokens it cannot tell anything.
            partners: Their windows.
            progress: The usual length of a pseudo-gradient.
            read: Decodes of a pseudo-gradient the numbers of a sample that nobody else can predict.
        """
        own, blob = closed
        claims = [float(one.tokens) for one in partners]
        if not own.tokens:
            return claims, [1.0] * len(partners)
        ours, theirs = read(blob), [read(one.pseudo_gradient) for one in partners]
        by_peer = [*zip((one.peer for one in partners), theirs, strict=True)]
        trust = [
            agrees * influence.plausible(one.length, progress) * (not self.outliers.is_far(one.peer))
            for agrees, one in zip(self.agreement.trust(ours, by_peer), partners, strict=True)
        ]
        usual, made = influence.usual(own.tokens, claims), self.experience.lengths[-1]
        claims = [
            min(claim, influence.explained_tokens(one.length, own.tokens, made))
            for claim, one in zip(claims, partners, strict=True)
        ]
        heard = [at for at, counts in enumerate(trust) if counts]  # what does not count makes a copy of nobody
        common = self.agreement.common.usual_at_most()
        copies = self.counted.copied_parts(ours, [by_peer[at] for at in heard], common)
        believed = copies.claims([claims[at] for at in heard], usual)
        for at, new, claim in zip(heard, copies.new(), believed, strict=True):
            trust[at], claims[at] = trust[at] * new, claim
        return claims, trust

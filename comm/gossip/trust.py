"""Trust in partners: the weight of each partner's window in a merge of the `pull` algorithm.

Start at `PartnerHistory.judged`, at the end of the file. A window is what a peer trains between two closes. A peer
whose own window has the pseudo-gradient q_0 and n_0 tokens merges partners with q_i and slow weights phi_i:

    phi    <- phi - (1 - sum_i s_i) q_0 - sum_i s_i clip(|q_i|) q_i - sum_i s_i a_i near(|phi - phi_i|) (phi - phi_i)
    s_i     = min(MOST_SHARE, t_i c_i / (n_0 + sum_j t_j c_j))                     share of the merge
    t_i     = with_us_i min(unbiased_i, useful_i) plausible_i not_far_i new_i seldom_i      trust, from 0 to 1
    c_i     = min(tokens_i, explained_i, copied_i, often_i, TIMES_USUAL_TOKENS usual tokens)     tokens credited
    clip(x) = min(1, TIMES_USUAL usual(x) / x)
    near(x) = clip(x), but falling to 0 between TIMES_NEAR and 2 TIMES_NEAR usual(x)

tokens_i is the claim after `TokenClaims` has bounded it. copied_i is the claim of the window that i's window copies or,
if larger, the usual claim. seldom_i and often_i are bounds for partners that often resemble others
(`CountedWindows.resemblance_limits`). comm/gossip/influence.py computes s, explained, plausible, clip (`scale`) and
near (`nearness`); `Outliers` in that file computes not_far_i and a_i, the trust in slow weights. If our window has no
tokens, t_i = 1 and c_i = tokens_i.

The rules, by factor, and their sources (docs/results/security.md measures what each saves and costs):

    with_us        no negative cosine with our window (FLTrust, arXiv 2012.13995)
    unbiased       no lasting difference from ours in one direction (arXiv 1902.06156; history: 2012.10333)
    useful         some common progress over windows
    new, copied    the same window counts once
    seldom, often  no lasting resemblance to others, as of a copy hidden under noise
    not_far, a     slow weights near the median (arXiv 1803.01498)
    s, clip        bounds from honest training (arXiv 2202.01545, 2012.10333)

A restart loses what the factors know of earlier windows; with_us, s and clip use no earlier windows.
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

from decentral.comm.codecs.encoded_pieces import joined_pieces
from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip import influence
from decentral.comm.gossip.influence import (
    COMPARED_NUMBERS,
    MOST_KNOWN,
    Deviations,
    Experience,
    Outliers,
    chance_of,
    part_that_is_allowed,
)
from decentral.comm.gossip.update_rules import PulledWindow, Window
from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest

STRETCHES = 128  # vectors are compared in at most this many sampled pieces
STRETCH_NUMBERS = 256  # numbers in a sampled piece; a multiple of every codec's block
SECRET_NUMBERS = 64  # this many numbers of our unpublished quantisation residual seed the choice of sampled pieces

# `with_us`: a partner's window that points against ours is not trusted.
MOST_TIMES_OURS = 10.0  # a pseudo-gradient is scaled down to at most this many times the length of ours: no overflow
AGAINST = 3.0  # a window has weight 0 if its cosine with ours is below minus this many times the chance level (NOISE)

# `useful`: a partner whose progress has nothing in common with ours is not trusted.
KEPT = 0.95  # each new window multiplies the weights of earlier windows by this, for a mean over about 20 windows
WINDOWS_NEEDED = 5.0  # a partner is judged only once the weights of its windows sum to this
WHOLE = 0.2  # a partner has full weight if its mean cosine with us is at least this fraction of the partners' median

# `new` and `copied`: copies of a window count once.
DIFFERENT = 0.3  # two windows whose copy measure (see `CopiedParts`) is smaller are not copies of each other
SAME = 0.5  # two windows whose copy measure (see `CopiedParts`) is larger count as one window
BY_CHANCE = 3.0  # this many chance levels are added to the usual cosine, as small models have large cosines by chance
SELDOM = 0.1  # up to this mean copy measure over many windows, a partner is credited with all tokens that it claims
MERGES_KEPT = 8  # copies of windows of the last MERGES_KEPT merges are recognised; older windows would help no attacker


@dataclass(frozen=True, slots=True)
class WindowSample:
    """Which parts of two vectors of `elements` numbers are compared: pieces of STRETCH_NUMBERS numbers.

    `begins` has the first index of each piece; if it is empty, all numbers are compared. The pieces and their order
    follow from our own quantisation residual. No other peer knows that residual, so no partner can predict which
    parameters are compared. A piece consists of whole codec blocks, so it can be decoded alone.
    """

    elements: int
    begins: tuple[int, ...] = ()

    @classmethod
    def drawn(cls, elements: int, secret: Tensor) -> "WindowSample":
        """Return a random sample for vectors of `elements` numbers: all numbers if they are few, else STRETCHES pieces.

        The choice is seeded by `secret`, fp32 [elements], which only this peer knows.
        """
        if elements <= COMPARED_NUMBERS:
            return cls(elements)
        chance = rng.stream(0, "sample", secret[:SECRET_NUMBERS].numpy().tobytes().hex())
        places = range(elements // STRETCH_NUMBERS)
        return cls(elements, tuple(STRETCH_NUMBERS * at for at in chance.sample(places, min(STRETCHES, len(places)))))

    def read(self, codec: str, codecs: Codecs, blob: bytes | memoryview) -> Tensor:
        """Return the sampled numbers, fp32, of a vector of `elements` numbers that a blockwise codec has encoded.

        Raises:
            ProtocolError: If the blob has the wrong size, or the codec refuses it.
        """
        if not self.begins:
            return codecs.decode(codec, blob, self.elements)
        part = joined_pieces(codec, blob, self.elements, self.begins, STRETCH_NUMBERS)
        return codecs.decode(codec, part, len(self.begins) * STRETCH_NUMBERS)

    def within(self, part: slice) -> tuple["WindowSample", Tensor]:
        """Return the sample of a part of the vectors, and the indices of its numbers in the whole sample.

        The part begins and ends with a piece. If there are no indices, the sample of the part is not valid.
        """
        length, piece = part.stop - part.start, torch.arange(STRETCH_NUMBERS)
        if not self.begins:
            return WindowSample(length), torch.arange(part.start, part.stop)
        inside = [(begin - part.start, at) for at, begin in enumerate(self.begins) if part.start <= begin < part.stop]
        at = [STRETCH_NUMBERS * place + piece for _, place in inside]
        return WindowSample(length, tuple(begin for begin, _ in inside)), torch.cat(at) if at else piece[:0]

    def take(self, vector: Tensor) -> Tensor:
        """Return a copy of the sampled numbers of a plain (not encoded) vector."""
        if not self.begins:
            return vector.clone()
        return torch.cat([vector[begin : begin + STRETCH_NUMBERS] for begin in self.begins])


@dataclass(slots=True)
class PartnerMeans:
    """Mean of a figure of each partner over about 20 of its windows; the newest window has the largest weight."""

    sums: dict[PeerId, tuple[float, float]] = field(default_factory=dict)  # weighted sum of figures, sum of weights

    def add(self, figures: Sequence[tuple[PeerId, float]]) -> None:
        """Record the figure of one more window of each of these partners."""
        for peer, found in figures:
            total, windows = self.sums.get(peer, (0.0, 0.0))
            known = KEPT * total + found, KEPT * windows + 1.0
            keep_latest(self.sums, peer, known, max(MOST_KNOWN, len(figures)))

    def mean(self, peer: PeerId) -> float | None:
        """Return the mean of a partner; None before it has WINDOWS_NEEDED windows."""
        total, windows = self.sums.get(peer, (0.0, 0.0))
        return total / windows if windows >= WINDOWS_NEEDED else None

    def known(self) -> list[float]:
        """Return the means of all partners that have one."""
        return [mean for peer in self.sums if (mean := self.mean(peer)) is not None]


@dataclass(slots=True)
class CommonProgress:
    """Detector of partners whose progress in one fragment has nothing in common with ours over many windows.

    In one window, the cosine of an honest partner with ours is about 0.1 and the cosine of noise is 0 +- 0.01: too
    close to decide. The mean over 20 windows separates them: it is 0.07 to 0.18 for honest partners of about our speed,
    and 0.00 for a partner that sends noise or zeros. An honest device that is ten times slower or faster than ours also
    has a low mean, so a partner has full weight if its mean is at least a fifth of the median partner's mean.
    """

    cosines: PartnerMeans = field(default_factory=PartnerMeans)

    def useful(self, cosines: Sequence[tuple[PeerId, float]], chance: float) -> list[float]:
        """Record the cosine of each partner's pseudo-gradient with ours, and return how much each counts, from 0 to 1.

        While the median of the partners' mean cosines is below the chance level `chance`, all partners count 1.
        """
        self.cosines.add(cosines)
        usual = self.usual()
        if usual is None or usual < chance:
            return [1.0] * len(cosines)
        means = (self.cosines.mean(peer) for peer, _ in cosines)
        return [1.0 if mean is None else min(1.0, max(0.0, mean / (WHOLE * usual))) for mean in means]

    def usual(self) -> float | None:
        """Return the lower median of the partners' mean cosines with us; None if no partner can be judged yet."""
        means = self.cosines.known()
        return median_low(means) if means else None

    def usual_at_most(self) -> float | None:
        """Return the upper median of the partners' mean cosines with us; of two partners, it is the larger mean."""
        means = self.cosines.known()
        return median_high(means) if means else None


@dataclass(slots=True)
class Agreement:
    """Judge of how well partners' windows of one fragment agree with ours, by the factors with_us, unbiased and useful.

    Most of an honest pseudo-gradient is noise of its own data, so its cosine with ours is only about 0.1. Unrelated
    vectors of a model's size have a cosine of nearly 0. So a clearly negative cosine means an attack (trust by cosine:
    FLTrust, Cao et al., arXiv 2012.13995). An attack that is hidden in the noise is visible only over many windows.
    """

    deviations: Deviations = field(default_factory=Deviations)
    common: CommonProgress = field(default_factory=CommonProgress)

    def trust(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        """Record one more pseudo-gradient of each partner, and return how much each partner counts, from 0 to 1.

        `window` is a sample of our own pseudo-gradient, fp32 [m]; `partners` has each partner's sample. A partner whose
        pseudo-gradient points against ours counts 0. If `window` is zero, all count 1, and nothing is recorded.
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
    """Return the cosine of two vectors, 0 if either is zero. `length` is the L2 norm of `ours`."""
    lengths = length * _length(theirs)
    return float(ours @ theirs) / lengths if lengths else 0.0


class CopiedParts(NamedTuple):
    """How far each partner's pseudo-gradient is a copy of another peer's, from 0 to 1, so that copies count only once.

    Honest pseudo-gradients share a direction, and each adds noise of its own data, which averages out over several
    peers. A copy adds no data: it counts one peer's noise twice. If two pseudo-gradients are equal, nobody can tell
    which of them is the copy. So both have half weight, and neither is credited with more tokens than the other peer
    claims or, if larger, the usual claim. A copy of a window in an earlier merge has weight 0.

    The cosine of honest pseudo-gradients is 0.05 to 0.7, depending on their length and on the progress of training. So
    the measure of a copy is (cosine - usual) / (1 - usual). `usual` is the median cosine in the merge or, if larger,
    the mean over many windows (`CommonProgress`): by the median alone, one partner that sends noise would make others
    look like copies. For 97% of honest pairs the measure is below 0.05 on equal devices, and below 0.3 if one device is
    ten times as fast; in the first ten windows of a run it can have any value. A small model has large cosines by
    chance, so BY_CHANCE chance levels are added to the usual cosine.
    """

    counted: list[float]  # for each partner: how far its window copies ours, or another peer's in an earlier merge
    others: list[list[float]]  # [i][j]: how far the windows of partners i and j are copies of each other; 1 if i = j
    most: list[float]  # for each partner: its window's largest copy measure beside all others, at least 0

    def new(self) -> list[float]:
        """Return a factor (0 to 1) for each partner's weight; the factors of a window and its copies sum to 1."""
        return [(1.0 - copied) / sum(row) for copied, row in zip(self.counted, self.others, strict=True)]

    def claims(self, tokens: Sequence[float], usual: float) -> list[float]:
        """Return the tokens credited to each partner, given the `tokens` that each claims and the `usual` claim.

        For each other partner j, partner i's credit is at most the larger of j's claim and the usual claim, divided by
        `others[i][j]`.
        """
        return [
            min([claim, *(max(usual, other) / alike for alike, other in zip(row, tokens, strict=True) if alike)])
            for claim, row in zip(tokens, self.others, strict=True)
        ]


@dataclass(slots=True)
class CountedWindows:
    """The windows with a weight above 0 in one fragment's last merges: their peers (None: this peer) and directions.

    Directions are fp32 [windows, numbers]: unit vectors of the first COMPARED_NUMBERS numbers of the samples.
    """

    merges: deque[tuple[list[PeerId | None], Tensor]] = field(default_factory=lambda: deque(maxlen=MERGES_KEPT))
    measures: PartnerMeans = field(default_factory=PartnerMeans)  # of each partner's largest copy measure in a merge

    def resemblance_limits(self, peer: PeerId, claim: float, usual: float) -> tuple[float, float]:
        """Return the tokens credited to a partner, and a factor (1/2 to 1) of its trust, by its earlier windows.

        A copy under noise that is twice as long is hardly a copy in one merge, and not at all where its original is
        missing. But its mean copy measure over many windows is 0.2 to 0.45, and that of the peers that it copies below
        0.26. Above SELDOM, claims above the `usual` one count less; above 2 SELDOM, trust falls. The mean of honest
        equal partners is at most 0.05; at speeds of 1 to 1/10 it is 0.01 for the fastest, and up to 0.28 for slow ones,
        which lose a fifth of their trust then.
        """
        mean = self.measures.mean(peer)
        more = max(0.0, claim - usual) * part_that_is_allowed(mean, SELDOM)
        return min(claim, usual + more), 0.5 + 0.5 * part_that_is_allowed(mean, 2 * SELDOM)

    def copied_parts(
        self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]], known: float | None
    ) -> CopiedParts:
        """Return how far partners' windows copy windows of this or an earlier merge, and add this merge to `merges`.

        The arguments are those of the function `copied_parts`, with the peer's id for each partner.
        """
        peers, vectors = [peer for peer, _ in partners], [vector for _, vector in partners]
        merge = normalize(torch.stack([vector[:COMPARED_NUMBERS] for vector in (window, *vectors)]), dim=1)
        found = copied_parts(window, vectors, known, self._most_alike(peers, merge[1:]))
        self.measures.add([*zip(peers, found.most, strict=True)])
        fresh = [0, *(at for at, new in enumerate(found.new(), start=1) if new)]
        counted = merge if len(fresh) == len(merge) else merge[fresh]
        self.merges.append(([[None, *peers][at] for at in fresh], counted))
        return found

    def _most_alike(self, peers: Sequence[PeerId], directions: Tensor) -> list[float]:
        """Return each partner's largest cosine with another peer's window in an earlier merge; -1 if there is none."""
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
    """Return how far the pseudo-gradients of one merge are copies of each other.

    Args:
        window: Sample of our pseudo-gradient, fp32 [m].
        partners: The same sample of each partner's pseudo-gradient.
        known: Usual cosine of a partner's window with ours. If None, or with one partner, nothing counts as a copy.
        before: Each partner's largest cosine with another peer's window in an earlier merge.
    """
    count, chance = len(partners), BY_CHANCE * chance_of(window)
    directions = normalize(torch.stack([window, *partners]), dim=1)
    cosines: list[list[float]] = (directions @ directions.T).tolist()
    usual = 1.0
    if known is not None and count > 1:
        among = median_low([cosines[one][other] for one in range(count + 1) for other in range(one)])
        usual = max(known, among) + chance
    earlier = before or [-1.0] * count
    counted = [_measure(max(row[0], found), usual) for row, found in zip(cosines[1:], earlier, strict=True)]
    among_partners = [
        [0.0 if one == other else _measure(row[other], usual) for other in range(1, count + 1)]
        for one, row in enumerate(cosines[1:], start=1)
    ]
    return CopiedParts(
        [_copied(measure) for measure in counted],
        [
            [1.0 if one == other else _copied(measure) for other, measure in enumerate(row)]
            for one, row in enumerate(among_partners)
        ],
        [max([measure, *row]) for measure, row in zip(counted, among_partners, strict=True)],
    )


def _measure(cosine: float, usual: float) -> float:
    """Return the copy measure of two windows with this cosine, at least 0; 0 if `usual` is 1 or more."""
    return max(0.0, (cosine - usual) / (1.0 - usual)) if usual < 1.0 else 0.0


def _copied(measure: float) -> float:
    """Return how far two windows are copies of each other, from 0 (different) to 1, given their copy measure."""
    return min(1.0, max(0.0, (measure - DIFFERENT) / (SAME - DIFFERENT)))


@dataclass(slots=True)
class PartnerHistory:
    """What this peer remembers about the partners of one fragment, in order to judge their next windows."""

    experience: Experience = field(default_factory=Experience)
    agreement: Agreement = field(default_factory=Agreement)
    outliers: Outliers = field(default_factory=Outliers)
    counted: CountedWindows = field(default_factory=CountedWindows)

    def judged(
        self,
        closed: tuple[Window, bytes],
        partners: Sequence[PulledWindow],
        progress: float,
        read: Callable[[bytes | memoryview], Tensor],
    ) -> tuple[list[float], list[float], list[float]]:
        """Return each partner's credited tokens (c_i), trust (t_i, 0 to 1), and new_i, which is 0 without trust.

        Args:
            closed: Our window, and its pseudo-gradient in q4. Without tokens, every partner's trust is 1.
            partners: The partners' windows.
            progress: The usual length (L2 norm) of a pseudo-gradient.
            read: Decodes the sampled numbers of a pseudo-gradient in q4, as fp32 [m].
        """
        own, blob = closed
        claims = [float(one.tokens) for one in partners]
        if not own.tokens:
            return claims, [1.0] * len(partners), [1.0] * len(partners)
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
        # Compare trusted windows only, so that an untrusted copy does not lower the weight of an honest window.
        heard = [at for at, counts in enumerate(trust) if counts]
        common = self.agreement.common.usual_at_most()
        copies = self.counted.copied_parts(ours, [by_peer[at] for at in heard], common)
        credited, fresh = copies.claims([claims[at] for at in heard], usual), [0.0] * len(partners)
        for at, new, claim in zip(heard, copies.new(), credited, strict=True):
            claims[at], seldom = self.counted.resemblance_limits(partners[at].peer, claim, usual)
            trust[at], fresh[at] = trust[at] * seldom * new, new
        return claims, trust, fresh

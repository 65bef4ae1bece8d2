"""How far partners' progress agrees with ours over the last windows, and so how much of it counts.

In one window most of an honest pseudo-gradient is the noise of its own data: its cosine with ours is 0.1 or so. Over
many windows noise averages out, and what remains is the common direction. A liar's bias remains as well, however little
of it there is in each window: the sum of its windows is longer than others', and points elsewhere. So sums that forget
old windows slowly are compared with ours (history: Karimireddy et al., arXiv 2012.10333; trust by the cosine with one's
own update: FLTrust, Cao et al., arXiv 2012.13995), and each with the usual one: among honest peers all count whole.

A sample of the numbers is enough. Where it lies follows from what quantisation has kept back of our own progress, which
nobody else knows. Its stretches are whole blocks of the codec, so it is decoded like any other section. A restart
forgets all this; the other bounds (train/influence.py) need no history.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from statistics import median_low

import torch
from torch import Tensor

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.train import compress
from decentral.train.deviations import Deviations
from decentral.train.influence import usual
from decentral.train.outer_kernels import PSEUDO_GRADIENT_CODEC
from decentral.train.sections import Codecs

STRETCHES = 32
STRETCH_NUMBERS = 1024
SECRET_NUMBERS = 64  # of our residual, from which the sample's places follow
KEPT = 0.9  # of a sum, with each window that is added to it
MOST_KNOWN = 16  # partners whose sums are kept, or all of a window, if they are more
NOTHING, WHOLE = 1 / 3, 2 / 3  # of the usual cosine: up to the first nothing counts, from the second on all does
MOST_TIMES_OURS = 10.0  # what a window adds to a partner's sum is no longer than so many of ours
TIMES_USUAL_SUM = 1.5  # the usual length of a sum: who has a longer one counts for less in this proportion
NOISE = 2.0  # standard deviations of a cosine of unrelated vectors: what chance may take off one
AGAINST = 3.0  # times that: what is further below zero is no chance, though a model's numbers are not independent


@dataclass(frozen=True, slots=True)
class WindowSample:
    """The numbers [begin, begin + STRETCH_NUMBERS) of a vector of `elements`, for each begin; without any: all."""

    elements: int
    begins: tuple[int, ...] = ()

    @classmethod
    def drawn(cls, elements: int, secret: Tensor) -> "WindowSample":
        """`secret`: a vector [elements] that only this peer knows."""
        if elements <= STRETCHES * STRETCH_NUMBERS:
            return cls(elements)
        chance = rng.stream(0, "sample", secret[:SECRET_NUMBERS].numpy().tobytes().hex())
        places = chance.sample(range(elements // STRETCH_NUMBERS), STRETCHES)
        return cls(elements, tuple(STRETCH_NUMBERS * place for place in sorted(places)))

    def read(self, codecs: Codecs, blob: bytes | memoryview) -> Tensor:
        """The sampled numbers of an encoded pseudo-gradient, fp32. Its size must be that of `elements` numbers."""
        if not self.begins:
            return codecs.decode(PSEUDO_GRADIENT_CODEC, blob, self.elements)
        part = compress.stretches(PSEUDO_GRADIENT_CODEC, blob, self.elements, self.begins, STRETCH_NUMBERS)
        return codecs.decode(PSEUDO_GRADIENT_CODEC, part, len(self.begins) * STRETCH_NUMBERS)


@dataclass(slots=True)
class Agreement:
    """Sums of what we and our partners have published of one fragment."""

    ours: Tensor | None = None
    theirs: dict[PeerId, Tensor] = field(default_factory=dict)
    deviations: Deviations = field(default_factory=Deviations)

    def trust(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        """How much of each partner's progress counts, from 0 to 1. Vectors are samples of the windows, fp32 [m].

        What points against our own window counts for nothing at once. A window without a step of ours says nothing.
        """
        if not bool(window.any()):
            return [1.0] * len(partners)
        partners = [(peer, _at_most(vector, MOST_TIMES_OURS * _length(window))) for peer, vector in partners]
        self.ours = window if self.ours is None else KEPT * self.ours + window
        most_known = max(MOST_KNOWN, len(partners))
        for peer, vector in partners:
            before = self.theirs.get(peer)
            summed = vector if before is None else KEPT * before + vector
            keep_latest(self.theirs, peer, summed, most_known)
        unbiased = self.deviations.unbiased(window, partners, most_known)
        return [
            0.0 if cosine(window, vector) < -AGAINST * chance_of(window) else prod(counts)
            for (_, vector), *counts in zip(
                partners, self._steady(partners), self._agreeing(partners), unbiased, strict=True
            )
        ]

    def _agreeing(self, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        assert self.ours is not None
        known = {peer: cosine(self.ours, total) for peer, total in self.theirs.items()}
        typical = median_low(known.values()) if known else 0.0
        return [part_that_counts(known[peer], typical, chance_of(self.ours)) for peer, _ in partners]

    def _steady(self, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        assert self.ours is not None
        known = {peer: _length(total) for peer, total in self.theirs.items()}
        most = TIMES_USUAL_SUM * usual(_length(self.ours), list(known.values()))
        return [min(1.0, most / known[peer]) if known[peer] else 1.0 for peer, _ in partners]


def part_that_counts(found: float, typical: float, chance: float) -> float:
    """By the cosine that was found, and the typical one; both may be `chance` too low."""
    if found < -AGAINST * chance:
        return 0.0
    if typical <= chance:
        return 1.0
    return min(1.0, max(0.0, ((found + chance) / typical - NOTHING) / (WHOLE - NOTHING)))


def chance_of(window: Tensor) -> float:
    """How far below zero chance may put a cosine of two vectors as long as this one."""
    return NOISE / sqrt(len(window))


def _at_most(vector: Tensor, length: float) -> Tensor:
    found = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    return vector * (length / found) if found > length else vector


def _length(vector: Tensor) -> float:
    return sqrt(float(vector @ vector))


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Zero where one of them is zero."""
    lengths = _length(ours) * _length(theirs)
    return float(ours @ theirs) / lengths if lengths else 0.0

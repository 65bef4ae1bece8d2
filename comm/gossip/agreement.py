"""How much of partners' progress counts: not what points against ours, pulls one way for long, or has nothing of it.

In one window most of an honest pseudo-gradient is the noise of its own data: its cosine with ours is 0.1 or so, and
that of unrelated vectors as long as a model is nearly zero. So a negative one is no chance (trust by the cosine with
one's own update: FLTrust, Cao et al., arXiv 2012.13995). What a liar hides in that noise shows over windows
(comm/gossip/deviations.py), and so does what has nothing in common with ours (comm/gossip/common_progress.py). How far
sums over windows agree with ours says less: what a fast device has contributed by chance the others take back in the
windows after, so that their sums and its own are at odds though all are honest (docs/results/security.md).

A sample of the numbers is enough. Where it lies, and in which order its stretches follow, comes from what quantisation
has kept back of our own progress, which nobody else knows: what looks at the first part of a sample looks at no part of
the model that could be foretold. Stretches are whole blocks of the codec, so they are decoded like any other section. A
restart forgets all this; the other bounds (comm/gossip/influence.py) need no history.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip.common_progress import CommonProgress
from decentral.comm.gossip.deviations import COMPARED_NUMBERS, Deviations, chance_of
from decentral.core import rng
from decentral.core.ids import PeerId

STRETCHES = 128
STRETCH_NUMBERS = 256
SECRET_NUMBERS = 64  # of our residual, from which the sample's places follow
MOST_TIMES_OURS = 10.0  # a partner's window is no longer than so many of ours: no product of the two is too large
AGAINST = 3.0  # times what chance makes: further below zero is none, though a model's numbers are not independent


@dataclass(frozen=True, slots=True)
class WindowSample:
    """The numbers [begin, begin + STRETCH_NUMBERS) of a vector of `elements`, for each begin; without any: all."""

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
class Agreement:
    """What one fragment's windows, ours and our partners', say of whom to believe."""

    deviations: Deviations = field(default_factory=Deviations)
    common: CommonProgress = field(default_factory=CommonProgress)

    def trust(self, window: Tensor, partners: Sequence[tuple[PeerId, Tensor]]) -> list[float]:
        """How much of each partner's progress counts, from 0 to 1. Vectors are samples of the windows, fp32 [m].

        What points against our own window counts for nothing at once. A window without a step of ours says nothing.
        """
        if not bool(window.any()):
            return [1.0] * len(partners)
        partners = [(peer, _at_most(vector, MOST_TIMES_OURS * _length(window))) for peer, vector in partners]
        cosines, chance = [(peer, cosine(window, vector)) for peer, vector in partners], chance_of(window)
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


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Zero where one of them is zero."""
    lengths = _length(ours) * _length(theirs)
    return float(ours @ theirs) / lengths if lengths else 0.0

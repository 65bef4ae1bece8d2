"""Whether two encoded pseudo-gradients point the same way, by a sample of their numbers that no partner can foretell.

Where the sample lies follows from what quantisation has kept back of our own progress, which nobody else knows. The
stretches are whole blocks of the codec, so a sample is decoded like any other section.
"""

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from decentral.core import rng
from decentral.train import compress
from decentral.train.outer_kernels import PSEUDO_GRADIENT_CODEC
from decentral.train.sections import Codecs

STRETCHES = 32
STRETCH_NUMBERS = 1024
SECRET_NUMBERS = 64  # of our residual, from which the sample's places follow


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers [begin, begin + STRETCH_NUMBERS) of a vector of `elements`, for each begin; without any: all."""

    elements: int
    begins: tuple[int, ...] = ()

    @classmethod
    def drawn(cls, elements: int, secret: Tensor) -> "Sample":
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


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Zero where one of them is zero."""
    squares = float(ours.double() @ ours.double()), float(theirs.double() @ theirs.double())
    return float(ours.double() @ theirs.double()) / sqrt(squares[0] * squares[1]) if all(squares) else 0.0

"""The model of a swarm without one: how few numbers stand for a fragment, how they descend, and how large blobs are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.comm.codecs.sections import Codecs
from decentral.core import config
from decentral.core.errors import ProtocolError
from decentral.core.fragments import ActivationForms, Fragment
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob

Numbers = NDArray[np.float32]
"""The weights of one fragment, as numpy sees them."""

NUMBERS = 8  # numbers that stand for a fragment
DESCENT_RATE = 0.02  # share of the distance to the optimum that a step takes away
STEP_NOISE = 0.01  # standard deviation of a step's noise, in units of the distance to the optimum at the start


@dataclass(frozen=True, slots=True)
class SyntheticCodecs:
    """Codecs whose sections have the size of a real fragment's, `times` as many numbers as they hold."""

    codecs: Codecs
    times: float

    def encode(self, codec: str, values: Tensor) -> bytes:
        return SyntheticBlob([(self.size(codec, values.numel()), self.codecs.encode(codec, values))])

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        return self.codecs.decode(codec, memoryview(blob), elements)

    def size(self, codec: str, elements: int) -> int:
        return self.codecs.size(codec, round(elements * self.times))


@dataclass(frozen=True, slots=True)
class PlainCodecs:
    """fp32 under every codec's name: in swarms of thousands, quantisation would take more time than the protocol."""

    codecs: Codecs  # for the sizes

    def encode(self, codec: str, values: Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        values = np.frombuffer(blob, dtype=np.float32)
        if len(values) != elements or not np.isfinite(values).all():
            raise ProtocolError(Reason.NAN, "numbers that are not finite, or not as many as there should be")
        return torch.from_numpy(values.copy())

    def size(self, codec: str, elements: int) -> int:
        return self.codecs.size(codec, elements)


@dataclass(frozen=True, slots=True)
class SurrogateModel:
    """The run whose model the numbers stand for: the same for all peers of a swarm."""

    config: config.Config
    cuts: tuple[Fragment, ...]  # of the whole model
    codecs: Codecs
    tokens_per_step: int
    forms: Callable[[int, int], ActivationForms]  # (layer, sequences): of a micro-batch that enters this layer

    def synthetic_codecs(self) -> SyntheticCodecs:
        return SyntheticCodecs(self.codecs, sum(cut.parameters for cut in self.cuts) / len(self.cuts) / NUMBERS)


def loss_of(weights: Sequence[Numbers]) -> float:
    """Mean square distance of these fragments from the optimum of the quadratic objective, which is zero."""
    squares = [float(numbers @ numbers) / NUMBERS for numbers in weights]
    return sum(squares) / len(squares)

"""Define the surrogate of a model: the numbers that stand for a fragment, their descent, and codecs with real sizes."""

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
"""(NUMBERS,) the weights of one fragment."""

NUMBERS = 8  # a fragment's weights are simulated by this many numbers
DESCENT_RATE = 0.02  # each step moves the weights this share of the way to the optimum
STEP_NOISE = 0.01  # standard deviation of a step's noise, as a share of the initial distance to the optimum


@dataclass(frozen=True, slots=True)
class SyntheticCodecs:
    """Codecs whose blobs report the size of a real fragment's blob, but contain only the surrogate's few numbers."""

    codecs: Codecs
    times: float  # one surrogate number stands for this many parameters of a real fragment

    def encode(self, codec: str, values: Tensor) -> bytes:
        """Return a blob of these values that reports the size of a real fragment's blob."""
        return SyntheticBlob([(self.size(codec, values.numel()), self.codecs.encode(codec, values))])

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        """Return the `elements` values in a blob. Raises ProtocolError for a damaged blob."""
        return self.codecs.decode(codec, memoryview(blob), elements)

    def size(self, codec: str, elements: int) -> int:
        """Return the size in bytes of the real blob that `elements` surrogate numbers stand for."""
        return self.codecs.size(codec, round(elements * self.times))


@dataclass(frozen=True, slots=True)
class PlainCodecs:
    """Codecs that ignore the codec's name and write fp32, since quantising slows simulations of thousands of peers."""

    codecs: Codecs  # the real codecs, used only for the sizes of their blobs

    def encode(self, codec: str, values: Tensor) -> bytes:
        """Return the values as fp32 bytes."""
        return values.numpy().tobytes()

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        """Return the fp32 values in a blob; raise ProtocolError unless there are `elements` finite values."""
        values = np.frombuffer(blob, dtype=np.float32)
        if len(values) != elements or not np.isfinite(values).all():
            raise ProtocolError(Reason.NAN, f"expected {elements} finite fp32 numbers, got {np.isfinite(values).sum()}")
        return torch.from_numpy(values.copy())

    def size(self, codec: str, elements: int) -> int:
        """Return the bytes that the real codec of this name needs for `elements` values."""
        return self.codecs.size(codec, elements)


@dataclass(frozen=True, slots=True)
class SurrogateModel:
    """Settings and sizes of the real model that a surrogate stands for; all peers of a swarm share them."""

    config: config.Config
    cuts: tuple[Fragment, ...]
    codecs: Codecs
    tokens_per_step: int
    # (layer, sequences) -> the layouts of the activations that enter the layer, and of the gradient that is sent back
    forms: Callable[[int, int], ActivationForms]


def loss_of(weights: Sequence[Numbers]) -> float:
    """Return the loss of these fragments: the mean square of their weights, because the optimum is 0."""
    squares = [float(numbers @ numbers) / NUMBERS for numbers in weights]
    return sum(squares) / len(squares)

"""The outer step on vectors in host memory as machine code: one pass to close, one to merge, the GIL free meanwhile.

The formulas, and the order in which they round, are those of train/outer_kernels.py; the loops are in
train/block_kernels.py.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from torch import Tensor

from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.train import block_kernels, compress
from decentral.train.block_kernels import Bytes, Floats
from decentral.train.outer_kernels import (
    ONE_BIT_CODEC,
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    OuterVectors,
    Weighted,
)


class CompiledKernels:
    """outer_kernels.OuterKernels for vectors in host memory and the codecs of train/compress.py."""

    def __init__(self) -> None:
        self._packed = np.empty(0, np.uint8)  # kept for the next close: new memory costs as much as the kernel

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        size = compress.size(PSEUDO_GRADIENT_CODEC, residual.numel())
        if len(self._packed) < size:
            self._packed = np.empty(size, np.uint8)
        blob, vectors = self._packed[:size], (snapshot.cpu().numpy(), baseline.numpy(), residual.numpy())
        squares, largest = block_kernels.close(vectors, blob, code == ONE_BIT_CODEC)
        if largest >= block_kernels.INFINITE:
            raise ProtocolError(Reason.NAN, "the pseudo-gradient holds numbers that are not finite")
        return blob.tobytes(), sqrt(squares)

    def narrow(self, blob: bytes, elements: int) -> bytes:
        return compress.narrowed(blob, elements)

    def widen(self, blob: bytes | memoryview, elements: int) -> bytes:
        return compress.widened(blob, elements)

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        read = compress.as_bytes(PSEUDO_GRADIENT_CODEC, blob, elements)
        squares, fault = block_kernels.length(read, elements)
        compress.refuse(PSEUDO_GRADIENT_CODEC, fault)
        return sqrt(squares)

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        read = compress.as_bytes(SLOW_WEIGHTS_CODEC, blob, phi.numel())
        squares, fault = block_kernels.distance(phi.numpy(), read)
        compress.refuse(SLOW_WEIGHTS_CODEC, fault)
        return sqrt(squares)

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        steps = stacked(PSEUDO_GRADIENT_CODEC, pseudo_gradients, vectors.phi.numel())
        towards = stacked(SLOW_WEIGHTS_CODEC, slow_weights, vectors.phi.numel())
        block_kernels.merge(
            (vectors.phi.numpy(), vectors.baseline.numpy(), vectors.correction.numpy()),
            (steps, towards),
            (factors_of([one.weight for one in pseudo_gradients]), factors_of([one.weight for one in slow_weights])),
            np.float32(rho),
        )


def factors_of(factors: Sequence[float]) -> Floats:
    """Factors as fp32, which is what they are multiplied as."""
    return np.array(factors, np.float32)


def stacked(codec: str, several: Sequence[Weighted], elements: int) -> Bytes:
    """The blobs as the rows of one array. Raises ProtocolError for one of the wrong size."""
    rows = np.empty((len(several), compress.size(codec, elements)), np.uint8)
    for row, one in zip(rows, several, strict=True):
        row[:] = compress.as_bytes(codec, one.blob, elements)
    return rows

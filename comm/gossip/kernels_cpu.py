"""The outer step on vectors in host memory as machine code: one pass to close, one to merge, the GIL free meanwhile.

The formulas, and the order in which they round, are those of comm/gossip/outer_kernels.py; the loops are in
comm/codecs/compiled_blocks.py.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from torch import Tensor

from decentral.comm.codecs import blockwise, compiled_blocks
from decentral.comm.codecs.compiled_blocks import Bytes, Floats
from decentral.comm.gossip.outer_kernels import (
    ONE_BIT_CODEC,
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    OuterVectors,
    Weighted,
)
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason


class CompiledKernels:
    """outer_kernels.OuterKernels for vectors in host memory and the codecs of comm/codecs/blockwise.py."""

    def __init__(self) -> None:
        self._packed = np.empty(0, np.uint8)  # kept for the next close: new memory costs as much as the kernel

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        size = blockwise.size(PSEUDO_GRADIENT_CODEC, residual.numel())
        if len(self._packed) < size:
            self._packed = np.empty(size, np.uint8)
        blob, vectors = self._packed[:size], (snapshot.cpu().numpy(), baseline.numpy(), residual.numpy())
        squares, largest = compiled_blocks.close(vectors, blob, code == ONE_BIT_CODEC)
        if largest >= compiled_blocks.INFINITE:
            raise ProtocolError(Reason.NAN, "the pseudo-gradient holds numbers that are not finite")
        return blob.tobytes(), sqrt(squares)

    def narrow(self, blob: bytes, elements: int) -> bytes:
        return blockwise.narrowed(blob, elements)

    def widen(self, blob: bytes | memoryview, elements: int) -> bytes:
        return blockwise.widened(blob, elements)

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        read = blockwise.as_bytes(PSEUDO_GRADIENT_CODEC, blob, elements)
        squares, fault = compiled_blocks.length(read, elements)
        blockwise.refuse(PSEUDO_GRADIENT_CODEC, fault)
        return sqrt(squares)

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        read = blockwise.as_bytes(SLOW_WEIGHTS_CODEC, blob, phi.numel())
        squares, fault = compiled_blocks.distance(phi.numpy(), read)
        blockwise.refuse(SLOW_WEIGHTS_CODEC, fault)
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
        compiled_blocks.merge(
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
    rows = np.empty((len(several), blockwise.size(codec, elements)), np.uint8)
    for row, one in zip(rows, several, strict=True):
        row[:] = blockwise.as_bytes(codec, one.blob, elements)
    return rows

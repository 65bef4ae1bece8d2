"""The outer step on the CPU as compiled code: `close` and `merge` each read memory once, and release the GIL.

Formulas and rounding order are those of comm/gossip/outer_kernels.py; the loops are in comm/codecs/compiled_blocks.py.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from torch import Tensor

from decentral.comm.codecs import blockwise, compiled_blocks, compiled_sparse
from decentral.comm.codecs.compiled_blocks import Bytes, Floats
from decentral.comm.gossip.outer_kernels import (
    ONE_BIT_CODEC,
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    SPARSE_CODEC,
    OuterVectors,
    Weighted,
)
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason


class CompiledKernels:
    """`OuterKernels` on the CPU, for the codecs of comm/codecs/blockwise.py."""

    def __init__(self) -> None:
        """Create the kernels; the first `close` allocates scratch memory."""
        self._packed = np.empty(0, np.uint8)  # reused by `close`: an allocation takes as long as the kernel

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        """Return the pseudo-gradient in q4 and its L2 norm, and update `residual` in place (`OuterKernels.close`)."""
        size = blockwise.size(PSEUDO_GRADIENT_CODEC, residual.numel())
        if len(self._packed) < size:
            self._packed = np.empty(size, np.uint8)
        blob, vectors = self._packed[:size], (snapshot.cpu().numpy(), baseline.numpy(), residual.numpy())
        if code == SPARSE_CODEC:
            squares, largest = compiled_sparse.close(vectors, blob)
        else:
            squares, largest = compiled_blocks.close(vectors, blob, code == ONE_BIT_CODEC)
        if largest >= compiled_blocks.INFINITE:
            raise ProtocolError(Reason.NAN, "expected a finite pseudo-gradient; some numbers are NaN or infinite")
        return blob.tobytes(), sqrt(squares)

    def narrow(self, code: str, blob: bytes, elements: int) -> bytes:
        """Convert a q4 blob, made by `close` with this code, to a blob of the same values in the code."""
        return blockwise.narrowed(code, blob, elements)

    def widen(self, code: str, blob: bytes | memoryview, elements: int) -> bytes:
        """Convert a q1 or sparse blob to a q4 blob of the same values (`OuterKernels.widen`)."""
        return blockwise.widened(code, blob, elements)

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        """Return the L2 norm of a pseudo-gradient in q4; raise ProtocolError if the codec refuses the blob."""
        read = blockwise.as_bytes(PSEUDO_GRADIENT_CODEC, blob, elements)
        squares, fault = compiled_blocks.length(read, elements)
        blockwise.refuse(PSEUDO_GRADIENT_CODEC, fault)
        return sqrt(squares)

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        """Return the L2 distance of int8 slow weights from phi; raise ProtocolError if the codec refuses the blob."""
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
        """Take the outer step on `vectors`, in place; raise ProtocolError if a blob has the wrong size."""
        steps = stacked(PSEUDO_GRADIENT_CODEC, pseudo_gradients, vectors.phi.numel())
        towards = stacked(SLOW_WEIGHTS_CODEC, slow_weights, vectors.phi.numel())
        compiled_blocks.merge(
            (vectors.phi.numpy(), vectors.baseline.numpy(), vectors.correction.numpy()),
            (steps, towards),
            (factors_of([one.weight for one in pseudo_gradients]), factors_of([one.weight for one in slow_weights])),
            np.float32(rho),
        )


def factors_of(factors: Sequence[float]) -> Floats:
    """Return the factors rounded to fp32, the type in which kernels multiply."""
    return np.array(factors, np.float32)


def stacked(codec: str, several: Sequence[Weighted], elements: int) -> Bytes:
    """Return the blobs as the rows of one array.

    Raises:
        ProtocolError: If a blob does not have the size of `elements` numbers in this codec.
    """
    rows = np.empty((len(several), blockwise.size(codec, elements)), np.uint8)
    for row, one in zip(rows, several, strict=True):
        row[:] = blockwise.as_bytes(codec, one.blob, elements)
    return rows

"""The outer step of asynchronous gossip: its formulas, and a reference implementation in torch.

Start at the protocol `OuterKernels`; `TorchKernels` is the reference. The algorithm is one-sided NoLoCo (arXiv
2506.10911) without its outer momentum, with the fragments of Streaming DiLoCo (2501.18512) and quantised error feedback
(1901.09847). Compiled kernels do in one pass over memory what torch does operation by operation:

    close:  owed = residual + (baseline - snapshot);  q = Q(owed);  residual = owed - q;  then baseline = snapshot
            q is the window's pseudo-gradient as partners decode it. `gossip.code` chooses the quantiser Q. Kernels
            handle only q4 bytes, which can store every value of q1 and sparse: a partner's blob in these codes is
            converted to q4 when it arrives, and our q4 blob is converted to them before it is published.
    merge:  phi = phi - v_i (phi - phi_i)    by calls of its own: for each slice of slow weights that was pulled from i
            g = ((0 + w_0 q_0) + w_1 q_1) + ...                  then our own pseudo-gradient and those of partners
            phi = phi - g                    w and v are the factors of q_i and (phi - phi_i) in comm/gossip/trust.py
            correction = rho (phi - baseline);  baseline = baseline + correction
            With sparse, correction and baseline are then lowered by rho UNSENT_KEPT residual, so that the live weights
            keep a part of the training that is not published yet (comm/gossip/pull_rule.py).
            The correction is added to the live weights between two steps. rho is the share of the correction that is
            applied; a later correction gets a smaller rho (`rho_of`). Then baseline = baseline + residual, and the next
            close begins with a residual of zero, since one vector takes less memory than two. Large fragments keep the
            residual in int8 (`PullRule`).

A window is the time between two closes. The snapshot is a copy of the live weights at the window's end. The baseline is
the snapshot of the last window plus all later corrections. phi are the slow weights, which partners pull.

Every unit of local progress enters phi exactly once, whatever the latency: the baseline moves at the close, and the
residual keeps the quantisation error (q + new residual = old residual + progress). Without partners, phi follows the
live weights.

Every operation rounds to fp32, the factors are rounded to fp32 first, and no product is fused with a sum. So all
implementations return the same vectors and bytes, bit for bit. Lengths are square roots of fp64 sums, summed in any
order: they agree within a relative 1e-9.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs
from decentral.core.choices import OPTIMIZERS
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason

PSEUDO_GRADIENT_CODEC = "q4"  # codec of pseudo-gradients in memory and, by default, on the wire
ONE_BIT_CODEC = "q1"  # codec of pseudo-gradients on slow links, if the config's `gossip.code` allows it
SPARSE_CODEC = "sparse"  # codec of the largest numbers of pseudo-gradients, if `gossip.code` is sparse
SLOW_WEIGHTS_CODEC = "int8"


@dataclass(frozen=True, slots=True)
class Weighted:
    """An encoded vector, and its factor in a weighted sum."""

    weight: float
    blob: bytes | memoryview


@dataclass(frozen=True, slots=True)
class OuterVectors:
    """A fragment's slow state: contiguous fp32 vectors [n] in host memory that do not overlap."""

    phi: Tensor
    baseline: Tensor
    correction: Tensor  # `merge` overwrites this vector without reading it

    def of(self, part: slice) -> "OuterVectors":
        """Return a part of each vector, which shares its memory."""
        return OuterVectors(self.phi[part], self.baseline[part], self.correction[part])


class OuterKernels(Protocol):
    """Interface of the outer step's operations on contiguous fp32 vectors [n].

    Implemented by `TorchKernels`, `CompiledKernels` (CPU) and `CudaKernels`. Only one thread at a time may call them.
    """

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        """Return the window's pseudo-gradient Q(residual + (baseline - snapshot)) in q4 bytes, and its L2 norm.

        The residual becomes the quantisation error, in place.

        Args:
            snapshot: Weights at the window's end, on any device.
            baseline: Weights at the last window's end, plus the corrections since then, in host memory.
            residual: Quantisation error of the windows before, in host memory.
            code: The quantiser Q: "q4", "q1" or "sparse".

        Raises:
            ProtocolError: NAN, if a number is not finite; the content of `residual` is then unspecified.
        """

    def narrow(self, code: str, blob: bytes, elements: int) -> bytes:
        """Convert a q4 blob, made by `close` of these kernels with this code, to the code, without changing a value."""

    def widen(self, code: str, blob: bytes | memoryview, elements: int) -> bytes:
        """Convert a blob in `code`, one of `blockwise.SHORTER_CODECS`, to q4 without changing a value.

        Raises:
            ProtocolError: If the blob's size, or a place in a sparse blob, is wrong. Invalid scales may pass; `length`
                refuses them.
        """

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        """Return the L2 norm of a pseudo-gradient of `elements` numbers in q4.

        Raises:
            ProtocolError: If the codec refuses the blob.
        """

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        """Return the L2 distance of the slow weights in `blob` (int8) from phi.

        Raises:
            ProtocolError: If the codec refuses the blob.
        """

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        """Take the outer step on `vectors`, in place.

        Args:
            vectors: phi and baseline are updated; the correction is written.
            pseudo_gradients: q4 blobs, ours first; `length` must have accepted partners' blobs.
            slow_weights: int8 blobs that `distance` has accepted.
            rho: Share of the correction that is applied, from 0 to 1.

        Raises:
            ProtocolError: If a blob does not have the size of n numbers; the vectors are then unchanged.
        """


class TorchKernels:
    """The outer step in torch operations, with any codecs: the reference, which the simulator uses as well."""

    def __init__(self, codecs: Codecs) -> None:
        """Use these codecs to encode and decode."""
        self.codecs = codecs

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        """Return the pseudo-gradient in q4 and its L2 norm, and update `residual` in place (`OuterKernels.close`)."""
        owed = residual + (baseline - snapshot.to(baseline.device))
        if not bool(torch.isfinite(owed).all()):
            raise ProtocolError(Reason.NAN, "expected a finite pseudo-gradient; some numbers are NaN or infinite")
        blob = self.codecs.encode(code, owed)
        published = self.codecs.decode(code, blob, owed.numel())
        torch.sub(owed, published, out=residual)
        return blob if code == PSEUDO_GRADIENT_CODEC else self.widen(code, blob, owed.numel()), _length(published)

    def narrow(self, code: str, blob: bytes, elements: int) -> bytes:
        """Convert a q4 blob, made by `close` with this code, to a blob of the same values in the code."""
        return self.codecs.encode(code, self.codecs.decode(PSEUDO_GRADIENT_CODEC, blob, elements))

    def widen(self, code: str, blob: bytes | memoryview, elements: int) -> bytes:
        """Convert a q1 or sparse blob to a q4 blob of the same values (`OuterKernels.widen`)."""
        return self.codecs.encode(PSEUDO_GRADIENT_CODEC, self.codecs.decode(code, blob, elements))

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        """Return the L2 norm of a pseudo-gradient in q4; raise ProtocolError if the codec refuses the blob."""
        return _length(self.codecs.decode(PSEUDO_GRADIENT_CODEC, blob, elements))

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        """Return the L2 distance of int8 slow weights from phi; raise ProtocolError if the codec refuses the blob."""
        return _length(self.codecs.decode(SLOW_WEIGHTS_CODEC, blob, phi.numel()) - phi)

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        """Take the outer step on `vectors`, in place; raise ProtocolError if a blob has the wrong size."""
        phi, n = vectors.phi, vectors.phi.numel()
        step, consensus = torch.zeros_like(phi), torch.zeros_like(phi)
        for one in pseudo_gradients:
            step += one.weight * self.codecs.decode(PSEUDO_GRADIENT_CODEC, one.blob, n)
        for one in slow_weights:
            consensus += one.weight * (phi - self.codecs.decode(SLOW_WEIGHTS_CODEC, one.blob, n))
        phi -= step
        phi -= consensus
        torch.mul(phi - vectors.baseline, rho, out=vectors.correction)
        vectors.baseline.add_(vectors.correction)


def _length(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def rho_of(steps: int, optimizer: str) -> float:
    """Return rho (0 < rho <= 1): which share of a correction to apply, `steps` local steps after the window's close.

    With AdamW rho = min(1, 2 / (1 + steps)): during these steps training itself undoes part of a deviation, so the
    whole correction would overshoot. With Muon rho = 1 gave better results (docs/results/convergence.md).
    """
    return 1.0 if OPTIMIZERS[optimizer].takes_all else min(1.0, 2 / (1 + max(0, steps)))

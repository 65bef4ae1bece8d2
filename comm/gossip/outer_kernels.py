"""The outer step of asynchronous gossip on packed bytes and vectors in host memory: formulas, and how torch does it.

One-sided NoLoCo (arXiv 2506.10911) without its outer momentum, with the fragments of Streaming DiLoCo (2501.18512) and
quantised error feedback (1901.09847). A kernel does in one pass over memory what torch does operation by operation:

    close:  owed = residual + (baseline - snapshot);  q = Q(owed);  residual = owed - q;  then baseline = snapshot
            q is the window's pseudo-gradient as partners read it. Q quantises as `gossip.code` says. The values of q1
            are values of q4 as well, so kernels see q4 bytes only: a q1 blob is widened when it arrives, and ours is
            narrowed before it is published.
    merge:  g = ((0 + w_0 q_0) + w_1 q_1) + ...                   the own pseudo-gradient first
            apart = ((0 + v_0 (phi - phi_0)) + v_1 (phi - phi_1)) + ...     of those whose slow weights were pulled
            phi = (phi - g) - apart                               comm/gossip/pull_rule.py has the weights w and v
            correction = rho (phi - baseline);  baseline = baseline + correction
            The correction is added to the live weights at the next step edge; `rho_of` gives rho.

Conserved: every unit of local progress enters phi once, whatever the latency, because the baseline moves at the close
and the residual alone keeps what Q holds back (q + residual after = residual before + progress). A lone peer's phi
follows its weights.

Every operation rounds to fp32, the factors are rounded to fp32 first, and no product is fused with a sum. So all
implementations give the same vectors and the same bytes, bit for bit. Lengths are square roots of fp64 sums, whose
order is free: they agree within a relative 1e-9.
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

PSEUDO_GRADIENT_CODEC = "q4"  # of a pseudo-gradient in memory
ONE_BIT_CODEC = "q1"  # of one on the wire, where `gossip.code` says so
SLOW_WEIGHTS_CODEC = "int8"


@dataclass(frozen=True, slots=True)
class Weighted:
    """An encoded section, and the factor of its values in a sum."""

    weight: float
    blob: bytes | memoryview


@dataclass(frozen=True, slots=True)
class OuterVectors:
    """A fragment's slow state in host memory: contiguous fp32 [n] on the CPU, no two of them in the same memory."""

    phi: Tensor
    baseline: Tensor
    correction: Tensor  # written, never read


class OuterKernels(Protocol):
    """Called by one thread at a time. Vectors are fp32 [n], contiguous; those of OuterVectors are in host memory."""

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        """Ends a window: the q4 bytes of Q(residual + (baseline - snapshot)), and the length of what they say.

        `code`: the quantiser Q, q4's or q1's. The residual becomes what quantisation keeps back, in place. Raises
        ProtocolError(Reason.NAN) if a number is not finite; the residual is unspecified then.
        """

    def narrow(self, blob: bytes, elements: int) -> bytes:
        """The q1 bytes of what `close` gives for q1."""

    def widen(self, blob: bytes | memoryview, elements: int) -> bytes:
        """q4 bytes that say what a q1 blob says. Raises ProtocolError for one of the wrong size.

        What else its codec refuses, `length` may find first.
        """

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        """The length of a pseudo-gradient of so many elements. Raises ProtocolError for what its codec refuses."""

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        """How far the slow weights of `blob` are from phi. Raises ProtocolError for what their codec refuses."""

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        """Takes the outer step in place, with the share `rho` of the correction.

        The blobs are our own, or ones that `length` and `distance` have accepted.
        Raises ProtocolError, with nothing changed, if the size of a blob is not that of n numbers.
        """


class TorchKernels:
    """One torch operation after another, with any codecs: the reference, and the simulator's implementation."""

    def __init__(self, codecs: Codecs) -> None:
        self.codecs = codecs

    def close(
        self, snapshot: Tensor, baseline: Tensor, residual: Tensor, code: str = PSEUDO_GRADIENT_CODEC
    ) -> tuple[bytes, float]:
        owed = residual + (baseline - snapshot.to(baseline.device))
        if not bool(torch.isfinite(owed).all()):
            raise ProtocolError(Reason.NAN, "the pseudo-gradient holds numbers that are not finite")
        blob = self.codecs.encode(code, owed)
        published = self.codecs.decode(code, blob, owed.numel())
        torch.sub(owed, published, out=residual)
        return blob if code == PSEUDO_GRADIENT_CODEC else self.widen(blob, owed.numel()), _length(published)

    def narrow(self, blob: bytes, elements: int) -> bytes:
        return self.codecs.encode(ONE_BIT_CODEC, self.codecs.decode(PSEUDO_GRADIENT_CODEC, blob, elements))

    def widen(self, blob: bytes | memoryview, elements: int) -> bytes:
        return self.codecs.encode(PSEUDO_GRADIENT_CODEC, self.codecs.decode(ONE_BIT_CODEC, blob, elements))

    def length(self, blob: bytes | memoryview, elements: int) -> float:
        return _length(self.codecs.decode(PSEUDO_GRADIENT_CODEC, blob, elements))

    def distance(self, phi: Tensor, blob: bytes | memoryview) -> float:
        return _length(self.codecs.decode(SLOW_WEIGHTS_CODEC, blob, phi.numel()) - phi)

    def merge(
        self,
        vectors: OuterVectors,
        pseudo_gradients: Sequence[Weighted],
        slow_weights: Sequence[Weighted],
        rho: float,
    ) -> None:
        phi, n = vectors.phi, vectors.phi.numel()
        step, apart = torch.zeros_like(phi), torch.zeros_like(phi)
        for one in pseudo_gradients:
            step += one.weight * self.codecs.decode(PSEUDO_GRADIENT_CODEC, one.blob, n)
        for one in slow_weights:
            apart += one.weight * (phi - self.codecs.decode(SLOW_WEIGHTS_CODEC, one.blob, n))
        phi -= step
        phi -= apart
        torch.mul(phi - vectors.baseline, rho, out=vectors.correction)
        vectors.baseline.add_(vectors.correction)


def _length(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def rho_of(steps: int, optimizer: str) -> float:
    """Return the share of a correction that is taken, which comes `steps` of our steps after the close.

    Where the loss is steep, a deviation of the weights has decayed by itself when a late correction arrives, and the
    whole of it would overshoot. With Muon the whole is better however late it comes (docs/results/convergence.md).
    """
    return 1.0 if OPTIMIZERS[optimizer].takes_all else min(1.0, 2 / (1 + max(0, steps)))

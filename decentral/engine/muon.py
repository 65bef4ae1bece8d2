"""Muon, the optimizer that can train the matrices of a fragment between the model's first and last layer.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by a nearly
semi-orthogonal matrix, with five Newton-Schulz iterations. Its steps are scaled to the root mean square of AdamW's (Liu
et al., arXiv 2502.16982, section 2.2), so that both optimizers can use one learning rate. Start at `muon_step`.

On a CPU the step is that of torch.optim.Muon, with matrix products in fp32 where fp32 is faster, and with temporary
matrices that all steps share. torch.optim.Muon runs about 25 small kernels for each matrix, and a GPU would wait for
its host between them. On a GPU, `batched_step` therefore multiplies matrices of the same shape in batches.
"""

import math
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from decentral.core.config import TrainConfig
from decentral.engine.optimizers import Operands, views

MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of one Newton-Schulz iteration, as in Jordan's post and torch
_ITERATIONS = 5
_EPSILON = 1e-7
BATCH_ELEMENTS = 1 << 24  # a batch of matrices has at most this many elements, each of which takes 24 bytes of memory
_BF16_SIDE = 256  # CPUs with bf16 units multiply twice as fast in bf16 if a matrix's shorter side is at least this


@dataclass(frozen=True, slots=True)
class Muon:
    """Muon for consecutive matrices in a fragment's flat vector; it implements `StretchOptimizer`."""

    begin: int
    end: int
    train: TrainConfig
    shapes: tuple[torch.Size, ...]
    momentum: Tensor

    @property
    def kind(self) -> Hashable:
        """The same key for all instances, so that `step_together` trains all their matrices in one call."""
        return "muon"

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        """Return weights, gradients and momenta as matrices; weights and momenta are views of the flat vectors."""
        if [gradient.shape for gradient in gradients] != list(self.shapes):
            gradients = views(gradients[0], self.shapes)
        return Operands(views(theta, self.shapes), list(gradients), views(self.momentum, self.shapes), [])

    def step(self, operands: Operands, steps: int, rate: float, void: Tensor) -> None:
        """Take a Muon step, unless `void`: change the weights and momenta in `operands` in place."""
        muon_step(operands.weights, operands.gradients, operands.first, rate, self.train.weight_decay, void)


def flops(rows: int, columns: int) -> float:
    """Return the FLOPs of the Newton-Schulz iterations of a matrix in a step; an iteration has three products."""
    short, long = sorted((rows, columns))
    return _ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)


def muon_step(
    matrices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rate: float,
    decay: float,
    void: Tensor | None = None,
) -> None:
    """Take one Muon step with all matrices; matrices and momenta change in place.

    Args:
        matrices: Weights, fp32.
        gradients: The weights' gradients, with the same shapes. On a CPU the step overwrites them.
        momenta: The weights' momenta, with the same shapes.
        rate: The learning rate.
        decay: The weight decay.
        void: Scalar on the weights' device: 1 if the gradients are not finite, so that nothing changes, else 0. None
            means 0.
    """
    if matrices[0].device.type != "cpu":
        batched_step(matrices, gradients, momenta, rate, decay, void)
        return
    if void is not None and void:
        return
    for matrix, gradient, momentum in zip(matrices, gradients, momenta, strict=True):
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalised(gradient.lerp_(momentum, MOMENTUM))  # Nesterov's momentum
        matrix.mul_(1 - rate * decay)
        matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def batched_step(
    matrices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rate: float,
    decay: float,
    void: Tensor | None = None,
) -> None:
    """Take one Muon step, in which matrices of the same shape, or of the transposed shape, are multiplied in batches.

    Matrices and momenta change in place. A batch has at most `BATCH_ELEMENTS` elements, unless a single matrix has
    more. Products are in bf16, as in torch.optim.Muon. The host does not read `void`, for which it would have to wait.
    If `void` is 1, nothing changes: the momenta are averaged with themselves instead of with the gradients, the weights
    are multiplied by 1, and the updates by 0.
    """
    skipped = torch.zeros((), device=matrices[0].device).bool() if void is None else void.bool()
    kept = torch.where(skipped, 1.0, 1 - rate * decay)
    alike: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault((min(matrix.shape), max(matrix.shape)), []).append(number)
    for (rows, columns), numbers in alike.items():
        at_once = max(1, BATCH_ELEMENTS // (rows * columns))
        for begin in range(0, len(numbers), at_once):
            chosen = numbers[begin : begin + at_once]
            thetas, grads, firsts = ([group[at] for at in chosen] for group in (matrices, gradients, momenta))
            grads = [torch.where(skipped, first, grad) for first, grad in zip(firsts, grads, strict=True)]
            torch._foreach_lerp_(firsts, grads, 1 - MOMENTUM)
            grads = list(torch._foreach_lerp(grads, firsts, MOMENTUM))  # Nesterov's momentum
            wide_NRC = torch.stack([one if len(one) == rows else one.mT for one in grads])
            # This factor is an fp32 tensor, so its product with the bf16 matrices is fp32 too.
            share = torch.where(skipped, 0.0, -rate * 0.2 * math.sqrt(columns)).view(1, 1, 1)
            turned = zip(thetas, _semi_orthogonal(wide_NRC) * share, strict=True)
            updates = [update if len(theta) == rows else update.mT for theta, update in turned]
            torch._foreach_mul_(thetas, kept)
            torch._foreach_add_(thetas, updates)


def _semi_orthogonal(wide_NRC: Tensor) -> Tensor:
    """Return N matrices in bf16 whose R singular values are near 1, after five Newton-Schulz iterations (R <= C)."""
    a, b, c = _NEWTON_SCHULZ
    x_NRC = wide_NRC.bfloat16()
    x_NRC /= torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram_NRR = x_NRC @ x_NRC.mT
        update_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, update_NRR, x_NRC, beta=a)
    return x_NRC


class _Scratch(threading.local):
    """A thread's memory for the matrices of Newton-Schulz iterations, so that no iteration allocates a matrix.

    New memory would come from the system: 59,000 pages in each step of a model of 85 M parameters.
    """

    def __init__(self) -> None:
        self._vectors: dict[tuple[str, torch.dtype], Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return a matrix with any values. The next call with this name and dtype returns the same memory."""
        vector = self._vectors.get((name, dtype))
        if vector is None or len(vector) < rows * columns:
            vector = self._vectors[name, dtype] = torch.empty(rows * columns, dtype=dtype)
        return vector[: rows * columns].view(rows, columns)

    def free(self) -> None:
        """Give up this thread's memory until it is needed again."""
        self._vectors.clear()


scratch = _Scratch()


def orthogonalised(matrix: Tensor) -> Tensor:
    """Bring a CPU matrix's singular values near 1 by Newton-Schulz iterations, in place, and return the matrix."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    rows, columns = sorted(matrix.shape)
    dtype = product_dtype(matrix)
    gram_RR, update_RR = (scratch.matrix(name, rows, rows, dtype) for name in ("gram", "update"))
    first, second = (scratch.matrix(name, rows, columns, dtype) for name in ("first", "second"))
    x_RC = matrix if dtype == matrix.dtype else first.view(matrix.shape).copy_(matrix)
    x_RC = x_RC.mT if tall else x_RC
    x_RC.div_(x_RC.norm().clamp(min=_EPSILON))
    for number in range(_ITERATIONS):
        torch.mm(x_RC, x_RC.mT, out=gram_RR)
        torch.addmm(gram_RR, gram_RR, gram_RR, beta=b, alpha=c, out=update_RR)
        x_RC = torch.addmm(x_RC, update_RR, x_RC, beta=a, out=first if number % 2 else second)
    return matrix.copy_(x_RC.mT if tall else x_RC)


def product_dtype(matrix: Tensor) -> torch.dtype:
    """Return the dtype in which this CPU takes less time for the products of a Muon step with this fp32 matrix.

    A CPU without bf16 units takes about twice as long in bf16; a CPU with bf16 units takes half as long, except for
    small matrices (docs/results/benchmarks.md).
    """
    return torch.bfloat16 if cpu_multiplies_bf16() and min(matrix.shape) >= _BF16_SIDE else torch.float32


@cache
def cpu_multiplies_bf16() -> bool:
    """Return whether this processor has instructions for products in bf16."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))

"""Muon: the optimizer of a stretch of matrices, which are views into flat vectors.

On a CPU this is torch.optim.Muon, in fp32 where that is faster. It works on one matrix at a time, in about 25 small
kernels, which keep a GPU waiting for its host: there, matrices of one shape are multiplied in batches.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by a nearly
semi-orthogonal matrix, by five Newton-Schulz iterations. Its steps are scaled to the root mean square of AdamW's (Liu
et al., arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

from decentral.core.config import TrainConfig
from decentral.core.errors import UserError
from decentral.engine.optimizers import Operands, views

_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of one iteration, Jordan's and torch's
_ITERATIONS = 5
_EPSILON = 1e-7
BATCH_ELEMENTS = 1 << 24  # of matrices that are multiplied at once: enough work for a GPU, 24 bytes of scratch each
_BF16_SIDE = 256  # a matrix's shorter side, from which on bf16 takes half as long on a CPU with units for it


@dataclass(frozen=True, slots=True)
class Muon:
    """Muon on the matrices that lie one after another in the stretch. Raises UserError if this torch has no Muon."""

    begin: int
    end: int
    train: TrainConfig
    shapes: tuple[torch.Size, ...]
    momentum: Tensor

    def __post_init__(self) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"train.optimizer: muon needs torch 2.9 or newer; this is torch {torch.__version__}")

    @property
    def kind(self) -> Hashable:
        return "muon"

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        if [gradient.shape for gradient in gradients] != list(self.shapes):
            gradients = views(gradients[0], self.shapes)
        return Operands(views(theta, self.shapes), list(gradients), views(self.momentum, self.shapes), [])

    def step(self, operands: Operands, steps: int, rate: float) -> None:
        muon_step(operands.weights, operands.gradients, operands.first, rate, self.train.weight_decay)


def muon_step(
    matrices: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor], rate: float, decay: float
) -> None:
    """Change matrices and momenta in place. All three have the same shapes; `decay` is the weight decay.

    On a CPU it calls the function behind torch.optim.Muon. The class is an `Optimizer`, the first of which loads
    torch's compiler: a second of processor time in each peer, in its first step, while its partners wait for its
    windows.
    """
    if matrices[0].device.type != "cpu":
        batched_step(matrices, gradients, momenta, rate, decay)
        return
    from torch.optim._muon import muon  # not there before torch 2.9: `Muon` says so

    with fastest_products(matrices[0].device):
        muon(
            list(matrices),
            list(gradients),
            list(momenta),
            lr=rate,
            weight_decay=decay,
            momentum=_MOMENTUM,
            nesterov=True,
            ns_coefficients=_NEWTON_SCHULZ,
            ns_steps=_ITERATIONS,
            eps=_EPSILON,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )


def batched_step(
    matrices: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor], rate: float, decay: float
) -> None:
    """Take the step of torch.optim.Muon, with matrices of one shape (or transposed) multiplied in one batch.

    A batch has at most `BATCH_ELEMENTS` elements, or one matrix. Products are in bf16, as torch's are on a GPU.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault((min(matrix.shape), max(matrix.shape)), []).append(number)
    for (rows, columns), numbers in alike.items():
        at_once = max(1, BATCH_ELEMENTS // (rows * columns))
        for begin in range(0, len(numbers), at_once):
            chosen = numbers[begin : begin + at_once]
            thetas, grads, firsts = ([group[at] for at in chosen] for group in (matrices, gradients, momenta))
            torch._foreach_lerp_(firsts, grads, 1 - _MOMENTUM)
            nesterov = torch._foreach_lerp(grads, firsts, _MOMENTUM)
            wide_NRC = torch.stack([one if len(one) == rows else one.mT for one in nesterov])
            turned = zip(thetas, _semi_orthogonal(wide_NRC).float(), strict=True)
            updates = [update if len(theta) == rows else update.mT for theta, update in turned]
            torch._foreach_mul_(thetas, 1 - rate * decay)
            torch._foreach_add_(thetas, updates, alpha=-rate * 0.2 * math.sqrt(columns))


def _semi_orthogonal(wide_NRC: Tensor) -> Tensor:
    """Return N matrices in bf16 whose R singular values are near 1, by five Newton-Schulz iterations (R <= C)."""
    a, b, c = _NEWTON_SCHULZ
    x_NRC = wide_NRC.bfloat16()
    x_NRC /= torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram_NRR = x_NRC @ x_NRC.mT
        update_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, update_NRR, x_NRC, beta=a)
    return x_NRC


def fastest_products(device: torch.device) -> AbstractContextManager[object]:
    """Within it torch.optim.Muon multiplies in bf16, as it is written, or on a CPU in fp32 where that is faster."""
    return _FastestOnCpu() if device.type == "cpu" else nullcontext()


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this processor has instructions for products in bf16."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # earlier versions have none
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


class _FastestOnCpu(BaseTorchFunctionMode):
    """Where torch.optim.Muon turns a matrix into bf16, it gets a copy of it in fp32 unless bf16 is faster.

    It turns them for the tensor cores of a GPU. A CPU without such units takes about twice as long in bf16; one that
    has them takes half as long, for matrices that are not small (docs/results/benchmarks.md).
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is Tensor.bfloat16 and not (cpu_multiplies_bf16() and min(args[0].shape) >= _BF16_SIDE):
            return args[0].to(torch.float32, copy=True)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

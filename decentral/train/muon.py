"""Muon's step on matrices that are views into flat vectors: torch.optim.Muon, with its products in fp32 on the CPU.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by a nearly
semi-orthogonal matrix, by five Newton-Schulz iterations. Its steps are scaled to the root mean square of AdamW's (Liu
et al., arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from decentral.core.errors import UserError

_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of one iteration, Jordan's and torch's
_ITERATIONS = 5
_EPSILON = 1e-7


def check() -> None:
    """Raises UserError if this torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"train.optimizer: muon needs torch 2.9 or newer; this is torch {torch.__version__}")


def muon_step(
    matrices: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor], rate: float, decay: float
) -> None:
    """Changes matrices and momenta in place. All three have the same shapes; `decay` is the weight decay.

    It calls the function behind torch.optim.Muon. The class is an `Optimizer`, the first of which loads torch's
    compiler: a second of processor time in each peer, in its first step, while its partners wait for its windows.
    """
    from torch.optim._muon import muon  # not there before torch 2.9: `check` says so

    with products_in_fp32(matrices[0].device):
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


def products_in_fp32(device: torch.device) -> AbstractContextManager[Any]:
    """Within it torch.optim.Muon multiplies in fp32 where the device is a CPU."""
    return _Fp32() if device.type == "cpu" else nullcontext()


class _Fp32(TorchFunctionMode):
    """Where torch.optim.Muon turns a matrix into bf16, it gets a copy of it in fp32.

    It turns them for the tensor cores of a GPU. On a CPU without such units the products take about twice as long in
    bf16 (docs/results/convergence.md).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))

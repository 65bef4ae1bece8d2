"""Muon on matrices that are views into flat vectors: torch.optim.Muon, with its products in fp32 on the CPU.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest
semi-orthogonal matrix, found by five Newton-Schulz iterations. Its steps are scaled to the root mean square of AdamW's
(Liu et al., arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from decentral.core.errors import UserError


class Muon:
    """The optimizer of some matrices. It changes `matrices` and `momenta` in place and keeps no state beside them."""

    def __init__(self, matrices: Sequence[Tensor], momenta: Sequence[Tensor], weight_decay: float) -> None:
        """`momenta` are the matrices' momentum buffers, of their shapes. Raises UserError if torch has no Muon."""
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"train.optimizer muon needs torch 2.9 or newer; this is {torch.__version__}")
        self.matrices = list(matrices)
        self._torchs = torch.optim.Muon(self.matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        for matrix, momentum in zip(matrices, momenta, strict=True):
            self._torchs.state[matrix]["momentum_buffer"] = momentum

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """One step; the gradients have the matrices' shapes."""
        for matrix, gradient in zip(self.matrices, gradients, strict=True):
            matrix.grad = gradient
        for group in self._torchs.param_groups:
            group["lr"] = rate
        with _products_in_fp32(self.matrices[0].device):
            self._torchs.step()  # type: ignore[no-untyped-call]


def _products_in_fp32(device: torch.device) -> AbstractContextManager[Any]:
    return _Fp32() if device.type == "cpu" else nullcontext()


class _Fp32(TorchFunctionMode):
    """Where torch.optim.Muon turns a matrix into bf16, it gets a copy of it in fp32.

    It does so for the tensor cores of a GPU. On a CPU without AMX its products take up to seven times as long in bf16
    (docs/results/convergence.md).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].float().clone()
        return func(*args, **(kwargs or {}))

"""Optimizers of flat vectors of parameters: AdamW, AdamW with 8-bit moments, and the interface of all optimizers.

Start reading at `StretchOptimizer`. A stretch (parameter range) has consecutive parameters of a fragment, which one
optimizer trains with the same settings. Optimizer state is in flat vectors like the weights, so checkpoints store both
in the same way, and joining peers get both in the same way.
Weight decay is decoupled in all optimizers (Loshchilov & Hutter, arXiv 1711.05101). `train.optimizer` names the
optimizer of the matrices between the model's first and last layer; `choices.OPTIMIZERS` has its class.
"""

import importlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decentral.core import choices, config
from decentral.core.errors import UserError

BLOCK = 256  # an 8-bit moment has one scale for each block of this many numbers, as bitsandbytes' kernels expect
BETA1, BETA2 = 0.9, 0.95
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one optimizer step. Each list has one tensor for each parameter tensor, or one flat vector."""

    weights: list[Tensor]
    gradients: list[Tensor]
    first: list[Tensor]  # AdamW's first moments (mean gradients), or Muon's momenta
    second: list[Tensor]  # AdamW's second moments (mean squared gradients)


class StretchOptimizer(Protocol):
    """Interface of the optimizer of one parameter range: the elements [begin, end) of a fragment's flat vector."""

    @property
    def begin(self) -> int:
        """The index in the fragment's flat vector at which the parameter range begins."""

    @property
    def end(self) -> int:
        """The index in the fragment's flat vector after the parameter range's last element."""

    @property
    def kind(self) -> Hashable:
        """A key; one call of `step` can train all parameter ranges with the same key together."""

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        """Return the tensors of a step; weights and moments are views, so that `step` changes theta and the state.

        Args:
            theta: The parameter range's weights [end - begin], fp32.
            gradients: One gradient for each parameter tensor of the range, or one flat vector, fp32.
        """

    def step(self, operands: Operands, steps: int, rate: float, void: Tensor) -> None:
        """Take an optimizer step: change weights and moments in `operands` in place.

        Args:
            operands: The tensors of this parameter range, or of several ranges of the same `kind`.
            steps: Number of optimizer steps taken before this step.
            rate: The learning rate.
            void: fp32 scalar on the weights' device. 1: the gradients are not finite, and nothing changes. 0: step.
        """


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW for one parameter range, computed by torch's fused kernel."""

    begin: int
    end: int
    decay: float
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def kind(self) -> Hashable:
        """The same key for all AdamW parameter ranges with the same weight decay, so that one call trains them."""
        return "adamw", self.decay

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        """Return the gradients, and views of weights and moments with the gradients' shapes."""
        shapes = [gradient.shape for gradient in gradients]
        weights, first, second = (views(flat, shapes) for flat in (theta, self.exp_avg, self.exp_avg_sq))
        return Operands(weights, list(gradients), first, second)

    def step(self, operands: Operands, steps: int, rate: float, void: Tensor) -> None:
        """Take an AdamW step, unless `void`: change the weights and moments in `operands` in place."""
        taken = torch.full((), steps + 1.0, device=void.device)
        torch._fused_adamw_(
            operands.weights,
            operands.gradients,
            operands.first,
            operands.second,
            [],
            [taken] * len(operands.weights),
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=rate,
            weight_decay=self.decay,
            eps=EPSILON,
            maximize=False,
            found_inf=void,
        )


@dataclass(frozen=True, slots=True)
class AdamW8bit:
    """AdamW with 8-bit moments for one parameter range (Dettmers et al., arXiv 2110.02861), by bitsandbytes' kernels.

    Each moment is stored as one byte per parameter (an index into a table of 256 values), with one fp32 scale for each
    block of BLOCK parameters.
    """

    begin: int
    end: int
    decay: float
    moments: tuple[Tensor, Tensor]  # first and second moments, as 8-bit codes
    scales: tuple[Tensor, Tensor]
    tables: tuple[Tensor, Tensor]  # the fp32 values of the 256 codes, for the first (signed) and the second moments
    kernels: ModuleType

    @property
    def kind(self) -> Hashable:
        """A unique key, since one call of bitsandbytes' kernel can train only one parameter range."""
        return id(self)

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        """Return the parameter range's weights and its gradient, each as one flat vector."""
        return Operands([theta], [torch.cat([one.flatten() for one in gradients])], [], [])

    def step(self, operands: Operands, steps: int, rate: float, void: Tensor) -> None:
        """Take an AdamW step: change the weights in `operands` and the moments in place. The host waits for `void`."""
        if void:
            return
        gradient, weights = operands.gradients[0], operands.weights[0]
        betas = BETA1, BETA2, 0.0, 0.0  # the kernel also takes beta3 and alpha, which Adam does not have
        state = self.moments + betas + (EPSILON, steps + 1, rate) + self.tables + self.scales
        self.kernels.optimizer_update_8bit_blockwise("adam", gradient, weights, *state, weight_decay=self.decay)


class OptimizerState:
    """The optimizers of one fragment's parameter ranges, and their state.

    The fragment's vector has the matrices that the optimizer of `train.optimizer` trains (none if that is AdamW), then
    AdamW's matrices, then the gains (parameters without weight decay). In the same order, `exp_avg` has the fp32 state
    of that optimizer and AdamW's fp32 first moments, and `exp_avg_sq` has AdamW's fp32 second moments.
    """

    def __init__(
        self, blocks: Sequence[torch.Size], matrices: int, gains: int, train: config.TrainConfig, device: torch.device
    ) -> None:
        """Allocate the state, all zero.

        Args:
            blocks: Shapes of the matrices that the optimizer of `train.optimizer` trains; empty with AdamW.
            matrices: Number of parameters that AdamW trains with weight decay.
            gains: Number of parameters that AdamW trains without weight decay.
            train: The section `train` of the config.
            device: The device of the state.

        Raises:
            UserError: If a package that an optimizer needs is missing or too old.
        """
        cut = sum(shape.numel() for shape in blocks)
        end = cut + matrices
        in_bytes = train.moments == "int8" and matrices > 0
        wide = [(end, end + gains, 0.0)] if in_bytes else [(cut, end, train.weight_decay), (end, end + gains, 0.0)]
        kept = sum(stop - begin for begin, stop, _ in wide)
        self.exp_avg, self.exp_avg_sq = zeros(cut + kept, device), zeros(kept, device)
        self.tensors = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        self.stretches: list[StretchOptimizer] = []
        if blocks:
            stretch = choices.load(choices.OPTIMIZERS[train.optimizer].stretch)
            self.stretches.append(stretch(0, cut, train, tuple(blocks), self.exp_avg[:cut]))
        if in_bytes:
            self.stretches.append(self._in_bytes(cut, end, train, device))
        at = 0
        for begin, stop, decay in wide:
            after = at + stop - begin
            first, second = self.exp_avg[cut + at : cut + after], self.exp_avg_sq[at:after]
            if after > at:
                self.stretches.append(AdamW(begin, stop, decay, first, second))
            at = after

    def _in_bytes(self, begin: int, end: int, train: config.TrainConfig, device: torch.device) -> "AdamW8bit":
        kernels, count = kernels_8bit(), end - begin
        tables = tuple(kernels.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
        for name in ("exp_avg", "exp_avg_sq"):
            self.tensors[name + "_int8"] = torch.zeros(count, dtype=torch.uint8, device=device)
            self.tensors[name + "_scales"] = torch.zeros(-(-count // BLOCK), device=device)
        moments, scales = (
            (self.tensors["exp_avg" + kind], self.tensors["exp_avg_sq" + kind]) for kind in ("_int8", "_scales")
        )
        return AdamW8bit(begin, end, train.weight_decay, moments, scales, (tables[0], tables[1]), kernels)


def zeros(elements: int, device: torch.device) -> Tensor:
    """Return fp32 zeros [elements]. On a CPU, the parts of a large vector take memory only after they are written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(elements, np.float32))
    return torch.zeros(elements, device=device)


def views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of consecutive parts of a flat vector, one for each of `shapes`."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def kernels_8bit() -> ModuleType:
    """Return the module bitsandbytes.functional. Raises UserError if bitsandbytes cannot be imported."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        advice = "install decentral[8bit], or set train.moments to float32"
        raise UserError(f"train.moments: int8 needs bitsandbytes ({error}); {advice}") from None


def round_stochastically(values: Tensor, into: Tensor, chance: torch.Generator) -> None:
    """Write fp32 values into a bf16 vector, rounded up or down at random so that the expected error is 0.

    bf16 has 8 bits of precision, so rounding to nearest would lose each change below 1/512 of a weight (Gupta et al.,
    arXiv 1502.02551). A bf16 number is the upper half of an fp32 number. So a random number below 2^16 is added to the
    lower half of each fp32 number, and a carry into the upper half rounds the bf16 number up.

    Args:
        values: fp32 values [n].
        into: Vector [n] of bf16; if it is fp32, the values are copied unrounded.
        chance: The random number generator, on the same device.
    """
    if into.dtype == torch.float32:
        into.copy_(values)
        return
    bits = values.view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=chance)
    into.copy_(noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32))

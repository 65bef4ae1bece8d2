"""The optimizers of a fragment's stretches: AdamW on a flat vector, the same with its moments in 8 bits, or another.

A stretch is consecutive parameters of a fragment that one optimizer trains alike. Its state lies in flat vectors, so
that checkpoints and newcomers get it as they get the weights. Weight decay is decoupled in all (Loshchilov & Hutter,
arXiv 1711.05101). `train.optimizer` names that of the matrices between the model's first and last layer: its record in
core/choices.py has the class, such as Muon of train/muon.py.
"""

import importlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from decentral.core import choices, config
from decentral.core.errors import UserError

BLOCK = 256  # numbers that share a scale in an 8-bit moment: what bitsandbytes' kernels expect
BETA1, BETA2 = 0.9, 0.95  # of AdamW's moments
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Operands:
    """What a step of one or more stretches works on: one entry for each parameter."""

    weights: list[Tensor]  # fp32
    gradients: list[Tensor]  # fp32
    first: list[Tensor]  # AdamW's first moments, or Muon's momenta
    second: list[Tensor]  # AdamW's second moments


class StretchOptimizer(Protocol):
    """Trains the fragment's parameters [begin, end)."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def kind(self) -> Hashable:
        """Equal for stretches that one call of `step` may train together."""

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        """Return what a step works on.

        Args:
            theta: The stretch's weights [end - begin], fp32.
            gradients: Those of the stretch's parameters, or one flat vector, fp32.
        """

    def step(self, operands: Operands, steps: int, rate: float) -> None:
        """Change weights and moments in place; `steps` were taken before, `rate` is the learning rate."""


def step_together(work: Sequence[tuple[StretchOptimizer, Operands]], steps: int, rate: float) -> None:
    """Take one step of each stretch. Those of one kind share a call, since a GPU waits for its host between calls."""
    kinds: dict[Hashable, list[tuple[StretchOptimizer, Operands]]] = {}
    for stretch, operands in work:
        kinds.setdefault(stretch.kind, []).append((stretch, operands))
    for alike in kinds.values():
        parts = [operands for _, operands in alike]
        together = Operands(
            [one for part in parts for one in part.weights],
            [one for part in parts for one in part.gradients],
            [one for part in parts for one in part.first],
            [one for part in parts for one in part.second],
        )
        alike[0][0].step(together, steps, rate)


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW by torch's fused kernel."""

    begin: int
    end: int
    decay: float
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def kind(self) -> Hashable:
        return "adamw", self.decay

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        shapes = [gradient.shape for gradient in gradients]
        weights, first, second = (views(flat, shapes) for flat in (theta, self.exp_avg, self.exp_avg_sq))
        return Operands(weights, list(gradients), first, second)

    def step(self, operands: Operands, steps: int, rate: float) -> None:
        taken = torch.full((len(operands.weights),), float(steps), device=operands.weights[0].device)
        adamw(
            operands.weights,
            operands.gradients,
            operands.first,
            operands.second,
            [],
            list(taken.unbind()),
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=rate,
            weight_decay=self.decay,
            eps=EPSILON,
            maximize=False,
        )


@dataclass(frozen=True, slots=True)
class AdamW8bit:
    """AdamW with blockwise 8-bit moments (Dettmers et al., arXiv 2110.02861), by the kernels of bitsandbytes.

    A moment is a byte for each parameter, an entry of `tables`, times a scale for each block.
    """

    begin: int
    end: int
    decay: float
    moments: tuple[Tensor, Tensor]  # uint8
    scales: tuple[Tensor, Tensor]  # fp32, one for each block
    tables: tuple[Tensor, Tensor]  # fp32 [256], of the signed and the unsigned moment
    kernels: ModuleType  # bitsandbytes.functional

    @property
    def kind(self) -> Hashable:
        return id(self)  # its blocks reach over parameters, so each stretch is a call of its own

    def operands(self, theta: Tensor, gradients: Sequence[Tensor]) -> Operands:
        return Operands([theta], [torch.cat([one.flatten() for one in gradients])], [], [])

    def step(self, operands: Operands, steps: int, rate: float) -> None:
        gradient, weights = operands.gradients[0], operands.weights[0]
        betas = BETA1, BETA2, 0.0, 0.0  # those that Adam does not have
        state = self.moments + betas + (EPSILON, steps + 1, rate) + self.tables + self.scales
        self.kernels.optimizer_update_8bit_blockwise("adam", gradient, weights, *state, weight_decay=self.decay)


class OptimizerState:
    """The optimizers of one fragment's stretches, and their state.

    In the fragment's vector Muon's matrices come first, then AdamW's, then the gains. `exp_avg` is the first moment, or
    Muon's momentum, of all that keeps it in fp32, and `exp_avg_sq` the second moment of AdamW's part of that.
    """

    def __init__(
        self, blocks: Sequence[torch.Size], matrices: int, gains: int, train: config.TrainConfig, device: torch.device
    ) -> None:
        """`blocks`: the shapes of Muon's matrices; `matrices`, `gains`: how many parameters AdamW decays, and does not.

        Raises UserError where an optimizer is missing on this machine.
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
    """fp32 zeros [elements]. On the CPU the system gives large ones their memory when they are first written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(elements, np.float32))
    return torch.zeros(elements, device=device)


def views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors of these shapes, one after another in the flat vector, as views of it."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def kernels_8bit() -> ModuleType:
    """bitsandbytes' functions. Raises UserError where it is not installed."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        advice = "install decentral[8bit], or set train.moments to float32"
        raise UserError(f"train.moments: int8 needs bitsandbytes ({error}); {advice}") from None


def round_stochastically(values: Tensor, into: Tensor, chance: torch.Generator) -> None:
    """Writes fp32 values into a vector: of bf16 each is rounded up or down, with the chances that keep its mean.

    bf16 has 8 bits of precision, so to round to the nearest would lose every change below 1/512 of a weight (Gupta et
    al., arXiv 1502.02551). bf16 is the upper half of fp32: a number below 2^16 is added to the lower half, and carries.
    """
    if into.dtype == torch.float32:
        into.copy_(values)
        return
    bits = values.view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=chance)
    into.copy_(noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32))

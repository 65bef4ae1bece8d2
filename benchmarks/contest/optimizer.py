"""The project's inner optimizer as a torch.optim.Optimizer, for contestants whose libraries want one.

Muon trains the matrices between the first and the last layer, AdamW all else, with the same numbers as
decentral/engine/optimizers.py: tests/contest/test_optimizer.py compares both. With train.optimizer: adamw AdamW trains
all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from decentral.core import config
from decentral.core.choices import OPTIMIZERS
from decentral.engine.muon import muon_step
from decentral.engine.optimizers import BETA1, BETA2, EPSILON

Group = dict[str, Any]
STEPS = {"muon": muon_step}  # a step of each optimizer, other than AdamW, of the blocks' matrices (core/choices.py)


def groups(layers: Sequence[nn.Module], train: config.TrainConfig) -> list[Group]:
    """Muon's matrices, AdamW's matrices, gains: those that are there, with their weight decay."""
    has_inner = bool(OPTIMIZERS[train.optimizer].stretch)
    blocks: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    gains: list[nn.Parameter] = []
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            inner = has_inner and 0 < number < len(layers) - 1 and parameter.ndim == 2
            (gains if parameter.ndim < 2 else blocks if inner else matrices).append(parameter)
    found = [
        {"params": blocks, "inner": True, "weight_decay": train.weight_decay},
        {"params": matrices, "inner": False, "weight_decay": train.weight_decay},
        {"params": gains, "inner": False, "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


class MuonAdamW(torch.optim.Optimizer):
    """`params`: as `groups` gives them. `lr` of each group is the learning rate of the next step."""

    def __init__(self, params: Any, train: config.TrainConfig) -> None:
        self.inner_optimizer = train.optimizer
        super().__init__(params, {"lr": train.peak_rate, "inner": False, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                self._begin(parameter, group["inner"])
            if trained and group["inner"]:
                step = STEPS[self.inner_optimizer]
                gradients = [parameter.grad for parameter in trained]
                momenta = [self.state[parameter]["exp_avg"] for parameter in trained]
                step([one.data for one in trained], gradients, momenta, group["lr"], group["weight_decay"])
            elif trained:
                self._adamw(trained, group)

    def _begin(self, parameter: Tensor, inner: bool) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            if not inner:
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _adamw(self, trained: Sequence[Tensor], group: Group) -> None:
        states = [self.state[parameter] for parameter in trained]
        adamw(
            list(trained),
            [one.grad for one in trained if one.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            maximize=False,
        )

    def vectors(self) -> list[Tensor]:
        """The state's tensors, made if no step has been taken, in an order that is the same in all processes."""
        found = []
        for group in self.param_groups:
            for parameter in group["params"]:
                self._begin(parameter, group["inner"])
                found += [self.state[parameter][name] for name in sorted(self.state[parameter])]
        return found

"""Synchronous steps: gradients are added up before each step, so replicas stay equal and no weights are mixed.

The rounds of comm/rounds carry the gradients; there are no exchanges (docs/ROUTES.md).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.train.inner import Live, step_clipped
from decentral.train.sections import Packer
from decentral.train.update_rules import SCALAR, Parts, UpdateRule

LONGEST_GRADIENT = 1e15  # length of one peer's sum of gradients: a thousand of them still have a norm in fp32
MAX_STEPS = 1 << 24  # up to here fp32 counts exactly


class SynchronousRule(UpdateRule):
    """One optimizer step with the mean gradient of all tokens of a round, whoever computed it.

    What a window publishes is the sum of the gradients of its tokens' losses. All holders add up the same sums in the
    same order, so their weights and moments stay equal: to the last bit, on devices that compute alike. The gradient
    is clipped fragment by fragment, as in train/stage_runner.py; the learning rate follows the fragment's own steps,
    which all holders have taken.
    """

    sections: Mapping[str, str] = {"gradient": "fp32"}
    donated: Mapping[str, str] = {"theta": "fp32", "exp_avg": "fp32", "exp_avg_sq": "fp32", "steps": SCALAR}

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """Finite sums may add up to a norm that is not, and the step of all would be skipped in silence."""
        if not float(torch.linalg.vector_norm(vectors["gradient"], dtype=torch.float64)) <= LONGEST_GRADIENT:
            raise ProtocolError(Reason.MAGNITUDE, f"a sum of gradients is longer than {LONGEST_GRADIENT:g}")

    def close_round(self, live: Live, packer: Packer) -> None:
        """Packs the sum of the round's gradients."""
        packer.add("gradient", self.sections["gradient"], live.grad)

    def advance(self, live: Live, parts: Sequence[Parts]) -> None:
        """Takes the optimizer's step on `live` itself: its moments and steps change, and the gradient is zero after."""
        tokens = sum(part.tokens for part in parts)
        if tokens:
            live.grad.zero_()
            for part in sorted(parts, key=lambda one: one.peer):
                live.grad.add_(part.vectors["gradient"])
            step_clipped(live, live.grad.div_(tokens), live.steps, tokens)
            live.grad.zero_()

    def donate(self, live: Live, packer: Packer) -> None:
        """Each section is as long as the fragment: what Muon trains comes first, with zeros for second moments."""
        seconds = torch.zeros_like(live.theta)
        self._seconds(live, seconds).copy_(live.state.exp_avg_sq)
        for name, tensor in (("theta", live.theta), ("exp_avg", live.state.exp_avg), ("exp_avg_sq", seconds)):
            packer.add(name, self.donated[name], tensor)
        packer.add("steps", "fp32", torch.tensor([float(live.steps)]))

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        live.theta.copy_(donated["theta"])
        live.state.exp_avg.copy_(donated["exp_avg"])
        live.state.exp_avg_sq.copy_(self._seconds(live, donated["exp_avg_sq"]).clamp(min=0))
        live.steps = int(donated["steps"].clamp(0, MAX_STEPS))

    def _seconds(self, live: Live, vector: Tensor) -> Tensor:
        """The part of a vector [n] at which AdamW's second moments are."""
        return vector[vector.numel() - live.state.exp_avg_sq.numel() :]

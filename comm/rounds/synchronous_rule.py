"""The update rule of synchronous rounds: replicas sum their gradients before each step, so their weights stay equal.

The state machine `Rounds` exchanges the gradients; there is no gossip (docs/ROUNDS.md).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip.update_rules import SCALAR, PartnerWindow, UpdateRule
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.engine.fragment import Live
from decentral.engine.inner import step_clipped

LONGEST_GRADIENT = 1e15  # a sum of gradients with a larger L2 norm is refused, so that a thousand sums cannot overflow
MAX_STEPS = 1 << 24  # a larger step count in a donated state is lowered to this: fp32 cannot store all larger integers


class SynchronousRule(UpdateRule):
    """The rule that takes one optimizer step per round, with the mean gradient over all tokens of all members.

    Each peer that trains a fragment publishes the sum of its tokens' gradients. All these peers add the same sums in
    the same order, so their weights and moments stay equal. They are bit-identical if the devices round alike. The
    gradient is clipped per fragment, as in engine/stage_runner.py. The schedule of the learning rate uses the number of
    steps that the fragment has taken.
    """

    sections: Mapping[str, str] = {"gradient": "fp32"}
    donated: Mapping[str, str] = {"theta": "fp32", "exp_avg": "fp32", "exp_avg_sq": "fp32", "steps": SCALAR}

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """Check that the L2 norm of a sum of gradients does not exceed LONGEST_GRADIENT.

        With a larger sum the total gradient could overflow, and all peers would skip the step.

        Raises:
            ProtocolError: MAGNITUDE, if the norm exceeds LONGEST_GRADIENT or is not a number.
        """
        norm = float(torch.linalg.vector_norm(vectors["gradient"], dtype=torch.float64))
        if not norm <= LONGEST_GRADIENT:
            said = f"the L2 norm of a gradient sum must be at most {LONGEST_GRADIENT:g}; got {norm:g}"
            raise ProtocolError(Reason.MAGNITUDE, said)

    def close_round(self, live: Live, packer: Packer) -> None:
        """Pack the sum of the gradients that this peer has computed in the round, as fp32 [n]."""
        packer.add("gradient", self.sections["gradient"], live.grad)

    def advance(self, live: Live, sums: Sequence[PartnerWindow]) -> None:
        """Take the optimizer's step on `live` with the mean gradient per token of `sums`, then zero `live.grad`.

        `sums` are the sums of gradients of all members that train the fragment, this peer included. If the sums
        contain no tokens, nothing changes.
        """
        tokens = sum(one.tokens for one in sums)
        if tokens:
            live.grad.zero_()
            for one in sorted(sums, key=lambda one: one.peer):
                live.grad.add_(one.vectors["gradient"])
            step_clipped(live, live.grad.div_(tokens), live.steps, tokens)
            live.grad.zero_()

    def donate(self, live: Live, packer: Packer) -> None:
        """Pack weights, both moments and the count of steps.

        Each vector has one number for each parameter of the fragment. Muon's parameters come first; they have no second
        moments, so zeros take the place of these.
        """
        seconds = torch.zeros_like(live.theta)
        self._seconds(live, seconds).copy_(live.state.exp_avg_sq)
        for name, tensor in (("theta", live.theta), ("exp_avg", live.state.exp_avg), ("exp_avg_sq", seconds)):
            packer.add(name, self.donated[name], tensor)
        packer.add("steps", "fp32", torch.tensor([float(live.steps)]))

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Overwrite the live weights, moments and count of steps with those in `donated`."""
        live.theta.copy_(donated["theta"])
        live.state.exp_avg.copy_(donated["exp_avg"])
        live.state.exp_avg_sq.copy_(self._seconds(live, donated["exp_avg_sq"]).clamp(min=0))
        live.steps = int(donated["steps"].clamp(0, MAX_STEPS))

    def _seconds(self, live: Live, vector: Tensor) -> Tensor:
        """Return the end of a vector [n], as a view: its numbers for the parameters with second moments (AdamW's)."""
        return vector[vector.numel() - live.state.exp_avg_sq.numel() :]

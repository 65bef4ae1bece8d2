"""Push-sum: mass is pushed along directed links (stochastic gradient push, Assran et al., arXiv 1811.10792)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.core.config import GossipConfig
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.train.bounded_rule import BoundedRule, length
from decentral.train.sections import Packer
from decentral.train.update_rules import SCALAR, Correction, Parts, RuleTools, Window

MOST_WEIGHT = 4.0  # of pushed mass; a peer weighs one on average
LEAST_MASS = 2.0**-16  # of pushed mass: what weighs less has lost its digits
MOST_OWN_MASS = 2 * MOST_WEIGHT  # of a peer's own mass, half of which the next one must take


class PushSumRule(BoundedRule):
    """x = w theta is this peer's mass. A window's end gives half of x and of w away; what comes is added.

    Conserved: the sums of x and of w over all peers and messages in flight, but for training itself. The half is sent
    as Q(x/2) and x - Q(x/2) stays, so quantisation loses nothing; a close moves theta by the rounding of Q.

    Mass whose weights are further from ours than train/influence.py believes counts as if they were nearer; mass that
    weighs too much or next to nothing is refused, and goes back to its sender. A peer whose own mass has grown or
    shrunk beyond that changes x and w alike, so that theta stays: partners may give without end, or lose all they get.
    """

    sections: Mapping[str, str] = {"mass": "int8", "weight": SCALAR}

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        self.weight = torch.ones(())  # w
        super().__init__(gossip, theta, peer, tools)

    def close(self, theta: Tensor, window: Window, packer: Packer) -> Correction:
        self.weight = self.weight.clamp(min=2 * LEAST_MASS)
        mass = theta * self.weight
        away = packer.add_and_read("mass", self.sections["mass"], mass / 2)
        half = packer.add_and_read("weight", "fp32", (self.weight / 2).reshape(1))
        self.weight = self.weight - half[0]
        correction = (mass - away) / self.weight - theta
        self.end_window(theta)
        self.baseline += correction
        return Correction(correction)

    def merge(self, theta: Tensor | None, parts: Sequence[Parts], steps: int) -> Correction:
        """Adds mass at any time, also mass of our own that nobody took."""
        assert theta is not None
        moved, progress = theta, length(theta - self.baseline)
        for part in parts:
            mass, weight = part.vectors["mass"], part.vectors["weight"][0]
            share = weight / (self.weight + weight)
            apart = mass / weight - moved
            if part.peer == self.peer:
                moved = moved + share * apart
            else:
                moved = moved + self.pull_towards(part.peer, apart, float(share), progress)
            self.weight = (self.weight + weight).clamp(max=MOST_OWN_MASS)
        correction = moved - theta
        self.baseline += correction
        return Correction(correction)

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        weight = vectors["weight"][0]
        if not LEAST_MASS <= float(weight) <= MOST_WEIGHT:
            raise ProtocolError(Reason.WEIGHT, f"mass must weigh at least {LEAST_MASS:g}, and at most {MOST_WEIGHT:g}")
        if not bool((vectors["mass"] / weight).isfinite().all()):
            raise ProtocolError(Reason.NAN, "mass and its weight make no finite weights")

    def kept(self) -> Mapping[str, int]:
        return {"weight": 1}

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        return {"weight": self.weight.reshape(1)}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        super().load(theta, state)
        self.weight = state["weight"].reshape(()) if state else torch.ones(())

"""Push-sum: mass is pushed along directed links (stochastic gradient push, Assran et al., arXiv 1811.10792)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.comm.gossip.push import PushExchange
from decentral.comm.wire.messages import Push
from decentral.core.algorithms import Algorithm
from decentral.core.config import GossipConfig
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.train.sections import Packer
from decentral.train.update_rules import SCALAR, Correction, Parts, RuleTools, UpdateRule, Window

MAX_WEIGHT = 1e6  # of pushed mass; all peers together weigh as many as they are


class PushSumRule(UpdateRule):
    """x = w theta is this peer's mass. A window's end gives half of x and of w away; what comes is added.

    Conserved: the sums of x and of w over all peers and messages in flight, but for training itself. The half is sent
    as Q(x/2) and x - Q(x/2) stays, so quantisation loses nothing; a close moves theta by the rounding of Q.
    """

    sections: Mapping[str, str] = {"mass": "int8", "weight": SCALAR}

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        super().__init__(gossip, theta, peer, tools)
        self.weight = torch.ones(())  # w

    def close(self, theta: Tensor, window: Window, packer: Packer) -> Correction:
        mass = theta * self.weight
        away = packer.add_and_read("mass", self.sections["mass"], mass / 2)
        half = packer.add_and_read("weight", "fp32", (self.weight / 2).reshape(1))
        self.weight = self.weight - half[0]
        return Correction((mass - away) / self.weight - theta)

    def merge(self, theta: Tensor | None, parts: Sequence[Parts], steps: int) -> Correction:
        """Adds mass at any time, also mass of our own that nobody took."""
        assert theta is not None
        mass, weight = theta * self.weight, self.weight
        for part in parts:
            mass = mass + part.vectors["mass"]
            weight = weight + part.vectors["weight"][0]
        self.weight = weight
        return Correction(mass / weight - theta)

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        if not 0 < float(vectors["weight"][0]) < MAX_WEIGHT:
            raise ProtocolError(Reason.WEIGHT, f"mass must weigh something, and less than {MAX_WEIGHT:g}")

    def kept(self) -> Mapping[str, int]:
        return {"weight": 1}

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        return {"weight": self.weight.reshape(1)}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        self.weight = state["weight"].reshape(()) if state else torch.ones(())


ALGORITHM = Algorithm(
    name="push_sum",
    rule=PushSumRule,
    machine=PushExchange,
    questions=(Push,),
    partners=lambda gossip: 1,
    snapshot_bytes=1.01,
    memory_bytes=12,
    aligned=False,  # peers that push to each other at the same time only get in each other's way
)

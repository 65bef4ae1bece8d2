"""All-reduce: in every window everyone waits for everyone and takes the mean of all weights. It is the reference."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.comm.gossip.pull import PullExchange
from decentral.comm.wire.messages import Pull
from decentral.core.algorithms import Algorithm
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId
from decentral.train import outer
from decentral.train.sections import Packer
from decentral.train.update_rules import ClosedWeights, Correction, Parts, RuleTools, UpdateRule, Window


class AllReduceRule(UpdateRule):
    """The token-weighted mean of everyone's weights, in fp32, summed in the order of peer ids: same bits for all."""

    sections: Mapping[str, str] = {"theta": "fp32"}

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        super().__init__(gossip, theta, peer, tools)
        self.peer = peer
        self.closed: tuple[int, ClosedWeights] | None = None  # tokens and weights of the window that is to be merged

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        packer.add("theta", self.sections["theta"], theta)
        self.closed = window.tokens, ClosedWeights(theta, window.steps)

    def merge(self, theta: Tensor | None, parts: Sequence[Parts], steps: int) -> Correction:
        assert self.closed is not None, "merge without a close"
        (tokens, own), self.closed = self.closed, None
        everyone = [(self.peer, tokens, own.theta)]
        everyone += [(part.peer, part.tokens, part.vectors["theta"]) for part in parts]
        everyone.sort(key=lambda one: one[0])
        weights = outer.token_weights([tokens for _, tokens, _ in everyone])
        mean = torch.zeros_like(own.theta)
        for weight, (_, _, vector) in zip(weights, everyone, strict=True):
            mean += weight * vector
        return Correction(mean, replaces=own)

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        self.closed = None


ALGORITHM = Algorithm(
    name="allreduce",
    rule=AllReduceRule,
    machine=lambda context, close_at: PullExchange(context, close_at, blocking=True, seq=context.round),
    questions=(Pull,),
    partners=lambda gossip: None,
    snapshot_bytes=4,
    memory_bytes=12,
    blocking=True,
)

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
from decentral.train.inner import Live
from decentral.train.sections import Packer
from decentral.train.update_rules import Parts, UpdateRule


class AllReduceRule(UpdateRule):
    """The token-weighted mean of everyone's weights, in fp32, summed in the order of peer ids: same bits for all."""

    sections: Mapping[str, str] = {"theta": "fp32"}

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId) -> None:
        self.peer = peer
        self.tokens = 0  # of the window that waits for its merge

    def close(self, live: Live, packer: Packer) -> None:
        packer.add("theta", self.sections["theta"], live.theta)
        self.tokens = live.tokens

    def merge(self, live: Live, parts: Sequence[Parts]) -> None:
        everyone = [(self.peer, self.tokens, live.theta)]
        everyone += [(part.peer, part.tokens, part.vectors["theta"]) for part in parts]
        everyone.sort(key=lambda one: one[0])
        weights = outer.token_weights([tokens for _, tokens, _ in everyone])
        mean = torch.zeros_like(live.theta)
        for weight, (_, _, theta) in zip(weights, everyone, strict=True):
            mean += weight * theta
        live.theta.copy_(mean)


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

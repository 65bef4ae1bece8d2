"""All-reduce: in every window everyone waits for everyone and takes the mean of all weights. It is the reference."""

from collections.abc import Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor

from decentral.comm.gossip.pull import PullExchange
from decentral.comm.wire.messages import Pull
from decentral.core.algorithms import Algorithm
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId
from decentral.train import influence, outer
from decentral.train.bounded_rule import BoundedRule, length
from decentral.train.sections import Packer
from decentral.train.update_rules import ClosedWeights, Correction, Parts, RuleTools, Window


class AllReduceRule(BoundedRule):
    """The token-weighted mean of everyone's weights, in fp32, summed in the order of peer ids: same bits for all.

    Nobody's weights count for more than train/influence.py believes: tokens, and progress for each token since the last
    mean, are measured by medians over all, so that all judge alike. They are clipped towards that mean (centred
    clipping: Karimireddy et al., arXiv 2012.10333).
    """

    sections: Mapping[str, str] = {"theta": "fp32"}

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        self.closed: tuple[int, ClosedWeights] | None = None  # tokens and weights of the window that is to be merged
        self.rate = 0.0  # the progress for each token that was usual in the last round
        super().__init__(gossip, theta, peer, tools)

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        packer.add("theta", self.sections["theta"], theta)
        self.closed = window.tokens, ClosedWeights(theta, window.steps)

    def merge(self, theta: Tensor | None, parts: Sequence[Parts], steps: int) -> Correction:
        assert self.closed is not None, "merge without a close"
        (tokens, own), self.closed = self.closed, None
        everyone = [(self.peer, tokens, own.theta)]
        everyone += [(part.peer, part.tokens, part.vectors["theta"]) for part in parts]
        everyone.sort(key=lambda one: one[0])
        believed = influence.believed_tokens([tokens for _, tokens, _ in everyone])
        mean, center = torch.zeros_like(own.theta), self.baseline
        scales = self._scales(believed, [length(vector - center) for _, _, vector in everyone])
        for weight, scale, (_, _, vector) in zip(outer.token_weights(believed), scales, everyone, strict=True):
            mean += weight * (vector if scale == 1.0 else center + scale * (vector - center))
        self.baseline = mean
        return Correction(mean, replaces=own)

    def _scales(self, tokens: Sequence[float], lengths: Sequence[float]) -> list[float]:
        """How much of each peer's progress counts. The last round stands for one more peer."""
        if not any(tokens):
            return [influence.scale(one, median_low(lengths)) for one in lengths]
        rates = [one / count for count, one in zip(tokens, lengths, strict=True) if count]
        self.rate = median_low([*rates, self.rate] if self.rate else rates)
        return [influence.scale(one, self.rate * count) for count, one in zip(tokens, lengths, strict=True)]

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        super().load(theta, state)
        self.closed, self.rate = None, 0.0


ALGORITHM = Algorithm(
    name="allreduce",
    rule=AllReduceRule,
    machine=lambda context, close_at: PullExchange(context, close_at, blocking=True, seq=context.round),
    questions=(Pull,),
    partners=lambda gossip: None,
    snapshot_bytes=4,
    memory_bytes=16,
    blocking=True,
)

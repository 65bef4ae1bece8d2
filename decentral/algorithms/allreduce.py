"""All-reduce: in every window everyone waits for everyone and takes the mean of all weights. It is the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class UsualRound:
    """The tokens of a peer that were usual in the last round, and the progress that was usual with them; 0: not known.

    Peers without tokens do not vote on it, and the last round does, as one more peer: so one peer alone never says what
    is usual, where in a short round no other one has made a step.
    """

    tokens: float = 0.0
    progress: float = 0.0

    def believed(self, claims: Sequence[int]) -> list[float]:
        """Everybody's claims, as all who know them believe them: at most TIMES_USUAL_TOKENS times the usual one."""
        self.tokens = float(median_low([*filter(None, claims), *filter(None, [self.tokens])]))
        return [min(float(claim), influence.TIMES_USUAL_TOKENS * self.tokens) for claim in claims]

    def scales(self, believed: Sequence[float], lengths: Sequence[float]) -> list[float]:
        """What to multiply progress of these lengths by, so that it is no longer than its tokens explain."""
        times = [one / self.tokens for one in believed]
        found = [one / many for many, one in zip(times, lengths, strict=True) if many]
        self.progress = median_low([*found, *filter(None, [self.progress])])
        return [influence.scale(one, self.progress * many) for many, one in zip(times, lengths, strict=True)]


class AllReduceRule(BoundedRule):
    """The token-weighted mean of everyone's weights, in fp32, summed in the order of peer ids: same bits for all.

    Nobody's weights count for more than train/influence.py believes: what tokens and what progress are usual in a round
    is the median over all, so that all judge alike. Weights are clipped towards the last mean (centred clipping:
    Karimireddy et al., arXiv 2012.10333).
    """

    sections: Mapping[str, str] = {"theta": "fp32"}

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        self.closed: tuple[int, ClosedWeights] | None = None  # tokens and weights of the window that is to be merged
        self.usual = UsualRound()
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
        lengths = [length(vector - self.baseline) for _, _, vector in everyone]
        own_way, claims = length(own.theta - self.baseline), [count for _, count, _ in everyone]
        shares, scales = self._judge(claims, lengths, tokens, own_way)
        mean, center = torch.zeros_like(own.theta), self.baseline
        for share, scale, (_, _, vector) in zip(shares, scales, everyone, strict=True):
            mean += share * (vector if scale == 1.0 else center + scale * (vector - center))
        self.baseline = mean
        return Correction(mean, replaces=own)

    def _judge(
        self, claims: Sequence[int], lengths: Sequence[float], own_tokens: int, own_way: float
    ) -> tuple[list[float], list[float]]:
        """Everybody's share of the mean, and how much of everybody's progress counts."""
        if not any(claims):
            return outer.token_weights(claims), [influence.scale(one, median_low(lengths)) for one in lengths]
        if not own_tokens and not self.usual.tokens and sum(map(bool, claims)) == 1:
            # We have made no step yet and have seen no round, and one peer alone does not say what is usual.
            return outer.token_weights(claims), [influence.scale(one, own_way) for one in lengths]
        believed = self.usual.believed(claims)
        return outer.token_weights(believed), self.usual.scales(believed, lengths)

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        super().load(theta, state)
        self.closed, self.usual = None, UsualRound()


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

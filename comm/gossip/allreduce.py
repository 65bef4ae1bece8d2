"""All-reduce: in every window everyone waits for everyone and takes the mean of all weights. It is the reference."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip import influence
from decentral.comm.gossip.update_rules import ClosedWeights, Correction, Parts, RuleTools, UpdateRule, Window
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId


@dataclass(slots=True)
class UsualFigure:
    """What of one figure was usual in each of the last rounds: the lower median of those who had any."""

    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=influence.RECENT_WINDOWS))

    def of(self, found: Sequence[float], learn: bool) -> float:
        """What is usual in this round; 0: nobody knows.

        Where those who vote are even in number, the last rounds stand for one more. One other peer alone (not `learn`)
        does not say what is usual: there it is no more than in the last rounds.
        """
        known = median(self.rounds) if self.rounds else 0.0
        if not learn:
            return min([known, *found])
        usual = float(median_low([*found, known] if known and len(found) % 2 == 0 else found)) or known
        if usual:
            self.rounds.append(usual)
        return usual


class AllReduceRule(UpdateRule):
    """The token-weighted mean of everyone's weights, in fp32, summed in the order of peer ids: same bits for all.

    Nobody's weights count for more than comm/gossip/influence.py believes: what tokens and what progress are usual in a
    round is the median over all, so that all judge alike. Weights are clipped towards the last mean (centred clipping:
    Karimireddy et al., arXiv 2012.10333).
    """

    sections: Mapping[str, str] = {"theta": "fp32"}
    baseline: Tensor  # the last mean
    closed: tuple[int, ClosedWeights] | None  # tokens and weights of the window that is to be merged

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        super().__init__(gossip, theta, peer, tools)
        self.peer = peer
        if not theta.is_meta:
            self.load(theta, {})

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        packer.add("theta", self.sections["theta"], theta)
        self.closed = window.tokens, ClosedWeights(theta, window.steps)

    def merge(self, parts: Sequence[Parts], steps: int) -> Correction:
        assert self.closed is not None, "merge without a close"
        (tokens, own), self.closed = self.closed, None
        everyone = [(self.peer, tokens, own.theta)]
        everyone += [(part.peer, part.tokens, part.vectors["theta"]) for part in parts]
        everyone.sort(key=lambda one: one[0])
        ours = next(place for place, (peer, *_) in enumerate(everyone) if peer == self.peer)
        claims = [count for _, count, _ in everyone]
        shares, scales = self._judge(claims, [_length(vector - self.baseline) for _, _, vector in everyone], ours)
        mean, center = torch.zeros_like(own.theta), self.baseline
        for share, scale, (_, _, vector) in zip(shares, scales, everyone, strict=True):
            mean += share * (vector if scale == 1.0 else center + scale * (vector - center))
        self.baseline = mean
        return Correction(mean, replaces=own)

    def _judge(self, claims: Sequence[int], lengths: Sequence[float], ours: int) -> tuple[list[float], list[float]]:
        """Everybody's share of the mean, and how much of everybody's progress counts. `ours`: our place among them."""
        voters = [place for place, count in enumerate(claims) if count]
        if not voters:
            return influence.token_weights(claims), [influence.scale(one, median_low(lengths)) for one in lengths]
        learn = len(voters) > 1 or voters == [ours]
        claimed = [claims[place] for place in voters]
        usual = self.usual_tokens.of(claimed, learn) or min(claimed)
        believed = [min(float(count), influence.TIMES_USUAL_TOKENS * usual) for count in claims]
        times = [count / usual for count in believed]
        progress = self.usual_progress.of([lengths[place] / times[place] for place in voters], learn)
        limits = [progress * many if progress else lengths[ours] for many in times]
        scales = [influence.scale(length, limit) for length, limit in zip(lengths, limits, strict=True)]
        return influence.token_weights(believed), scales

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        self.baseline = theta.detach().float().cpu().clone()
        self.closed, self.usual_tokens, self.usual_progress = None, UsualFigure(), UsualFigure()


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))

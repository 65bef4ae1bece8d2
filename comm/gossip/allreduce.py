"""The update rule `allreduce`, for comparison: in every window, peers wait for each other and average all weights."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip import influence
from decentral.comm.gossip.update_rules import ClosedWeights, Correction, PartnerWindow, RuleTools, UpdateRule, Window
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId


@dataclass(slots=True)
class UsualFigure:
    """Estimate of the median over all peers of one quantity, such as the number of tokens that each peer claims.

    `rounds` has the medians of recent rounds.
    """

    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=influence.RECENT_WINDOWS))

    def of(self, found: Sequence[float], learn: bool) -> float:
        """Return the lower median of `found` in this round; 0 if it is unknown.

        If `found` has an even number of values, the median of `rounds` is added to them.

        Args:
            found: The quantity's values, one for each peer that claims tokens in this round.
            learn: Whether to add the result to `rounds`. Pass False if only one other peer claims tokens: the result is
                then the smaller of its value and the median of `rounds`, so one peer alone cannot set the bounds.
        """
        known = median(self.rounds) if self.rounds else 0.0
        if not learn:
            return min([known, *found])
        usual = float(median_low([*found, known] if known and len(found) % 2 == 0 else found)) or known
        if usual:
            self.rounds.append(usual)
        return usual


class AllReduceRule(UpdateRule):
    """The rule of `allreduce`: the token-weighted mean of all peers' weights.

    The mean is summed in fp32 in the order of peer ids, so all peers get the same bits. The bounds on each peer's
    tokens and progress follow from medians over all peers of the round, so all peers apply the same bounds. Weights are
    clipped towards the last mean (centred clipping: Karimireddy et al., arXiv 2012.10333).
    """

    sections: Mapping[str, str] = {"theta": "fp32"}
    baseline: Tensor  # mean weights of the last merge; before the first merge the initial weights
    closed: tuple[int, ClosedWeights] | None  # (tokens, weights) of the closed window; None once it is merged

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        """Create the rule; its baseline is a copy of `theta` [n]. If theta is on the meta device, call `load` next."""
        super().__init__(gossip, theta, peer, tools)
        self.peer = peer
        if not theta.is_meta:
            self.load(theta, {})

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        """Pack the weights `theta` [n] in fp32. `merge` reads the same tensor, so the caller must not change it."""
        packer.add("theta", self.sections["theta"], theta)
        self.closed = window.tokens, ClosedWeights(theta, window.steps)

    def merge(self, partners: Sequence[PartnerWindow], steps: int) -> Correction:
        """Average all peers' weights into the new baseline; return the correction that sets our weights to it."""
        assert self.closed is not None, "merge without a close"
        (tokens, own), self.closed = self.closed, None
        everyone = [(self.peer, tokens, own.theta)]
        everyone += [(one.peer, one.tokens, one.vectors["theta"]) for one in partners]
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
        """Return each peer's share of the mean, and the factor (0 to 1) that scales its distance from the last mean.

        Args:
            claims: Number of tokens that each peer claims.
            lengths: L2 distance of each peer's weights from the last mean.
            ours: This peer's index in `claims` and `lengths`.
        """
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
        """Start with a copy of `theta` [n] as the last mean; `state` is unused, since this rule stores no vectors."""
        self.baseline = theta.detach().float().cpu().clone()
        self.closed, self.usual_tokens, self.usual_progress = None, UsualFigure(), UsualFigure()


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))

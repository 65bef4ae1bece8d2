"""What rules without slow weights have in common: partners' weights pull ours, but not far (train/influence.py)."""

from math import isfinite

import torch
from torch import Tensor

from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId
from decentral.train import influence
from decentral.train.influence import Experience
from decentral.train.update_rules import RuleTools, UpdateRule


class BoundedRule(UpdateRule):
    """Knows how far training moves us in a window, and how far from us partners' weights usually are.

    He, Karimireddy and Jaggi, arXiv 2202.01545: x_i += sum_j w_ij clip(x_j - x_i).
    """

    baseline: Tensor  # theta as the last window's end left it, plus the corrections since

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        super().__init__(gossip, theta, peer, tools)
        self.peer, self.experience = peer, Experience()
        self._pulled: dict[PeerId, float] = {}  # how far each partner has pulled us since our last window's end
        if not theta.is_meta:
            self.load(theta, {})

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        self.baseline = theta.detach().float().cpu().clone()

    def end_window(self, theta: Tensor) -> None:
        """`theta` is the rule's own from now on."""
        self.experience.closed(length(theta - self.baseline))
        self.baseline = theta
        self._pulled.clear()

    def pull_towards(self, partner: PeerId, apart: Tensor, share: float, progress: float = 0.0) -> Tensor:
        """The part of the way `apart` to a partner's weights that we go, of which it has this share.

        `progress`: ours in the window that is not over yet, where the merge comes in the middle of one.

        All that one partner pulls in a window of ours is bounded together: one that comes often pulls no further.
        """
        distance = length(apart)
        if not isfinite(distance):
            return torch.zeros_like(apart)  # finite numbers of a partner may still differ from ours by more than any
        most = influence.TIMES_USUAL * max(progress, self.experience.usual_distance([(partner, distance)]))
        left = max(0.0, most - self._pulled.get(partner, 0.0))
        way = min(share * distance, left)
        self._pulled[partner] = self._pulled.get(partner, 0.0) + way
        return apart * (share if share * distance <= left else way / distance)


def length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))

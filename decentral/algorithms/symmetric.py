"""Symmetric gossip: two peers swap their weights and both move half way, so the mean of the swarm is kept exactly."""

from collections.abc import Sequence

from torch import Tensor

from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId
from decentral.train.bounded_rule import BoundedRule
from decentral.train.sections import Packer
from decentral.train.update_rules import Correction, Parts, RuleTools, Window


class SymmetricRule(BoundedRule):
    """x_i += (Q(x_j) - Q(x_i)) / 2 on both sides (Boyd et al., 2006; AD-PSGD, arXiv 1710.06952).

    Both sides use the quantised values, so what one gains the other loses, whatever Q does: the mean is kept, while
    nobody is further away than train/influence.py believes.
    """

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        self.sent: Tensor | None = None  # Q(x_i) [n] of the window that waits for its merge
        super().__init__(gossip, theta, peer, tools)

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        self.sent = packer.add_and_read("theta", self.sections["theta"], theta)
        self.end_window(theta)

    def merge(self, theta: Tensor | None, parts: Sequence[Parts], steps: int) -> Correction | None:
        assert self.sent is not None, "merge without a close"
        sent, self.sent = self.sent, None
        assert len(parts) <= 1, "a symmetric exchange has two sides"
        if not parts:
            return None
        moved = self.pull_towards(parts[0].peer, parts[0].vectors["theta"] - sent, share=0.5)
        self.baseline += moved
        return Correction(moved)

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        super().load(theta, state)
        self.sent = None

"""Pull, the default: one-sided outer steps on slow weights, for which nobody waits.

A window publishes the slow weights phi and the pseudo-gradient, and partners pull what they want of it. The formulas,
their sources and what they conserve are in train/outer.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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

PSEUDO_GRADIENT = "pseudo_gradient"  # the section's name on the wire


class PullRule(UpdateRule):
    """outer.close and outer.merge."""

    sections: Mapping[str, str] = {"phi": "int8", PSEUDO_GRADIENT: "q4"}
    donated: Mapping[str, str] = {"phi": "fp32", "momentum": "bf16"}
    clipped: str | None = PSEUDO_GRADIENT

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId) -> None:
        self.constants = outer.Constants(gossip.momentum, gossip.step, gossip.consensus, gossip.moment)
        self.slow = outer.start(theta)
        self.closed: outer.WindowUpdate | None = None
        self.closed_at = 0  # in steps of this peer

    def close(self, live: Live, packer: Packer) -> None:
        packer.add("phi", self.sections["phi"], self.slow.phi)
        codec = self.sections[PSEUDO_GRADIENT]
        self.slow, sent = outer.close(self.slow, live.theta, lambda owed: packer.add(PSEUDO_GRADIENT, codec, owed))
        self.closed, self.closed_at = outer.WindowUpdate(sent, live.tokens, live.lr_sum), live.steps

    def merge(self, live: Live, parts: Sequence[Parts]) -> None:
        assert self.closed is not None, "merge without a close"
        own, self.closed = self.closed, None
        partners = [self._update_of(part, outer.credible(own.tokens)) for part in parts]
        rho = outer.rho_of(live.steps - self.closed_at)
        outcome = outer.merge(self.slow, own, partners, self.constants, rho)
        self.slow = outcome.slow
        live.theta += outcome.correction
        if self.constants.kappa:
            shift = outer.moment_shift(own, outcome, live.moments(), rho * self.constants.kappa)
            live.exp_avg += outer.limited(shift, torch.linalg.vector_norm(live.exp_avg))

    def _update_of(self, part: Parts, most_tokens: int) -> outer.WindowUpdate:
        """What a partner did in its window, as far as we believe it."""
        tokens = min(part.tokens, most_tokens)
        return outer.WindowUpdate(part.vectors[PSEUDO_GRADIENT], tokens, part.lr_sum, self._near(part.vectors))

    def _near(self, vectors: Mapping[str, Tensor]) -> Tensor | None:
        """A partner's slow weights, no further from ours than ours are from zero: absurd claims move us little."""
        if "phi" not in vectors:
            return None
        apart, most = vectors["phi"] - self.slow.phi, torch.linalg.vector_norm(self.slow.phi)
        if not 0 < most < torch.linalg.vector_norm(apart):
            return vectors["phi"]
        return self.slow.phi + outer.limited(apart, most)

    def state(self) -> dict[str, Tensor]:
        slow = self.slow
        kept = {"phi": slow.phi, "baseline": slow.baseline, "momentum": slow.momentum, "residual": slow.residual}
        return kept if self.closed is None else {**kept, "pending": self.closed.pseudo_gradient}

    def load(self, live: Live, state: dict[str, Tensor]) -> None:
        """A window that was closed and not yet merged becomes a solo step: nobody will send us its partners now."""
        self.slow = outer.Slow(state["phi"], state["baseline"], state["momentum"], state["residual"])
        self.closed = None
        if "pending" in state:
            pending = outer.WindowUpdate(state["pending"], live.tokens, 0.0)
            outcome = outer.merge(self.slow, pending, [], self.constants, rho=1.0)
            self.slow = outcome.slow
            live.theta += outcome.correction

    def donate(self, live: Live, packer: Packer) -> None:
        packer.add("phi", self.donated["phi"], self.slow.phi)
        packer.add("momentum", self.donated["momentum"], self.slow.momentum)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        live.theta.copy_(donated["phi"])
        self.slow, self.closed = replace(outer.start(live.theta), momentum=donated["momentum"]), None


ALGORITHM = Algorithm(
    name="pull",
    rule=PullRule,
    machine=lambda context, close_at: PullExchange(  # slow weights are pulled in every `consensus_every`-th window only
        context, close_at, light=(PSEUDO_GRADIENT,), whole_every=context.gossip.consensus_every
    ),
    questions=(Pull,),
    partners=lambda gossip: gossip.partners,
    snapshot_bytes=1.53,
    memory_bytes=24,  # phi, baseline, momentum, residual and the closed window in fp32, and two published snapshots
)

"""How a fragment's weights are mixed with partners': one rule for each `gossip.algorithm`.

A rule holds a fragment's gossip state and turns a window's end into a blob for others (`close`), and what others
sent into a correction of the live weights (`merge`). The numerics are pure functions, here and in outer.py.

    pull        one-sided outer step on slow weights (train/outer.py)                         the default
    symmetric   two peers swap and both move half way: the mean of the swarm is kept exactly
    push_sum    mass is pushed along directed links: sum of x and sum of w are kept (stochastic gradient push,
                Assran et al., arXiv 1811.10792)
    allreduce   everyone waits for everyone and takes the token-weighted mean: the reference
    synchronous gradients are added up before each step, so replicas are equal and nothing else is mixed
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from decentral.core import config
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.jobs import Layout, Section
from decentral.core.reasons import Reason
from decentral.train import outer
from decentral.train.inner import Live, step_clipped
from decentral.train.sections import Codecs, Packer

State = dict[str, Tensor]

MAX_WEIGHT = 1e6  # of pushed mass; all peers together weigh as many as they are
MAX_STEPS = 1 << 24  # up to here fp32 counts exactly
SINGLE = ("weight", "steps")  # sections of one number


@dataclass(frozen=True, slots=True)
class Parts:
    """A partner's blob, unpacked: fp32 vectors on the fragment's device."""

    peer: PeerId
    tokens: int
    lr_sum: float  # sum of learning rates
    vectors: dict[str, Tensor]


class UpdateRule(Protocol):
    sections: Mapping[str, str]
    """What it packs, in this order: name to codec. All have the fragment's length, but `weight`: one number."""

    donated: Mapping[str, str]
    """What a newcomer gets, likewise."""

    clipped: str | None
    """The section whose length is limited against that of recent ones, if any. A partner always sends it."""

    def close(self, live: Live, packer: Packer) -> None:
        """Ends the window and packs what partners may have. The caller resets the window's counts afterwards."""

    def merge(self, live: Live, parts: Sequence[Parts]) -> Tensor:
        """The correction [n] that the caller adds to theta."""
        ...

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """Raises ProtocolError if what a partner sent cannot be merged, though it is finite and of our shape."""

    def state(self) -> State:
        """All that a checkpoint must keep."""
        ...

    def load(self, live: Live, state: State) -> None:
        """Goes on from `state`; theta is already what it was."""

    def donate(self, live: Live, packer: Packer) -> None:
        """Packs what a newcomer starts from."""

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Starts anew, theta included, from what a donor packed."""


class PullRule:
    """outer.close and outer.merge."""

    sections: Mapping[str, str] = {"phi": "int8", "delta": "q4"}
    donated: Mapping[str, str] = {"phi": "fp32", "momentum": "bf16"}
    clipped: str | None = "delta"

    def __init__(self, theta: Tensor, gossip: config.GossipConfig) -> None:
        self.constants = outer.Constants(gossip.momentum, gossip.step, gossip.consensus, gossip.moment)
        self.slow = outer.start(theta)
        self.closed: outer.WindowUpdate | None = None
        self.closed_at = 0  # in steps of this peer

    def close(self, live: Live, packer: Packer) -> None:
        packer.add("phi", self.sections["phi"], self.slow.phi)
        self.slow, sent = outer.close(
            self.slow, live.theta, lambda owed: packer.add("delta", self.sections["delta"], owed)
        )
        self.closed, self.closed_at = outer.WindowUpdate(sent, live.tokens, live.lr_sum), live.steps

    def merge(self, live: Live, parts: Sequence[Parts]) -> Tensor:
        assert self.closed is not None, "merge without a close"
        own, self.closed = self.closed, None
        partners = [
            outer.WindowUpdate(
                p.vectors["delta"], min(p.tokens, outer.credible(own.tokens)), p.lr_sum, self._near(p.vectors)
            )
            for p in parts
        ]
        rho = outer.rho_of(live.steps - self.closed_at)
        outcome = outer.merge(self.slow, own, partners, self.constants, rho)
        self.slow = outcome.slow
        if self.constants.kappa:
            shift = outer.moment_shift(own, outcome, live.moments(), rho * self.constants.kappa)
            live.exp_avg += outer.limited(shift, torch.linalg.vector_norm(live.exp_avg))
        return outcome.correction

    def _near(self, vectors: Mapping[str, Tensor]) -> Tensor | None:
        """A partner's slow weights, no further from ours than ours are from nothing: absurd claims move us little."""
        if "phi" not in vectors:
            return None
        apart, most = vectors["phi"] - self.slow.phi, torch.linalg.vector_norm(self.slow.phi)
        if not 0 < most < torch.linalg.vector_norm(apart):
            return vectors["phi"]
        return self.slow.phi + outer.limited(apart, most)

    def check(self, vectors: Mapping[str, Tensor]) -> None: ...

    def state(self) -> State:
        slow = self.slow
        kept = {
            "phi": slow.phi,
            "baseline": slow.baseline,
            "momentum": slow.momentum,
            "residual": slow.residual,
        }
        return kept if self.closed is None else {**kept, "pending": self.closed.sent}

    def load(self, live: Live, state: State) -> None:
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


class _Plain:
    """What the rules without slow weights share: a newcomer starts from a donor's live weights."""

    sections: Mapping[str, str] = {"theta": "int8"}
    donated: Mapping[str, str] = {"theta": "fp32"}
    clipped: str | None = None

    def donate(self, live: Live, packer: Packer) -> None:
        packer.add("theta", self.donated["theta"], live.theta)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        live.theta.copy_(donated["theta"])
        self.load(live, {})

    def check(self, vectors: Mapping[str, Tensor]) -> None: ...

    def state(self) -> State:
        return {}

    def load(self, live: Live, state: State) -> None: ...


class SymmetricRule(_Plain):
    """x_i += (Q(x_j) - Q(x_i)) / 2 on both sides (Boyd et al., 2006; AD-PSGD, arXiv 1710.06952).

    Both sides use the quantised values, so what one gains the other loses, whatever Q does: the mean is kept.
    """

    def __init__(self, theta: Tensor) -> None:
        self.sent: Tensor | None = None

    def close(self, live: Live, packer: Packer) -> None:
        self.sent = packer.add("theta", self.sections["theta"], live.theta)

    def merge(self, live: Live, parts: Sequence[Parts]) -> Tensor:
        assert self.sent is not None, "merge without a close"
        sent, self.sent = self.sent, None
        if not parts:
            return torch.zeros_like(live.theta)
        assert len(parts) == 1, "a symmetric exchange has two sides"
        return 0.5 * (parts[0].vectors["theta"] - sent)

    def load(self, live: Live, state: State) -> None:
        self.sent = None


class PushSumRule(_Plain):
    """x = w theta is this peer's mass. A window's end gives half of x and of w away; what comes is added.

    Conserved: sum over peers and messages in flight of x, and of w, but for training itself. The half is sent as
    Q(x/2) and x - Q(x/2) stays, so quantisation loses nothing.
    """

    sections: Mapping[str, str] = {"mass": "int8", "weight": "fp32"}

    def __init__(self, theta: Tensor) -> None:
        self.weight = torch.ones((), device=theta.device)

    def close(self, live: Live, packer: Packer) -> None:
        mass = live.theta * self.weight
        away = packer.add("mass", self.sections["mass"], mass / 2)
        half = packer.add("weight", self.sections["weight"], (self.weight / 2).reshape(1))
        self.weight = self.weight - half[0]
        live.theta.copy_((mass - away) / self.weight)

    def merge(self, live: Live, parts: Sequence[Parts]) -> Tensor:
        """Adds mass at any time, also mass of our own that nobody took."""
        mass, weight = live.theta * self.weight, self.weight
        for part in parts:
            mass = mass + part.vectors["mass"]
            weight = weight + part.vectors["weight"][0]
        self.weight = weight
        return mass / weight - live.theta

    def state(self) -> State:
        return {"weight": self.weight.reshape(1)}

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        if not 0 < float(vectors["weight"][0]) < MAX_WEIGHT:
            raise ProtocolError(Reason.WEIGHT, f"mass must weigh something, and less than {MAX_WEIGHT:g}")

    def load(self, live: Live, state: State) -> None:
        self.weight = state["weight"].reshape(()) if state else torch.ones_like(self.weight)


class AllReduceRule(_Plain):
    """The token-weighted mean of everyone's weights, in fp32, summed in the order of peer ids: same bits for all."""

    sections: Mapping[str, str] = {"theta": "fp32"}

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.tokens = 0

    def close(self, live: Live, packer: Packer) -> None:
        packer.add("theta", self.sections["theta"], live.theta)
        self.tokens = live.tokens

    def merge(self, live: Live, parts: Sequence[Parts]) -> Tensor:
        everyone = [(self.peer, self.tokens, live.theta)]
        everyone += [(part.peer, part.tokens, part.vectors["theta"]) for part in parts]
        everyone.sort(key=lambda one: one[0])
        weights = outer.token_weights([tokens for _, tokens, _ in everyone])
        mean = torch.zeros_like(live.theta)
        for weight, (_, _, theta) in zip(weights, everyone, strict=True):
            mean += weight * theta
        live.theta.copy_(mean)  # not `theta + (mean - theta)`, whose rounding would differ between peers
        return torch.zeros_like(mean)


class SynchronousRule(_Plain):
    """One AdamW step with the mean gradient of all tokens of a round, whoever computed it.

    What a window publishes is the sum of the gradients of its tokens' losses. All holders add up the same sums in the
    same order, so their weights and moments stay equal: to the last bit, on devices that compute alike. Clipped by
    itself, as in train/stage_runner.py; the learning rate follows the fragment's own steps, which all holders have taken.
    """

    sections: Mapping[str, str] = {"gradient": "fp32"}
    donated: Mapping[str, str] = {"theta": "fp32", "exp_avg": "fp32", "exp_avg_sq": "fp32", "steps": "fp32"}

    def close(self, live: Live, packer: Packer) -> None:
        packer.add("gradient", self.sections["gradient"], live.grad)

    def merge(self, live: Live, parts: Sequence[Parts]) -> Tensor:
        tokens = sum(part.tokens for part in parts)
        if tokens:
            live.grad.zero_()
            for part in sorted(parts, key=lambda one: one.peer):
                live.grad += part.vectors["gradient"]
            step_clipped(live, live.grad.div_(tokens), live.steps, tokens)
            live.grad.zero_()
        return torch.zeros_like(live.theta)

    def donate(self, live: Live, packer: Packer) -> None:
        packer.add("theta", self.donated["theta"], live.theta)
        packer.add("exp_avg", self.donated["exp_avg"], live.exp_avg)
        packer.add("exp_avg_sq", self.donated["exp_avg_sq"], live.exp_avg_sq)
        packer.add("steps", self.donated["steps"], torch.tensor([float(live.steps)]))

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        live.theta.copy_(donated["theta"])
        live.exp_avg.copy_(donated["exp_avg"])
        live.exp_avg_sq.copy_(donated["exp_avg_sq"].clamp(min=0))
        live.steps = int(donated["steps"].clamp(0, MAX_STEPS))


def layout_of(sections: Mapping[str, str], parameters: int, codecs: Codecs) -> Layout:
    """What a blob with these sections looks like, for a fragment of so many parameters."""
    lengths = {name: 1 if name in SINGLE else parameters for name in sections}
    return tuple(
        Section(name, codec, lengths[name], codecs.size(codec, lengths[name])) for name, codec in sections.items()
    )


def donated(gossip: config.GossipConfig) -> Mapping[str, str]:
    """What a newcomer gets, under this algorithm."""
    return {"pull": PullRule.donated, "synchronous": SynchronousRule.donated}.get(gossip.algorithm, _Plain.donated)


def rule(gossip: config.GossipConfig, theta: Tensor, peer: PeerId) -> UpdateRule:
    match gossip.algorithm:
        case "pull":
            return PullRule(theta, gossip)
        case "symmetric":
            return SymmetricRule(theta)
        case "push_sum":
            return PushSumRule(theta)
        case "allreduce":
            return AllReduceRule(peer)
        case "synchronous":
            return SynchronousRule()

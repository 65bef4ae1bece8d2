"""Check the rules of replicas and rosters: replicas stay near each other and the optimum, and rosters become right.

    thrown    an honest peer's replica is never further than MAX_THROWN from the optimum
    together  some time after the last fault, replicas differ by no more than the noise of a few windows
    drift     with the algorithm pull, all merges of honest snapshots together have moved the mean of the replicas by at
              most MAX_DRIFT
    roster    some time after the last fault, every peer's roster has exactly the running peers, unless rosters are
              sharded; a peer that was dropped because it did not answer may be missing until its next record

As soon as there are as many liars as honest peers, "thrown" and "together" are no longer checked.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from decentral.comm.gossip.pull_rule import PullRule
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.host import VirtualHost
from decentral.sim.invariants.evidence import Evidence
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.surrogate_model import STEP_NOISE

MAX_DRIFT = 1.0  # rule "drift": limit, as a multiple of the initial distance from the optimum
MAX_THROWN = 1000.0  # rule "thrown": limit, as a multiple of the initial distance from the optimum
MAX_APART = 30.0  # rule "together": limit of a replica's distance from the mean, as a multiple of a window's noise
MAX_BEHIND = 0.5  # rule "together": a slow peer may lag behind the mean by this share of the mean's way to the optimum


@dataclass(slots=True)
class ConvergenceAudit:
    """The audit of replicas and rosters; `check`, during a run, and `finish`, at its end, may raise Violation."""

    evidence: Evidence
    farthest: float = 0.0
    drift: dict[int, Tensor] = field(default_factory=dict)  # fragment -> sum of all changes that honest merges made
    forged: dict[int, float] = field(default_factory=dict)  # fragment -> size of all changes by merges of false blobs
    outvoted: bool = False  # whether there have ever been as many liars as honest peers, so that the liars may win
    # (peer that dropped the other from its roster, dropped peer) -> when it dropped the other
    _dropped_at: dict[tuple[PeerId, PeerId], Seconds] = field(default_factory=dict)
    # (peer, fragment) -> baseline with the residual when the peer last closed a window
    _closed: dict[tuple[PeerId, int], Tensor] = field(default_factory=dict)

    def closed(self, host: VirtualHost, fragment: int) -> None:
        """Copy the baseline and residual of a peer that closes a window, to compare them with those after the merge."""
        rule = host.training.gossip.of(fragment).rule
        if isinstance(rule, PullRule):
            assert rule.residual is not None, "a closed window has a residual"
            self._closed[host.peer, fragment] = rule.baseline + rule.residual

    def corrected(self, host: VirtualHost, fragment: int, forged: bool) -> None:
        """Add up how a merge has moved a peer's baseline since the peer closed its window.

        `forged`: a snapshot in the merge was false. Then the root mean square of the move is added to `self.forged`;
        otherwise the move itself is added to `self.drift`.
        """
        closed = self._closed.pop((host.peer, fragment), None)
        rule = host.training.gossip.of(fragment).rule
        if closed is not None and isinstance(rule, PullRule):
            moved = rule.baseline - closed
            if forged:
                self.forged[fragment] = self.forged.get(fragment, 0.0) + _length(moved)
            else:
                self.drift[fragment] = self.drift.get(fragment, torch.zeros_like(moved)) + moved

    def unanswered(self, host: VirtualHost, peer: PeerId) -> None:
        """Record when the host's peer dropped `peer` from its roster because `peer` did not answer."""
        self._dropped_at[host.peer, peer] = host.agenda.now

    def check(self) -> None:
        """Check the rule "thrown", unless there were at any time as many liars as honest peers (`self.outvoted`)."""
        training = [member for member in self.evidence.swarm.living if member.training]
        honest = [member for member in training if not member.byzantine]
        self.outvoted |= 0 < len(honest) <= len(training) - len(honest)
        if self.outvoted or self.evidence.swarm.settings.gradients is not None:
            return
        for member in honest:
            assert member.host is not None
            for held in member.host.training.gossip.fragments:
                farthest = float(held.live.theta.abs().max())
                if not farthest <= MAX_THROWN:
                    detail = f"{member.peer} is {farthest:.2g} initial distances from the optimum"
                    self.evidence.violated("thrown", detail, member.host)

    def finish(self) -> None:
        """Check the rules "roster", "together" and "drift", at the end of a run."""
        living = [member for member in self.evidence.swarm.living if member.training]
        known = [member for member in self.evidence.swarm.living if member.host]
        if not any(member.host.node.roster.size.level for member in known if member.host):
            self._check_rosters(known)
        if not self.outvoted:
            self._check_together(living)
        self._check_drift(living)

    def _check_drift(self, living: Sequence[SimulatedPeer]) -> None:
        """Check the rule "drift": merges of honest snapshots have not moved the mean further than MAX_DRIFT."""
        holders = Counter(
            held.live.fragment.index for one in living if one.host for held in one.host.training.gossip.fragments
        )
        for index, corrections in self.drift.items():
            count = max(1, holders[index])
            drift, forged = _length(corrections) / count, self.forged.get(index, 0.0) / count
            if drift > MAX_DRIFT + forged:
                detail = f"honest merges have moved the mean by {drift:.2f}, merges of false snapshots by {forged:.2f}"
                self.evidence.violated("drift", detail, living[0].host if living else None)

    def _check_rosters(self, living: Sequence[SimulatedPeer]) -> None:
        there = {member.peer for member in living}
        for member in living:
            assert member.host is not None
            roster = member.host.node.roster
            wrong = set(roster.live) ^ (there - {member.peer})
            wrong -= {peer for peer in there if roster.knows(peer) and self._may_lack(member, peer)}
            if wrong:
                self.evidence.violated("roster", f"{member.peer} is wrong about {sorted(wrong)}", member.host)

    def _may_lack(self, member: SimulatedPeer, peer: PeerId) -> bool:
        """Return whether the member's roster may lack `peer` for now.

        A peer that the member dropped may be missing until the peer renews its record and the member reads it. A member
        that does not train yet may lack any peer, because it also drops donors that answer late.
        """
        swarm, times = self.evidence.swarm, self.evidence.swarm.settings.times
        since = swarm.agenda.now - self._dropped_at.get((member.peer, peer), -inf)
        return not member.training or since <= times.renew_s + times.refresh_s

    def _check_together(self, living: Sequence[SimulatedPeer]) -> None:
        swarm = self.evidence.swarm
        steps = max(1.0, swarm.settings.config.gossip.window_s / swarm.settings.pace.step_s)
        unit, to_go = STEP_NOISE * steps**0.5, _by_peer(living, lambda theta, mean: mean)  # the optimum is 0
        for peer, distance in distances(living).items():
            noise = distance / unit
            self.farthest = max(self.farthest, noise)
            if noise > MAX_APART + MAX_BEHIND * to_go[peer] / unit and len(living) > 1:
                detail = f"{peer} is {noise:.0f} times one window's noise from the others"
                self.evidence.violated("together", detail, swarm.by_peer[peer].host)


def _length(vector: Tensor) -> float:
    """Return the root mean square of a vector's elements."""
    return float(vector.square().mean().sqrt())


def distances(peers: Iterable[SimulatedPeer]) -> dict[PeerId, float]:
    """Return, by peer, the root mean square distance of its weights from the mean of all replicas."""
    return _by_peer(peers, lambda theta, mean: theta - mean)


def _by_peer(peers: Iterable[SimulatedPeer], vector: Callable[[Tensor, Tensor], Tensor]) -> dict[PeerId, float]:
    """Return, by peer, the root mean square of `vector(replica, mean replica)` over all elements of its fragments."""
    squares: dict[PeerId, list[Tensor]] = {}
    for replicas in _by_fragment(peers).values():
        mean = torch.stack(list(replicas.values())).mean(dim=0)
        for peer, theta in replicas.items():
            squares.setdefault(peer, []).append(vector(theta, mean).square())
    return {peer: float(torch.cat(parts).mean().sqrt()) for peer, parts in squares.items()}


def loss_of_mean(peers: Iterable[SimulatedPeer]) -> float:
    """Return the surrogate loss of the mean of all replicas: the mean square of its weights, since the optimum is 0."""
    replicas = _by_fragment(peers).values()
    means = [torch.stack(list(held.values())).mean(dim=0).square() for held in replicas]
    return float(torch.cat(means).mean()) if means else 0.0


def _by_fragment(peers: Iterable[SimulatedPeer]) -> dict[int, dict[PeerId, Tensor]]:
    found: dict[int, dict[PeerId, Tensor]] = {}
    for peer in peers:
        for held in peer.host.training.gossip.fragments if peer.host is not None else ():
            found.setdefault(held.live.fragment.index, {})[peer.peer] = held.live.theta
    return found

"""The rules of replicas and rosters: no replica is thrown away; in the end replicas are together, and rosters right.

thrown    at no moment is the replica of an honest peer further from the optimum than training explains; not judged
          from the moment on at which most partners that an honest peer could have were liars
together  after the last fault replicas come together again: no further apart than a few windows' noise; not judged
          where at one time most partners that an honest peer could have were liars
drift     pull: all corrections together have moved the mean of the replicas by a bounded amount
roster    some time after the last fault every peer knows exactly which peers live, where the roster is not sharded; of
          those that have left its questions unanswered it hears with their next record
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

MAX_DRIFT = 1.0  # initial distances from the optimum, and as much more as merges with forged snapshots have moved it
MAX_THROWN = 1000.0  # initial distances from the optimum: of the liars' snapshots some are as far as floats go
MAX_APART = 30.0  # windows' noise: replicas further apart than this have lost each other
MAX_BEHIND = 0.5  # of the mean's distance from the optimum: slow peers lag behind where a liar threw all


@dataclass(slots=True)
class ConvergenceAudit:
    """Adds corrections up as they happen, and looks at the replicas when the run is over."""

    evidence: Evidence
    farthest: float = 0.0  # the largest distance of a replica from the mean at the end, in windows' noise
    drift: dict[int, Tensor] = field(default_factory=dict)  # the sum of all honest corrections, by fragment
    forged: dict[int, float] = field(default_factory=dict)  # how far those with forged snapshots moved replicas
    outvoted: bool = False  # for a moment most partners that an honest peer could have were liars
    _dropped_at: dict[tuple[PeerId, PeerId], Seconds] = field(default_factory=dict)  # as the latter did not answer
    _closed: dict[tuple[PeerId, int], Tensor] = field(default_factory=dict)  # baselines at the last close

    def closed(self, host: VirtualHost, fragment: int) -> None:
        rule = host.training.gossip.of(fragment).rule
        if isinstance(rule, PullRule):
            self._closed[host.peer, fragment] = rule.baseline.clone()

    def corrected(self, host: VirtualHost, fragment: int, forged: bool) -> None:
        """Adds what a merge moved the baseline by, and so what it moved the mean of all replicas by.

        What a `forged` snapshot moved is the liar's. The others who mix with that replica later may move as much again.
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
        """The peer here has dropped one that did not answer it, until that one's next record."""
        self._dropped_at[host.peer, peer] = host.agenda.now

    def check(self) -> None:
        """To be called now and then: do honest peers have a majority of honest partners, as promises suppose? And has
        no replica been thrown away?"""
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
        living = [member for member in self.evidence.swarm.living if member.training]
        known = [member for member in self.evidence.swarm.living if member.host]
        if not any(member.host.node.roster.size.level for member in known if member.host):
            self._check_rosters(known)
        if not self.outvoted:
            self._check_together(living)
        self._check_drift(living)

    def _check_drift(self, living: Sequence[SimulatedPeer]) -> None:
        """How far all corrections together have moved the mean, in distances from the optimum at the start."""
        holders = Counter(
            held.live.fragment.index for one in living if one.host for held in one.host.training.gossip.fragments
        )
        for index, corrections in self.drift.items():
            count = max(1, holders[index])
            drift, forged = _length(corrections) / count, self.forged.get(index, 0.0) / count
            if drift > MAX_DRIFT + forged:
                detail = f"corrections have moved the mean by {drift:.2f}, those with forged snapshots by {forged:.2f}"
                self.evidence.violated("drift", detail, living[0].host if living else None)

    def _check_rosters(self, living: Sequence[SimulatedPeer]) -> None:
        there = {member.peer for member in living}
        for member in living:
            assert member.host is not None
            roster = member.host.node.roster
            wrong = set(roster.live) ^ (there - {member.peer})
            wrong -= {peer for peer in there if roster.knows(peer) and self._record_is_due(member, peer)}
            if wrong:
                self.evidence.violated("roster", f"{member.peer} is wrong about {sorted(wrong)}", member.host)

    def _record_is_due(self, member: SimulatedPeer, peer: PeerId) -> bool:
        """Whether a peer that this one has dropped may come back with its next record: who takes the state leaves aside
        a donor that is late, and who waits for large answers over slow links one of which two were cut."""
        swarm, times = self.evidence.swarm, self.evidence.swarm.settings.times
        since = swarm.agenda.now - self._dropped_at.get((member.peer, peer), -inf)
        return not member.training or since <= times.renew_s + times.refresh_s

    def _check_together(self, living: Sequence[SimulatedPeer]) -> None:
        swarm = self.evidence.swarm
        steps = max(1.0, swarm.settings.config.gossip.window_s / swarm.settings.pace.step_s)
        unit, to_go = STEP_NOISE * steps**0.5, _distances_of_means(living)
        for peer, apart in distances(living).items():
            noise = apart / unit
            self.farthest = max(self.farthest, noise)
            if noise > MAX_APART + MAX_BEHIND * to_go[peer] / unit and len(living) > 1:
                detail = f"{peer} is {noise:.0f} windows' noise from the others"
                self.evidence.violated("together", detail, swarm.by_peer[peer].host)


def _length(vector: Tensor) -> float:
    """The root mean square."""
    return float(vector.square().mean().sqrt())


def distances(peers: Iterable[SimulatedPeer]) -> dict[PeerId, float]:
    """The distance of each replica from the mean of all that hold the same: root mean square over the numbers."""
    return _by_peer(peers, lambda theta, mean: theta - mean)


def _distances_of_means(peers: Iterable[SimulatedPeer]) -> dict[PeerId, float]:
    """Likewise, the distance of that mean from a surrogate's optimum, which is zero."""
    return _by_peer(peers, lambda theta, mean: mean)


def _by_peer(peers: Iterable[SimulatedPeer], vector: Callable[[Tensor, Tensor], Tensor]) -> dict[PeerId, float]:
    """The root mean square of a vector of each fragment's replica and mean, over all that a peer holds."""
    squares: dict[PeerId, list[Tensor]] = {}
    for replicas in _by_fragment(peers).values():
        mean = torch.stack(list(replicas.values())).mean(dim=0)
        for peer, theta in replicas.items():
            squares.setdefault(peer, []).append(vector(theta, mean).square())
    return {peer: float(torch.cat(parts).mean().sqrt()) for peer, parts in squares.items()}


def loss_of_mean(peers: Iterable[SimulatedPeer]) -> float:
    """The mean square of the average of the replicas: a surrogate's distance from its optimum, which is zero."""
    replicas = _by_fragment(peers).values()
    means = [torch.stack(list(held.values())).mean(dim=0).square() for held in replicas]
    return float(torch.cat(means).mean()) if means else 0.0


def _by_fragment(peers: Iterable[SimulatedPeer]) -> dict[int, dict[PeerId, Tensor]]:
    found: dict[int, dict[PeerId, Tensor]] = {}
    for peer in peers:
        for held in peer.host.training.gossip.fragments if peer.host is not None else ():
            found.setdefault(held.live.fragment.index, {})[peer.peer] = held.live.theta
    return found

"""The fault injector: carries faults (sim/faults.py) out on a simulated swarm, and ends those that end."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, Snapshot
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim import liars
from decentral.sim.faults import ALL, HOP_LIES, Fault
from decentral.sim.host import VirtualHost
from decentral.sim.route_liars import falsify_gradient
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm

STALE = 0.2  # the share of lookups in the directory that are stale while records come late


@dataclass(slots=True)
class FaultInjector:
    """Puts faults on the agenda, and the ends of those that end."""

    swarm: SimulatedSwarm
    last_at: Seconds = 0.0  # when the last fault is over
    forged: set[tuple[PeerId, bytes]] = field(default_factory=set)  # blobs that were sent with a digest that fits them
    _kept: dict[tuple[str, PeerId, int], Envelope] = field(default_factory=dict)  # earlier answers, to be sent again
    _answers: dict[tuple[PeerId, PeerId], Envelope] = field(default_factory=dict)  # of lying hops, by asker
    _windows: dict[int, tuple[list[Tensor], list[Tensor]]] = field(
        default_factory=dict
    )  # of one peer: before, and last

    def plan(self, faults: Sequence[Fault]) -> None:
        """Lets these faults happen, each at its time. The swarm must not have come to the first of them."""
        self.swarm.falsify(self._byzantine_answer)
        for fault in faults:
            self.swarm.agenda.at(fault.at, partial(self._begin, fault))
            self.last_at = max(self.last_at, fault.at + fault.lasts)

    def _begin(self, fault: Fault) -> None:
        end = self._begin_at_peers(fault) or self._begin_on_network(fault)
        if end is not None and fault.lasts:
            self.swarm.agenda.after(fault.lasts, end)

    def _members(self, fault: Fault) -> list[SimulatedPeer]:
        members = self.swarm.members
        if fault.peers == (ALL,):
            return list(members)
        return [members[number] for number in fault.peers if number < len(members)]

    def _apply(self, fault: Fault, action: Callable[[SimulatedPeer], None]) -> None:
        for member in self._members(fault):
            action(member)

    def _begin_at_peers(self, fault: Fault) -> Callable[[], Any] | None:
        """Begins a fault of processes and disks. Returns how it ends, if it does."""
        swarm = self.swarm
        match fault.kind:
            case "crash":
                self._apply(fault, swarm.crash)
            case "restart":
                self._apply(fault, swarm.start)
            case "leave":
                self._apply(fault, swarm.leave)
            case "wipe":  # the peer comes back without its disk, and so without its identity: as a new member
                for member in self._members(fault):
                    swarm.crash(member)
                    member.wipe()
                    swarm.start(swarm.add())
            case "join":
                for _ in range(int(fault.value)):
                    swarm.start(swarm.add())
            case "freeze":
                self._apply(fault, swarm.freeze)
                return lambda: self._apply(fault, swarm.thaw)
            case "slow":
                self._apply(fault, lambda member: member.slow_down(fault.value))
                return lambda: self._apply(fault, lambda member: member.slow_down(1.0))
            case "clock":
                self._apply(fault, lambda member: swarm.jump_clock(member, fault.value))
            case "full-disk":
                self._apply(fault, lambda member: member.disk.fill())
                return lambda: self._apply(fault, lambda member: member.disk.make_room())
            case "skew":
                self._apply(fault, lambda member: member.skew_clock(fault.value))
            case "lie":
                self._apply(fault, lambda member: member.lie(fault.how))
                return lambda: self._apply(fault, SimulatedPeer.stop_lying)
        return None

    def _begin_on_network(self, fault: Fault) -> Callable[[], Any] | None:
        """Begins a fault of links, messages or records. Returns how it ends, if it does."""
        network, geography, now = self.swarm.network_faults, self.swarm.geography, self.swarm.agenda.now
        peers = [member.peer for member in self._members(fault)]
        match fault.kind:
            case "part":
                network.part(peers)
                return network.sides.clear
            case "oneway" if len(peers) == 2:  # otherwise one of the two has not joined yet
                pair = peers[0], peers[1]
                network.one_way[pair] = now
                return lambda: network.one_way.pop(pair, None)
            case "degrade":
                link = frozenset(peers)
                geography.degraded[link] = fault.value
                return lambda: geography.degraded.pop(link, None)
            case "nat":
                geography.relayed.update(peers)
            case "loss" | "corrupt" | "truncate" | "duplicate" | "reorder":
                network.rates[fault.kind] = fault.value
                return lambda: network.rates.pop(fault.kind, None)
            case "late":
                self.swarm.records.delay(fault.value, STALE)
                return lambda: self.swarm.records.delay(0.0, 0.0)
        return None

    # Byzantine answers

    def _byzantine_answer(self, member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        """What a Byzantine peer sends instead of its answer: snapshots are falsified, or what a hop gives back."""
        if member.byzantine in HOP_LIES:
            return self._false_gradient(member, asker, envelope)
        if not isinstance(envelope.message, Snapshot):
            return envelope
        snapshot = envelope.message
        if member.byzantine in liars.FALSIFIED:
            return self._falsified(member, envelope)
        match member.byzantine:
            case "replayed":
                return self._kept.setdefault(("replayed", PeerId(member.peer + asker), snapshot.fragment), envelope)
            case "stale":
                return self._kept.setdefault(("stale", member.peer, snapshot.fragment), envelope)
            case "nan" | "scaled":
                return self._forged(member, liars.garble(member.byzantine, envelope))
        return Envelope(snapshot, liars.changed(envelope.blob, _flipped))

    def _false_gradient(self, member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        """The answer of a hop that lies. It remembers its last honest one to each asker."""
        assert member.host is not None
        if not isinstance(envelope.message, BackwardResponse):
            return envelope
        before = self._answers.get((member.peer, asker), envelope)
        self._answers[member.peer, asker] = envelope
        seed = f"{member.peer} {self.swarm.agenda.now}"
        codecs = member.host.training.gossip.tools.codecs
        return falsify_gradient(member.byzantine, seed, envelope, codecs, before)

    def _falsified(self, member: SimulatedPeer, envelope: Envelope) -> Envelope:
        """The answer of a liar that knows what the honest peers have published."""
        assert member.host is not None
        assert isinstance(envelope.message, Snapshot)
        tools, fragment = member.host.training.gossip.tools, envelope.message.fragment
        others = [one for one in self.swarm.living if one.training and not one.byzantine and one.host is not None]
        if member.byzantine == "belated":
            others = [one for one in others if one.peer == min(other.peer for other in others)]
        honest = [read for one in others if one.host and (read := _last_published(one.host, fragment)) is not None]
        if member.byzantine == "belated":
            honest = self._before(fragment, honest)
        return self._forged(member, liars.falsify(member.byzantine, member.peer, envelope, tools.codecs, honest))

    def _before(self, fragment: int, windows: list[Tensor]) -> list[Tensor]:
        """What these windows of one peer were before they changed last."""
        before, last = self._windows.get(fragment, ([], []))
        if windows and not (last and torch.equal(windows[0], last[0])):
            before, last = last, windows
            self._windows[fragment] = before, last
        return before

    def _forged(self, member: SimulatedPeer, envelope: Envelope) -> Envelope:
        """Remembers for the audit that this snapshot is a lie."""
        self.forged.add((member.peer, fingerprint(envelope.blob)))
        return envelope


def _last_published(host: VirtualHost, fragment: int) -> Tensor | None:
    """The pseudo-gradient of the window that this peer has closed last, while it is not merged."""
    held = {one.index: one.rule for one in host.training.gossip.fragments}.get(fragment)
    return held.published() if isinstance(held, PullRule) else None


def fingerprint(blob: bytes) -> bytes:
    """The audit's own digest: it must not believe the digests that it audits."""
    return hashlib.sha256(memoryview(blob)).digest()


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 0x11]) if content else content

"""Begin the faults of a simulated swarm at their times, and end them; sim/faults.py describes the faults."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, PeerRecords, Snapshot
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim import liars
from decentral.sim.faults import ALL, HOP_LIES, WITHHELD, Fault
from decentral.sim.host import VirtualHost
from decentral.sim.liars import falsify_gradient
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm

STALE = 0.2  # during the fault "late", this share of DHT lookups returns an older version of a record


@dataclass(slots=True)
class FaultInjector:
    """Begins and ends the faults of a simulated run, and falsifies the answers of Byzantine peers (liars)."""

    swarm: SimulatedSwarm
    planned: int = 0
    last_at: Seconds = 0.0
    forged: set[tuple[PeerId, bytes]] = field(default_factory=set)  # a lying peer and the SHA-256 of its false blob
    # For the lies `stale` and `replayed`, the honest snapshot that is sent again, by (lie, liar, fragment). With
    # `replayed`, each asking peer gets a snapshot of its own, so the second part of the key is the liar's id followed
    # by the asking peer's id.
    _kept: dict[tuple[str, PeerId, int], Envelope] = field(default_factory=dict)
    # For the lie `hop-replayed`: the last honest backward response, by (liar, asking peer).
    _answers: dict[tuple[PeerId, PeerId], Envelope] = field(default_factory=dict)
    # For the lie `belated`, by fragment: the second to last and the last pseudo-gradient of the peer that liars copy.
    # Each is a list with one tensor, or [] if that pseudo-gradient is not known yet.
    _windows: dict[int, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)

    def plan(self, faults: Sequence[Fault]) -> None:
        """Schedule the start and the end of each fault; call `plan` before virtual time reaches the first fault."""
        self.swarm.falsify(self.byzantine_answer)
        self.planned += len(faults)
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
        """Begin a fault of peers' processes, disks, clocks or answers; return the function that ends the fault.

        Return None if the fault has no end, such as a crash. If `fault` is a network fault, do nothing and return None.
        """
        swarm = self.swarm
        match fault.kind:
            case "crash":
                self._apply(fault, swarm.crash)
            case "restart":
                self._apply(fault, swarm.start)
            case "leave":
                self._apply(fault, swarm.leave)
            case "wipe":  # a peer's identity is on its disk, so a new peer takes its place
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
            case "revoke":
                self._apply(fault, swarm.revoke)
            case "propose":
                self._apply(fault, swarm.propose)
            case "lie":
                self._apply(fault, lambda member: member.lie(fault.how))
                return lambda: self._apply(fault, SimulatedPeer.stop_lying)
        return None

    def _begin_on_network(self, fault: Fault) -> Callable[[], Any] | None:
        """Begin a fault of links, messages or DHT records; return the function that ends the fault.

        Return None if the fault has no end. If `fault` is a fault of peers, do nothing and return None.
        """
        network, geography, now = self.swarm.network_faults, self.swarm.geography, self.swarm.agenda.now
        peers = [member.peer for member in self._members(fault)]
        match fault.kind:
            case "part":
                network.part(peers)
                return network.sides.clear
            case "oneway" if len(peers) == 2:  # the fault is ignored until both peers have joined
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
            case "eclipse":
                self.swarm.records.eclipsed.add(fault.how)
                return lambda: self.swarm.records.eclipsed.discard(fault.how)
        return None

    def byzantine_answer(self, member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        """Return the answer that a Byzantine peer sends to `asker` in place of its honest answer `envelope`.

        The lies in HOP_LIES change only backward responses, WITHHELD only records, and all other lies only snapshots;
        an answer of another type is returned unchanged.
        """
        if member.byzantine in HOP_LIES:
            return self._false_gradient(member, asker, envelope)
        if member.byzantine == WITHHELD:
            message = envelope.message
            return Envelope(PeerRecords(message.run, ())) if isinstance(message, PeerRecords) else envelope
        if not isinstance(envelope.message, Snapshot):
            return envelope
        snapshot = envelope.message
        if member.byzantine in (*liars.FALSIFIED, *liars.TIMES_TOKENS):
            return self._falsified(member, envelope)
        match member.byzantine:
            case "replayed":
                return self._kept.setdefault(("replayed", PeerId(member.peer + asker), snapshot.fragment), envelope)
            case "stale":
                return self._kept.setdefault(("stale", member.peer, snapshot.fragment), envelope)
            case "nan" | "scaled":
                return self._forged(member, liars.garble(member.byzantine, envelope))
            case "corrupted":
                return Envelope(snapshot, liars.changed(envelope.blob, _flipped))
        raise AssertionError(f"no code tells the lie {member.byzantine!r} of ALL_LIES (sim/faults.py)")

    def _false_gradient(self, member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        """Falsify a backward response (the honest answer `envelope`); return answers of other types unchanged."""
        assert member.host is not None
        if not isinstance(envelope.message, BackwardResponse):
            return envelope
        before = self._answers.get((member.peer, asker), envelope)
        self._answers[member.peer, asker] = envelope
        seed = f"{member.peer} {self.swarm.agenda.now}"
        codecs = member.host.training.gossip.tools.codecs
        return falsify_gradient(member.byzantine, seed, envelope, codecs, before)

    def _falsified(self, member: SimulatedPeer, envelope: Envelope) -> Envelope:
        """Return a false snapshot, computed from the honest peers' latest pseudo-gradients; record it in `forged`."""
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
        """Return the second to last pseudo-gradient of the peer that the lie `belated` copies.

        Args:
            fragment: Index of the fragment.
            windows: A list with the copied peer's last pseudo-gradient; [] if the peer has none now.

        Returns:
            A list with the pseudo-gradient; [] if the copied peer has published fewer than two.
        """
        before, last = self._windows.get(fragment, ([], []))
        if windows and not (last and torch.equal(windows[0], last[0])):
            before, last = last, windows
            self._windows[fragment] = before, last
        return before

    def _forged(self, member: SimulatedPeer, envelope: Envelope) -> Envelope:
        """Record a false snapshot in `forged`, so that the audit recognises it, and return the snapshot."""
        self.forged.add((member.peer, fingerprint(envelope.blob)))
        return envelope


def _last_published(host: VirtualHost, fragment: int) -> Tensor | None:
    """Return the pseudo-gradient of a fragment that a peer has published last.

    Returns None if the peer has merged since then, or does not train the fragment with the gossip algorithm `pull`.
    """
    held = {one.index: one.rule for one in host.training.gossip.fragments}.get(fragment)
    return held.published() if isinstance(held, PullRule) else None


def fingerprint(blob: bytes | memoryview) -> bytes:
    """Return a blob's SHA-256, by which the audit compares blobs, since the digest in a message may be false."""
    return hashlib.sha256(memoryview(blob)).digest()


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 0x11]) if content else content

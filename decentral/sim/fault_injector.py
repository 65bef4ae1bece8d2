"""Carries faults out on a simulated swarm, and ends those that end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Snapshot
from decentral.core.ids import PeerId
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import Seconds
from decentral.sim.faults import ALL, Fault
from decentral.sim.swarm import SimulatedPeer, SimulatedSwarm

Key = TypeVar("Key")

STALE = 0.2  # how often a look into the directory is stale while records come late


@dataclass(slots=True)
class FaultInjector:
    """Puts faults on the agenda. `last_at`: when the last one is over."""

    swarm: SimulatedSwarm
    last_at: Seconds = 0.0
    liars: dict[PeerId, set[str]] = field(default_factory=dict)  # who has ever lied, and how
    _kept: dict[tuple[str, PeerId, int], Envelope] = field(default_factory=dict)  # what liars have sent before

    def plan(self, faults: Sequence[Fault]) -> None:
        self.swarm.tamper = self._tampered
        for fault in faults:
            self.swarm.agenda.at(fault.at, self._beginning(fault))
            self.last_at = max(self.last_at, fault.at + fault.lasts)

    def _beginning(self, fault: Fault) -> Callable[[], None]:
        def begin() -> None:
            end = getattr(self, f"_{fault.kind}")(fault)
            if end is not None and fault.lasts:
                self.swarm.agenda.after(fault.lasts, end)

        return begin

    def _members(self, fault: Fault) -> list[SimulatedPeer]:
        members = self.swarm.members
        if fault.peers == (ALL,):
            return list(members)
        return [members[number] for number in fault.peers if number < len(members)]

    def _each(self, fault: Fault, action: Callable[[SimulatedPeer], None]) -> None:
        for member in self._members(fault):
            action(member)

    # Lives

    def _crash(self, fault: Fault) -> None:
        self._each(fault, self.swarm.crash)

    def _restart(self, fault: Fault) -> None:
        self._each(fault, self.swarm.start)

    def _wipe(self, fault: Fault) -> None:
        """Back without its disk, and so without its identity."""
        for member in self._members(fault):
            self.swarm.crash(member, keep_disk=False)
            member.disk.checkpoint, member.has_run = None, False
            self.swarm.start(self.swarm.add())

    def _leave(self, fault: Fault) -> None:
        self._each(fault, self.swarm.leave)

    def _join(self, fault: Fault) -> None:
        for _ in range(int(fault.value)):
            self.swarm.start(self.swarm.add())

    def _freeze(self, fault: Fault) -> Callable[[], None]:
        self._each(fault, self.swarm.freeze)
        return lambda: self._each(fault, self.swarm.thaw)

    def _slow(self, fault: Fault) -> Callable[[], None]:
        self._each(fault, lambda member: self.swarm.slow_down(member, fault.value))
        return lambda: self._each(fault, lambda member: self.swarm.slow_down(member, 1.0))

    def _skew(self, fault: Fault) -> None:
        for member in self._members(fault):
            member.skew_s = fault.value

    # Wires

    def _part(self, fault: Fault) -> Callable[[], None]:
        sky = self.swarm.sky
        sky.sides, sky.parted_at = {member.peer: 1 for member in self._members(fault)}, self.swarm.agenda.now
        return sky.sides.clear

    def _oneway(self, fault: Fault) -> Callable[[], None] | None:
        if len(self._members(fault)) < 2:
            return None  # not there yet
        source, target = (member.peer for member in self._members(fault))
        self.swarm.sky.one_way[source, target] = self.swarm.agenda.now
        return _popping(self.swarm.sky.one_way, (source, target))

    def _degrade(self, fault: Fault) -> Callable[[], None]:
        pair = frozenset(member.peer for member in self._members(fault))
        self.swarm.earth.degraded[pair] = fault.value
        return _popping(self.swarm.earth.degraded, pair)

    def _nat(self, fault: Fault) -> None:
        self.swarm.earth.relayed.update(member.peer for member in self._members(fault))

    def _loss(self, fault: Fault) -> Callable[[], None]:
        self.swarm.sky.loss = fault.value
        return lambda: setattr(self.swarm.sky, "loss", 0.0)

    def _dirt(self, fault: Fault) -> Callable[[], None]:
        self.swarm.sky.dirty[fault.kind] = fault.value
        return _popping(self.swarm.sky.dirty, fault.kind)

    _corrupt = _truncate = _duplicate = _reorder = _dirt

    def _late(self, fault: Fault) -> Callable[[], None]:
        records = self.swarm.records
        records.late_s, records.stale = fault.value, STALE

        def over() -> None:
            records.late_s, records.stale = 0.0, 0.0

        return over

    # Lies

    def _lie(self, fault: Fault) -> Callable[[], None]:
        for member in self._members(fault):
            member.liar = fault.how
            self.liars.setdefault(member.peer, set()).add(fault.how)
        return lambda: self._each(fault, lambda member: setattr(member, "liar", ""))

    def _tampered(self, member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        """What a liar answers instead."""
        if not isinstance(envelope.message, Snapshot):
            return envelope
        snapshot = envelope.message
        match member.liar:
            case "replayed":
                return self._kept.setdefault(("replayed", PeerId(member.peer + asker), snapshot.fragment), envelope)
            case "stale":
                return self._kept.setdefault(("stale", member.peer, snapshot.fragment), envelope)
            case "nan":
                return _with_blob(snapshot, _changed(envelope.blob, lambda content: b"\xff" * len(content)))
            case "scaled":
                return _with_blob(snapshot, _changed(envelope.blob, _scaled))
        return Envelope(snapshot, _changed(envelope.blob, _flipped))


def _popping(conditions: dict[Key, float], key: Key) -> Callable[[], None]:
    def end() -> None:
        conditions.pop(key, None)

    return end


def _with_blob(snapshot: Snapshot, blob: bytes) -> Envelope:
    """A liar's snapshot has the right digest."""
    return Envelope(replace(snapshot, digest=blobs.digest(blob)), blob)


def _changed(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    if isinstance(blob, SyntheticBlob):
        return SyntheticBlob((length, change(content)) for length, content in blob.segments)
    return change(blob)


def _scaled(content: bytes) -> bytes:
    """The first scale of a block, bf16, with a larger exponent: 64 times as large."""
    if len(content) < 2:
        return content
    number = int.from_bytes(content[:2], "little")
    larger = min(number + (6 << 7), 0x7E80)
    return larger.to_bytes(2, "little") + content[2:]


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 0x11]) if content else content

"""The fault injector: carries faults (sim/faults.py) out on a simulated swarm, and ends those that end."""

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

STALE = 0.2  # the share of lookups in the directory that are stale while records come late


@dataclass(slots=True)
class FaultInjector:
    """Puts faults on the agenda. Each kind of fault is a method here, which returns how the fault ends, if it does."""

    swarm: SimulatedSwarm
    last_at: Seconds = 0.0  # when the last fault is over
    byzantine: dict[PeerId, set[str]] = field(default_factory=dict)  # the peers that ever falsified answers, and how
    _kept: dict[tuple[str, PeerId, int], Envelope] = field(default_factory=dict)  # earlier answers, to be sent again

    def plan(self, faults: Sequence[Fault]) -> None:
        """Lets these faults happen, each at its time. The swarm must not have come to the first of them."""
        self.swarm.filter_answer = self._byzantine_answer
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

    def _apply(self, fault: Fault, action: Callable[[SimulatedPeer], None]) -> None:
        for member in self._members(fault):
            action(member)

    # Lives

    def _crash(self, fault: Fault) -> None:
        self._apply(fault, self.swarm.crash)

    def _restart(self, fault: Fault) -> None:
        self._apply(fault, self.swarm.start)

    def _wipe(self, fault: Fault) -> None:
        """The peer comes back without its disk, and so without its identity: as a new member."""
        for member in self._members(fault):
            self.swarm.crash(member, keep_disk=False)
            member.disk.checkpoint, member.has_run = None, False
            self.swarm.start(self.swarm.add())

    def _leave(self, fault: Fault) -> None:
        self._apply(fault, self.swarm.leave)

    def _join(self, fault: Fault) -> None:
        for _ in range(int(fault.value)):
            self.swarm.start(self.swarm.add())

    def _freeze(self, fault: Fault) -> Callable[[], None]:
        self._apply(fault, self.swarm.freeze)
        return lambda: self._apply(fault, self.swarm.thaw)

    def _slow(self, fault: Fault) -> Callable[[], None]:
        self._apply(fault, lambda member: self.swarm.slow_down(member, fault.value))
        return lambda: self._apply(fault, lambda member: self.swarm.slow_down(member, 1.0))

    def _skew(self, fault: Fault) -> None:
        for member in self._members(fault):
            member.skew_s = fault.value

    # The network

    def _part(self, fault: Fault) -> Callable[[], None]:
        network = self.swarm.network_faults
        network.sides = {member.peer: 1 for member in self._members(fault)}
        network.parted_at = self.swarm.agenda.now
        return network.sides.clear

    def _oneway(self, fault: Fault) -> Callable[[], None] | None:
        if len(self._members(fault)) < 2:
            return None  # one of the two has not joined yet
        source, target = (member.peer for member in self._members(fault))
        network = self.swarm.network_faults
        network.one_way[source, target] = self.swarm.agenda.now
        return _remove_later(network.one_way, (source, target))

    def _degrade(self, fault: Fault) -> Callable[[], None]:
        pair = frozenset(member.peer for member in self._members(fault))
        self.swarm.geography.degraded[pair] = fault.value
        return _remove_later(self.swarm.geography.degraded, pair)

    def _nat(self, fault: Fault) -> None:
        self.swarm.geography.relayed.update(member.peer for member in self._members(fault))

    def _loss(self, fault: Fault) -> Callable[[], None]:
        self.swarm.network_faults.loss = fault.value
        return lambda: setattr(self.swarm.network_faults, "loss", 0.0)

    def _damage(self, fault: Fault) -> Callable[[], None]:
        self.swarm.network_faults.damage_rates[fault.kind] = fault.value
        return _remove_later(self.swarm.network_faults.damage_rates, fault.kind)

    _corrupt = _truncate = _duplicate = _reorder = _damage

    def _late(self, fault: Fault) -> Callable[[], None]:
        records = self.swarm.records
        records.late_s, records.stale = fault.value, STALE

        def over() -> None:
            records.late_s, records.stale = 0.0, 0.0

        return over

    # Byzantine answers

    def _lie(self, fault: Fault) -> Callable[[], None]:
        for member in self._members(fault):
            member.byzantine = fault.how
            self.byzantine.setdefault(member.peer, set()).add(fault.how)
        return lambda: self._apply(fault, lambda member: setattr(member, "byzantine", ""))

    def _byzantine_answer(self, member: SimulatedPeer, asker: PeerId, envelope: Envelope) -> Envelope:
        """What a Byzantine peer sends instead of its answer: only snapshots are falsified."""
        if not isinstance(envelope.message, Snapshot):
            return envelope
        snapshot = envelope.message
        match member.byzantine:
            case "replayed":
                return self._kept.setdefault(("replayed", PeerId(member.peer + asker), snapshot.fragment), envelope)
            case "stale":
                return self._kept.setdefault(("stale", member.peer, snapshot.fragment), envelope)
            case "nan":
                return _with_blob(snapshot, _changed(envelope.blob, lambda content: b"\xff" * len(content)))
            case "scaled":
                return _with_blob(snapshot, _changed(envelope.blob, _scaled))
        return Envelope(snapshot, _changed(envelope.blob, _flipped))


def _remove_later(conditions: dict[Key, float], key: Key) -> Callable[[], None]:
    def end() -> None:
        conditions.pop(key, None)

    return end


def _with_blob(snapshot: Snapshot, blob: bytes) -> Envelope:
    """A falsified snapshot with the digest that belongs to it."""
    return Envelope(replace(snapshot, digest=blobs.digest(blob)), blob)


def _changed(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    if isinstance(blob, SyntheticBlob):
        return SyntheticBlob((length, change(content)) for length, content in blob.segments)
    return change(blob)


def _scaled(content: bytes) -> bytes:
    """The first scale of a quantised block (bf16) with a larger exponent: its values become 64 times as large."""
    if len(content) < 2:
        return content
    number = int.from_bytes(content[:2], "little")
    larger = min(number + (6 << 7), 0x7E80)
    return larger.to_bytes(2, "little") + content[2:]


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 0x11]) if content else content

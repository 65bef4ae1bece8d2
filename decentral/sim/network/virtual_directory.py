"""A DHT in virtual time: records are seen late, sometimes stale, and not across a partition.

It behaves as a Kademlia DHT does towards its users, without nodes: a record is replaced by one that expires later; a
reader may still get the one before, or none yet; both sides of a partition keep what was stored before it, and hear of
nothing that is stored on the other side until it heals. Its nodes are the peers, so nothing is left when all are down.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.fault_model import NetworkFaultModel

VERSIONS_KEPT = 2  # of each record


@dataclass(frozen=True, slots=True)
class Version:
    value: bytes
    expires: Seconds
    stored: Seconds
    seen: Seconds  # from when on readers find it
    writer: PeerId


@dataclass(slots=True)
class Records:
    """The records, which all peers' directories share."""

    agenda: Agenda
    chance: Random
    faults: NetworkFaultModel
    late_s: Seconds = 0.0  # mean time until readers find a record
    stale: float = 0.0  # the probability that a reader gets the version before
    epoch: Seconds = 0.0  # unix time of the agenda's zero: records expire by the wall clock
    ahead_s: dict[PeerId, Seconds] = field(default_factory=dict)  # of each reader's clock, where it is not right
    _keys: dict[str, dict[str, list[Version]]] = field(default_factory=dict)

    def delay(self, late_s: Seconds, stale: float) -> None:
        """From now on records are found so late, and reads are stale with this probability."""
        self.late_s, self.stale = late_s, stale

    def store(self, writer: PeerId, key: str, subkey: str, value: bytes, expires: float) -> bool:
        versions = self._keys.setdefault(key, {}).setdefault(subkey, [])
        if versions and versions[-1].expires >= expires:
            return False
        now = self.agenda.now
        late_s = self.chance.expovariate(1 / self.late_s) if self.late_s else 0.0
        versions.append(Version(value, expires, now, now + late_s, writer))
        del versions[:-VERSIONS_KEPT]
        return True

    def clear(self) -> None:
        """All peers are down, and they were the nodes."""
        self._keys.clear()

    def newest(self, reader: PeerId, key: str) -> dict[str, bytes]:
        """Return the newest records that no cut keeps from the reader, without the delays of `fetch`."""
        held, by_clock = self._keys.get(key, {}), self.epoch + self.agenda.now + self.ahead_s.get(reader, 0.0)
        return {
            subkey: versions[-1].value
            for subkey, versions in held.items()
            if versions[-1].expires > by_clock and self._heard(versions[-1], reader)
        }

    def fetch(self, reader: PeerId, key: str) -> dict[str, bytes]:
        found, now = {}, self.agenda.now
        held, by_clock = self._keys.get(key, {}), self.epoch + now + self.ahead_s.get(reader, 0.0)
        all_alike = not self.stale and not self.faults.cuts  # all readers find the same versions
        for subkey, versions in held.items():
            newest = versions[-1]
            version = newest if all_alike and newest.seen <= now else self._version(versions, reader, now)
            if version is not None and version.expires > by_clock:
                found[subkey] = version.value
        if len(found) * 2 < len(held):
            by_slowest = self.epoch + now + min(self.ahead_s.values(), default=0.0)
            self._keys[key] = {k: versions for k, versions in held.items() if versions[-1].expires > by_slowest}
        return found

    def _version(self, versions: list[Version], reader: PeerId, now: Seconds) -> Version | None:
        newest = versions[-1]
        if not self.stale and newest.seen <= now and self._heard(newest, reader):
            return newest
        known = [one for one in versions if one.seen <= now and self._heard(one, reader)]
        if len(known) > 1 and self.stale and self.chance.random() < self.stale:
            return known[-2]
        return known[-1] if known else None

    def _heard(self, version: Version, reader: PeerId) -> bool:
        cut_off_at = self.faults.cut_off_at(version.writer, reader)
        return cut_off_at is None or version.stored < cut_off_at


class VirtualDirectory:
    """A Directory: one peer's view of the records."""

    def __init__(self, records: Records, peer: PeerId) -> None:
        self._records, self._peer = records, peer

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        return self._records.store(self._peer, key, subkey, value, expires)

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        return self._records.fetch(self._peer, key)

"""Simulate a DHT in virtual time: readers find records late, sometimes an old version, and not across a partition.

The simulation shows what users of a Kademlia DHT see, and has no DHT nodes. A record is replaced only by a version that
expires later. A reader may find the previous version, or no version yet. During a partition, the peers on each side
find the records stored before the partition and those stored on their own side. Start reading at `Records`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.network_faults import NetworkFaults

VERSIONS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Version:
    """One stored version of a DHT record."""

    value: bytes
    expires: Seconds
    stored: Seconds
    seen: Seconds  # virtual time from which readers find this version
    writer: PeerId


@dataclass(slots=True)
class StoredKey:
    """The records under one key, by subkey: the versions of each, and a cache of the newest ones that are valid."""

    versions: dict[str, list[Version]] = field(default_factory=dict)  # at most VERSIONS_KEPT of each, oldest first
    # The newest valid versions, a cache for readers whose clocks show `_since` or later, and not yet `_expires`:
    _newest: dict[str, bytes] = field(default_factory=dict)
    _since: Seconds = -math.inf
    _expires: Seconds = math.inf

    def add(self, subkey: str, version: Version) -> None:
        """Store a version of a record."""
        versions = self.versions.setdefault(subkey, [])
        versions.append(version)
        del versions[:-VERSIONS_KEPT]
        if len(versions) > 1 and subkey not in self._newest:
            self._expires = -math.inf  # it would stand in another place than in `versions`
        self._newest[subkey], self._expires = version.value, min(self._expires, version.expires)

    def newest(self, by_clock: Seconds) -> dict[str, bytes]:
        """Return the newest version of each record that has not expired by this Unix time."""
        if not self._since <= by_clock < self._expires:
            last = {subkey: one[-1] for subkey, one in self.versions.items() if one[-1].expires > by_clock}
            self._newest = {subkey: one.value for subkey, one in last.items()}
            self._since, self._expires = by_clock, min((one.expires for one in last.values()), default=math.inf)
        return dict(self._newest)

    def forget(self, by_clock: Seconds) -> None:
        """Delete the records that have expired by this Unix time."""
        self.versions = {subkey: one for subkey, one in self.versions.items() if one[-1].expires > by_clock}


@dataclass(slots=True)
class Records:
    """The simulated DHT: all records, by key and subkey, and the present faults of lookups."""

    agenda: Agenda
    chance: Random
    faults: NetworkFaults
    late_s: Seconds = 0.0  # mean time from the storing of a record until lookups find it
    stale: float = 0.0  # probability that a lookup returns a record's previous version
    epoch: Seconds = 0.0  # Unix time at virtual time 0; records expire by Unix time
    ahead_s: dict[PeerId, Seconds] = field(default_factory=dict)  # how far each reader's clock is ahead; default 0
    eclipsed: set[str] = field(default_factory=set)  # kinds of keys (faults.ECLIPSED) for which lookups find no records
    _keys: dict[str, StoredKey] = field(default_factory=lambda: defaultdict(StoredKey))
    _all_seen_at: Seconds = 0.0  # virtual time from which readers find the newest version of every record

    def delay(self, late_s: Seconds, stale: float) -> None:
        """Set the faults of lookups: the mean delay, and the probability of finding a record's previous version."""
        self.late_s, self.stale = late_s, stale

    def store(self, writer: PeerId, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Store a record until Unix time `expires`; return False if the stored version expires then or later."""
        versions = self._keys[key].versions.get(subkey)
        if versions and versions[-1].expires >= expires:
            return False
        now = self.agenda.now
        late_s = self.chance.expovariate(1 / self.late_s) if self.late_s else 0.0
        self._all_seen_at = max(self._all_seen_at, now + late_s)
        self._keys[key].add(subkey, Version(value, expires, now, now + late_s, writer))
        return True

    def clear(self) -> None:
        """Delete all records; called when no peer runs, because the peers are the DHT's nodes."""
        self._keys.clear()

    def newest(self, reader: PeerId, key: str) -> dict[str, bytes]:
        """Return, by subkey, the newest valid records that reach the reader, even if lookups do not find them yet."""
        held, by_clock = self._keys[key], self.epoch + self.agenda.now + self.ahead_s.get(reader, 0.0)
        found = held.newest(by_clock)
        if not self.faults.cuts:
            return found
        return {subkey: value for subkey, value in found.items() if self._heard(held.versions[subkey][-1], reader)}

    def fetch(self, reader: PeerId, key: str) -> dict[str, bytes]:
        """Return, by subkey, the valid records under a key that the reader finds now; some may be old versions."""
        if self.eclipsed and key.split("/")[1] in self.eclipsed:
            return {}
        held, now = self._keys[key], self.agenda.now
        by_clock = self.epoch + now + self.ahead_s.get(reader, 0.0)
        if not self.stale and not self.faults.cuts and self._all_seen_at <= now:  # every reader finds the newest ones
            found = held.newest(by_clock)
        else:
            seen = ((subkey, self._version(versions, reader, now)) for subkey, versions in held.versions.items())
            found = {subkey: one.value for subkey, one in seen if one is not None and one.expires > by_clock}
        if len(found) * 2 < len(held.versions):
            held.forget(self.epoch + now + min(self.ahead_s.values(), default=0.0))
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
    """One peer's access to the simulated DHT; implements `Directory`."""

    def __init__(self, records: Records, peer: PeerId) -> None:
        """Prepare to store and look up `records` as `peer`."""
        self._records, self._peer = records, peer

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Store a record until Unix time `expires`; return False if the stored version expires then or later."""
        return self._records.store(self._peer, key, subkey, value, expires)

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        """Return the records under a key, by subkey."""
        return self._records.fetch(self._peer, key)

"""How much our node of the DHT stores for others: bytes and records, with a fair share for each key.

Anybody may have any number of names, each with a record of its own. Peers' records and plans have room apart, so that
the one kind never leaves the other without any.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decentral.comm.net.fair_shares import FairShare
from decentral.comm.wire import identity
from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB, Seconds

PEERS_STORED_BYTES = 128 * MiB  # of peers' records; half of it under one key
PLANS_STORED_BYTES = 32 * MiB  # of plans, which are larger and few; likewise
LEAST_ROOM = 1 * KiB  # a record takes the next power of two, so that the next one of its peer fits, too
MOST_STORED = 16384  # records, whatever their size

Name = tuple[bytes, bytes]
"""A record's key and subkey, as the DHT has them."""


@dataclass(slots=True)
class StoredRecords:
    """Remembers which records were accepted, until they expire."""

    keys: Mapping[bytes, str]  # the keys under which anything is stored, by their hash
    records: dict[Name, tuple[Seconds, int]] = field(default_factory=dict)  # when each expires, and its room in bytes
    peers: FairShare = field(default_factory=lambda: FairShare(PEERS_STORED_BYTES))  # by key
    plans: FairShare = field(default_factory=lambda: FairShare(PLANS_STORED_BYTES))  # likewise

    def take(self, name: Name, expires: Seconds, size: int, now: Seconds) -> bool:
        """Whether there is room for this record, in the place of the one of that name, or beside the others."""
        room = max(LEAST_ROOM, 1 << (size - 1).bit_length())
        if self._take(name, expires, room):
            return True
        for one in [one for one, (until, _) in self.records.items() if until <= now]:
            self._drop(one)
        return self._take(name, expires, room)

    def _take(self, name: Name, expires: Seconds, room: int) -> bool:
        _, before = self.records.get(name, (0.0, 0))
        more, key = max(0, room - before), PeerId(name[0].hex())
        if not before and len(self.records) >= MOST_STORED:
            return False
        if more and not self._share(name).take(key, more):
            return False
        if room < before:
            self._share(name).give_back(key, before - room)
        self.records[name] = expires, room
        return True

    def _drop(self, name: Name) -> None:
        _, room = self.records.pop(name)
        self._share(name).give_back(PeerId(name[0].hex()), room)

    def _share(self, name: Name) -> FairShare:
        small = identity.max_record_bytes(self.keys[name[0]]) == identity.MAX_PEER_RECORD_BYTES
        return self.peers if small else self.plans

"""Limit what our DHT node stores: bytes per key and in total, and the number of records. Start with `StoredRecords`.

A node answers a lookup with all records that it has under a key, in one message of at most 4 MiB. A larger answer is
lost, and the peer that asked concludes that the node is gone. So each key has a limit below 4 MiB. A new node gets the
records of all keys in one message. So the limits of all keys add up to less than 4 MiB while all peers' records have
one key.

The peers divide a key's limit fairly (`FairShare`). In a public swarm an attacker can get more space with many peer
ids. In a private swarm an attacker cannot, since all peers with the same invitation have one share together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from decentral.comm.net.fair_shares import FairShare
from decentral.comm.wire import identity
from decentral.comm.wire.private_swarm import PrivateSwarm, share_holder
from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB, Seconds

# Our DHT node stores at most this many bytes under a key of peers' records, of plans, of revocations, and in all.
PEERS_KEY_BYTES = 2560 * KiB
PLANS_KEY_BYTES = 1 * MiB
REVOKED_KEY_BYTES = 256 * KiB
STORED_BYTES = 128 * MiB
LEAST_ROOM = 1 * KiB  # a record's size is rounded up to a power of two, at least to this, so that the record can grow
MOST_STORED = 16384  # our DHT node stores at most this many records, however small they are

SWEEP_S = 1.0  # expired records are removed at most this often; a search among MOST_STORED takes 2 ms

Name = tuple[bytes, str]
"""A record's key, hashed as in the DHT, and its subkey, which is a peer id."""


@dataclass(frozen=True, slots=True)
class RecordRoom:
    """What one stored record uses of the limits: how many bytes, of whose share, and until when."""

    expires: Seconds  # unix time
    size: int  # the record's size, rounded up
    holder: PeerId  # whose share is charged: the peer's, or its invitation's in a private swarm


@dataclass(slots=True)
class StoredRecords:
    """Names and sizes of the records that our DHT node stores; `take` decides whether it may store another record."""

    keys: Mapping[bytes, str]
    private: PrivateSwarm | None = None  # None in a public swarm; else each invitation has a share
    records: dict[Name, RecordRoom] = field(default_factory=dict)
    shares: dict[bytes, FairShare] = field(init=False)  # each key's byte limit, divided among peers
    used: int = 0  # bytes counted under all keys together
    swept_at: Seconds = -math.inf  # unix time when expired records were last removed

    def __post_init__(self) -> None:
        """Create an empty share for each key."""
        self.shares = {hashed: FairShare(_most(key)) for hashed, key in self.keys.items()}

    def take(self, name: Name, expires: Seconds, size: int, now: Seconds) -> bool:
        """Count a record towards the limits if it fits within them, and return whether it does.

        A record is not counted if its key is not one of `self.keys`, or if a stored record of the same name does not
        expire earlier. A record of the same name that expires earlier is replaced. Expired records are removed only
        when a record does not fit, and at most once in SWEEP_S.

        Args:
            name: Hashed key, and subkey.
            expires: When the record expires, in unix seconds.
            size: Bytes of the record.
            now: Unix seconds.

        Returns:
            Whether the record was counted, so that the caller may store it.
        """
        if name[0] not in self.shares or (name in self.records and expires <= self.records[name].expires):
            return False
        size = counted_bytes(size)
        if self._take(name, expires, size):
            return True
        if 0.0 <= now - self.swept_at < SWEEP_S:
            return False
        self.swept_at = now
        for one in [one for one, room in self.records.items() if room.expires <= now]:
            self._drop(one)
        return self._take(name, expires, size)

    def _take(self, name: Name, expires: Seconds, size: int) -> bool:
        share, known = self.shares[name[0]], self.records.get(name)
        sender = PeerId(name[1])
        holder = known.holder if known else share_holder(self.private, sender)
        more = size - known.size if known else size
        if self.used + more > STORED_BYTES or (not known and len(self.records) >= MOST_STORED):
            return False
        if more > 0 and not share.take(holder, more):
            return False
        if more < 0:
            share.give_back(holder, -more)
        self.used += more
        self.records[name] = RecordRoom(expires, size, holder)
        return True

    def _drop(self, name: Name) -> None:
        room = self.records.pop(name)
        self.used -= room.size
        self.shares[name[0]].give_back(room.holder, room.size)


def counted_bytes(size: int) -> int:
    """Return how many bytes of a key's limit a record of `size` bytes uses."""
    return max(LEAST_ROOM, 1 << (size - 1).bit_length())


def _most(key: str) -> int:
    """Return how many bytes of records may be stored under this key."""
    if identity.max_record_bytes(key) == identity.MAX_PEER_RECORD_BYTES:
        return PEERS_KEY_BYTES
    return REVOKED_KEY_BYTES if key.endswith("/revoked") else PLANS_KEY_BYTES

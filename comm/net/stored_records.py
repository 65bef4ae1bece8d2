"""How much our node of the DHT stores for others: bytes and records, with a limit for each key and fair shares of it.

A node answers a lookup with all that it has under a key, in one message of at most 4 MiB. If that is too large nobody
gets an answer, and the asker takes the node for dead. So what is stored under a key stays below that. What is stored
under all keys of a swarm with one shard does as well, since a new node gets it in one message.

Anybody may have any number of names, each with a record of its own. In a private swarm the shares of a key are those of
invitations, whatever names their holders take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decentral.comm.net.fair_shares import FairShare
from decentral.comm.wire import identity
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB, Seconds

PEERS_KEY_BYTES = 2560 * KiB  # of peers' records under one key
PLANS_KEY_BYTES = 1 * MiB  # of plans, which are larger and few
REVOKED_KEY_BYTES = 256 * KiB  # of copies of a private swarm's list of revocations
STORED_BYTES = 128 * MiB  # under all keys
LEAST_ROOM = 1 * KiB  # a record takes the next power of two, so that the next one of its peer fits, too
MOST_STORED = 16384  # records, whatever their size

Name = tuple[bytes, str]
"""A record's key, hashed as the DHT has it, and its subkey, which is a peer's name."""


@dataclass(frozen=True, slots=True)
class RecordRoom:
    """What one record takes, and of whose share."""

    expires: Seconds
    size: int
    holder: PeerId


@dataclass(slots=True)
class StoredRecords:
    """Remembers which records were accepted, until they expire."""

    keys: Mapping[bytes, str]  # the keys under which anything is stored, by their hash
    private: PrivateSwarm | None = None  # whose members share by invitations; None: the swarm is public
    records: dict[Name, RecordRoom] = field(default_factory=dict)
    shares: dict[bytes, FairShare] = field(init=False)  # of each key
    used: int = 0  # bytes, of all keys

    def __post_init__(self) -> None:
        self.shares = {hashed: FairShare(_most(key)) for hashed, key in self.keys.items()}

    def take(self, name: Name, expires: Seconds, size: int, now: Seconds) -> bool:
        """Whether this record is newer than the one of that name, and there is room for it."""
        if name[0] not in self.shares or (name in self.records and expires <= self.records[name].expires):
            return False
        size = max(LEAST_ROOM, 1 << (size - 1).bit_length())
        if self._take(name, expires, size):
            return True
        for one in [one for one, room in self.records.items() if room.expires <= now]:
            self._drop(one)
        return self._take(name, expires, size)

    def _take(self, name: Name, expires: Seconds, size: int) -> bool:
        share, known = self.shares[name[0]], self.records.get(name)
        sender = PeerId(name[1])
        holder = known.holder if known else self.private.holder_of(sender) if self.private else sender
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


def _most(key: str) -> int:
    """The bytes that are stored under this key."""
    if identity.max_record_bytes(key) == identity.MAX_PEER_RECORD_BYTES:
        return PEERS_KEY_BYTES
    return REVOKED_KEY_BYTES if key.endswith("/revoked") else PLANS_KEY_BYTES

"""The records that this peer publishes about itself, and the records of another process that copied its identity."""

import math
from dataclasses import dataclass, field

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.transport import Announce
from decentral.core.errors import ProtocolError
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerPhase

EXPIRY_STEP_S = 1e-3  # our record must outlive the one that it replaces by this time, or the DHT ignores it
RECORDS_OF_COPY = 2  # this many records by another process prove that it has a copy of our identity


@dataclass(slots=True)
class Publication:
    """The records that this peer has published about itself, and records of other processes with the same peer id.

    Of several records with the same peer id, the DHT keeps the record that expires last. A record with our id that
    another process wrote after our first record comes from a peer with a copy of our identity.
    """

    expires: Seconds = 0.0  # latest expiry of any record with our peer id
    began: Seconds | None = None  # when this process published its first record
    sealed: dict[bytes, Seconds] = field(default_factory=dict)  # our unexpired records, signed -> when each expires
    foreign: set[Seconds] = field(default_factory=set)  # write times of records by a copy of our identity
    copy_seen_at: Seconds = -math.inf
    copy_address: str = ""
    keys: dict[str, Seconds] = field(default_factory=dict)  # DHT key -> when our record under that key expires
    newest: bytes = b""

    def announce(self, own: Signer, key: str, body: bytes, expires: Seconds, now: Seconds) -> Announce:
        """Return the effect that publishes our record until `expires`, or longer to outlive our earlier records."""
        self.began = now if self.began is None else self.began
        self.expires = max(expires, self.expires + EXPIRY_STEP_S)
        self.sealed = {sealed: until for sealed, until in self.sealed.items() if until > now}
        sealed = own.seal(key, body, self.expires)
        self.sealed[sealed] = self.keys[key] = self.expires
        self.newest = sealed
        return Announce(key, own.peer, sealed, self.expires)

    def read(self, own: Signer, key: str, found: bytes, now: Seconds) -> bool:
        """Return whether `found`, a record with our peer id, outlives our own record.

        If the record is from another process, note that this process has a copy of our identity.
        """
        if found in self.sealed:
            return False
        try:
            body, expires = own.open(key, own.peer, found, now)
            record = records.unpack(body)
        except ProtocolError:
            return False
        if self.began is not None and record.time > self.began and record.phase != PeerPhase.LEAVING:
            if len(self.foreign) < RECORDS_OF_COPY:
                self.foreign.add(record.time)
            if len(self.foreign) == RECORDS_OF_COPY:
                self.copy_seen_at, self.copy_address = now, next(iter(record.addresses), "an unknown address")
        is_later, self.expires = expires > self.expires, max(expires, self.expires)
        return is_later

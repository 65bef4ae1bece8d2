"""The roster of one peer: which peers are reachable and which layers they hold. Start at `Roster`.

Peers publish signed records in the DHT. A record expires a minute after its peer stops renewing it; in a large swarm it
expires later (swarm_size.py). A peer that leaves two requests in a row unanswered is dropped until it publishes a newer
record. A peer that leaves the swarm says so in its last record. A record is refused if its date is in the future by
more than its lifetime. So a peer with a very slow clock sees no other peers; it then compares clocks with them
(startup/lost_peers.py).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Announce, Answered, AskFailed, Event, Found, Lookup
from decentral.core.config import SwarmConfig
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import REPEAT_S, ErrorLine, GoodbyeLine, PeerJoinedLine, PeerLeftLine
from decentral.core.latest import keep_latest
from decentral.core.machine import Log, Woke, earliest
from decentral.core.reasons import SUSPECT_GONE, Reason
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.peers.membership.holders import Holders
from decentral.peers.membership.publication import Publication
from decentral.peers.membership.records import RENEWALS, PeerPhase, PeerRecord, RecordSource
from decentral.peers.membership.revocation_watch import RevocationWatch, WatchEffect
from decentral.peers.membership.swarm_size import MERGE, SPLIT, SwarmSize, key_of, level_of, published

REFRESH_SOON_S = 0.5  # a request from a peer outside the roster causes an extra lookup after this time, or later
SOUGHT_EACH = 4  # the requests of one peer outside the roster cause at most this many extra lookups
MOST_SOUGHT = 1024  # extra lookups are counted for at most this many peers; then the oldest count is deleted
# If more than MAX_PEERS dropped peers are remembered, those whose last record is older than this many record lifetimes
# are forgotten.
FORGET_TTLS = 10
# A peer that has left comes back only with a record that is at least this much newer than its last one. So no peer id
# can join and leave hundreds of times a second; a real restart takes longer than this.
REJOIN_S = 2.0
DEAD_AFTER = 2  # a peer is dropped from the roster after this many of our requests in a row got no answer
MAX_PEERS = 4096
MOST_DROPPED = 8192  # the last record's date is remembered for this many dropped peers, to ignore older records
MOST_NEW = 2 * SPLIT  # one lookup reads records of at most this many peers outside the roster, chosen at random
SAMPLED_NEW = MERGE  # in a large swarm, a lookup in another shard than our own reads only this many of them


@dataclass(frozen=True, slots=True)
class Learn:
    """Effect: give a peer's addresses to the transport and to the address book."""

    peer: PeerId
    addresses: tuple[str, ...]


RosterEffect = WatchEffect | Learn


@dataclass(slots=True)
class RosterEntry:
    """A reachable peer: its latest record, and how many of our requests it has left unanswered."""

    record: PeerRecord
    expires: float  # unix time at which the record expires
    failures: int = 0
    since: Seconds = 0.0  # time at which this peer's first record was read
    failed_at: Seconds = 0.0

    def renewed(self, record: PeerRecord, expires: float) -> "RosterEntry":
        """Return a copy of this entry with a newer record of the peer."""
        return RosterEntry(record, expires, self.failures, self.since, self.failed_at)

    def answered(self) -> None:
        """Reset the count of unanswered requests, since the peer has answered a request."""
        self.failures = 0

    def failed(self, now: Seconds) -> None:
        """Count one more unanswered request."""
        self.failures, self.failed_at = self.failures + 1, now


@dataclass(slots=True)
class SoonerLookups:
    """The limit on early lookups of records, which we make when a peer outside the roster sends a request.

    Strangers must not be able to make us read all records as often as they like. So the pause before an early lookup
    doubles after each early lookup, halves after each regular lookup, and is reset when a lookup finds a new peer.
    """

    rest_s: Seconds = REFRESH_SOON_S  # shortest time between a lookup and the next early lookup
    _looked_at: Seconds = -math.inf
    _sooner: bool = False
    _sought: dict[PeerId, int] = field(default_factory=dict)

    def instead_of(self, at: Seconds, peer: PeerId, now: Seconds) -> Seconds:
        """Return when to look up records after a new peer's request: at the regular time `at`, or earlier."""
        soon, sought = max(now + REFRESH_SOON_S, self._looked_at + self.rest_s), self._sought.get(peer, 0)
        if soon >= at or sought >= SOUGHT_EACH:
            return at
        keep_latest(self._sought, peer, sought + 1, MOST_SOUGHT)
        self._sooner = True
        return soon

    def found(self) -> None:
        """Reset the pause before an early lookup, since a lookup has found a new peer."""
        self.rest_s = REFRESH_SOON_S

    def looked(self, now: Seconds, longest_s: Seconds) -> None:
        """Double the pause before the next early lookup, up to `longest_s`, if this lookup is early; else halve it."""
        rest_s = 2 * self.rest_s if self._sooner else self.rest_s / 2
        self.rest_s = max(REFRESH_SOON_S, min(rest_s, longest_s))
        self._looked_at, self._sooner = now, False


@dataclass(slots=True)
class Roster:
    """The state machine that publishes our record, reads other peers' records, and keeps reachable peers in `live`."""

    run: RunId
    own: Signer
    limits: SwarmConfig
    source: RecordSource = field(repr=False, compare=False)
    size: SwarmSize
    holders: Holders
    live: dict[PeerId, RosterEntry] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    changes: int = 0
    revocations: RevocationWatch | None = None
    gone: dict[PeerId, str] = field(default_factory=dict)  # peer that is no longer live -> why it was dropped
    _dropped: dict[PeerId, float] = field(default_factory=dict)  # peer -> date of its last record
    _known: dict[PeerId, bytes] = field(default_factory=dict)  # peer -> its last signed record, to skip equal ones
    _valid: dict[PeerId, float] = field(default_factory=dict)  # peer that was dropped as silent -> its record's expiry
    _published: Publication = field(default_factory=Publication)
    _copy_logged_at: Seconds = -math.inf
    _renew_at: Seconds = 0.0
    _refresh_at: Seconds = 0.0
    _sooner: SoonerLookups = field(default_factory=SoonerLookups)
    _expiry_at: Seconds | None = None

    @property
    def wake_at(self) -> Seconds | None:
        """Return when to renew our record, look up other records, drop expired peers, or wake the revocation watch."""
        revocations_at = self.revocations.wake_at if self.revocations else None
        return earliest((self._renew_at, self._refresh_at, self._expiry_at, revocations_at))

    def handle(self, event: Event, now: Seconds) -> list[RosterEffect]:
        """Handle a wake-up, records from the DHT, or a peer's answer or failure to answer, and return the effects."""
        match event:
            case Woke():
                watched = self.revocations.handle(event, now) if self.revocations else []
                return watched + self._expire(now) + self._renew(now) + self._refresh(now)
            case Found(key, values) if level_of(self.run, key) is not None:
                return self._found(key, values, now)
            case Answered(peer=peer) if peer in self.live:
                self.live[peer].answered()
            case AskFailed(peer=peer, reason=reason) if peer in self.live and reason in SUSPECT_GONE:
                return self._unanswered(peer, reason, now - event.seconds, now)
        return []

    def knows(self, peer: PeerId) -> bool:
        """Return whether we know a valid record of this peer; always True in a large swarm (level above 0)."""
        return peer in self.live or peer in self._valid or self.size.level > 0

    def sealed(self, peer: PeerId) -> bytes:
        """Return the latest record of a peer, or our own, as it is stored in the DHT; b"" if we have none."""
        return self._published.newest if peer == self.own.peer else self._known.get(peer, b"")

    def renew_soon(self, now: Seconds) -> None:
        """Renew our record at the next wake, because something in it has changed."""
        self._renew_at = min(self._renew_at, now)

    def refresh_soon(self, peer: PeerId, now: Seconds) -> None:
        """Look up records earlier, since a peer outside the roster has asked us; do nothing in a large swarm."""
        if not self.size.level:  # in a large swarm, most peers do not know each other
            self._refresh_at = self._sooner.instead_of(self._refresh_at, peer, now)

    def look_up(self, now: Seconds) -> list[RosterEffect]:
        """Return the effects that look up records at once, even if the next lookup is planned for later."""
        self._refresh_at = now
        return self._refresh(now)

    def watch_revocations(self, private: PrivateSwarm, chance: Random) -> RevocationWatch:
        """Begin to watch the revocations of this private swarm, and return the watch, which excludes revoked peers."""
        self.revocations = RevocationWatch(self.own, private, chance, self)
        return self.revocations

    def exclude(self, peer: PeerId, now: Seconds) -> list[Log]:
        """Drop a peer whose invitation to this private swarm was revoked, and return journal lines about it."""
        self._known.pop(peer, None)
        self._valid.pop(peer, None)
        return self._drop(peer, Reason.REVOKED, now) if peer in self.live else []

    def leave(self, now: Seconds) -> list[RosterEffect]:
        """Return the effects that publish our last record under all our DHT keys; the record says that we leave."""
        return [*self._announce(now, leaving=True)]

    def _renew(self, now: Seconds) -> list[RosterEffect]:
        if now < self._renew_at:
            return []
        announced = self._announce(now, leaving=False)
        self._renew_at = now + self.size.renew_s
        return [*announced]

    def _announce(self, now: Seconds, leaving: bool) -> list[Announce]:
        record = replace(self.source.compose_record(now, leaving), renew_s=self.size.renew_s)
        body, keys = records.pack(record), published(self.run, self.own.peer, self.size.level)
        if leaving:  # older copies under the keys of earlier levels must not outlive this last record
            older = [key for key, until in self._published.keys.items() if until > now and key not in keys]
            keys = [*older, *keys]  # the key of our present level comes last, since `sealed` returns the last record
        return [self._published.announce(self.own, key, body, now + record.lifetime_s, now) for key in keys]

    def _refresh(self, now: Seconds) -> list[RosterEffect]:
        if now < self._refresh_at:
            return []
        self._refresh_at = now + self.size.refresh_s(len(self.live))
        self._sooner.looked(now, self.size.refresh_s(0))
        self._forget(now)
        return [Lookup(key) for key in self.size.lookups()]

    def _expire(self, now: Seconds) -> list[RosterEffect]:
        if self._expiry_at is None or now < self._expiry_at:
            return []
        gone = [peer for peer, entry in self.live.items() if entry.expires <= now]
        looks = 1 if self.size.level else 4  # in a large swarm a dead peer may stay a bit longer among many others
        rest_s = self.size.refresh_s(len(self.live)) / looks if len(gone) < len(self.live) else 0.0
        lines = [line for peer in gone for line in self._drop(peer, "expired", now)]
        self._expiry_at = max(min([entry.expires for entry in self.live.values()]), now + rest_s) if self.live else None
        return [*lines]

    def read(self, key: str, values: Mapping[str, bytes], now: Seconds) -> list[RosterEffect]:
        """Read peers' records, and return the effects.

        `values` maps each peer to its record, which the peer has signed for the DHT key `key`.
        """
        effects: list[RosterEffect] = []
        if len(values) > MAX_PEERS:  # limit the work that a flood of records causes; known peers come first
            values = dict(sorted(values.items(), key=lambda one: (one[0] not in self.live, one[0])))
            values = dict(islice(values.items(), MAX_PEERS))
        changed = [(PeerId(one), value) for one, value in values.items() if self._known.get(PeerId(one)) != value]
        if len(changed) > MOST_NEW:  # more than honest peers write under one key: read a sample
            new = sorted(peer for peer, _ in changed if peer not in self.live and peer != self.own.peer)
            left_out = set(new) - set(self.size.chance.sample(new, min(len(new), MOST_NEW)))
            changed = [one for one in changed if one[0] not in left_out]
        known = sorted([one for one in changed if one[0] in self.live])
        for peer, value in known + sorted([one for one in changed if one[0] not in self.live]):
            if peer == self.own.peer:
                effects += self._found_own(key, value, now)
                continue
            try:
                body, expires = self.own.open(key, peer, value, now)
                record = records.unpack(body)
                if record.run != self.run:
                    raise ProtocolError(Reason.RUN, f"the record is of run {record.run}, not of our run {self.run}")
                believed_until = now + record.lifetime_s
                if record.time > believed_until:
                    raise ProtocolError(Reason.AHEAD, f"the record is dated {record.time - now:.0f} s in the future")
                if peer not in self.live and len(self.live) >= MAX_PEERS:
                    raise ProtocolError(Reason.BUSY, f"the roster is full: it has {MAX_PEERS} peers")
            except ProtocolError as error:
                self.refused[error.reason] += 1
                continue
            if peer in self.live and record.time < self.live[peer].record.time:
                continue  # others may pass on an old record, even one from before the peer left and came back
            self._known[peer] = value
            effects += self._heard(peer, record, min(expires, believed_until), now)
        return effects

    def _found(self, key: str, values: Mapping[str, bytes], now: Seconds) -> list[RosterEffect]:
        read = self._sample(key, values)
        effects = self.read(key, read, now)
        valid = [PeerId(peer) for peer in read if peer in self.live or peer == self.own.peer]
        if self.size.found(key, valid, len(read) / max(1, len(values))):
            self.renew_soon(now)
        if self.size.level and len(self.live) >= MERGE and self._refresh_at <= now + self.size.refresh_s(0):
            self._refresh_at = now + self.size.refresh_s(len(self.live))  # this peer knows enough peers already
        return effects

    def _sample(self, key: str, values: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the records under a DHT key that we read: all, or those of live peers and SAMPLED_NEW others.

        Only other shards than our own are sampled, and only once we know enough peers: more partners would improve
        gossip little, and each record costs a verification and memory.
        """
        if len(self.live) < MERGE or not self.size.level or key == key_of(self.run, self.own.peer, self.size.level):
            return values
        new = sorted(peer for peer in values if peer not in self.live)
        chosen = set(self.size.chance.sample(new, min(len(new), SAMPLED_NEW)))
        return {peer: value for peer, value in values.items() if peer in chosen or peer in self.live}

    def copy_warning(self, now: Seconds) -> str:
        """Return a warning if a copy of our identity was noticed within the last two record lifetimes, else ""."""
        address, seen_at = self._published.copy_address, self._published.copy_seen_at
        if not address or now >= seen_at + 2 * RENEWALS * self.size.renew_s:
            return ""
        remedy = "so the swarm counts both as one peer: stop one, and start it again with --join and a new --state-dir"
        return f"another peer at {address} uses a copy of this peer's identity, {remedy}"

    def _found_own(self, key: str, value: bytes, now: Seconds) -> list[RosterEffect]:
        if self._published.read(self.own, key, value, now):
            self.renew_soon(now)
        warning = self.copy_warning(now)
        if not warning or now < self._copy_logged_at + REPEAT_S:
            return []
        self._copy_logged_at = now
        return [Log(ErrorLine(reason=warning))]

    def _heard(self, peer: PeerId, record: PeerRecord, expires: float, now: Seconds) -> list[RosterEffect]:
        if record.phase == PeerPhase.LEAVING:
            self._valid.pop(peer, None)
            was_silent = peer in self._dropped and self._dropped[peer] < record.time
            self._dropped[peer] = max(self._dropped.get(peer, 0.0), record.time + REJOIN_S)
            if peer in self.live:
                return [*self._drop(peer, "left", now)]
            return [Log(GoodbyeLine(peer=peer))] if was_silent else []  # log it only if the peer was dropped as silent
        if record.time <= self._dropped.get(peer, 0.0):
            return []
        known = self.live.get(peer)
        if known is not None and known.record.time >= record.time:
            return []
        self._valid.pop(peer, None)
        self.live[peer] = known.renewed(record, expires) if known else RosterEntry(record, expires, since=now)
        self.changes += 1
        self.holders.put(peer, record)
        self._expiry_at = expires if self._expiry_at is None else min(self._expiry_at, expires)
        if known is None:
            self._sooner.found()
            its = record.profile
            joined = PeerJoinedLine(peer=peer, device=its.device, region=its.region, name=its.name)
            return [Learn(peer, record.addresses), Log(joined)]
        return [Learn(peer, record.addresses)] if known.record.addresses != record.addresses else []

    def _unanswered(self, peer: PeerId, reason: str, asked_at: Seconds, now: Seconds) -> list[RosterEffect]:
        """Count an unanswered request, and drop the peer after DEAD_AFTER in a row. Overlapping timeouts count once."""
        entry = self.live[peer]
        if reason == Reason.DEADLINE and asked_at < entry.failed_at <= now:
            return []
        entry.failed(now)
        if entry.failures < DEAD_AFTER:
            return []
        self._dropped[peer] = entry.record.time
        keep_latest(self._valid, peer, entry.expires, MOST_DROPPED)
        return [*self._drop(peer, Reason.SILENT, now)]

    def _forget(self, now: Seconds) -> None:
        """Limit memory: forget long-dropped peers, expired entries, and all cached signed records if there are many."""
        if len(self._known) > 2 * MAX_PEERS:
            self._known.clear()
        if len(self._dropped) > MAX_PEERS:
            old = now - FORGET_TTLS * RENEWALS * self.size.renew_s
            self._dropped = {peer: time for peer, time in self._dropped.items() if time > old}
        while len(self._dropped) > MOST_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        self._valid = {peer: until for peer, until in self._valid.items() if until > now}

    def _drop(self, peer: PeerId, reason: str, now: Seconds) -> list[Log]:
        del self.live[peer]
        keep_latest(self.gone, peer, reason, MOST_DROPPED)
        self.changes += 1
        self.holders.drop(peer)
        return [Log(PeerLeftLine(peer=peer, reason=reason))]

"""Which peers are alive and hold which layers: their signed records in the DHT, and whether they answer our questions.

A record expires a minute after its peer stops renewing it, later in a large swarm. That is slow for a crash, so a peer
that fails to answer twice in a row is dropped at once, and comes back with its next record. A peer that leaves says so
in its last one.

The records of a small swarm are under one key. Those of a larger one are spread over several (swarm_size.py): each
lookup then reads our own shard and one more by chance. So each peer knows a changing sample of the swarm, and its costs
do not grow with the number of peers.

Peers whose clock is ahead of ours by more than a record lives find our records expired, so we are none of theirs;
and we refuse theirs. So a peer whose clock differs from all others' knows that it is alone, and can compare clocks.
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from random import Random

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Announce, Answered, AskFailed, Event, Found, Lookup
from decentral.core import rng
from decentral.core.config import SwarmConfig
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import ErrorLine, GoodbyeLine, PeerJoinedLine, PeerLeftLine
from decentral.core.latest import keep_latest
from decentral.core.machine import Log, Woke
from decentral.core.reasons import SILENT, Reason
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.peers.membership.records import RENEWALS, PeerRecord, RecordSource
from decentral.peers.membership.revocation_watch import RevocationWatch, WatchEffect
from decentral.peers.membership.swarm_size import MERGE, SPLIT, SwarmSize, level_of, published

REFRESH_SOON_S = 0.5  # until the next lookup after an unknown peer has asked us something
SOUGHT_EACH = 4  # such lookups for one unknown peer
MOST_SOUGHT = 1024  # unknown peers whose lookups are counted; beyond them, the first ones are forgotten
EXPIRY_STEP_S = 1e-3  # each record of ours expires so much later than the one before
FORGET_TTLS = 10  # lifetimes of a record after which a dropped peer is forgotten
RECORDS_OF_COPY = 2  # foreign records under our id that prove a copy; one may be from a start with a fast clock
DEAD_AFTER = 2  # unanswered questions in a row
MAX_PEERS = 4096  # in the roster, those known already first
MOST_DROPPED = 8192  # dropped peers whose last record's time is remembered; beyond them, the first ones are forgotten
MOST_NEW = 2 * SPLIT  # peers that one lookup makes known
NEIGHBOURS = 24  # holders of a layer that a peer knows
SPEED_UNIT = 2.0**-40  # tokens/s: sums of speeds are whole numbers of it


@dataclass(frozen=True, slots=True)
class Learn:
    """Effect: tell the transport where a peer listens."""

    peer: PeerId
    addresses: tuple[str, ...]


RosterEffect = WatchEffect | Learn


@dataclass(slots=True)
class RosterEntry:
    record: PeerRecord
    expires: float  # unix seconds
    failures: int = 0  # unanswered questions in a row
    since: Seconds = 0.0  # when we heard of it first
    failed_at: Seconds = 0.0  # when the last question was found unanswered

    def renewed(self, record: PeerRecord, expires: float) -> "RosterEntry":
        """Return the entry with a newer record of the peer."""
        return RosterEntry(record, expires, self.failures, self.since, self.failed_at)

    def answered(self) -> None:
        self.failures = 0

    def failed(self, now: Seconds) -> None:
        """Count a question that was found unanswered now."""
        self.failures, self.failed_at = self.failures + 1, now


@dataclass(slots=True)
class Holders:
    """The holders of each layer of a model with so many layers, as `own` sees them, kept up to date record by record.

    A query costs the same in a swarm of any size. A peer that is not training holds nothing. A peer asks only a few of
    a layer's holders, its neighbours, so that it can measure each of them well. Different peers have different
    neighbours (rendezvous hashing, Thaler and Ravishankar 1998), so work spreads over all holders.
    """

    own: PeerId
    layers: int
    speeds: dict[tuple[int, int], float] = field(default_factory=dict)  # tokens/s of all peers with the same layers
    changes: int = 0  # how often a span or a speed has changed so far
    _totals: dict[tuple[int, int], int] = field(default_factory=dict)  # the speeds in SPEED_UNITs
    _places: dict[PeerId, tuple[int, int, float]] = field(default_factory=dict)  # layers [first, last), tokens/s
    _alike: dict[tuple[int, int], list[tuple[int, PeerId]]] = field(default_factory=dict)  # by layers, then distance
    _near: dict[int, list[PeerId]] = field(default_factory=dict)  # answers since the last change, by layer

    @property
    def count(self) -> int:
        return len(self._places)

    def put(self, peer: PeerId, record: PeerRecord) -> None:
        if not self.layers:
            return
        first, last = (record.first, min(record.last, self.layers)) if record.phase == "training" else (0, 0)
        speed = record.profile.tokens_per_s
        was = self._places.get(peer, (0, 0, 0.0))
        if was[:2] == (first, last) and first < last:
            if speed != was[2]:
                self._places[peer] = (first, last, speed)
                self._add(first, last, _units(speed) - _units(was[2]))
                self.changes += 1
            return
        self.drop(peer)
        if first >= last:
            return
        self._places[peer] = (first, last, speed)
        self.changes += 1
        self._add(first, last, _units(speed))
        bisect.insort(self._alike.setdefault((first, last), []), (self._distance(peer), peer))
        self._near.clear()

    def drop(self, peer: PeerId) -> None:
        first, last, speed = self._places.pop(peer, (0, 0, 0.0))
        if first >= last:
            return
        self.changes += 1
        self._add(first, last, -_units(speed))
        held = self._alike[first, last]
        del held[bisect.bisect_left(held, (self._distance(peer), peer))]
        if not held:
            del self.speeds[first, last], self._totals[first, last], self._alike[first, last]
        self._near.clear()

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        """The layers [first, last) that a peer holds, and its tokens/s; (0, 0, 0.0) if it holds none."""
        return self._places.get(peer, (0, 0, 0.0))

    def near(self, layer: int) -> Sequence[PeerId]:
        """Up to NEIGHBOURS holders of the layer, the nearest by hash, in the order of their ids."""
        if layer not in self._near:
            spans = [held[:NEIGHBOURS] for (first, last), held in self._alike.items() if first <= layer < last]
            self._near[layer] = sorted(peer for _, peer in sorted(chain.from_iterable(spans))[:NEIGHBOURS])
        return self._near[layer]

    def _add(self, first: int, last: int, units: int) -> None:
        """Whole numbers add up exactly: an absurd speed that is gone again takes nothing of the others' with it."""
        total = self._totals[first, last] = self._totals.get((first, last), 0) + units
        self.speeds[first, last] = total * SPEED_UNIT

    def _distance(self, peer: PeerId) -> int:
        return rng.seed_of(0, "neighbours", self.own, peer)


def _units(tokens_per_s: float) -> int:
    return round(tokens_per_s / SPEED_UNIT)


@dataclass(slots=True)
class Publication:
    """Our record in the directory, which keeps of a peer's records the one that expires later.

    A record under our name that we have not written is of an earlier start, or of a peer that runs with a copy of our
    identity. One of an earlier start is older than our first record, and nobody renews it.
    """

    expires: Seconds = 0.0
    began: Seconds | None = None  # when we announced our first record
    sealed: dict[bytes, Seconds] = field(default_factory=dict)  # ours that have not expired, and when they do
    foreign: set[Seconds] = field(default_factory=set)  # when the first of those were written that are not ours
    copy_seen_at: Seconds = -math.inf
    copy_address: str = ""
    keys: dict[str, Seconds] = field(default_factory=dict)  # under which we have a record, and when it expires

    def announce(self, own: Signer, key: str, body: bytes, expires: Seconds, now: Seconds) -> Announce:
        """A record that lives until then, or longer where the last one does."""
        self.began = now if self.began is None else self.began
        self.expires = max(expires, self.expires + EXPIRY_STEP_S)
        self.sealed = {sealed: until for sealed, until in self.sealed.items() if until > now}
        sealed = own.seal(key, body, self.expires)
        self.sealed[sealed] = self.keys[key] = self.expires
        return Announce(key, own.peer, sealed, self.expires)

    def read(self, own: Signer, key: str, found: bytes, now: Seconds) -> bool:
        """Read a record under our name; return whether it outlives ours, so that a longer one has to come soon."""
        if found in self.sealed:
            return False
        try:
            body, expires = own.open(key, own.peer, found, now)
            record = records.unpack(body)
        except ProtocolError:
            return False
        if self.began is not None and record.time > self.began and record.phase != "leaving":
            if len(self.foreign) < RECORDS_OF_COPY:
                self.foreign.add(record.time)
            if len(self.foreign) == RECORDS_OF_COPY:
                self.copy_seen_at, self.copy_address = now, next(iter(record.addresses), "an unknown address")
        is_later, self.expires = expires > self.expires, max(expires, self.expires)
        return is_later


@dataclass(slots=True)
class SoonerLookups:
    """When records are looked up before it is time, because peers ask that we do not know.

    Strangers do not have us read all records as often as they ask: for each name a few lookups come sooner, and after
    each that finds nobody new the rest is twice as long, until one has come in its own time.
    """

    rest_s: Seconds = REFRESH_SOON_S  # from a lookup to one that comes sooner
    _looked_at: Seconds = -math.inf
    _sooner: bool = False  # whether the next lookup does
    _sought: dict[PeerId, int] = field(default_factory=dict)  # such lookups, by the unknown peer

    def instead_of(self, at: Seconds, peer: PeerId, now: Seconds) -> Seconds:
        """When the lookup comes that would come `at`."""
        soon, sought = max(now + REFRESH_SOON_S, self._looked_at + self.rest_s), self._sought.get(peer, 0)
        if soon >= at or sought >= SOUGHT_EACH:
            return at
        keep_latest(self._sought, peer, sought + 1, MOST_SOUGHT)
        self._sooner = True
        return soon

    def found(self) -> None:
        """Note that a lookup found somebody new, so that the next one may come soon."""
        self.rest_s = REFRESH_SOON_S

    def looked(self, now: Seconds, longest_s: Seconds) -> None:
        rest_s = 2 * self.rest_s if self._sooner else self.rest_s / 2
        self.rest_s = max(REFRESH_SOON_S, min(rest_s, longest_s))
        self._looked_at, self._sooner = now, False


@dataclass(slots=True)
class Roster:
    run: RunId
    own: Signer
    limits: SwarmConfig
    source: RecordSource = field(repr=False, compare=False)
    size: SwarmSize
    holders: Holders
    live: dict[PeerId, RosterEntry] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)  # records, by reason
    changes: int = 0  # how often a record came or went so far
    revocations: RevocationWatch | None = None  # None: the swarm is public
    _dropped: dict[PeerId, float] = field(default_factory=dict)  # records up to this time say nothing of a dropped peer
    _known: dict[PeerId, bytes] = field(default_factory=dict)  # each peer's last record, so that none is read twice
    _valid: dict[PeerId, float] = field(default_factory=dict)  # when the record of a dropped peer expires
    _published: Publication = field(default_factory=Publication)
    _renew_at: Seconds = 0.0
    _refresh_at: Seconds = 0.0
    _sooner: SoonerLookups = field(default_factory=SoonerLookups)
    _expiry_at: Seconds | None = None  # when to drop all expired records together

    @property
    def wake_at(self) -> Seconds | None:
        first = min(self._renew_at, self._refresh_at)
        first = first if self._expiry_at is None else min(first, self._expiry_at)
        revocations_at = self.revocations.wake_at if self.revocations else None
        return first if revocations_at is None else min(first, revocations_at)

    def handle(self, event: Event, now: Seconds) -> list[RosterEffect]:
        match event:
            case Woke():
                watched = self.revocations.handle(event, now) if self.revocations else []
                return watched + self._expire(now) + self._renew(now) + self._refresh(now)
            case Found(key, values) if level_of(self.run, key) is not None:
                return self._found(key, values, now)
            case Answered(peer=peer) if peer in self.live:
                self.live[peer].answered()
            case AskFailed(peer=peer, reason=reason) if peer in self.live and reason in SILENT:
                return self._unanswered(peer, reason, now - event.seconds, now)
        return []

    def knows(self, peer: PeerId) -> bool:
        """Whether it has a valid record, also where it has left our own questions unanswered.

        Where records are spread over several keys, nobody reads all of them, and no peer can be told from a stranger.
        """
        return peer in self.live or peer in self._valid or self.size.level > 0

    def renew_soon(self, now: Seconds) -> None:
        """Renews our record at the next chance, because something in it has changed."""
        self._renew_at = min(self._renew_at, now)

    def refresh_soon(self, peer: PeerId, now: Seconds) -> None:
        """Looks up records soon, because an unknown peer has asked us something, and is probably a newcomer."""
        if not self.size.level:  # else nobody knows all peers
            self._refresh_at = self._sooner.instead_of(self._refresh_at, peer, now)

    def look_up(self, now: Seconds) -> list[RosterEffect]:
        """Looks up records at once."""
        self._refresh_at = now
        return self._refresh(now)

    def watch_revocations(self, private: PrivateSwarm, chance: Random) -> RevocationWatch:
        """From now on members whom the founder of this private swarm revokes are excluded."""
        self.revocations = RevocationWatch(self.own, private, chance, self)
        return self.revocations

    def exclude(self, peer: PeerId, now: Seconds) -> list[Log]:
        """Drops a peer that is no member of this private swarm any more; its records are not opened again."""
        self._known.pop(peer, None)
        self._valid.pop(peer, None)
        return self._drop(peer, Reason.REVOKED, now) if peer in self.live else []

    def leave(self, now: Seconds) -> list[RosterEffect]:
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
        if leaving:  # those of another level that we had before have to hear of it as well
            keys = list(dict.fromkeys([*keys, *(key for key, until in self._published.keys.items() if until > now)]))
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
        rest_s = self.size.refresh_s(len(self.live)) / 4 if len(gone) < len(self.live) else 0.0
        lines = [line for peer in gone for line in self._drop(peer, "expired", now)]
        self._expiry_at = max(min([entry.expires for entry in self.live.values()]), now + rest_s) if self.live else None
        return [*lines]

    def _found(self, key: str, values: Mapping[str, bytes], now: Seconds) -> list[RosterEffect]:
        effects: list[RosterEffect] = []
        if len(values) > MAX_PEERS:  # those that we know come first
            values = dict(sorted(values.items(), key=lambda one: (one[0] not in self.live, one[0])))
            values = dict(islice(values.items(), MAX_PEERS))
        changed = [(PeerId(one), value) for one, value in values.items() if self._known.get(PeerId(one)) != value]
        if len(changed) > MOST_NEW:  # the key has more than a shard: a sample of those that we do not know is enough
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
                    raise ProtocolError(Reason.RUN, f"a record of {record.run!r}")
                believed_until = now + record.lifetime_s
                if record.time > believed_until:
                    raise ProtocolError(Reason.AHEAD, f"a record of {record.time - now:.0f} s from now")
                if peer not in self.live and len(self.live) >= MAX_PEERS:
                    raise ProtocolError(Reason.BUSY, f"{MAX_PEERS} peers are known already")
            except ProtocolError as error:
                self.refused[error.reason] += 1
                continue
            self._known[peer] = value
            effects += self._heard(peer, record, min(expires, believed_until), now)
        if self.size.found(key, [PeerId(peer) for peer in values if peer in self.live or peer == self.own.peer]):
            self.renew_soon(now)
        if self.size.level and len(self.live) >= MERGE and self._refresh_at <= now + self.size.refresh_s(0):
            self._refresh_at = now + self.size.refresh_s(len(self.live))  # a newcomer's first lookup was enough
        return effects

    def copy_warning(self, now: Seconds) -> str:
        """Return a line for the user if a copy of our identity was seen within two lifetimes of our record, or ""."""
        address, seen_at = self._published.copy_address, self._published.copy_seen_at
        if not address or now >= seen_at + 2 * RENEWALS * self.size.renew_s:
            return ""
        remedy = "so the swarm counts both as one: stop one, and start it again with --join and a new --state-dir"
        return f"another peer at {address} uses a copy of this peer's identity, {remedy}"

    def _found_own(self, key: str, value: bytes, now: Seconds) -> list[RosterEffect]:
        known = self.copy_warning(now)
        if self._published.read(self.own, key, value, now):
            self.renew_soon(now)
        said = self.copy_warning(now)
        return [Log(ErrorLine(reason=said))] if said and not known else []

    def _heard(self, peer: PeerId, record: PeerRecord, expires: float, now: Seconds) -> list[RosterEffect]:
        if record.phase == "leaving":
            self._valid.pop(peer, None)
            was_silent = peer in self._dropped and self._dropped[peer] < record.time
            self._dropped[peer] = max(self._dropped.get(peer, 0.0), record.time)
            if peer in self.live:
                return [*self._drop(peer, "left", now)]
            return [Log(GoodbyeLine(peer=peer))] if was_silent else []  # questions to it failed before we read this
        if record.time <= self._dropped.get(peer, 0.0):
            return []  # the record was written before the peer was dropped
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
            joined = PeerJoinedLine(peer=peer, device=record.profile.device, region=record.profile.region)
            return [Learn(peer, record.addresses), Log(joined)]
        return [Learn(peer, record.addresses)] if known.record.addresses != record.addresses else []

    def _unanswered(self, peer: PeerId, reason: str, asked_at: Seconds, now: Seconds) -> list[RosterEffect]:
        """Questions that were under way together when a link stalled tell of one silence."""
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
        """Forgets peers of long ago, so that peers that come and go do not fill our memory."""
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
        self.changes += 1
        self.holders.drop(peer)
        return [Log(PeerLeftLine(peer=peer, reason=reason))]

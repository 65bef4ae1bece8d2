"""Exchange peers' records with other peers directly, so that no node of the DHT decides who is in the swarm.

Whoever owns the DHT nodes next to a key can answer that nothing is stored under that key. So each peer also asks other
peers for the records that it lacks, and shows them its own record. It asks ASKS times between two renewals of its own
record. Each time it asks one random peer of its roster and of the peers through which it joined; so h hostile ids among
n honest peers get h/(n + h) of these queries, whatever their records say. Each time it also asks one peer whose record
was not renewed in time, because that peer surely has its own record. The answer also contains what the sender lacks of
two other kinds of records, each stored under one DHT key: the revocation list of a private swarm, and plans
(scheduler/placement/plans.py).

In a swarm of several shards (swarm_size.py), a peer knows only a sample of the other peers, and asks for no records of
peers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import NOTHING_REVOKED, Revocations
from decentral.comm.wire.messages import MAX_KNOWN, PeerRecords, RecordsQuery
from decentral.comm.wire.transport import Announce, Answered, Ask, Asked, AskFailed, Found, Reply, Tag
from decentral.core.ids import PeerId, RunId
from decentral.core.latest import keep_latest
from decentral.core.machine import Log, Woke
from decentral.core.units import KiB, MiB, Seconds
from decentral.peers.membership.roster import MAX_PEERS, Roster, RosterEffect
from decentral.peers.membership.swarm_size import key_of

ASKS = 4  # between two renewals of its own record, a peer asks this many times for the records that it lacks
RECORDS_DEADLINE_S = 10.0
MOST_RECORDS_BYTES = 64 * KiB  # an answer has at most this many bytes of records, so that it needs no blob
MOST_PLANS_BYTES = 32 * KiB  # an answer has at most this many bytes of plans; a plan for 500 peers fits
RECORDS_BYTES_S = MiB  # all other peers together get at most this many bytes of records and plans per second
MOST_BACKLOG_S = 1.0  # as many bytes as RECORDS_BYTES_S allows in this time may be sent in one burst
REST_BYTES = 16 * KiB  # after an answer up to this size, a peer waits `_rest_s` for more; after a larger one, longer
OVERDUE = 1.5  # a record is overdue at an age of this many renewal intervals (its peer's or ours, the longer one)


@dataclass(frozen=True, slots=True)
class RecordsTag(Tag):
    """The tag of a RecordsQuery, whose answers are not used to measure the link."""

    measures_link: ClassVar[bool] = False


RecordEffect = RosterEffect | Ask | Reply


class GossipedPlans(Protocol):
    """Interface to the plans of the swarm; `SwarmPlans` implements it."""

    @property
    def key(self) -> str:
        """Return the DHT key of the run's plans."""

    def sealed(self, now: Seconds) -> Mapping[PeerId, bytes]:
        """Return the sealed plans that are valid now, by proposer."""

    def handle(self, event: Found, now: Seconds) -> Sequence[Log | Announce]:
        """Store each sealed plan in the event that is valid and new, as if it was found in the DHT."""


@dataclass(slots=True)
class RecordGossip:
    """The state machine that asks other peers for records, and answers when they ask."""

    run: RunId
    roster: Roster = field(repr=False, compare=False)
    contacts: tuple[PeerId, ...]  # the peers through which this peer joined
    chance: Random
    wake_at: Seconds = 0.0
    plans: GossipedPlans | None = None  # None before `pass_on`, and if this peer never changes its layers
    _asks: int = 0  # how many times this peer has asked for records so far
    _preferred_once: set[PeerId] = field(default_factory=set)  # overdue peers that were asked for their own record
    _rests: dict[PeerId, Seconds] = field(default_factory=dict)  # peer -> until when it gets no records and plans
    # Peer -> number of the revocation list that it got from us last, and until when it does not get that list again.
    _told: dict[PeerId, tuple[int, Seconds]] = field(default_factory=dict)
    _sent_until: Seconds = 0.0  # when all answers so far would be sent, at a rate of RECORDS_BYTES_S

    def pass_on(self, plans: GossipedPlans) -> None:
        """From now on, exchange these plans with other peers, in addition to the records."""
        self.plans = plans

    def handle(self, event: Woke | Asked | Answered | AskFailed, now: Seconds) -> Sequence[RecordEffect]:
        """Handle a wake-up, another peer's query, or the answer to ours, and return the effects."""
        match event:
            case Woke() if now >= self.wake_at:
                self.wake_at = now + self.roster.size.renew_s / (1 if self._has_no_questions() else ASKS)
                return self._ask(now)
            case Asked(sender=sender, envelope=Envelope(RecordsQuery() as query)):
                read = self._read({sender: query.own} if query.own else {}, query.revoked, now)
                return [*read, Reply(event.request, self._answer(sender, query, now))]
            case Answered(envelope=Envelope(PeerRecords() as answer)):
                read = self._read(dict(answer.records), answer.revoked, now)
                if self.plans and answer.plans:
                    return [*read, *self.plans.handle(Found(self.plans.key, dict(answer.plans)), now)]
                return read
        return []

    def _ask(self, now: Seconds) -> list[RecordEffect]:
        roster, own, sharded = self.roster, self.roster.own.peer, self.roster.size.level > 0
        if self._has_no_questions():
            return []
        overdue = set() if sharded else {peer for peer in roster.live if self._is_overdue(peer, now)}
        known = () if sharded else [own, *(peer for peer in roster.live if peer not in overdue)][:MAX_KNOWN]
        hashes, record = tuple(short(peer.encode()) for peer in known), b"" if sharded else roster.sealed(own)
        plans = tuple(map(short, self.plans.sealed(now).values())) if self.plans else None
        query = RecordsQuery(self.run, record, hashes, self._revocations.number, plans=plans)
        first = [] if sharded else self._preferred(overdue)
        others = sorted({*roster.live, *self.contacts} - {own, *first})
        asked = [*first, *([self.chance.choice(others)] if others else [])]
        return [Ask(RecordsTag(), to, Envelope(query), RECORDS_DEADLINE_S) for to in asked]

    def _has_no_questions(self) -> bool:
        """Return whether this peer asks for nothing: the swarm is large, and has neither plans nor revocations."""
        return self.roster.size.level > 0 and not self.plans and not self.roster.revocations

    def _preferred(self, overdue: set[PeerId]) -> list[PeerId]:
        """Return a list of one peer to ask in addition to a random peer of the roster; [] if there is no such peer.

        It is a random peer of `overdue`; each of these peers is returned only once until its record is renewed. In one
        of ASKS calls, it is a random contact that is not in the roster, if there is one.
        """
        self._preferred_once &= overdue
        contacts = sorted({*self.contacts} - self.roster.live.keys() - {self.roster.own.peer})
        self._asks += 1
        if contacts and self._asks % ASKS == 0:
            return [self.chance.choice(contacts)]
        rest = sorted(overdue - self._preferred_once)
        found = [self.chance.choice(rest)] if rest else []
        self._preferred_once.update(found)
        return found

    def _is_overdue(self, peer: PeerId, now: Seconds) -> bool:
        record = self.roster.live[peer].record
        return now - record.time > OVERDUE * max(record.renew_s, self.roster.size.renew_s)

    def _answer(self, asker: PeerId, query: RecordsQuery, now: Seconds) -> Envelope:
        """Return the message with what `asker` lacks: records, revocations, and plans.

        If `_may_have` returns False, the message has revocations only. A peer gets the same revocation list again
        only after `_rest_s`, so that queries of a few bytes are not answered with 16 KiB again and again.
        """
        roster, known, revoked = self.roster, set(query.known), b""
        number = self._revocations.number
        told, again_at = self._told.get(asker, (0, 0.0))
        if number > query.revocations and (number != told or now >= again_at):
            revoked = self._revocations.packed
            keep_latest(self._told, asker, (number, now + self._rest_s), MAX_PEERS)
        if not self._may_have(asker, now):
            return Envelope(PeerRecords(self.run, (), revoked))
        peers = [] if roster.size.level else [roster.own.peer, *roster.live]
        found = [(peer, roster.sealed(peer)) for peer in peers if short(peer.encode()) not in known]
        plans = self.plans.sealed(now) if self.plans and query.plans is not None else {}
        lacked = [one for one in plans.items() if short(one[1]) not in (query.plans or ())]
        records, plans_sent = self._fitting(found, MOST_RECORDS_BYTES), self._fitting(lacked, MOST_PLANS_BYTES)
        self._sends(asker, sum(len(sealed) for _, sealed in (*records, *plans_sent)), now)
        return Envelope(PeerRecords(self.run, records, revoked, plans_sent))

    def _may_have(self, asker: PeerId, now: Seconds) -> bool:
        """Return whether `asker` may get records and plans now, given the earlier ones that `_sends` has counted.

        Peers that have been in the roster for a renewal interval are served until the backlog reaches MOST_BACKLOG_S;
        newcomers and strangers only until half of that, so that many strangers' queries do not shut out the others.
        """
        entry = self.roster.live.get(asker)
        settled = entry is not None and now >= entry.since + self.roster.size.renew_s
        most_s = MOST_BACKLOG_S if settled else MOST_BACKLOG_S / 2
        return now >= self._rests.get(asker, 0.0) and self._sent_until < now + most_s

    def _sends(self, asker: PeerId, size: int, now: Seconds) -> None:
        """Count `size` bytes of records and plans that are sent to `asker`."""
        if size:
            self._sent_until = max(self._sent_until, now) + size / RECORDS_BYTES_S
            keep_latest(self._rests, asker, now + self._rest_s * max(1.0, size / REST_BYTES), MAX_PEERS)

    def _fitting(self, sealed: Sequence[tuple[PeerId, bytes]], most_bytes: int) -> tuple[tuple[PeerId, bytes], ...]:
        """Return at most MAX_KNOWN of these pairs (peer, record), which have at most `most_bytes` together.

        Pairs whose record is empty are left out. If not all of the other pairs fit, our own comes first, and the rest
        are chosen at random, so that no peer's record always displaces another's.
        """
        pairs, found, size = [one for one in sealed if one[1]], list[tuple[PeerId, bytes]](), 0
        if len(pairs) > MAX_KNOWN or sum(len(peer) + len(record) for peer, record in pairs) > most_bytes:
            pairs.sort(key=lambda one: (one[0] != self.roster.own.peer, self.chance.random()))
        for peer, record in pairs:
            if len(found) < MAX_KNOWN and size + len(peer) + len(record) <= most_bytes:
                found.append((peer, record))
                size += len(peer) + len(record)
        return tuple(found)

    @property
    def _rest_s(self) -> Seconds:
        """Return for how long a peer gets no more after an answer: half of the time between two of its queries."""
        return self.roster.size.renew_s / ASKS / 2

    @property
    def _revocations(self) -> Revocations:
        """Return our list of revocations; in a public swarm, the empty list."""
        watch = self.roster.revocations
        return watch.private.revocations if watch else NOTHING_REVOKED

    def _read(self, values: Mapping[str, bytes], revoked: bytes, now: Seconds) -> list[RecordEffect]:
        """Read what another peer has sent, records (`values`, by peer) and revocations, and return the effects."""
        roster, effects = self.roster, list[RecordEffect]()
        if values and not roster.size.level:
            effects += roster.read(key_of(self.run, roster.own.peer, 0), values, now)
        if revoked and roster.revocations:
            effects += roster.revocations.learn(revoked, now)
        return effects


def short(value: bytes) -> bytes:
    """Return 8 bytes of a hash, which stand for a peer id or a sealed plan in a RecordsQuery."""
    return hashlib.blake2b(value, digest_size=8).digest()

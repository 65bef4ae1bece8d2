"""Peers tell each other who is in the swarm, so that no node of the DHT can keep it from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Never

import pytest

from decentral.comm.wire import codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import MAX_REVOCATIONS_BYTES
from decentral.comm.wire.messages import MAX_KNOWN, PeerRecords, RecordsQuery
from decentral.comm.wire.transport import Answered, Ask, Asked, Found, Reply
from decentral.core.config import SwarmConfig
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Woke
from decentral.peers.membership import records
from decentral.peers.membership.holders import Holders
from decentral.peers.membership.record_gossip import (
    ASKS,
    MOST_PLANS_BYTES,
    MOST_RECORDS_BYTES,
    RECORDS_BYTES_S,
    RecordGossip,
    RecordsTag,
)
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.roster import Roster
from decentral.peers.membership.swarm_size import LEAST_TIMES, SwarmSize, SwarmStart
from decentral.scheduler.throughput.link_limits import TokenLinks
from decentral.sim.virtual_signer import VirtualSigner
from tests.comm.wire.invited import founder, member

RUN = RunId("gpt-3fa2c1")
RECORD = PeerRecord(
    RUN, 0.0, ("/ip4/127.0.0.1/tcp/1",), Profile("cpu", 1, 1.0, 1.0), 0, 3, 0, 0, 0, phase=PeerPhase.TRAINING
)
NOW, TTL = 1000.0, 60.0
ASK_S = LEAST_TIMES.renew_s / ASKS
LONG = records.pack(replace(RECORD, time=NOW, addresses=tuple(f"/dns4/{'x' * 200}/tcp/{n}" for n in range(8))))


@dataclass
class Peer:
    """A peer that publishes its record, but may find nothing in the DHT."""

    name: PeerId
    contacts: tuple[PeerId, ...] = ()
    members: float = 1.0
    now: float = NOW
    roster: Roster = field(init=False)
    gossip: RecordGossip = field(init=False)

    def __post_init__(self) -> None:
        size = SwarmSize(RUN, self.name, Random(0), SwarmStart(self.members))
        holders = Holders(self.name, (Fragment(0, 0, 6, 100),), TokenLinks(64.0, 0.8))
        self.roster = Roster(RUN, VirtualSigner(self.name), SwarmConfig(), self, size, holders)
        self.gossip = RecordGossip(RUN, self.roster, self.contacts, Random(self.name))

    def compose_record(self, now: float, leaving: bool) -> PeerRecord:
        return replace(RECORD, time=now, phase=PeerPhase.LEAVING if leaving else PeerPhase.TRAINING)

    def wake(self, now: float) -> list[Ask]:
        self.now = now
        self.roster.handle(Woke(), now)
        return [one for one in self.gossip.handle(Woke(), now) if isinstance(one, Ask)]

    def answer(self, sender: PeerId, ask: Ask) -> Envelope:
        replies = [
            one for one in self.gossip.handle(Asked(7, sender, ask.envelope), self.now) if isinstance(one, Reply)
        ]
        (reply,) = replies
        assert reply.request == 7
        return reply.envelope

    def hear(self, ask: Ask, answer: Envelope) -> None:
        self.gossip.handle(Answered(ask.tag, ask.to, answer, 0.1, 0.1, 1, 1), self.now)


def swarm(count: int) -> dict[PeerId, Peer]:
    """Peers of which each but the first knows the first alone."""
    first = PeerId("peer0")
    names = [first, *(PeerId(f"peer{number}") for number in range(1, count))]
    return {name: Peer(name, () if name == first else (first,)) for name in names}


def play(peers: dict[PeerId, Peer], seconds: float) -> None:
    for tick in range(int(seconds / ASK_S) + 1):
        for name, peer in sorted(peers.items()):
            for ask in peer.wake(NOW + tick * ASK_S):
                if ask.to in peers:
                    peer.hear(ask, peers[ask.to].answer(name, ask))


def rosters(peers: dict[PeerId, Peer]) -> set[int]:
    return {len(peer.roster.live) for peer in peers.values()}


def test_peers_that_find_nothing_in_the_dht_know_each_other_in_half_a_minute_and_go_on() -> None:
    peers = swarm(10)
    play(peers, 30.0)
    assert rosters(peers) == {9}
    play(peers, 600.0)
    assert rosters(peers) == {9}


def test_a_peer_that_is_gone_is_not_kept_alive_by_what_others_tell() -> None:
    peers = swarm(4)
    play(peers, 30.0)
    gone = peers.pop(PeerId("peer3"))
    for tick in range(8, 8 + int(2 * TTL / ASK_S)):
        for name, peer in sorted(peers.items()):
            for ask in peer.wake(NOW + tick * ASK_S):
                if ask.to in peers:
                    peer.hear(ask, peers[ask.to].answer(name, ask))
    assert not any(gone.name in peer.roster.live for peer in peers.values())
    assert rosters(peers) == {2}


def test_who_knows_all_gets_no_record_and_little_is_sent() -> None:
    asker, asked = Peer(PeerId("asker")), Peer(PeerId("asked"))
    for one, other in ((asker, asked), (asked, asker)):
        one.wake(NOW)
        other.roster.read(f"{RUN}/peers", {one.name: one.roster.sealed(one.name)}, NOW)
    (ask,) = asker.wake(NOW + ASK_S)
    answer = asked.answer(asker.name, ask)
    assert answer.message == PeerRecords(RUN, ())


def test_a_peer_whose_record_was_not_renewed_in_time_is_asked_itself() -> None:
    asker, overdue, renewed = Peer(PeerId("asker")), Peer(PeerId("overdue")), Peer(PeerId("renewed"))
    for other, at in ((overdue, NOW), (renewed, NOW + 31.0)):
        other.wake(at)
        asker.roster.read(f"{RUN}/peers", {other.name: other.roster.sealed(other.name)}, at)
    asked = [ask.to for ask in asker.wake(NOW + 35.0)]
    assert asked[0] == "overdue"


def asked_beside_a_name_that_dates_back(asker: Peer, *others: Peer, ticks: int = 40) -> Counter[PeerId]:
    """Return how often the asker asks each peer, while the name renews a record that is always overdue."""
    name, asked = PeerId("dated back"), Counter[PeerId]()
    for now in (NOW + tick * ASK_S for tick in range(ticks)):
        back = records.pack(replace(RECORD, time=now - 600))
        sealed: dict[str, bytes] = {name: VirtualSigner(name).seal(f"{RUN}/peers", back, now + 60)}
        for other in others:
            other.wake(now)
            sealed[other.name] = other.roster.sealed(other.name)
        asker.roster.read(f"{RUN}/peers", sealed, now)
        asked.update(ask.to for ask in asker.wake(now))
    return asked


def test_a_record_that_is_always_overdue_draws_one_question_beside_its_share() -> None:
    asked = asked_beside_a_name_that_dates_back(Peer(PeerId("asker")), *(Peer(PeerId(f"peer{n}")) for n in range(3)))
    assert asked.total() == 41
    assert asked[PeerId("dated back")] <= 41 / 3


def test_a_newcomer_that_knows_a_hostile_name_alone_goes_on_to_ask_its_contact() -> None:
    asked = asked_beside_a_name_that_dates_back(Peer(PeerId("newcomer"), (PeerId("contact"),)))
    assert asked[PeerId("contact")] > 41 / 3


def test_a_stranger_that_asks_becomes_known_by_the_record_that_it_brings() -> None:
    first, stranger = Peer(PeerId("first")), Peer(PeerId("stranger"), (PeerId("first"),))
    (ask,) = stranger.wake(NOW)
    first.answer(stranger.name, ask)
    assert set(first.roster.live) == {"stranger"}


FOREIGN = VirtualSigner(PeerId("another")).seal("another/key", b"", NOW + 60)


@pytest.mark.parametrize("own", [b"", b"no record", FOREIGN], ids=["none", "bytes", "another's"])
def test_a_record_that_is_none_is_not_taken(own: bytes) -> None:
    first = Peer(PeerId("first"))
    ask = Ask(None, first.name, Envelope(RecordsQuery(RUN, own, ())), 1.0)  # type: ignore[arg-type]
    first.answer(PeerId("liar"), ask)
    assert not first.roster.live


def test_an_answer_without_a_valid_record_adds_nobody() -> None:
    asker = Peer(PeerId("asker"), (PeerId("liar"),))
    (ask,) = asker.wake(NOW)
    for record in (b"", b"xyz", FOREIGN):
        asker.hear(ask, Envelope(PeerRecords(RUN, (("liar", record), ("other", record)), b"no list")))
    assert not asker.roster.live


def test_an_answer_has_a_bound() -> None:
    first = Peer(PeerId("first"))
    first.wake(NOW)
    values = dict[str, bytes]()
    for number in range(200):
        other = Peer(PeerId(f"other{number}"))
        values[other.name] = other.roster.own.seal(f"{RUN}/peers", LONG, NOW + 60)
    first.roster.read(f"{RUN}/peers", values, NOW)
    answer = first.answer(PeerId("asker"), Ask(None, first.name, Envelope(RecordsQuery(RUN, b"", ())), 1.0))  # type: ignore[arg-type]
    assert isinstance(answer.message, PeerRecords)
    assert MOST_RECORDS_BYTES // 2 < sum(len(record) for _, record in answer.message.records) <= MOST_RECORDS_BYTES
    assert len(codec.encode(answer.message, 0)) < codec.MAX_HEADER_BYTES


def test_names_whose_records_fill_an_answer_and_are_dated_ahead_do_not_come_first_in_each_answer() -> None:
    first = crowded(1, "honest")
    ahead = replace(records.unpack(LONG), time=NOW + 40)
    names = [PeerId(f"ahead{n}") for n in range(40)]
    values = {str(one): VirtualSigner(one).seal(f"{RUN}/peers", records.pack(ahead), NOW + 60) for one in names}
    first.roster.read(f"{RUN}/peers", values, NOW)
    found = [{name for name, _ in records_for(first, f"asker{n}", NOW + n / 10)} for n in range(10)]
    assert any("honest0" in one for one in found)
    assert all("first" in one for one in found)


def records_for(asked: Peer, asker: str, now: float) -> tuple[tuple[str, bytes], ...]:
    """Return the records, with their peers, that an asker gets that knows nobody."""
    asked.now = now
    answer = asked.answer(PeerId(asker), Ask(None, asked.name, Envelope(RecordsQuery(RUN, b"", ())), 1.0)).message  # type: ignore[arg-type]
    assert isinstance(answer, PeerRecords)
    return answer.records


def sent_to(asked: Peer, asker: str, now: float) -> int:
    """Return the bytes of these records."""
    return sum(len(record) for _, record in records_for(asked, asker, now))


def crowded(count: int = 60, named: str = "other") -> Peer:
    """Return a peer with this many others in its roster, whose records are long."""
    first = Peer(PeerId("first"))
    first.wake(NOW)
    names = [PeerId(f"{named}{n}") for n in range(count)]
    values = {str(one): VirtualSigner(one).seal(f"{RUN}/peers", LONG, NOW + 600) for one in names}
    first.roster.read(f"{RUN}/peers", values, NOW)
    return first


def test_an_asker_that_has_just_got_records_gets_no_more_for_a_while() -> None:
    first = crowded()
    assert sent_to(first, "asker", NOW) > MOST_RECORDS_BYTES // 2
    assert sum(sent_to(first, "asker", NOW + n / 100) for n in range(100)) == 0
    assert sent_to(first, "another", NOW + 1) > MOST_RECORDS_BYTES // 2
    assert sent_to(first, "asker", NOW + 2 * ASK_S) > MOST_RECORDS_BYTES // 2


def test_any_number_of_names_together_get_a_bounded_rate_and_leave_some_to_peers_known_for_long() -> None:
    first, later, seconds = crowded(), NOW + LEAST_TIMES.renew_s, 4
    sent = sum(sent_to(first, f"name{n}", later + n / 100) for n in range(100 * seconds))
    assert sent < RECORDS_BYTES_S * (seconds + 1)
    assert sent_to(first, "name", later + seconds) == 0
    assert sent_to(first, "other7", later + seconds) > MOST_RECORDS_BYTES // 2


def test_in_a_swarm_of_many_shards_nobody_is_asked_and_nothing_is_told() -> None:
    large = Peer(PeerId("large"), (PeerId("contact"),), members=5000.0)
    assert large.roster.size.level > 0
    assert large.wake(NOW) == []
    query = Ask(None, large.name, Envelope(RecordsQuery(RUN, b"", ())), 1.0)  # type: ignore[arg-type]
    assert large.answer(PeerId("asker"), query).message == PeerRecords(RUN, ())


# Plans


@dataclass
class Shelf:
    """Plans that a peer has, whatever is in them."""

    known: dict[PeerId, bytes] = field(default_factory=dict)
    key: str = f"{RUN}/plan"

    def sealed(self, now: float) -> dict[PeerId, bytes]:
        return self.known

    def handle(self, event: Found, now: float) -> Sequence[Never]:
        assert event.key == self.key
        self.known |= {PeerId(proposer): plan for proposer, plan in event.values.items()}
        return ()


def planner(name: str, contact: str = "", members: float = 1.0, **known: bytes) -> tuple[Peer, Shelf]:
    peer, shelf = Peer(PeerId(name), (PeerId(contact),), members), Shelf({PeerId(one): known[one] for one in known})
    peer.gossip.pass_on(shelf)
    return peer, shelf


@pytest.mark.parametrize("members", [1.0, 5000.0], ids=["small", "of many shards"])
def test_a_peer_gets_the_plans_that_it_lacks_and_no_others(members: float) -> None:
    asked, _ = planner("asked", members=members, A=b"plan of A", B=b"newer plan of B")
    asker, shelf = planner("asker", "asked", members, B=b"plan of B", C=b"plan of C")
    (ask,) = asker.wake(NOW)
    asker.hear(ask, asked.answer(asker.name, ask))
    assert shelf.known == {"A": b"plan of A", "B": b"newer plan of B", "C": b"plan of C"}
    (ask,) = asker.wake(NOW + ASK_S)
    assert asked.answer(asker.name, ask).message == PeerRecords(RUN, ())


def test_a_peer_that_takes_part_in_no_plans_asks_for_none_and_gets_none() -> None:
    asked, _ = planner("asked", A=b"plan")
    asker = Peer(PeerId("asker"), (asked.name,))
    (ask,) = asker.wake(NOW)
    answer = asked.answer(asker.name, ask).message
    assert isinstance(answer, PeerRecords)
    assert answer.plans == ()
    asker.hear(ask, Envelope(PeerRecords(RUN, (), b"", (("A", b"plan"),))))


def test_plans_fit_into_the_answer_beside_the_longest_records_and_revocations() -> None:
    large = bytes(MOST_PLANS_BYTES // 2)
    asked, _ = planner("asked", A=bytes(MOST_PLANS_BYTES), B=large, C=large, D=b"small")
    asker, shelf = planner("asker", "asked")
    (ask,) = asker.wake(NOW)
    answer = asked.answer(asker.name, ask)
    asker.hear(ask, answer)
    assert set(shelf.known) == {"B", "D"}
    assert isinstance(answer.message, PeerRecords)
    records = tuple((f"{number:064}", bytes(MOST_RECORDS_BYTES // MAX_KNOWN - 64)) for number in range(MAX_KNOWN))
    fullest = replace(answer.message, records=records, revoked=bytes(MAX_REVOCATIONS_BYTES))
    assert len(codec.encode(fullest)) < codec.MAX_HEADER_BYTES


def test_no_plans_displace_the_answering_peers_own() -> None:
    asked, _ = planner("asked", A=bytes(MOST_PLANS_BYTES - 1), asked=b"own")
    asker, shelf = planner("asker", "asked")
    (ask,) = asker.wake(NOW)
    asker.hear(ask, asked.answer(asker.name, ask))
    assert set(shelf.known) == {"asked"}


def test_a_peer_is_sent_the_same_revocations_as_often_as_an_honest_one_asks_and_a_new_list_at_once() -> None:
    asked = Peer(PeerId("asked"))
    private = member("asked")
    asked.roster.watch_revocations(private, Random(0))

    def sent(count: int, own: int = 0) -> int:
        query = Ask(RecordsTag(), asked.name, Envelope(RecordsQuery(RUN, b"", (), own)), 1.0)
        answers = [asked.answer(PeerId("greedy"), query).message for _ in range(count)]
        return sum(isinstance(one, PeerRecords) and one.revoked == private.revocations.packed for one in answers)

    for number in (1, 2):
        private.learn(founder().revoke(number, frozenset({member("QmB").holding.invitation.id})).packed)
        assert sent(100) == 1
    asked.now += ASK_S
    assert (sent(1), sent(1, own=2)) == (1, 0)

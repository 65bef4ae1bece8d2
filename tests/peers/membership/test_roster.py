"""Signed records and answers to questions tell which peers are alive."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest

from decentral.comm.gossip.exchange import PullTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity, open_sealed
from decentral.comm.wire.messages import Pong
from decentral.comm.wire.transport import Announce, Answered, AskFailed, Found, Lookup
from decentral.core.config import SwarmConfig
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import ErrorLine, GoodbyeLine, PeerJoinedLine, PeerLeftLine
from decentral.core.machine import Log, Woke
from decentral.core.reasons import Reason
from decentral.peers.membership import records
from decentral.peers.membership.holders import Holders
from decentral.peers.membership.link_probes import ProbeTag
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.membership.roster import MOST_NEW, REJOIN_S, SAMPLED_NEW, Learn, Roster, RosterEffect, RosterEntry
from decentral.peers.membership.swarm_size import MERGE, SwarmSize, SwarmStart, key, key_of, level_of, published
from decentral.scheduler.throughput.link_limits import TokenLinks

RUN = RunId("gpt-3fa2c1")
KEY = f"{RUN}/peers"
NOW = 1000.0
TTL = 60.0
LEVEL = 3  # of a swarm of 500
RECORD = PeerRecord(
    RUN, NOW, ("/ip4/127.0.0.1/tcp/1",), Profile("cpu", 1, 1.0, 1.0), 0, 3, 0, 0, 0, phase=PeerPhase.TRAINING
)


@cache
def identity(name: str) -> Identity:
    return Identity.load_or_create(Path(mkdtemp()) / name)


class OwnRecords:
    def compose_record(self, now: float, leaving: bool) -> PeerRecord:
        return replace(RECORD, time=now, phase=PeerPhase.LEAVING if leaving else PeerPhase.TRAINING)


@pytest.fixture
def roster() -> Roster:
    own = identity("own")
    size = SwarmSize(RUN, own.peer, Random(0))
    holders = Holders(own.peer, (Fragment(0, 0, 6, 100),), TokenLinks(64.0, 0.8))
    return Roster(RUN, own, SwarmConfig(), OwnRecords(), size, holders)


@pytest.fixture
def sharded(roster: Roster) -> Roster:
    roster.size = SwarmSize(RUN, roster.own.peer, Random(0), SwarmStart(500.0))
    assert roster.size.level == LEVEL
    return roster


def other() -> PeerId:
    return identity("other").peer


def sealed(record: PeerRecord = RECORD, expires: float = NOW + TTL, name: str = "other") -> bytes:
    return identity(name).seal(KEY, records.pack(record), expires)


def find(roster: Roster, value: bytes, now: float = NOW, peer: PeerId | None = None) -> list[RosterEffect]:
    return roster.handle(Found(KEY, {peer or other(): value}), now)


def left(effects: Sequence[RosterEffect]) -> list[str]:
    return [one.event.reason for one in effects if isinstance(one, Log) and isinstance(one.event, PeerLeftLine)]


def goodbyes(effects: Sequence[RosterEffect]) -> list[str]:
    return [one.event.peer for one in effects if isinstance(one, Log) and isinstance(one.event, GoodbyeLine)]


def unanswered(roster: Roster, reason: str = "unreachable", now: float = NOW) -> list[RosterEffect]:
    return roster.handle(AskFailed(PullTag(0, 1), other(), reason, 1.0), now)


def test_a_goodbye_that_is_read_after_questions_have_failed_is_told_once(roster: Roster) -> None:
    find(roster, sealed())
    assert left([*unanswered(roster), *unanswered(roster, now=NOW + 1)]) == ["silent"]
    leaving = replace(RECORD, time=NOW + 0.5, phase=PeerPhase.LEAVING)
    said = find(roster, sealed(leaving), NOW + 4)
    assert (goodbyes(said), left(said)) == ([other()], [])
    assert find(roster, sealed(leaving, NOW + TTL + 1), NOW + 8) == []


def test_a_goodbye_of_a_peer_that_we_never_knew_is_none_of_our_news(roster: Roster) -> None:
    assert find(roster, sealed(replace(RECORD, phase=PeerPhase.LEAVING))) == []


def test_a_peer_joins_with_its_record_and_where_it_listens(roster: Roster) -> None:
    learned, joined = find(roster, sealed())
    assert learned == Learn(other(), RECORD.addresses)
    profile = RECORD.profile
    assert joined == Log(PeerJoinedLine(peer=other(), device=profile.device, region=profile.region))
    assert roster.live[other()].record == RECORD


def test_the_same_record_again_says_nothing(roster: Roster) -> None:
    find(roster, sealed())
    assert find(roster, sealed(), NOW + 1) == []


def test_a_newer_record_replaces_the_older_one_and_not_the_other_way_round(roster: Roster) -> None:
    newer = replace(RECORD, time=NOW + 1, step=9)
    find(roster, sealed(newer))
    find(roster, sealed())
    assert roster.live[other()].record == newer


def test_a_peer_that_says_so_has_left_and_stays_away(roster: Roster) -> None:
    find(roster, sealed())
    assert left(find(roster, sealed(replace(RECORD, time=NOW + 5, phase=PeerPhase.LEAVING)), NOW + 5)) == ["left"]
    assert find(roster, sealed(replace(RECORD, time=NOW + 4)), NOW + 6) == []
    assert not roster.live


def test_a_goodbye_from_before_a_peer_came_back_is_old_whoever_passes_it_on(roster: Roster) -> None:
    goodbye = sealed(replace(RECORD, time=NOW + 5, phase=PeerPhase.LEAVING))
    back = sealed(replace(RECORD, time=NOW + 15))
    for value in (sealed(), goodbye, back):
        find(roster, value, NOW + 15)
    assert left(find(roster, goodbye, NOW + 16)) == []
    assert roster.sealed(other()) == back  # it is what we pass on
    assert other() in roster.live


def test_a_name_cannot_join_and_leave_many_times_a_second(roster: Roster) -> None:
    said = list[RosterEffect]()
    for number in range(200):
        at = NOW + number / 100
        said += find(
            roster, sealed(replace(RECORD, time=at, phase=PeerPhase.LEAVING if number % 2 else PeerPhase.TRAINING)), at
        )
    assert (len(left(said)), len(goodbyes(said))) == (1, 0)
    assert len(find(roster, sealed(replace(RECORD, time=NOW + 2 + REJOIN_S)), NOW + 2 + REJOIN_S)) == 2


def test_a_peer_that_was_never_there_does_not_leave(roster: Roster) -> None:
    assert find(roster, sealed(replace(RECORD, phase=PeerPhase.LEAVING))) == []


@pytest.mark.parametrize("reason", ["unreachable", "deadline", "cut"])
def test_two_unanswered_questions_in_a_row_and_it_is_gone(roster: Roster, reason: str) -> None:
    find(roster, sealed())
    assert left(unanswered(roster, reason)) == []
    assert left(unanswered(roster, reason, NOW + 1)) == ["silent"]
    assert not roster.live


def test_questions_that_were_under_way_together_tell_of_one_silence(roster: Roster) -> None:
    find(roster, sealed())
    for late_s in (0.0, 0.1, 0.9):
        assert left(unanswered(roster, "deadline", NOW + late_s)) == []
    assert left(unanswered(roster, "deadline", NOW + 1.9)) == ["silent"]


def test_a_clock_that_was_set_back_hides_no_silence(roster: Roster) -> None:
    find(roster, sealed())
    unanswered(roster, "deadline", NOW)
    assert left(unanswered(roster, "deadline", NOW - 3600)) == ["silent"]


def test_an_answer_between_two_silences_forgives_the_first(roster: Roster) -> None:
    find(roster, sealed())
    unanswered(roster)
    roster.handle(Answered(ProbeTag("ping"), other(), Envelope(Pong(1)), 0.1, 0.1, 1, 1), NOW)
    unanswered(roster)
    assert other() in roster.live


def test_a_bad_answer_is_no_silence(roster: Roster) -> None:
    find(roster, sealed())
    for _ in range(5):
        unanswered(roster, "digest")
    assert other() in roster.live


def test_a_renewal_does_not_forgive_a_silence(roster: Roster) -> None:
    find(roster, sealed())
    unanswered(roster)
    find(roster, sealed(replace(RECORD, time=NOW + 1)))
    assert left(unanswered(roster)) == ["silent"]


def test_a_silent_peer_comes_back_with_a_newer_record_only(roster: Roster) -> None:
    find(roster, sealed())
    unanswered(roster)
    unanswered(roster)
    assert find(roster, sealed(), NOW + 1) == []
    find(roster, sealed(replace(RECORD, time=NOW + 2)), NOW + 2)
    assert other() in roster.live


def test_a_record_that_is_not_renewed_expires(roster: Roster) -> None:
    find(roster, sealed())
    assert left(roster.handle(Woke(), NOW + TTL - 1)) == []
    assert left(roster.handle(Woke(), NOW + TTL)) == ["expired"]


def changed(record: bytes) -> bytes:
    """The bytes with one bit of the last one turned."""
    return record[:-1] + bytes([record[-1] ^ 1])


FORGERIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "signed by another": (lambda: sealed(name="forger"), "identity"),
    "for another key": (
        lambda: identity("other").seal("gpt-000000/peers", records.pack(RECORD), NOW + TTL),
        "signature",
    ),
    "changed": (lambda: changed(sealed()), "signature"),
    "garbage": (lambda: b"\xc1garbage", "garbage"),
    "empty": (lambda: b"", "garbage"),
    "expired": (lambda: sealed(expires=NOW - 1), "expired"),
    "for ever": (lambda: sealed(expires=NOW + 1e9), "expired"),
    "too large": (lambda: bytes(100_000), "oversize"),
    "of another run": (lambda: sealed(replace(RECORD, run="other-000000")), "run"),
    "no record": (lambda: identity("other").seal(KEY, b"\x80", NOW + TTL), "fields"),
    "garbage inside": (lambda: identity("other").seal(KEY, b"\xc1", NOW + TTL), "garbage"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_bad_record_is_counted_and_ignored(roster: Roster, forgery: str) -> None:
    make, reason = FORGERIES[forgery]
    assert find(roster, make()) == []
    assert (dict(roster.refused), dict(roster.live)) == ({reason: 1}, {})


def test_a_bad_record_among_good_ones_costs_only_itself(roster: Roster) -> None:
    roster.handle(Found(KEY, {other(): sealed(), "QmForged": sealed()}), NOW)
    assert list(roster.live) == [other()]


def test_records_of_another_key_are_not_read(roster: Roster) -> None:
    assert roster.handle(Found(f"{RUN}/plan", {other(): sealed()}), NOW) == []
    assert not roster.live


def test_we_are_not_on_our_own_roster(roster: Roster) -> None:
    assert find(roster, sealed(name="own"), peer=identity("own").peer) == []
    assert not roster.live


def test_our_record_is_renewed_in_time_and_says_when_it_expires(roster: Roster) -> None:
    def announced(now: float) -> list[Announce]:
        return [one for one in roster.handle(Woke(), now) if isinstance(one, Announce)]

    (first,) = announced(NOW)
    assert first.expires == NOW + TTL
    assert open_sealed(KEY, roster.own.peer, first.value, NOW)[1] == NOW + TTL
    assert announced(NOW + 19) == []
    assert len(announced(NOW + 20)) == 1
    assert announced(NOW + 21) == []
    roster.renew_soon(NOW + 22)
    assert len(announced(NOW + 22)) == 1


def test_a_record_of_a_clock_that_is_far_ahead_is_refused_so_that_its_peer_is_not_taken_for_a_partner(
    roster: Roster,
) -> None:
    """By that clock ours have expired: the peer would never answer us, and we would not know that we are alone."""
    hour = 3600.0
    assert find(roster, sealed(replace(RECORD, time=NOW + hour), NOW + hour + TTL)) == []
    assert roster.refused == {Reason.AHEAD: 1}
    assert find(roster, sealed(replace(RECORD, time=NOW + TTL), NOW + 2 * TTL)) != []


def of_copy(roster: Roster, now: float, written: float) -> list[RosterEffect]:
    """Finds a record under our own name that this peer has not written."""
    record = replace(RECORD, time=written, addresses=("/ip4/192.0.2.7/tcp/4001",))
    return find(roster, sealed(record, now + TTL + 1, "own"), now, identity("own").peer)


def errors(effects: Sequence[RosterEffect]) -> list[str]:
    return [one.event.reason for one in effects if isinstance(one, Log) and isinstance(one.event, ErrorLine)]


def test_a_peer_that_runs_with_a_copy_of_our_identity_is_told_of_once_while_it_is_there(roster: Roster) -> None:
    roster.handle(Woke(), NOW)
    assert errors(of_copy(roster, NOW + 10, NOW + 9)) == []
    assert roster.copy_warning(NOW + 10) == ""
    (said,) = errors(of_copy(roster, NOW + 30, NOW + 29))
    assert "another peer at /ip4/192.0.2.7/tcp/4001 uses a copy of this peer's identity" in said
    assert errors(of_copy(roster, NOW + 50, NOW + 49)) == []
    assert roster.copy_warning(NOW + 50) == said
    assert roster.copy_warning(NOW + 50 + 2 * TTL) == ""


def test_a_copy_that_keeps_running_is_written_to_the_journal_again_and_again(roster: Roster) -> None:
    """The page and the doctor take an old line for a trouble that is over."""
    roster.handle(Woke(), NOW)
    logged_at = [at for at in range(2, 1202, 4) if errors(of_copy(roster, NOW + at, NOW + at - 1))]
    assert logged_at == list(range(6, 1202, 60))


def test_records_of_a_start_before_are_no_copy_whichever_of_them_is_found(roster: Roster) -> None:
    roster.handle(Woke(), NOW)
    for written in (NOW - 20, NOW - 40, NOW):
        assert errors(of_copy(roster, NOW + 1, written)) == []
    assert roster.copy_warning(NOW + 1) == ""


def test_a_record_of_a_start_whose_clock_was_ahead_is_no_copy(roster: Roster) -> None:
    roster.handle(Woke(), NOW)
    for now in (NOW + 1, NOW + 5, NOW + 9):
        of_copy(roster, now, NOW + 30)
    assert roster.copy_warning(NOW + 9) == ""


def test_our_own_records_are_no_copy_and_neither_is_our_farewell(roster: Roster) -> None:
    effects = [one for step in range(9) for one in roster.handle(Woke(), NOW + 20 * step)] + roster.leave(NOW + 180)
    announced = [one for one in effects if isinstance(one, Announce)]
    for one in announced[-4:]:
        find(roster, one.value, NOW + 181, identity("own").peer)
    assert len(announced) == 10
    assert roster.copy_warning(NOW + 181) == ""


def test_a_record_of_ours_that_was_written_by_a_clock_ahead_is_outlived(roster: Roster) -> None:
    """A directory keeps the record that expires later: after the clock was set back it would keep the old one."""
    (announced,) = [one for one in roster.handle(Woke(), NOW) if isinstance(one, Announce)]
    old = sealed(replace(RECORD, time=NOW + 3600), NOW + 3600 + TTL, "own")
    find(roster, old, NOW + 1, identity("own").peer)
    (renewed,) = [one for one in roster.handle(Woke(), NOW + 1) if isinstance(one, Announce)]
    assert announced.expires < NOW + 3600 + TTL < renewed.expires


def test_a_record_that_outlives_one_of_a_clock_ahead_is_believed_as_long_as_any_other(roster: Roster) -> None:
    """Else who is gone again, to another time or for good, would be in the roster for an hour."""
    find(roster, sealed(RECORD, NOW + 3600 + TTL))
    roster.handle(Woke(), NOW + TTL - 0.1)
    assert other() in roster.live
    assert left(roster.handle(Woke(), NOW + TTL)) == ["expired"]


def test_it_looks_up_others_every_four_seconds_and_less_often_in_a_large_swarm(roster: Roster) -> None:
    def looks_up(now: float) -> bool:
        return Lookup(KEY) in roster.handle(Woke(), now)

    assert [looks_up(NOW + s) for s in (0, 3.9, 4, 7.9, 8)] == [True, False, True, False, True]


def test_leaving_is_announced(roster: Roster) -> None:
    (announced,) = roster.leave(NOW)
    assert isinstance(announced, Announce)
    body, _ = open_sealed(KEY, roster.own.peer, announced.value, NOW)
    assert records.unpack(body).phase == PeerPhase.LEAVING


# Records under several keys


def test_our_record_goes_to_our_own_shard_and_to_the_keys_that_sample_it(sharded: Roster) -> None:
    announced = [one for one in sharded.handle(Woke(), NOW) if isinstance(one, Announce)]
    assert [one.key for one in announced] == published(RUN, sharded.own.peer, LEVEL)
    for one in announced:
        assert NOW + TTL <= open_sealed(one.key, sharded.own.peer, one.value, NOW)[1] < NOW + TTL + 1


def test_a_peer_that_leaves_says_so_at_its_former_level_too(sharded: Roster) -> None:
    sharded.handle(Woke(), NOW)
    sharded.size.level += 1
    told = {one.key for one in sharded.leave(NOW + 1) if isinstance(one, Announce)}
    assert told >= {key_of(RUN, sharded.own.peer, level) for level in (LEVEL, LEVEL + 1)}


def test_the_record_that_a_peer_keeps_of_itself_is_signed_for_its_present_level(sharded: Roster) -> None:
    sharded.handle(Woke(), NOW)
    sharded.size.level += 1
    sharded.leave(NOW + 1)
    own = sharded.own.peer
    body, _ = open_sealed(key_of(RUN, own, LEVEL + 1), own, sharded.sealed(own), NOW + 1)
    assert records.unpack(body).phase == PeerPhase.LEAVING


def test_a_lookup_goes_to_our_own_shard_and_to_one_more_and_in_time_to_all(sharded: Roster) -> None:
    own, seen = key_of(RUN, sharded.own.peer, LEVEL), set[str]()
    for number in range(200):
        keys = [one.key for one in sharded.handle(Woke(), NOW + 4 * number) if isinstance(one, Lookup)]
        assert own in keys
        assert len(keys) == len(set(keys)) <= 2
        seen |= set(keys)
    assert seen >= {key(RUN, LEVEL, shard) for shard in range(2**LEVEL)}
    assert {level_of(RUN, one) for one in seen} == set(range(LEVEL + 1)), "and now and then a coarser level"


def test_a_key_with_thousands_of_names_makes_a_few_of_them_known_and_loses_none_that_was(roster: Roster) -> None:
    find(roster, sealed())
    many = {f"stranger{number}": b"forged" for number in range(4000)}
    roster.handle(Found(KEY, many | {other(): sealed(replace(RECORD, time=NOW + 1))}), NOW + 1)
    assert roster.refused.total() == MOST_NEW
    assert roster.live[other()].record.time == NOW + 1


def test_a_lookup_in_another_shard_of_a_large_swarm_reads_a_sample(sharded: Roster) -> None:
    own = key_of(RUN, sharded.own.peer, LEVEL)
    others = next(name for name in (key(RUN, LEVEL, shard) for shard in range(2)) if name != own)
    sharded.handle(Found(others, {f"stranger{number}": b"forged" for number in range(64)}), NOW)
    assert sharded.refused.total() == 64, "a peer that knows nobody reads all"
    sharded.live = {PeerId(f"known{number}"): RosterEntry(RECORD, NOW + TTL) for number in range(MERGE)}
    value = identity("other").seal(others, records.pack(RECORD), NOW + TTL)
    sharded.handle(Found(others, {f"new{number}": value for number in range(64)}), NOW)
    assert sharded.refused.total() == 64 + SAMPLED_NEW
    sharded.handle(Found(own, {f"near{number}": value for number in range(64)}), NOW)
    assert sharded.refused.total() == 64 + SAMPLED_NEW + 64


def test_a_record_lives_as_long_as_its_peer_renews_it_rarely(roster: Roster) -> None:
    find(roster, sealed(replace(RECORD, renew_s=100.0), NOW + 1000))
    assert roster.live[other()].expires == NOW + 300


def test_a_record_of_any_shard_is_read(sharded: Roster) -> None:
    shard = key_of(RUN, other(), LEVEL)
    value = identity("other").seal(shard, records.pack(RECORD), NOW + TTL)
    sharded.handle(Found(shard, {other(): value}), NOW)
    assert list(sharded.live) == [other()]


def test_a_record_under_the_wrong_shard_is_forged(sharded: Roster) -> None:
    right = key_of(RUN, other(), LEVEL)
    wrong = next(one for shard in range(2**LEVEL) if (one := key(RUN, LEVEL, shard)) != right)
    value = identity("other").seal(right, records.pack(RECORD), NOW + TTL)
    sharded.handle(Found(wrong, {other(): value}), NOW)
    assert (dict(sharded.refused), dict(sharded.live)) == ({"signature": 1}, {})


@pytest.mark.parametrize(("known", "again"), [(MERGE - 1, True), (MERGE, False)])
def test_a_newcomer_to_a_large_swarm_looks_again_soon_only_where_it_has_found_few(
    sharded: Roster, known: int, again: bool
) -> None:
    sharded.size.window_s = lambda: 120.0
    looked_up = [one.key for one in sharded.look_up(NOW) if isinstance(one, Lookup)]
    another = next(one for shard in range(2**LEVEL) if (one := key(RUN, LEVEL, shard)) not in looked_up)
    sharded.live |= {PeerId(f"peer{number}"): RosterEntry(RECORD, NOW + TTL) for number in range(known)}
    sharded.handle(Found(another, {}), NOW)
    assert any(isinstance(one, Lookup) for one in sharded.handle(Woke(), NOW + 5)) == again


def test_a_stranger_s_question_leads_to_no_lookup_where_nobody_knows_everybody(sharded: Roster) -> None:
    sharded.handle(Woke(), NOW)
    before = sharded.wake_at
    sharded.refresh_soon(PeerId("stranger"), NOW + 1)
    assert sharded.wake_at == before


def test_a_full_roster_keeps_those_that_it_knows_and_takes_no_others(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentral.peers.membership.roster.MAX_PEERS", 2)
    everyone = sorted(identity(name).peer for name in ("a", "b", "c"))
    by_peer = {str(identity(name).peer): sealed(name=name) for name in ("a", "b", "c")}
    roster.handle(Found(KEY, {peer: by_peer[peer] for peer in everyone[1:]}), NOW)
    roster.handle(Found(KEY, by_peer), NOW)
    roster.handle(Found(KEY, {everyone[0]: by_peer[everyone[0]]}), NOW)
    assert sorted(roster.live) == everyone[1:], "the newcomer's id comes first, and it does not help it"
    assert roster.refused[Reason.BUSY] == 1


def lookups(roster: Roster, seconds: float, names: int) -> int:
    """How many a minute's questions of strangers cause, one each tenth of a second, of so many names."""
    found, steps = 0, round(seconds * 10)
    for step in range(steps):
        now = NOW + step / 10
        if names:
            roster.refresh_soon(PeerId(f"stranger{step % names}"), now)
        found += sum(isinstance(one, Lookup) for one in roster.handle(Woke(), now))
    return found


@pytest.mark.parametrize("names", [1, 1000])
def test_strangers_do_not_have_us_read_all_records_as_often_as_they_ask(roster: Roster, names: int) -> None:
    """They made it 100 times a minute."""
    quiet = 60 / roster.size.refresh_s(0)
    assert lookups(roster, 60.0, names) <= 1.5 * quiet + 5


def test_a_newcomer_s_first_question_has_its_record_looked_up_soon(roster: Roster) -> None:
    roster.handle(Woke(), NOW)
    roster.refresh_soon(other(), NOW + 1.0)
    assert not [one for one in roster.handle(Woke(), NOW + 1.4) if isinstance(one, Lookup)]
    assert [one for one in roster.handle(Woke(), NOW + 1.5) if isinstance(one, Lookup)]


def test_one_name_that_asks_on_and_on_does_not_delay_the_next_newcomer(roster: Roster) -> None:
    lookups(roster, 60.0, 1)
    for second in range(60, 101, 4):
        roster.handle(Woke(), NOW + second)
    roster.refresh_soon(other(), NOW + 101.0)
    assert [one for one in roster.handle(Woke(), NOW + 101.5) if isinstance(one, Lookup)]


def test_a_peer_that_is_excluded_is_out_at_once(roster: Roster) -> None:
    find(roster, sealed())
    assert left(roster.exclude(other(), NOW)) == ["revoked"]
    assert not roster.knows(other())
    assert roster.exclude(other(), NOW) == []

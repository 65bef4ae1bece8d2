"""A newcomer is let into a round in its turn, and those that are let in and never report cost little."""

from decentral.comm.rounds import members
from decentral.comm.rounds.join_requests import (
    FIRST_REST_S,
    LET_IN_EACH,
    LONGEST_COMMON_REST_S,
    MAX_WAITING_NEWCOMERS,
    STILL_ASKS_S,
    WAITING_STRANGERS,
    JoinRequests,
)
from decentral.comm.wire.messages import MAX_MEMBERS, RoundMember, RoundReport
from decentral.core.ids import PeerId

HONEST = PeerId("Qmhonest")
STRANGERS = [PeerId(f"0key{number:02d}") for number in range(16)]


def member(peer: PeerId) -> RoundMember:
    return RoundMember(peer, 0, 4)


def names(requests: JoinRequests, now: float) -> list[PeerId]:
    return [PeerId(one.peer) for one in requests.to_let_in(now)]


def test_newcomers_are_let_in_in_the_order_in_which_they_asked() -> None:
    requests = JoinRequests()
    for peer in (HONEST, *STRANGERS, HONEST):
        requests.ask(member(peer), 0.0)
    assert names(requests, 1.0) == [HONEST, *STRANGERS[: LET_IN_EACH - 1]]


def test_low_names_that_never_report_do_not_keep_an_honest_newcomer_out() -> None:
    """They were first in each round, and it was let into none of a hundred."""
    requests, now, rounds, let_in = JoinRequests(), 0.0, 0, list[PeerId]()
    while HONEST not in let_in:
        rounds += 1
        requests.round_begins((), now)
        for peer in (*STRANGERS, HONEST):
            requests.ask(member(peer), now)
        let_in = names(requests, now)
        requests.round_begins(let_in, now)
        now += 6.0 if let_in else 1.0
        requests.round_over(let_in, [PeerId("A")], now)
        assert rounds < 150


def test_all_names_that_never_report_have_a_fifth_of_the_time_together() -> None:
    requests, now, lost_s = JoinRequests(), 0.0, 0.0
    for round in range(1000):
        requests.round_begins((), now)
        requests.ask(member(PeerId(f"name{round}")), now)
        let_in = names(requests, now)
        requests.round_begins(let_in, now)
        took_s = 5.0 if let_in else 0.5
        lost_s += took_s if let_in else 0.0
        now += took_s
        requests.round_over(let_in, [PeerId("A")], now)
    assert 0 < lost_s <= 0.21 * now


def test_one_that_did_not_report_rests_twice_as_long_each_time_until_it_reports() -> None:
    requests, now, rests = JoinRequests(), 0.0, []
    requests.round_over([], [HONEST], now)  # it has reported once, so only its own rest counts
    for _ in range(3):
        requests.round_over([HONEST], [], now)
        failed_at = now
        while not names(requests, now):
            now += 1.0
            requests.ask(member(HONEST), now)
        rests.append(now - failed_at)
    assert rests == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    requests.round_over([HONEST], [HONEST], now)
    assert names(requests, now) == [HONEST]


def test_a_peer_that_has_reported_before_need_not_wait_for_strangers_rests() -> None:
    requests = JoinRequests()
    requests.round_over([STRANGERS[0]], [HONEST], 1e3)
    requests.ask(member(HONEST), 1e3)
    requests.ask(member(STRANGERS[1]), 1e3)
    assert names(requests, 1e3) == [HONEST]
    requests.ask(member(STRANGERS[1]), 1e3 + LONGEST_COMMON_REST_S)
    assert names(requests, 1e3 + LONGEST_COMMON_REST_S) == [STRANGERS[1]]


def test_one_that_asks_no_more_is_let_in_no_more_and_nobody_loses_its_place_to_later_ones() -> None:
    requests = JoinRequests()
    requests.ask(member(HONEST), 0.0)
    assert names(requests, STILL_ASKS_S + 1.0) == []
    requests.ask(member(HONEST), 100.0)
    for number in range(2 * MAX_WAITING_NEWCOMERS):
        requests.ask(member(PeerId(f"name{number}")), 101.0)
    assert len(requests.waiting) == MAX_WAITING_NEWCOMERS
    assert names(requests, 102.0)[0] == HONEST


def test_newcomers_push_out_nobody_that_has_reported() -> None:
    present = [PeerId(f"Qm{number:03d}") for number in range(MAX_MEMBERS - 2)]
    reports = {peer: RoundReport("run", 7, member(peer), (), 0.0, (), ()) for peer in present}
    newcomers = tuple(map(member, STRANGERS[:5]))
    reports[present[0]] = RoundReport("run", 7, member(present[0]), (), 0.0, newcomers, ())
    found = [one.peer for one in members.next_members(reports)]
    assert len(found) == MAX_MEMBERS
    assert {*present} <= {*found}
    assert found == sorted(found)


def test_only_peers_with_a_record_are_let_in_and_the_others_leave_them_room() -> None:
    requests, records = JoinRequests(), {PeerId("known")}
    requests.knows = records.__contains__
    for number in range(2 * MAX_WAITING_NEWCOMERS):
        requests.ask(member(PeerId(f"name{number}")), 0.0)
    assert len(requests.waiting) == WAITING_STRANGERS
    assert requests.next_at is None
    requests.ask(member(PeerId("known")), 0.0)
    assert names(requests, 0.0) == ["known"]
    records.add(PeerId("name0"))
    assert names(requests, 0.0) == ["name0", "known"]

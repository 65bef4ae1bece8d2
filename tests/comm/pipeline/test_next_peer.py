"""Which next peer gets a micro-batch: turns and deadlines, offers and pauses, and trust after audits."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.pipeline.next_peer import (
    FAR_S,
    FEW,
    HALVED_S,
    HOP_DEADLINE_FLOOR_S,
    HOP_DEADLINE_TOP_S,
    LONGEST_PAUSE_S,
    LOOK_FLOOR_S,
    MOST_JUDGED,
    NO_ROUTES_S,
    ROUTE_SLACK,
    STATUS_S,
    UNKNOWN_S,
    Offers,
    PeerScheduler,
    Reputations,
    StrideScheduler,
    pause_s,
)
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ForwardRequest, Load, Offer, Refused
from decentral.comm.wire.transport import Ask, Asked, Reply
from decentral.core.ids import PeerId, RunId
from tests.comm.pipeline.route_world import RUN, World, cuts_of, layout

A, B, C, X = PeerId("A"), PeerId("B"), PeerId("C"), PeerId("X")
CUTS = cuts_of([100, 100, 100, 100])


# Turns and deadlines


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_turns_are_taken_as_often_as_their_cost_allows(costs: list[float]) -> None:
    stride: StrideScheduler[int] = StrideScheduler()
    taken = Counter(stride.choose(dict(enumerate(costs)))[0] for _ in range(2000))
    rates = [1 / cost for cost in costs]
    for index, rate in enumerate(rates):
        assert abs(taken[index] - 2000 * rate / sum(rates)) <= len(costs)


def test_a_choice_that_was_expensive_is_taken_again_soon_after_it_is_not() -> None:
    stride: StrideScheduler[int] = StrideScheduler()
    for _ in range(5):
        stride.choose({0: 1.0, 1: 1000.0})
    stride.paid[1] = 5000.0
    assert 1 in [stride.choose({0: 1.0, 1: 1.0})[0] for _ in range(3)]


def test_a_missed_deadline_halves_a_peers_turns() -> None:
    scheduler = PeerScheduler({A: 1.0, B: 1.0})
    scheduler.missed(B)
    taken = Counter(scheduler.choose(2, {A: 0.0, B: 0.0}, {A: 0.0, B: 0.0})[0] for _ in range(300))
    assert taken[A] == pytest.approx(2 * taken[B], abs=3)


def test_a_peer_that_was_not_timed_yet_is_judged_by_its_link() -> None:
    scheduler = PeerScheduler({A: 1.0})
    taken = Counter(scheduler.choose(2, {A: 0.0, B: 0.0}, {A: 0.1, B: 2.0})[0] for _ in range(300))
    assert taken[A] == pytest.approx(2 * taken[B], abs=3)
    far = PeerScheduler({A: 1.0})
    taken = Counter(far.choose(2, {A: 0.0, B: 0.0}, {A: 0.1, B: 1000.0})[0] for _ in range(300))
    assert taken[A] == pytest.approx(4 * taken[B], abs=3), "its link may be faster by now"


def test_with_exact_gradients_peers_behind_slow_links_get_nothing_and_slow_devices_do() -> None:
    scheduler = PeerScheduler({A: 1.0, B: 10.0, C: 10.0})
    speeds = {A: 10.0, B: 10.0, C: 1.0, X: 10.0}
    assert scheduler.near(speeds, 0.0) == [A, C, X], "X was not timed yet"
    assert scheduler.near(speeds, FAR_S) == [B], "it is timed again"
    assert scheduler.near(speeds, 2 * FAR_S) == [A, C, X]
    assert scheduler.near(speeds, 3 * FAR_S) == [B]
    scheduler.served(B, 1.0)
    assert scheduler.near(speeds, 3 * FAR_S) == [A, B, C, X]


def test_a_peer_that_claims_a_false_speed_does_not_get_the_micro_batches_of_the_others() -> None:
    seconds = {A: 1.0, B: 1.2, C: 0.9}
    assert PeerScheduler(seconds).near({A: 10.0, B: 10.0, C: 1e-9}, 0.0) == [A, B, C]
    assert PeerScheduler(seconds).near({A: 10.0, B: 10.0, C: 1e12}, 0.0) == [A, B]
    assert PeerScheduler(seconds).near({A: 0.0, B: 10.0, C: 1e12}, 0.0) == [A, B], "the speed of A is not known"
    assert PeerScheduler({B: 1.2, C: 0.9}).near({B: 10.0, C: 1e-9}, 0.0) == [B, C], "nobody can tell who lies"


def test_missed_deadlines_never_shut_a_peer_out() -> None:
    scheduler = PeerScheduler({A: 1.0, B: 1.0})
    for _ in range(50):
        scheduler.missed(B)
    assert B in [scheduler.choose(2, {A: 0.0, B: 0.0}, {A: 0.0, B: 0.0})[0] for _ in range(40)]


WAIT_S = 3.0  # for the answer to the question whether it is there


def test_a_peer_that_has_failed_is_suspended_ever_longer_and_is_then_tried_with_one_micro_batch() -> None:
    scheduler, suspended_s = PeerScheduler({A: 10.0, B: 10.0}), list[float]()
    patience_s, now = scheduler.deadline_s(B, 0.0), 0.0
    for _ in range(6):
        scheduler.failed(B, now)
        scheduler.failed(B, now + 0.1)  # one more micro-batch that it had at the same time
        suspended_s.append(scheduler.suspended[B].until - now)
        assert scheduler.askable([A, B], now + 0.1) == [A]
        now = scheduler.suspended[B].until
        assert scheduler.askable([A, B], now) == [A], "it has to say first that it is there"
        assert scheduler.absent([A, B], WAIT_S, now) == [B]
        scheduler.heard_from(B, True, now)
        assert scheduler.askable([A, B], now) == [A, B]
        scheduler.asked(B, now)
        assert scheduler.askable([A, B], now) == [A]
    assert suspended_s == [4.0, 16.0, 64.0, 256.0, 512.0, 512.0]
    assert scheduler.deadline_s(B, 0.0) == patience_s


def test_a_peer_that_answers_after_failures_is_trusted_again_answer_by_answer() -> None:
    scheduler = PeerScheduler({A: 10.0, B: 10.0})
    for now in (0.0, 4.0):
        scheduler.failed(B, now)
    scheduler.heard_from(B, True, 20.0)
    for _ in range(5):
        scheduler.asked(B, 20.0)
        assert scheduler.askable([A, B], 20.0) == [A], "one at a time"
        scheduler.served(B, 10.0)
        assert scheduler.askable([A, B], 20.0) == [A, B]
    scheduler.asked(B, 20.0)
    assert scheduler.askable([A, B], 20.0) == [A, B], "as many as any other"


def test_a_peer_that_answers_one_and_keeps_the_next_gets_ever_less() -> None:
    """One answer made up for a failure: with exact gradients it kept a third of the others' time for good."""
    scheduler, now, suspended_s = PeerScheduler({A: 10.0, B: 10.0}), 0.0, list[float]()
    for _ in range(5):
        scheduler.failed(B, now)
        suspended_s.append(scheduler.suspended[B].until - now)
        now = scheduler.suspended[B].until
        scheduler.heard_from(B, True, now)
        scheduler.asked(B, now)
        scheduler.served(B, 10.0)
        scheduler.asked(B, now)
    assert suspended_s == [4.0, 8.0, 16.0, 32.0, 64.0]


def test_a_peer_that_is_away_for_long_is_asked_each_minute_whether_it_is_there() -> None:
    scheduler, now = PeerScheduler({A: 10.0, B: 10.0}), 0.0
    scheduler.failed(B, now)
    for _ in range(8):
        now = scheduler.suspended[B].until
        assert scheduler.absent([A, B], WAIT_S, now) == [B]
        scheduler.heard_from(B, False, now)
    assert scheduler.suspended[B].until - now == 64.0


def test_a_peer_that_stays_silent_is_asked_ever_more_rarely_and_gets_no_micro_batch() -> None:
    scheduler, asked_at = PeerScheduler({A: 10.0, B: 10.0}), list[float]()
    scheduler.failed(B, 0.0)
    for now in range(1, 100):
        assert scheduler.askable([A, B], float(now)) == [A]
        if scheduler.absent([A, B], WAIT_S, float(now)):
            asked_at.append(now)
            assert scheduler.absent([A, B], WAIT_S, float(now)) == [], "one question at a time"
            scheduler.heard_from(B, False, now + 0.5)
    assert asked_at == [4, 13, 30, 63]


def test_where_all_have_failed_all_are_asked() -> None:
    scheduler = PeerScheduler({A: 10.0, B: 10.0})
    scheduler.failed(A, 1.0)
    scheduler.failed(B, 1.0)
    assert scheduler.askable([A, B], 1.5) == [A, B]


def test_what_a_peer_says_of_its_queue_counts_where_it_explains_how_long_it_has_taken() -> None:
    scheduler = PeerScheduler({A: 1.0, B: 1.0, C: 9.0})
    run = RunId("gpt-3fa2c1")
    assert scheduler.believable_wait_s(A, Load(run, 0.0, 0.0, 4)) == 0.0
    assert scheduler.believable_wait_s(C, Load(run, 0.0, 0.0, 4)) == 9.0
    assert scheduler.believable_wait_s(C, Load(run, 0.5, 6.0, 4)) == 0.5, "its device is slow, and it says so"
    assert scheduler.believable_wait_s(C, Load(run, 20.0, 0.0, 4)) == 20.0


def test_the_routing_weights_decide_among_equally_fast_peers() -> None:
    scheduler = PeerScheduler({A: 1.0, B: 1.0, C: 1.0})
    taken = Counter(scheduler.choose(2, {A: 3.0, B: 1.0, C: 0.0}, dict.fromkeys((A, B, C), 0.0))[0] for _ in range(800))
    assert taken[A] == pytest.approx(3 * taken[B], rel=0.05)
    assert 0 < taken[C] < 0.05 * taken[A]


def test_deadlines_have_a_floor_and_a_top() -> None:
    scheduler = PeerScheduler({A: 0.001, B: 100.0})
    assert scheduler.deadline_s(A, 0.0) == HOP_DEADLINE_FLOOR_S
    scheduler.seconds[B] = 1000.0
    assert scheduler.deadline_s(B, 0.0) == HOP_DEADLINE_TOP_S


def test_a_first_deadline_goes_by_what_the_devices_say_and_later_ones_by_what_others_took() -> None:
    scheduler = PeerScheduler()
    assert scheduler.deadline_s(A, 0.0) == UNKNOWN_S
    assert scheduler.deadline_s(A, 50.0) == ROUTE_SLACK * 50.0
    scheduler.served(B, 20.0)
    assert scheduler.deadline_s(A, 5.0) == ROUTE_SLACK * 20.0
    assert scheduler.deadline_s(A, 50.0) == ROUTE_SLACK * 50.0, "its link is slower"


def test_a_peer_is_asked_whether_it_still_computes_before_its_deadline() -> None:
    scheduler = PeerScheduler()
    assert scheduler.look_s(A, 0.0) == scheduler.deadline_s(A, 0.0), "its first micro-batch may take long"
    assert scheduler.status_s(A) == STATUS_S
    for seconds, look_s, status_s in ((0.1, LOOK_FLOOR_S, LOOK_FLOOR_S), (0.7, 1.4, 1.4), (60.0, 120.0, STATUS_S)):
        scheduler.seconds[A] = seconds
        assert (scheduler.look_s(A, 0.0), scheduler.status_s(A)) == (look_s, status_s)
        assert look_s < scheduler.deadline_s(A, 0.0)
    scheduler.seconds[A] = HOP_DEADLINE_TOP_S
    assert scheduler.look_s(A, 0.0) == HOP_DEADLINE_TOP_S


# Offers, and pauses where all are busy


def load(wait_s: float, seconds: float, last: int = 4) -> Load:
    return Load(RUN, wait_s, seconds, last)


def chosen(
    first: Load | None,
    second: Load | None,
    parts: tuple[float, float] = (0.5, 0.5),
    links_s: tuple[float, float] = (0.0, 0.0),
) -> PeerId | None:
    offers = Offers({A, B})
    offers.answered(A, first, parts[0], links_s[0])
    assert offers.asked == {B}
    offers.answered(B, second, parts[1], links_s[1])
    return offers.best


def test_the_one_where_less_waits_is_chosen() -> None:
    assert chosen(load(3.0, 1.0), load(1.0, 1.0)) == B


def test_a_near_one_goes_before_one_behind_a_slow_link() -> None:
    assert chosen(load(0.0, 1.0), load(1.0, 1.0), links_s=(5.0, 0.1)) == B


def test_a_slow_device_that_idles_goes_before_a_fast_one_with_a_queue() -> None:
    assert chosen(load(2.0, 1.0), load(0.0, 4.0)) == B


def test_of_two_that_idle_the_one_that_takes_it_farther_is_chosen() -> None:
    assert chosen(load(0.0, 1.0), load(0.0, 2.0), (0.1, 0.4)) == B


def test_a_peer_that_refuses_or_is_gone_is_not_chosen() -> None:
    assert chosen(None, load(9.0, 1.0)) == B
    assert chosen(None, None) is None


def test_pauses_grow_with_refusals_up_to_what_an_execution_takes() -> None:
    pauses = [pause_s(refusals, 60.0) for refusals in range(0, 120, 6)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60.0
    assert pause_s(1000, 0.1) == LONGEST_PAUSE_S


def many(seconds: float = 1.0) -> World:
    """One origin peer, and more ends than it sends to without a question; one of them is busy with others' work."""
    world = World(CUTS)
    world.add("S", 0, 2, seconds=seconds)
    for number in range(FEW + 2):
        world.add(f"E{number}", 2, 4, seconds=seconds)
    return world


def test_where_many_could_be_next_activations_go_to_one_that_was_asked_first() -> None:
    world = many()
    asked: list[tuple[str, PeerId]] = []

    def seen(now: float, ask: Ask) -> bool:
        if isinstance(ask.envelope.message, Offer | ForwardRequest):
            asked.append((type(ask.envelope.message).__name__, ask.to))
        return False

    world.loses = seen
    world.start()
    world.run(20.0)
    assert world.peers[PeerId("S")].routes.completed > 20
    sent = [to for kind, to in asked if kind == "ForwardRequest"]
    offers = [to for kind, to in asked if kind == "Offer"]
    assert set(sent) <= set(offers)
    assert len(offers) >= (FEW + 2) * len(sent)  # each holder gets an offer, as there are so few
    assert len(set(sent)) == FEW + 2  # all ends get their share


def test_a_peer_without_memory_says_so_before_anything_is_sent() -> None:
    world = World(CUTS)
    end = world.add("E", 2, 4, capacity=2)
    world.start()
    for number in range(2):
        request = ForwardRequest(RUN, "S", number, 2, 1, 5.0, 20.0, layout(2, 1))
        end.routes.handle(Asked(number, PeerId("M"), Envelope(request, bytes(20))), 1.0)
    (reply,) = end.routes.handle(Asked(7, PeerId("M"), Envelope(Offer(RUN, 2, 1))), 1.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.message == Refused("busy")
    (reply,) = end.routes.handle(Asked(8, PeerId("M"), Envelope(Offer(RUN, 1, 1))), 1.0)
    assert isinstance(reply, Reply)
    assert reply.envelope.message == Refused("span")


# Trust


def after_wrong_answers(count: int, share: float = 1.0) -> Reputations:
    known = Reputations()
    for _ in range(count):
        known.was_wrong(X, share, 0.0)
    return known


def test_a_peer_that_was_never_audited_has_all_its_routes_and_is_audited_at_once() -> None:
    assert (Reputations().weight(X, 0.0), Reputations().interval(X)) == (1.0, 1.0)


def test_right_answers_make_audits_rarer_and_a_wrong_one_frequent_again() -> None:
    known = Reputations()
    for _ in range(3):
        known.was_right(X)
    assert known.interval(X) == 8
    known.was_wrong(X, 1.0, 0.0)
    assert known.interval(X) == 1


def test_a_wrong_answer_costs_routes_and_two_of_them_all() -> None:
    assert after_wrong_answers(1).weight(X, 0.0) == 0.25
    assert after_wrong_answers(2).weight(X, 0.0) == 0.0


def test_an_answer_of_two_hops_counts_half_against_the_first() -> None:
    assert after_wrong_answers(1, 0.5).weight(X, 0.0) == 0.5
    assert after_wrong_answers(3, 0.5).weight(X, 0.0) > 0.0
    assert after_wrong_answers(4, 0.5).weight(X, 0.0) == 0.0


def test_half_of_a_wrong_answer_is_forgotten_in_its_time() -> None:
    assert after_wrong_answers(1).weight(X, HALVED_S) == pytest.approx(0.5)


def test_a_peer_without_routes_gets_some_again_and_then_loses_them_for_twice_as_long() -> None:
    known = after_wrong_answers(2)
    assert known.weight(X, NO_ROUTES_S - 1) == 0.0
    assert 0.2 < known.weight(X, NO_ROUTES_S) < 0.3
    known.was_wrong(X, 1.0, NO_ROUTES_S)
    assert known.weight(X, 3 * NO_ROUTES_S - 1) == 0.0
    assert known.weight(X, 3 * NO_ROUTES_S) > 0.0


def test_reputations_are_kept_of_so_many_peers_and_no_more() -> None:
    known = Reputations()
    for number in range(2 * MOST_JUDGED):
        known.was_right(PeerId(f"P{number}"))
    assert len(known.by_peer) == MOST_JUDGED

"""How many micro-batches are under way, and which next peer gets one."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.pipeline.pacing import (
    HOP_DEADLINE_FLOOR_S,
    HOP_DEADLINE_TOP_S,
    LOOK_FLOOR_S,
    MOST_ROUTES,
    ROUTE_SLACK,
    STATUS_S,
    UNKNOWN_S,
    MicroBatchWindow,
    PeerScheduler,
    StrideScheduler,
    budget_s,
)
from decentral.comm.wire.messages import MAX_ROUTE_S, Load
from decentral.core.ids import PeerId, RunId

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")


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
    taken = Counter(scheduler.choose(2, {A: 0.0, B: 0.0})[0] for _ in range(300))
    assert taken[A] == pytest.approx(2 * taken[B], abs=3)


def test_missed_deadlines_never_shut_a_peer_out() -> None:
    scheduler = PeerScheduler({A: 1.0, B: 1.0})
    for _ in range(50):
        scheduler.missed(B)
    assert B in [scheduler.choose(2, {A: 0.0, B: 0.0})[0] for _ in range(40)]


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
    taken = Counter(scheduler.choose(2, {A: 3.0, B: 1.0, C: 0.0})[0] for _ in range(800))
    assert taken[A] == pytest.approx(3 * taken[B], rel=0.05)
    assert 0 < taken[C] < 0.05 * taken[A]


def test_deadlines_have_a_floor_and_a_top() -> None:
    scheduler = PeerScheduler({A: 0.001, B: 100.0})
    assert scheduler.deadline_s(A, 0.0) == HOP_DEADLINE_FLOOR_S
    scheduler.seconds[B] = 1000.0
    assert scheduler.deadline_s(B, 0.0) == HOP_DEADLINE_TOP_S
    assert budget_s(None) == budget_s(1e9) == MAX_ROUTE_S
    assert budget_s(None, guess_s=0.1) == UNKNOWN_S
    assert UNKNOWN_S < budget_s(None, guess_s=10.0) < MAX_ROUTE_S


def pipeline(window: MicroBatchWindow, base_s: float, service_s: float, completions: int, most: int = 32) -> float:
    """Micro-batches through one queue: how busy its device was, as a part of the time."""
    free, starts, busy = 0.0, [0.0] * window.size, 0.0
    now = 0.0
    for _ in range(completions):
        started = starts.pop(0)
        free = max(free, started + base_s - service_s) + service_s
        busy += service_s
        now = free
        window.done(now - started, (A,), most)
        while len(starts) < window.size:
            starts.append(now)
    return busy / now


@pytest.mark.parametrize("base_s", [0.2, 1.0])
def test_the_window_keeps_a_device_busy_and_its_queue_short(base_s: float) -> None:
    window = MicroBatchWindow()
    assert pipeline(window, base_s, 0.1, 600) > 0.9
    assert window.size <= base_s / 0.1 + 8


def test_the_window_never_exceeds_what_the_memory_takes() -> None:
    window = MicroBatchWindow()
    pipeline(window, 5.0, 0.1, 200, most=3)
    assert window.size == 3


def test_where_hardly_a_route_comes_twice_a_new_one_is_measured_by_the_others() -> None:
    window = MicroBatchWindow()
    for number in range(MOST_ROUTES):
        window.done(1.0, (PeerId(f"P{number}"),), 100)
    size = window.size
    for number in range(20 * size):
        window.done(3.0, (PeerId(f"Q{number}"),), 100)
    assert window.size < size  # two thirds of the time are waiting, though no route was seen before


def test_a_window_doubles_until_something_waits_and_then_grows_no_more() -> None:
    window = MicroBatchWindow(size=4)
    for _ in range(4):
        window.done(1.0, (A, B), 64)
    assert window.size == 8
    for _ in range(40):
        window.done(3.0, (A, B), 64)
    assert not window.starting
    assert window.size <= 12


def test_the_more_devices_are_on_the_way_the_more_may_wait() -> None:
    sizes = []
    for route in ((A,), (A, B, C, PeerId("D"), PeerId("E"))):
        window = MicroBatchWindow()
        window.done(1.0, route, 64)
        for _ in range(400):
            window.done(1.0 + window.size / 8, route, 64)  # each that waits costs an eighth of a second
        sizes.append(window.size)
    assert sizes[0] < sizes[1]


def test_a_first_deadline_goes_by_what_the_devices_say_and_later_ones_by_what_others_took() -> None:
    scheduler = PeerScheduler()
    assert scheduler.deadline_s(A, 0.0) == UNKNOWN_S
    assert scheduler.deadline_s(A, 50.0) == ROUTE_SLACK * 50.0
    scheduler.served(B, 20.0)
    assert scheduler.deadline_s(A, 50.0) == ROUTE_SLACK * 20.0


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

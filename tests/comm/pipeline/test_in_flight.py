"""How many micro-batches of our own are under way, and for how long each is tried."""

import pytest

from decentral.comm.pipeline.in_flight import (
    LEAN,
    MOST_ROUTES,
    InFlightLimit,
    budget_s,
)
from decentral.comm.pipeline.next_peer import UNKNOWN_S
from decentral.comm.wire.messages import MAX_ROUTE_S
from decentral.core.ids import PeerId

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")


def pipeline(limit: InFlightLimit, base_s: float, service_s: float, completions: int, most: int = 32) -> float:
    """Micro-batches through one queue: how busy its device was, as a part of the time."""
    free, starts, busy = 0.0, [0.0] * limit.size, 0.0
    now = 0.0
    for _ in range(completions):
        started = starts.pop(0)
        free = max(free, started + base_s - service_s) + service_s
        busy += service_s
        now = free
        limit.done(now - started, (A,), most)
        while len(starts) < limit.size:
            starts.append(now)
    return busy / now


@pytest.mark.parametrize("base_s", [0.2, 1.0])
def test_the_window_keeps_a_device_busy_and_its_queue_short(base_s: float) -> None:
    limit = InFlightLimit()
    assert pipeline(limit, base_s, 0.1, 600) > 0.9
    assert limit.size <= base_s / 0.1 + 8


def test_the_window_never_exceeds_what_the_memory_takes() -> None:
    limit = InFlightLimit()
    pipeline(limit, 5.0, 0.1, 200, most=3)
    assert limit.size == 3


def test_each_device_of_a_route_keeps_a_micro_batch_however_long_they_wait() -> None:
    """They may wait for the steps of other origin peers, which a smaller limit does not hasten."""
    limit = InFlightLimit(LEAN)
    limit.done(1.0, (A, B), 64)
    for _ in range(30):
        limit.done(9.0, (A, B), 64)
    assert limit.size == 3


def test_where_hardly_a_route_comes_twice_a_new_one_is_measured_by_the_others() -> None:
    limit = InFlightLimit()
    for number in range(MOST_ROUTES):
        limit.done(1.0, (PeerId(f"P{number}"),), 100)
    size = limit.size
    for number in range(20 * size):
        limit.done(3.0, (PeerId(f"Q{number}"),), 100)
    assert limit.size < size  # two thirds of the time are waiting, though no route was seen before


def test_a_window_doubles_until_something_waits_and_then_grows_no_more() -> None:
    limit = InFlightLimit(size=4)
    for _ in range(4):
        limit.done(1.0, (A, B), 64)
    assert limit.size == 8
    for _ in range(40):
        limit.done(3.0, (A, B), 64)
    assert not limit.starting
    assert limit.size <= 12


def test_the_more_devices_are_on_the_way_the_more_may_wait() -> None:
    sizes = []
    for route in ((A,), (A, B, C, PeerId("D"), PeerId("E"))):
        limit = InFlightLimit()
        limit.done(1.0, route, 64)
        for _ in range(400):
            limit.done(1.0 + limit.size / 8, route, 64)  # each that waits costs an eighth of a second
        sizes.append(limit.size)
    assert sizes[0] < sizes[1]


def test_a_micro_batch_s_time_goes_by_what_others_took_or_by_the_devices_speeds() -> None:
    assert budget_s(None) == budget_s(1e9) == MAX_ROUTE_S
    assert budget_s(None, guess_s=0.1) == UNKNOWN_S
    assert UNKNOWN_S < budget_s(None, guess_s=10.0) < MAX_ROUTE_S
    assert budget_s(2.0, late=3) == 8 * budget_s(2.0)


def test_each_time_that_micro_batches_run_out_of_time_later_ones_get_twice_as_long() -> None:
    limit = InFlightLimit()
    first_s = limit.budget_s(10.0)
    limit.ran_out(started_at=0.0, now=first_s)
    limit.ran_out(started_at=1.0, now=first_s + 1.0)  # it had the same limit
    assert limit.budget_s(10.0) == 2 * first_s
    limit.ran_out(started_at=first_s, now=3 * first_s)
    assert limit.budget_s(10.0) == 4 * first_s
    limit.done(1.0, (A,), 8)
    assert limit.budget_s() == budget_s(1.0)

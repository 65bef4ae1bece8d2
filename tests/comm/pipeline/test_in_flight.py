"""How many micro-batches of our own are under way, and for how long each is tried."""

import pytest

from decentral.comm.pipeline.next_peer import UNKNOWN_S
from decentral.comm.pipeline.window import (
    LEAN,
    MOST_ROUTES,
    MicroBatchWindow,
    budget_s,
)
from decentral.comm.wire.messages import MAX_ROUTE_S
from decentral.core.ids import PeerId

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")


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


def test_each_device_of_a_route_keeps_a_micro_batch_however_long_they_wait() -> None:
    """They may wait for the steps of other origin peers, which a smaller window does not hasten."""
    window = MicroBatchWindow(LEAN)
    window.done(1.0, (A, B), 64)
    for _ in range(30):
        window.done(9.0, (A, B), 64)
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


def test_a_micro_batch_s_time_goes_by_what_others_took_or_by_the_devices_speeds() -> None:
    assert budget_s(None) == budget_s(1e9) == MAX_ROUTE_S
    assert budget_s(None, guess_s=0.1) == UNKNOWN_S
    assert UNKNOWN_S < budget_s(None, guess_s=10.0) < MAX_ROUTE_S
    assert budget_s(2.0, late=3) == 8 * budget_s(2.0)


def test_each_time_that_micro_batches_run_out_of_time_later_ones_get_twice_as_long() -> None:
    window = MicroBatchWindow()
    first_s = window.budget_s(10.0)
    window.ran_out(started_at=0.0, now=first_s)
    window.ran_out(started_at=1.0, now=first_s + 1.0)  # it had the same limit
    assert window.budget_s(10.0) == 2 * first_s
    window.ran_out(started_at=first_s, now=3 * first_s)
    assert window.budget_s(10.0) == 4 * first_s
    window.done(1.0, (A,), 8)
    assert window.budget_s() == budget_s(1.0)

"""A search is due after a change of the swarm, a pause, and a random back-off."""

from dataclasses import replace
from random import Random

import pytest

from decentral.core.ids import PeerId
from decentral.scheduler.placement.evaluate import TrainingPeer
from decentral.scheduler.placement.plans import (
    MOST_PAUSE_S,
    NEWCOMER_PAUSE_S,
    PLAN_BACKOFF_S,
    PLAN_PAUSE_S,
    REPLAN_REST_S,
    SEARCH_AGAIN_S,
    STUCK_AGAIN_S,
    SearchSchedule,
)

A, B, C = (PeerId(name) for name in "ABC")
MEMBER = TrainingPeer(range(0, 2), 20, 100.0)
PAIR = {A: MEMBER, B: MEMBER}
SLOWER = {A: replace(MEMBER, tokens_per_s=50.0, changed=9.0), B: MEMBER}


def schedule() -> SearchSchedule:
    search = SearchSchedule(Random(0))
    search.observe(PAIR, 0.0)
    return search


def test_without_a_change_no_search_is_due() -> None:
    search = schedule()
    search.observe({A: replace(MEMBER, tokens_per_s=120.0), B: MEMBER}, 100.0)
    assert (search.at, search.change) == (None, "")


@pytest.mark.parametrize(
    ("members", "change", "pause_s"),
    [
        pytest.param({A: MEMBER}, "1 gone", PLAN_PAUSE_S, id="gone"),
        pytest.param({**PAIR, C: MEMBER}, "1 new", NEWCOMER_PAUSE_S, id="new"),
        pytest.param(SLOWER, "1 faster or slower", PLAN_PAUSE_S, id="slower"),
    ],
)
def test_a_change_leads_to_a_search_after_its_pause(
    members: dict[PeerId, TrainingPeer], change: str, pause_s: float
) -> None:
    search = schedule()
    search.observe(members, 10.0)
    assert search.at is not None
    assert 10.0 + pause_s <= search.at <= 10.0 + pause_s + PLAN_BACKOFF_S
    assert search.change == change
    assert not search.is_due(search.at - 0.1)
    assert search.is_due(search.at)


def test_a_swarm_that_goes_on_changing_postpones_the_search_but_not_for_ever() -> None:
    search, members = schedule(), dict(SLOWER)
    search.observe(members, 10.0)
    for second in range(30):
        members = {**members, B: replace(MEMBER, tokens_per_s=100.0 + 50.0 * (second % 2))}
        search.observe(members, 10.0 + second)
    assert search.at is not None
    assert 10.0 + MOST_PAUSE_S <= search.at <= 10.0 + MOST_PAUSE_S + PLAN_BACKOFF_S


def test_after_a_plan_was_adopted_speeds_alone_lead_to_no_search_for_a_while() -> None:
    search = schedule()
    search.adopted(PAIR, 10.0, ours=True)
    search.observe(SLOWER, 10.0 + REPLAN_REST_S - 1)
    assert search.at is None
    search.observe(SLOWER, 10.0 + REPLAN_REST_S)
    assert search.at is not None


def test_an_evaluation_tells_the_change_that_led_to_it_once() -> None:
    search = schedule()
    search.observe(SLOWER, 10.0)
    assert search.begin(SLOWER) == "1 faster or slower"
    assert (search.at, search.change) == (None, "")


def test_a_stuck_swarm_is_searched_soon_and_again_as_soon_as_a_peer_joins() -> None:
    """The last of six peers that all were needed joined just after a search, and the next one came 20 s later."""
    search = schedule()
    for now, members, due in ((10.0, PAIR, True), (12.0, PAIR, False), (13.0, {**PAIR, C: MEMBER}, True)):
        search.hasten(members, now)
        latest = now + PLAN_PAUSE_S + PLAN_BACKOFF_S
        assert (search.at is not None and search.at <= latest) is due
        search.begin(members)
    search.hasten({**PAIR, C: MEMBER}, 13.0 + STUCK_AGAIN_S)
    assert search.at is not None


def test_peers_that_follow_anothers_plan_search_once_more() -> None:
    """Six peers followed a plan of 190 tokens/s for good, as the one search among 211 had missed those."""
    search = schedule()
    search.adopted(PAIR, 10.0, ours=False)
    assert not search.is_due(10.0 + REPLAN_REST_S)
    search.begin(PAIR, searches=False)
    assert search.is_due(10.0 + REPLAN_REST_S + SEARCH_AGAIN_S)
    search.begin(PAIR)
    assert not search.is_due(10.0 + REPLAN_REST_S + SEARCH_AGAIN_S)
    search.adopted(PAIR, 20.0, ours=True)
    assert not search.is_due(20.0 + REPLAN_REST_S + SEARCH_AGAIN_S)


def test_few_peers_of_a_large_swarm_search_once_more() -> None:
    search, again = schedule(), 0
    crowd = {PeerId(f"{number:04d}"): MEMBER for number in range(100)}
    for _ in range(1000):
        search.adopted(crowd, 10.0, ours=False)
        again += search.again_at is not None
    assert 30 <= again <= 90

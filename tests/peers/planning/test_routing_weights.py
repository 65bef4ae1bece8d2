"""Routing weights follow from what others publish, so no figure of theirs ends a peer that solves for them."""

import random

import pytest

from decentral.core.jobs import Fragment
from decentral.peers.planning import routing_weights
from decentral.peers.planning.routing_weights import rounded, solve

CUTS = tuple(Fragment(index, index, index + 1, 1000) for index in range(4))


def test_a_span_without_speed_carries_nothing_and_a_span_with_some_carries_all() -> None:
    small = (Fragment(0, 0, 1, 10**9), Fragment(1, 1, 2, 1))
    assert solve(small, {(0, 1): 100.0, (1, 2): 0.0}, (0, 1)).tokens_per_s == 0
    found = solve(CUTS, {(0, 2): 100.0, (2, 3): 0.0, (2, 4): 80.0}, (0, 2))
    assert set(found.nexts[2]) == {(2, 4)}


def test_speeds_of_any_size_have_routing_weights_or_none() -> None:
    chance = random.Random(1)
    for _ in range(300):
        count = chance.choice((2, 4, 8))
        sizes = [chance.choice((1, 1000, 10**6, 10**9)) for _ in range(count)]
        cuts = tuple(Fragment(index, index, index + 1, size) for index, size in enumerate(sizes))
        speed = {}
        for _ in range(chance.randint(1, 6)):
            begin = chance.randrange(count)
            speed[begin, chance.randint(begin + 1, count)] = chance.choice((0.0, 1e-300, 1e-9, 1.0, 100.0, 1e9, 9e17))
        found = solve(cuts, rounded(speed), next(iter(speed)))
        assert all(weight >= 0 for carried in found.nexts.values() for weight in carried.values())


def test_a_span_that_publishes_an_absurd_speed_does_not_take_the_others_out_of_the_flow() -> None:
    found = solve(CUTS, {(0, 2): 60.0, (2, 3): 50.0, (2, 4): 1e12}, (0, 2))
    assert 100.0 < found.tokens_per_s < 125.0
    assert found.ends[0][2] > 0


def test_a_flow_that_cannot_be_solved_leaves_routes_to_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        status, message = 2, "infeasible"

    monkeypatch.setattr(routing_weights, "linprog", lambda *given, **named: Failed())
    routing_weights._flow.cache_clear()
    assert not solve(CUTS, {(0, 2): 31.0, (2, 4): 17.0}, (0, 2)).ends
    routing_weights._flow.cache_clear()

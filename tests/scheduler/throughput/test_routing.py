"""Routing weights follow from what others publish, so no figure of theirs ends a peer that solves for them."""

import random

import pytest

from decentral.core.fragments import Fragment
from decentral.scheduler.throughput import routing
from decentral.scheduler.throughput.routing import changed, rounded, solve, useful_speeds

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
        speed = {(0, count): 100.0} if chance.random() < 0.3 else {}
        for _ in range(chance.randint(1, 6)):
            begin = chance.randrange(count)
            speed[begin, chance.randint(begin + 1, count)] = chance.choice((0.0, 1e-300, 1e-9, 1.0, 100.0, 1e9, 9e17))
        found = solve(cuts, rounded(speed), next(iter(speed)), whole_alone=chance.random() < 0.5)
        assert all(weight >= 0 for carried in found.nexts.values() for weight in carried.values())


def test_a_span_carries_what_its_measured_layers_let_it() -> None:
    """The head takes nine tenths of a token's time on the peers with the last layers, and half on the others."""
    cuts = (Fragment(0, 0, 2, 1, (0.0, 1.0, 0.0)), Fragment(1, 2, 3, 1, (0.0, 0.0, 1.0)))
    speed, shapes = {(0, 1): 100.0, (1, 2): 100.0}, {(0, 1): (0.0, 0.5, 0.5), (1, 2): (0.0, 0.1, 0.9)}
    assert solve(cuts, speed, (0, 1)).tokens_per_s == pytest.approx(200.0)
    assert solve(cuts, speed, (0, 1), shapes=shapes).tokens_per_s == pytest.approx(100 / 0.9)


def test_a_span_that_publishes_an_absurd_speed_does_not_take_the_others_out_of_the_flow() -> None:
    found = solve(CUTS, {(0, 2): 60.0, (2, 3): 50.0, (2, 4): 1e12}, (0, 2))
    assert 100.0 < found.tokens_per_s < 125.0
    assert found.ends[0][2] > 0


def test_a_flow_that_cannot_be_solved_leaves_routes_to_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        status, message = 2, "infeasible"

    monkeypatch.setattr(routing, "linprog", lambda *given, **named: Failed())
    routing._flow.cache_clear()
    assert not solve(CUTS, {(0, 2): 31.0, (2, 4): 17.0}, (0, 2)).ends
    routing._flow.cache_clear()


def test_a_peer_with_the_whole_model_takes_nothing_that_spans_can_carry() -> None:
    found = solve(CUTS, {(0, 2): 100.0, (2, 4): 100.0, (0, 4): 300.0}, (0, 2), whole_alone=True)
    assert set(found.nexts[2]) == {(2, 4)}
    assert found.rate(2, (0, 4, 300.0)) == 0.0
    assert found.tokens_per_s == pytest.approx(200.0 + 200.0, rel=0.01), "200 of the 300 can be of use to others"


def test_a_peer_with_the_whole_model_carries_to_the_end_what_would_else_leave_a_span_idle() -> None:
    found = solve(CUTS, {(0, 2): 100.0, (2, 4): 20.0, (0, 4): 300.0}, (0, 2), whole_alone=True)
    assert found.tokens_per_s == pytest.approx(100.0 + 20.0 + 200.0, rel=0.01), "every device is busy"
    spans, whole = (found.rate(2, (2, 4, 20.0)), found.rate(2, (0, 4, 300.0)))
    assert whole == pytest.approx(4 * spans, rel=0.01)


@pytest.mark.parametrize("own", [(0, 2), (0, 4)])
def test_a_peer_with_the_whole_model_hands_nothing_on(own: tuple[int, int]) -> None:
    found = solve(CUTS, {(0, 2): 10.0, (2, 4): 100.0, (0, 4): 300.0}, own, whole_alone=True)
    assert found.tokens_per_s == pytest.approx(20.0 + 20.0, rel=0.01), "it would be 60 if it did"
    assert set(found.ends[0]) == ({2} if own == (0, 2) else {4})


def test_where_nobody_else_holds_the_last_layers_peers_with_the_whole_model_carry_them() -> None:
    found = solve(CUTS, {(0, 2): 100.0, (0, 4): 300.0}, (0, 2), whole_alone=True)
    assert set(found.nexts[2]) == {(0, 4)}
    assert found.tokens_per_s == pytest.approx(100.0 + 200.0, rel=0.01), "200 are what the span can begin"


@pytest.mark.parametrize("claim", [1e3, 1e6, 1e12])
def test_no_speed_of_a_peer_with_the_whole_model_hides_the_others(claim: float) -> None:
    found = solve(CUTS, {(0, 2): 60.0, (2, 4): 50.0, (0, 4): claim}, (0, 2), whole_alone=True)
    assert found.ends[0][2] > 0
    assert found.rate(2, (2, 4, 50.0)) > found.rate(2, (0, 4, claim)) > 0
    before, now = (useful_speeds(CUTS, {(0, 2): 60.0, (2, 4): tail, (0, 4): claim}) for tail in (50.0, 5.0))
    assert changed(before, now)


def test_a_span_carries_no_more_than_its_links_let_in_and_out() -> None:
    two = {(0, 2): 100.0, (2, 4): 100.0}
    assert solve(CUTS, two, (0, 2), crossings={(0, 2): 50.0}).tokens_per_s == pytest.approx(50.0)
    three = {(0, 1): 100.0, (1, 3): 100.0, (3, 4): 100.0}
    found = solve(CUTS, three, (0, 1), crossings={(1, 3): 60.0})
    assert found.tokens_per_s == pytest.approx(30.0), "tokens come to the middle, and leave it"


def test_tokens_go_around_a_span_with_a_slow_link() -> None:
    speeds = {(0, 2): 100.0, (2, 4): 100.0, (1, 4): 100.0}
    free, thin = (solve(CUTS, speeds, (0, 2), crossings=limits) for limits in (None, {(2, 4): 1.0}))
    assert free.rate(2, (2, 4, 100.0)) > 0.2 * free.tokens_per_s / 300.0
    assert thin.rate(2, (2, 4, 100.0)) * 300.0 == pytest.approx(1.0, rel=0.01)
    assert thin.tokens_per_s > 90.0


@pytest.mark.parametrize("claim", [0.0, 1e-300, 1e18])
def test_no_rate_of_a_link_makes_the_flow_unsolvable(claim: float) -> None:
    found = solve(CUTS, {(0, 2): 100.0, (2, 4): 100.0}, (0, 2), crossings={(0, 2): claim, (2, 4): 1e9})
    assert found.tokens_per_s == pytest.approx(min(claim, 200.0))

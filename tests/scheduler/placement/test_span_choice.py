"""A newcomer takes layers that nobody holds first, then those that let the swarm train the most tokens."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.pipeline.next_peer import RoutingWeights
from decentral.core.fragments import Fragment
from decentral.scheduler.placement import span_choice
from decentral.scheduler.placement.span_choice import Holder
from decentral.scheduler.throughput import routing

SIX = [Fragment(index, index, index + 1, 100) for index in range(6)]


def reach_of(width: int) -> Callable[[int], int]:
    return lambda begin: min(begin + width, len(SIX))


def test_the_first_peers_cover_the_model() -> None:
    held: list[Holder] = []
    for _ in range(3):
        held.append(span_choice.choose(SIX, held, 1.0, reach_of(2)))
    assert sorted((one.begin, one.end) for one in held) == [(0, 2), (2, 4), (4, 6)]


def test_a_layer_without_a_holder_comes_before_any_gain_in_speed() -> None:
    others = [Holder(0, 5, 1.0)]
    chosen = span_choice.choose(SIX, others, 100.0, reach_of(2))
    assert chosen.begin <= 5 < chosen.end


def test_a_newcomer_goes_where_the_swarm_is_slowest() -> None:
    others = [Holder(0, 2, 9.0), Holder(2, 4, 1.0), Holder(4, 6, 9.0)]
    chosen = span_choice.choose(SIX, others, 5.0, reach_of(2))
    assert (chosen.begin, chosen.end) == (2, 4)


def test_of_places_that_are_equally_scarce_the_earliest_is_taken() -> None:
    """Their figures differed in the last digit."""
    chosen = span_choice.choose(SIX, [Holder(0, 4, 5.0), Holder(2, 6, 5.0)], 5.0, reach_of(4))
    assert (chosen.begin, chosen.end) == (0, 4)


def test_a_peer_whose_memory_takes_nothing_more_takes_what_it_can() -> None:
    chosen = span_choice.choose(SIX, [], 1.0, lambda begin: 4 if begin == 3 else begin)
    assert (chosen.begin, chosen.end) == (3, 4)


def test_the_whole_model_on_one_peer_flows_at_its_speed() -> None:
    assert span_choice.flow(SIX, [Holder(0, 6, 7.0)]) == pytest.approx(7.0)


def test_a_layer_without_a_holder_lets_nothing_through() -> None:
    assert span_choice.flow(SIX, [Holder(0, 5, 7.0)]) == 0.0


def placed(span: tuple[int, int], speed: float) -> Holder:
    return Holder(span[0], span[1], speed)


spans = st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda pair: pair[0] < pair[1])
holders = st.lists(st.builds(placed, spans, st.floats(0.1, 10)), min_size=1, max_size=5)
sizes = st.lists(st.integers(1, 9), min_size=6, max_size=6)


@given(held=holders, parameters=sizes)
def test_the_flow_is_the_tightest_of_all_cuts(held: list[Holder], parameters: list[int]) -> None:
    fragments = [Fragment(i, i, i + 1, count) for i, count in enumerate(parameters)]
    share = [count / sum(parameters) for count in parameters]
    cuts = [cut for size in range(1, 7) for cut in itertools.combinations(range(6), size)]
    tightest = min(
        sum(one.tokens_per_s for one in held if any(one.begin <= i < one.end for i in cut)) / sum(share[i] for i in cut)
        for cut in cuts
    )
    assert span_choice.flow(fragments, held) == pytest.approx(tightest, rel=1e-6, abs=1e-9)


def solved(fragments: list[Fragment], held: list[Holder], own: Holder) -> RoutingWeights:
    speed: dict[routing.Span, float] = {}
    for one in held:
        speed[one.begin, one.end] = speed.get((one.begin, one.end), 0.0) + one.tokens_per_s
    return routing.solve(fragments, speed, (own.begin, own.end))


@given(held=holders)
def test_the_routes_flow_carries_what_the_cuts_let_through_but_for_the_cost_of_hops(held: list[Holder]) -> None:
    bound = span_choice.flow(SIX, held)
    weights = solved(SIX, held, held[0])
    assert bound * 0.9 - 1e-9 <= weights.tokens_per_s <= bound * (1 + 1e-6) + 1e-9


def test_what_enters_a_peer_leaves_it_by_the_flow() -> None:
    held = [Holder(0, 4, 1.0), Holder(2, 6, 1.0)]
    weights = solved(SIX, held, held[0])
    assert weights.tokens_per_s == pytest.approx(2.0)
    assert sum(weights.ends[0].values()) == pytest.approx(1.0)
    assert sum(end * rate for end, rate in weights.ends[0].items()) == pytest.approx(
        3.0
    )  # on average half of the layers
    for end, rate in weights.ends[0].items():
        assert weights.rate(end, (2, 6, 1.0)) == pytest.approx(rate)
        assert weights.rate(end, (0, 4, 1.0)) == 0.0


def test_a_swarm_too_large_to_solve_goes_without_routing_weights() -> None:
    fragments = [Fragment(i, i, i + 1, 1) for i in range(64)]
    held = [Holder(i, 64, 1.0) for i in range(64)]
    assert solved(fragments, held, held[0]) == RoutingWeights()


def test_peers_with_the_same_span_share_its_flow_by_their_speeds_even_one_that_came_since() -> None:
    held = [Holder(0, 3, 4.0), Holder(3, 6, 1.0), Holder(3, 6, 3.0)]
    weights = solved(SIX, held, held[0])
    assert weights.rate(3, (3, 6, 1.0)) * 2 == pytest.approx(weights.rate(3, (3, 6, 2.0)))
    assert weights.rate(3, (3, 6, 4.0)) == pytest.approx(weights.ends[0][3])
    assert weights.rate(3, (2, 5, 4.0)) == pytest.approx(
        weights.ends[0][3]
    )  # no peer held these layers when the flow was solved
    assert weights.rate(3, (0, 3, 4.0)) == 0.0


def test_a_flow_is_worth_a_new_one_when_a_twentieth_of_all_speed_has_changed() -> None:
    known = {(0, 3): 50.0, (3, 6): 50.0}
    assert not routing.changed(known, {(0, 3): 52.0, (3, 6): 48.0})
    assert routing.changed(known, {(0, 3): 50.0, (3, 6): 40.0})
    assert routing.changed(known, {(0, 3): 50.0, (2, 6): 50.0})
    assert routing.changed({}, known)
    assert not routing.changed({}, {})


def test_where_two_places_are_equally_scarce_and_no_newcomer_can_mend_both_each_gets_one() -> None:
    fragments = [Fragment(index, index, index + 1, 100) for index in range(16)]
    held = [Holder(at, at + 2, 1.0 if at in (4, 10) else 4.0) for at in range(0, 16, 2)]
    for _ in range(2):
        held.append(span_choice.choose(fragments, held, 3.0, lambda begin: min(begin + 2, 16)))
    assert sorted((one.begin, one.end) for one in held[-2:]) == [(4, 6), (10, 12)]
    assert span_choice.flow(fragments, held) == pytest.approx(32.0)

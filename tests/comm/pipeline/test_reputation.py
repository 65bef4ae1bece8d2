"""How far a peer is trusted after right and wrong answers, and how soon it is trusted again."""

import pytest

from decentral.comm.pipeline.reputation import HALVED_S, MOST_JUDGED, NO_ROUTES_S, Reputations
from decentral.core.ids import PeerId

X = PeerId("X")


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

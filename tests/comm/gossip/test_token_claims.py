"""A partner's claims of tokens are believed as far as its published speed explains them."""

from decentral.comm.gossip.snapshots import CLAIM_BURST_S, CLAIM_SLACK, MOST_BUDGETS, TokenClaims
from decentral.core.ids import PeerId

PEER, SPEED = PeerId("B"), 1000.0  # tokens/s


def test_what_a_peer_trains_is_believed_window_after_window() -> None:
    claims = TokenClaims()
    assert all(claims.covered(PEER, 500, SPEED, 0.5 * window) == 500 for window in range(1000))


def test_a_thousand_times_as_much_is_not() -> None:
    claims, windows = TokenClaims(), 1000
    total = sum(claims.covered(PEER, 500_000, SPEED, 0.5 * window) for window in range(windows))
    assert total <= CLAIM_SLACK * SPEED * (CLAIM_BURST_S + 0.5 * windows)


def test_a_step_that_is_longer_than_a_window_is_believed() -> None:
    claims = TokenClaims()
    assert [claims.covered(PEER, tokens, SPEED, now) for tokens, now in ((0, 0.5), (30_000, 30.0))] == [0, 30_000]


def test_who_publishes_no_speed_yet_is_believed() -> None:
    assert TokenClaims().covered(PEER, 7, 0.0, 1.0) == 7


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    claims = TokenClaims()
    claims.covered(PEER, 10, SPEED, 100.0)
    assert claims.covered(PEER, 10, SPEED, 50.0) == 10


def test_the_budgets_of_so_many_partners_are_kept() -> None:
    claims = TokenClaims()
    for number in range(2 * MOST_BUDGETS):
        claims.covered(PeerId(str(number)), 1, SPEED, 0.0)
    assert len(claims.left) == MOST_BUDGETS

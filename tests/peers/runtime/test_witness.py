"""What a peer measures of others: time and speed of their windows, bytes, checks; and what it publishes of that."""

from collections.abc import Iterable

import pytest

from decentral.core.credit import SeenWork
from decentral.core.ids import PeerId
from decentral.core.jobs import PartnerWork
from decentral.core.journal.field_kinds import MOST_NUMBER
from decentral.peers.runtime.witness import PAUSE_S, MergedWindow, Tally

PARTNER = PeerId("QmPartner")


def work(tokens: float, times: float = 1.0) -> PartnerWork:
    """A window with these tokens, `times` as long as ours, which has 50 tokens."""
    return PartnerWork(PARTNER, tokens, 50.0, times, 1.0)


def window(at: float, lasted_s: float = 0.0, fragment: int = 0, share: float = 1.0) -> MergedWindow:
    """A window of the partner that was closed at this time; ours last half a second."""
    return MergedWindow(fragment, share, at, lasted_s, 0.5, PAUSE_S)


def met(tally: Tally, times: Iterable[float], tokens: float = 50.0) -> SeenWork:
    """Merge a window of the partner that it has closed at each of these times."""
    for at in times:
        tally.met(window(at), work(tokens))
    return tally.row("end", 0)


def test_each_window_credits_the_time_since_the_last_one_at_its_speed() -> None:
    found = met(Tally(), [0.5 * number for number in range(41)])
    assert (found.claimed, found.explained, found.met_s) == (2000, 2000, 20)


def test_windows_that_were_not_pulled_are_credited_like_those_that_were() -> None:
    found = met(Tally(), [0.5 * number for number in range(401) if number % 4 in (0, 1)])
    assert found.tokens_per_s == pytest.approx(100.0, rel=0.04)
    assert found.met_s == pytest.approx(200, abs=1)


def test_a_slow_peer_s_windows_last_as_long_as_its_steps() -> None:
    found = met(Tally(), [4.0 * number for number in range(101)])
    assert found.tokens_per_s == pytest.approx(50.0 / 4.0, rel=0.01)
    assert found.met_s == 400


def test_a_window_of_two_steps_counts_as_twice_as_long_if_the_peer_says_so() -> None:
    tally = Tally()
    for number in range(100):
        tally.met(window(12.0 * number, 4.0), work(50.0))
        tally.met(window(12.0 * number + 8.0, 8.0), work(100.0, 2.0))
    assert tally.row("end", 0).tokens_per_s == pytest.approx(150.0 / 12.0, rel=0.01)


def test_windows_closed_more_often_than_ours_bring_nothing_as_we_merge_no_more_of_them() -> None:
    found = met(Tally(), [0.1 * number for number in range(201)])
    assert found.tokens_per_s <= 100.0


def test_a_peer_that_trains_rarely_is_not_credited_for_its_pauses() -> None:
    found = met(Tally(), [60.0 * number for number in range(101)])
    assert found.tokens_per_s == pytest.approx(50.0 / 60.0, rel=0.02)
    busy_then_lazy = met(
        Tally(), [*(0.5 * number for number in range(20)), *(60.0 * number for number in range(1, 201))]
    )
    assert busy_then_lazy.claimed < 50 * (220 + 20 * 100)


def test_no_time_is_credited_for_which_a_peer_was_not_in_the_roster() -> None:
    """Its windows last 20 s, so that a pause of 150 s could be one in which we pulled none of them."""
    tally = Tally()
    for start in (0.0, 350.0):
        for at in range(0, 201, 20):
            tally.met(MergedWindow(0, 1.0, start + at, 20.0, 20.0, 160.0), work(50.0))
        tally.left()
    found = tally.row("end", 0)
    assert (found.claimed, found.met_s) == (1000, 400)


def test_a_refused_window_brings_time_and_no_tokens() -> None:
    tally = Tally()
    for number in range(101):
        tally.met(window(0.5 * number), work(50.0) if number % 10 == 0 else None)
    found = tally.row("end", 0)
    assert found.tokens_per_s == pytest.approx(10.0, rel=0.01)


def test_the_first_window_and_one_that_is_no_newer_bring_nothing() -> None:
    assert met(Tally(), [5.0, 5.0, 4.0]).met_s == 0


def test_two_fragments_count_by_their_shares_of_the_model() -> None:
    tally = Tally()
    for number in range(41):
        for fragment, share in ((0, 0.25), (1, 0.75)):
            tally.met(window(0.5 * number, fragment=fragment, share=share), work(50.0))
    found = tally.row("end", 0)
    assert (found.claimed, found.met_s) == (2000, 20)


def test_chance_in_the_lengths_of_windows_averages_out() -> None:
    tally = Tally()
    for number in range(401):
        tally.met(window(0.5 * number), work(500.0, 0.5 if number % 2 else 1.5))
    assert tally.row("end", 0).explained == pytest.approx(50 * 400, rel=0.01)


def test_figures_of_an_earlier_process_are_added() -> None:
    before = SeenWork("end", 10, 20, 30, 40, 50, 60, 70)
    tally = Tally(before=before)
    assert tally.row("end", 0) == before
    tally.served(5)
    tally.judged(True)
    tally.judged(False)
    assert tally.row("end", 1) == SeenWork("end", 10, 20, 31, 40, 55, 61, 71)


def test_a_claim_without_bounds_does_not_make_our_record_invalid() -> None:
    tally = Tally()
    for at in (1.0, 1.5):
        tally.met(window(at), PartnerWork(PARTNER, 1e300, 1e300, 1e30, 1e-30))
    found = tally.row("end", 0)
    assert found.claimed == found.explained == MOST_NUMBER - 1

"""What a peer measures of others: time and speed of their windows, bytes, checks; and what it publishes of that."""

import pytest

from decentral.core.credit import SeenWork
from decentral.core.ids import PeerId
from decentral.core.jobs import PartnerWork
from decentral.core.journal.field_kinds import MOST_NUMBER
from decentral.peers.runtime.witness import PAUSE_S, MergedWindow, Tally

PARTNER = PeerId("QmPartner")


def met(tally: Tally, times: list[float], claimed: float = 50.0, share: float = 1.0, lasted_s: float = 0.5) -> SeenWork:
    """Merge a window of the partner at each of these times."""
    for now in times:
        window = MergedWindow(0, share, lasted_s, PAUSE_S)
        tally.trained(PartnerWork(PARTNER, claimed, 50.0, 0.9, 1.0), window, now)
    return tally.row("end", 0)


def test_each_window_credits_the_time_since_the_last_one_at_its_speed() -> None:
    found = met(Tally(), [0.5 * number for number in range(1, 41)])
    assert (found.claimed, found.explained, found.met_s) == (2000, 1800, 20)


def test_windows_that_were_not_pulled_are_credited_like_those_that_were() -> None:
    found = met(Tally(), [0.5 * number for number in range(1, 41) if number % 4 in (0, 1)])
    assert found.tokens_per_s == pytest.approx(100.0, rel=0.05)
    assert found.met_s == pytest.approx(20, abs=1)


def test_a_peer_is_not_credited_for_a_long_pause() -> None:
    found = met(Tally(), [1.0, 1001.0])
    assert found.met_s == round(0.5 + PAUSE_S)


def test_two_fragments_count_by_their_shares_of_the_model() -> None:
    tally = Tally()
    for number in range(1, 41):
        for fragment, share in ((0, 0.25), (1, 0.75)):
            window = MergedWindow(fragment, share, 0.5, PAUSE_S)
            tally.trained(PartnerWork(PARTNER, 50.0, 50.0, 1.0, 1.0), window, 0.5 * number)
    found = tally.row("end", 0)
    assert (found.claimed, found.met_s) == (2000, 20)


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
    tally.trained(PartnerWork(PARTNER, 1e300, 1e300, 1e30, 1e-30), MergedWindow(0, 1.0, 0.5, PAUSE_S), 1.0)
    found = tally.row("end", 0)
    assert found.claimed == found.explained == MOST_NUMBER - 1

"""When windows end, and how old a snapshot may be: what all exchange machines ask of a fragment's context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.gossip.exchange import PullExchange
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId, RunId
from decentral.core.units import Seconds
from tests.comm.gossip.partners import Partners

FRAGMENTS = 5


class Stretched(Partners):
    """So many of the shortest windows make one."""

    def __init__(self, windows: int, window_s: Seconds) -> None:
        super().__init__(window_s=window_s)
        self.windows = windows

    def period_s(self, fragment: int, size: int) -> Seconds:
        return self.shortest_s * self.windows


def context(windows: int, fragment: int = 0, phase: float = 0.25, window_s: float = 0.5) -> FragmentContext:
    view = Stretched(windows, window_s)
    return FragmentContext(RunId("run"), PeerId("A"), fragment, phase, GossipConfig(), view, view)


def ends(windows: int, fragment: int, until: float = 40.0) -> list[float]:
    """When the windows of this fragment end, one after another."""
    found, now = list[float](), 0.0
    while (now := context(windows, fragment).next_close(now, 0)) <= until:
        found.append(now)
    return found


def test_windows_end_one_period_apart_with_the_fragments_phase() -> None:
    assert ends(1, 0, 2.0) == [0.125, 0.625, 1.125, 1.625]
    assert ends(2, 0, 2.2) == [0.125, 1.125, 2.125]


@pytest.mark.parametrize("fragment", range(FRAGMENTS))
@pytest.mark.parametrize(("long", "short"), [(2, 1), (4, 2), (8, 1), (16, 4)])
def test_each_end_of_a_longer_window_is_an_end_of_a_shorter_one_whatever_the_fragment(
    long: int, short: int, fragment: int
) -> None:
    longer, shorter = ends(long, fragment), ends(short, fragment)
    assert longer
    assert set(longer) <= set(shorter)
    assert len(shorter) >= (long // short) * (len(longer) - 1)


def test_fragments_take_turns_at_the_ends_of_the_shortest_windows() -> None:
    firsts = [ends(4, fragment)[0] for fragment in range(4)]
    assert sorted(firsts) == [0.125, 0.625, 1.125, 1.625]
    assert ends(4, 4) == ends(4, 0)


def test_a_window_never_ends_at_once() -> None:
    at = ends(2, 1)[3]
    assert context(2, 1).next_close(at, 0) == at + 1.0


@given(phase=st.floats(0, 1, exclude_max=True), windows=st.integers(1, 64), began=st.floats(1.7e9, 1.9e9))
def test_the_next_end_is_later_and_by_no_more_than_a_period_though_unix_time_is_coarse(
    phase: float, windows: int, began: float
) -> None:
    at, period_s = began, 0.1 * windows
    for _ in range(20):
        after = context(windows, 1, phase, window_s=0.1).next_close(at, 0)
        assert at < after <= at + period_s + 1e-5
        at = after


@pytest.mark.parametrize(("windows", "max_age_s"), [(1, 60.0), (120, 120.0), (256, 256.0)])
def test_a_snapshot_of_a_long_window_may_be_as_old_as_two_of_them(windows: int, max_age_s: float) -> None:
    assert context(windows).max_age_s(0) == max(60.0, max_age_s)


def test_a_window_that_was_planned_when_windows_were_long_is_brought_forward() -> None:
    early = context(1024)
    machine = PullExchange(early, early.next_close(3.0, 0))
    machine.replan(3.0)
    assert machine.close_at == early.next_close(3.0, 0)
    machine.context = context(2)
    machine.replan(3.0)
    assert machine.close_at == context(2).next_close(3.0, 0)

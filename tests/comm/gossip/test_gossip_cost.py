"""What gossip costs the cores, and how far that stretches the windows."""

import pytest

from decentral.comm.gossip.gossip_cost import (
    FIXED_CORES,
    LONGER,
    REMEMBERED_WINDOWS,
    CoresUsed,
    GossipCost,
    GossipTraffic,
    Stretch,
)
from decentral.peers.runtime.traffic import QUESTION_BYTES

SHARE = 0.02
WINDOW_S = 0.5


def cost_of(window_cost_s: float, cores: float = 1.0) -> GossipCost:
    """After 16 windows that each cost so much, half of it for the network."""
    cost = GossipCost()
    spend(cost, window_cost_s, cores)
    return cost


def spend(cost: GossipCost, window_cost_s: float, cores: float = 1.0, windows: int = 16) -> None:
    for _ in range(windows):
        cost.did(window_cost_s / 4, closed=True)
        cost.did(window_cost_s / 4, closed=False)  # its merge
    network_s = windows * window_cost_s / 2 + FIXED_CORES * 5.0
    cost.measured(CoresUsed(5.0, 5.0 * cores, network_s), gossip_alone=True)
    if windows < REMEMBERED_WINDOWS:
        pause(cost)


def pause(cost: GossipCost) -> None:
    """An interval without gossip jobs, after which the cost of all windows before it is known."""
    cost.measured(CoresUsed(5.0, 5.0, 0.0), gossip_alone=True)


def test_the_cost_of_a_window_is_that_of_its_jobs_and_its_part_of_the_network() -> None:
    assert cost_of(0.1).window_cost_s == pytest.approx(0.1)


def test_before_anything_is_known_windows_are_as_the_config_has_them() -> None:
    assert GossipCost().windows(WINDOW_S, 3, SHARE) == 1


def test_before_a_window_s_cost_is_known_it_is_expected_by_the_number_of_parameters() -> None:
    """The first windows of 10 M parameters came each 0.125 s, and took 10% of a core for a quarter of a minute."""
    cost = GossipCost()
    pause(cost)
    assert cost.windows(0.125, 4, 2 * SHARE, parameters=10_600_000) * 0.125 == 16.0  # 0.37 core-seconds, 4% of a core
    spend(cost, 1e-3, windows=16)
    assert cost.windows(0.125, 4, 2 * SHARE, parameters=10_600_000) == 1


def test_an_interval_without_windows_is_shared_by_those_of_the_next() -> None:
    cost = GossipCost()
    cost.did(0.5, closed=False)
    cost.measured(CoresUsed(5.0, 5.0, 0.0), gossip_alone=True)
    assert cost.window_cost_s == 0
    cost.did(0.5, closed=True)
    pause(cost)
    pause(cost)
    assert cost.window_cost_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("window_cost_s", "fragments", "cores", "stretch"),
    [
        (0.001, 3, 1.0, 1),  # 0.3 windows would do
        (0.01, 1, 1.0, 1),  # exactly the share
        (0.01, 3, 1.0, 4),  # 3 windows are needed, and the next power of two is 4
        (0.01, 3, 3.0, 1),  # three times as many cores
        (0.1, 8, 1.0, 128),
    ],
)
def test_all_fragments_together_cost_their_share_of_the_cores(
    window_cost_s: float, fragments: int, cores: float, stretch: int
) -> None:
    assert cost_of(window_cost_s, cores).windows(WINDOW_S, fragments, SHARE) == stretch


def test_cores_that_nobody_uses_may_be_used_more_freely() -> None:
    cost = cost_of(0.1)
    assert cost.windows(WINDOW_S, 1, SHARE) == 16  # 10 are needed, of 2% of a core
    for _ in range(20):
        cost.measured(CoresUsed(5.0, 5.0, 0.0, idle_s=5.0), gossip_alone=True)
    assert cost.windows(WINDOW_S, 1, SHARE) == 2  # 12% of a core are there, of which windows of 1.67 would cost all
    for _ in range(20):
        cost.measured(CoresUsed(5.0, 5.0, 0.0, idle_s=0.0), gossip_alone=True)
    assert cost.windows(WINDOW_S, 1, SHARE) == 16


def test_windows_that_the_first_ones_made_long_become_short_as_soon_as_the_shorter_ones_fit() -> None:
    cost = cost_of(4.3 * SHARE * WINDOW_S)
    assert cost.windows(WINDOW_S, 1, SHARE) == 4
    cost.compute_s, cost.network_s = 4.5 * SHARE * WINDOW_S, 0.0  # the first windows touch new pages of memory
    assert cost.windows(WINDOW_S, 1, SHARE) == 8
    cost.compute_s = 3.7 * SHARE * WINDOW_S
    assert cost.windows(WINDOW_S, 1, SHARE) == 4


def test_what_is_just_above_a_bound_changes_nothing_either_way() -> None:
    cost = cost_of(0.0001)
    seen = set()
    for factor in (1.0, 1.05, 0.95, LONGER, 0.97):
        cost.compute_s, cost.network_s = factor * 4 * SHARE * WINDOW_S, 0.0
        seen.add(cost.windows(WINDOW_S, 1, SHARE))
    assert seen == {4}


def test_windows_grow_and_shrink_with_what_they_cost() -> None:
    cost, stretches = GossipCost(), []
    for window_cost_s in (0.001, 0.04, 0.2, 0.2, 0.04, 0.001, 0.001):
        cost.compute_s, cost.cores = window_cost_s, 1.0
        stretches.append(cost.windows(WINDOW_S, 1, SHARE))
    assert stretches == [1, 4, 32, 32, 8, 1, 1]  # 4 windows are needed of 8: not yet so few that 4 will do


def test_a_cost_that_changes_is_believed_little_by_little() -> None:
    cost = cost_of(0.1)
    spend(cost, 0.2, windows=4)
    assert cost.window_cost_s == pytest.approx(0.15)


def test_an_outlier_counts_as_twice_the_average_at_most() -> None:
    cost = cost_of(0.1)
    spend(cost, 50.0, windows=4)
    assert cost.window_cost_s == pytest.approx(0.15)


def test_what_long_windows_cost_is_believed_within_seconds_and_not_windows() -> None:
    """The first windows of a peer that starts beside others cost more than any later one."""
    cost = cost_of(0.1)
    for _ in range(8):
        spend(cost, 0.05, windows=1)
    assert cost.window_cost_s == pytest.approx(0.05 + 0.05 * 0.5**8)


@pytest.mark.parametrize("parts", [(14,), (13, 1), (1, 13), (5, 5, 4)])
def test_windows_that_end_together_are_counted_with_all_their_merges(parts: tuple[int, ...]) -> None:
    """14 fragments of 85 M parameters were closed in one interval and merged in the next; a window that was closed
    before the others counted as almost free, and windows went from 128 to 8 seconds and back."""
    cost = GossipCost()
    for _ in range(4):
        for _ in range(14):
            cost.did(0.02, closed=True)
            cost.did(0.04, closed=False)
        pause(cost)
        pause(cost)
        assert cost.windows(WINDOW_S, 14, SHARE) == 128  # 84 are needed
    for part in parts:
        for _ in range(part):
            cost.did(0.02, closed=True)
        cost.measured(CoresUsed(5.0, 5.0, 0.0), gossip_alone=True)
        assert cost.windows(WINDOW_S, 14, SHARE) == 128
    for _ in range(14):
        cost.did(0.04, closed=False)
    for _ in range(12):
        pause(cost)
        assert cost.windows(WINDOW_S, 14, SHARE) == 128


def test_where_gossip_never_pauses_its_cost_is_known_after_two_windows_of_each_fragment() -> None:
    cost = GossipCost()
    for _ in range(10):
        assert cost.windows(WINDOW_S, 14, SHARE) == 1
        for _ in range(3):
            cost.did(0.06, closed=True)
        cost.measured(CoresUsed(5.0, 5.0, 0.0), gossip_alone=True)
    assert cost.windows(WINDOW_S, 14, SHARE) == 128


def test_another_share_of_the_cores_starts_from_the_shortest_windows() -> None:
    """Between 8 windows, which are enough, and 16, which are not yet too many, the past decides: but not that of the
    swarm's first steps, with another share."""
    cost = cost_of(7.7 * SHARE * WINDOW_S)
    cost.stretch.times, cost.compute_s = 1, 16 * SHARE * WINDOW_S
    assert cost.windows(WINDOW_S, 1, SHARE) == 32
    cost.compute_s = 3.85 * SHARE * WINDOW_S
    cost.stretch.times = 16
    assert cost.windows(WINDOW_S, 1, SHARE) == 16
    assert cost.windows(WINDOW_S, 1, 1.01 * SHARE) == 8


def test_transfers_after_a_windows_end_are_part_of_its_cost() -> None:
    cost = GossipCost()
    cost.did(0.1, closed=True)
    cost.measured(CoresUsed(5.0, 5.0, FIXED_CORES * 5.0), gossip_alone=True)
    cost.measured(CoresUsed(5.0, 5.0, 0.2 + FIXED_CORES * 5.0), gossip_alone=True)
    assert cost.network_s == pytest.approx(0.2)


@pytest.mark.parametrize(("beyond_s", "charged_s"), [(0.0, 1 / 74), (0.02, 0.02), (1.0, 1 / 20)])
def test_the_network_s_part_lies_within_bounds_by_its_bytes(beyond_s: float, charged_s: float) -> None:
    """`beyond_s`: core-seconds of event loop and daemon beyond those that they use without gossip."""
    cost = GossipCost()
    cost.did(0.0, closed=True)
    gossip = GossipTraffic(part=1.0, work_bytes=1e6)
    cost.measured(CoresUsed(5.0, 5.0, beyond_s + FIXED_CORES * 5.0), gossip_alone=True, gossip=gossip)
    pause(cost)
    assert cost.network_s == pytest.approx(charged_s)


def test_what_the_network_did_for_a_newcomer_is_no_cost_of_gossip() -> None:
    cost = cost_of(0.1)
    cost.did(0.05, closed=True)
    cost.measured(CoresUsed(5.0, 5.0, 4.0), gossip_alone=False)
    pause(cost)
    assert cost.window_cost_s == pytest.approx(0.1)


def test_peers_that_do_not_train_stretch_nothing() -> None:
    assert cost_of(1.0, cores=0.0).windows(WINDOW_S, 3, SHARE) == 1


@pytest.mark.parametrize(
    "pause", [CoresUsed(3600.0, 5.0, 0.0), CoresUsed(5.0, 0.02, 0.0)], ids=["stopped", "evaluates"]
)
def test_a_pause_of_training_is_not_taken_for_a_slower_device(pause: CoresUsed) -> None:
    cost = cost_of(0.01)
    cost.measured(pause, gossip_alone=True)
    assert cost.windows(WINDOW_S, 3, SHARE) == 4


def test_a_device_that_has_become_slower_is_believed_within_minutes() -> None:
    cost = cost_of(0.01)
    for _ in range(60):
        cost.measured(CoresUsed(5.0, 0.5, 0.0), gossip_alone=True)
    assert cost.cores == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("others_cores", "part"), [(0.03, 0.5), (0.2, 0.1), (0.2, 1.0)])
def test_load_that_others_put_on_the_network_does_not_stretch_windows_ever_more(
    others_cores: float, part: float
) -> None:
    """A window's cost was the load of all over ever fewer windows. `part`: of the traffic seen that is gossip's."""
    cost, times, due = GossipCost(), 1, 0.0
    for interval in range(240):
        due += 4 * 5.0 / (WINDOW_S * times)
        closed, due = int(due), due % 1
        for _ in range(closed):
            cost.did(0.0005, closed=True)
        others_s = 5.0 * others_cores if interval >= 24 else 0.0
        network_s = FIXED_CORES * 5.0 + 0.002 * closed + others_s
        work = GossipTraffic(part=part if others_s else 1.0, work_bytes=closed * 6 * QUESTION_BYTES)
        cost.measured(CoresUsed(5.0, 20.0, network_s), gossip_alone=True, gossip=work)
        times = min(1024, cost.windows(WINDOW_S, 4, SHARE))
    assert times <= 4


@pytest.mark.parametrize("needed", [18.0, 25.0, 30.0])
def test_a_length_that_follows_from_the_first_measurements_does_not_stay(needed: float) -> None:
    """Five homes of 125 M needed 25 s, and their first slow uploads said 60: chance decided between 32 and 64 s."""
    slow_first, fast_first = Stretch(), Stretch()
    slow_first.fit(60.0)
    fast_first.fit(10.0)
    assert slow_first.fit(needed) == fast_first.fit(needed) == 32


def test_a_length_stays_while_the_need_wavers_around_it() -> None:
    stretch = Stretch()
    assert {stretch.fit(needed) for needed in (30.5, 34.0, 31.0, 35.0, 30.5)} == {32}
    stretch.fit(36.0)
    assert {stretch.fit(needed) for needed in (30.5, 34.0, 31.0, 35.0, 30.5)} == {64}

"""The faults that a soak draws: all kinds, in turn, and never more places at once than it says."""

import pytest

from benchmarks.soak import faults
from decentral.comm.net.keep_daemon import DAEMON_RESTARTS, DAEMON_RESTARTS_S

PLACES, HOUR_S, EVERY_S = 6, 3600.0, 20.0
SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_there_is_one_each_twenty_seconds_and_never_three_at_once(seed: int) -> None:
    drawn = faults.draw(seed, HOUR_S, EVERY_S, PLACES)
    assert [one.at for one in drawn] == [EVERY_S * number for number in range(180)]
    for number, one in enumerate(drawn):
        open_ones = [earlier for earlier in drawn[:number] if earlier.over > one.at]
        assert len(open_ones) < faults.MOST_AT_ONCE
        assert one.place not in {earlier.place for earlier in open_ones}


@pytest.mark.parametrize("seed", SEEDS)
def test_each_lasts_as_long_as_its_kind_may(seed: int) -> None:
    for one in faults.draw(seed, HOUR_S, EVERY_S, PLACES):
        shortest, most = faults.LASTS_S[one.kind]
        assert shortest <= one.lasts <= most


def test_every_kind_comes_before_any_comes_again() -> None:
    drawn = faults.draw(0, HOUR_S, EVERY_S, PLACES)
    count = len(faults.KINDS)
    assert {one.kind for one in drawn[:count]} == set(faults.KINDS)
    assert {one.place for one in drawn} == set(range(PLACES))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_peer_s_daemon_is_killed_so_often_that_it_gives_up(seed: int) -> None:
    drawn = faults.draw(seed, HOUR_S, EVERY_S, 4, ["daemon"])
    for one in drawn:
        near = [other for other in drawn if other.kind == "daemon" and other.place == one.place]
        assert sum(0 <= one.at - other.at < DAEMON_RESTARTS_S for other in near) < DAEMON_RESTARTS


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    assert faults.draw(3, 600.0, EVERY_S, PLACES) == faults.draw(3, 600.0, EVERY_S, PLACES)
    assert faults.draw(3, 600.0, EVERY_S, PLACES) != faults.draw(4, 600.0, EVERY_S, PLACES)

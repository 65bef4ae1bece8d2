"""What a peer counts of its own work, and of the time that it takes."""

from dataclasses import fields

import pytest

from decentral.core import rng
from decentral.core.jobs import Stepped
from decentral.core.time_spent import KINDS, NO_TIME, TimeSpent
from decentral.engine.step import Counters, TimeAccount


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_every_second_of_the_clock_goes_to_one_kind_and_none_is_left_out() -> None:
    clock, chance = Clock(), rng.stream(0, "time")
    account, spent = TimeAccount(clock), NO_TIME
    for _ in range(200):
        clock.passes(chance.choice((0.25, 0.5, 2.0)))  # sums of these have no rounding error
        account.spent_on(chance.choice(KINDS))
        if chance.random() < 0.2:
            spent += account.take()
    spent += account.take()
    assert spent.total == clock.now - 100.0
    assert min(getattr(spent, kind) for kind in KINDS) > 0
    assert sum(spent.shares().values()) == pytest.approx(1.0)


def test_time_that_is_not_yet_accounted_for_when_it_is_taken_is_in_the_next_account() -> None:
    clock = Clock()
    account = TimeAccount(clock)
    clock.passes(2.0)
    account.spent_on("training")
    clock.passes(1.0)
    assert account.take() == TimeSpent(training=2.0)
    clock.passes(1.0)
    account.spent_on("gossip")
    assert account.take() == TimeSpent(gossip=2.0)


def test_the_work_beside_is_no_part_of_the_threads_time() -> None:
    clock = Clock()
    account = TimeAccount(clock)
    clock.passes(3.0)
    account.spent_on("training")
    spent = account.take(beside=5.0)
    assert (spent.total, spent.busy, spent.beside) == (3.0, 3.0, 5.0)
    assert set(spent.shares()) == set(KINDS) == {one.name for one in fields(TimeSpent)} - {"beside"}


def test_waiting_is_time_but_not_work_and_of_no_time_at_all_there_are_no_shares() -> None:
    spent = TimeSpent(training=3.0, waiting=1.0)
    assert (spent.total, spent.busy) == (4.0, 3.0)
    assert spent.shares()["waiting"] == 0.25
    assert set(NO_TIME.shares().values()) == {0.0}


def test_a_step_reports_the_time_since_the_last_one_once() -> None:
    clock = Clock()
    counters = Counters(time=TimeAccount(clock))
    clock.passes(1.5)
    counters.time.spent_on("training")
    assert counters.count_steps(64, 2.0, 1, beside_s=0.5) == Stepped(
        1, 1, 64, 2.0, TimeSpent(training=1.5, beside=0.5), 1
    )
    assert counters.count_steps(64, 1.0, 1) == Stepped(2, 2, 64, 1.0, NO_TIME, 1)
    assert counters.tokens == 128


def test_many_steps_count_as_many() -> None:
    counters = Counters(own_steps=3, lr_step=40, time=TimeAccount(Clock()))
    assert counters.count_steps(640, 1.0, 10, steps=10) == Stepped(13, 50, 640, 1.0, NO_TIME, 10)


def test_the_learning_rate_step_follows_the_swarm_and_never_goes_back() -> None:
    counters = Counters()
    for swarms in (40, 7):
        counters.follow(swarms)
        assert counters.lr_step == 40

"""What a peer counts of its own work."""

from decentral.core.jobs import Stepped
from decentral.core.time_spent import KINDS, NO_TIME, TimeSpent
from decentral.train.counters import Counters


def test_a_step_reports_the_time_since_the_last_one_once() -> None:
    counters = Counters(busy_s=1.5)
    assert counters.stepped(64, 2.0, 1) == Stepped(1, 1, 64, 2.0, 1.5, 1)
    assert counters.stepped(64, 1.0, 1) == Stepped(2, 2, 64, 1.0, 0.0, 1)
    assert counters.tokens == 128


def test_many_steps_count_as_many() -> None:
    assert Counters(own_steps=3, lr_step=40).stepped(640, 1.0, 10, steps=10) == Stepped(13, 50, 640, 1.0, 0.0, 10)


def test_the_learning_rate_step_follows_the_swarm_and_never_goes_back() -> None:
    counters = Counters()
    for swarms in (40, 7):
        counters.follow(swarms)
        assert counters.lr_step == 40

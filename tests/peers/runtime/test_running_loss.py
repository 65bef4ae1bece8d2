"""The loss that is shown: one bad step does not stay in it, and while all are bad the user sees that."""

import math

import pytest

from decentral.peers.runtime.progress import RunningLoss, mean_loss


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_step_is_out_of_the_average_with_the_next_good_one(bad: float) -> None:
    losses = RunningLoss()
    for loss in (2.0, bad, 2.0):
        losses.add(loss)
    assert (losses.mean, str(losses)) == (2.0, "2.000")


def test_while_losses_are_bad_no_older_one_is_shown() -> None:
    losses = RunningLoss()
    for loss in (2.0, math.nan, math.nan):
        losses.add(loss)
    assert str(losses) == "not finite for 2 steps"


def test_before_the_first_step_there_is_none() -> None:
    assert str(RunningLoss()) == "-"


def test_the_first_loss_weighs_no_more_than_any_other_of_the_first_twenty() -> None:
    losses = RunningLoss()
    for loss in [5.5] + 19 * [2.5]:
        losses.add(loss)
    assert losses.mean == pytest.approx(2.65)


def test_the_average_follows_the_losses() -> None:
    losses = RunningLoss()
    for _ in range(200):
        losses.add(4.0)
    for _ in range(200):
        losses.add(1.0)
    assert losses.mean == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([2.0, 3.0], (2.5, 0)),
        ([2.0, math.nan, 3.0], (2.5, 1)),
        ([math.nan, math.inf], (None, 2)),
    ],
)
def test_a_step_line_says_how_many_steps_are_not_in_its_loss(
    losses: list[float], found: tuple[float | None, int]
) -> None:
    assert mean_loss(losses) == found

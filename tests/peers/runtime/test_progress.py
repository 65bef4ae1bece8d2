"""The swarm's clock, evaluations, checkpoints, and when to stop."""

import math
from collections.abc import Sequence

import pytest

from decentral.core.config import SwarmConfig, TrainConfig
from decentral.core.jobs import Evaluate, Evaluated, JobFailed, Save, Saved, SaveFailed, Sealed, SetClock, Stepped
from decentral.core.journal.events import CheckpointLine, ErrorLine, EvalLine, StepLine
from decentral.core.machine import Log, Woke
from decentral.core.time_spent import TimeSpent
from decentral.core.units import Amount
from decentral.peers.runtime.progress import (
    EVALUATION_SHARE,
    ONE_TIMES,
    ProgressEffect,
    StepClock,
    Stop,
    TrainingProgress,
)


def training(stop_after: str | None = None, lr_step: int = 0) -> TrainingProgress:
    progress = TrainingProgress(
        TrainConfig(eval_every_s=15.0), SwarmConfig(), Amount.parse(stop_after) if stop_after else None
    )
    progress.begin(100.0, lr_step)
    return progress


def step(number: int, tokens: int = 64, loss: float = 3.0) -> Stepped:
    return Stepped(number, number, tokens, loss, TimeSpent(training=0.1, gossip=0.02, beside=0.05), 1)


def dropped(number: int) -> Stepped:
    return Stepped(number, number, 0, 3.0, TimeSpent(training=0.1), 0, dropped=True)


def stops(effects: list[ProgressEffect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Stop)]


def steps_told(effects: Sequence[ProgressEffect]) -> list[StepLine]:
    return [one.event for one in effects if isinstance(one, Log) and isinstance(one.event, StepLine)]


@pytest.mark.parametrize(
    ("own", "others", "followed"),
    [
        (10, [], None),
        (10, [5, 8], None),
        (10, [20, 30], 20),
        (10, [20, 30, 40], 30),
        (50, [20, 30, 40], None),
    ],
)
def test_the_clock_follows_the_upper_median_where_it_is_ahead(
    own: int, others: list[int], followed: int | None
) -> None:
    assert StepClock(training(lr_step=own)).follow(others) == ([SetClock(followed)] if followed else [])


def test_one_liar_moves_nobody() -> None:
    assert StepClock(training(lr_step=10)).follow([10, 1 << 60]) == []
    assert StepClock(training(lr_step=10)).follow([10, 9, 1 << 60]) == []


def test_where_one_other_peer_alone_is_ahead_it_is_followed_a_multiple_as_fast_as_we_train_ourselves() -> None:
    progress = training(lr_step=10)
    clock = StepClock(progress)
    assert clock.follow([1 << 60]) == []
    progress.handle(step(1), 100.1)
    assert clock.follow([1 << 60]) == [SetClock(1 + ONE_TIMES)]
    assert clock.follow([1 << 60]) == []


def test_it_stops_after_steps() -> None:
    progress = training("3steps")
    assert [bool(stops(progress.handle(step(n), 100.0 + n / 10))) for n in (1, 2, 3)] == [False, False, True]


def test_a_resumed_peer_counts_the_steps_since_this_start() -> None:
    """So do tokens and seconds: an earlier process's work must not end this one at its first step."""
    progress = training("3steps")
    told = [bool(stops(progress.handle(step(n), 100.0 + n - 600))) for n in (601, 602, 603)]
    assert told == [False, False, True]
    goal = progress.towards_goal(104.0)
    assert goal is not None
    assert goal.done == 3


def test_it_stops_after_tokens() -> None:
    progress = training("150tokens")
    assert [bool(stops(progress.handle(step(n), 100.0 + n / 10))) for n in (1, 2, 3)] == [False, False, True]


def test_it_stops_after_seconds_since_it_joined() -> None:
    progress = training("90s")
    assert stops(progress.handle(Woke(), 189.9)) == []
    assert len(stops(progress.handle(Woke(), 190.0))) == 1
    assert stops(progress.handle(Woke(), 191.0)) == []


def test_without_a_limit_it_goes_on() -> None:
    progress = training()
    assert not any(stops(progress.handle(step(n), 100.0 + n)) for n in range(1, 50))


def test_it_evaluates_at_once_and_then_every_so_often() -> None:
    progress = training()
    assert progress.handle(Woke(), 100.0) == [Evaluate()]
    assert progress.handle(Woke(), 101.0) == []  # the evaluation is under way
    (line,) = progress.handle(Evaluated(640, 2.5, 0.05), 102.0)
    assert line == Log(EvalLine(tokens=640, loss=2.5, seconds=0.05))
    assert Evaluate() not in progress.handle(Woke(), 116.9)
    assert Evaluate() in progress.handle(Woke(), 117.0)


def test_the_first_evaluation_is_slow_as_all_is_new_and_costs_no_later_one() -> None:
    progress = training()
    progress.handle(Woke(), 100.0)
    progress.handle(Evaluated(0, 5.5, 3.0), 103.0)
    assert Evaluate() not in progress.handle(Woke(), 117.9)
    assert Evaluate() in progress.handle(Woke(), 118.0)
    progress.handle(Evaluated(640, 2.5, 1.0), 119.0)
    assert Evaluate() not in progress.handle(Woke(), 318.9)


def test_evaluations_that_take_long_come_less_often() -> None:
    progress = training()
    progress.handle(Woke(), 80.0)
    progress.handle(Evaluated(0, 5.5, 0.1), 80.5)
    progress.handle(Woke(), 100.0)
    progress.handle(Evaluated(640, 2.5, 0.3), 102.0)
    assert Evaluate() not in progress.handle(Woke(), 102.0 + 0.3 / EVALUATION_SHARE - 0.1)
    assert Evaluate() in progress.handle(Woke(), 102.0 + 0.3 / EVALUATION_SHARE)


def test_a_checkpoint_that_leaving_began_is_not_timed_from_the_one_before() -> None:
    progress = training()
    progress.handle(Woke(), 130.0)
    assert progress.handle(Saved(5, 1000), 132.0) == [Log(CheckpointLine(step=5, bytes=1000, seconds=2.0))]
    assert progress.handle(Saved(6, 1000), 150.0) == [Log(CheckpointLine(step=6, bytes=1000, seconds=0.0))]


def test_it_saves_every_so_often() -> None:
    progress = training()
    assert Save() not in progress.handle(Woke(), 129.9)
    assert Save() in progress.handle(Woke(), 130.0)
    assert Save() not in progress.handle(Woke(), 131.0)
    progress.handle(Saved(5, 1000), 132.0)
    assert Save() not in progress.handle(Woke(), 161.9)
    assert Save() in progress.handle(Woke(), 162.0)


def test_a_checkpoint_that_fails_does_not_stop_training_and_is_tried_again() -> None:
    progress = training()
    progress.handle(Woke(), 130.0)
    (line,) = progress.handle(SaveFailed("OSError: disk full"), 131.0)
    assert line == Log(ErrorLine(reason="checkpoint failed, the old one stays: OSError: disk full"))
    assert Save() in progress.handle(Woke(), 161.0)


def test_any_other_job_that_fails_stops_us_with_its_reason() -> None:
    assert stops(training().handle(JobFailed("Merge", "out of memory"), 101.0)) == ["error: out of memory"]
    reason = "training has diverged: weights are not finite"
    assert stops(training().handle(JobFailed("CloseWindow", reason), 101.0)) == [reason]


def test_a_line_is_about_all_steps_since_the_last_one() -> None:
    progress = training()
    assert progress.handle(step(1, loss=4.0), 100.3) == []
    assert progress.handle(step(2, loss=3.0), 100.9) == []
    (line,) = progress.handle(step(3, loss=2.0), 101.2)
    told = steps_told([line])[0]
    assert (told.step, told.tokens, told.micro_batches, told.loss, told.seconds) == (3, 192, 3, 3.0, 0.3)
    assert told.aside == {"gossip": 0.06, "beside": 0.15}
    assert progress.flush(101.3) == []


def test_what_is_not_yet_in_a_line_is_flushed() -> None:
    progress = training()
    progress.handle(step(1), 100.3)
    assert [line.tokens for line in steps_told(progress.flush(100.4))] == [64]


def test_a_state_that_came_from_the_swarm_is_saved_after_the_first_step() -> None:
    progress = TrainingProgress(TrainConfig(), SwarmConfig(), None)
    progress.begin(100.0, lr_step=7, fetched=True)
    assert Save() not in progress.handle(Woke(), 100.0)
    progress.handle(step(1), 100.5)
    assert progress.wake_at == 100.5
    assert Save() in progress.handle(Woke(), 100.5)


def test_a_newcomer_trains_before_it_evaluates() -> None:
    progress = TrainingProgress(TrainConfig(eval_every_s=15.0), SwarmConfig(), None)
    progress.begin(100.0, 0, fetched=True)
    assert Evaluate() not in progress.handle(Woke(), 114.9)
    assert Evaluate() in progress.handle(Woke(), 115.0)


def test_one_step_without_a_finite_loss_is_journaled_and_does_not_stay_in_the_average() -> None:
    progress = training()
    lines: list[ProgressEffect] = []
    for number, loss in enumerate((2.0, math.nan, 2.0), 1):
        lines += progress.handle(step(number, loss=loss), 100.0 + number)
    assert [(line.loss, line.lost) for line in steps_told(lines)] == [(2.0, 0), (None, 1), (2.0, 0)]
    assert progress.losses.mean == 2.0


def test_steps_that_train_nothing_are_counted_and_keep_the_checkpoint_from_before() -> None:
    progress = training()
    progress.handle(step(1), 100.1)
    lines = [line for number in range(2, 12) for line in progress.handle(dropped(number), 100.0 + number / 100)]
    assert [type(line.event) for line in lines if isinstance(line, Log)] == [ErrorLine]
    assert "gradients were not finite" in progress.divergence.trouble
    assert [line.dropped for line in steps_told(progress.flush(101.0))] == [10]
    assert Save() not in progress.handle(Woke(), 130.0)
    for number in range(12, 60):
        progress.handle(step(number), 131.0 + number / 100)
    assert progress.divergence.trouble == ""
    assert Save() in progress.handle(Woke(), 160.0)


def test_one_dropped_step_now_and_then_is_no_divergence() -> None:
    progress = training()
    for number in range(1, 100):
        progress.handle(dropped(number) if number % 8 == 0 else step(number), 100.0 + number / 100)
        assert progress.divergence.trouble == ""
    assert progress.divergence.dropped == 12


def test_a_loss_that_rises_halfway_back_to_a_guess_s_keeps_the_checkpoint_from_before() -> None:
    progress = training()
    for number in range(1, 60):
        progress.handle(step(number, loss=1.5), 100.0 + number / 100)
    for number in range(60, 200):
        progress.handle(step(number, loss=3.8), 100.0 + number / 100)
    assert "the mean loss has risen from 1.5" in progress.divergence.trouble
    assert Save() not in progress.handle(Woke(), 130.0)


@pytest.mark.parametrize("losses", [[0.3] + 99 * [2.0], 50 * [2.0] + 50 * [2.9], 100 * [5.9], 100 * [math.nan]])
def test_noise_and_harder_text_are_no_divergence(losses: list[float]) -> None:
    progress = training()
    for number, loss in enumerate(losses, 1):
        progress.handle(step(number, loss=loss), 100.0 + number / 100)
    assert progress.divergence.trouble == ""


def test_training_that_does_not_recover_stops_after_a_while_with_one_line() -> None:
    progress = training()
    reasons: list[str] = []
    for number in range(1, 1000):
        reasons += stops(progress.handle(step(number, loss=200.0 if number > 1 else 5.0), 100.0 + number / 2))
    assert reasons[0].startswith("training has diverged: the mean loss has risen from 5.545 (best) to 199.9")
    assert len(reasons) == 1000 - 122, "60 s after the second step"


def test_a_loss_that_falls_from_above_a_guess_s_is_no_divergence() -> None:
    """PyTorch's own embeddings begin with a standard deviation of 1, and a loss far above that of a guess."""
    progress = training()
    for number in range(1, 400):
        progress.handle(step(number, loss=52.0 - number / 12), 100.0 + number)
        assert progress.divergence.trouble == ""


def test_a_loss_that_stays_higher_but_below_a_guess_s_becomes_usual() -> None:
    progress = training()
    for number in range(1, 60):
        progress.handle(step(number, loss=0.3), 100.0 + number)
    for number in range(60, 260):
        assert stops(progress.handle(step(number, loss=3.6), 100.0 + number)) == []
    assert progress.divergence.trouble == ""
    assert Save() in progress.handle(Woke(), 400.0)


def test_a_peer_that_the_others_bring_back_goes_on() -> None:
    progress = training()
    for number in range(1, 100):
        progress.handle(dropped(number), 100.0 + number)
    for number in range(100, 400):
        assert stops(progress.handle(step(number), 200.0 + number)) == []


def test_a_sum_of_gradients_of_routes_with_which_no_step_is_taken_counts_as_one() -> None:
    progress = training()
    for number in range(1, 10):
        progress.handle(Sealed((number,), sound=False), 100.0 + number)
    assert progress.divergence.dropped == 9
    assert progress.divergence.trouble


def test_the_speed_falls_while_nothing_is_trained() -> None:
    progress = training()
    for number in range(1, 200):
        progress.handle(step(number), 100.0 + 0.1 * number)
    assert progress.speed(120.0) == pytest.approx(640, rel=0.01)
    assert progress.speed(160.0) < 64
    assert 0 < progress.speed(3700.0) < 1


def test_steps_that_take_long_are_no_pause() -> None:
    progress = training()
    for number in range(1, 20):
        progress.handle(step(number), 100.0 + 60.0 * number)
    assert progress.speed(100.0 + 60 * 21) == pytest.approx(64 / 60)


def test_stop_after_in_seconds_ends_a_wait_for_weights() -> None:
    progress = TrainingProgress(TrainConfig(), SwarmConfig(), Amount.parse("10s"))
    progress.waits_for_weights(True, 100.0)
    progress.waits_for_weights(True, 105.0)
    assert progress.wake_at == 110.0
    assert stops(progress.handle(Woke(), 109.0)) == []
    assert stops(progress.handle(Woke(), 110.0)) == ["--stop-after reached"]


def test_a_wait_for_weights_that_has_ended_does_not_count() -> None:
    progress = TrainingProgress(TrainConfig(), SwarmConfig(), Amount.parse("10s"))
    progress.waits_for_weights(True, 100.0)
    progress.waits_for_weights(False, 105.0)
    assert stops(progress.handle(Woke(), 200.0)) == []

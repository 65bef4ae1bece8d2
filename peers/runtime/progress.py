"""Track one peer's training: measure speed and loss, and decide when to evaluate, save a checkpoint and stop.

Start at `TrainingProgress`. `StepClock` raises the learning-rate step to the swarm's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.wire.messages import MOST_FOLLOWED
from decentral.comm.wire.transport import Event
from decentral.core.config import BYTES, SwarmConfig, TrainConfig
from decentral.core.jobs import (
    DIVERGED,
    Evaluate,
    Evaluated,
    Job,
    JobFailed,
    Save,
    Saved,
    SaveFailed,
    Sealed,
    SetClock,
    Stepped,
)
from decentral.core.journal.events import CheckpointLine, ErrorLine, EvalLine, StepLine
from decentral.core.machine import Log, Woke, earliest
from decentral.core.time_spent import NO_TIME, TimeSpent
from decentral.core.units import Amount, Seconds
from decentral.peers.runtime.divergence import Divergence

LINE_S = 1.0
CHECKPOINT_SHARE = 0.01  # a slow checkpoint delays the next until checkpoints take at most this share of the time
CHECKPOINT_BYTES_PER_S = 32e6  # a large checkpoint delays the next until the disk writes less than this on average
EVALUATION_SHARE = 0.005  # evaluations are delayed until they take at most this share of the time
RATE_S = 10.0
PAUSE_STEPS = 4  # training counts as paused once a step takes this many times longer than the step before
LEAST_SPEED = 1e-3  # tokens/s that a peer publishes while training is paused, since 0 would mean "not measured yet"
WEIGHT = 0.05  # the average loss gives the latest step this weight, so it covers about 20 steps
ONE_TIMES = 16  # if only one other peer is known, it may raise our step by at most this much for each step we train
ONE_MOST = 64 * ONE_TIMES  # if only one other peer is known, it can raise our step by at most this much at once


@dataclass(slots=True)
class RunningLoss:
    """An exponential average of the steps' finite losses; of the first twenty, their plain mean."""

    mean: float | None = None  # in nats per token; None before the first finite loss
    count: int = 0  # of finite losses
    lost: int = 0  # steps in a row without a finite loss, up to now

    def add(self, loss: float) -> None:
        """Add a step's loss in nats per token to the average; if it is not finite, count it in `self.lost` instead."""
        if not math.isfinite(loss):
            self.lost += 1
            return
        self.lost, self.count = 0, self.count + 1
        weight = max(WEIGHT, 1 / self.count)  # the loss falls fast at first, so that the first must not weigh for long
        self.mean = loss if self.mean is None else (1 - weight) * self.mean + weight * loss

    def __str__(self) -> str:
        """Return the mean as text, "-" before the first loss, or `not finite for 3 steps` after such losses."""
        if self.lost:
            return f"not finite for {self.lost} steps"
        return "-" if self.mean is None else f"{self.mean:.3f}"


def mean_loss(losses: Iterable[float]) -> tuple[float | None, int]:
    """Return the mean of the finite losses (None if none is finite), and the number of losses that are not finite."""
    known = list(losses)
    finite = [loss for loss in known if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None, len(known) - len(finite)


@dataclass(frozen=True, slots=True)
class Stop:
    """Effect: save a checkpoint and leave the swarm, for this reason."""

    reason: str


ProgressEffect = Evaluate | Save | Stop | Log


@dataclass(frozen=True, slots=True)
class GoalProgress:
    """How far a peer is towards its goal, `--stop-after`, in the goal's unit."""

    done: float
    goal: Amount
    left_s: Seconds | None  # time until the goal at this process's mean pace; None: no pace is known yet


@dataclass(slots=True)
class TrainingSpeed:
    """The running average of this peer's tokens/s, with a time constant of RATE_S."""

    tokens_per_s: float = 0.0
    _stepped_at: Seconds | None = None
    _step_s: Seconds = 0.0

    def note_step(self, now: Seconds, joined_at: Seconds | None) -> None:
        """Record that a step ended at `now`; the first step counts from `joined_at`."""
        before = joined_at if self._stepped_at is None else self._stepped_at
        self._step_s, self._stepped_at = 0.0 if before is None else now - before, now

    def trained(self, tokens: int, seconds: Seconds) -> None:
        """Update the average with `tokens` that were trained in the last `seconds`."""
        share = min(1.0, seconds / RATE_S) if self.tokens_per_s else 1.0
        self.tokens_per_s += (tokens / seconds - self.tokens_per_s) * share

    def at(self, now: Seconds) -> float:
        """Return the average in tokens/s, which decays to LEAST_SPEED while training is paused (see PAUSE_STEPS)."""
        if self._stepped_at is None or not self.tokens_per_s:
            return self.tokens_per_s
        pause_s = now - self._stepped_at - max(RATE_S, PAUSE_STEPS * self._step_s)
        return max(LEAST_SPEED, self.tokens_per_s * math.exp(-max(0.0, pause_s) / RATE_S))


@dataclass(slots=True)
class Evaluations:
    """The last held-out loss, and the schedule of evaluations that measure it."""

    every_s: Seconds  # shortest time between two evaluations
    held_out: float | None = None  # last held-out loss in nats per token; None before the first evaluation
    measured_at: Seconds = 0.0
    due_at: Seconds | None = None
    _warm: bool = False  # whether one evaluation has ended; the first also fills caches, so its duration says little

    def begin(self, now: Seconds, fetched: bool) -> None:
        """Schedule the first evaluation: now, or after `self.every_s` if the weights were fetched from other peers."""
        self.due_at = now + self.every_s if fetched else now  # the donor has evaluated fetched weights already

    def take_due(self, now: Seconds) -> bool:
        """Return whether to evaluate now; after True, return False until `measured` schedules the next evaluation."""
        due = self.due_at is not None and now >= self.due_at
        self.due_at = None if due else self.due_at
        return due

    def measured(self, loss: float, seconds: Seconds, now: Seconds) -> None:
        """Record a held-out loss in nats per token, and schedule the next evaluation.

        The next evaluation is due after `self.every_s`, or later if evaluations of `seconds` would otherwise take more
        than EVALUATION_SHARE of the time. The duration of the first evaluation is ignored.
        """
        least_s = seconds / EVALUATION_SHARE if self._warm else 0.0
        self.held_out, self.measured_at, self._warm = loss, now, True
        self.due_at = now + max(self.every_s, least_s)


@dataclass(slots=True)
class SaveTimes:
    """The schedule of checkpoints: when the next one is due, and when the present one began."""

    every_s: Seconds
    due_at: Seconds | None = None  # time of the next checkpoint; None: after the next step, unless one is being written
    since: Seconds | None = None  # time at which the checkpoint being written began; None if none is
    saved_at: Seconds | None = None  # time at which the last checkpoint of this process was on the disk

    def postpone(self, now: Seconds) -> None:
        """Make the next checkpoint due `self.every_s` from now."""
        self.due_at = now + self.every_s

    def soon(self, now: Seconds) -> None:
        """Make a checkpoint due now."""
        self.due_at = now

    def begin_if_idle(self, now: Seconds) -> None:
        """Make a checkpoint due now if none is scheduled or being written; called after each step."""
        if self.due_at is None and self.since is None:
            self.due_at = now

    def take_due(self, now: Seconds, diverged: bool) -> bool:
        """Return whether to begin a checkpoint now; if True, record that it has begun.

        While training has diverged, checkpoints are postponed, so that the old checkpoint stays.
        """
        if self.due_at is None or now < self.due_at:
            return False
        if diverged:
            self.postpone(now)
            return False
        self.due_at, self.since = None, now
        return True

    def failed(self, now: Seconds) -> None:
        """Record that the checkpoint failed; the next is due after `self.every_s`."""
        self.since = None
        self.postpone(now)

    def saved(self, size: int, cost_s: Seconds, now: Seconds) -> Seconds:
        """Record a finished checkpoint, schedule the next, and return how long it took.

        Args:
            size: Bytes written.
            cost_s: Seconds that the compute threads spent on it.
            now: Unix time in seconds.

        Returns:
            Seconds since `take_due` returned True; 0.0 for the last checkpoint, which is made when the peer leaves.
        """
        self.due_at = now + max(self.every_s, cost_s / CHECKPOINT_SHARE, size / CHECKPOINT_BYTES_PER_S)
        self.saved_at = now
        took_s, self.since = 0.0 if self.since is None else now - self.since, None
        return took_s


@dataclass(slots=True)
class TrainingProgress:
    """The state machine that counts steps, tokens and losses, and decides when to evaluate, save and stop."""

    train: TrainConfig
    limits: SwarmConfig
    stop_after: Amount | None
    evaluates: bool = True  # False if this peer holds only some layers and so cannot compute a loss alone
    joined_at: Seconds | None = None
    waits_since: Seconds | None = None  # when this peer began to wait for the run's weights; None: it does not wait
    step: int = 0  # number of the last step that this peer trained
    lr_step: int = 0  # step in the learning-rate schedule, raised to the swarm's step by `StepClock`
    tokens: int = 0
    losses: RunningLoss = field(default_factory=RunningLoss)
    divergence: Divergence = field(default_factory=lambda: Divergence(math.log(BYTES)))
    evaluations: Evaluations = field(init=False)
    rate: TrainingSpeed = field(default_factory=TrainingSpeed)
    spent: TimeSpent = NO_TIME
    micro_batches: int = 0
    _steps_before: int | None = None  # number of the step before this process's first step; None before that step
    _steps: list[Stepped] = field(default_factory=list)
    _line_at: Seconds = 0.0
    _saves: SaveTimes = field(init=False)

    def __post_init__(self) -> None:
        """Make the schedules of evaluations and checkpoints."""
        self.evaluations = Evaluations(self.train.eval_every_s)
        self._saves = SaveTimes(self.limits.checkpoint_every_s)

    def begin(self, now: Seconds, lr_step: int, fetched: bool = False) -> None:
        """Record that training begins at this learning-rate step, and schedule evaluations and checkpoints.

        If the state was `fetched` from other peers, the first checkpoint is due with the first step, because the disk
        has no checkpoint of this state. Otherwise it is due after the usual interval.
        """
        self.joined_at = self._line_at = now
        self.lr_step = max(self.lr_step, lr_step)
        if self.evaluates:
            self.evaluations.begin(now, fetched)
        if not fetched:
            self._saves.postpone(now)

    def waits_for_weights(self, waits: bool, now: Seconds) -> None:
        """Record whether this peer waits for its first weights, and since when.

        Until this peer begins to train, a --stop-after in seconds counts from the beginning of the wait.
        """
        self.waits_since = None if not waits else now if self.waits_since is None else self.waits_since

    def save_soon(self, now: Seconds) -> None:
        """Make a checkpoint due now; called when layers have changed, since the last checkpoint has the old layers."""
        self._saves.soon(now)

    @property
    def saved_at(self) -> Seconds | None:
        """Return the Unix time of the last checkpoint that this process wrote; None before the first."""
        return self._saves.saved_at

    @property
    def wake_at(self) -> Seconds | None:
        """Return when to evaluate, save or stop next; None if no time is known."""
        return earliest((self.evaluations.due_at, self._saves.due_at, self._stop_at()))

    def handle(self, event: Event, now: Seconds) -> list[ProgressEffect]:
        """Handle a step, a timer event (Woke), or the outcome of an evaluation, checkpoint or failed job."""
        match event:
            case Stepped():
                return self._record_step(event, now)
            case Sealed(sound=sound):
                return [] if sound else self._judged(True, None, now)  # without a finite gradient, the step is skipped
            case Evaluated(tokens, loss, seconds):
                self.evaluations.measured(loss, seconds, now)
                return [Log(EvalLine(tokens=tokens, loss=round(loss, 4), seconds=round(seconds, 4)))]
            case Saved(lr_step, size, cost_s):
                took_s = self._saves.saved(size, cost_s, now)
                return [Log(CheckpointLine(step=lr_step, bytes=size, seconds=round(took_s, 3)))]
            case SaveFailed():
                self._saves.failed(now)
                return [Log(ErrorLine(reason=f"checkpoint failed, {event.said}"))]
            case JobFailed(job, reason):
                stop = Stop(reason if reason.startswith(DIVERGED) else f"error: {reason}")
                return [Log(ErrorLine(reason=f"{job}: {reason}")), stop]
            case Woke():
                return self._due(now)
        return []

    @property
    def tokens_per_s(self) -> float:
        """Return the average training speed in tokens/s, which does not fall during a pause."""
        return self.rate.tokens_per_s

    def speed(self, now: Seconds) -> float:
        """Return the average training speed in tokens/s, which decays during a pause."""
        return self.rate.at(now)

    def towards_goal(self, now: Seconds) -> GoalProgress | None:
        """Return how far this peer is towards --stop-after; None without a goal, or before it trains."""
        goal, began = self.stop_after, self.joined_at
        if goal is None or began is None:
            return None
        if goal.kind == "s":
            return GoalProgress(now - began, goal, began + goal.value - now)
        done = self._done(goal)
        return GoalProgress(done, goal, (goal.value - done) * (now - began) / done if done else None)

    def _done(self, goal: Amount) -> int:
        """Return the steps or tokens that this process has trained, in the unit of `goal`."""
        if goal.kind == "tokens":
            return self.tokens
        return 0 if self._steps_before is None else self.step - self._steps_before

    def flush(self, now: Seconds) -> list[Log]:
        """Return a journal line about the steps since the last line, and update the speed; [] without new steps."""
        if not self._steps:
            return []
        steps, self._steps = self._steps, []
        tokens, spent = sum(step.tokens for step in steps), sum((step.spent for step in steps), NO_TIME)
        took = max(1e-3, now - self._line_at)
        self.rate.trained(tokens, took)
        self._line_at = now
        loss, lost = mean_loss(step.loss for step in steps)
        line = StepLine(
            step=steps[-1].step,
            lr_step=steps[-1].lr_step,
            tokens=tokens,
            micro_batches=sum(step.micro_batches for step in steps),
            loss=None if loss is None else round(loss, 4),
            lost=lost,
            seconds=round(spent.training, 4),
            dropped=sum(step.dropped for step in steps),
            aside={kind: round(seconds, 4) for kind, seconds in spent.aside().items()},
        )
        return [Log(line)]

    def _record_step(self, step: Stepped, now: Seconds) -> list[ProgressEffect]:
        self._steps.append(step)
        self.rate.note_step(now, self.joined_at)
        self._saves.begin_if_idle(now)
        self._steps_before = step.step - 1 if self._steps_before is None else self._steps_before
        self.step, self.lr_step = step.step, step.lr_step
        self.tokens += step.tokens
        self.spent += step.spent
        self.micro_batches += step.micro_batches
        self.losses.add(step.loss)
        lines = self._judged(step.dropped, step.loss if math.isfinite(step.loss) else None, now)
        lines += self.flush(now) if now >= self._line_at + LINE_S else []
        goal = self.stop_after
        stops = goal is not None and goal.kind != "s" and self._done(goal) >= goal.value
        return [*lines, Stop(f"--stop-after {goal}")] if stops else lines

    def _judged(self, dropped: bool, loss: float | None, now: Seconds) -> list[ProgressEffect]:
        """Pass a step to `divergence`, and return its warnings; also return Stop if training does not recover."""
        lines = self.divergence.judge_step(dropped, loss, now)
        return [*lines, *([Stop(self.divergence.trouble)] if self.divergence.hopeless else ())]

    def _due(self, now: Seconds) -> list[ProgressEffect]:
        effects: list[ProgressEffect] = []
        if self.evaluations.take_due(now):
            effects.append(Evaluate())
        if self._saves.take_due(now, bool(self.divergence.trouble)):
            effects.append(Save())
        stop_at = self._stop_at()
        if stop_at is not None and now >= stop_at:
            self.stop_after = None
            effects.append(Stop("--stop-after reached"))
        return effects

    def _stop_at(self) -> Seconds | None:
        since = self.waits_since if self.joined_at is None else self.joined_at
        if since is None or self.stop_after is None or self.stop_after.kind != "s":
            return None
        return since + self.stop_after.value


@dataclass(slots=True)
class StepClock:
    """Decides when a peer skips ahead in the learning-rate schedule, to the swarm's position.

    The node calls `follow` after each lookup of peers' records. A peer below the upper median of its own step and the
    published steps moves to this median. So a slow peer does not train at a warm-up rate while the others' rate already
    decays, and one peer that claims a billion steps has no effect. A single other peer can raise our step at most
    ONE_TIMES as fast as we train, so that a liar cannot move us to the end of the schedule at once.
    """

    progress: TrainingProgress
    _own_step: int = 0
    _catches_up: int = 0  # by how many steps a single other peer may still move us ahead

    def follow(self, lr_steps: Iterable[int]) -> list[Job]:
        """Return a job that raises our step to the median of our step and `lr_steps`; [] if we are not behind."""
        own, trained = self.progress.lr_step, max(0, self.progress.step - self._own_step)
        self._own_step = self.progress.step
        self._catches_up = min(ONE_MOST, self._catches_up + ONE_TIMES * trained)
        known = sorted([own, *[step for step in lr_steps if step < MOST_FOLLOWED]])
        ahead = known[len(known) // 2] - own
        if len(known) == 2:
            ahead = min(ahead, self._catches_up)
            self._catches_up -= max(0, ahead)
        return [SetClock(own + ahead)] if ahead > 0 else []

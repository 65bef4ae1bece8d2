"""How far training is: step lines, evaluations, checkpoints, and when to stop."""

import math
from dataclasses import dataclass, field

from decentral.comm.wire.transport import Event
from decentral.core.config import BYTES, SwarmConfig, TrainConfig
from decentral.core.jobs import DIVERGED, Evaluate, Evaluated, JobFailed, Save, Saved, SaveFailed, Sealed, Stepped
from decentral.core.machine import Log, Woke, earliest, log
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import NO_TIME, TimeSpent
from decentral.core.units import Amount, Seconds
from decentral.peers.runtime.divergence import Divergence
from decentral.peers.runtime.running_loss import RunningLoss, loss_fields

LINE_S = 1.0  # between two `step` lines
CHECKPOINT_SHARE = 0.01  # of the time: checkpoints that take longer come less often
CHECKPOINT_BYTES_PER_S = (
    32e6  # what a disk shall be written at, on average: a large model's checkpoints come less often
)
EVALUATION_SHARE = 0.005  # of the time
RATE_S = 10.0  # time constant of the average of tokens/s
PAUSE_STEPS = 4  # times as long as between the last two steps: a longer silence is a pause, not a long step
LEAST_SPEED = 1e-3  # tokens/s of a peer that has stopped to train: 0 would say that it was not measured


@dataclass(frozen=True, slots=True)
class Stop:
    """Effect: save a checkpoint and leave the swarm."""

    reason: str


ProgressEffect = Evaluate | Save | Stop | Log


@dataclass(slots=True)
class TrainingSpeed:
    tokens_per_s: float = 0.0  # on average; 0: not measured
    _stepped_at: Seconds | None = None
    _step_s: Seconds = 0.0  # between the last two steps

    def stepped(self, now: Seconds, joined_at: Seconds | None) -> None:
        before = joined_at if self._stepped_at is None else self._stepped_at
        self._step_s, self._stepped_at = 0.0 if before is None else now - before, now

    def trained(self, tokens: int, seconds: Seconds) -> None:
        share = min(1.0, seconds / RATE_S) if self.tokens_per_s else 1.0
        self.tokens_per_s += (tokens / seconds - self.tokens_per_s) * share

    def at(self, now: Seconds) -> float:
        """Less than on average, where the last step is longer ago than a long step takes."""
        if self._stepped_at is None or not self.tokens_per_s:
            return self.tokens_per_s
        pause_s = now - self._stepped_at - max(RATE_S, PAUSE_STEPS * self._step_s)
        return max(LEAST_SPEED, self.tokens_per_s * math.exp(-max(0.0, pause_s) / RATE_S))


@dataclass(slots=True)
class Evaluations:
    """The held-out loss, and when it is measured next. A peer that holds a part of the model cannot measure it."""

    every_s: Seconds  # at least
    held_out: float | None = None  # nats per token
    measured_at: Seconds = 0.0
    due_at: Seconds | None = None
    _warm: bool = False  # whether one was made: the first one also pays for what later ones find ready

    def begin(self, now: Seconds, fetched: bool) -> None:
        self.due_at = now + self.every_s if fetched else now  # donors have evaluated what was fetched

    def take_due(self, now: Seconds) -> bool:
        """Return whether one is due. It is not due again before its outcome has come."""
        due = self.due_at is not None and now >= self.due_at
        self.due_at = None if due else self.due_at
        return due

    def measured(self, loss: float, seconds: Seconds, now: Seconds) -> None:
        """Take a result. What it cost decides when the next one is due, unless it was this process's first one."""
        least_s = seconds / EVALUATION_SHARE if self._warm else 0.0
        self.held_out, self.measured_at, self._warm = loss, now, True
        self.due_at = now + max(self.every_s, least_s)


@dataclass(slots=True)
class SaveTimes:
    """When the next checkpoint is due, and since when one is being written."""

    every_s: Seconds  # at least
    due_at: Seconds | None = None  # None: with the next step, if none is being written
    since: Seconds | None = None

    def postpone(self, now: Seconds) -> None:
        self.due_at = now + self.every_s

    def soon(self, now: Seconds) -> None:
        self.due_at = now

    def stepped(self, now: Seconds) -> None:
        if self.due_at is None and self.since is None:
            self.due_at = now

    def take_due(self, now: Seconds, diverged: bool) -> bool:
        """Return whether one is to be written now. While training has diverged, that of before stays."""
        if self.due_at is None or now < self.due_at:
            return False
        if diverged:
            self.postpone(now)
            return False
        self.due_at, self.since = None, now
        return True

    def failed(self, now: Seconds) -> None:
        self.since = None
        self.postpone(now)

    def saved(self, size: int, cost_s: Seconds, now: Seconds) -> Seconds:
        """Return how long it took; 0 for that of leaving, which nothing here began."""
        self.due_at = now + max(self.every_s, cost_s / CHECKPOINT_SHARE, size / CHECKPOINT_BYTES_PER_S)
        took_s, self.since = 0.0 if self.since is None else now - self.since, None
        return took_s


@dataclass(slots=True)
class TrainingProgress:
    train: TrainConfig
    limits: SwarmConfig
    stop_after: Amount | None
    evaluates: bool = True  # a peer that holds a part of the model cannot evaluate by itself
    joined_at: Seconds | None = None
    waits_since: Seconds | None = None  # for the first weights, which no peer gives; None: they come, or are here
    step: int = 0
    lr_step: int = 0
    tokens: int = 0  # trained by this process since it joined
    losses: RunningLoss = field(default_factory=RunningLoss)
    divergence: Divergence = field(default_factory=lambda: Divergence(math.log(BYTES)))
    evaluations: Evaluations = field(init=False)
    rate: TrainingSpeed = field(default_factory=TrainingSpeed)
    spent: TimeSpent = NO_TIME  # by the training thread since it joined
    micro_batches: int = 0
    _steps: list[Stepped] = field(default_factory=list)  # steps since the last line
    _line_at: Seconds = 0.0
    _saves: SaveTimes = field(init=False)

    def __post_init__(self) -> None:
        self.evaluations = Evaluations(self.train.eval_every_s)
        self._saves = SaveTimes(self.limits.checkpoint_every_s)

    def begin(self, now: Seconds, lr_step: int, fetched: bool = False) -> None:
        """`fetched`: the state came from the swarm, and the disk has none or an older one: the first step saves it."""
        self.joined_at = self._line_at = now
        self.lr_step = max(self.lr_step, lr_step)
        if self.evaluates:
            self.evaluations.begin(now, fetched)
        if not fetched:
            self._saves.postpone(now)

    def waits_for_weights(self, waits: bool, now: Seconds) -> None:
        """Count `--stop-after` in seconds from the begin of a wait for the first weights: such a wait may never end."""
        self.waits_since = None if not waits else now if self.waits_since is None else self.waits_since

    def save_soon(self, now: Seconds) -> None:
        """Saves at the next chance: the checkpoint on the disk is of another span than the present one."""
        self._saves.soon(now)

    @property
    def wake_at(self) -> Seconds | None:
        return earliest((self.evaluations.due_at, self._saves.due_at, self._stop_at()))

    def handle(self, event: Event, now: Seconds) -> list[ProgressEffect]:
        match event:
            case Stepped():
                return self._stepped(event, now)
            case Sealed(sound=sound):
                return [] if sound else self._judged(True, None, now)  # no step is taken with such a sum
            case Evaluated(tokens, loss, seconds):
                self.evaluations.measured(loss, seconds, now)
                return [log("eval", tokens=tokens, loss=round(loss, 4), seconds=round(seconds, 4))]
            case Saved(step, size, cost_s):
                took_s = self._saves.saved(size, cost_s, now)
                return [log("checkpoint", step=step, bytes=size, seconds=round(took_s, 3))]
            case SaveFailed(reason):
                self._saves.failed(now)
                return [log("error", reason=f"checkpoint failed, the old one stays: {reason}")]
            case JobFailed(job, reason):
                stop = Stop(reason if reason.startswith(DIVERGED) else f"error: {reason}")
                return [log("error", reason=f"{job}: {reason}"), stop]
            case Woke():
                return self._due(now)
        return []

    @property
    def tokens_per_s(self) -> float:
        """While steps are taken, on average."""
        return self.rate.tokens_per_s

    def speed(self, now: Seconds) -> float:
        """Tokens/s, which fall while no step is taken."""
        return self.rate.at(now)

    def flush(self, now: Seconds) -> list[Log]:
        """The journal line about the steps since the last one."""
        if not self._steps:
            return []
        steps, self._steps = self._steps, []
        tokens, spent = sum(step.tokens for step in steps), sum((step.spent for step in steps), NO_TIME)
        took = max(1e-3, now - self._line_at)
        self.rate.trained(tokens, took)
        self._line_at = now
        micro_batches, losses = sum(step.micro_batches for step in steps), loss_fields(step.loss for step in steps)
        dropped = sum(step.dropped for step in steps)
        aside = {name: round(seconds, 4) for name, seconds in spent.aside().items()}
        figures: JsonObject = {"step": steps[-1].step, "lr_step": steps[-1].lr_step, "tokens": tokens}
        figures |= {"micro_batches": micro_batches, **losses, "seconds": round(spent.training, 4)}
        figures |= {"dropped": dropped} if dropped else {}
        return [Log("step", figures | {"aside": aside})]

    def _stepped(self, step: Stepped, now: Seconds) -> list[ProgressEffect]:
        self._steps.append(step)
        self.rate.stepped(now, self.joined_at)
        self._saves.stepped(now)
        self.step, self.lr_step = step.step, step.lr_step
        self.tokens += step.tokens
        self.spent += step.spent
        self.micro_batches += step.micro_batches
        self.losses.add(step.loss)
        lines = self._judged(step.dropped, step.loss if math.isfinite(step.loss) else None, now)
        lines += self.flush(now) if now >= self._line_at + LINE_S else []
        reached = {"steps": step.step, "tokens": self.tokens}.get(self.stop_after.kind if self.stop_after else "", 0)
        stops = self.stop_after and 0 < self.stop_after.value <= reached
        return [*lines, Stop(f"--stop-after {self.stop_after}")] if stops else lines

    def _judged(self, dropped: bool, loss: float | None, now: Seconds) -> list[ProgressEffect]:
        """Look whether training has diverged."""
        lines = self.divergence.stepped(dropped, loss, now)
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

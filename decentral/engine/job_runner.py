"""Jobs and their outcomes: what Compute and the simulator's surrogate do alike.

What the layers are made of is behind two protocols: WorkingSpan (the fragments that a peer holds) and StageLayers
(those layers at work for routes). engine/span.py and engine/stage_runner.py are made of tensors, sim/surrogate.py and
sim/surrogate_stages.py of a few numbers for each fragment.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from decentral.core import jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import FORWARD_PART, Fragment, forward_part, share
from decentral.engine.checkpoint import MicroBatchNumbers
from decentral.engine.gossip_jobs import FragmentGossip
from decentral.engine.span import HeldSpan, RetainedStore, change_span
from decentral.engine.step import Counters
from decentral.engine.threads import Phase, Program, finish


class PendingPass(Protocol):
    """An execution of layers [first, last) whose backward pass has not come yet."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...


class StageLayers(Protocol):
    """The layers of one peer at work for routes."""

    @property
    def pending(self) -> Mapping[int, PendingPass]: ...  # by token

    def forward(self, job: jobs.Forward) -> jobs.Outcome: ...

    def backward(self, job: jobs.Backward) -> jobs.Outcome: ...

    def forget(self, tokens: Sequence[int]) -> jobs.Forgotten: ...

    def compare(self, job: jobs.Compare) -> jobs.Compared: ...

    def seal(self, slot: int) -> jobs.Sealed: ...

    def drop(self, slot: int) -> jobs.Forgotten: ...

    def apply(self, lr_step: int, slot: int) -> jobs.AppliedTokens: ...


class Pause(Enum):
    """Why training takes no steps of its own, whatever is merged."""

    BEFORE_START = auto()
    EVERY_ROUND = auto()  # with exact gradients: each round's step is a job


class WorkingSpan(HeldSpan, Protocol):
    @property
    def stages(self) -> StageLayers: ...


def time_kind(job: jobs.Job) -> str:
    """What the training thread's time for this job is spent on: a field of TimeSpent."""
    match job:
        case jobs.CloseWindow() | jobs.Rest() | jobs.EncodeSections() | jobs.Merge():
            return "gossip"
        case jobs.CloseRound():  # it encodes sums of gradients for the others
            return "gossip"
        case jobs.Save():
            return "checkpoint"
        case jobs.Evaluate() | jobs.Compare():
            return "evaluation"
        case jobs.ExportState() | jobs.ImportState() | jobs.ChangeSpan() | jobs.ExportRetained():
            return "state"
        case jobs.SetClock() | jobs.Start():
            return "state"
    return "training"


class JobRunner(ABC):
    """Carries out jobs on the span that it holds. Not thread-safe: one thread owns it."""

    def __init__(
        self, span: WorkingSpan, retained: RetainedStore, numbers: MicroBatchNumbers, synchronous: bool
    ) -> None:
        self.span, self.retained, self.numbers, self.synchronous = span, retained, numbers, synchronous
        self.counters = Counters()
        self.pause: Pause | None = Pause.BEFORE_START
        self.restored = False  # whether this peer goes on from a checkpoint

    @property
    def gossip(self) -> FragmentGossip:
        return self.span.gossip

    @property
    def fragments(self) -> list[Fragment]:
        return self.span.fragments

    @property
    def lr_step(self) -> int:
        return self.counters.lr_step

    @property
    def waits(self) -> bool:
        """Whether only a job can move this peer: training waits for merges, or it holds only a part of the model."""
        paused = self.pause is not None or bool(self.gossip.merging)
        return paused or len(self.fragments) < len(self.span.cuts)

    def retained_states(self) -> jobs.RetainedStates:
        """The fragments that this peer has given up and whose states its disk keeps, with their steps."""
        return self.retained.steps(cut.index for cut in self.span.cuts)

    def work(self, job: jobs.Job) -> float:
        """The job's share of the computing of one micro-batch through the whole model. Ask before it is done."""
        cuts = self.span.cuts
        match job:
            case jobs.Draw() | jobs.Forward():
                first = job.first if isinstance(job, jobs.Forward) else 0
                return share(cuts, first, job.last) * forward_part(job.last, cuts[-1].last)
            case jobs.Backward(token) if token in self.span.stages.pending:
                execution = self.span.stages.pending[token]
                return (1 - FORWARD_PART) * share(cuts, execution.first, execution.last)
        return 0.0

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Carries out any job but Finish at once, all its phases on the calling thread."""
        return finish(self.program(job))

    def program(self, job: jobs.Job) -> Program:
        """A job in its phases. What another peer sent and cannot be used is an outcome, not an error."""
        match job:
            case jobs.CloseWindow() | jobs.Rest() | jobs.EncodeSections() | jobs.Merge() | jobs.ExportState():
                return self.gossip.program(job)
            case jobs.ImportState():
                return self._import(job)
            case jobs.ChangeSpan():
                return self._change_span(job)
            case jobs.ExportRetained(fragment):
                return self._export_retained(fragment)
            case jobs.Evaluate():
                return self._evaluate()
            case jobs.Save():
                return self._save()
            case _:
                return self._at_edge(job)

    def _at_edge(self, job: jobs.Job) -> Program:
        yield Phase.EDGE
        return self._do(job)

    def _do(self, job: jobs.Job) -> jobs.Outcome:
        """A job that has one phase, at a step edge."""
        match job:
            case jobs.SetClock(step, versions):
                self.counters.follow(step, exactly=self.synchronous)
                self.counters.versions |= dict(versions)
                return jobs.ClockSet(self.lr_step)
            case jobs.Start(newcomer):
                return self._start(newcomer)
            case _:
                return self._execute(job)

    def _import(self, job: jobs.ImportState) -> Program:
        """Adopts all of these states or none: they are decoded and checked first."""
        yield Phase.BESIDE
        try:
            donated = self.gossip.decoded(job.blobs)
        except ProtocolError as error:
            return jobs.StateImported(False, error.reason)
        yield Phase.HELD
        self.gossip.start(donated)
        self.counters.follow(job.step, exactly=self.synchronous)
        return jobs.StateImported(True)

    def _change_span(self, job: jobs.ChangeSpan) -> Program:
        yield Phase.HELD
        return change_span(job, self.span, self.retained, self.counters)

    def _export_retained(self, fragment: int) -> Program:
        yield Phase.BESIDE
        step, layout, blob = self.retained.read(fragment) or (0, (), b"")
        return jobs.RetainedExported(fragment, step, layout, blob)

    def _execute(self, job: jobs.Job) -> jobs.Outcome:
        """A job of a route."""
        stages = self.span.stages
        match job:
            case jobs.Draw():
                number = self.numbers.take(self.counters.micro_batches)
                self.counters.micro_batches = max(self.counters.micro_batches, self.numbers.least)
                return self._draw(job, number, number if self.synchronous else self.numbers.name(number))
            case jobs.Forward():
                return stages.forward(job)
            case jobs.Backward():
                return stages.backward(job)
            case jobs.Compare():
                return stages.compare(job)
            case jobs.Forget(tokens):
                return stages.forget(tokens)
            case jobs.Seal(ready, then, slot):
                sealed = stages.seal(slot)
                if then is None or not sealed.sound or set(sealed.tokens) != set(ready):
                    return sealed
                return replace(self._apply(then), executions=sealed.tokens)
            case jobs.Drop(slot):
                return stages.drop(slot)
            case jobs.Apply():
                return self._apply(job)
        raise AssertionError(f"{type(self).__name__} does no {job!r}")

    def _apply(self, job: jobs.Apply) -> jobs.Stepped:
        applied = self.span.stages.apply(self.lr_step, job.slot)
        return replace(self._stepped(job.tokens, job.loss, job.micro_batches), applied=applied)

    def _stepped(self, tokens: int, loss: float, micro_batches: int) -> jobs.Stepped:
        """Count a step, and report it with the time that it took."""
        return self.counters.stepped(tokens, loss, micro_batches)

    def _start(self, newcomer: bool) -> jobs.Started:
        self.gossip.begin(newcomer)
        self.pause = Pause.EVERY_ROUND if self.synchronous else None
        return jobs.Started(self.lr_step)

    @abstractmethod
    def _draw(self, job: jobs.Draw, number: int, name: int) -> jobs.Outcome:
        """Begins this peer's micro-batch with this number. `name`: the number by which other peers know it."""

    @abstractmethod
    def _evaluate(self) -> Program: ...

    @abstractmethod
    def _save(self) -> Program: ...

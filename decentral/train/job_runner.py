"""Jobs and their outcomes: what Compute and the simulator's surrogate do alike.

What the layers are made of is behind two protocols: WorkingSpan (the fragments that a peer holds) and StageLayers
(those layers at work for routes). train/span.py and train/stage_runner.py are made of tensors, sim/surrogate.py and
sim/surrogate_stages.py of a few numbers for each fragment.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from decentral.core import jobs
from decentral.core.fragments import FORWARD_PART, forward_part, share
from decentral.train.checkpoint import MicroBatchNumbers
from decentral.train.counters import Counters
from decentral.train.fragment_gossip import FragmentGossip
from decentral.train.span_change import HeldSpan, RetainedStore, change_span


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

    def seal(self, slot: int) -> jobs.Sealed: ...

    def drop(self, slot: int) -> jobs.Forgotten: ...

    def apply(self, lr_step: int, slot: int) -> None: ...


class WorkingSpan(HeldSpan, Protocol):
    @property
    def stages(self) -> StageLayers: ...


class JobRunner(ABC):
    """Carries out jobs on the span that it holds. Not thread-safe: one thread owns it."""

    def __init__(
        self, span: WorkingSpan, retained: RetainedStore, numbers: MicroBatchNumbers, synchronous: bool
    ) -> None:
        self.span, self.retained, self.numbers, self.synchronous = span, retained, numbers, synchronous
        self.counters = Counters()
        self.restored = False  # whether this peer goes on from a checkpoint

    @property
    def gossip(self) -> FragmentGossip:
        return self.span.gossip

    @property
    def fragments(self) -> list[jobs.Fragment]:
        return self.span.fragments

    @property
    def lr_step(self) -> int:
        return self.counters.lr_step

    @property
    def waits(self) -> bool:
        """Whether only a job can move this peer: training waits for a merge, or it holds only a part of the model."""
        return self.gossip.holding is not None or len(self.fragments) < len(self.span.cuts)

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
        """Carries out any job but Finish and those of synchronous rounds, which only Compute does.

        What another peer sent and cannot be used is an outcome, not an error.
        """
        match job:
            case jobs.CloseWindow() | jobs.Merge() | jobs.Absorb() | jobs.ExportState():
                return self.gossip.do(job)
            case jobs.ImportState(blobs, step):
                imported = self.gossip.adopt(blobs)
                if imported.accepted:
                    self._follow(step)
                return imported
            case jobs.SetClock(step, versions):
                self._follow(step)
                self.counters.versions |= dict(versions)
                return jobs.ClockSet(self.lr_step)
            case jobs.Start(newcomer):
                return self._start(newcomer)
            case jobs.ChangeSpan():
                return change_span(job, self.span, self.retained, self.counters)
            case jobs.ExportRetained(fragment):
                return jobs.RetainedExported(fragment, *(self.retained.read(fragment) or (0, (), b"")))
            case jobs.Evaluate():
                return self._evaluate()
            case jobs.Save():
                return self._save()
            case jobs.CloseRound() | jobs.Advance() | jobs.Finish():
                raise AssertionError(f"{type(self).__name__} does no {job!r}")
            case _:
                return self._execute(job)

    def _execute(self, job: jobs.StageJob) -> jobs.Outcome:
        """A job of a route."""
        stages = self.span.stages
        match job:
            case jobs.Draw():
                number = self.numbers.take(self.counters.micro_batches)
                self.counters.micro_batches = number + 1
                return self._draw(job, number)
            case jobs.Forward():
                return stages.forward(job)
            case jobs.Backward():
                return stages.backward(job)
            case jobs.Forget(tokens):
                return stages.forget(tokens)
            case jobs.Seal(ready, then, slot):
                sealed = stages.seal(slot)
                if then is None or set(sealed.tokens) != set(ready):
                    return sealed
                return replace(self._apply(then), executions=sealed.tokens)
            case jobs.Drop(slot):
                return stages.drop(slot)
            case jobs.Apply():
                return self._apply(job)

    def _apply(self, job: jobs.Apply) -> jobs.Stepped:
        self.span.stages.apply(self.lr_step, job.slot)
        return self.counters.stepped(job.tokens, job.loss, job.micro_batches)

    def _follow(self, lr_step: int) -> None:
        """Takes over the swarm's learning-rate step where it is ahead of ours; in a synchronous run they are equal."""
        if self.synchronous:
            self.counters.lr_step = lr_step
        else:
            self.counters.follow(lr_step)

    def _start(self, newcomer: bool) -> jobs.Started:
        self.gossip.begin(newcomer)
        return jobs.Started(self.lr_step)

    @abstractmethod
    def _draw(self, job: jobs.Draw, number: int) -> jobs.Outcome:
        """Begins this peer's micro-batch with this number."""

    @abstractmethod
    def _evaluate(self) -> jobs.Evaluated: ...

    @abstractmethod
    def _save(self) -> jobs.Saved: ...

"""Carry out a peer's jobs. Real training (`Compute`) and the simulator's surrogate of training share this code.

Start reading at `JobRunner.program`. Two interfaces stand for a peer's layers: `WorkingSpan` (the fragments that the
peer holds) and `StageLayers` (their work in routed training, where a micro-batch passes through the layers of several
peers). In real training, `Span` and `StageRunner` implement them with tensors. In the simulator, `SurrogateSpan` and
`SurrogateStages` implement them with a few numbers for each fragment.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from decentral.core import jobs
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment
from decentral.core.layer_work import forward_share, share
from decentral.engine.gossip_jobs import FragmentGossip
from decentral.engine.micro_batch_numbers import MicroBatchNumbers
from decentral.engine.span import HeldSpan, RetainedStore, change_span
from decentral.engine.step import Counters
from decentral.engine.threads import Phase, Program, finish


class PendingPass(Protocol):
    """Interface of a micro-batch after its forward pass through layers [first, last) and before its backward pass."""

    @property
    def first(self) -> int:
        """The first layer of the forward pass."""

    @property
    def last(self) -> int:
        """The layer after the forward pass's last layer."""


class StageLayers(Protocol):
    """Interface of a peer's layers in routed training. Each method does the job of the same name (`core.jobs`)."""

    @property
    def pending(self) -> Mapping[int, PendingPass]:
        """The micro-batches that wait for their backward passes, by execution id (the field `local_id` of jobs)."""

    def forward(self, job: jobs.Forward) -> jobs.Outcome:
        """Run another peer's micro-batch forward; if the job ends at the model's last layer, also run it backward."""

    def backward(self, job: jobs.Backward) -> jobs.Outcome:
        """Run the backward pass of a pending micro-batch, and add its gradients to the open (not yet sealed) sum."""

    def forget(self, executions: Sequence[int]) -> jobs.Forgotten:
        """Drop the pending executions with these ids and free their memory; unknown ids are ignored."""

    def compare(self, job: jobs.Compare) -> jobs.Compared:
        """Compare the job's last gradient with each of its earlier gradients, by cosine and ratio of norms."""

    def undo(self, job: jobs.Undo) -> jobs.Undone:
        """Take the gradients of an execution out of the open sum, by running its passes again."""

    def seal(self, slot: int) -> jobs.Sealed:
        """Move the open sum of gradients into a slot, where it waits for `apply` or `drop`, and begin a new sum."""

    def drop(self, slot: int) -> jobs.Forgotten:
        """Discard the sealed sum of gradients in a slot."""

    def apply(self, lr_step: int, slot: int) -> jobs.AppliedTokens:
        """Take each fragment's optimizer step with the sealed sum of gradients in a slot, and empty the slot."""


class Pause(Enum):
    """A reason why the training thread does jobs but takes no steps of its own."""

    BEFORE_START = auto()
    EVERY_ROUND = auto()  # a synchronous run takes each step as a job


class WorkingSpan(HeldSpan, Protocol):
    """Interface of the fragments that a peer holds, with their gossip and their work in routed training."""

    @property
    def stages(self) -> StageLayers:
        """The executor of routed micro-batches in the held layers."""


def time_kind(job: jobs.Job) -> str:
    """Return the field of `TimeSpent` that counts the time that the training thread spends on this job."""
    match job:
        case jobs.CloseWindow() | jobs.Rest() | jobs.EncodeSections() | jobs.Merge():
            return "gossip"
        case jobs.CloseRound():
            return "gossip"
        case jobs.Save():
            return "checkpoint"
        case jobs.Evaluate() | jobs.Compare():
            return "evaluation"
        case jobs.ExportState() | jobs.ImportState() | jobs.ChangeSpan():
            return "state"
        case jobs.ExportRetained() | jobs.RetainCopy() | jobs.DropCopy():
            return "state"
        case jobs.SetClock() | jobs.Start():
            return "state"
    return "training"


class JobRunner(ABC):
    """A peer's layers and counters, and the programs of its jobs. Not thread-safe: one thread owns it."""

    def __init__(
        self, span: WorkingSpan, retained: RetainedStore, numbers: MicroBatchNumbers, synchronous: bool
    ) -> None:
        """Begin paused: training takes no steps before the job Start.

        Args:
            span: The fragments that the peer holds.
            retained: States on disk of fragments that the peer does not hold.
            numbers: The source of micro-batch numbers.
            synchronous: Whether the run trains in synchronous rounds.
        """
        self.span, self.retained, self.numbers, self.synchronous = span, retained, numbers, synchronous
        self.counters = Counters()
        self.pause: Pause | None = Pause.BEFORE_START
        self.restored = False

    @property
    def gossip(self) -> FragmentGossip:
        """The gossip of the held fragments: it closes windows, merges, and exports states."""
        return self.span.gossip

    @property
    def fragments(self) -> list[Fragment]:
        """The held fragments."""
        return self.span.fragments

    @property
    def lr_step(self) -> int:
        """This peer's estimate of the swarm's learning-rate step."""
        return self.counters.lr_step

    @property
    def waits(self) -> bool:
        """Whether training takes no steps of its own: it is paused, awaits a merge, or lacks a part of the model."""
        paused = self.pause is not None or bool(self.gossip.merging)
        return paused or len(self.fragments) < len(self.span.cuts)

    def retained_states(self) -> jobs.RetainedStates:
        """Return (fragment, learning-rate step) for each fragment whose state this peer's disk retains."""
        return self.retained.steps(cut.index for cut in self.span.cuts)

    def work(self, job: jobs.Job) -> float:
        """Return a job's amount of computation; 1 is a micro-batch's forward and backward pass through the model.

        Call it before the job is carried out. Jobs other than Draw, Forward, Backward and Undo give 0.
        """
        cuts = self.span.cuts
        match job:
            case jobs.Draw() | jobs.Forward():
                first = job.first if isinstance(job, jobs.Forward) else 0
                return forward_share(cuts, first, job.last)
            case jobs.Backward(local_id) if local_id in self.span.stages.pending:
                execution = self.span.stages.pending[local_id]
                first, last = execution.first, execution.last
                return share(cuts, first, last) - forward_share(cuts, first, last)
            case jobs.Undo(forward):
                return share(cuts, forward.first, forward.last)
        return 0.0

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Carry out all phases of a job (not Finish) on the calling thread, and return the job's outcome."""
        return finish(self.program(job))

    def program(self, job: jobs.Job) -> Program:
        """Return the program that carries out a job. If data from other peers are invalid, the outcome says why."""
        match job:
            case jobs.CloseWindow() | jobs.Rest() | jobs.EncodeSections() | jobs.Merge() | jobs.ExportState():
                return self.gossip.program(job)
            case jobs.ImportState():
                return self._import(job)
            case jobs.ChangeSpan():
                return change_span(job, self.span, self.retained, self.counters)
            case jobs.ExportRetained(fragment):
                return self._export_retained(fragment)
            case jobs.RetainCopy():
                return self._retain_copy(job)
            case jobs.DropCopy(fragment, step):
                return self._drop_copy(fragment, step)
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
        """Carry out a job that runs as a whole between two steps, and return its outcome."""
        match job:
            case jobs.SetClock(step, versions):
                self.counters.follow(step, exactly=self.synchronous)
                self.counters.versions |= dict(versions)
                return jobs.ClockSet(self.lr_step)
            case jobs.Start(newcomer):
                return self._start(newcomer)
        stages = self.span.stages  # only for jobs of routed training, since its first use allocates sums of gradients
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
            case jobs.Forget(executions):
                return stages.forget(executions)
            case jobs.Seal(ready, then, slot):
                sealed = stages.seal(slot)
                if then is None or not sealed.sound or set(sealed.executions) != set(ready):
                    return sealed
                return replace(self._apply(then), executions=sealed.executions)
            case jobs.Drop(slot):
                return stages.drop(slot)
            case jobs.Undo():
                return stages.undo(job)
            case jobs.Apply():
                return self._apply(job)
        raise AssertionError(f"{type(self).__name__} cannot carry out {job!r}")

    def _import(self, job: jobs.ImportState) -> Program:
        """Return the program that adopts all states of the job, or no state if any state is invalid."""
        yield Phase.BESIDE
        try:
            donated = self.gossip.decoded(job.blobs)
        except ProtocolError as error:
            return jobs.StateImported(False, error.reason)
        yield Phase.HELD
        self.gossip.start(donated)
        self.counters.follow(job.step, exactly=self.synchronous)
        return jobs.StateImported(True)

    def _export_retained(self, fragment: int) -> Program:
        yield Phase.BESIDE
        step, layout, blob = self.retained.read(fragment) or (0, (), b"")
        return jobs.RetainedExported(fragment, step, layout, blob)

    def _retain_copy(self, job: jobs.RetainCopy) -> Program:
        yield Phase.BESIDE
        try:
            self.retained.write_copy((job.fragment, job.layout, job.blob), job.step)
        except OSError as error:
            return jobs.RetainedChanged(job.fragment, self.retained_states(), f"{type(error).__name__}: {error}")
        return jobs.RetainedChanged(job.fragment, self.retained_states())

    def _drop_copy(self, fragment: int, step: int) -> Program:
        yield Phase.BESIDE
        if (fragment, step) in self.retained_states():  # else a change of span has written a newer state
            self.retained.forget([fragment])
        return jobs.RetainedChanged(fragment, self.retained_states())

    def _apply(self, job: jobs.Apply) -> jobs.Stepped:
        applied = self.span.stages.apply(self.lr_step, job.slot)
        return replace(self._step_report(job.tokens, job.loss, job.micro_batches), applied=applied)

    def _step_report(self, tokens: int, loss: float, micro_batches: int) -> jobs.Stepped:
        """Count a step, and return its report, which has the time spent since the last report."""
        return self.counters.count_steps(tokens, loss, micro_batches)

    def _start(self, newcomer: bool) -> jobs.Started:
        self.gossip.begin(newcomer)
        self.pause = Pause.EVERY_ROUND if self.synchronous else None
        return jobs.Started(self.lr_step)

    @abstractmethod
    def _draw(self, job: jobs.Draw, number: int, name: int) -> jobs.Outcome:
        """Run this peer's own micro-batch `number` forward. `name`: the micro-batch's name for other peers."""

    @abstractmethod
    def _evaluate(self) -> Program:
        """Return the program that measures the held-out loss; its outcome is Evaluated."""

    @abstractmethod
    def _save(self) -> Program:
        """Return the program that writes a checkpoint; its outcome is Saved."""

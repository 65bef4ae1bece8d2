"""Run a peer's training thread, and the worker thread that does jobs while training goes on.

Start reading at `Compute.run`. The event loop submits a job with `Compute.submit`, and `run` passes the job's outcome
to `report`. `core.jobs` defines jobs and outcomes; `threads` says on which thread each part of a job runs. `do` and
`step` may also be called directly, without threads, as tests do.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs
from decentral.comm.gossip.outer_kernels import OuterKernels, TorchKernels
from decentral.comm.gossip.update_rules import RuleTools
from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.jobs import DIVERGED
from decentral.core.plain_text import error_text
from decentral.core.units import Seconds
from decentral.data.corpora import Reading, TrainingData
from decentral.engine import accelerator, checkpoint, measure
from decentral.engine.checkpoint import RetainedStateStore
from decentral.engine.heap import return_free_pages
from decentral.engine.job_runner import JobRunner, Pause, time_kind
from decentral.engine.memory import most_sequences
from decentral.engine.micro_batch_numbers import MicroBatchNumbers
from decentral.engine.span import Span
from decentral.engine.step import (
    Device,
    QueuedStep,
    flushed_denormals,
    held_out_part,
    parts_of,
    queue_step,
    steps_ahead,
)
from decentral.engine.threads import Failure, JobThreads, Phase, Program
from decentral.model import decoder
from decentral.model.start_weights import StartWeightsError

# Errors that contain one of these texts mean that memory is short.
NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")
MEMORY_REMEDY = "end other programs, or give this peer less with --memory"
MOST_SAID = 400


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    """The arguments of `Compute`: the run, this peer's data, and the device on which to compute."""

    config: config.Config
    peer: PeerId
    corpus: TrainingData
    codecs: Codecs
    device: Device
    folder: Path
    span: tuple[int, int] | None = None  # the peer holds layers [first, last); None means the whole model
    state_expected: bool = False  # True: leave the weights unset, since a checkpoint or other peers will provide them
    kernels: OuterKernels | None = None  # computes gossip's formulas; None means plain torch (`TorchKernels`)
    report_s: Seconds = 0.0  # minimum seconds between two reports of steps; each report delays training
    memory_bytes: float = math.inf  # memory for the model, which limits micro-batches if `train.micro_batch` is auto


class Compute(JobRunner):
    """The part of a peer that computes: its layers, its data, and the threads that work on them."""

    span: Span
    retained: RetainedStateStore

    def __init__(self, setup: ComputeSetup) -> None:
        """Build the layers with initial weights, or without weights if `setup.state_expected`.

        `resume` or the job ImportState then gives the layers the weights of a checkpoint or of other peers. If
        `train.micro_batch` is auto, this times micro-batches of several sizes to choose one.

        Raises:
            UserError: If the layers cannot be built, the data cannot be read, or not even one sequence fits into the
                device's memory.
        """
        run = setup.config
        kernels = setup.kernels or TorchKernels(setup.codecs)
        tools = RuleTools(setup.codecs, kernels, accelerator.has_streams(setup.device.device), run.train.optimizer)
        span = Span(run, setup.peer, tools, setup.device)
        first, last = setup.span or (0, span.model_layers)
        span.build_layers(first, last, drawn=not setup.state_expected)
        retained, numbers = RetainedStateStore(setup.folder, run.digest()), MicroBatchNumbers.of(setup.folder)
        super().__init__(span, retained, numbers, run.synchronous)
        self.setup = setup
        self._clock: Callable[[], Seconds] = time.monotonic  # while `run` runs: returns the training thread's CPU time
        self._trained = time.monotonic(), 0.0, 0.0  # (time, CPU time, trained_s) when `training_s` was last called
        self._broken = False  # True after a failed step: jobs such as a checkpoint are still done, but no steps
        self._queued: deque[tuple[QueuedStep, jobs.Stepped]] = deque()  # steps whose loss the host has not read yet
        ranks = setup.device.ranks
        alone_on_cpu = setup.device.device.type == "cpu" and ranks.size == 1
        edge_clock = time.thread_time if alone_on_cpu else time.perf_counter
        self.threads = JobThreads(self.program, self._failure_of, edge_clock)
        reading = Reading(run.seed, setup.peer, setup.folder, ranks.rank if ranks.readers > 1 else 0, ranks.readers)
        self.read_micro_batch = setup.corpus.micro_batches(reading)
        self.held_out = setup.corpus.evaluation(run.eval_sequences)
        size = run.train.micro_batch
        if size == "auto":
            begin, end = span.fragments[0].index, span.fragments[-1].index + 1
            most = most_sequences(run, setup.device, begin, end, setup.memory_bytes, measure.LARGEST)
            size = 1 if ranks.sharded else measure.micro_batch(span.forward, run.model, setup.device, most)
        self.sequences = size

    @property
    def awaits_state(self) -> bool:
        """Whether this peer holds the whole model and gets its weights from other peers, not from a checkpoint.

        Always False in an island of several ranks.
        """
        alone = self.setup.device.ranks.size == 1 and len(self.fragments) == len(self.span.cuts)
        return alone and self.setup.state_expected and not self.restored

    def submit(self, job: jobs.Job) -> None:
        """Queue a job; `run` passes its outcome to `report`. Any thread may call this until Finish is submitted."""
        self.threads.submit(job)

    def training_s(self) -> Seconds:
        """Return training's processor seconds since an arbitrary time; the caller subtracts the results of two calls.

        On a CPU it is the training thread's processor time, multiplied by the throttle and limited to the elapsed time,
        and then multiplied by the number of torch's threads. On a GPU, where training leaves the machine's cores free,
        it is the elapsed time multiplied by the number of cores. With an emulated device it is the elapsed time
        multiplied by the number of torch's threads.
        """
        device = self.setup.device
        if device.device.type != "cpu":
            return time.monotonic() * (os.cpu_count() or 1)
        if device.emulated_s:
            return time.monotonic() * torch.get_num_threads()
        (then, before, trained_s), now, used = self._trained, time.monotonic(), self._clock() * device.throttle
        self._trained = now, used, trained_s + max(0.0, min(used - before, now - then))
        return self._trained[2] * torch.get_num_threads()

    @flushed_denormals()
    def run(self, report: Callable[[jobs.Outcome], None]) -> None:
        """Take steps and do jobs on the calling thread, until the job Finish was submitted and all jobs are done.

        This also starts the worker thread, and waits until it ends. After a step has failed, only jobs are done.

        Args:
            report: Gets the outcome of each step and job. The training thread and the worker call it.
        """
        threads, account = self.threads, self.counters.time
        if hasattr(time, "pthread_getcpuclockid"):
            clock = time.pthread_getcpuclockid(threading.get_ident())
            self._clock = lambda: time.clock_gettime(clock)
        threads.report = report
        self.gossip.steps_to_edge = lambda: 0 if self.waits else 1
        worker = threading.Thread(target=threads.work_beside, name="beside", daemon=True)
        worker.start()
        if self.awaits_state:
            self.span.map_memory()
        steps: list[jobs.Stepped] = []
        reported_at = time.monotonic()
        while not threads.done:
            wait = self.waits or threads.finishing or self._broken
            task = threads.at_edge(wait)
            account.spent_on("waiting")
            if task is not None:
                threads.do_at_edge(task)
                account.spent_on(time_kind(task.job))
            elif not wait:
                steps += self._tried(self.step_ahead, report)
                threads.begin_edge()
            idle = self.waits or threads.finishing
            if idle:
                steps += self._tried(self.read_queued, report)
            if steps and (idle or time.monotonic() >= reported_at + self.setup.report_s):
                for step in steps:
                    report(step)
                steps, reported_at = [], time.monotonic()
        for step in steps + self._tried(self.read_queued, report):
            report(step)
        worker.join()
        used = self._clock()
        self._clock = lambda: used  # an ended thread's clock cannot be read, so keep the clock's last value

    def _tried(
        self, read: Callable[[], list[jobs.Stepped]], report: Callable[[jobs.Outcome], None]
    ) -> list[jobs.Stepped]:
        """Return the reports of steps that `read` returns. If a step fails, report JobFailed and take no more steps."""
        try:
            return read()
        except (RuntimeError, MemoryError, OSError) as error:
            self._broken = True
            self._queued.clear()
            report(jobs.JobFailed("step", _said(error)))
            return []

    def step(self) -> jobs.Stepped:
        """Take one inner step of the whole model with this peer's next micro-batches, and return its report."""
        self._queue_step()
        return self.read_queued()[-1]

    def step_ahead(self) -> list[jobs.Stepped]:
        """Queue a step, and return the reports of earlier steps: with a GPU, the host reads them one step later."""
        self._queue_step()
        return self.read_queued(steps_ahead(self.setup.device))

    def _queue_step(self) -> None:
        """Queue a step, and count it as if its gradient were finite."""
        span, setup = self.span, self.setup
        forward, train = setup.device.ranks.begin(span, self.counters), setup.config.train
        batches = [self._fetch() for _ in range(train.accumulate)]
        queued = queue_step(forward, batches, span.inner, self.lr_step, train, setup.device)
        self.counters.time.spent_on("training")
        self._queued.append((queued, self._step_report(queued.tokens, math.nan, queued.micro_batches)))

    def read_queued(self, left: int = 0) -> list[jobs.Stepped]:
        """Wait for all queued steps except the latest `left`, and return their reports."""
        steps = []
        while len(self._queued) > left:
            queued, counted = self._queued.popleft()
            found = queued.report()
            self.counters.time.spent_on("training")
            self.counters.uncount(counted.tokens - found.tokens)
            trained = replace(counted, tokens=found.tokens, micro_batches=found.micro_batches)
            steps.append(replace(trained, loss=found.loss, dropped=not found.tokens))
        return steps

    def _step_report(self, tokens: int, loss: float, micro_batches: int) -> jobs.Stepped:
        return self.counters.count_steps(tokens, loss, micro_batches, beside_s=self.threads.take_beside_s())

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Carry out a job on the calling thread, and return its outcome: JobFailed or SaveFailed on expected errors."""
        try:
            return super().do(job)
        except Exception as error:
            return self._failure_of(job, error)

    def _do(self, job: jobs.Job) -> jobs.Outcome:
        match job:
            case jobs.CloseRound():
                return self._close_round(job)
            case jobs.Advance():
                return self._advance(job)
            case _:
                return super()._do(job)

    def _failure_of(self, job: jobs.Job, error: Exception) -> Failure:
        """Return the outcome of a job that failed with an expected error. Raises an unexpected error again."""
        match error:
            case OSError() | RuntimeError() | MemoryError():
                reason = _said(error)
            case StartWeightsError():
                reason = str(error)
            case ProtocolError():  # training has diverged: this peer's weights are not finite
                reason = f"{DIVERGED}: weights are not finite ({error})"
            case _:
                raise error
        if not isinstance(job, jobs.Save):
            return jobs.JobFailed(type(job).__name__, reason)
        if self.setup.folder.exists():
            return jobs.SaveFailed(reason)
        return jobs.SaveFailed(f"the state folder {self.setup.folder} was deleted; stop this peer", kept=False)

    def resume(self) -> bool:
        """Load the folder's checkpoint; return False if there is none.

        Raises:
            UserError: If the checkpoint is damaged, or of another run, model or optimizer.
        """
        self.restored = checkpoint.resume(self.setup.folder, self.span, self.counters)
        self.span.given(fragment.index for fragment in self.fragments if self.restored)
        return self.restored

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs_BT and targets_BT of this peer's micro-batch `number`, int64 on the CPU.

        For data in memory, (seed, peer, number) determine the micro-batch, so a checkpoint stores only the number. For
        streamed data the number has no effect, since a file stores the position in the stream.
        """
        return self.read_micro_batch(number, self.sequences)

    def _fetch(self) -> tuple[Tensor, Tensor]:
        """Return rank 0's next micro-batch. Count it, and one more for each other rank that reads micro-batches."""
        number = self.counters.micro_batches
        ranks = self.setup.device.ranks
        self.counters.micro_batches += ranks.readers
        return ranks.shared(self.batch(number))

    def _draw(self, job: jobs.Draw, number: int, name: int) -> jobs.Outcome:
        return self.span.stages.draw(job, name, self.batch(number))

    def _evaluate(self) -> Program:
        """Return the program that measures the held-out loss.

        Between two steps, it computes the loss of only a few sequences, so that no step is delayed much.
        """
        device, total, seconds = self.setup.device, 0.0, 0.0
        for part in parts_of(self.held_out, max(8, self.sequences)):
            yield Phase.EDGE
            began = time.perf_counter()
            total += held_out_part(device.ranks.evaluating(self.span, part), part, device)
            seconds += time.perf_counter() - began
        return jobs.Evaluated(self.counters.tokens, total / decoder.trained_tokens(self.held_out[1]), seconds)

    def _import(self, job: jobs.ImportState) -> Program:
        imported = yield from super()._import(job)
        if isinstance(imported, jobs.StateImported) and imported.accepted:
            self.span.given(fragment for fragment, _, _ in job.blobs)
        return imported

    def _save(self) -> Program:
        yield Phase.HELD
        self.span.initialise()  # initialise the weights of a peer that stops before it has joined
        lr_step, size = yield from checkpoint.save(self.setup.folder, self.span, self.counters, whole=self.synchronous)
        return_free_pages()
        return jobs.Saved(lr_step, size)

    def _start(self, newcomer: bool) -> jobs.Started:
        self.span.clear_sums()
        self.span.initialise()
        if self.pause is Pause.BEFORE_START:  # drop the time before the first Start, which belongs to no step
            self.counters.time.take(self.threads.take_beside_s())
        return super()._start(newcomer)

    def _close_round(self, job: jobs.CloseRound) -> jobs.RoundClosed:
        """Encode the round's sum of gradients of each fragment, and clear all sums.

        The outcome has no sums in two cases: if the update rule rejects one of the sums, because other peers would
        reject it as well; or if a sum includes an execution that is not in `job.executions`.
        """
        sums = self.span.stages.sums
        executions, closed = tuple(sums.executions), []
        filled = [one for one in zip(self.span.inner.lives, sums.filled_tokens, strict=True) if one[1]]
        if set(executions) <= set(job.executions) and all(
            self.gossip.of(live.fragment.index).takes_sum() for live, _ in filled
        ):
            for live, tokens in filled:
                closed.append(replace(self.gossip.close_round(live.fragment.index, job.round), tokens=tokens))
        sums.clear()
        return jobs.RoundClosed(job.round, executions, tuple(closed))

    def _advance(self, job: jobs.Advance) -> jobs.Stepped:
        """Take the round's step of all fragments in one job, so that a checkpoint never has fragments of two rounds."""
        rejected = [(index, self.gossip.advance(index, sums)) for index, sums in job.sums]
        self.counters.lr_step, self.counters.versions = job.round, dict(job.versions)
        refused = tuple((index, peer, reason) for index, found in rejected for peer, reason in found)
        return replace(self._step_report(job.tokens, job.loss, job.micro_batches), refused=refused)


def _said(error: Exception) -> str:
    """Return the text of a device's or machine's error in one line; if memory was short, add what the user can do."""
    text = f"{type(error).__name__}: {error_text(error, None)}"
    short = isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY)
    return f"{text[:MOST_SAID]}; {MEMORY_REMEDY}" if short else text[:MOST_SAID]

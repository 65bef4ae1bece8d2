"""The training thread and the worker beside it: one trains without a pause, the other does what need not stop it.

The event loop submits jobs and gets outcomes through `report`; what crosses is core/jobs.py, and engine/threads.py
has which thread does what. `do` and `step` may also be called directly, without threads: tests and the simulator do.
"""

import os
import threading
import time
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
from decentral.core.units import Seconds
from decentral.data.source import Reading, TrainingData
from decentral.engine import checkpoint, measure
from decentral.engine.checkpoint import MicroBatchNumbers, RetainedStateStore
from decentral.engine.job_runner import JobRunner, Pause, time_kind
from decentral.engine.span import Span
from decentral.engine.step import Device, held_out_part, parts_of, train_step
from decentral.engine.threads import Failure, JobThreads, Phase, Program
from decentral.model import decoder
from decentral.model.start_weights import StartWeightsError

NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")  # in torch's and the system's errors
MEMORY_REMEDY = "end other programs, or give this peer less: --memory, or --set train.micro_batch=N"
MOST_SAID = 400  # characters of an error


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    config: config.Config
    peer: PeerId
    corpus: TrainingData
    codecs: Codecs
    device: Device
    folder: Path
    span: tuple[int, int] | None = None  # layers [first, last), whole fragments; None: the whole model
    state_expected: bool = False  # a checkpoint or donors are there: initial weights are drawn only if none gives any
    kernels: OuterKernels | None = None  # None: plain torch, one operation after another
    report_s: Seconds = 0.0  # steps are reported this often: each report wakes the event loop, which takes the GIL


class Compute(JobRunner):
    """Builds its layers with their initial weights; `resume` and ImportState replace them."""

    span: Span
    retained: RetainedStateStore

    def __init__(self, setup: ComputeSetup) -> None:
        """Raises UserError where the model's layers cannot be built, or not one sequence fits the device."""
        run = setup.config
        kernels = setup.kernels or TorchKernels(setup.codecs)
        tools = RuleTools(setup.codecs, kernels, setup.device.device.type == "cuda", run.train.optimizer)
        span = Span(run, setup.peer, tools, setup.device)
        first, last = setup.span or (0, span.model_layers)
        span.hold(first, last, drawn=not setup.state_expected)
        retained, numbers = RetainedStateStore(setup.folder, run.digest()), MicroBatchNumbers.of(setup.folder)
        super().__init__(span, retained, numbers, run.synchronous)
        self.setup = setup
        self._clock: Callable[[], Seconds] = time.monotonic  # the training thread's processor time, where it is known
        self._trained = time.monotonic(), 0.0, 0.0  # when training_s was read last, that clock then, and its answer
        self._saving = False
        self._broken = False  # a step has failed: only what is left to do, such as a checkpoint, is done
        self.threads = JobThreads(self.program, self._failure_of)
        ranks = setup.device.ranks
        reading = Reading(run.seed, setup.peer, setup.folder, ranks.rank, ranks.size)
        self.micro_batches = setup.corpus.micro_batches(reading)
        self.held_out = setup.corpus.evaluation(run.train.eval_sequences)
        size = run.train.micro_batch
        self.micro_batch = size if size != "auto" else measure.micro_batch(span.forward, run.model, setup.device)

    @property
    def awaits_state(self) -> bool:
        """Whether donors will give this peer, alone on its device, all of the model; then it has no weights yet."""
        alone = self.setup.device.ranks.size == 1 and len(self.fragments) == len(self.span.cuts)
        return alone and self.setup.state_expected and not self.restored

    def submit(self, job: jobs.Job) -> None:
        """Gives a job to the threads; Finish is the last one. Any thread may call it."""
        self.threads.submit(job)

    def training_s(self) -> Seconds:
        """Processor time that training has had so far: of the threads that multiply matrices, as if none was throttled,
        but never more than time has passed: what is not throttled, such as taking a newcomer's state, counts once.

        Where a GPU trains, the machine's cores have nothing else to do: then it is their time. An emulated device would
        train all the time.
        """
        device = self.setup.device
        if device.device.type != "cpu":
            return time.monotonic() * (os.cpu_count() or 1)
        if device.emulated_s:
            return time.monotonic() * torch.get_num_threads()
        (then, before, trained_s), now, used = self._trained, time.monotonic(), self._clock() * device.throttle
        self._trained = now, used, trained_s + max(0.0, min(used - before, now - then))
        return self._trained[2] * torch.get_num_threads()

    def run(self, report: Callable[[jobs.Outcome], None]) -> None:
        """The training thread's life: tasks at step edges, and steps, until Finish has come and all jobs are done."""
        threads, account = self.threads, self.counters.time
        if hasattr(time, "pthread_getcpuclockid"):
            clock = time.pthread_getcpuclockid(threading.get_ident())
            self._clock = lambda: time.clock_gettime(clock)
        threads.report = report
        self.gossip.steps_to_edge = lambda: 0 if self.waits else 1
        worker = threading.Thread(target=threads.work_beside, name="beside", daemon=True)
        worker.start()
        if self.awaits_state:
            self.span.touch_memory()
        steps: list[jobs.Stepped] = []  # that are still to be reported
        reported_at = time.monotonic()
        while not threads.done:
            wait = self.waits or threads.finishing or self._broken
            task = threads.at_edge(wait)
            account.spent_on("waiting")
            if task is not None:
                threads.do_at_edge(task)
                account.spent_on(time_kind(task.job))
            elif not wait:
                steps += self._tried_step(report)
                threads.begin_edge()
            if steps and (self.waits or threads.finishing or time.monotonic() >= reported_at + self.setup.report_s):
                for step in steps:
                    report(step)
                steps, reported_at = [], time.monotonic()
        worker.join()
        used = self._clock()
        self._clock = lambda: used  # a thread that has ended has no clock

    def _tried_step(self, report: Callable[[jobs.Outcome], None]) -> list[jobs.Stepped]:
        """A step, or none after an error of the device or the machine, which ends training."""
        try:
            return [self.step()]
        except (RuntimeError, MemoryError, OSError) as error:
            self._broken = True
            report(jobs.JobFailed("step", _said(error)))
            return []

    def step(self) -> jobs.Stepped:
        """One inner step of the whole model, with this peer's next micro-batches."""
        span, setup = self.span, self.setup
        forward = setup.device.ranks.begin(span, self.counters)
        report = train_step(forward, self._fetch, span.inner, self.lr_step, setup.config.train, setup.device)
        self.counters.time.spent_on("training")
        stepped = self._stepped(report.tokens, report.loss, report.micro_batches)
        return replace(stepped, dropped=not report.tokens)

    def _stepped(self, tokens: int, loss: float, micro_batches: int) -> jobs.Stepped:
        return self.counters.stepped(tokens, loss, micro_batches, beside_s=self.threads.take_beside_s())

    def do(self, job: jobs.Job) -> jobs.Outcome:
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
        """An error that this peer can go on after, or say clearly, as an outcome. Raises any other again."""
        match error:
            case OSError() | RuntimeError() | MemoryError():  # a full disk, a device or a machine out of memory
                reason = _said(error)
            case StartWeightsError():
                reason = str(error)
            case ProtocolError():  # our own weights do not encode: they have diverged
                reason = f"{DIVERGED}: weights are not finite ({error})"
            case _:
                raise error
        return jobs.SaveFailed(reason) if isinstance(job, jobs.Save) else jobs.JobFailed(type(job).__name__, reason)

    def resume(self) -> bool:
        """Goes on from the folder's checkpoint, if there is one. Raises UserError if it is damaged or another run's."""
        self.restored = checkpoint.resume(self.setup.folder, self.span, self.counters)
        self.span.given(fragment.index for fragment in self.fragments if self.restored)
        return self.restored

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT of this peer's micro-batch with this number, int64 on the CPU.

        Of tokens that are all at hand they are a pure function of (seed, peer, number), so a checkpoint keeps nothing
        of the data but a number; a stream keeps its position itself.
        """
        return self.micro_batches(number, self.micro_batch)

    def _fetch(self) -> tuple[Tensor, Tensor]:
        """The next micro-batch of rank 0; the other ranks of an island take the numbers after it."""
        number = self.counters.micro_batches
        self.counters.micro_batches += self.setup.device.ranks.size
        return self.batch(number)

    def _draw(self, job: jobs.Draw, number: int, name: int) -> jobs.Outcome:
        return self.span.stages.draw(job, name, self.batch(number))

    def _evaluate(self) -> Program:
        """A few sequences at each step edge, so that no step comes late: the weights move a little meanwhile."""
        total, seconds = 0.0, 0.0
        for part in parts_of(self.held_out, max(8, self.micro_batch)):
            yield Phase.EDGE
            began = time.perf_counter()
            total += held_out_part(self.span.forward, part, self.setup.device)
            seconds += time.perf_counter() - began
        return jobs.Evaluated(self.counters.tokens, total / decoder.trained_tokens(self.held_out[1]), seconds)

    def _import(self, job: jobs.ImportState) -> Program:
        imported = yield from super()._import(job)
        if isinstance(imported, jobs.StateImported) and imported.accepted:
            self.span.given(fragment for fragment, _, _ in job.blobs)
        return imported

    def _save(self) -> Program:
        yield Phase.HELD
        self.span.draw()  # where a peer stops before it has joined
        yield Phase.BESIDE
        while self._saving:  # a checkpoint is on its way, and this one is newer
            yield Phase.BESIDE
        self._saving = True
        try:
            size = yield from checkpoint.save(self.setup.folder, self.span, self.counters, whole=self.synchronous)
        finally:
            self._saving = False
        return jobs.Saved(self.counters.own_steps, size)

    def _start(self, newcomer: bool) -> jobs.Started:
        self.span.clear_sums()
        self.span.draw()
        if self.pause is Pause.BEFORE_START:  # a peer that fell behind and begins again accounts for that, too
            self.counters.time.take(self.threads.take_beside_s())
        return super()._start(newcomer)

    def _close_round(self, job: jobs.CloseRound) -> jobs.RoundClosed:
        """Ends the sums of gradients and encodes them; if one of them is none that others take, none counts."""
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
        """Steps all fragments in one job, so that a checkpoint is of one round."""
        rejected = [(index, self.gossip.advance(index, sums)) for index, sums in job.sums]
        self.counters.lr_step, self.counters.versions = job.round, dict(job.versions)
        refused = tuple((index, peer, reason) for index, found in rejected for peer, reason in found)
        return replace(self._stepped(job.tokens, job.loss, job.micro_batches), refused=refused)


def _said(error: Exception) -> str:
    """An error of the device or the machine, in one line; where memory was short, with what can be done."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    short = isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY)
    return f"{text[:MOST_SAID]}; {MEMORY_REMEDY}" if short else text[:MOST_SAID]

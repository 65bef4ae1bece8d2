"""The compute thread: trains without a pause and takes jobs at step edges.

It owns every tensor. The event loop puts jobs into a queue and gets outcomes through `report`; what crosses is
core/jobs.py. `do` and `step` may also be called directly, without a thread: tests and the simulator do.
"""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.train import checkpoint, data, measure
from decentral.train.checkpoint import MicroBatchNumbers, RetainedStateStore
from decentral.train.job_runner import JobRunner
from decentral.train.sections import Codecs
from decentral.train.span import Span
from decentral.train.step import Device, held_out_loss, train_step


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    config: config.Config
    peer: PeerId
    corpus: data.Corpus
    codecs: Codecs
    device: Device
    folder: Path
    span: tuple[int, int] | None = None  # layers [first, last), whole fragments; None: the whole model


class Compute(JobRunner):
    """Builds its layers with their initial weights; `resume` and ImportState replace them."""

    span: Span
    retained: RetainedStateStore

    def __init__(self, setup: ComputeSetup) -> None:
        """Raises UserError where the model's layers cannot be built, or not one sequence fits the device."""
        run = setup.config
        span = Span(run, setup.peer, setup.codecs, setup.device)
        span.hold(*(setup.span or (0, span.model_layers)))
        retained, numbers = RetainedStateStore(setup.folder, run.digest()), MicroBatchNumbers.of(setup.folder)
        super().__init__(span, retained, numbers, run.synchronous)
        self.setup = setup
        self.held_out = setup.corpus.evaluation(run.train.eval_sequences)
        size = run.train.micro_batch
        self.micro_batch = size if size != "auto" else measure.micro_batch(span.forward, run.model, setup.device)

    def run(self, inbox: "queue.SimpleQueue[jobs.Job]", report: Callable[[jobs.Outcome], None]) -> None:
        """Works until Finish comes. Waiting for jobs is the only thing that does not count as computing."""
        while True:
            try:
                job = inbox.get() if self.waits else inbox.get_nowait()
            except queue.Empty:
                report(self.step())
                continue
            if isinstance(job, jobs.Finish):
                return
            began = time.perf_counter()
            report(self.do(job))
            self.counters.busy_s += time.perf_counter() - began

    def step(self) -> jobs.Stepped:
        """One inner step of the whole model, with this peer's next micro-batches."""
        began, span, setup = time.perf_counter(), self.span, self.setup
        forward = setup.device.ranks.begin(span, self.counters)
        report = train_step(forward, self._fetch, span.inner, self.lr_step, setup.config.train, setup.device)
        self.counters.busy_s += time.perf_counter() - began
        return self.counters.stepped(report.tokens, report.loss, report.micro_batches)

    def do(self, job: jobs.Job) -> jobs.Outcome:
        """Carries out any job but Finish. An error that this peer can go on after is the outcome JobFailed."""
        try:
            match job:
                case jobs.CloseRound():
                    return self._close_round(job)
                case jobs.Advance():
                    return self._advance(job)
                case _:
                    return super().do(job)
        except (OSError, RuntimeError) as error:  # a full disk, a device out of memory
            return jobs.JobFailed(type(job).__name__, f"{type(error).__name__}: {error}")
        except ProtocolError as error:  # our own weights do not encode: they have diverged
            return jobs.JobFailed(type(job).__name__, f"this peer's weights have diverged ({error})")

    def resume(self) -> bool:
        """Goes on from the folder's checkpoint, if there is one. Raises UserError if it is damaged or another run's."""
        self.restored = checkpoint.resume(self.setup.folder, self.span, self.counters)
        return self.restored

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and targets_BT of this peer's micro-batch with this number, int64 on the CPU.

        They are a pure function of (seed, peer, number), so a checkpoint keeps nothing of the data but a number.
        """
        setup = self.setup
        return data.numbered(setup.corpus, setup.config.seed, setup.peer, number, self.micro_batch)

    def _fetch(self) -> tuple[Tensor, Tensor]:
        """The next micro-batch of rank 0; the other ranks of an island take the numbers after it."""
        number = self.counters.micro_batches
        self.counters.micro_batches += self.setup.device.ranks.size
        return self.batch(number)

    def _draw(self, job: jobs.Draw, number: int) -> jobs.Outcome:
        return self.span.stages.draw(job, number, self.batch(number))

    def _evaluate(self) -> jobs.Evaluated:
        began = time.perf_counter()
        loss = held_out_loss(self.span.forward, self.held_out, self.setup.device, max(8, self.micro_batch))
        return jobs.Evaluated(self.counters.tokens, loss, time.perf_counter() - began)

    def _save(self) -> jobs.Saved:
        return jobs.Saved(self.counters.own_steps, checkpoint.save(self.setup.folder, self.span, self.counters))

    def _start(self, newcomer: bool) -> jobs.Started:
        if self.synchronous:
            self.span.stages.sums.clear()  # their gradients belong to other weights
        return super()._start(newcomer)

    def _close_round(self, job: jobs.CloseRound) -> jobs.RoundClosed:
        """Ends the sums of gradients and encodes them; a sum that is not finite counts as none."""
        sums = self.span.stages.sums
        executions, closed = tuple(sums.executions), []
        for live, tokens in zip(self.span.inner.lives, sums.filled_tokens, strict=True):
            if tokens and set(executions) <= set(job.executions) and bool(torch.isfinite(live.grad).all()):
                closed.append(replace(self.gossip.close(live.fragment.index, job.round), tokens=tokens))
        sums.clear()
        return jobs.RoundClosed(job.round, executions, tuple(closed))

    def _advance(self, job: jobs.Advance) -> jobs.Stepped:
        """Steps all fragments in one job, so that a checkpoint is of one round."""
        merged = [self.gossip.merge(fragment, job.round, sums) for fragment, sums in job.sums]
        self.counters.lr_step, self.counters.versions = job.round, dict(job.versions)
        refused = tuple((one.fragment, peer, reason) for one in merged for peer, reason in one.rejected)
        return replace(self.counters.stepped(job.tokens, job.loss, job.micro_batches), refused=refused)

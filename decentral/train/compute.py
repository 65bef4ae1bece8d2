"""The compute thread: trains without a pause and takes jobs at step edges.

It owns every tensor. The event loop puts jobs into a queue and gets outcomes through `report`; what crosses is
core/jobs.py. `do` and `step` may also be called directly, without a thread: tests and the simulator do.
"""

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decentral.core import config, jobs, rng
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.train import checkpoint, data, gpt, measure, stage_jobs, stage_runner, update_rules
from decentral.train.fragment_gossip import FragmentGossip, unpacked
from decentral.train.inner import Inner, Live, fragments_of
from decentral.train.micro_batch_numbers import MicroBatchNumbers
from decentral.train.retained_state import RetainedStateStore
from decentral.train.sections import Codecs
from decentral.train.span_change import span_change_of
from decentral.train.stage_runner import StageRunner
from decentral.train.step import Device, Forward, chain, held_out_loss, train_step


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    config: config.Config
    peer: PeerId
    corpus: data.Corpus
    codecs: Codecs
    device: Device
    folder: Path
    span: tuple[int, int] | None = None  # layers [first, last), cut where fragments are; None: the whole model


class Compute:
    """Builds its layers with their initial weights; `resume` and ImportState replace them.

    A peer that holds the whole model trains without a pause. One that holds a part, and every one of a synchronous run,
    waits for micro-batches that come along routes, or that it is told to draw (train/stage_runner.py).
    """

    def __init__(self, setup: ComputeSetup) -> None:
        self.setup = setup
        run = setup.config
        self.cuts = tuple(fragments_of(run))  # of the whole model
        self.model_layers = self.cuts[-1].last
        first, last = setup.span or (0, self.model_layers)
        self.whole = (first, last) == (0, self.model_layers)
        self._widths = gpt.widths(run.model)
        self.layers: list[nn.Module] = []
        self.fragments: list[jobs.Fragment] = []
        self.mixing = FragmentGossip([], run.gossip, setup.peer, setup.codecs)
        self.hops: StageRunner | None = None
        self.kept = RetainedStateStore(setup.folder, run.digest())
        self._occupy(first, last)
        self.held_out = setup.corpus.evaluation(run.train.eval_sequences)
        self.own_steps, self.lr_step, self.micro_batches, self.tokens = 0, 0, 0, 0
        self.versions: dict[int, bytes] = {}  # of fragments, in a synchronous run: comm/rounds/contributions.py
        self._position = MicroBatchNumbers.of(setup.folder)
        size = run.train.micro_batch
        self.micro_batch = size if size != "auto" else measure.micro_batch(self.forward, run.model, setup.device)
        self._busy_s = 0.0

    def _occupy(self, first: int, last: int) -> None:
        """Holds layers [first, last): those that are here as they are, the others with their initial weights.

        What is not wanted any more is let go of first, so that both never need the device's memory. No execution may be here.
        """
        run, device = self.setup.config, self.setup.device.device
        wanted = [fragment for fragment in self.cuts if first <= fragment.first and fragment.last <= last]
        assert (wanted[0].first, wanted[-1].last) == (first, last), "a span is whole fragments"
        lives = {mixed.live.fragment: mixed.live for mixed in self.mixing.fragments if mixed.live.fragment in wanted}
        start = self.fragments[0].first if self.fragments else 0
        layers = {start + at: layer for at, layer in enumerate(self.layers) if first <= start + at < last}
        self.layers, self.fragments = [], []
        self.hops = None
        self.mixing.hold(list(lives.values()))
        for begin, end in _gaps(layers, first, last):
            new = [layer.to(device) for layer in gpt.build(run.model, run.seed, begin, end)]
            layers |= dict(enumerate(new, begin))
            lives |= {one: Live(one, new, device, run.train, begin) for one in wanted if begin <= one.first < end}
        self.layers, self.fragments = [layers[at] for at in range(first, last)], wanted
        ordered = [lives[fragment] for fragment in wanted]
        self.mixing.hold(ordered)
        self.inner = Inner(ordered, run.train)
        self.forward = chain(self.layers, run.train.compile and device.type == "cuda")
        if not self.whole or run.synchronous:
            self.hops = self._hops(alone=True)
        if not self.whole:
            self.forward = self._span_alone(self.forward, first)

    @property
    def waits(self) -> bool:
        """Whether only a job can move it: a merge that training waits for, or a span's micro-batches."""
        return self.mixing.holding is not None or not self.whole

    @property
    def share(self) -> float:
        """The part of the model's parameters that we hold."""
        whole = sum(gpt.parameters(self.setup.config.model))
        return sum(fragment.parameters for fragment in self.fragments) / whole

    def layout(self, layer: int, sequences: int) -> jobs.Layout:
        """Of a micro-batch that enters this layer."""
        return stage_runner.layout(self.setup.config, self.setup.codecs, self._widths[layer], sequences)

    # The thread

    def run(self, inbox: "queue.SimpleQueue[jobs.Job]", report: Callable[[jobs.Outcome], None]) -> None:
        """Until Finish comes. Waiting for jobs is the only thing that does not count as computing."""
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
            self._busy_s += time.perf_counter() - began

    def step(self) -> jobs.Stepped:
        began = time.perf_counter()
        report = train_step(
            self.forward, self._fetch, self.inner, self.lr_step, self.setup.config.train, self.setup.device
        )
        self.own_steps += 1
        self.lr_step += 1
        self.tokens += report.tokens
        busy_s, self._busy_s = self._busy_s + time.perf_counter() - began, 0.0
        return jobs.Stepped(self.own_steps, self.lr_step, report.tokens, report.loss, busy_s, report.micro_batches)

    def do(self, job: jobs.Job) -> jobs.Outcome:
        try:
            return self._do(job)
        except (OSError, RuntimeError) as error:  # a full disk, a device out of memory
            return jobs.JobFailed(type(job).__name__, f"{type(error).__name__}: {error}")
        except ProtocolError as error:  # our own weights do not encode: they have diverged
            return jobs.JobFailed(type(job).__name__, f"this peer's weights have diverged ({error})")

    def _do(self, job: jobs.Job) -> jobs.Outcome:
        match job:
            case jobs.CloseWindow() | jobs.Merge() | jobs.Absorb() | jobs.ExportState():
                return self.mixing.do(job)
            case jobs.ImportState(blobs, step):
                return self._adopted(self.mixing.adopt(blobs), step)
            case jobs.ChangeSpan():
                return self._move(job)
            case jobs.ExportRetained(fragment):
                return jobs.RetainedExported(fragment, *(self.kept.read(fragment) or (0, (), b"")))
            case jobs.SetClock(step, versions):
                self.lr_step = self._clock(step)
                self.versions |= dict(versions)
                return jobs.ClockSet(self.lr_step)
            case jobs.Evaluate():
                return self._evaluate()
            case jobs.Save():
                return jobs.Saved(self.own_steps, self.save())
            case jobs.Start(newcomer):
                self.mixing.begin(newcomer)
                if self.setup.config.synchronous and self.hops:
                    self.hops.clear()
                return jobs.Started(self.lr_step)
            case jobs.Finish():
                raise AssertionError("Finish ends the thread")
            case jobs.CloseRound():
                return self._close_round(job)
            case jobs.Advance():
                return self._advance(job)
            case _:
                return self._hop(job)

    # Routes

    def _hop(self, job: jobs.StageJob) -> jobs.Outcome:
        self.hops = self.hops or self._hops(alone=False)
        return stage_jobs.do(job, self.hops, self)

    def draw(self, job: jobs.Draw) -> jobs.Outcome:
        assert self.hops is not None
        self.micro_batches = number = self._position.take(self.micro_batches)
        return self.hops.draw(job.token, job.last, self._fetch(), number)

    def _close_round(self, job: jobs.CloseRound) -> jobs.RoundClosed:
        """A sum that is not finite is none."""
        assert self.hops is not None
        executions, tokens = tuple(self.hops.sums.executions), self.hops.sums.filled_tokens
        sums = []
        for live, count in zip(self.inner.lives, tokens, strict=True):
            if count and set(executions) <= set(job.executions) and bool(torch.isfinite(live.grad).all()):
                sums.append(replace(self.mixing.close(live.fragment.index, job.round), tokens=count))
        self.hops.clear()
        return jobs.RoundClosed(job.round, executions, tuple(sums))

    def _advance(self, job: jobs.Advance) -> jobs.Stepped:
        """All fragments in one job: a checkpoint is of one round."""
        merged = [self.mixing.merge(fragment, job.round, sums) for fragment, sums in job.sums]
        self.lr_step, self.versions = job.round, dict(job.versions)
        refused = tuple((one.fragment, peer, reason) for one in merged for peer, reason in one.rejected)
        return replace(self.counted(job), refused=refused)

    def counted(self, job: jobs.Apply | jobs.Advance) -> jobs.Stepped:
        self.own_steps += 1
        self.lr_step += 1
        self.tokens += job.tokens
        busy_s, self._busy_s = self._busy_s, 0.0
        return jobs.Stepped(self.own_steps, self.lr_step, job.tokens, job.loss, busy_s, job.micro_batches)

    def _span_alone(self, chained: Forward, first: int) -> Forward:
        """Our layers as a function of tokens, though they may not be the model's first: to measure them by."""
        width = self._widths[first]

        def through(tokens_BT: Tensor) -> Tensor:
            if first == 0:
                return chained(tokens_BT)
            return chained(torch.zeros(*tokens_BT.shape, width, device=tokens_BT.device, requires_grad=True))

        return through

    def _hops(self, alone: bool) -> StageRunner:
        setup, lives = self.setup, self.inner.lives
        return StageRunner(setup.config, self.layers, lives, self._widths, setup.device, setup.codecs, alone)

    # Other layers

    def layouts(self) -> tuple[jobs.Layout, ...]:
        """Of each fragment's state as a newcomer gets it, of the whole model."""
        donated = update_rules.donated(self.setup.config.gossip)
        return tuple(update_rules.layout_of(donated, cut.parameters, self.setup.codecs) for cut in self.cuts)

    def _move(self, job: jobs.ChangeSpan) -> jobs.SpanChanged:
        """All is checked, and what we give up is on the disk, before anything changes; and it can be changed back."""
        held, layouts = self.fragments, dict(enumerate(self.layouts()))
        span = held[0].first, held[-1].last
        try:
            shift = span_change_of(job, self.cuts, held, layouts, self.setup.codecs, self.kept.read)
        except ProtocolError as error:
            return jobs.SpanChanged(False, error.reason)
        given_up = [(out.fragment, out.layout, out.blob) for out in map(self.mixing.export, shift.lost)]
        try:
            for state in given_up:
                self.kept.write(state, self.lr_step)
            self._occupy(job.first, job.last)
        except (OSError, RuntimeError) as error:  # a full disk, a device out of memory
            if self.fragments != held:
                self._occupy(*span)
                self.mixing.start(unpacked(self.setup.codecs, given_up, layouts))
            return jobs.SpanChanged(False, Reason.DISK if isinstance(error, OSError) else "memory")
        self.mixing.start(shift.states)
        self.mixing.begin_anew(shift.gained)
        self.kept.forget(shift.gained)
        self.lr_step = max(self.lr_step, job.step)
        return jobs.SpanChanged(True, kept=self.kept.kept(cut.index for cut in self.cuts))

    # State

    def state_layouts(self) -> list[jobs.Layout]:
        return self.mixing.state_layouts()

    def _adopted(self, imported: jobs.StateImported, step: int) -> jobs.StateImported:
        if imported.accepted:
            self.lr_step = self._clock(step)
        return imported

    def _clock(self, step: int) -> int:
        """The swarm's step, where it is ahead of ours; in a synchronous run they are the same."""
        return step if self.setup.config.synchronous else max(self.lr_step, step)

    def save(self) -> int:
        """Writes a checkpoint; gives its bytes."""
        facts = {
            "run": self.setup.config.digest(),
            "fragments": [asdict(fragment) for fragment in self.fragments],
            "own_steps": self.own_steps,
            "lr_step": self.lr_step,
            "inner_steps": self.inner.steps,
            "fragment_steps": [live.steps for live in self.inner.lives],
            "micro_batches": self.micro_batches,
            "tokens": self.tokens,
            "window": self.mixing.windows(),
            "versions": {index: version.hex() for index, version in self.versions.items()},
        }
        return checkpoint.write(self.setup.folder, self.mixing.tensors(), facts)

    def resume(self) -> bool:
        """Goes on from the folder's checkpoint, if there is one. Raises UserError if it is of another run."""
        found = checkpoint.read(self.setup.folder)
        if found is None:
            return False
        tensors, facts = found
        if facts["run"] != self.setup.config.digest():
            raise UserError(f"{self.setup.folder} holds a checkpoint of another run; use another --state-dir")
        try:
            self._load(tensors, facts)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.setup.folder} holds a checkpoint of another model ({error})") from None
        return True

    def _load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.mixing.load(tensors, facts["window"], facts["inner_steps"])
        for live, steps in zip(self.inner.lives, facts.get("fragment_steps", ()), strict=False):
            live.steps = steps
        self.own_steps, self.lr_step = facts["own_steps"], facts["lr_step"]
        self.micro_batches, self.tokens = facts["micro_batches"], facts["tokens"]
        self.versions = {int(index): bytes.fromhex(text) for index, text in facts.get("versions", {}).items()}

    # Data

    def _fetch(self) -> tuple[Tensor, Tensor]:
        """Micro-batch number k of this peer: a pure function of (seed, peer, k), so k is all a checkpoint keeps."""
        draw = rng.arrays(self.setup.config.seed, "data", self.setup.peer, self.micro_batches)
        self.micro_batches += 1
        return self.setup.corpus.micro_batch(draw, self.micro_batch)

    def _evaluate(self) -> jobs.Evaluated:
        began = time.perf_counter()
        loss = held_out_loss(self.forward, self.held_out, self.setup.device, max(8, self.micro_batch))
        return jobs.Evaluated(self.tokens, loss, time.perf_counter() - began)


def _gaps(layers: Mapping[int, nn.Module], first: int, last: int) -> list[tuple[int, int]]:
    """The stretches [begin, end) of [first, last) that are not among these layers."""
    missing = [at for at in range(first, last) if at not in layers]
    begins = [at for at in missing if at - 1 not in missing]
    return [(begin, next(at for at in range(begin, last + 1) if at not in missing)) for begin in begins]

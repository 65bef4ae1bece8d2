"""The compute thread: trains without a pause and takes jobs at step edges.

It owns every tensor. The event loop puts jobs into a queue and gets outcomes through `report`; what crosses is
core/jobs.py. `do` and `step` may also be called directly, without a thread: tests and the simulator do.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from decentral.core import config, jobs, rng
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.train import checkpoint, data, gpt, measure, mix
from decentral.train.inner import Inner, Live, cut
from decentral.train.sections import Codecs, Packer, unpack
from decentral.train.step import Device, chain, held_out_loss, train_step

CLIP_TO_MEDIAN = 2.0  # a partner's delta is no longer than this many times the median of recent ones
RECENT = 16
BEFORE_START = -1


@dataclass(frozen=True, slots=True)
class Setup:
    config: config.Config
    peer: PeerId
    corpus: data.Corpus
    codecs: Codecs
    device: Device
    folder: Path


@dataclass(slots=True)
class Mixed:
    """A fragment's gossip: its rule, and the lengths of recent deltas."""

    live: Live
    rule: mix.Rule
    layout: jobs.Layout  # of the blobs that we publish
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # of recent deltas
    own_length: float = 0.0  # of the delta that we published last
    newcomer: bool = False  # its first window counts for nothing: fresh moments make poor steps

    @classmethod
    def of(cls, live: Live, rule: mix.Rule, codecs: Codecs) -> "Mixed":
        return cls(live, rule, mix.layout_of(rule.sections, live.fragment.parameters, codecs))

    def fits(self, one: jobs.Contribution) -> None:
        """Raises ProtocolError unless its sections are ours, or some of ours that a merge can do with."""
        names = {section.name for section in one.layout}
        needed = {self.rule.clipped} if self.rule.clipped else {section.name for section in self.layout}
        if not one.layout or not set(one.layout) <= set(self.layout) or not needed <= names:
            raise ProtocolError("shape", "its sections are not this fragment's")
        if len(names) != len(one.layout) or len(one.blob) != sum(section.size for section in one.layout):
            raise ProtocolError("shape", "its sections do not add up to its blob")


class Compute:
    """Builds the model with its initial weights; `resume` and ImportState replace them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        run = setup.config
        self.layers = [layer.to(setup.device.device) for layer in gpt.build(run.model, run.seed)]
        self.fragments = cut(self.layers, run.gossip.fragment_parameters)
        lives = [Live(fragment, self.layers, setup.device.device, run.train) for fragment in self.fragments]
        self.mixed = [Mixed.of(live, mix.rule(run.gossip, live.theta, setup.peer), setup.codecs) for live in lives]
        self.inner = Inner(lives, run.train)
        self.forward = chain(self.layers, run.train.compile and setup.device.device.type == "cuda")
        self.held_out = setup.corpus.evaluation(run.train.eval_sequences)
        self.own_steps, self.lr_step, self.micro_batches, self.tokens = 0, 0, 0, 0
        size = run.train.micro_batch
        self.micro_batch = size if size != "auto" else measure.micro_batch(self.forward, run.model, setup.device)
        self.holding: int | None = BEFORE_START  # the fragment whose merge we wait for
        self._busy_s = 0.0

    # The thread

    def run(self, inbox: "queue.SimpleQueue[jobs.Job]", report: Callable[[jobs.Outcome], None]) -> None:
        """Until Finish comes. Waiting for jobs is the only thing that does not count as computing."""
        while True:
            try:
                job = inbox.get() if self.holding is not None else inbox.get_nowait()
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
            case jobs.CloseWindow(fragment, seq, hold):
                return self._close(fragment, seq, hold)
            case jobs.Merge(fragment, seq, contributions):
                return self._merge(fragment, seq, contributions)
            case jobs.Absorb(fragment, contribution):
                return self._absorb(fragment, contribution)
            case jobs.ExportState(fragment):
                return self._export(fragment)
            case jobs.ImportState(blobs, step):
                return self._import(blobs, step)
            case jobs.SetClock(step):
                self.lr_step = max(self.lr_step, step)
                return jobs.ClockSet(self.lr_step)
            case jobs.Evaluate():
                return self._evaluate()
            case jobs.Save():
                return jobs.Saved(self.own_steps, self.save())
            case jobs.Start(newcomer):
                self.holding = None
                for mixed in self.mixed:
                    mixed.newcomer = newcomer
                return jobs.Started(self.lr_step)
            case jobs.Finish():
                raise AssertionError("Finish ends the thread")

    # Gossip

    def _close(self, fragment: int, seq: int, hold: bool) -> jobs.WindowClosed:
        mixed = self.mixed[fragment]
        packer = Packer(self.setup.codecs)
        mixed.rule.close(mixed.live, packer)
        if mixed.rule.clipped:
            mixed.own_length = float(torch.linalg.vector_norm(packer.read[mixed.rule.clipped]))
        tokens, rates = 0 if mixed.newcomer else mixed.live.tokens, mixed.live.rates
        mixed.live.tokens, mixed.live.rates, mixed.newcomer = 0, 0.0, False
        self.holding = fragment if hold else self.holding
        layout, blob = packer.finish()
        assert layout == mixed.layout
        return jobs.WindowClosed(fragment, seq, tokens, rates, layout, blob)

    def _merge(self, fragment: int, seq: int, contributions: Sequence[jobs.Contribution]) -> jobs.Merged:
        mixed = self.mixed[fragment]
        parts, rejected = self._decode(mixed, contributions)
        mixed.live.theta += mixed.rule.merge(mixed.live, parts)
        if self.holding == fragment:
            self.holding = None
        return jobs.Merged(fragment, seq, tuple(part.peer for part in parts), tuple(rejected))

    def _absorb(self, fragment: int, contribution: jobs.Contribution) -> jobs.Absorbed:
        mixed = self.mixed[fragment]
        parts, rejected = self._decode(mixed, [contribution])
        if rejected:
            return jobs.Absorbed(fragment, False, rejected[0][1])
        mixed.live.theta += mixed.rule.merge(mixed.live, parts)
        return jobs.Absorbed(fragment, True)

    def _decode(
        self, mixed: Mixed, contributions: Sequence[jobs.Contribution]
    ) -> tuple[list[mix.Parts], list[tuple[PeerId, str]]]:
        """Partners' vectors on our device, and whom we refused for what: bytes from the network prove nothing."""
        parts, rejected = [], []
        for one in contributions:
            try:
                mixed.fits(one)
                vectors = unpack(self.setup.codecs, one.layout, one.blob)
                mixed.rule.check(vectors)
            except ProtocolError as error:
                rejected.append((one.peer, error.reason))
                continue
            on_device = {name: vector.to(mixed.live.theta.device) for name, vector in vectors.items()}
            if mixed.rule.clipped:
                self._clip(mixed, on_device[mixed.rule.clipped])
            parts.append(mix.Parts(one.peer, one.tokens, one.rates, on_device))
        return parts, rejected

    def _clip(self, mixed: Mixed, vector: Tensor) -> None:
        """One peer that diverges, or lies, moves us no further than twice what is usual, or what we moved ourselves.

        Our own length is among them: steps grow during the warm-up, everybody's alike.
        """
        length = float(torch.linalg.vector_norm(vector))
        usual = max(mixed.own_length, median(mixed.lengths) if mixed.lengths else length)
        limit = CLIP_TO_MEDIAN * usual
        if length > limit > 0:
            vector *= limit / length
        mixed.lengths.append(min(length, limit) if limit > 0 else length)

    # State

    def _export(self, fragment: int) -> jobs.StateExported:
        packer = Packer(self.setup.codecs)
        self.mixed[fragment].rule.donate(self.mixed[fragment].live, packer)
        return jobs.StateExported(fragment, *packer.finish())

    def state_layouts(self) -> list[jobs.Layout]:
        """Of each fragment's export: what a newcomer may expect of its donors."""
        return [
            mix.layout_of(mixed.rule.donated, mixed.live.fragment.parameters, self.setup.codecs) for mixed in self.mixed
        ]

    def _import(self, blobs: Sequence[tuple[int, jobs.Layout, bytes]], step: int) -> jobs.StateImported:
        """All fragments or none: decoded and checked first, then adopted."""
        donated = []
        if [fragment for fragment, _, _ in blobs] != list(range(len(self.mixed))):
            return jobs.StateImported(False, "fragment")
        try:
            for (fragment, layout, blob), expected in zip(blobs, self.state_layouts(), strict=True):
                if layout != expected:
                    raise ProtocolError("shape", f"fragment {fragment} has another layout")
                donated.append((self.mixed[fragment], unpack(self.setup.codecs, layout, blob)))
        except ProtocolError as error:
            return jobs.StateImported(False, error.reason)
        for mixed, vectors in donated:
            device = mixed.live.theta.device
            mixed.rule.adopt(mixed.live, {name: vector.to(device) for name, vector in vectors.items()})
        self.lr_step = max(self.lr_step, step)
        return jobs.StateImported(True)

    def save(self) -> int:
        """Writes a checkpoint; gives its bytes."""
        tensors: dict[str, Tensor] = {}
        for mixed in self.mixed:
            live, prefix = mixed.live, f"{mixed.live.fragment.index}."
            own = {"theta": live.theta, "exp_avg": live.exp_avg, "exp_avg_sq": live.exp_avg_sq}
            tensors |= {prefix + name: value for name, value in own.items()}
            tensors |= {prefix + "rule." + name: value for name, value in mixed.rule.state().items()}
        facts = {
            "run": self.setup.config.digest(),
            "fragments": [asdict(fragment) for fragment in self.fragments],
            "own_steps": self.own_steps,
            "lr_step": self.lr_step,
            "inner_steps": self.inner.steps,
            "micro_batches": self.micro_batches,
            "tokens": self.tokens,
            "window": [[mixed.live.tokens, mixed.live.rates] for mixed in self.mixed],
        }
        return checkpoint.write(self.setup.folder, tensors, facts)

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
        for mixed, (tokens, rates) in zip(self.mixed, facts["window"], strict=True):
            live, prefix = mixed.live, f"{mixed.live.fragment.index}."
            live.theta.copy_(tensors[prefix + "theta"])
            live.exp_avg.copy_(tensors[prefix + "exp_avg"])
            live.exp_avg_sq.copy_(tensors[prefix + "exp_avg_sq"])
            live.tokens, live.rates, live.steps = tokens, rates, facts["inner_steps"]
            own = {n.removeprefix(prefix + "rule."): t for n, t in tensors.items() if n.startswith(prefix + "rule.")}
            mixed.rule.load(live, {name: tensor.to(live.theta.device) for name, tensor in own.items()})
        self.own_steps, self.lr_step = facts["own_steps"], facts["lr_step"]
        self.micro_batches, self.tokens = facts["micro_batches"], facts["tokens"]

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

"""Training without a model: a few numbers stand for each fragment, and their gossip is the real one.

The numbers descend into a bowl, each peer with noise of its own, as replicas do that see different data; whatever
happens to them at a window's end or in a merge is done by train/fragment_gossip.py, so what a simulation checks (progress is
counted once, mass is conserved, replicas stay together) is checked on the code that trains. Blobs are hollow: they
have the length that the real model's would have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decentral.core import config, jobs
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import Seconds
from decentral.sim.surrogate_stages import QuadraticObjective, SurrogateStages
from decentral.train import stage_jobs, update_rules
from decentral.train.fragment_gossip import FragmentGossip
from decentral.train.inner import Live
from decentral.train.micro_batch_numbers import MicroBatchNumbers
from decentral.train.sections import Codecs
from decentral.train.span_change import RetainedState, span_change_of

Numbers = NDArray[np.float32]

NUMBERS = 8  # that stand for a fragment
DESCENT_RATE = 0.02  # of the descent, per step
STEP_NOISE = 0.01  # per step, in units of the distance to the optimum at the start


@dataclass(frozen=True, slots=True)
class SyntheticCodecs:
    """Codecs whose sections have the size of a real fragment's, `times` as many numbers as they hold."""

    codecs: Codecs
    times: float

    def encode(self, codec: str, values: Tensor) -> bytes:
        return SyntheticBlob([(self.size(codec, values.numel()), self.codecs.encode(codec, values))])

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        return self.codecs.decode(codec, memoryview(blob), elements)

    def size(self, codec: str, elements: int) -> int:
        few = elements == 1  # a weight, not weights
        return self.codecs.size(codec, 1 if few else round(elements * self.times))


@dataclass(frozen=True, slots=True)
class PlainCodecs:
    """fp32 by whatever name: for swarms of thousands, whose quantisation costs more time than their protocol."""

    codecs: Codecs  # for the sizes

    def encode(self, codec: str, values: Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, codec: str, blob: bytes | memoryview, elements: int) -> Tensor:
        values = np.frombuffer(blob, dtype=np.float32)
        if len(values) != elements or not np.isfinite(values).all():
            raise ProtocolError(Reason.NAN, "numbers that are not finite, or not as many as there should be")
        return torch.from_numpy(values.copy())

    def size(self, codec: str, elements: int) -> int:
        return self.codecs.size(codec, elements)


@dataclass(slots=True)
class SurrogateCheckpoint:
    """What a peer's disk keeps."""

    tensors: dict[str, Tensor]
    windows: list[tuple[int, float]]
    own_steps: int
    lr_step: int
    tokens: int
    micro_batches: int
    span: tuple[int, int]


@dataclass(slots=True)
class SurrogateWorkload:
    """Does the jobs of train/compute.py, and steps when it is told to."""

    config: config.Config
    peer: PeerId
    cuts: Sequence[jobs.Fragment]  # the whole model's
    span: tuple[int, int]  # layers [first, last) of them
    codecs: Codecs
    chance: np.random.Generator
    tokens_per_step: int
    layout: Callable[[int, int], jobs.Layout]  # (layer, sequences): of a micro-batch that enters there
    disk: SurrogateCheckpoint | None = None
    reserved: int = 0  # micro-batch numbers that the disk says may have been given out
    shelf: dict[int, RetainedState] = field(default_factory=dict)  # on the disk: states of fragments that were given up
    own_steps: int = 0
    lr_step: int = 0
    tokens: int = 0
    micro_batches: int = 0
    fragments: list[jobs.Fragment] = field(init=False)
    hops: SurrogateStages = field(init=False)
    mixing: FragmentGossip = field(init=False)
    _resumed: bool = False
    _position: MicroBatchNumbers = field(init=False)
    _numbers: list[Numbers] = field(init=False)  # the weights of each fragment, as numpy sees them

    def __post_init__(self) -> None:
        mean = sum(cut.parameters for cut in self.cuts) / len(self.cuts)
        self.mixing = FragmentGossip([], self.config.gossip, self.peer, SyntheticCodecs(self.codecs, mean / NUMBERS))
        self._occupy(*self.span)
        self._position = MicroBatchNumbers.at(self.reserved, self._reserve)
        if self.disk is not None:
            self._load(self.disk)
            self._resumed = True

    def _occupy(self, first: int, last: int) -> None:
        """Holds layers [first, last): those that are here as they are, the others with their initial weights."""
        known = {mixed.live.fragment.index: mixed.live for mixed in self.mixing.fragments}
        self.fragments = [cut for cut in self.cuts if first <= cut.first and cut.last <= last]
        lives = [known.get(cut.index) or _live(cut, self.config.train) for cut in self.fragments]
        self.span = first, last
        self.mixing.hold(lives)
        self._numbers = [live.theta.numpy() for live in lives]
        self.hops = self._hops(lives)

    @property
    def kept(self) -> jobs.RetainedStates:
        """Which states of fragments that were given up the disk has, and of which steps."""
        return tuple((fragment, step) for fragment, (step, _, _) in sorted(self.shelf.items()))

    @property
    def whole(self) -> bool:
        return len(self.fragments) == len(self.cuts)

    @property
    def waits(self) -> bool:
        return self.mixing.holding is not None or not self.whole

    @property
    def restored(self) -> bool:
        return self._resumed

    def step(self, count: int, seconds: Seconds) -> jobs.Stepped:
        """So many steps at once: the descent and the noise of all of them."""
        keep, rate = (1 - DESCENT_RATE) ** count, self.config.train.learning_rate
        for mixed, numbers in zip(self.mixing.fragments, self._numbers, strict=True):
            live = mixed.live
            numbers *= keep
            numbers += self.chance.normal(0.0, STEP_NOISE * count**0.5, NUMBERS)
            live.tokens += count * self.tokens_per_step
            live.lr_sum += count * rate
            live.steps += count
        self.own_steps += count
        self.lr_step += count
        self.tokens += count * self.tokens_per_step
        return jobs.Stepped(self.own_steps, self.lr_step, count * self.tokens_per_step, self.loss(), seconds, count)

    def loss(self) -> float:
        """Mean square distance from the optimum, which is zero."""
        squares = [float(numbers @ numbers) / NUMBERS for numbers in self._numbers]
        return sum(squares) / len(squares)

    def do(self, job: jobs.Job) -> jobs.Outcome:
        match job:
            case jobs.CloseWindow() | jobs.Merge() | jobs.Absorb() | jobs.ExportState():
                return self.mixing.do(job)
            case jobs.ImportState(blobs, step):
                imported = self.mixing.adopt(blobs)
                self.lr_step = max(self.lr_step, step) if imported.accepted else self.lr_step
                return imported
            case jobs.SetClock(step):
                self.lr_step = max(self.lr_step, step)
                return jobs.ClockSet(self.lr_step)
            case jobs.Evaluate():
                return jobs.Evaluated(self.tokens, self.loss(), 0.0)
            case jobs.Save():
                return self._save()
            case jobs.Start(newcomer):
                self.mixing.begin(newcomer)
                return jobs.Started(self.lr_step)
            case jobs.ChangeSpan():
                return self._move(job)
            case jobs.ExportRetained(fragment):
                return jobs.RetainedExported(fragment, *self.shelf.get(fragment, (0, (), b"")))
            case jobs.CloseRound() | jobs.Advance() | jobs.Finish():
                raise AssertionError(f"a sketch does no {job!r}")
            case _:
                return stage_jobs.do(job, self.hops, self)

    def _move(self, job: jobs.ChangeSpan) -> jobs.SpanChanged:
        """As train/compute.py does it."""
        assert self.hops.idle, "a move begins when no execution is here"
        layout = update_rules.layout_of(update_rules.donated(self.config.gossip), NUMBERS, self.mixing.codecs)
        layouts = {cut.index: layout for cut in self.cuts}
        try:
            shift = span_change_of(job, self.cuts, self.fragments, layouts, self.mixing.codecs, self.shelf.get)
        except ProtocolError as error:
            return jobs.SpanChanged(False, error.reason)
        for out in map(self.mixing.export, shift.lost):
            self.shelf[out.fragment] = self.lr_step, out.layout, out.blob
        self._occupy(job.first, job.last)
        self.mixing.start(shift.states)
        self.mixing.begin_anew(shift.gained)
        for index in shift.gained:
            self.shelf.pop(index, None)
        self.lr_step = max(self.lr_step, job.step)
        return jobs.SpanChanged(True, kept=self.kept)

    # Routes

    def work(self, job: jobs.Job) -> float:
        return stage_jobs.work(job, self.cuts, self.hops.held)

    def draw(self, job: jobs.Draw) -> jobs.ForwardDone:
        number = self._position.take(self.micro_batches)
        self.micro_batches = number + 1
        return self.hops.draw(job, number, self.tokens_per_step)

    def counted(self, job: jobs.Apply) -> jobs.Stepped:
        self.own_steps += 1
        self.lr_step += 1
        self.tokens += job.tokens
        return jobs.Stepped(self.own_steps, self.lr_step, job.tokens, job.loss, 0.0, job.micro_batches)

    def _hops(self, lives: Sequence[Live]) -> SurrogateStages:
        rate = self.config.train.learning_rate
        end, context, bowl = self.cuts[-1].last, self.config.model.context, QuadraticObjective(DESCENT_RATE, STEP_NOISE)
        return SurrogateStages(
            self.peer, lives, self.fragments, end, context, self.layout, self.chance, bowl, rate, self.loss
        )

    def _reserve(self, numbers: int) -> None:
        self.reserved = numbers

    def _save(self) -> jobs.Saved:
        tensors = {name: tensor.clone() for name, tensor in self.mixing.tensors().items()}
        steps = (self.own_steps, self.lr_step, self.tokens, self.micro_batches)
        self.disk = SurrogateCheckpoint(tensors, self.mixing.windows(), *steps, self.span)
        parameters = sum(fragment.parameters for fragment in self.fragments)
        return jobs.Saved(self.own_steps, parameters * 4 * len(tensors) // len(self.fragments))

    def _load(self, disk: SurrogateCheckpoint) -> None:
        self.mixing.load(disk.tensors, disk.windows, disk.own_steps)
        self.own_steps, self.lr_step, self.tokens = disk.own_steps, disk.lr_step, disk.tokens
        self.micro_batches = disk.micro_batches


class _Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(NUMBERS, 1))


def _live(fragment: jobs.Fragment, train: config.TrainConfig) -> Live:
    few = jobs.Fragment(fragment.index, 0, 1, NUMBERS)
    return Live(few, [_Numbers()], torch.device("cpu"), train)

"""Training without a model: a few numbers stand for each fragment, and their gossip is the real one.

The numbers descend towards the minimum of a quadratic objective, with noise of each peer's own, as replicas do that see
different data. Windows end and merge in engine/gossip_jobs.py, so what a simulation checks (progress is counted
once, replicas stay together) is checked on the code that trains. Blobs are as long as real ones.
"""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.comm.gossip.update_rules import RuleTools
from decentral.core import config, jobs
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId
from decentral.core.time_spent import TimeSpent
from decentral.engine.checkpoint import MicroBatchNumbers
from decentral.engine.fragment import Live
from decentral.engine.gossip_jobs import FragmentGossip, WindowCounts
from decentral.engine.job_runner import JobRunner
from decentral.engine.micro_batch_names import MicroBatchNames
from decentral.engine.span import RetainedState
from decentral.engine.step import Counters
from decentral.engine.threads import Phase, Program
from decentral.sim.surrogate_model import DESCENT_RATE, NUMBERS, STEP_NOISE, SurrogateModel, loss_of
from decentral.sim.surrogate_stages import SurrogateStages


@dataclass(frozen=True, slots=True)
class SurrogateCheckpoint:
    tensors: dict[str, Tensor]
    windows: list[WindowCounts]
    counters: Counters
    span: tuple[int, int]  # layers


@dataclass(slots=True)
class SurrogateDisk:
    """What a peer's disk keeps from one life to the next."""

    checkpoint: SurrogateCheckpoint | None = None
    reserved: int = 0  # no micro-batch number from here on was given out
    retained: dict[int, RetainedState] = field(default_factory=dict)  # by fragment: states that were given up
    full: bool = False

    def reserve(self, numbers: int) -> None:
        self.check()
        self.reserved = numbers

    def fill(self) -> None:
        self.full = True

    def make_room(self) -> None:
        self.full = False

    def save(self, checkpoint: SurrogateCheckpoint) -> None:
        """Keep this checkpoint in place of the last one. Raises OSError if the disk takes nothing more."""
        self.check()
        self.checkpoint = checkpoint

    def check(self) -> None:
        """Raises OSError if the disk takes nothing more."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, state: jobs.Donated, step: int) -> None:
        self.check()
        fragment, layout, blob = state
        assert isinstance(blob, bytes), "what a peer has exported itself"
        self.retained[fragment] = step, layout, blob

    def read(self, fragment: int) -> RetainedState | None:
        return self.retained.get(fragment)

    def forget(self, fragments: Iterable[int]) -> None:
        for fragment in fragments:
            self.retained.pop(fragment, None)

    def steps(self, fragments: Iterable[int]) -> jobs.RetainedStates:
        return tuple((one, self.retained[one][0]) for one in fragments if one in self.retained)


class SurrogateSpan:
    """What engine/span.py is for a surrogate peer: the fragments that it holds, their gossip and work for routes."""

    stages: SurrogateStages

    def __init__(self, model: SurrogateModel, peer: PeerId, chance: np.random.Generator, first: int, last: int) -> None:
        self.model, self.peer, self.chance, self.cuts = model, peer, chance, model.cuts
        codecs = model.synthetic_codecs()
        self.gossip = FragmentGossip(model.config.gossip, peer, RuleTools(codecs, TorchKernels(codecs)))
        self.fragments: list[Fragment] = []
        self.hold(first, last)

    def hold(self, first: int, last: int, drawn: bool = True) -> None:
        """Its few numbers begin as ones, drawn or not."""
        assert not self.fragments or self.stages.idle, "a span changes while no execution is pending"
        known = {one.live.fragment.index: one.live for one in self.gossip.fragments}
        self.layers = first, last
        self.fragments = [cut for cut in self.cuts if first <= cut.first and cut.last <= last]
        self.lives = [known.get(cut.index) or _live(cut, self.model.config.train) for cut in self.fragments]
        self.gossip.hold(self.lives)
        self.stages = SurrogateStages(self.model, self.peer, self.lives, self.fragments, self.chance)

    def given(self, fragments: Iterable[int]) -> None:
        """They are there from the beginning."""

    def descend(self, count: int) -> None:
        """So many steps at once: the descent and the noise of all of them."""
        keep, rate = (1 - DESCENT_RATE) ** count, self.model.config.train.peak_rate
        for live, numbers in zip(self.lives, self.stages.weights, strict=True):
            numbers *= keep
            numbers += self.chance.normal(0.0, STEP_NOISE * count**0.5, NUMBERS)
            live.tokens += count * self.model.tokens_per_step
            live.lr_sum += count * rate
            live.steps += count

    def all_state_layouts(self) -> tuple[Layout, ...]:
        return (self.gossip.state_layout(NUMBERS),) * len(self.cuts)


def _live(fragment: Fragment, train: config.TrainConfig) -> Live:
    few = Fragment(fragment.index, 0, 1, NUMBERS)
    wide = train.model_copy(update={"weights": "float32"})
    return Live(few, [nn.RMSNorm(NUMBERS)], torch.device("cpu"), wide)  # its weights are ones


class SurrogateWorkload(JobRunner):
    """Does the jobs of engine/compute.py, and steps when it is told to. It goes on from the disk's checkpoint."""

    span: SurrogateSpan

    def __init__(
        self,
        model: SurrogateModel,
        peer: PeerId,
        span: tuple[int, int],
        chance: np.random.Generator,
        disk: SurrogateDisk,
    ) -> None:
        self.model, self.chance, self.disk = model, chance, disk
        names = MicroBatchNames.known(peer)
        numbers = MicroBatchNumbers(disk.reserved, disk.reserve, names, lambda below: int(chance.integers(below)))
        super().__init__(SurrogateSpan(model, peer, chance, span[0], span[1]), disk, numbers, synchronous=False)
        if disk.checkpoint is not None:
            self.counters, self.restored = replace(disk.checkpoint.counters), True
            self.gossip.load(disk.checkpoint.tensors, disk.checkpoint.windows, self.counters.own_steps)

    def take_steps(self, count: int, spent: TimeSpent) -> jobs.Stepped:
        """Takes so many steps at once, on which so much time was spent."""
        tokens = count * self.model.tokens_per_step
        self.span.descend(count)
        stepped = self.counters.stepped(tokens, loss_of(self.span.stages.weights), count, steps=count)
        return replace(stepped, spent=spent)

    def _draw(self, job: jobs.Draw, number: int, name: int) -> jobs.Outcome:
        return self.span.stages.draw(job, name, self.model.tokens_per_step)

    def _evaluate(self) -> Program:
        yield Phase.EDGE
        return jobs.Evaluated(self.counters.tokens, loss_of(self.span.stages.weights), 0.0)

    def _save(self) -> Program:
        yield Phase.HELD
        tensors = {name: tensor.clone() for name, tensor in self.gossip.tensors().items()}
        made = SurrogateCheckpoint(tensors, self.gossip.windows(), replace(self.counters), self.span.layers)
        try:
            self.disk.save(made)
        except OSError as error:
            return jobs.SaveFailed(f"{type(error).__name__}: {error}")
        parameters = sum(fragment.parameters for fragment in self.fragments)
        return jobs.Saved(self.counters.own_steps, parameters * 4 * len(tensors) // len(self.fragments))

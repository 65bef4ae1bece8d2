"""Train without a model: in a surrogate workload, a few numbers stand for the weights of each fragment.

The numbers descend on a quadratic objective. Each peer adds its own noise, so that replicas differ as replicas trained
on different data do. Gossip is real: engine/gossip_jobs.py runs as in training, so a simulation checks that code.
Messages have the sizes of real messages. Start reading at `SurrogateWorkload`.
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
from decentral.engine.fragment import Live
from decentral.engine.gossip_jobs import FragmentGossip, WindowCounts
from decentral.engine.job_runner import JobRunner
from decentral.engine.micro_batch_names import MicroBatchNames
from decentral.engine.micro_batch_numbers import MicroBatchNumbers
from decentral.engine.span import RetainedState
from decentral.engine.step import Counters
from decentral.engine.threads import Phase, Program
from decentral.sim.surrogate_model import DESCENT_RATE, NUMBERS, STEP_NOISE, SurrogateModel, SyntheticCodecs, loss_of
from decentral.sim.surrogate_stages import SurrogateStages


@dataclass(frozen=True, slots=True)
class SurrogateCheckpoint:
    """The checkpoint that a surrogate workload saves on its `SurrogateDisk`, and restarts from."""

    tensors: dict[str, Tensor]
    windows: list[WindowCounts]
    counters: Counters
    span: tuple[int, int]  # (first, last): the peer holds layers first to last - 1


@dataclass(slots=True)
class SurrogateDisk:
    """The contents of a surrogate peer's disk, which outlive the peer's process."""

    checkpoint: SurrogateCheckpoint | None = None
    reserved: int = 0  # a restarted peer numbers its micro-batches from here, so that no number is used twice
    retained: dict[int, RetainedState] = field(default_factory=dict)  # states of fragments that the peer does not hold
    full: bool = False

    def reserve(self, numbers: int) -> None:
        """Record that the peer may use all micro-batch numbers below `numbers`. Raises OSError if the disk is full."""
        self.check()
        self.reserved = numbers

    def fill(self) -> None:
        """Make all writes fail from now on, as on a full disk."""
        self.full = True

    def make_room(self) -> None:
        """Let writes succeed again, after `fill`."""
        self.full = False

    def save(self, checkpoint: SurrogateCheckpoint) -> None:
        """Replace the checkpoint. Raises OSError if the disk is full."""
        self.check()
        self.checkpoint = checkpoint

    def check(self) -> None:
        """Raise OSError if the disk is full."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, state: jobs.Donated, step: int) -> None:
        """Store the state of a fragment at `step`. Raises OSError if the disk is full."""
        self.check()
        fragment, layout, blob = state
        assert isinstance(blob, bytes), "the states of simulated peers are synthetic blobs"
        self.retained[fragment] = step, layout, blob

    def write_copy(self, state: jobs.Donated, step: int) -> None:
        """Store another holder's state of a fragment. Raises OSError if the disk is full."""
        self.write(state, step)

    def read(self, fragment: int) -> RetainedState | None:
        """Return the retained state of a fragment; None if there is none."""
        return self.retained.get(fragment)

    def forget(self, fragments: Iterable[int]) -> None:
        """Delete the retained states of these fragments."""
        for fragment in fragments:
            self.retained.pop(fragment, None)

    def steps(self, fragments: Iterable[int]) -> jobs.RetainedStates:
        """Return (fragment, step of its state) for those of `fragments` that have a retained state."""
        return tuple((one, self.retained[one][0]) for one in fragments if one in self.retained)


class SurrogateSpan:
    """The fragments of a surrogate peer, their gossip and stage executions; it replaces engine/span.py."""

    stages: SurrogateStages

    def __init__(self, model: SurrogateModel, peer: PeerId, chance: np.random.Generator, first: int, last: int) -> None:
        """Begin with layers [first, last); `chance` generates the noise of training."""
        self.model, self.peer, self.chance, self.cuts = model, peer, chance, model.cuts
        mean = sum(cut.parameters for cut in model.cuts) / len(model.cuts)
        codecs = SyntheticCodecs(model.codecs, mean / NUMBERS)  # blobs have the size of the model's mean fragment
        self.gossip = FragmentGossip(model.config.gossip, peer, RuleTools(codecs, TorchKernels(codecs)))
        self.fragments: list[Fragment] = []
        self.build_layers(first, last)

    def build_layers(self, first: int, last: int, drawn: bool = True) -> None:
        """Train layers [first, last) from now on. The numbers of new fragments begin as 1, whatever `drawn` is."""
        assert not self.fragments or self.stages.idle, "a span must not change while executions are pending"
        known = {one.live.fragment.index: one.live for one in self.gossip.fragments}
        self.layers = first, last
        self.fragments = [cut for cut in self.cuts if first <= cut.first and cut.last <= last]
        self.lives = [known.get(cut.index) or _live(cut, self.model.config.train) for cut in self.fragments]
        self.gossip.set_lives(self.lives)
        self.stages = SurrogateStages(self.model, self.peer, self.lives, self.fragments, self.chance)

    def given(self, fragments: Iterable[int]) -> None:
        """Do nothing: a surrogate's numbers are always initialised, so it need not know which fragments got weights."""

    def descend(self, count: int) -> None:
        """Take `count` steps at once: apply their total descent, and noise with their total variance."""
        keep = (1 - DESCENT_RATE) ** count
        for live, numbers in zip(self.lives, self.stages.weights, strict=True):
            numbers *= keep
            numbers += self.chance.normal(0.0, STEP_NOISE * count**0.5, NUMBERS)
            live.tokens += count * self.model.tokens_per_step
            live.steps += count

    def all_state_layouts(self) -> tuple[Layout, ...]:
        """Return the layout of the state of each fragment of the model."""
        return (self.gossip.state_layout(NUMBERS),) * len(self.cuts)


def _live(fragment: Fragment, train: config.TrainConfig) -> Live:
    few = Fragment(fragment.index, 0, 1, NUMBERS)
    wide = train.model_copy(update={"weights": "float32"})
    return Live(few, [nn.RMSNorm(NUMBERS)], torch.device("cpu"), wide)  # a module whose NUMBERS weights begin as 1


class SurrogateWorkload(JobRunner):
    """The surrogate of engine/compute.py: it takes training steps and does the worker's jobs without a model."""

    span: SurrogateSpan

    def __init__(
        self,
        model: SurrogateModel,
        peer: PeerId,
        span: tuple[int, int],
        chance: np.random.Generator,
        disk: SurrogateDisk,
    ) -> None:
        """Begin with the layers `span`, [first, last), and load the disk's checkpoint if there is one."""
        self.model, self.chance, self.disk = model, chance, disk
        names = MicroBatchNames.known(peer)
        numbers = MicroBatchNumbers(disk.reserved, disk.reserve, names, lambda below: int(chance.integers(below)))
        super().__init__(SurrogateSpan(model, peer, chance, span[0], span[1]), disk, numbers, synchronous=False)
        if disk.checkpoint is not None:
            self.counters, self.restored = replace(disk.checkpoint.counters), True
            self.gossip.load(disk.checkpoint.tensors, disk.checkpoint.windows, self.counters.own_steps)

    def take_steps(self, count: int, spent: TimeSpent) -> jobs.Stepped:
        """Take `count` steps at once; return their outcome, which reports `spent` as the time spent."""
        tokens = count * self.model.tokens_per_step
        self.span.descend(count)
        stepped = self.counters.count_steps(tokens, loss_of(self.span.stages.weights), count, steps=count)
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
        return jobs.Saved(self.counters.lr_step, parameters * 4 * len(tensors) // len(self.fragments))

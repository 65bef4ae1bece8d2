"""Training without a model: a few numbers stand for each fragment, and their gossip is the real one.

The numbers descend towards the minimum of a quadratic objective, with noise of each peer's own, as replicas do that see
different data. What happens to them at a window's end or in a merge is done by train/fragment_gossip.py, so what a
simulation checks (progress is counted once, mass is conserved, replicas stay together) is checked on the code that
trains. Blobs are synthetic: they have the length that the real model's would have.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.surrogate_model import SurrogateModel
from decentral.sim.surrogate_span import SurrogateSpan
from decentral.train.counters import Counters
from decentral.train.job_runner import JobRunner
from decentral.train.micro_batch_numbers import MicroBatchNumbers
from decentral.train.span_change import RetainedState


@dataclass(frozen=True, slots=True)
class SurrogateCheckpoint:
    tensors: dict[str, Tensor]
    windows: list[tuple[int, float]]
    counters: Counters
    span: tuple[int, int]  # layers


@dataclass(slots=True)
class SurrogateDisk:
    """What a peer's disk keeps from one life to the next."""

    checkpoint: SurrogateCheckpoint | None = None
    reserved: int = 0  # no micro-batch number from here on was given out
    retained: dict[int, RetainedState] = field(default_factory=dict)  # by fragment: states that were given up

    def reserve(self, numbers: int) -> None:
        self.reserved = numbers

    def write(self, state: jobs.Donated, step: int) -> None:
        fragment, layout, blob = state
        self.retained[fragment] = step, layout, blob

    def read(self, fragment: int) -> RetainedState | None:
        return self.retained.get(fragment)

    def forget(self, fragments: Iterable[int]) -> None:
        for fragment in fragments:
            self.retained.pop(fragment, None)

    def steps(self, fragments: Iterable[int]) -> jobs.RetainedStates:
        return tuple((one, self.retained[one][0]) for one in fragments if one in self.retained)


class SurrogateWorkload(JobRunner):
    """Does the jobs of train/compute.py, and steps when it is told to. It goes on from the disk's checkpoint."""

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
        numbers = MicroBatchNumbers(disk.reserved, disk.reserve)
        super().__init__(SurrogateSpan(model, peer, chance, span), disk, numbers, synchronous=False)
        if disk.checkpoint is not None:
            self.counters, self.restored = replace(disk.checkpoint.counters), True
            self.gossip.load(disk.checkpoint.tensors, disk.checkpoint.windows, self.counters.own_steps)

    def take_steps(self, count: int, seconds: Seconds) -> jobs.Stepped:
        """Takes so many steps at once, which have taken so long."""
        tokens = count * self.model.tokens_per_step
        self.span.descend(count)
        self.counters.busy_s = seconds
        return self.counters.stepped(tokens, self.span.loss(), count, steps=count)

    def _draw(self, job: jobs.Draw, number: int) -> jobs.Outcome:
        return self.span.stages.draw(job, number, self.model.tokens_per_step)

    def _evaluate(self) -> jobs.Evaluated:
        return jobs.Evaluated(self.counters.tokens, self.span.loss(), 0.0)

    def _save(self) -> jobs.Saved:
        tensors = {name: tensor.clone() for name, tensor in self.gossip.tensors().items()}
        self.disk.checkpoint = SurrogateCheckpoint(
            tensors, self.gossip.windows(), replace(self.counters), self.span.layers
        )
        parameters = sum(fragment.parameters for fragment in self.fragments)
        return jobs.Saved(self.counters.own_steps, parameters * 4 * len(tensors) // len(self.fragments))

"""Routes without a model: what train/stage_runner.py does with tensors, done with the few numbers of sim/surrogate.py.

Blobs have the true sizes of the model's activations and gradients, and say of themselves which micro-batch they are of
and which layer they enter or leave. So a micro-batch that lost its way, a gradient that came to another's graph, and
one that is in a sum twice are seen by what the sums hold, not by what the protocol believes (sim/route_audit.py).

The gradient of a micro-batch is that of the bowl, at the weights of its backward pass, and noise: by tokens, as real
sums are. One step of it moves a fragment as one step of `Sketch.step` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgpack
import numpy as np
from numpy.typing import NDArray

from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.jobs import Layout
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob
from decentral.train.inner import Live

Numbers = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SurrogateGradient:
    """A micro-batch in a sum of gradients: layers [first, last) of it."""

    origin: str
    number: int
    first: int
    last: int
    tokens: int


@dataclass(frozen=True, slots=True)
class QuadraticObjective:
    """How a fragment descends: `rate` of its distance to the optimum in each step, `noise` of a step of one batch."""

    rate: float
    noise: float


@dataclass(slots=True)
class SurrogateStages:
    """The fragments of one peer at work for routes. `layout(layer, sequences)`: of what enters that layer."""

    peer: PeerId
    lives: Sequence[Live]
    fragments: Sequence[jobs.Fragment]  # the real model's, that these stand for
    end: int  # of the model
    context: int  # tokens of a sequence
    layout: Callable[[int, int], Layout]
    chance: np.random.Generator
    bowl: QuadraticObjective
    learning_rate: float
    loss: Callable[[], float]  # of a token
    held: dict[int, SurrogateGradient] = field(default_factory=dict)
    stepped: tuple[SurrogateGradient, ...] = ()  # what was in the last sum that was applied
    _filled: list[SurrogateGradient] = field(default_factory=list)
    _sealed: dict[int, tuple[tuple[SurrogateGradient, ...], NDArray[np.float64]]] = field(
        default_factory=dict
    )  # by slot
    _executions: list[int] = field(default_factory=list)
    _numbers: list[Numbers] = field(init=False)
    _sums: NDArray[np.float64] = field(init=False)  # fragments x numbers, over tokens

    def __post_init__(self) -> None:
        self._numbers = [live.theta.numpy() for live in self.lives]
        self._sums = np.zeros((len(self.lives), len(self._numbers[0])))

    @property
    def idle(self) -> bool:
        """Whether no micro-batch and no gradient is here."""
        return not (self.held or self._filled or self._sealed)

    # A micro-batch

    def draw(self, job: jobs.Draw, number: int, tokens: int) -> jobs.ForwardDone:
        own = SurrogateGradient(self.peer, number, 0, job.last, tokens)
        self.held[job.token] = own
        return self._forwarded(job.token, number, own)

    def forward(self, job: jobs.Forward) -> jobs.ForwardDone | jobs.BackwardDone | jobs.ExecutionFailed:
        layout = self.layout(job.first, job.sequences)
        if job.layout != layout or len(job.blob) != sum(section.size for section in layout):
            return jobs.ExecutionFailed(job.token, Reason.SHAPE)
        origin, number, layer = _read(job.blob)
        assert layer == job.first, f"what enters layer {layer} came to layer {job.first}"
        tokens = layout[1].elements
        carried = SurrogateGradient(origin, number, job.first, job.last, tokens)
        if job.last < self.end:
            self.held[job.token] = carried
            return self._forwarded(job.token, 0, carried)
        return self._back(job.token, carried, self.loss() * tokens)

    def backward(self, job: jobs.Backward) -> jobs.BackwardDone | jobs.ExecutionFailed:
        held = self.held.get(job.token)
        if held is None:
            return jobs.ExecutionFailed(job.token, Reason.FORGOTTEN)
        if job.layout != self._layout(held, held.last)[:1] or len(job.blob) != job.layout[0].size:
            return jobs.ExecutionFailed(job.token, Reason.SHAPE)
        came = _read(job.blob)
        assert came == (held.origin, held.number, held.last), f"the gradient of {came} came to {held}"
        del self.held[job.token]
        return self._back(job.token, held, 0.0)

    def forget(self, tokens: Sequence[int]) -> jobs.Forgotten:
        for token in tokens:
            self.held.pop(token, None)
        return jobs.Forgotten()

    # The optimizer's step

    def seal(self, slot: int) -> jobs.Sealed:
        self._sealed[slot] = tuple(self._filled), self._sums
        self._sums, self._filled = np.zeros_like(self._sums), []
        executions, self._executions = tuple(self._executions), []
        return jobs.Sealed(executions, slot)

    def drop(self, slot: int) -> jobs.Forgotten:
        self._sealed.pop(slot, None)
        return jobs.Forgotten()

    def apply(self, lr_step: int, slot: int) -> None:
        sealed, sums = self._sealed.pop(slot, ((), self._sums))  # what was dropped moves nothing
        for index, (live, fragment) in enumerate(zip(self.lives, self.fragments, strict=True)):
            through = [one for one in sealed if one.first <= fragment.first and fragment.last <= one.last]
            tokens = sum(one.tokens for one in through)
            if not tokens:
                continue
            noise = self.chance.normal(0.0, self.bowl.noise / len(through) ** 0.5, len(self._numbers[index]))
            self._numbers[index] -= self.bowl.rate * sums[index] / tokens - noise
            live.tokens += tokens
            live.lr_sum += self.learning_rate
            live.steps += 1
        self.stepped = sealed

    # Helpers

    def _layout(self, carried: SurrogateGradient, layer: int) -> Layout:
        return self.layout(layer, carried.tokens // self.context)

    def _forwarded(self, token: int, number: int, carried: SurrogateGradient) -> jobs.ForwardDone:
        layout = self._layout(carried, carried.last)
        said = _written(carried, carried.last)
        blob = SyntheticBlob([(layout[0].size, said), (layout[1].size, b"")])
        return jobs.ForwardDone(token, number, carried.tokens // self.context, carried.tokens, layout, blob)

    def _back(self, token: int, carried: SurrogateGradient, loss: float) -> jobs.BackwardDone:
        """Adds to the sum, and gives the gradient of what came in."""
        self._filled.append(carried)
        self._executions.append(token)
        for index, fragment in enumerate(self.fragments):
            if carried.first <= fragment.first and fragment.last <= carried.last:
                self._sums[index] += carried.tokens * self._numbers[index]
        if carried.first == 0:
            return jobs.BackwardDone(token, carried.tokens, loss, (), b"")
        section = self._layout(carried, carried.first)[0]
        blob = SyntheticBlob([(section.size, _written(carried, carried.first))])
        return jobs.BackwardDone(token, carried.tokens, loss, (section,), blob)


def _written(carried: SurrogateGradient, layer: int) -> bytes:
    said: bytes = msgpack.packb((carried.origin, carried.number, layer))
    return said


def _read(blob: bytes) -> tuple[str, int, int]:
    """Origin peer, number and layer. A blob of the right length is one of ours: damaged ones have another."""
    assert isinstance(blob, SyntheticBlob)
    origin, number, layer = msgpack.unpackb(blob.segments[0][1])
    return origin, number, layer

"""Routes without a model: what engine/stage_runner.py does with tensors, done with the few numbers of a surrogate.

Blobs have their true sizes, and name the micro-batch that they belong to and the layer that they enter or leave. So the
sums themselves show a micro-batch that lost its way, a gradient that came to another execution, and one that was added
twice (sim/invariants/routes.py).

The gradient of a micro-batch is that of the quadratic objective, at the weights of its backward pass. Sums are weighted
by tokens. One step with one micro-batch moves a fragment as one step of sim/surrogate.py does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack
import numpy as np
from numpy.typing import NDArray

from decentral.core import jobs
from decentral.core.fragments import ActivationForms, Fragment, fits_one, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import UNLIKE
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob
from decentral.engine.fragment import Live
from decentral.sim.surrogate_model import DESCENT_RATE, NUMBERS, STEP_NOISE, Numbers, SurrogateModel, loss_of

FLOOR = 1.0  # of a micro-batch's loss, as text has one; the losses of honest replicas that have learned are alike


@dataclass(frozen=True, slots=True)
class SurrogateGradient:
    """A micro-batch in a sum of gradients, as far as layers [first, last) are concerned."""

    origin: str
    number: int
    first: int
    last: int
    tokens: int


@dataclass(slots=True)
class SurrogateStages:
    """The fragments of one peer at work for routes."""

    model: SurrogateModel
    peer: PeerId
    lives: Sequence[Live]
    fragments: Sequence[Fragment]  # of the real model, for which the lives stand
    chance: np.random.Generator
    pending: dict[int, SurrogateGradient] = field(default_factory=dict)  # by token: no backward pass has come yet
    applied: tuple[SurrogateGradient, ...] = ()  # what was in the last sum that was applied
    weights: list[Numbers] = field(init=False)
    _filled: list[SurrogateGradient] = field(default_factory=list)
    _executions: list[int] = field(default_factory=list)  # tokens of what is filled in
    _sums: NDArray[np.float64] = field(init=False)  # of what is filled in: fragments x numbers, over tokens
    _sealed: dict[int, tuple[tuple[SurrogateGradient, ...], NDArray[np.float64]]] = field(
        default_factory=dict
    )  # by slot

    def __post_init__(self) -> None:
        self.weights = [live.theta.numpy() for live in self.lives]
        self._sums = np.zeros((len(self.lives), NUMBERS))

    @property
    def idle(self) -> bool:
        """Whether no micro-batch and no gradient is here."""
        return not (self.pending or self._filled or self._sealed)

    def draw(self, job: jobs.Draw, number: int, tokens: int) -> jobs.ForwardDone:
        """Begins this peer's micro-batch with this number, of so many tokens."""
        own = SurrogateGradient(self.peer, number, 0, job.last, tokens)
        self.pending[job.token] = own
        return self._forwarded(job, number, own)

    def forward(self, job: jobs.Forward) -> jobs.ForwardDone | jobs.BackwardDone | jobs.ExecutionFailed:
        if not fits_one(self.model.forms(job.first, job.sequences).entering, job.layout, len(job.blob)):
            return jobs.ExecutionFailed(job.token, Reason.SHAPE)
        origin, number, layer = _read(job.blob)
        assert layer == job.first, f"what enters layer {layer} came to layer {job.first}"
        tokens = job.layout[1].elements
        execution = SurrogateGradient(origin, number, job.first, job.last, tokens)
        if job.last < self.model.cuts[-1].last:
            self.pending[job.token] = execution
            return self._forwarded(job, 0, execution)
        return self._backed(job, execution, (FLOOR + loss_of(self.weights)) * tokens)

    def backward(self, job: jobs.Backward) -> jobs.BackwardDone | jobs.ExecutionFailed:
        execution = self.pending.get(job.token)
        if execution is None:
            return jobs.ExecutionFailed(job.token, Reason.FORGOTTEN)
        if not fits_one(self._forms(execution, execution.last).gradients, job.layout, len(job.blob)):
            return jobs.ExecutionFailed(job.token, Reason.SHAPE)
        came, ours = _read(job.blob), (execution.origin, execution.number, execution.last)
        assert came == ours, f"the gradient of {came} came to {execution}"
        del self.pending[job.token]
        return self._backed(job, execution, 0.0)

    def forget(self, tokens: Sequence[int]) -> jobs.Forgotten:
        for token in tokens:
            self.pending.pop(token, None)
        return jobs.Forgotten()

    def compare(self, job: jobs.Compare) -> jobs.Compared:
        """Gradients of one micro-batch are equal at all peers, whatever their weights."""
        *others, newest = (_read(blob) for _, blob in job.gradients)
        same, apart = jobs.Likeness(1.0, 1.0), UNLIKE
        return jobs.Compared(job.token, tuple(same if newest == other else apart for other in others))

    def seal(self, slot: int) -> jobs.Sealed:
        self._sealed[slot] = tuple(self._filled), self._sums
        self._sums, self._filled = np.zeros_like(self._sums), []
        executions, self._executions = tuple(self._executions), []
        return jobs.Sealed(executions, slot)

    def drop(self, slot: int) -> jobs.Forgotten:
        self._sealed.pop(slot, None)
        return jobs.Forgotten()

    def apply(self, lr_step: int, slot: int) -> jobs.AppliedTokens:
        """One step of descent on each fragment that has tokens in the sealed sum; a dropped sum moves nothing."""
        sealed, sums = self._sealed.pop(slot, ((), self._sums))
        taken: list[tuple[int, int, int]] = []
        for index, (live, fragment) in enumerate(zip(self.lives, self.fragments, strict=True)):
            through = [one for one in sealed if one.first <= fragment.first and fragment.last <= one.last]
            tokens = sum(one.tokens for one in through)
            if not tokens:
                continue
            noise = self.chance.normal(0.0, STEP_NOISE / len(through) ** 0.5, NUMBERS)
            self.weights[index] -= DESCENT_RATE * sums[index] / tokens - noise
            live.count(tokens, self.model.config.train.peak_rate)
            taken.append((fragment.first, fragment.last, tokens))
        self.applied = sealed
        return tuple(taken)

    def _forms(self, execution: SurrogateGradient, layer: int) -> ActivationForms:
        return self.model.forms(layer, execution.tokens // self.model.config.model.context)

    def _forwarded(self, job: jobs.Draw | jobs.Forward, number: int, execution: SurrogateGradient) -> jobs.ForwardDone:
        layout = self._forms(execution, execution.last).entering_over(job.thin)
        header = msgpack.packb((execution.origin, execution.number, execution.last))
        blob = SyntheticBlob([(layout[0].size, header), (layout[1].size, b"")])
        sequences = execution.tokens // self.model.config.model.context
        return jobs.ForwardDone(job.token, number, sequences, execution.tokens, layout, blob)

    def _backed(
        self, job: jobs.Forward | jobs.Backward, execution: SurrogateGradient, loss: float
    ) -> jobs.BackwardDone:
        """Adds the gradient to the sum, and gives the gradient of the input."""
        self._filled.append(execution)
        self._executions.append(job.token)
        for index, fragment in enumerate(self.fragments):
            if execution.first <= fragment.first and fragment.last <= execution.last:
                self._sums[index] += execution.tokens * self.weights[index]
        if execution.first == 0:
            return jobs.BackwardDone(job.token, execution.tokens, loss, (), b"")
        layout = self._forms(execution, execution.first).gradient_over(job.thin)
        blob = SyntheticBlob(
            [(layout_bytes(layout), msgpack.packb((execution.origin, execution.number, execution.first)))]
        )
        return jobs.BackwardDone(job.token, execution.tokens, loss, layout, blob)


def _read(blob: bytes) -> tuple[str, int, int]:
    """Origin peer, number and layer. A damaged blob never comes here: faults change its length."""
    assert isinstance(blob, SyntheticBlob)
    origin, number, layer = msgpack.unpackb(blob.segments[0][1])
    return origin, number, layer

"""Run stage executions of routed micro-batches on a surrogate, in place of engine/stage_runner.py.

A blob has the size of a real blob, but contains only the identity of its micro-batch and its layer. So assertions and
the audit (sim/invariants/routes.py) notice a micro-batch at the wrong layer, a gradient that belongs to another
execution, and a gradient that is added twice.

The gradient of a micro-batch is the gradient of the quadratic objective at the weights during the backward pass. Sums
of gradients are weighted by tokens. A step with one micro-batch changes a fragment as much as a step of
sim/surrogate.py. Start reading at `SurrogateStages`.
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

FLOOR = 1.0  # loss at the optimum; above 0, as with real text, so that trained honest replicas report similar losses


@dataclass(frozen=True, slots=True)
class SurrogateGradient:
    """The gradient of a micro-batch for layers [first, last); origin peer and number identify the micro-batch."""

    origin: str
    number: int
    first: int
    last: int
    tokens: int


@dataclass(slots=True)
class SurrogateStages:
    """The stage executions of one peer that await their backward pass, and the sums of the computed gradients.

    Each gradient is added to the open sum. `seal` moves the open sum into a numbered slot, and `apply` takes an
    optimiser step with the sum in a slot.
    """

    model: SurrogateModel
    peer: PeerId
    lives: Sequence[Live]
    fragments: Sequence[Fragment]  # the real fragment that each of `lives` simulates
    chance: np.random.Generator
    pending: dict[int, SurrogateGradient] = field(default_factory=dict)  # executions that await a backward pass, by id
    applied: tuple[SurrogateGradient, ...] = ()  # the gradients in the sum that `apply` used last
    weights: list[Numbers] = field(init=False)
    _filled: list[SurrogateGradient] = field(default_factory=list)  # the gradients in the open sum
    _executions: list[int] = field(default_factory=list)  # ids of the stage executions in the open sum
    _sums: NDArray[np.float64] = field(init=False)  # (fragments, NUMBERS) open sum, weighted by tokens
    # By slot: the gradients that were summed, and their sum (fragments, NUMBERS).
    _sealed: dict[int, tuple[tuple[SurrogateGradient, ...], NDArray[np.float64]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with an empty open sum."""
        self.weights = [live.theta.numpy() for live in self.lives]
        self._sums = np.zeros((len(self.lives), NUMBERS))

    @property
    def idle(self) -> bool:
        """Whether no execution awaits its backward pass and no sum contains a gradient."""
        return not (self.pending or self._filled or self._sealed)

    def draw(self, job: jobs.Draw, name: int, tokens: int) -> jobs.ForwardDone:
        """Run the first stage on this peer's own micro-batch `name` of `tokens` tokens; return the activations."""
        own = SurrogateGradient(self.peer, name, 0, job.last, tokens)
        self.pending[job.local_id] = own
        return self._forwarded(job, name, own)

    def forward(self, job: jobs.Forward) -> jobs.ForwardDone | jobs.BackwardDone | jobs.ExecutionFailed:
        """Run a forward pass; the last stage also runs the backward pass. Return ExecutionFailed for a wrong shape."""
        if not fits_one(self.model.forms(job.first, job.sequences).entering, job.layout, len(job.blob)):
            return jobs.ExecutionFailed(job.local_id, Reason.SHAPE)
        origin, number, layer = _read(job.blob)
        assert layer == job.first, f"activations for layer {layer} arrived at layer {job.first}"
        tokens = job.layout[1].elements
        execution = SurrogateGradient(origin, number, job.first, job.last, tokens)
        if job.last < self.model.cuts[-1].last:
            self.pending[job.local_id] = execution
            return self._forwarded(job, 0, execution)
        return self._backed(job, execution, (FLOOR + loss_of(self.weights)) * tokens)

    def backward(self, job: jobs.Backward) -> jobs.BackwardDone | jobs.ExecutionFailed:
        """Run the backward pass of a pending execution; return ExecutionFailed for an unknown id or a wrong shape."""
        execution = self.pending.get(job.local_id)
        if execution is None:
            return jobs.ExecutionFailed(job.local_id, Reason.FORGOTTEN)
        if not fits_one(self._forms(execution, execution.last).gradients, job.layout, len(job.blob)):
            return jobs.ExecutionFailed(job.local_id, Reason.SHAPE)
        came, ours = _read(job.blob), (execution.origin, execution.number, execution.last)
        assert came == ours, f"the gradient of {came} arrived at {execution}"
        del self.pending[job.local_id]
        return self._backed(job, execution, 0.0)

    def forget(self, executions: Sequence[int]) -> jobs.Forgotten:
        """Drop the pending executions with these ids; ignore unknown ids."""
        for execution in executions:
            self.pending.pop(execution, None)
        return jobs.Forgotten()

    def compare(self, job: jobs.Compare) -> jobs.Compared:
        """Compare a job's last gradient with its other gradients.

        Two gradients have the likeness (1.0, 1.0) if they belong to the same micro-batch and layer, else UNLIKE.
        """
        *others, newest = (_read(blob) for _, blob in job.gradients)
        same, other_batch = jobs.Likeness(1.0, 1.0), UNLIKE
        return jobs.Compared(job.local_id, tuple(same if newest == other else other_batch for other in others))

    def undo(self, job: jobs.Undo) -> jobs.Undone:
        """Subtract the gradient of an execution, at the present weights, from the open sum."""
        at = self._executions.index(job.local_id)
        del self._executions[at]
        self._add(self._filled.pop(at), -1)
        return jobs.Undone(job.local_id, True)

    def seal(self, slot: int) -> jobs.Sealed:
        """Move the open sum into the numbered slot, and begin an empty open sum."""
        self._sealed[slot] = tuple(self._filled), self._sums
        self._sums, self._filled = np.zeros_like(self._sums), []
        executions, self._executions = tuple(self._executions), []
        return jobs.Sealed(executions, slot)

    def drop(self, slot: int) -> jobs.Forgotten:
        """Drop the sum in the numbered slot, if there is one."""
        self._sealed.pop(slot, None)
        return jobs.Forgotten()

    def apply(self, lr_step: int, slot: int) -> jobs.AppliedTokens:
        """Take one optimiser step with the sum in a slot, on each fragment that has gradients in it; empty the slot.

        If the slot is empty already, nothing changes.

        Returns:
            The layers [first, last) of each fragment that took a step, and the tokens of its gradients.
        """
        sealed, sums = self._sealed.pop(slot, ((), self._sums))
        taken: list[tuple[int, int, int]] = []
        for index, (live, fragment) in enumerate(zip(self.lives, self.fragments, strict=True)):
            through = [one for one in sealed if one.first <= fragment.first and fragment.last <= one.last]
            tokens = sum(one.tokens for one in through)
            if not tokens:
                continue
            noise = self.chance.normal(0.0, STEP_NOISE / len(through) ** 0.5, NUMBERS)
            self.weights[index] -= DESCENT_RATE * sums[index] / tokens - noise
            live.count(tokens)
            taken.append((fragment.first, fragment.last, tokens))
        self.applied = sealed
        return tuple(taken)

    def _forms(self, execution: SurrogateGradient, layer: int) -> ActivationForms:
        return self.model.forms(layer, execution.tokens // self.model.config.model.context)

    def _forwarded(self, job: jobs.Draw | jobs.Forward, number: int, execution: SurrogateGradient) -> jobs.ForwardDone:
        layout = self._forms(execution, execution.last).entering_over(job.thin)
        header = msgpack.packb((execution.origin, execution.number, execution.last))
        blob = SyntheticBlob([(layout[0].size, header), *((one.size, b"") for one in layout[1:])])
        sequences = execution.tokens // self.model.config.model.context
        return jobs.ForwardDone(job.local_id, number, sequences, execution.tokens, layout, blob)

    def _backed(
        self, job: jobs.Forward | jobs.Backward, execution: SurrogateGradient, loss: float
    ) -> jobs.BackwardDone:
        """Add the gradient of an execution to the open sum; return the gradient of its input."""
        self._filled.append(execution)
        self._executions.append(job.local_id)
        self._add(execution, 1)
        if execution.first == 0:
            return jobs.BackwardDone(job.local_id, execution.tokens, loss, (), b"")
        layout = self._forms(execution, execution.first).gradient_over(job.thin)
        blob = SyntheticBlob(
            [(layout_bytes(layout), msgpack.packb((execution.origin, execution.number, execution.first)))]
        )
        return jobs.BackwardDone(job.local_id, execution.tokens, loss, layout, blob)

    def _add(self, execution: SurrogateGradient, sign: int) -> None:
        """Add the gradient of an execution at the present weights to the open sum, or subtract it if `sign` is -1."""
        for index, fragment in enumerate(self.fragments):
            if execution.first <= fragment.first and fragment.last <= execution.last:
                self._sums[index] += sign * execution.tokens * self.weights[index]


def _read(blob: bytes) -> tuple[str, int, int]:
    """Return the origin peer, number and layer in a blob of the right length (a damaged blob has another length)."""
    assert isinstance(blob, SyntheticBlob)
    origin, number, layer = msgpack.unpackb(blob.segments[0][1])
    return origin, number, layer

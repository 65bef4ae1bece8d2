"""The jobs of routes, whoever carries them out: one dispatch for train/stage_runner.py's tensors and a simulator's sketch.

A peer's layers are `Carrier`: they hold what backward passes need, and the sums of gradients. Whose steps and
micro-batches are counted is `Worker`: train/compute.py's Compute or sim/surrogate.py's Sketch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from decentral.core import jobs
from decentral.core.jobs import FORWARD_PART, Fragment, forward_part, share


class PendingPass(Protocol):
    """Layers [first, last) that a micro-batch has gone through here, and has to go back through."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...


class StageLayers(Protocol):
    @property
    def held(self) -> Mapping[int, PendingPass]:
        """By token."""
        ...

    def forward(self, job: jobs.Forward) -> jobs.Outcome: ...

    def backward(self, job: jobs.Backward) -> jobs.Outcome: ...

    def forget(self, tokens: Sequence[int]) -> jobs.Forgotten: ...

    def seal(self, slot: int) -> jobs.Sealed: ...

    def drop(self, slot: int) -> jobs.Forgotten: ...

    def apply(self, lr_step: int, slot: int) -> None: ...


class StageOwner(Protocol):
    lr_step: int

    def draw(self, job: jobs.Draw) -> jobs.Outcome: ...

    def counted(self, job: jobs.Apply) -> jobs.Stepped:
        """A sealed sum has been applied: one more step."""
        ...


def do(job: jobs.StageJob, layers: StageLayers, worker: StageOwner) -> jobs.Outcome:
    match job:
        case jobs.Draw():
            return worker.draw(job)
        case jobs.Forward():
            return layers.forward(job)
        case jobs.Backward():
            return layers.backward(job)
        case jobs.Forget(tokens):
            return layers.forget(tokens)
        case jobs.Seal(ready, then, slot):
            sealed = layers.seal(slot)
            if then is None or set(sealed.tokens) != set(ready):
                return sealed
            return replace(_apply(then, layers, worker), executions=sealed.tokens)
        case jobs.Drop(slot):
            return layers.drop(slot)
        case jobs.Apply():
            return _apply(job, layers, worker)


def _apply(job: jobs.Apply, layers: StageLayers, worker: StageOwner) -> jobs.Stepped:
    layers.apply(worker.lr_step, job.slot)
    return worker.counted(job)


def work(job: jobs.Job, cuts: Sequence[Fragment], held: Mapping[int, PendingPass]) -> float:
    """How much of one micro-batch's computing through the whole model this job is. Ask before it is done."""
    match job:
        case jobs.Draw(_, last):
            return share(cuts, 0, last) * forward_part(last, cuts[-1].last)
        case jobs.Forward(_, first, last):
            return share(cuts, first, last) * forward_part(last, cuts[-1].last)
        case jobs.Backward(token) if token in held:
            return (1 - FORWARD_PART) * share(cuts, held[token].first, held[token].last)
    return 0.0

"""The stage of this peer: which layers it holds, and what a micro-batch's execution takes of its memory and time."""

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.pipeline.execution import BACKWARD, FORWARD, StageExecution
from decentral.comm.pipeline.next_peer import NEWEST_WEIGHT, RoutingWeights
from decentral.comm.wire.messages import ForwardRequest
from decentral.core.fragments import (
    FORWARD_PART,
    ActivationForms,
    Fragment,
    fits_one,
    forward_part,
    layout_bytes,
    share,
)
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class StageConfig:
    """This peer holds layers [first, last). `forms(layer, sequences)` describes what may enter that layer."""

    run: RunId
    peer: PeerId
    first: int
    last: int
    cuts: tuple[Fragment, ...]  # of the whole model; an execution ends where one of them does
    max_sequences: int  # in a micro-batch
    capacity: int  # micro-batches through the whole span whose activations fit into the memory
    micro_batches_per_step: int  # that one optimizer step waits for, at least
    forms: Callable[[int, int], ActivationForms]
    activations: tuple[int, ...] = ()  # bytes that a micro-batch keeps in each of the cuts; none: all take the same
    slots: int = 1  # for sealed sums of gradients that are not committed yet
    overlap: bool = False  # begin more before the last ones' step is taken: busier devices, stale gradients
    originates: bool = True  # its own data are trained on; else it executes others' micro-batches only
    synchronous: bool = False  # steps are taken in rounds, by all peers at once: comm/rounds/round.py
    _entries: tuple[int, ...] = field(init=False, repr=False)  # layers of ours with which others' executions may begin
    _memory: dict[tuple[int, int], float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        entries = tuple(cut.first for cut in self.cuts if max(1, self.first) <= cut.first < self.last)
        object.__setattr__(self, "_entries", entries)  # frozen; every question is checked against it

    @property
    def layers(self) -> int:
        return self.cuts[-1].last

    @property
    def exact(self) -> bool:
        """Whether gradients are of the weights that they change, since steps wait for all that is under way here. Then
        who is silent is looked for sooner; elsewhere a false alarm costs more than the wait."""
        return not self.overlap and not self.synchronous

    def begins(self, layer: int) -> bool:
        """Whether others' executions may begin here with this layer."""
        return layer in self._entries

    def later_entries(self, layer: int) -> int:
        """The number of layers behind this one with which executions may begin here."""
        return len(self._entries) - bisect.bisect_right(self._entries, layer)

    @property
    def max_own(self) -> int:
        """The most micro-batches of our own at a time; many of them may take less than one through the whole span."""
        return MOST_UNDER_WAY if self.activations else self.capacity

    def memory_share(self, first: int, last: int) -> float:
        """The memory of an execution through layers [first, last); one through the whole span takes 1."""
        found = self._memory.get((first, last))
        if found is None:
            span = self._bytes(self.first, self.last)
            found = self._memory[first, last] = self._bytes(max(first, self.first), last) / span if span else 1.0
        return found

    def _bytes(self, first: int, last: int) -> int:
        return sum(size for cut, size in zip(self.cuts, self.activations, strict=False) if first <= cut.first < last)

    def size(self, request: ForwardRequest) -> int:
        """How many bytes may come with this request; 0, if it is not for us."""
        if not self.begins(request.first) or request.sequences > self.max_sequences:
            return 0
        return max(map(layout_bytes, self.forms(request.first, request.sequences).entering))

    def fits(self, request: ForwardRequest, blob_bytes: int) -> bool:
        """Whether a request that is for us comes in one of the forms, and with as many bytes."""
        return fits_one(self.forms(request.first, request.sequences).entering, request.layout, blob_bytes)


class RouteView(Protocol):
    """What routes need to know of the swarm; peers/runtime/route_planner.py has it from the roster."""

    weights: RoutingWeights
    usual_speed: float  # tokens/s of the whole model, mean of what the other peers' records say; 0: none says anything

    def successors(self, layer: int) -> Sequence[PeerId]:
        """The other peers that hold this layer, and train."""

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        """The layers [first, last) that a successor holds, and its tokens/s of the whole model."""

    def is_thin(self) -> bool:
        """Return whether this peer's uplink is slow, so that activations are sent in the run's smaller encoding."""


@dataclass(slots=True)
class StageLoad:
    """What the executions take of this peer's time.

    Time is counted in parts of a micro-batch through the whole model, and becomes seconds by the speed that was
    measured at work.
    """

    stage: StageConfig  # the present one; the router's other parts read it here
    view: RouteView
    speed: float = 0.0  # tokens/s of the whole model, if this peer computed without a pause; 0: not measured yet
    tokens: int = 0  # in the latest micro-batch
    _worked: float = 0.0  # tokens times their share of the model, since the last step
    _shares: dict[tuple[int, int], float] = field(default_factory=dict)  # parts of the model, by layers [first, last)

    def hold(self, stage: StageConfig) -> None:
        """From now on this peer holds the layers of `stage`."""
        self.stage = stage

    def backward_done(self, execution: StageExecution, tokens: int) -> None:
        self.tokens = tokens
        self._worked += tokens * self.share(execution.id.first, execution.last)

    def stepped(self, seconds: Seconds) -> None:
        """Measures the speed by what was computed in so many seconds of computing.

        Times are averaged, not rates, so that a device that becomes much slower shows it after a few steps.
        """
        if self._worked > 0 and seconds > 0:
            newest_s = seconds / self._worked
            self.speed = 1 / ((1 - NEWEST_WEIGHT) / self.speed + NEWEST_WEIGHT * newest_s if self.speed else newest_s)
        self._worked = 0.0

    def share(self, first: int, last: int) -> float:
        """The part of the model's parameters in layers [first, last)."""
        found = self._shares.get((first, last))
        if found is None:
            found = self._shares[first, last] = share(self.stage.cuts, first, last)
        return found

    def seconds(self, part: float) -> Seconds:
        """Seconds of computing here for this part of a micro-batch through the whole model; 0: unknown."""
        speed = self.speed or self.view.usual_speed
        return part * self.tokens / speed if speed else 0.0

    def execution_s(self, first: int, last: int) -> Seconds:
        """Seconds of computing until an execution through these layers is passed on."""
        return self.seconds(self.share(first, last) * forward_part(last, self.stage.layers))

    def wait_s(self, executions: Iterable[StageExecution]) -> Seconds:
        """Seconds of computing that these executions still wait for."""
        parts = 0.0
        for execution in executions:
            if execution.state is FORWARD:
                part = self.share(execution.id.first, execution.last)
                parts += forward_part(execution.last, self.stage.layers) * part
            elif execution.state is BACKWARD:
                parts += (1 - FORWARD_PART) * self.share(execution.id.first, execution.last)
        return self.seconds(parts)

    def rest_s(self, tokens: int, layer: int) -> Seconds:
        """Seconds that the usual device takes from this layer to the model's end if nothing waits; 0: unknown."""
        rest = self.share(layer, self.stage.layers)
        return tokens * rest / self.view.usual_speed if self.view.usual_speed > 0 else 0.0

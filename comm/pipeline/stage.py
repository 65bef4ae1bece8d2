"""Describe a peer's stage: the layers that it computes, and the memory and time that each execution takes there.

Start at `StageConfig`, which has the stage's fixed values. `StageLoad` estimates computing times from the measured
speed. `RouteView` is the interface through which the router reads other peers' layers and speeds.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.pipeline.execution import BACKWARD, FORWARD, StageExecution
from decentral.comm.pipeline.next_peer import NEWEST_WEIGHT, RoutingWeights
from decentral.comm.wire.messages import ForwardRequest
from decentral.core.fragments import (
    ActivationForms,
    Fragment,
    fits_one,
    layout_bytes,
)
from decentral.core.ids import PeerId, RunId
from decentral.core.layer_work import UNMEASURED, KindCosts, forward_share, share
from decentral.core.units import Seconds

# A step measures the speed only if its executions did more than this fraction of the work of executions through all our
# layers.
LEAST_PART_MEASURED = 0.2


@dataclass(frozen=True, slots=True)
class StageConfig:
    """The fixed values of a peer's stage: its layers [first, last), its limits, and how it takes steps."""

    run: RunId
    peer: PeerId
    first: int
    last: int
    cuts: tuple[Fragment, ...]  # the model's fragments; every stage execution ends where a fragment ends
    max_sequences: int  # most sequences in another peer's micro-batch; 0: this peer computes for no other peer
    capacity: int  # this many micro-batches fit into memory if each passes through all layers of this peer
    micro_batches_per_step: int  # a step needs the gradients of at least this many micro-batches
    forms: Callable[[int, int], ActivationForms]  # (layer, sequences) -> layouts in which that layer's input may arrive
    activations: tuple[int, ...] = ()  # bytes that a micro-batch takes in each fragment; (): not known
    slots: int = 1  # at most this many complete sums of gradients may wait for the decision to commit them
    overlap: bool = False  # whether optimizer steps may run between a micro-batch's two passes: faster, stale gradients
    originates: bool = True  # False: the peer executes only micro-batches that other peers begin
    synchronous: bool = False
    costs: KindCosts = UNMEASURED  # costs of the embedding, of a block and of the head on this device
    _entries: tuple[int, ...] = field(init=False, repr=False)  # layers at which other peers' executions may begin here
    _memory: dict[tuple[int, int], float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute once the layers at which executions may begin, since every request is checked against them."""
        entries = tuple(cut.first for cut in self.cuts if max(1, self.first) <= cut.first < self.last)
        object.__setattr__(self, "_entries", entries if self.max_sequences else ())

    @property
    def layers(self) -> int:
        """Return the number of layers of the whole model."""
        return self.cuts[-1].last

    @property
    def exact(self) -> bool:
        """Return whether steps wait for micro-batches in flight, so that no step comes between their two passes.

        This is False with `overlap`, and in synchronous training, where no step is due during a round. If True, this
        peer must notice soon when another peer is silent, because steps wait for it. If False, suspecting a peer that
        is only slow costs more than it saves.
        """
        return not self.overlap and not self.synchronous

    @property
    def undoes(self) -> bool:
        """Return whether gradients of an aborted execution can be taken out of a sum, by computing them again.

        If true, no step changes the weights while a sum grows. A peer with the whole model takes steps of its own.
        """
        return self.exact and (self.first, self.last) != (0, self.layers)

    def begins(self, layer: int) -> bool:
        """Return whether another peer's execution may begin at this peer with this layer."""
        return layer in self._entries

    def later_entries(self, layer: int) -> int:
        """Return the number of layers after this one with which another peer's execution may begin at this peer."""
        return len(self._entries) - bisect.bisect_right(self._entries, layer)

    def memory_share(self, first: int, last: int) -> float:
        """Return the memory of an execution through layers [first, last), as a share of that through all our layers."""
        found = self._memory.get((first, last))
        if found is None:
            span = self._bytes(self.first, self.last)
            found = self._memory[first, last] = self._bytes(max(first, self.first), last) / span if span else 1.0
        return found

    def _bytes(self, first: int, last: int) -> int:
        return sum(size for cut, size in zip(self.cuts, self.activations, strict=False) if first <= cut.first < last)

    def size(self, request: ForwardRequest) -> int:
        """Return the largest blob that may come with this request, in bytes; 0 if this peer cannot execute it."""
        if not self.begins(request.first) or request.sequences > self.max_sequences:
            return 0
        return max(map(layout_bytes, self.forms(request.first, request.sequences).entering))

    def fits(self, request: ForwardRequest, blob_bytes: int) -> bool:
        """Return whether a request has a layout that is valid at its first layer, and a blob of that layout's size."""
        return fits_one(self.forms(request.first, request.sequences).entering, request.layout, blob_bytes)


class RouteView(Protocol):
    """Interface through which the router reads other peers' layers and speeds; `RoutePlanner` implements it."""

    weights: RoutingWeights
    usual_speed: float  # mean of the speeds that other peers publish, tokens/s through the whole model; 0: unknown

    def successors(self, layer: int) -> Sequence[PeerId]:
        """Return the other peers that hold this layer and train."""

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        """Return the layers [first, last) that a successor holds, and its tokens/s through the whole model."""

    def there_and_back_s(self, peer: PeerId | None, sent: int, received: int) -> Seconds:
        """Return the seconds in which `sent` bytes reach a peer and `received` bytes come back, by measured links.

        `peer` is None for a typical peer.
        """

    def is_thin(self) -> bool:
        """Return whether this peer's uplink is slow, so that activations are sent in the run's smaller encoding."""


@dataclass(slots=True)
class StageLoad:
    """Estimates how long this peer computes for executions, from the speed that it measures while it trains.

    The unit of work is the computation of one micro-batch through the whole model.
    """

    stage: StageConfig
    view: RouteView
    speed: float = 0.0  # measured tokens/s through the whole model, pauses not counted; 0: not measured yet
    tokens: int = 0  # tokens in the micro-batch that this peer computed last; others are expected to be as large
    _worked: float = 0.0  # work since the last optimizer step: sum of tokens times the layers' share of a token's time
    _full: float = 0.0  # what `_worked` would be if each execution had gone through all our layers
    _shares: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def set_stage(self, stage: StageConfig) -> None:
        """Replace the present stage, because the peer's layers or limits have changed."""
        self.stage = stage

    def forward_done(self, execution: StageExecution, tokens: int) -> None:
        """Add the forward pass of an execution of `tokens` tokens to the work since the last step."""
        self._add(execution, tokens, self._shares_of(execution.id.first, execution.last)[1])

    def backward_done(self, execution: StageExecution, tokens: int, forward_counted: bool) -> None:
        """Add the backward pass of an execution to the work since the last step; both passes if not `forward_counted`.

        Steps need not wait for executions between their passes (`routes.overlap`), so each pass counts when it is done.
        """
        whole, forward = self._shares_of(execution.id.first, execution.last)
        self._add(execution, tokens, whole - forward if forward_counted else whole)

    def _add(self, execution: StageExecution, tokens: int, part: float) -> None:
        self.tokens = tokens
        self._worked += tokens * part
        whole = self.share(execution.id.first, execution.last)
        self._full += tokens * self.share(self.stage.first, self.stage.last) * part / max(whole, 1e-300)

    def measure_speed(self, seconds: Seconds) -> None:
        """Update the speed at a step, given that this peer has computed for `seconds` seconds since the last step.

        We average seconds per token, not tokens/s, because this average soon shows that a device has become slower.
        Executions through few layers do not measure the device, since each execution has a fixed cost: a peer that
        computed only the embedding would seem very slow, and would therefore get nothing else to compute.
        """
        if self._worked > LEAST_PART_MEASURED * self._full and seconds > 0:
            newest_s = seconds / self._worked
            self.speed = 1 / ((1 - NEWEST_WEIGHT) / self.speed + NEWEST_WEIGHT * newest_s if self.speed else newest_s)
        self._worked = self._full = 0.0

    def share(self, first: int, last: int) -> float:
        """Return the share of a token's time through the model that layers [first, last) take on this device."""
        return self._shares_of(first, last)[0]

    def _shares_of(self, first: int, last: int) -> tuple[float, float]:
        """Return the shares of a token's time that layers [first, last) and their forward job alone take."""
        found = self._shares.get((first, last))
        if found is None:
            cuts, costs = self.stage.cuts, self.stage.costs
            found = share(cuts, first, last, costs), forward_share(cuts, first, last, costs)
            self._shares[first, last] = found
        return found

    def seconds(self, part: float) -> Seconds:
        """Return the seconds in which this peer computes the fraction `part` of one micro-batch; 0 if unknown."""
        speed = self.speed or self.view.usual_speed
        return part * self.tokens / speed if speed else 0.0

    def execution_s(self, first: int, last: int) -> Seconds:
        """Return the seconds that this peer computes until an execution through [first, last) can be sent on."""
        return self.seconds(self._shares_of(first, last)[1])

    def wait_s(self, executions: Iterable[StageExecution]) -> Seconds:
        """Return the seconds that this peer computes until the next pass of each of these executions is done."""
        parts = 0.0
        for execution in executions:
            whole, forward = self._shares_of(execution.id.first, execution.last)
            if execution.state is FORWARD:
                parts += forward
            elif execution.state is BACKWARD:
                parts += whole - forward
        return self.seconds(parts)

    def hops_left(self, layer: int) -> int:
        """Return how many peers compute the layers from `layer` on, if each holds as large a part as this peer."""
        rest = self.share(layer, self.stage.layers)
        return math.ceil(rest / self.share(self.stage.first, self.stage.last)) if rest > 0 else 0

    def remaining_s(self, tokens: int, layer: int) -> Seconds:
        """Return the seconds that peers of usual speed need to compute from a layer to the model's end, without queues.

        Args:
            tokens: Tokens of the micro-batch.
            layer: The first layer that is still to be computed.

        Returns:
            Seconds for both passes; 0 if no speed is known.
        """
        rest = self.share(layer, self.stage.layers)
        return tokens * rest / self.view.usual_speed if self.view.usual_speed > 0 else 0.0

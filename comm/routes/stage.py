"""A peer's place in the routes of micro-batches, and an execution: one micro-batch's way through one peer."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from decentral.comm.routes.offers import Offers
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ExecutionId, ForwardRequest, Hop
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import MOST_UNDER_WAY, Fragment, Layout
from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class StageConfig:
    """This peer's place in the model. `layout(layer, sequences)`: of what enters that layer."""

    run: RunId
    peer: PeerId
    first: int
    last: int
    cuts: tuple[Fragment, ...]  # of the whole model; an execution ends where one of them does
    most_sequences: int
    capacity: int  # micro-batches through the whole span that the memory takes
    at_least: int  # micro-batches in an optimizer's step
    layout: Callable[[int, int], Layout]
    activations: tuple[int, ...] = ()  # bytes that a micro-batch keeps in each of the cuts; none: all take the same
    slots: int = 1  # for sums of gradients that wait to be settled
    overlap: bool = False  # begin more before the last ones' step is taken: busier devices, stale gradients
    synchronous: bool = False  # steps are taken in rounds, by all peers at once: comm/rounds/round.py
    _entries: tuple[int, ...] = field(init=False, repr=False)  # layers of ours with which others' executions may begin

    def __post_init__(self) -> None:
        entries = tuple(cut.first for cut in self.cuts if max(1, self.first) <= cut.first < self.last)
        object.__setattr__(self, "_entries", entries)  # frozen; every question is checked against it

    @property
    def layers(self) -> int:
        return self.cuts[-1].last

    def begins(self, layer: int) -> bool:
        """Whether others' executions may begin here with this layer."""
        return layer in self._entries

    def behind(self, layer: int) -> int:
        """At how many layers behind this one they may."""
        return len(self._entries) - bisect.bisect_right(self._entries, layer)

    @property
    def most(self) -> int:
        """Of our own micro-batches at a time: many of them may take less than one through the whole span."""
        return MOST_UNDER_WAY if self.activations else self.capacity

    def room(self, first: int, last: int) -> float:
        """That an execution through [first, last) takes; one through the whole span takes 1."""
        span = self._bytes(self.first, self.last)
        return self._bytes(max(first, self.first), last) / span if span else 1.0

    def _bytes(self, first: int, last: int) -> int:
        return sum(size for cut, size in zip(self.cuts, self.activations, strict=False) if first <= cut.first < last)

    def size(self, carry: ForwardRequest) -> int:
        """Bytes that may come with it; none, if it is not for us."""
        if not self.begins(carry.first) or carry.sequences > self.most_sequences:
            return 0
        return sum(section.size for section in self.layout(carry.first, carry.sequences))


class ExecutionState(Enum):
    FORWARD = auto()
    AWAY = auto()
    BACKWARD = auto()
    HELD = auto()
    GONE = auto()  # nobody waits for it, but the compute thread is at it


AWAY, HELD, GONE = (
    ExecutionState.AWAY,
    ExecutionState.HELD,
    ExecutionState.GONE,
)  # looking a member up costs as much as all of StageExecution.wake_at


@dataclass(slots=True)
class StageExecution:
    """A micro-batch's way through this peer."""

    token: int
    id: ExecutionId
    last: int
    room: float  # that its activations take: Terms.room
    own: bool
    began: Seconds
    answer_by: Seconds  # then the asker goes elsewhere
    until: Seconds  # then the origin peer gives up
    asker: PeerId
    drawn: Seconds  # when its origin peer began it, by the origin peer's clock
    request: int | None = None  # the question that waits for our answer
    state: ExecutionState = ExecutionState.FORWARD
    sequences: int = 0
    tokens: int = 0
    loss: float = 0.0
    layout: Layout = ()  # of the payload
    payload: bytes = b""  # what we sent on, kept until its gradient is here
    to: PeerId | None = None  # whose answer we wait for
    attempts: int = 0
    tried: list[PeerId] = field(default_factory=list)  # who took it, and failed
    busy: list[PeerId] = field(default_factory=list)  # who had no room for it, since the last pause
    refusals: int = 0
    offers: Offers | None = None
    retry_at: Seconds | None = None
    look_at: Seconds | None = None  # when to ask the next peer whether it is still at it
    late: bool = False
    hops: tuple[Hop, ...] = ()  # after ours
    answer: Envelope | None = None
    round: int = 0

    @property
    def order(self) -> tuple[Seconds, str, int]:
        """Of its micro-batch among all, the same at every peer; the older one is less."""
        return self.drawn, self.id.origin, self.id.number

    def wake_at(self) -> Seconds:
        """When something has to be done about it, if nothing happens before."""
        if self.state is GONE:
            return math.inf
        at = self.deadline()
        if self.state is AWAY:
            if self.retry_at is not None and self.retry_at < at:
                at = self.retry_at
            if self.look_at is not None and self.look_at < at:
                at = self.look_at
        return at

    def deadline(self) -> Seconds:
        origins = self.own or self.state is HELD or self.until < self.answer_by
        return self.until if origins else self.answer_by


__all__ = ["StageExecution", "ExecutionState", "StageConfig"]

"""The stage of this peer: which layers it holds, and what a micro-batch's execution here takes."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.wire.messages import ForwardRequest
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import MOST_UNDER_WAY, Fragment, Layout


@dataclass(frozen=True, slots=True)
class StageConfig:
    """This peer holds layers [first, last). `layout(layer, sequences)` describes what enters that layer."""

    run: RunId
    peer: PeerId
    first: int
    last: int
    cuts: tuple[Fragment, ...]  # of the whole model; an execution ends where one of them does
    max_sequences: int  # in a micro-batch
    capacity: int  # micro-batches through the whole span whose activations fit into the memory
    micro_batches_per_step: int  # that one optimizer step waits for, at least
    layout: Callable[[int, int], Layout]
    activations: tuple[int, ...] = ()  # bytes that a micro-batch keeps in each of the cuts; none: all take the same
    slots: int = 1  # for sealed sums of gradients that are not committed yet
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

    def later_entries(self, layer: int) -> int:
        """The number of layers behind this one with which executions may begin here."""
        return len(self._entries) - bisect.bisect_right(self._entries, layer)

    @property
    def max_own(self) -> int:
        """The most micro-batches of our own at a time; many of them may take less than one through the whole span."""
        return MOST_UNDER_WAY if self.activations else self.capacity

    def memory_share(self, first: int, last: int) -> float:
        """The memory of an execution through layers [first, last); one through the whole span takes 1."""
        span = self._bytes(self.first, self.last)
        return self._bytes(max(first, self.first), last) / span if span else 1.0

    def _bytes(self, first: int, last: int) -> int:
        return sum(size for cut, size in zip(self.cuts, self.activations, strict=False) if first <= cut.first < last)

    def size(self, request: ForwardRequest) -> int:
        """How many bytes must come with this request; 0, if it is not for us."""
        if not self.begins(request.first) or request.sequences > self.max_sequences:
            return 0
        return sum(section.size for section in self.layout(request.first, request.sequences))


__all__ = ["StageConfig"]

"""In which order pieces of messages leave a peer, and when: decisions alone, without sockets or waiting.

A home's uplink is narrow, and the router before it has a long queue. What TCP sends beyond the link's rate waits there:
round trips of all connections become several times as long, what is beyond the queue is lost, and a small question
waits behind a large answer. So where our uplink is known to be thin, pieces of messages leave at its rate, and wait
here instead, where their order can be chosen: activations before snapshots before downloads (Peng et al.,
"ByteScheduler", SOSP 2019). Each kind has a share, by start-time fair queueing (Goyal, Vin & Cheng, 1997), so that none
starves. Within a kind the message comes first that would be through first if it had the uplink for itself: with all of
them at once a small one would be through as late as a large one.

comm/net/uplink.py drives it on an event loop, decentral/sim/network/virtual_uplink.py in virtual time.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from decentral.comm.wire import messages
from decentral.comm.wire.codec import Envelope
from decentral.core.units import KiB, Seconds

TURN_BYTES = 16 * KiB
UNPACED_BYTES = 4 * KiB  # messages with a smaller blob wait for nothing
BURST_S = 0.02  # what a late timer may catch up
PROBED_EVERY_S = 10.0  # of the answers to others' probes one in so long leaves without a pace
PROBE_HOLD_S = 4.0  # everything else waits for a probe at most so long

Item = TypeVar("Item")


class Kind(IntEnum):
    """What a message carries. The value is its share of an uplink, beside the others', while all have bytes to send."""

    ACTIVATIONS = 16
    SNAPSHOTS = 4
    DOWNLOAD = 1


def kind_of(message: messages.Message) -> Kind:
    """Return the kind of traffic that a message and its blob are, which decides what leaves first."""
    match message:
        case messages.ForwardRequest() | messages.BackwardResponse():
            return Kind.ACTIVATIONS
        case messages.StateChunk() | messages.Probed():
            return Kind.DOWNLOAD
    return Kind.SNAPSHOTS


class Turn(NamedTuple):
    """A message's place in its kind's order: the first is the one due first, or that came first."""

    due: Seconds  # when it would be through, alone on the uplink
    number: int


@dataclass(slots=True)
class Waiting(Generic[Item]):
    """The pieces of one kind that wait, as a heap, and how far the kind has come in the fair order."""

    kind: Kind
    pieces: list[tuple[Turn, int, int, Item]] = field(default_factory=list)  # turn, the piece's number, bytes
    served: float = 0.0  # bytes over the share

    def catch_up(self, virtual: float) -> None:
        """Come as far as the other kinds are: a kind that was idle has saved nothing up."""
        self.served = max(self.served, virtual)

    def serve(self, size: int) -> float:
        """Count a piece that leaves. Return how far the kind had come before."""
        before, self.served = self.served, self.served + size / self.kind
        return before


@dataclass(slots=True)
class UplinkQueue(ABC, Generic[Item]):
    """Gives pieces their turn. While the rate is not known there is no pace, and pieces leave as they come."""

    rate: Callable[[], float | None] = lambda: None  # bytes/s
    free_at: Seconds = 0.0  # when what has left is through
    held_until: Seconds = 0.0  # a probe has the uplink for itself
    _probed_at: Seconds = -PROBED_EVERY_S  # when the answer to a probe has last left without a pace
    _waiting: dict[Kind, Waiting[Item]] = field(default_factory=lambda: {kind: Waiting(kind) for kind in Kind})
    _busy: list[Waiting[Item]] = field(default_factory=list)  # those of `_waiting` that have pieces
    _virtual: float = 0.0  # `served` of the kind whose piece left last
    _numbers: "count[int]" = field(default_factory=count)

    @abstractmethod
    def is_given_up(self, item: Item) -> bool:
        """Whether the piece's message is not to be sent any more."""

    def is_free(self, now: Seconds) -> bool:
        """Whether nobody need wait."""
        return self.rate() is None and now >= self.held_until

    def paces(self, envelope: Envelope, now: Seconds) -> bool:
        """Whether this message, which leaves now, waits for its turn at all.

        Our probes have the uplink for themselves. What others ask us to send as a probe has it once in a while: they
        want to know what it carries, but would else take all of it as often as they ask.
        """
        match envelope.message:
            case _ if len(envelope.blob) < UNPACED_BYTES:
                return False
            case messages.Probe():
                return False
            case messages.Probed() if now >= self._probed_at + PROBED_EVERY_S:
                self._probed_at = now
                return False
        return True

    def turn(self, size: float, now: Seconds) -> Turn:
        """The place of a message of so many bytes that comes now."""
        return Turn(now + size / (self.rate() or math.inf), next(self._numbers))

    def add(self, kind: Kind, turn: Turn, size: int, item: Item) -> None:
        """A piece of a message of this kind and turn waits."""
        queue = self._waiting[kind]
        if not queue.pieces:  # it was idle, and has saved nothing up
            queue.catch_up(self._virtual)
            self._busy.append(queue)
        heapq.heappush(queue.pieces, (turn, next(self._numbers), size, item))

    def pace_by(self, rate: Callable[[], float | None]) -> None:
        """Let pieces leave at this rate from now on, in bytes/s; None: as they come."""
        self.rate = rate

    def hold(self, now: Seconds) -> None:
        """Let nothing leave until `let_go`, or for as long as a probe may take."""
        self.held_until = now + PROBE_HOLD_S

    def let_go(self) -> None:
        self.held_until = 0.0

    def next_at(self) -> Seconds | None:
        """When a piece may leave; None while none waits."""
        return max(self.free_at, self.held_until) if self._busy else None

    def next_alone(self) -> Item | None:
        """Return the message whose pieces leave next, one after another, as no other kind's pieces wait."""
        return self._busy[0].pieces[0][3] if len(self._busy) == 1 else None

    def take(self, now: Seconds) -> Item | None:
        """The piece that leaves, at or after `next_at`; None: its message was given up."""
        queue = min(self._busy, key=lambda one: (one.served, -one.kind)) if len(self._busy) > 1 else self._busy[0]
        _, _, size, item = heapq.heappop(queue.pieces)
        if not queue.pieces:
            self._busy.remove(queue)
        if self.is_given_up(item):
            return None
        rate, self._virtual = self.rate(), queue.serve(size)
        self.free_at = max(self.free_at, now - BURST_S) + (size / rate if rate else 0.0)
        return item

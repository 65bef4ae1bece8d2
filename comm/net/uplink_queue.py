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
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Generic, TypeVar

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


@dataclass(order=True, frozen=True, slots=True)
class Turn:
    """A message's place in its kind's order: the first is the one due first, or that came first."""

    due: Seconds  # when it would be through, alone on the uplink
    number: int


@dataclass(order=True, slots=True)
class Piece(Generic[Item]):
    turn: Turn
    size: int = field(compare=False)
    item: Item = field(compare=False)


@dataclass(slots=True)
class Waiting(Generic[Item]):
    """The pieces of one kind that wait, as a heap, and how far the kind has come in the fair order."""

    pieces: list[Piece[Item]] = field(default_factory=list)
    served: float = 0.0  # bytes over the share


@dataclass(slots=True)
class UplinkQueue(Generic[Item]):
    """Gives pieces their turn. While the rate is not known there is no pace, and pieces leave as they come."""

    given_up: Callable[[Item], bool]  # whether the piece's message is not to be sent any more
    rate: Callable[[], float | None] = lambda: None  # bytes/s
    free_at: Seconds = 0.0  # when what has left is through
    held_until: Seconds = 0.0  # a probe has the uplink for itself
    _probed_at: Seconds = -PROBED_EVERY_S  # when the answer to a probe has last left without a pace
    _waiting: dict[Kind, Waiting[Item]] = field(default_factory=lambda: {kind: Waiting() for kind in Kind})
    _virtual: float = 0.0  # `served` of the kind whose piece left last
    _numbers: "count[int]" = field(default_factory=count)

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
            queue.served = max(queue.served, self._virtual)
        heapq.heappush(queue.pieces, Piece(turn, size, item))

    def next_at(self) -> Seconds | None:
        """When a piece may leave; None while none waits."""
        waits = any(queue.pieces for queue in self._waiting.values())
        return max(self.free_at, self.held_until) if waits else None

    def take(self, now: Seconds) -> Item | None:
        """The piece that leaves, at or after `next_at`; None: its message was given up."""
        kind = min((one for one in Kind if self._waiting[one].pieces), key=lambda one: self._waiting[one].served)
        queue = self._waiting[kind]
        piece = heapq.heappop(queue.pieces)
        if self.given_up(piece.item):
            return None
        rate, self._virtual = self.rate(), queue.served
        queue.served += piece.size / kind
        self.free_at = max(self.free_at, now - BURST_S) + (piece.size / rate if rate else 0.0)
        return piece.item

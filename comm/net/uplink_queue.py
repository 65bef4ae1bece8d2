"""Decide in which order and when pieces of messages are sent over a slow uplink, without sockets or waiting.

A home's uplink is slow, and the home's router has a long queue. Bytes that TCP sends faster than the uplink wait in the
router: round trips of all connections become several times as long, packets that do not fit in the queue are lost, and
a small question waits behind a large answer. So if our uplink is known to be slow, messages wait in an UplinkQueue and
are sent in pieces at the uplink's rate. The queue chooses the order: activations before snapshots before downloads
(Peng et al., "ByteScheduler", SOSP 2019). Each kind of message has a share of the uplink, by start-time fair queueing
(Goyal, Vin & Cheng, 1997), so that no kind starves. Within a kind, the first message to be sent is the one that would
be complete first if each message had the uplink to itself. With round robin instead, a small message would be complete
as late as a large message.

Start with `UplinkQueue`. comm/net/uplink.py drives it on an event loop, decentral/sim/network/virtual_uplink.py in
virtual time.
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

TURN_BYTES = 16 * KiB  # a message is cut into pieces of at most this size
UNPACED_BYTES = 4 * KiB  # a message with a smaller blob is sent without queueing
BURST_S = 0.02  # after a late timer, at most the bytes of this many seconds are sent at once to catch up
PROBED_EVERY_S = 10.0  # once in this time, the answer to another peer's bandwidth probe skips the queue
PROBE_HOLD_S = 4.0  # while our own bandwidth probe has the uplink to itself, queued messages wait at most this long

Item = TypeVar("Item")


class Kind(IntEnum):
    """A kind of traffic. The value of each kind is its weight when kinds share the uplink."""

    ACTIVATIONS = 16
    SNAPSHOTS = 4
    DOWNLOAD = 1


def traffic_kind(message: messages.Message) -> Kind:
    """Return the kind of traffic to which a message and its blob belong."""
    match message:
        case messages.ForwardRequest() | messages.BackwardResponse():
            return Kind.ACTIVATIONS
        case messages.StateChunk() | messages.Probed():
            return Kind.DOWNLOAD
    return Kind.SNAPSHOTS


class Turn(NamedTuple):
    """The sort key of a message among messages of its kind: the message with the lowest key is sent first."""

    due: Seconds  # when the message would be complete if the uplink sent nothing else after it was queued
    number: int  # serial number of the message, which breaks ties


@dataclass(slots=True)
class Waiting(Generic[Item]):
    """The waiting pieces of one kind of traffic, and the kind's virtual time in start-time fair queueing."""

    kind: Kind
    pieces: list[tuple[Turn, int, int, Item]] = field(default_factory=list)  # heap of (turn, piece number, bytes, item)
    served: float = 0.0  # virtual time: bytes sent of this kind, divided by the kind's weight

    def catch_up(self, virtual: float) -> None:
        """Raise the virtual time to `virtual` at least, so that an idle kind does not save up bandwidth for later."""
        self.served = max(self.served, virtual)

    def serve(self, size: int) -> float:
        """Count a piece of `size` bytes as sent, and return the kind's virtual time before that piece."""
        before, self.served = self.served, self.served + size / self.kind
        return before


@dataclass(slots=True)
class UplinkQueue(ABC, Generic[Item]):
    """Decides which piece is sent next, and when. While no rate is known, pieces do not wait.

    `Item` is the driver's handle of a piece: a future, or an event in virtual time.
    """

    rate: Callable[[], float | None] = lambda: None  # returns bytes/s; None while unknown
    free_at: Seconds = 0.0  # when the uplink will have sent all pieces that it has taken
    held_until: Seconds = 0.0  # until this time, queued pieces wait for our bandwidth probe
    _probed_at: Seconds = -PROBED_EVERY_S  # when the answer to a probe last skipped the queue
    _waiting: dict[Kind, Waiting[Item]] = field(default_factory=lambda: {kind: Waiting(kind) for kind in Kind})
    _busy: list[Waiting[Item]] = field(default_factory=list)  # the kinds of traffic that have waiting pieces
    _virtual: float = 0.0  # virtual time at which the last sent piece began
    _numbers: "count[int]" = field(default_factory=count)

    @abstractmethod
    def is_given_up(self, item: Item) -> bool:
        """Return whether the driver no longer wants to send this piece's message."""

    def is_free(self, now: Seconds) -> bool:
        """Return whether messages are sent at once: no rate is known, and no probe has the uplink to itself."""
        return self.rate() is None and now >= self.held_until

    def paces(self, envelope: Envelope, now: Seconds) -> bool:
        """Return whether this message, which is about to be sent, has to be queued.

        Small messages and our own probes are not queued. Once in PROBED_EVERY_S an answer to another peer's probe is
        not queued, so that the answer measures the uplink; this method assumes that the caller then sends the answer.
        Further answers to probes are queued, so that other peers cannot fill our uplink with probes.
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
        """Return the sort key of a message of `size` bytes that is queued now."""
        return Turn(now + size / (self.rate() or math.inf), next(self._numbers))

    def add(self, kind: Kind, turn: Turn, size: int, item: Item) -> None:
        """Queue a piece of a message.

        Args:
            kind: Kind of the piece's message.
            turn: Sort key of the piece's message, from `self.turn`.
            size: Bytes of the piece.
            item: The driver's handle of the piece, which `take` returns when the piece is to be sent.
        """
        queue = self._waiting[kind]
        if not queue.pieces:
            queue.catch_up(self._virtual)
            self._busy.append(queue)
        heapq.heappush(queue.pieces, (turn, next(self._numbers), size, item))

    def pace_by(self, rate: Callable[[], float | None]) -> None:
        """Send pieces at `rate()` bytes/s from now on, or without waiting while `rate()` is None."""
        self.rate = rate

    def pause(self, now: Seconds) -> None:
        """Send no queued piece until `resume` is called, or for PROBE_HOLD_S at most, while a probe is running."""
        self.held_until = now + PROBE_HOLD_S

    def resume(self) -> None:
        """Send queued pieces again after `pause`."""
        self.held_until = 0.0

    def next_at(self) -> Seconds | None:
        """Return when the next piece may be sent; None if no piece waits."""
        return max(self.free_at, self.held_until) if self._busy else None

    def next_alone(self) -> Item | None:
        """Return the next piece's item if all waiting pieces are of one kind; None otherwise."""
        return self._busy[0].pieces[0][3] if len(self._busy) == 1 else None

    def take(self, now: Seconds) -> Item | None:
        """Remove the next piece, count its bytes as sent, and return its item for the driver to send.

        Return None if `is_given_up` says that the piece is no longer wanted. Call `take` at `next_at` or later, and
        only while a piece waits.
        """
        queue = min(self._busy, key=lambda one: (one.served, -one.kind)) if len(self._busy) > 1 else self._busy[0]
        _, _, size, item = heapq.heappop(queue.pieces)
        if not queue.pieces:
            self._busy.remove(queue)
        if self.is_given_up(item):
            return None
        rate, self._virtual = self.rate(), queue.serve(size)
        self.free_at = max(self.free_at, now - BURST_S) + (size / rate if rate else 0.0)
        return item

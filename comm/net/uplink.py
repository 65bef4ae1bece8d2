"""What leaves this peer next, and at which pace.

A home's uplink is narrow, and the router before it has a long queue. What TCP sends beyond the link's rate waits there:
round trips of all connections become several times as long, what is beyond the queue is lost, and a small question
waits behind a large answer. So where our uplink is known to be thin, pieces of messages leave at its rate, and wait
here instead, where their order can be chosen: activations before snapshots before downloads (Peng et al.,
"ByteScheduler", SOSP 2019). Each kind has a share, by start-time fair queueing (Goyal, Vin & Cheng, 1997), so that none
starves. Within a kind the message comes first that would be through first if it had the uplink for itself: with all of
them at once a small one would be through as late as a large one.
"""

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from decentral.comm.wire import messages
from decentral.comm.wire.blobs import Writer
from decentral.comm.wire.codec import Envelope
from decentral.core.units import KiB, Seconds

TURN_BYTES = 16 * KiB
UNPACED_BYTES = 4 * KiB  # messages with a smaller blob wait for nothing
BURST_S = 0.02  # what a late timer may catch up
PROBE_HOLD_S = 4.0  # everything else waits for a probe at most so long


class Kind(IntEnum):
    """What a message carries. The value is its share of an uplink, beside the others', while all have bytes to send."""

    ACTIVATIONS = 16
    SNAPSHOTS = 4
    DOWNLOAD = 1


def kind_of(message: object) -> Kind:
    match message:
        case messages.ForwardRequest() | messages.BackwardResponse():
            return Kind.ACTIVATIONS
        case messages.StateChunk():
            return Kind.DOWNLOAD
    return Kind.SNAPSHOTS


@dataclass(order=True, frozen=True, slots=True)
class Turn:
    """A message's place in its kind's order: the first is the one due first, or that came first."""

    due: Seconds  # when it would be through, alone on the uplink
    number: int


@dataclass(order=True, slots=True)
class Piece:
    turn: Turn
    size: int = field(compare=False)
    left: "asyncio.Future[None]" = field(compare=False)


@dataclass(slots=True)
class Waiting:
    """The pieces of one kind that wait, as a heap, and how far the kind has come in the fair order."""

    pieces: list[Piece] = field(default_factory=list)
    served: float = 0.0  # bytes over the share


@dataclass(slots=True)
class Uplink:
    """Gives pieces their turn. While the rate is not known there is no pace, and nobody waits."""

    rate: Callable[[], float | None] = lambda: None  # bytes/s
    _waiting: dict[Kind, Waiting] = field(default_factory=lambda: {kind: Waiting() for kind in Kind})
    _free_at: Seconds = 0.0  # when what has left is through, by the event loop's clock
    _held_until: Seconds = 0.0  # a probe has the uplink for itself
    _virtual: float = 0.0  # `served` of the kind whose piece left last
    _numbers: "count[int]" = field(default_factory=count)
    _timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> bool:
        """Whether nobody need wait."""
        return self.rate() is None and asyncio.get_running_loop().time() >= self._held_until

    def paced(self, writer: Writer, envelope: Envelope) -> Writer:
        """A writer for this message: what is written to it leaves in its turn."""
        if isinstance(envelope.message, messages.Probe | messages.Probed) or len(envelope.blob) < UNPACED_BYTES:
            return writer
        due = asyncio.get_running_loop().time() + len(envelope.blob) / (self.rate() or math.inf)
        return PacedWriter(self, writer, kind_of(envelope.message), Turn(due, next(self._numbers)))

    async def await_turn(self, kind: Kind, turn: Turn, size: int) -> None:
        """Returns when a piece of `size` bytes of the message with this turn may leave."""
        future, queue = asyncio.get_running_loop().create_future(), self._waiting[kind]
        if not queue.pieces:  # it was idle, and has saved nothing up
            queue.served = max(queue.served, self._virtual)
        heapq.heappush(queue.pieces, Piece(turn, size, future))
        if self._timer is None:
            self._release()
        await future

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Within it nothing else begins to leave, so that a probe measures the link, and not what is left of it."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._free_at - loop.time()))
        self._held_until = loop.time() + PROBE_HOLD_S
        try:
            yield
        finally:
            self._held_until = 0.0
            if self._timer is not None:
                self._timer.cancel()
            self._release()

    def _release(self) -> None:
        """Lets the pieces go whose time has come, and wakes up for the next."""
        loop, self._timer = asyncio.get_running_loop(), None
        while waiting := [kind for kind in Kind if self._waiting[kind].pieces]:
            now = loop.time()
            next_at = max(self._free_at, self._held_until)
            if next_at > now:
                self._timer = loop.call_at(next_at, self._release)
                return
            kind = min(waiting, key=lambda one: self._waiting[one].served)
            queue = self._waiting[kind]
            piece = heapq.heappop(queue.pieces)
            if piece.left.done():
                continue  # its message was given up
            rate, self._virtual = self.rate(), queue.served
            queue.served += piece.size / kind
            self._free_at = max(self._free_at, now - BURST_S) + (piece.size / rate if rate else 0.0)
            piece.left.set_result(None)


@dataclass(slots=True)
class PacedWriter:
    """A Writer whose bytes leave piece by piece, each in its turn."""

    uplink: Uplink
    writer: Writer
    kind: Kind
    turn: Turn
    _written: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self._written.append(data)

    async def drain(self) -> None:
        written, self._written = self._written, []
        if self.uplink.free:
            self.writer.write(b"".join(written) if len(written) > 1 else written[0])
            return await self.writer.drain()
        for view in [memoryview(data) for data in written]:
            for start in range(0, len(view), TURN_BYTES):
                piece = view[start : start + TURN_BYTES]
                await self.uplink.await_turn(self.kind, self.turn, len(piece))
                self.writer.write(piece)  # type: ignore[arg-type]  # asyncio's writers take any buffer
                await self.writer.drain()

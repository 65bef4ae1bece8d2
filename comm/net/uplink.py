"""Send messages over our uplink in the order and at the pace that `UplinkQueue` decides, on an event loop.

Start with `Uplink.paced`. It returns a writer that splits a message into pieces, and sends a piece when the queue
allows.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from decentral.comm.net.uplink_queue import TURN_BYTES, Kind, Turn, UplinkQueue, traffic_kind
from decentral.comm.wire.blobs import Writer
from decentral.comm.wire.codec import Envelope
from decentral.core.ids import PeerId


class FutureQueue(UplinkQueue["asyncio.Future[None]"]):
    """An UplinkQueue whose items are futures: a future completes when its piece may be sent."""

    def is_given_up(self, item: "asyncio.Future[None]") -> bool:
        """Return whether the task that would send this piece has been cancelled."""
        return item.done()


@dataclass(slots=True)
class Uplink:
    """Schedules what we send over our uplink: each piece of a message waits until `queue` says that it may be sent."""

    queue: FutureQueue = field(default_factory=FutureQueue)
    _sent: Counter[PeerId] = field(default_factory=Counter)  # bytes of large messages since the last `take_sent`
    _timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> bool:
        """Return whether messages are sent at once: no rate limit is set, and no probe measures the uplink."""
        return self.queue.is_free(asyncio.get_running_loop().time())

    def paced(self, writer: Writer, envelope: Envelope, peer: PeerId) -> Writer:
        """Return a writer that sends this message to `peer` as the queue allows; `writer` itself if it never waits."""
        now = asyncio.get_running_loop().time()
        if not self.queue.paces(envelope, now):
            return writer
        turn = self.queue.turn(len(envelope.blob), now)
        return PacedWriter(self, writer, peer, traffic_kind(envelope.message), turn)

    def sent(self, peer: PeerId, size: int) -> None:
        """Count `size` bytes of a message as sent to this peer."""
        self._sent[peer] += size

    def take_sent(self) -> Mapping[PeerId, int]:
        """Return the bytes that `sent` has counted for each peer since the last call."""
        taken, self._sent = self._sent, Counter()
        return taken

    async def await_turn(self, kind: Kind, turn: Turn, size: int) -> None:
        """Wait until a piece of `size` bytes may be sent; `kind` and `turn` describe the message of the piece."""
        leaves = asyncio.get_running_loop().create_future()
        self.queue.add(kind, turn, size, leaves)
        if self._timer is None:
            self._release()
        await leaves

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold back all queued pieces inside the context, so that our bandwidth probe measures the whole uplink.

        First wait until the uplink has sent all earlier pieces. After PROBE_HOLD_S, queued pieces are sent again even
        if the context has not ended.
        """
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self.queue.free_at - loop.time()))
        self.queue.pause(loop.time())
        try:
            yield
        finally:
            self.queue.resume()
            if self._timer is not None:
                self._timer.cancel()
            self._release()

    def _release(self) -> None:
        """Let the waiting tasks send all pieces that are due, and set the timer for the next piece."""
        loop, self._timer = asyncio.get_running_loop(), None
        while (next_at := self.queue.next_at()) is not None:
            if next_at > loop.time():
                self._timer = loop.call_at(next_at, self._release)
                return
            leaves = self.queue.take(loop.time())
            if leaves is not None:
                leaves.set_result(None)


@dataclass(slots=True)
class PacedWriter:
    """A Writer of one message that sends the bytes in pieces of TURN_BYTES, each when the uplink's queue allows."""

    uplink: Uplink
    writer: Writer
    peer: PeerId
    kind: Kind
    turn: Turn
    _written: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        """Append these bytes to the buffer that `drain` sends."""
        self._written.append(data)

    async def drain(self) -> None:
        """Send the bytes that were written, and return when all of them have been sent."""
        written, self._written = self._written, []
        if self.uplink.free:
            self.writer.write(b"".join(written) if len(written) > 1 else written[0])
            await self.writer.drain()
            self.uplink.sent(self.peer, sum(map(len, written)))
            return
        for view in [memoryview(data) for data in written]:
            for start in range(0, len(view), TURN_BYTES):
                piece = view[start : start + TURN_BYTES]
                await self.uplink.await_turn(self.kind, self.turn, len(piece))
                self.writer.write(piece)  # type: ignore[arg-type]  # asyncio's writers take any buffer
                await self.writer.drain()
                self.uplink.sent(self.peer, len(piece))

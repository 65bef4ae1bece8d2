"""What leaves this peer next, and at which pace: the order of comm/net/uplink_queue.py on an event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from decentral.comm.net.uplink_queue import TURN_BYTES, Kind, Turn, UplinkQueue, kind_of
from decentral.comm.wire.blobs import Writer
from decentral.comm.wire.codec import Envelope


class FutureQueue(UplinkQueue["asyncio.Future[None]"]):
    """Pieces are futures, which have their result when the piece may leave."""

    def is_given_up(self, item: "asyncio.Future[None]") -> bool:
        return item.done()


@dataclass(slots=True)
class Uplink:
    """Lets pieces go when their turn comes, by the event loop's clock."""

    queue: FutureQueue = field(default_factory=FutureQueue)
    _timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> bool:
        """Whether nobody need wait."""
        return self.queue.is_free(asyncio.get_running_loop().time())

    def paced(self, writer: Writer, envelope: Envelope) -> Writer:
        """A writer for this message: what is written to it leaves in its turn."""
        now = asyncio.get_running_loop().time()
        if not self.queue.paces(envelope, now):
            return writer
        turn = self.queue.turn(len(envelope.blob), now)
        return PacedWriter(self, writer, kind_of(envelope.message), turn)

    async def await_turn(self, kind: Kind, turn: Turn, size: int) -> None:
        """Returns when a piece of `size` bytes of the message with this turn may leave."""
        leaves = asyncio.get_running_loop().create_future()
        self.queue.add(kind, turn, size, leaves)
        if self._timer is None:
            self._release()
        await leaves

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Within it nothing else begins to leave, so that a probe measures the link, and not what is left of it."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self.queue.free_at - loop.time()))
        self.queue.hold(loop.time())
        try:
            yield
        finally:
            self.queue.let_go()
            if self._timer is not None:
                self._timer.cancel()
            self._release()

    def _release(self) -> None:
        """Lets the pieces go whose time has come, and wakes up for the next."""
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

"""Transport and directory inside one process: real streams and the real wire format, no sockets.

Tests of whole nodes use it. Peers share a Loopback; a peer can be unplugged, and its streams then end as a dead peer's
do.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decentral.comm.net.fair_shares import QuestionShares
from decentral.comm.net.streams import Server, ask_member, ask_on
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler, Knows, knows_all
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import Seconds


@dataclass(slots=True)
class Loopback:
    """The network and the DHT that the peers of one process share."""

    peers: dict[PeerId, "LoopbackTransport"] = field(default_factory=dict)
    records: dict[tuple[str, str], tuple[bytes, float]] = field(default_factory=dict)
    now: Callable[[], float] = time.time  # by which records expire

    def transport(self, peer: PeerId) -> "LoopbackTransport":
        self.peers[peer] = LoopbackTransport(peer, self)
        return self.peers[peer]

    def unplug(self, peer: PeerId) -> None:
        self.peers.pop(peer, None)


class LoopbackTransport:
    def __init__(self, peer: PeerId, network: Loopback) -> None:
        self.peer = peer
        self._network = network
        self._server: Server | None = None
        self._private: PrivateSwarm | None = None

    async def enclose(self, private: PrivateSwarm | None) -> None:
        self._private = private
        if self._server is not None:
            self._server.enclose(private)

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        try:
            async with asyncio.timeout(deadline_s):
                return await ask_member(self._private, self._ask, to, envelope, max_blob_bytes)
        except TimeoutError:
            raise AskError(Reason.DEADLINE, f"no answer within {deadline_s:.1f} s") from None

    async def _ask(self, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> Answer:
        ours, theirs = pipe()
        other = self._network.peers.get(to)
        if other is None or other._server is None:
            raise AskError(Reason.UNREACHABLE, "no such peer")
        answering = asyncio.create_task(other.answer(self.peer, *theirs))
        try:
            return await ask_on(*ours, envelope, max_blob_bytes)
        finally:
            ours[1].close()
            answering.cancel()

    async def answer(self, sender: PeerId, reader: asyncio.StreamReader, writer: "PipeWriter") -> None:
        assert self._server is not None
        try:
            await self._server.answer_on(sender, reader, writer)
        finally:
            writer.close()

    async def serve(self, handler: Handler, bound: BlobBound, knows: Knows = knows_all) -> None:
        self._server = Server(handler, bound, shares=QuestionShares(knows))
        self._server.enclose(self._private)

    def pace(self, rate: Callable[[], float | None]) -> None:
        """Memory has no uplink."""

    def take_sent(self) -> Mapping[PeerId, int]:
        return {}

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Everybody is in the same process."""

    async def drop(self, peer: PeerId) -> None:
        if self._server is not None:
            self._server.drop(peer)

    @property
    def refused(self) -> Mapping[str, int]:
        return self._server.refused if self._server else Counter()

    def processor_s(self) -> Seconds:
        return 0.0  # it computes in the event loop's thread

    async def close(self) -> None:
        self._network.unplug(self.peer)


class LoopbackDirectory:
    def __init__(self, network: Loopback) -> None:
        self._network = network

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        held = self._network.records.get((key, subkey))
        if held is not None and held[1] >= expires:
            return False  # as Kademlia does: a record is replaced by one that expires later
        self._network.records[key, subkey] = (value, expires)
        return True

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        now = self._network.now()
        return {
            subkey: value
            for (held, subkey), (value, expires) in self._network.records.items()
            if held == key and expires > now
        }


class PipeWriter:
    """The writing end of an in-memory stream."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._closed = False

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._reader.feed_data(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._reader.feed_eof()


End = tuple[asyncio.StreamReader, PipeWriter]


def pipe() -> tuple[End, End]:
    """Two ends; what is written at one is read at the other."""
    left, right = asyncio.StreamReader(), asyncio.StreamReader()
    return (left, PipeWriter(right)), (right, PipeWriter(left))

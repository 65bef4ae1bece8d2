"""Decide which messages of a simulated network are lost, delayed, copied or damaged, and damage their bytes.

Start at `NetworkFaults`. `written` and `read` convert a message to bytes, which a fault can damage, and back.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.transport import BlobBound
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda

LOST_PACKET_S = 0.2  # a packet that is lost and sent again delays its message by at least this time
RESET = 0.02  # probability that a lost packet resets the message's stream

T = TypeVar("T")


@dataclass(slots=True)
class NetworkFaults:
    """The present faults of a network, none at first; sim/fault_injector.py changes them."""

    agenda: Agenda
    chance: Random
    jitter: float = 0.1  # the random extra delay of a message is at most this share of the link's delay
    sides: dict[PeerId, int] = field(default_factory=dict)  # the peers (keys) on one side of a network partition
    parted_at: Seconds = 0.0
    one_way: dict[tuple[PeerId, PeerId], Seconds] = field(default_factory=dict)  # since when (from, to) is blocked
    rates: dict[str, float] = field(default_factory=dict)  # kind of fault -> share of messages that have it

    def part(self, side: Iterable[PeerId]) -> None:
        """Begin a partition between these peers and all others."""
        self.sides, self.parted_at = dict.fromkeys(side, 1), self.agenda.now

    @property
    def cuts(self) -> bool:
        """Whether a partition or a one-way link now blocks all packets from some peer to another peer."""
        return bool(self.one_way or self.sides)

    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        """Return the virtual time since which packets from `source` do not reach `target`; None if they do."""
        if self.one_way and (source, target) in self.one_way:
            return self.one_way[source, target]
        if self.sides and self.sides.get(source, -1) != self.sides.get(target, -1):
            return self.parted_at
        return None

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        """Return a message's total delay: `delay_s`, jitter and retransmissions; infinite if the stream is reset."""
        late = delay_s
        if self.jitter:
            late += delay_s * self.jitter * -(self.chance.random() ** 2) + delay_s * self.jitter
        if not self.rates:
            return late
        if self._happens("loss"):
            if self.chance.random() < RESET:
                return float("inf")
            late += max(LOST_PACKET_S, 2 * delay_s) * 2 ** self.chance.randrange(3)
        if self._happens("reorder"):
            late += self.chance.random()
        return late

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        """Return the damaged bytes that arrive in place of the bytes `wire()`; None if the message is undamaged."""
        if not self.rates:
            return None
        if self._happens("truncate"):
            whole = wire()
            return whole[: self.chance.randrange(len(whole))]
        if self._happens("corrupt"):
            data = bytearray(wire())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            return bytes(data)
        return None

    def copies(self, source: PeerId, target: PeerId) -> int:
        """Return how many copies of a request arrive: 1 or 2."""
        return 2 if self.rates and self._happens("duplicate") else 1

    def _happens(self, what: str) -> bool:
        rate = self.rates.get(what, 0.0)
        return rate > 0 and self.chance.random() < rate


def written(envelope: Envelope) -> bytes:
    """Return the bytes of an envelope on the wire, with only those bytes of a SyntheticBlob that are in memory."""
    if isinstance(envelope.blob, SyntheticBlob):
        envelope = Envelope(envelope.message, b"".join(content for _, content in envelope.blob.segments))
    stream = _Bytes()
    _run(blobs.write(stream, envelope))
    return bytes(stream.data)


def read(wire: bytes, bound: BlobBound) -> Envelope | ProtocolError:
    """Return the envelope in these bytes, or the error that the receiver's codec raises."""
    try:
        return _run(blobs.read(_Bytes(wire), bound))[0]
    except ProtocolError as error:
        return error
    except EOFError:
        return ProtocolError(Reason.CUT, "the stream ended early")


class _Bytes:
    """An in-memory stream for the real codec, on which reads and writes never wait."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None: ...

    async def readexactly(self, n: int) -> bytes:
        if len(self.data) < n:
            raise asyncio.IncompleteReadError(bytes(self.data), n)
        part = bytes(self.data[:n])
        del self.data[:n]
        return part


def _run(work: Coroutine[object, None, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as over:
        return over.value  # type: ignore[no-any-return]
    raise AssertionError("expected a coroutine that never waits; this one has waited")

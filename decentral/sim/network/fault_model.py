"""Define `NetworkFaultModel`, which a simulated network asks whether a message is lost, delayed, copied or damaged.

network_faults.py implements this interface. `written` and `read` convert a message to bytes, which a fault can damage,
and back.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.transport import BlobBound
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import Seconds

T = TypeVar("T")


class NetworkFaultModel(Protocol):
    """Interface of a network's faults: it decides what happens to each message; implemented by `NetworkFaults`."""

    @property
    def cuts(self) -> bool:
        """Whether a partition or a one-way link now blocks all packets from some peer to another peer."""

    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        """Return the virtual time since which packets from `source` do not reach `target`; None if they do."""

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        """Return a message's total delay: `delay_s`, jitter and retransmissions; infinite if the stream is reset."""

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        """Return the damaged bytes that arrive in place of the bytes `wire()`; None if the message is undamaged."""

    def copies(self, source: PeerId, target: PeerId) -> int:
        """Return how many copies of a request arrive: 1, or 2 if it is duplicated."""


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

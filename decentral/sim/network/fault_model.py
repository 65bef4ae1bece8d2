"""What may happen to a message on its way through a virtual network; decentral/sim/ has the faults of its scenarios.

A damaged message goes through the real codec: it is written out, changed, and read again.
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
    @property
    def cuts(self) -> bool:
        """Whether there are two peers with packets between them that do not arrive."""

    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        """Since when packets from source to target do not arrive; None: they do."""

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        """The delay of this message with jitter and retransmissions; infinite: the stream is reset."""

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        """The bytes that arrive instead of `wire()`; None: the message is unharmed."""

    def copies(self, source: PeerId, target: PeerId) -> int:
        """How often a question arrives."""


def written(envelope: Envelope) -> bytes:
    """The bytes of an envelope on the wire. A synthetic blob is written as its contents."""
    if isinstance(envelope.blob, SyntheticBlob):
        envelope = Envelope(envelope.message, b"".join(content for _, content in envelope.blob.segments))
    stream = _Bytes()
    _run(blobs.write(stream, envelope))
    return bytes(stream.data)


def read(wire: bytes, bound: BlobBound) -> Envelope | ProtocolError:
    """The envelope in these bytes, or the error that its reader gets."""
    try:
        return _run(blobs.read(_Bytes(wire), bound))[0]
    except ProtocolError as error:
        return error
    except EOFError:
        return ProtocolError(Reason.CUT, "the stream ended early")


class _Bytes:
    """A stream that never waits."""

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
    """The result of a coroutine that never has to wait."""
    try:
        work.send(None)
    except StopIteration as over:
        return over.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")

"""Write an envelope to a stream and read it again: a header, then the blob in chunks, each with its digest.

    4 bytes  length of the header, big-endian
    header   comm/wire/codec.py; says how many bytes of blob follow
    chunks   each up to 256 KiB of the blob, preceded by 16 bytes: blake2b of the chunk

Sizes are checked before anything is allocated: the header against MAX_HEADER_BYTES, the blob against the bound that
the caller of `read` gives. No function here has a deadline: callers set one around each call.
"""

import hashlib
from collections.abc import Callable
from typing import Protocol

from decentral.comm.wire import codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message
from decentral.comm.wire.transport import BlobBound
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.core.units import KiB

CHUNK_BYTES = 256 * KiB  # a blob is sent in chunks of this size (the last may be smaller); larger ones are not faster
DIGEST_BYTES = 16
LENGTH_BYTES = 4


class Reader(Protocol):
    """Interface of the reading end of a stream; asyncio's StreamReader implements it."""

    async def readexactly(self, n: int) -> bytes:
        """Return the next `n` bytes. Raises EOFError if the stream ends before `n` bytes have come."""


class Writer(Protocol):
    """Interface of the writing end of a stream; asyncio's StreamWriter implements it."""

    def write(self, data: bytes) -> None:
        """Put bytes into the buffer of the stream."""

    async def drain(self) -> None:
        """Wait until more bytes fit in the buffer of the stream."""


async def write(writer: Writer, envelope: Envelope) -> int:
    """Write an envelope and return the number of bytes written."""
    header = codec.encode(envelope.message, len(envelope.blob))
    written, view = LENGTH_BYTES + len(header), memoryview(envelope.blob)
    ahead = len(header).to_bytes(LENGTH_BYTES, "big") + header  # sent with the first chunk, to save a system call
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        writer.write(b"".join((ahead, digest(chunk), chunk)))
        await writer.drain()  # wait until the chunk is sent, so that chunks for a slow reader do not fill the memory
        written += DIGEST_BYTES + len(chunk)
        ahead = b""
    if ahead:
        writer.write(ahead)
        await writer.drain()
    return written


async def read(reader: Reader, max_blob_bytes: BlobBound) -> tuple[Envelope, int]:
    """Return the next envelope and the number of bytes read.

    Args:
        reader: The stream.
        max_blob_bytes: Returns the most bytes that the blob of a message may have.

    Raises:
        ProtocolError: If the header or the blob is malformed or too large.
        EOFError: If the stream ends early (asyncio's IncompleteReadError).
    """
    return await read_rest(reader, await read_length(reader), max_blob_bytes)


async def read_length(reader: Reader) -> int:
    """Return the header's length in bytes, not yet checked against its limit. Raises EOFError if the stream ends."""
    return int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")


async def read_rest(
    reader: Reader, length: int, max_blob_bytes: BlobBound, reserve: Callable[[int], None] | None = None
) -> tuple[Envelope, int]:
    """Return the envelope whose header length `read_length` has read, and the number of bytes read, length included.

    Args:
        reader: The stream.
        length: Bytes of the header, as `read_length` returned them.
        max_blob_bytes: Returns the most bytes that the blob of a message may have.
        reserve: Is called with the blob's size in bytes before any of the blob is read. It may raise ProtocolError to
            refuse the blob.

    Raises:
        ProtocolError: If the header or the blob is malformed or too large.
        EOFError: If the stream ends early (asyncio's IncompleteReadError).
    """
    if not 0 < length <= codec.MAX_HEADER_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a header must have 1 to {codec.MAX_HEADER_BYTES} bytes; got {length}")
    message, size = codec.decode(await reader.readexactly(length))
    require_bound(message, size, max_blob_bytes(message))
    if reserve is not None:
        reserve(size)
    chunks, left, received = list[bytes](), size, LENGTH_BYTES + length
    while left:
        expected = await reader.readexactly(DIGEST_BYTES)
        chunk = await reader.readexactly(min(CHUNK_BYTES, left))
        if digest(chunk) != expected:
            raise ProtocolError(Reason.DIGEST, f"the chunk at byte {size - left} of the blob does not match its digest")
        chunks.append(chunk)
        left -= len(chunk)
        received += DIGEST_BYTES + len(chunk)
    return Envelope(message, chunks[0] if len(chunks) == 1 else b"".join(chunks)), received


def require_bound(message: Message, size: int, most: int) -> None:
    """Raise ProtocolError if a message comes with a blob of more than `most` bytes."""
    if size > most:
        kind = type(message).__name__
        raise ProtocolError(Reason.OVERSIZE, f"the blob of this {kind} must have at most {most} bytes; got {size}")


def digest(data: bytes | memoryview) -> bytes:
    """Return the digest of a chunk, a snapshot or a state: DIGEST_BYTES bytes of blake2b."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()

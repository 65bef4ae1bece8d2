"""An envelope on a stream: header, then the blob in chunks, each with its digest.

    4 bytes  length of the header, big-endian
    header   comm/wire/codec.py; says how many bytes of blob follow
    chunks   each up to 256 KiB of the blob, preceded by 16 bytes: blake2b of the chunk

Sizes are checked before anything is allocated: the header against MAX_HEADER_BYTES, the blob against the bound
that the reader gives. The drivers put time limits around these calls, for reading and writing alike.
"""

import hashlib
from collections.abc import Callable
from typing import Protocol

from decentral.comm.wire import codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.transport import BlobBound
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.core.units import KiB

CHUNK_BYTES = 256 * KiB
DIGEST_BYTES = 16
LENGTH_BYTES = 4


class Reader(Protocol):
    async def readexactly(self, n: int) -> bytes: ...


class Writer(Protocol):
    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


async def write(writer: Writer, envelope: Envelope) -> int:
    """Writes the envelope and returns the number of bytes written."""
    header = codec.encode(envelope.message, len(envelope.blob))
    written, view = LENGTH_BYTES + len(header), memoryview(envelope.blob)
    ahead = len(header).to_bytes(LENGTH_BYTES, "big") + header  # goes with the first chunk: each write is a system call
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        writer.write(b"".join((ahead, digest(chunk), chunk)))
        await writer.drain()  # one chunk at a time, so that a slow reader does not fill our memory
        written += DIGEST_BYTES + len(chunk)
        ahead = b""
    if ahead:
        writer.write(ahead)
        await writer.drain()
    return written


async def read(reader: Reader, max_blob_bytes: BlobBound) -> tuple[Envelope, int]:
    """The envelope and the number of bytes read. `max_blob_bytes(message)` bounds its blob.

    Raises ProtocolError for what breaks the format, and EOFError (asyncio's IncompleteReadError) at a cut.
    """
    return await read_rest(reader, await read_length(reader), max_blob_bytes)


async def read_length(reader: Reader) -> int:
    """The length of the header that follows, which nothing has checked yet."""
    return int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")


async def read_rest(
    reader: Reader, length: int, max_blob_bytes: BlobBound, reserve: Callable[[int], None] | None = None
) -> tuple[Envelope, int]:
    """What `read` gives, after `length` has been read. `reserve` gets the blob's size before any of it is read, and
    may raise ProtocolError."""
    if not 0 < length <= codec.MAX_HEADER_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a header of {length} bytes")
    message, size = codec.decode(await reader.readexactly(length))
    if size > max_blob_bytes(message):
        raise ProtocolError(Reason.OVERSIZE, f"{type(message).__name__} with a blob of {size} bytes")
    if reserve is not None:
        reserve(size)
    chunks, left, received = list[bytes](), size, LENGTH_BYTES + length
    while left:
        expected = await reader.readexactly(DIGEST_BYTES)
        chunk = await reader.readexactly(min(CHUNK_BYTES, left))
        if digest(chunk) != expected:
            raise ProtocolError(Reason.DIGEST, f"chunk at {size - left}")
        chunks.append(chunk)
        left -= len(chunk)
        received += DIGEST_BYTES + len(chunk)
    return Envelope(message, chunks[0] if len(chunks) == 1 else b"".join(chunks)), received


def digest(data: bytes | memoryview) -> bytes:
    """The DIGEST_BYTES bytes of blake2b that announce a chunk, a snapshot or a state."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()

"""One question and its answer on a pair of streams, with a deadline on every read and write.

libp2p and the in-memory transport of the tests share it, so both refuse the same input.
"""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_ROUTE_S, Refused
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason

MAX_STREAMS = 64  # questions answered at the same time; more are refused as busy
READ_S = 30.0  # for a question to arrive whole
STREAM_ANSWER_S = MAX_ROUTE_S + 100.0  # to find the answer: a micro-batch has to come back from its route's end
WRITE_S = 60.0  # for the answer to leave
LINGER_S = 1.0  # for an asker that was refused to hang up
LINGER_CHUNKS, LINGER_BYTES = 256, 64 * 1024  # as much of its question is read until then


async def ask_on(reader: blobs.Reader, writer: blobs.Writer, envelope: Envelope, max_blob_bytes: int) -> Answer:
    """Writes a question and reads its answer. Raises AskError. The caller puts its deadline around this and opening."""
    began = time.monotonic()
    try:
        sent = await blobs.write(writer, envelope)
        answer, received = await blobs.read(reader, lambda _: max_blob_bytes)
    except ProtocolError as error:
        raise AskError(error.reason, str(error)) from None
    except (EOFError, ConnectionError, OSError) as error:
        raise AskError(Reason.CUT, type(error).__name__) from None
    return Answer(answer, time.monotonic() - began, sent, received)


@dataclass(slots=True)
class Server:
    """Answers questions. Bad input is counted by reason and costs its sender the stream, nothing else."""

    handler: Handler
    bound: BlobBound
    refused: Counter[str] = field(default_factory=Counter)
    open: int = 0

    async def answer_on(self, sender: PeerId, reader: blobs.Reader, writer: blobs.Writer) -> None:
        self.open += 1
        refused = False
        try:
            refused = await self._answer_on(sender, reader, writer)
        except TimeoutError:
            self.refused[Reason.DEADLINE] += 1
        except (EOFError, ConnectionError, OSError):
            self.refused[Reason.CUT] += 1
        finally:
            self.open -= 1
        if refused:
            await _linger(reader)

    async def _answer_on(self, sender: PeerId, reader: blobs.Reader, writer: blobs.Writer) -> bool:
        """Whether the question was refused, and so perhaps not read to its end."""
        refused = False
        try:
            if self.open > MAX_STREAMS:
                raise ProtocolError(Reason.BUSY, f"{MAX_STREAMS} streams are open")
            async with asyncio.timeout(READ_S):
                question, _ = await blobs.read(reader, self.bound)
            async with asyncio.timeout(STREAM_ANSWER_S):
                answer = await self.handler(sender, question)
        except ProtocolError as error:
            self.refused[error.reason] += 1
            refused, answer = True, Envelope(Refused(error.reason, str(error)[:200]))
        async with asyncio.timeout(WRITE_S):
            with suppress(ConnectionError):
                await blobs.write(writer, answer)
        return refused


async def _linger(reader: blobs.Reader) -> None:
    """Reads on until the asker hangs up: closing with unread bytes resets the stream, and the refusal may be lost."""
    with suppress(EOFError, ConnectionError, OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            for _ in range(LINGER_CHUNKS):
                await reader.readexactly(LINGER_BYTES)

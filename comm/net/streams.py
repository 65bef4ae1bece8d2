"""Questions and their answers on a stream, one after another, with a deadline on every read and write.

libp2p and the in-memory transport of the tests share it, so both refuse the same input. To open a stream costs more
than a small question, so an asker keeps a stream for its next question to the same peer (Asker), and a peer that has
answered waits some time for that question (Server).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.net.fair_shares import IDLE_STREAMS, UNPROVEN_STREAMS, FairShare, QuestionShare, QuestionShares
from decentral.comm.net.uplink import Uplink
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import MAX_REVOCATIONS_BYTES
from decentral.comm.wire.messages import MAX_ROUTE_S, Hello, MembershipProof, Message, Ping, Probe, Refused
from decentral.comm.wire.private_swarm import MAX_UNPROVEN_BYTES, NOT_COUNTED, PrivateSwarm, refuse_unproven
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason

READ_S = 30.0  # for a question to arrive whole
PROOF_READ_S = 5.0  # for the proof of one who is not known as a member of a private swarm
STREAM_ANSWER_S = MAX_ROUTE_S + 100.0  # to find the answer: a micro-batch has to come back from its route's end
WRITE_S = 60.0  # for the answer to leave
KEEP_S = 30.0  # an asker closes a stream that it has not used for so long
IDLE_S = 2 * KEEP_S  # and the other side waits longer for the next question, so that it does not close a stream in use
KEPT_STREAMS, KEPT_PER_PEER = 64, 2  # streams that an asker keeps; beyond them, the one unused for longest is closed
STRANGER_PAUSE_S = 0.1  # that the share of a question is kept after it, where anybody may ask it for nothing
LINGER_S = 1.0  # for an asker that was refused to hang up
LINGERING = 256  # refusals on their way at a time; beyond them a stream ends without a word
LINGER_CHUNKS, LINGER_BYTES = 256, 64 * 1024  # as much of its question is read until then


class StreamWriter(blobs.Writer, Protocol):
    def close(self) -> None: ...

    def is_closing(self) -> bool: ...


@dataclass(slots=True)
class Stream:
    """An open stream to a peer."""

    reader: asyncio.StreamReader
    writer: StreamWriter
    used_at: float = 0.0  # monotonic time of its last answer

    def answered(self) -> None:
        self.used_at = time.monotonic()

    @property
    def ended(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()


class NoAnswer(AskError):
    """The stream ended before an answer began."""


class Opener(Protocol):
    """What can open streams to other peers."""

    async def open_stream(self, to: PeerId) -> Stream:
        """Return a new stream to this peer. Raises AskError, and the errors of its network."""


@dataclass(slots=True)
class Asker:
    """Asks questions on streams that it has opened, and keeps."""

    opener: Opener = field(repr=False, compare=False)
    uplink: Uplink = field(default_factory=Uplink)
    private: PrivateSwarm | None = None  # None: the swarm is public
    kept: dict[PeerId, list[Stream]] = field(default_factory=dict)  # no list is empty

    async def ask(self, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> Answer:
        """Raises AskError, and what `open_stream` raises. The caller puts its deadline around this.

        The other side may close a kept stream at the moment at which we ask on it: then we ask on a new one.
        """
        if isinstance(envelope.message, Probe) and envelope.blob:
            async with self.uplink.alone():
                return await ask_member(self.private, self.ask_any, to, envelope, max_blob_bytes)
        return await ask_member(self.private, self.ask_any, to, envelope, max_blob_bytes)

    def enclose(self, private: PrivateSwarm | None) -> None:
        """Ask only members of this swarm from now on; None: anybody."""
        self.private = private

    def close(self) -> None:
        for stream in self._all():
            stream.writer.close()
        self.kept.clear()

    def drop(self, peer: PeerId) -> None:
        """Closes the streams to this peer."""
        for stream in self.kept.pop(peer, []):
            stream.writer.close()

    async def ask_any(self, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> Answer:
        """Asks a peer whoever it is."""
        kept = self._take(to)
        if kept is not None:
            with suppress(NoAnswer):
                return await self._ask_on(kept, to, envelope, max_blob_bytes)
        return await self._ask_on(await self.opener.open_stream(to), to, envelope, max_blob_bytes)

    async def _ask_on(self, stream: Stream, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> Answer:
        keep = False
        try:
            answer = await ask_on(stream.reader, self.uplink.paced(stream.writer, envelope), envelope, max_blob_bytes)
            keep = not isinstance(answer.envelope.message, Refused)  # after some refusals nothing more is read
            return answer
        finally:
            if keep:
                self._keep(to, stream)
            else:
                stream.writer.close()

    def _take(self, peer: PeerId) -> Stream | None:
        """The stream to this peer that was used last, if one is open."""
        self._close_where(lambda stream: stream.ended or time.monotonic() - stream.used_at > KEEP_S)
        streams = self.kept.get(peer, [])
        taken = streams.pop() if streams else None
        if not streams:
            self.kept.pop(peer, None)
        return taken

    def _keep(self, peer: PeerId, stream: Stream) -> None:
        stream.answered()
        streams = self.kept.setdefault(peer, [])
        streams.append(stream)
        if len(streams) > KEPT_PER_PEER:
            streams.pop(0).writer.close()
        everything = self._all()
        if len(everything) > KEPT_STREAMS:
            oldest = min(everything, key=lambda one: one.used_at)
            self._close_where(lambda one: one is oldest)

    def _close_where(self, condition: Callable[[Stream], bool]) -> None:
        for peer, streams in list(self.kept.items()):
            over = [stream for stream in streams if condition(stream)]
            for stream in over:
                streams.remove(stream)
                stream.writer.close()
            if not streams:
                del self.kept[peer]

    def _all(self) -> list[Stream]:
        return [stream for streams in self.kept.values() for stream in streams]


AskOnce = Callable[[PeerId, Envelope, int], Awaitable[Answer]]


async def ask_member(
    private: PrivateSwarm | None, ask: AskOnce, to: PeerId, envelope: Envelope, max_blob_bytes: int
) -> Answer:
    """Asks with `ask`. In a private swarm both have shown that they are members before; raises AskError if not.

    The other side may have forgotten us, or know an older proof of ours: then we show it again, and ask again.
    """
    if private is None:
        return await ask(to, envelope, max_blob_bytes)
    if private.admits(to):
        answer = await ask(to, envelope, max_blob_bytes)
        message = answer.envelope.message
        if not (isinstance(message, Refused) and message.reason in NOT_COUNTED):
            return answer
    await exchange_proofs(private, ask, to)
    return await ask(to, envelope, max_blob_bytes)


async def exchange_proofs(private: PrivateSwarm, ask: AskOnce, to: PeerId) -> None:
    """Shows our proof to a peer, and takes its own. Raises AskError if one of the two is no member for the other."""
    proved = await ask(to, private.question(), MAX_REVOCATIONS_BYTES)
    try:
        private.heard(to, proved.envelope)
    except ProtocolError as error:
        raise AskError(error.reason, error.detail) from None


async def ask_on(reader: blobs.Reader, writer: blobs.Writer, envelope: Envelope, max_blob_bytes: int) -> Answer:
    """Writes a question and reads its answer. Raises AskError. The caller puts its deadline around this and opening."""
    began = time.monotonic()
    try:
        sent = await blobs.write(writer, envelope)
        length = await blobs.read_length(reader)
        first_byte_s = time.monotonic() - began
    except ProtocolError as error:
        raise AskError(error.reason, str(error)) from None
    except (EOFError, ConnectionError, OSError) as error:
        raise NoAnswer(Reason.CUT, type(error).__name__) from None
    try:
        answer, received = await blobs.read_rest(reader, length, lambda _: max_blob_bytes)
    except ProtocolError as error:
        raise AskError(error.reason, str(error)) from None
    except (EOFError, ConnectionError, OSError) as error:
        raise AskError(Reason.CUT, type(error).__name__) from None
    return Answer(answer, time.monotonic() - began, first_byte_s, sent, received)


@dataclass(slots=True)
class Server:
    """Answers questions. Bad input is counted by reason and costs its sender the stream, nothing else."""

    handler: Handler
    bound: BlobBound
    uplink: Uplink = field(default_factory=Uplink)
    refused: Counter[str] = field(default_factory=Counter)
    shares: QuestionShares = field(default_factory=QuestionShares)  # of the questions that are read or answered
    idle: FairShare = field(default_factory=lambda: FairShare(IDLE_STREAMS))  # streams on which a next one may come
    refusing: FairShare = field(default_factory=lambda: FairShare(LINGERING))  # streams on which a refusal leaves
    private: PrivateSwarm | None = None  # None: the swarm is public
    turning_away: FairShare = field(default_factory=lambda: FairShare(UNPROVEN_STREAMS))  # as `refusing`: no members
    streams: dict[PeerId, set["asyncio.Task[None]"]] = field(
        default_factory=dict
    )  # in a private swarm; no set is empty

    async def answer_on(self, sender: PeerId, reader: blobs.Reader, writer: blobs.Writer) -> None:
        """Answers the questions on this stream, until the asker hangs up, pauses for IDLE_S, or asks something bad."""
        if self.private is None:
            await self._answer_all(sender, reader, writer)
            return
        answering = asyncio.ensure_future(self._answer_all(sender, reader, writer))
        self.streams.setdefault(sender, set()).add(answering)
        try:
            await asyncio.wait([answering])
            if not answering.cancelled():  # it is where the peer was dropped
                answering.result()
        finally:
            answering.cancel()
            self.streams[sender].discard(answering)
            if not self.streams[sender]:
                del self.streams[sender]

    async def _answer_all(self, sender: PeerId, reader: blobs.Reader, writer: blobs.Writer) -> None:
        first: int | None = None
        while await self._answer_one(sender, reader, writer, first):
            first = await self._next_question(sender, reader)
            if first is None:
                return

    def enclose(self, private: PrivateSwarm | None) -> None:
        """From now on only members of this swarm are answered; None: anybody."""
        self.private = private
        self.shares.enclose(private)

    def drop(self, peer: PeerId) -> None:
        """Ends the streams of a peer that is no member any more, with what they hold."""
        for task in self.streams.get(peer, ()):
            task.cancel()

    async def _next_question(self, sender: PeerId, reader: blobs.Reader) -> int | None:
        """The length of the next question's header; None if none comes. An idle stream takes no share of questions."""
        if not self.idle.take(sender):
            return None
        try:
            async with asyncio.timeout(IDLE_S):
                return int.from_bytes(await reader.readexactly(blobs.LENGTH_BYTES), "big")
        except (EOFError, ConnectionError, OSError, TimeoutError):
            return None
        finally:
            self.idle.give_back(sender)

    async def _answer_one(self, sender: PeerId, reader: blobs.Reader, writer: blobs.Writer, length: int | None) -> bool:
        """Whether another question may follow on the stream. `length`: of the question's header, if it was read."""
        try:
            share = self.shares.begin(sender)
            try:
                return await self._read_and_answer(share, reader, writer, length)
            finally:
                share.end()
        except ProtocolError as error:
            self.refused[error.reason] += 1
            await self._refuse(sender, error, reader, writer)
        except TimeoutError:
            self.refused[Reason.DEADLINE] += 1
        except (EOFError, ConnectionError, OSError):
            self.refused[Reason.CUT] += 1
        return False

    async def _read_and_answer(
        self, share: QuestionShare, reader: blobs.Reader, writer: blobs.Writer, length: int | None
    ) -> bool:
        """Whether the asker is still there. Raises ProtocolError for a question that is refused, perhaps half read."""
        private, sender = self.private, share.sender
        unproven = private is not None and not private.admits(sender)

        def bound(message: Message) -> int:
            if private is not None:
                private.check(sender, message)
            return self.bound(message)

        async with asyncio.timeout(PROOF_READ_S if unproven else READ_S):
            if length is None:
                length = await blobs.read_length(reader)
            if unproven and length > MAX_UNPROVEN_BYTES:
                raise refuse_unproven()
            question, _ = await blobs.read_rest(reader, length, bound, share.reserve)
        if private is not None and isinstance(question.message, MembershipProof):
            return await self._answer_proof(private, sender, question.message, writer)
        async with asyncio.timeout(STREAM_ANSWER_S):
            answer = await self.handler(sender, question)
        there = await self._write(writer, answer)
        if not share.known and isinstance(question.message, Hello | Ping):
            await asyncio.sleep(STRANGER_PAUSE_S)  # so strangers together ask a few hundred a second, and no more
        return there

    async def _answer_proof(
        self, private: PrivateSwarm, sender: PeerId, proof: MembershipProof, writer: blobs.Writer
    ) -> bool:
        """Whether another question may follow: only from a member."""
        answer = private.answer(sender, proof)
        if isinstance(answer.message, Refused):
            self.refused[answer.message.reason] += 1
        return await self._write(writer, answer) and private.admits(sender)

    async def _refuse(self, sender: PeerId, error: ProtocolError, reader: blobs.Reader, writer: blobs.Writer) -> None:
        member = self.private is None or self.private.admits(sender)
        room = self.refusing if member else self.turning_away
        if not room.take(sender):
            return
        try:
            if await self._write(writer, Envelope(Refused(error.reason, str(error)[:200]))):
                await _linger(reader)
        except TimeoutError:
            self.refused[Reason.DEADLINE] += 1
        finally:
            room.give_back(sender)

    async def _write(self, writer: blobs.Writer, answer: Envelope) -> bool:
        """Whether the asker is still there."""
        try:
            async with asyncio.timeout(WRITE_S):
                await blobs.write(self.uplink.paced(writer, answer), answer)
        except ConnectionError:
            return False
        return True


async def read_until_closed(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """All that comes. Raises AskError for more than `most_bytes`."""
    found = b""
    while len(found) <= most_bytes and (piece := await reader.read(most_bytes + 1 - len(found))):
        found += piece
    if len(found) > most_bytes:
        raise AskError(Reason.OVERSIZE, f"more than {most_bytes} bytes")
    return found


async def _linger(reader: blobs.Reader) -> None:
    """Reads on until the asker hangs up: closing with unread bytes resets the stream, and the refusal may be lost."""
    with suppress(EOFError, ConnectionError, OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            for _ in range(LINGER_CHUNKS):
                await reader.readexactly(LINGER_BYTES)

"""Send questions and answers on streams, one question at a time, with a deadline on every read and write.

`Asker` asks, `Server` answers. libp2p and the tests' in-memory transport both use these classes, so both transports
refuse the same input. Opening a stream costs more than a small question, so an Asker reuses a stream for its next
question to the same peer, and a Server waits up to IDLE_S for that question.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.net.fair_shares import IDLE_STREAMS, UNPROVEN_STREAMS, FairShare, QuestionShare, QuestionShares
from decentral.comm.net.uplink import Uplink
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import MAX_REVOCATIONS_BYTES
from decentral.comm.wire.messages import (
    MAX_ROUTE_S,
    MembershipProof,
    Message,
    Probe,
    Question,
    Refused,
)
from decentral.comm.wire.private_swarm import MAX_UNPROVEN_BYTES, NOT_COUNTED, PrivateSwarm, refuse_unproven
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

READ_S = 30.0  # a whole question must arrive within this time
PROOF_READ_S = 5.0  # a question of a peer without proven membership of our private swarm must arrive within this time
STREAM_ANSWER_S = MAX_ROUTE_S + 100.0  # an answer must be computed in this time, enough for a micro-batch's whole route
WRITE_S = 60.0  # a whole answer must be written within this time
KEEP_S = 30.0  # an Asker closes a stream that it has not used for this long
IDLE_S = 2 * KEEP_S  # a server closes a stream on which no question comes for this long
KEPT_STREAMS, KEPT_PER_PEER = 64, 2  # an Asker has at most this many idle streams, in all and to one peer
STRANGER_PAUSE_S = 0.1  # rate limit: a stream of a peer without a known record stays busy this long after a question
LINGER_S = 1.0  # after a refusal, we wait at most this long for the sender to close the stream
LINGERING = 256  # at most this many refusals are sent at a time; further streams are closed without a refusal
# The rest of a refused question is dropped in at most LINGER_CHUNKS reads of LINGER_BYTES each.
LINGER_CHUNKS, LINGER_BYTES = 256, 64 * 1024


class StreamWriter(blobs.Writer, Protocol):
    """A Writer that can be closed."""

    def close(self) -> None:
        """Close the stream."""

    def is_closing(self) -> bool:
        """Return whether the stream is closed or about to be."""


@dataclass(slots=True)
class Stream:
    """An open stream to a peer, on which we ask questions."""

    reader: asyncio.StreamReader
    writer: StreamWriter
    used_at: float = 0.0  # monotonic time of the stream's last answer

    def answered(self) -> None:
        """Set `used_at` to now, since an answer has come on this stream."""
        self.used_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """Return whether either side has closed the stream."""
        return self.reader.at_eof() or self.writer.is_closing()


class NoAnswer(AskError):
    """Raised if the stream ended before an answer began, so that the question may be sent again on another stream."""


class Opener(Protocol):
    """Interface of a network that can open streams to other peers; Libp2p implements it."""

    async def open_stream(self, to: PeerId) -> Stream:
        """Return a new stream to this peer. Raises AskError or a network error if no stream can be opened."""


@dataclass(slots=True)
class Asker:
    """Asks questions on streams that it opens, and keeps the streams for later questions."""

    opener: Opener = field(repr=False, compare=False)
    uplink: Uplink = field(default_factory=Uplink)
    private: PrivateSwarm | None = None
    kept: dict[PeerId, list[Stream]] = field(default_factory=dict)  # idle streams; no list is empty

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        """Send a question to a peer and return its answer.

        Args:
            to: The peer; in a private swarm both peers prove their membership first.
            envelope: The question and its blob. A Probe with a blob waits until it has the uplink to itself.
            deadline_s: Seconds for the whole call.
            max_blob_bytes: Most bytes that the blob of the answer may have.

        Raises:
            AskError: If no valid answer comes in time. Errors of `Opener.open_stream` are passed on.
        """
        measures_uplink = isinstance(envelope.message, Probe) and envelope.blob
        try:
            async with asyncio.timeout(deadline_s), self.uplink.alone() if measures_uplink else nullcontext():
                return await ask_member(self.private, self.ask_any, to, envelope, max_blob_bytes)
        except TimeoutError:
            raise AskError(Reason.DEADLINE, f"no answer within {deadline_s:.1f} s") from None

    def enclose(self, private: PrivateSwarm | None) -> None:
        """Ask only members of this private swarm from now on, or any peer if `private` is None."""
        self.private = private

    def close(self) -> None:
        """Close all kept streams."""
        for stream in self._all():
            stream.writer.close()
        self.kept.clear()

    def drop(self, peer: PeerId) -> None:
        """Close the kept streams to this peer."""
        for stream in self.kept.pop(peer, []):
            stream.writer.close()

    async def ask_any(self, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> Answer:
        """Ask a peer without checking its membership, on a kept stream if possible. Raises AskError if no answer comes.

        If the kept stream ends before the answer begins, the question is sent again on a new stream.
        """
        kept = self._take(to)
        if kept is not None:
            with suppress(NoAnswer):
                return await self._ask_on(kept, to, envelope, max_blob_bytes)
        return await self._ask_on(await self.opener.open_stream(to), to, envelope, max_blob_bytes)

    async def _ask_on(self, stream: Stream, to: PeerId, envelope: Envelope, max_blob_bytes: int) -> Answer:
        keep = False
        try:
            answer = await ask_on(
                stream.reader, self.uplink.paced(stream.writer, envelope, to), envelope, max_blob_bytes
            )
            keep = not isinstance(answer.envelope.message, Refused)  # the server may close the stream after a refusal
            return answer
        finally:
            if keep:
                self._keep(to, stream)
            else:
                stream.writer.close()

    def _take(self, peer: PeerId) -> Stream | None:
        """Remove and return the most recently used stream to this peer; None if no stream is kept.

        Close all kept streams, to any peer, that have ended or were not used for KEEP_S.
        """
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
    """Ask a peer a question and return its answer. Exchange proofs first if the peer is not known as a member.

    A member refuses the question if it has forgotten our proof, or knows only our proof of an earlier invitation. Then
    we exchange proofs and ask again.

    Args:
        private: Our private swarm; None if the swarm is public, so that no proofs are needed.
        ask: Asks a peer without checking its membership.
        to: The peer.
        envelope: The question and its blob.
        max_blob_bytes: Most bytes that the blob of the answer may have.

    Raises:
        AskError: If no valid answer comes, or either side does not accept the other's proof.
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
    """Show our proof to a peer and check the peer's proof. Raises AskError if either side refuses a proof."""
    proved = await ask(to, private.question(), MAX_REVOCATIONS_BYTES)
    try:
        private.heard(to, proved.envelope)
    except ProtocolError as error:
        raise AskError(error.reason, error.detail) from None


async def ask_on(reader: blobs.Reader, writer: blobs.Writer, envelope: Envelope, max_blob_bytes: int) -> Answer:
    """Write a question to a stream and return the answer. The caller sets a deadline around this call.

    Args:
        reader: The reading end of the stream.
        writer: The writing end of the stream.
        envelope: The question and its blob.
        max_blob_bytes: Most bytes that the blob of the answer may have.

    Raises:
        NoAnswer: If the stream ends before the answer begins.
        AskError: If the stream ends within the answer, or the answer is malformed or its blob is too large.
    """
    began = time.monotonic()
    try:
        sent = await blobs.write(writer, envelope)
        length = await blobs.read_length(reader)
        first_byte_s = time.monotonic() - began
    except ProtocolError as error:
        raise AskError(error.reason, str(error)) from None
    except (EOFError, ConnectionError, OSError) as error:
        raise NoAnswer(Reason.CUT, f"the stream ended before the answer ({type(error).__name__})") from None
    try:
        answer, received = await blobs.read_rest(reader, length, lambda _: max_blob_bytes)
    except ProtocolError as error:
        raise AskError(error.reason, str(error)) from None
    except (EOFError, ConnectionError, OSError) as error:
        raise AskError(Reason.CUT, f"the stream ended within the answer ({type(error).__name__})") from None
    return Answer(answer, time.monotonic() - began, first_byte_s, sent, received)


@dataclass(slots=True)
class Server:
    """Answers other peers' questions. An invalid question is refused and counted by reason; its stream is closed."""

    handler: Handler
    bound: BlobBound
    uplink: Uplink = field(default_factory=Uplink)
    refused: Counter[str] = field(default_factory=Counter)
    shares: QuestionShares = field(default_factory=QuestionShares)
    idle: FairShare = field(default_factory=lambda: FairShare(IDLE_STREAMS))  # streams that wait for a next question
    refusing: FairShare = field(default_factory=lambda: FairShare(LINGERING))  # streams on which we send a refusal
    private: PrivateSwarm | None = None
    # In a private swarm: the streams on which we send a refusal to a peer that is not a member.
    turning_away: FairShare = field(default_factory=lambda: FairShare(UNPROVEN_STREAMS))
    # In a private swarm, the tasks that answer on each peer's streams, so that `drop` can cancel them.
    streams: dict[PeerId, set["asyncio.Task[None]"]] = field(default_factory=dict)

    async def answer_on(self, sender: PeerId, reader: blobs.Reader, writer: blobs.Writer) -> None:
        """Answer the questions on a stream until the sender closes it, pauses for IDLE_S, or is refused.

        Args:
            sender: The peer that asks; the network has proved its id.
            reader: The reading end of the stream.
            writer: The writing end of the stream; the caller closes it.
        """
        if self.private is None:
            await self._answer_all(sender, reader, writer)
            return
        answering = asyncio.ensure_future(self._answer_all(sender, reader, writer))
        self.streams.setdefault(sender, set()).add(answering)
        try:
            await asyncio.wait([answering])
            if not answering.cancelled():  # `drop` may have cancelled the task
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
        """Answer only members of this private swarm from now on, or any peer if `private` is None."""
        self.private = private
        self.shares.enclose(private)

    def drop(self, peer: PeerId) -> None:
        """Stop answering on a peer's open streams, for example after its invitation is revoked.

        Do nothing in a public swarm.
        """
        for task in self.streams.get(peer, ()):
            task.cancel()

    async def _next_question(self, sender: PeerId, reader: blobs.Reader) -> int | None:
        """Wait for the next question, and return the length of its header in bytes.

        Return None if no question comes within IDLE_S, or if the sender already has its share of waiting streams. A
        waiting stream counts in `self.idle`, not in `self.shares`.
        """
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
        """Answer or refuse one question, and return whether the sender may send another question on the stream.

        Args:
            sender: The peer that asks.
            reader: The reading end of the stream.
            writer: The writing end of the stream.
            length: Bytes of the question's header if already read, else None.
        """
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
        """Read and answer one question, and return whether the sender may send another question on the stream.

        Raises:
            ProtocolError: If the question is refused; some of its bytes may not have been read.
        """
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
        there = await self._write(sender, writer, answer)
        if not share.known and isinstance(question.message, Question) and question.message.for_strangers:
            await asyncio.sleep(STRANGER_PAUSE_S)  # limits peers without a known record to about 300 questions/s in all
        return there

    async def _answer_proof(
        self, private: PrivateSwarm, sender: PeerId, proof: MembershipProof, writer: blobs.Writer
    ) -> bool:
        """Answer a membership proof, and return whether the sender is now a member, which may ask a question."""
        answer = private.answer(sender, proof)
        if isinstance(answer.message, Refused):
            self.refused[answer.message.reason] += 1
        return await self._write(sender, writer, answer) and private.admits(sender)

    async def _refuse(self, sender: PeerId, error: ProtocolError, reader: blobs.Reader, writer: blobs.Writer) -> None:
        member = self.private is None or self.private.admits(sender)
        room = self.refusing if member else self.turning_away
        if not room.take(sender):
            return
        try:
            if await self._write(sender, writer, Envelope(Refused(error.reason, str(error)[:200]))):
                await _linger(reader)
        except TimeoutError:
            self.refused[Reason.DEADLINE] += 1
        finally:
            room.give_back(sender)

    async def _write(self, sender: PeerId, writer: blobs.Writer, answer: Envelope) -> bool:
        """Write an answer to `sender`, and return whether the sender of the question was still connected."""
        try:
            async with asyncio.timeout(WRITE_S):
                await blobs.write(self.uplink.paced(writer, answer, sender), answer)
        except ConnectionError:
            return False
        return True


async def read_until_closed(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """Return all bytes until the other side closes the stream. Raises AskError if there are more than `most_bytes`."""
    found = b""
    while len(found) <= most_bytes and (piece := await reader.read(most_bytes + 1 - len(found))):
        found += piece
    if len(found) > most_bytes:
        raise AskError(Reason.OVERSIZE, f"the answer has more than {most_bytes} bytes")
    return found


async def _linger(reader: blobs.Reader) -> None:
    """Read and drop the rest of a refused question until its sender closes the stream, for at most LINGER_S.

    Closing a stream with unread bytes would reset the stream, and the sender could lose the refusal.
    """
    with suppress(EOFError, ConnectionError, OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            for _ in range(LINGER_CHUNKS):
                await reader.readexactly(LINGER_BYTES)

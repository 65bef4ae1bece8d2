"""Network and directory in virtual time: what libp2p and a DHT do, without sockets, bytes or waiting.

A question travels as in comm/net/streams.py: it is read within READ_S, answered within ANSWER_S, the answer is written
within WRITE_S, a peer answers MAX_STREAMS questions at a time, and the asker gives up at its deadline. Messages take
the delay of their link, and blobs the time that comm/net/shared_links.py gives them. Envelopes are handed over as they are;
only what a fault damages is written out and read again by the real codec.

    ask     question travels -> Asked at the other's host -> Reply -> answer travels -> Answered
            refused at once (nobody listens there), cut (it died), or nothing until the deadline (silence)

`NetworkFaultModel` decides what may reach whom and what happens to a message on its way; comm/net/virtual_network.py only obeys it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from decentral.comm.net.shared_links import Geography, SharedLinks, Transfer
from decentral.comm.net.streams import MAX_STREAMS, STREAM_ANSWER_S, WRITE_S
from decentral.comm.wire import blobs, codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message, Refused
from decentral.comm.wire.transport import Answer, AskError, BlobBound, Handler
from decentral.core.agenda import Agenda, Timer
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.synthetic import SyntheticBlob
from decentral.core.units import KiB, Seconds

T = TypeVar("T")
SMALL_MESSAGE_BYTES = 4 * KiB  # a message below travels without a share of the link: its delay is all that counts
CONNECT_RETRY_S = 0.3  # after a lost packet, doubled each time
CHUNK_OVERHEAD = blobs.DIGEST_BYTES
Outcome = Answer | AskError
Respond = Callable[[Envelope | None], None]
"""Takes the answer; None: there will be none, and the stream ends."""


class NetworkFaultModel(Protocol):
    """What happens on the way. The default, `Fair`, is nothing."""

    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        """Since when packets from there do not arrive; None: they do."""
        ...

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        """Of this message, with jitter and retransmissions; infinite: the stream is reset."""
        ...

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        """The bytes that arrive instead of `wire()`; None: unharmed."""
        ...

    def copies(self, source: PeerId, target: PeerId) -> int:
        """How often a question arrives."""
        ...


class NoFaults:
    def cut_off_at(self, source: PeerId, target: PeerId) -> Seconds | None:
        return None

    def delay_s(self, source: PeerId, target: PeerId, delay_s: Seconds) -> Seconds:
        return delay_s

    def damage(self, source: PeerId, target: PeerId, wire: Callable[[], bytes]) -> bytes | None:
        return None

    def copies(self, source: PeerId, target: PeerId) -> int:
        return 1


class Limited(Protocol):
    @property
    def done(self) -> bool:
        """Whether the limit no longer matters."""
        ...

    def late(self) -> None: ...


@dataclass(slots=True)
class Limit:
    """A time limit that many have: one timer for the oldest that is not done, instead of one for each."""

    agenda: Agenda
    lasts_s: Seconds
    _due: deque[tuple[Seconds, Limited]] = field(default_factory=deque)
    _armed: bool = False

    def watch(self, limited: Limited) -> None:
        self._due.append((self.agenda.now + self.lasts_s, limited))
        self._drop_done()
        self._arm()

    def _look(self) -> None:
        self._armed = False
        self._drop_done()
        while self._due and self._due[0][0] <= self.agenda.now:
            self._due.popleft()[1].late()
            self._drop_done()
        self._arm()

    def _drop_done(self) -> None:
        while self._due and self._due[0][1].done:
            self._due.popleft()

    def _arm(self) -> None:
        if self._due and not self._armed:
            self._armed = True
            self.agenda.at(self._due[0][0], self._look)


Serve = Callable[[PeerId, Envelope, Respond], None]
"""Takes a question and how to answer it, once."""


@dataclass(slots=True)
class Port:
    """Where a peer is plugged in."""

    peer: PeerId
    serve: Serve | None = None
    bound: BlobBound = lambda _: 0
    frozen: bool = False  # the process is stopped: nothing is read, and nothing it writes leaves
    open: dict["Question", Seconds] = field(default_factory=dict)  # questions here, and since when
    refused: Counter[str] = field(default_factory=Counter)
    waiting: deque[Callable[[], None]] = field(default_factory=deque)  # what happens when it thaws
    asked: dict["Question", None] = field(default_factory=dict)  # its own questions under way


@dataclass(slots=True, eq=False)
class Question:
    source: Port
    target: PeerId
    envelope: Envelope
    began: Seconds
    max_blob_bytes: int
    done: Callable[[Outcome], None] | None
    sent_bytes: int = 0
    writing: Seconds | None = None  # since when the answer is on its way
    timers: list[Timer] = field(default_factory=list)  # the asker's
    flow: Transfer | None = None


@dataclass(slots=True)
class Serving:
    """A question that is being answered at its target. It holds on to nothing once that is done."""

    network: "Network"
    port: Port
    question: Question | None

    @property
    def done(self) -> bool:
        return self.question is None

    def respond(self, answer: Envelope | None) -> None:
        """The first answer counts."""
        question, self.question = self.question, None
        if question is None:
            return
        if answer is not None:
            self.network.answer(question, self.port, answer)
        elif self.network.ports.get(self.port.peer) is self.port:
            self.port.refused[Reason.CUT] += 1
            self.network.cut(question, self.port.peer)

    def late(self) -> None:
        question, self.question = self.question, None
        if question is not None and question in self.port.open:
            self.port.refused[Reason.DEADLINE] += 1
            self.network.cut(question, self.port.peer)


@dataclass(slots=True)
class Writing:
    """An answer on its way."""

    network: "Network"
    port: Port
    question: Question

    @property
    def done(self) -> bool:
        return self.question not in self.port.open

    def late(self) -> None:
        if not self.done:
            self.port.refused[Reason.DEADLINE] += 1
            self.network.cut(self.question, self.port.peer)


class Network:
    """All ports, and what is on the wire between them."""

    def __init__(self, agenda: Agenda, geography: Geography, weather: NetworkFaultModel | None = None) -> None:
        self.agenda, self.geography = agenda, geography
        self.weather: NetworkFaultModel = weather or NoFaults()
        self.flows = SharedLinks(agenda, geography)
        self.ports: dict[PeerId, Port] = {}
        self.write_s: Seconds | None = WRITE_S
        self._answers, self._writes = Limit(agenda, STREAM_ANSWER_S), Limit(agenda, WRITE_S or 0.0)
        self._header_bytes: dict[type[Message], int] = {}

    def plug(self, peer: PeerId) -> Port:
        self.ports[peer] = Port(peer)
        return self.ports[peer]

    def unplug(self, peer: PeerId) -> None:
        """The process is gone: its own questions with it, and who asked it sees the stream end."""
        port = self.ports.pop(peer, None)
        if port is None:
            return
        for question in list(port.asked):
            self._end(question)
        for question in list(port.open):
            self.cut(question, peer)

    def thaw(self, port: Port) -> None:
        """What came, or was to leave, while it was frozen goes on in order."""
        port.frozen = False
        while port.waiting and not port.frozen:
            port.waiting.popleft()()

    # A question

    def ask(
        self,
        source: Port,
        target: PeerId,
        envelope: Envelope,
        deadline_s: Seconds,
        max_blob_bytes: int,
        done: Callable[[Outcome], None],
    ) -> None:
        """`done` is called once, with an Answer or an AskError, within `deadline_s` of virtual time."""
        question = Question(source, target, envelope, self.agenda.now, max_blob_bytes, done)
        source.asked[question] = None
        question.timers.append(self.agenda.after(deadline_s, lambda: self._fail(question, Reason.DEADLINE)))
        self._connect(question, CONNECT_RETRY_S)

    def _connect(self, question: Question, again_s: Seconds) -> None:
        """Opens the stream and sends the question; where packets are lost, TCP tries again, ever more rarely."""
        source, target = question.source.peer, question.target
        if question.done is None:
            return
        if not (self._reaches(source, target) and self._reaches(target, source)):
            self.agenda.after(again_s, lambda: self._connect(question, 2 * again_s))
        elif target not in self.ports:
            self._fail_later(question, Reason.UNREACHABLE, 2 * self.geography.delay_s(source, target))
        else:
            question.sent_bytes = self._size(question.envelope)
            for _ in range(self.weather.copies(source, target)):
                self._travel(question, source, target, question.envelope, self._arrive)

    def _arrive(self, question: Question, envelope: Envelope | ProtocolError) -> None:
        """At the target's door, in virtual time after the question has crossed the wire."""
        port = self.ports.get(question.target)
        if port is None:
            self.cut(question, question.target)
        elif port.frozen:
            port.waiting.append(lambda: self._arrive(question, envelope))
        else:
            self._serve(question, port, envelope)

    def _serve(self, question: Question, port: Port, envelope: Envelope | ProtocolError) -> None:
        if question not in port.open:
            port.open[question] = self.agenda.now
        serving = Serving(self, port, question)
        try:
            if isinstance(envelope, ProtocolError):
                raise envelope
            if len(port.open) > MAX_STREAMS:
                raise ProtocolError(Reason.BUSY, f"{MAX_STREAMS} streams are open")
            if len(envelope.blob) > port.bound(envelope.message):
                raise ProtocolError(
                    "oversize", f"{type(envelope.message).__name__} with a blob of {len(envelope.blob)} bytes"
                )
        except ProtocolError as error:
            port.refused[error.reason] += 1
            serving.respond(Envelope(Refused(error.reason, str(error)[:200])))
            return
        assert port.serve is not None, "nobody serves here"
        self._answers.watch(serving)
        port.serve(question.source.peer, envelope, serving.respond)

    def answer(self, question: Question, port: Port, answer: Envelope) -> None:
        if port.frozen:
            port.waiting.append(lambda: self.answer(question, port, answer))
            return
        if self.ports.get(port.peer) is not port or question.done is None:
            self._close(question, port)  # one of the two is gone
            return
        question.writing = self.agenda.now
        if self.write_s is not None:
            self._writes.watch(Writing(self, port, question))
        self._write(question, port, answer, CONNECT_RETRY_S)

    def _write(self, question: Question, port: Port, answer: Envelope, again_s: Seconds) -> None:
        asker = question.source.peer
        if question not in port.open:
            return
        if self._reaches(port.peer, asker):
            self._travel(question, port.peer, asker, answer, self._answered)
        else:
            self.agenda.after(again_s, lambda: self._write(question, port, answer, 2 * again_s))

    def _answered(self, question: Question, answer: Envelope | ProtocolError) -> None:
        source = question.source
        if source.frozen:
            source.waiting.append(lambda: self._answered(question, answer))
            return
        if isinstance(answer, ProtocolError):
            self._fail(question, answer.reason)
        elif len(answer.blob) > question.max_blob_bytes:
            self._fail(question, Reason.OVERSIZE)
        else:
            seconds = self.agenda.now - question.began
            self._finish(question, Answer(answer, seconds, question.sent_bytes, self._size(answer)))

    # Ends

    def _finish(self, question: Question, outcome: Outcome) -> None:
        done = question.done
        if done is None:
            return
        if question.source.frozen:
            question.source.waiting.append(lambda: self._finish(question, outcome))
            return
        self._end(question)
        done(outcome)

    def _fail(self, question: Question, reason: str) -> None:
        self._finish(question, AskError(reason))

    def _fail_later(self, question: Question, reason: str, delay_s: Seconds) -> None:
        question.timers.append(self.agenda.after(delay_s, lambda: self._fail(question, reason)))

    def cut(self, question: Question, at: PeerId) -> None:
        """The stream ends at the target; the asker hears of it if packets still pass."""
        port = self.ports.get(at)
        if port is not None:
            self._close(question, port)
        if question.done is not None and self._reaches(at, question.source.peer):
            self._fail_later(question, Reason.CUT, self.geography.delay_s(at, question.source.peer))

    def _end(self, question: Question) -> None:
        """The stream ends at the asker. The target notices when it writes, if packets still pass."""
        question.done = None
        question.source.asked.pop(question, None)
        for timer in question.timers:
            timer.cancel()
        self._stop_flow(question)
        port = self.ports.get(question.target)
        if port is not None and question.writing is not None and self._reaches(question.source.peer, question.target):
            self._close(question, port)

    def _close(self, question: Question, port: Port) -> None:
        port.open.pop(question, None)
        self._stop_flow(question)

    def _stop_flow(self, question: Question) -> None:
        if question.flow is not None:
            self.flows.stop(question.flow)
            question.flow = None

    # The wire

    def _reaches(self, source: PeerId, target: PeerId) -> bool:
        return self.weather.cut_off_at(source, target) is None

    def _travel(
        self,
        question: Question,
        source: PeerId,
        target: PeerId,
        envelope: Envelope,
        arrived: Callable[[Question, Envelope | ProtocolError], None],
    ) -> None:
        delay_s = self.weather.delay_s(source, target, self.geography.delay_s(source, target))
        if delay_s == float("inf"):
            self._fail_later(question, Reason.CUT, 2 * self.geography.delay_s(source, target))
            return
        wire = self.weather.damage(source, target, lambda: written(envelope))
        if wire is not None:
            bound = question.max_blob_bytes if target == question.source.peer else None
            port = self.ports.get(target)
            limit = (lambda _: bound) if bound is not None else port.bound if port else (lambda _: 0)
            late = _read(wire, limit)
        else:
            late = envelope

        def landed() -> None:
            question.flow = None
            self.agenda.after(delay_s, lambda: arrived(question, late))

        size = self._size(envelope)
        if size <= SMALL_MESSAGE_BYTES:
            landed()
        else:
            question.flow = self.flows.start(source, target, size, landed)

    def _size(self, envelope: Envelope) -> int:
        """Bytes on the wire. Headers of one kind differ by a few bytes; the first one stands for all."""
        kind = type(envelope.message)
        if kind not in self._header_bytes:
            self._header_bytes[kind] = 4 + len(codec.encode(envelope.message, len(envelope.blob)))
        chunks = -(-len(envelope.blob) // blobs.CHUNK_BYTES)
        return self._header_bytes[kind] + len(envelope.blob) + chunks * CHUNK_OVERHEAD


# Damage: through the real codec


class _Bytes:
    """A stream that is all there."""

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


def written(envelope: Envelope) -> bytes:
    """The envelope on the wire. A hollow blob is written as its contents."""
    if isinstance(envelope.blob, SyntheticBlob):
        envelope = Envelope(envelope.message, b"".join(content for _, content in envelope.blob.segments))
    stream = _Bytes()
    _at_once(blobs.write(stream, envelope))
    return bytes(stream.data)


def _read(wire: bytes, bound: BlobBound) -> Envelope | ProtocolError:
    try:
        return _at_once(blobs.read(_Bytes(wire), bound))[0]
    except ProtocolError as error:
        return error
    except EOFError:
        return ProtocolError(Reason.CUT, "the stream ended early")


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never has to wait."""
    try:
        work.send(None)
    except StopIteration as over:
        return over.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


# The Transport protocol, for code that awaits


class VirtualTransport:
    """A Transport whose deadlines are in virtual time: whoever awaits it must let the agenda run."""

    def __init__(self, network: Network, peer: PeerId) -> None:
        self.peer = peer
        self._network = network
        self._port = network.plug(peer)

    async def ask(self, to: PeerId, envelope: Envelope, deadline_s: Seconds, max_blob_bytes: int) -> Answer:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._network.ask(self._port, to, envelope, deadline_s, max_blob_bytes, _unless_over(future))
        outcome = await future
        if isinstance(outcome, AskError):
            raise outcome
        return outcome

    async def serve(self, handler: Handler, bound: BlobBound) -> None:
        def serve(sender: PeerId, envelope: Envelope, respond: Respond) -> None:
            answering = asyncio.ensure_future(self.answer(handler(sender, envelope)))
            answering.add_done_callback(lambda done: respond(done.result()))

        self._port.serve, self._port.bound = serve, bound

    async def answer(self, work: Awaitable[Envelope]) -> Envelope | None:
        try:
            return await work
        except ProtocolError as error:
            self._port.refused[error.reason] += 1
            return Envelope(Refused(error.reason, str(error)[:200]))
        except (EOFError, ConnectionError, OSError):
            return None

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Everybody can find everybody."""

    @property
    def refused(self) -> Mapping[str, int]:
        return self._port.refused

    async def close(self) -> None:
        self._network.unplug(self.peer)


def _unless_over(future: "asyncio.Future[Outcome]") -> Callable[[Outcome], None]:
    def done(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    return done

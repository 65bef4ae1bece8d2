"""A network in virtual time: what libp2p does, without sockets, bytes or waiting.

A question travels as in comm/net/streams.py: it is read within READ_S, answered within STREAM_ANSWER_S, the answer is
written within WRITE_S, each asker has its share of what a peer answers at a time (comm/net/fair_shares.py), and the
asker gives up at its deadline. Messages take the delay of their link, and blobs the time that
decentral/sim/network/shared_links.py gives them; where a peer knows its uplink to be thin they leave at its pace
(decentral/sim/network/virtual_uplink.py). Envelopes are handed over as they are; only those that a fault damages go
through the real codec (decentral/sim/network/fault_model.py).

    ask     question travels -> Asked at the other's host -> Reply -> answer travels -> Answered
            refused at once (nobody listens there), cut (it died), or nothing until the deadline (silence)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from decentral.comm.net.fair_shares import QuestionShare, QuestionShares
from decentral.comm.net.streams import STREAM_ANSWER_S, WRITE_S
from decentral.comm.wire import blobs, codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MembershipProof, Message, Probe, Refused
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import Answer, Ask, AskError, BlobBound
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import KiB, Seconds
from decentral.sim.network.agenda import Action, Agenda, TimeLimit, Timer
from decentral.sim.network.congestion import WITH_HEADERS
from decentral.sim.network.fault_model import NetworkFaultModel, read, written
from decentral.sim.network.shared_links import Geography, SharedLinks, Transfer
from decentral.sim.network.virtual_proofs import ProvenAsk
from decentral.sim.network.virtual_uplink import Begin, PacedMessage, VirtualUplink

SMALL_MESSAGE_BYTES = 4 * KiB  # a smaller message takes no share of its link: its delay is all that counts
CONNECT_RETRY_S = 0.3  # after a lost packet, doubled each time
Outcome = Answer | AskError
Respond = Callable[[Envelope | None], None]
"""It takes the answer; None: there will be none, and the stream ends."""

Serve = Callable[[PeerId, Envelope, Respond], None]
"""It takes the sender, its question, and the function that takes the answer, once."""


@dataclass(slots=True)
class Port:
    """A peer's place on the network."""

    peer: PeerId
    uplink: VirtualUplink
    serve: Serve | None = None
    bound: BlobBound = lambda _: 0
    shares: QuestionShares = field(default_factory=QuestionShares)  # of the questions that are not refused
    private: PrivateSwarm | None = None  # None: the swarm is public
    frozen: bool = False  # the process is stopped: nothing is read, and nothing it writes leaves
    open: dict["OpenQuestion", Seconds] = field(default_factory=dict)  # questions to this peer, and since when
    refused: Counter[str] = field(default_factory=Counter)
    waiting: list[Callable[[], None]] = field(default_factory=list)  # what happens when the process goes on
    asked: dict["OpenQuestion", None] = field(default_factory=dict)  # questions of this peer that are under way

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Let the process go on: all that arrived or was to leave while it was frozen does so now, in order."""
        self.frozen = False
        while self.waiting and not self.frozen:
            self.waiting.pop(0)()

    def check(self, sender: PeerId, envelope: Envelope) -> None:
        """Raises ProtocolError for a question that is refused, or whose blob is too large."""
        if self.private is not None:
            self.private.check(sender, envelope.message)
        if len(envelope.blob) > self.bound(envelope.message):
            kind = type(envelope.message).__name__
            raise ProtocolError(Reason.OVERSIZE, f"{kind} with a blob of {len(envelope.blob)} bytes")


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A question from its asking until its end, and what travels for it."""

    source: Port
    target: PeerId
    envelope: Envelope
    began: Seconds
    max_blob_bytes: int
    done: Callable[[Outcome], None] | None
    writing: Seconds | None = None  # since when the answer is on its way
    first_byte_s: Seconds = 0.0  # from the question's beginning until the answer's
    timers: list[Timer] = field(default_factory=list)  # of the asker
    transfer: Transfer | None = None
    paced: PacedMessage | None = None  # what leaves piece by piece
    share: QuestionShare | None = None  # of its target's, while it is answered
    alone: bool = False  # it has its asker's uplink for itself

    def begin_share(self, shares: QuestionShares) -> QuestionShare:
        """Return its share of what its target answers; a question that arrives twice has one. Raises ProtocolError."""
        if self.share is None:
            self.share = shares.begin(self.source.peer)
        return self.share

    def begin_alone(self) -> bool:
        """Return whether the asker still waits for the answer. Then the question has the uplink for itself."""
        self.alone = self.done is not None
        return self.alone

    def end_share(self) -> None:
        if self.share is not None:
            self.share.end()
            self.share = None

    def begin_answer(self, now: Seconds) -> bool:
        """Return whether the asker still waits for the answer, which leaves now."""
        if self.done is not None:
            self.writing = now
        return self.done is not None

    def first_byte(self, arrives_at: Seconds) -> None:
        self.first_byte_s = arrives_at - self.began

    def await_turn(self, size: int, envelope: Envelope, sender: VirtualUplink, begin: Begin, landed: Action) -> None:
        """Let a message leave the sender piece by piece."""
        self.paced = sender.send(envelope, size, begin, landed)

    def begin_transfer(self, links: SharedLinks, source: PeerId, target: PeerId, size: float, done: Action) -> None:
        self.transfer = links.start(source, target, size, done)

    def landed(self) -> None:
        """Note that nothing is under way any more."""
        self.transfer = self.paced = None

    def stop_transfer(self, links: SharedLinks) -> None:
        if self.paced is not None:
            self.paced.give_up()
        if self.transfer is not None:
            links.stop(self.transfer)
        self.transfer = self.paced = None

    def end(self) -> None:
        """End the question at its asker, who hears no more of it."""
        self.done = None
        self.source.asked.pop(self, None)
        for timer in self.timers:
            timer.cancel()


@dataclass(slots=True)
class Serving:
    """A question that its target is answering. It lets go of the question once that is done."""

    network: "Network"
    port: Port
    question: OpenQuestion | None

    def respond(self, answer: Envelope | None) -> None:
        """The first answer counts; later ones are ignored."""
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
        if question is not None:
            self.network.late(question, self.port)


class Network:
    """All ports, and what travels between them. `faults` decides what happens to a message on its way."""

    def __init__(self, agenda: Agenda, geography: Geography, faults: NetworkFaultModel) -> None:
        self.agenda, self.geography, self.faults = agenda, geography, faults
        self.links = SharedLinks(agenda, geography)
        self.ports: dict[PeerId, Port] = {}
        self._answers, self._writes = TimeLimit(agenda, STREAM_ANSWER_S), TimeLimit(agenda, WRITE_S)
        self._header_bytes: dict[type[Message], int] = {}

    def plug(self, port: Port) -> None:
        self.ports[port.peer] = port

    def unplug(self, peer: PeerId) -> None:
        """The process is gone: its own questions end, and peers that asked it see their streams end."""
        port = self.ports.pop(peer, None)
        if port is None:
            return
        for question in list(port.asked):
            self._end(question)
        for question in list(port.open):
            self.cut(question, peer)

    def drop(self, port: Port, peer: PeerId) -> None:
        """Ends the questions between a port and a peer that is no member any more."""
        for question in [one for one in port.open if one.source.peer == peer]:
            self.cut(question, port.peer)
        for question in [one for one in port.asked if one.target == peer]:
            self._fail(question, Reason.CUT)

    # A question

    def ask(self, source: Port, ask: Ask, done: Callable[[Outcome], None]) -> None:
        """Calls `done` once, with an Answer or an AskError, within `ask.deadline_s` of virtual time.

        In a private swarm up to two more questions go before, each within that time.
        """
        if source.private is None:
            self._send(source, ask, done)
        else:
            ProvenAsk(source.private, partial(self._send, source), ask, done).begin()

    def _send(self, source: Port, ask: Ask, done: Callable[[Outcome], None]) -> None:
        question = OpenQuestion(source, ask.to, ask.envelope, self.agenda.now, ask.max_blob_bytes, done)
        source.asked[question] = None
        question.timers.append(self.agenda.after(ask.deadline_s, lambda: self._fail(question, Reason.DEADLINE)))
        if _is_upload_probe(question):
            source.uplink.hold(lambda: self._probe(question))
        else:
            self._connect(question, CONNECT_RETRY_S)

    def _probe(self, question: OpenQuestion) -> bool:
        """Sends an upload probe, and gives whether anybody waits for its answer."""
        if question.begin_alone():
            self._connect(question, CONNECT_RETRY_S)
        return question.alone

    def _connect(self, question: OpenQuestion, again_s: Seconds) -> None:
        """Opens the stream and sends the question. Where packets are lost, TCP tries again, ever more rarely."""
        source, target = question.source.peer, question.target
        if question.done is None:
            return
        if not (self._reaches(source, target) and self._reaches(target, source)):
            self.agenda.after(again_s, lambda: self._connect(question, 2 * again_s))
        elif target not in self.ports:
            self._fail_later(question, Reason.UNREACHABLE, 2 * self.geography.delay_s(source, target))
        else:
            arriving = None
            for _ in range(self.faults.copies(source, target)):
                arriving = self._travel(question, question.envelope, arriving=arriving)

    def _arrive(self, question: OpenQuestion, envelope: Envelope | ProtocolError) -> None:
        """The question has crossed the wire."""
        port = self.ports.get(question.target)
        if port is None:
            self.cut(question, question.target)
        elif port.frozen:
            port.waiting.append(lambda: self._arrive(question, envelope))
        else:
            self._serve(question, port, envelope)

    def _serve(self, question: OpenQuestion, port: Port, envelope: Envelope | ProtocolError) -> None:
        if question not in port.open:
            port.open[question] = self.agenda.now
        serving = Serving(self, port, question)
        try:
            if isinstance(envelope, ProtocolError):
                raise envelope
            share = question.begin_share(port.shares)
            port.check(question.source.peer, envelope)
            if not share.blob_bytes:
                share.reserve(len(envelope.blob))
        except ProtocolError as error:
            port.refused[error.reason] += 1
            serving.respond(Envelope(Refused(error.reason, str(error)[:200])))
            return
        if port.private is not None and isinstance(envelope.message, MembershipProof):
            serving.respond(port.private.answer(question.source.peer, envelope.message))
            return
        assert port.serve is not None, "nobody serves here"
        self._answers.watch(lambda: serving.question is None, serving.late)
        port.serve(question.source.peer, envelope, serving.respond)

    def answer(self, question: OpenQuestion, port: Port, answer: Envelope) -> None:
        if port.frozen:
            port.waiting.append(lambda: self.answer(question, port, answer))
            return
        if self.ports.get(port.peer) is not port or not question.begin_answer(self.agenda.now):
            self._close(question, port)  # one of the two is gone
            return
        self._writes.watch(lambda: question not in port.open, lambda: self.late(question, port))
        self._write(question, port, answer, CONNECT_RETRY_S)

    def _write(self, question: OpenQuestion, port: Port, answer: Envelope, again_s: Seconds) -> None:
        if question not in port.open:
            return
        if self._reaches(port.peer, question.source.peer):
            self._travel(question, answer, back=True)
        else:
            self.agenda.after(again_s, lambda: self._write(question, port, answer, 2 * again_s))

    def _answered(self, question: OpenQuestion, answer: Envelope | ProtocolError) -> None:
        source = question.source
        if source.frozen:
            source.waiting.append(lambda: self._answered(question, answer))
            return
        if isinstance(answer, ProtocolError):
            self._fail(question, answer.reason)
        elif len(answer.blob) > question.max_blob_bytes:
            self._fail(question, Reason.OVERSIZE)
        else:
            took_s, sent, received = self.agenda.now - question.began, self._size(question.envelope), self._size(answer)
            self._finish(question, Answer(answer, took_s, question.first_byte_s, sent, received))

    # Ends

    def _finish(self, question: OpenQuestion, outcome: Outcome) -> None:
        done = question.done
        if done is None:
            return
        if question.source.frozen:
            question.source.waiting.append(lambda: self._finish(question, outcome))
            return
        self._end(question)
        done(outcome)

    def _fail(self, question: OpenQuestion, reason: str) -> None:
        self._finish(question, AskError(reason))

    def _fail_later(self, question: OpenQuestion, reason: str, delay_s: Seconds) -> None:
        question.timers.append(self.agenda.after(delay_s, lambda: self._fail(question, reason)))

    def late(self, question: OpenQuestion, port: Port) -> None:
        """Ends a stream on which the port has worked for too long."""
        if question in port.open:
            port.refused[Reason.DEADLINE] += 1
            self.cut(question, port.peer)

    def cut(self, question: OpenQuestion, at: PeerId) -> None:
        """Ends the stream at the target; the asker hears of it if packets still pass."""
        port = self.ports.get(at)
        if port is not None:
            self._close(question, port)
        if question.done is not None and self._reaches(at, question.source.peer):
            self._fail_later(question, Reason.CUT, self.geography.delay_s(at, question.source.peer))

    def _end(self, question: OpenQuestion) -> None:
        """Ends the stream at the asker. The target notices when it writes, if packets still pass."""
        question.end()
        question.stop_transfer(self.links)
        if question.alone:
            question.source.uplink.let_go()
        port = self.ports.get(question.target)
        if port is not None and question.writing is not None and self._reaches(question.source.peer, question.target):
            self._close(question, port)

    def _close(self, question: OpenQuestion, port: Port) -> None:
        if port.open.pop(question, None) is not None:
            question.end_share()
        question.stop_transfer(self.links)

    # The wire

    def _reaches(self, source: PeerId, target: PeerId) -> bool:
        return self.faults.cut_off_at(source, target) is None

    def _travel(
        self,
        question: OpenQuestion,
        envelope: Envelope,
        back: bool = False,
        arriving: Envelope | ProtocolError | None = None,
    ) -> Envelope | ProtocolError | None:
        """Sends the question to its target, or the answer `back` to the asker. Gives what arrives.

        A message that comes twice is damaged in both copies alike (`arriving`), as it was damaged before it was copied.
        """
        source, target = question.source.peer, question.target
        if back:
            source, target = target, source
        delay_s = self.faults.delay_s(source, target, self.geography.delay_s(source, target))
        if delay_s == float("inf"):
            self._fail_later(question, Reason.CUT, 2 * self.geography.delay_s(source, target))
            return arriving
        if arriving is None:
            arriving = self._as_it_arrives(question, envelope, source, target, back)
        landing = arriving

        def landed() -> None:
            question.landed()
            arrived = self._answered if back else self._arrive
            self.agenda.after(delay_s, lambda: arrived(question, landing))

        def begin(done: Callable[[], None]) -> None:
            if back:
                question.first_byte(self.agenda.now + delay_s)
            if size > SMALL_MESSAGE_BYTES:
                question.begin_transfer(self.links, source, target, size * WITH_HEADERS, done)
            else:
                self.links.use(source, target)
                done()

        size, sender = self._size(envelope), self.ports.get(source)
        if size <= SMALL_MESSAGE_BYTES:
            delay_s += self.links.queue_s(source, target)
        if sender is not None and sender.uplink.paces(envelope):
            question.await_turn(size, envelope, sender.uplink, begin, landed)
        else:
            begin(landed)
        return arriving

    def _as_it_arrives(
        self, question: OpenQuestion, envelope: Envelope, source: PeerId, target: PeerId, back: bool
    ) -> Envelope | ProtocolError:
        wire = self.faults.damage(source, target, lambda: written(envelope))
        if wire is None:
            return envelope
        port = self.ports.get(target)
        return read(wire, port.bound if port and not back else lambda _: question.max_blob_bytes if back else 0)

    def _size(self, envelope: Envelope) -> int:
        """Bytes on the wire. Headers of one kind of message differ by a few bytes; the first one stands for all."""
        kind = type(envelope.message)
        if kind not in self._header_bytes:
            self._header_bytes[kind] = 4 + len(codec.encode(envelope.message, len(envelope.blob)))
        chunks = -(-len(envelope.blob) // blobs.CHUNK_BYTES)
        return self._header_bytes[kind] + len(envelope.blob) + chunks * blobs.DIGEST_BYTES


def _is_upload_probe(question: OpenQuestion) -> bool:
    """Whether nothing else leaves the asker meanwhile, as in comm/net/streams.py."""
    return isinstance(question.envelope.message, Probe) and bool(question.envelope.blob)

"""Simulate requests and answers between peers in virtual time, as libp2p streams carry them.

Start reading at `Network.ask`. A request (question) follows the rules of comm/net/streams.py: the target must answer
within STREAM_ANSWER_S and write the answer within WRITE_S, each sender has a fair share of a target's capacity
(comm/net/fair_shares.py), and the sender gives up at its deadline. Each message takes the delay of its link. A large
message also takes the transfer time that shared_links.py computes, and leaves piece by piece if the uplink is slow
(virtual_uplink.py). Envelopes are passed as objects; only damaged ones go through the real codec (network_faults.py).

    ask     question travels -> Asked at the target's host -> Reply -> answer travels -> Answered
            The question fails at once if the target does not run, when the target's process ends, or at the deadline.
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
from decentral.sim.network.network_faults import NetworkFaults, read, written
from decentral.sim.network.shared_links import Geography, SharedLinks, Transfer
from decentral.sim.network.virtual_proofs import ProvenAsk
from decentral.sim.network.virtual_uplink import Begin, PacedMessage, VirtualUplink

SMALL_MESSAGE_BYTES = 4 * KiB  # a message up to this size takes no transfer time, only its link's delay
CONNECT_RETRY_S = 0.3  # pause before a lost packet is sent again for the first time; later pauses double
Outcome = Answer | AskError
Respond = Callable[[Envelope | None], None]
"""Takes the answer, or None if there is none and the stream ends."""

Serve = Callable[[PeerId, Envelope, Respond], None]
"""Takes the sender, its question, and the function to call once with the answer."""


@dataclass(slots=True)
class Port:
    """One peer's end of the virtual network: its uplink, its request handler, and the questions in flight."""

    peer: PeerId
    uplink: VirtualUplink
    serve: Serve | None = None
    bound: BlobBound = lambda _: 0
    shares: QuestionShares = field(default_factory=QuestionShares)  # limits the capacity that each sender uses
    private: PrivateSwarm | None = None
    frozen: bool = False
    open: dict["OpenQuestion", Seconds] = field(default_factory=dict)  # questions to this peer, and when each arrived
    refused: Counter[str] = field(default_factory=Counter)  # by reason: number of questions refused
    waiting: list[Callable[[], None]] = field(default_factory=list)  # actions to run when a frozen process resumes
    asked: dict["OpenQuestion", None] = field(default_factory=dict)  # this peer's own questions that have not ended

    def freeze(self) -> None:
        """Stop reading and writing until `thaw`."""
        self.frozen = True

    def thaw(self) -> None:
        """Resume reading and writing: process the messages that waited during the freeze, in their order."""
        self.frozen = False
        while self.waiting and not self.frozen:
            self.waiting.pop(0)()

    def check(self, sender: PeerId, envelope: Envelope) -> None:
        """Raise ProtocolError if the sender of a question is not an admitted member, or if the blob is too large."""
        if self.private is not None:
            self.private.check(sender, envelope.message)
        blobs.require_bound(envelope.message, len(envelope.blob), self.bound(envelope.message))


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A request that has not ended yet, and its message in flight: the request itself or its answer."""

    source: Port
    target: PeerId
    envelope: Envelope
    began: Seconds
    max_blob_bytes: int
    done: Callable[[Outcome], None] | None  # called with the outcome; None once the sender has the outcome
    writing: Seconds | None = None  # when the target began to send the answer; None before
    first_byte_s: Seconds = 0.0  # time from `began` until the answer's first byte arrives
    timers: list[Timer] = field(default_factory=list)
    transfer: Transfer | None = None
    paced: PacedMessage | None = None  # set while the sender's uplink sends the message piece by piece
    share: QuestionShare | None = None
    alone: bool = False  # whether the sender's other messages must wait until this question ends

    def begin_share(self, shares: QuestionShares) -> QuestionShare:
        """Return the question's share of the target's capacity, which a second copy of the question uses too.

        Raises:
            ProtocolError: If the target is busy.
        """
        if self.share is None:
            self.share = shares.begin(self.source.peer)
        return self.share

    def begin_alone(self, now: Seconds) -> bool:
        """Reserve the sender's uplink for this question, and restart its time; False if the sender has given up."""
        self.alone, self.began = self.done is not None, now
        return self.alone

    def end_share(self) -> None:
        """Release the question's share of the target's capacity."""
        if self.share is not None:
            self.share.end()
            self.share = None

    def begin_answer(self, now: Seconds) -> bool:
        """Return whether the sender still waits; if so, set `writing` to `now`."""
        if self.done is not None:
            self.writing = now
        return self.done is not None

    def first_byte(self, arrives_at: Seconds) -> None:
        """Record when the answer's first byte arrives."""
        self.first_byte_s = arrives_at - self.began

    def await_turn(self, size: int, envelope: Envelope, sender: VirtualUplink, begin: Begin, landed: Action) -> None:
        """Queue a message of `size` bytes at its sender's uplink, which sends the message piece by piece."""
        self.paced = sender.send(envelope, size, begin, landed)

    def begin_transfer(self, links: SharedLinks, source: PeerId, target: PeerId, size: float, done: Action) -> None:
        """Begin a transfer of `size` bytes from `source` to `target`; `done` is called at its end."""
        alone = self.alone and source == self.source.peer
        self.transfer = links.start(source, target, size, done, alone)

    def landed(self) -> None:
        """Record that the message in flight has arrived."""
        self.transfer = self.paced = None

    def stop_transfer(self, links: SharedLinks) -> None:
        """Stop the message in flight, if there is one."""
        if self.paced is not None:
            self.paced.give_up()
        if self.transfer is not None:
            links.stop(self.transfer)
        self.transfer = self.paced = None

    def end(self) -> None:
        """End the question for its sender: drop `done`, and cancel the sender's timers."""
        self.done = None
        self.source.asked.pop(self, None)
        for timer in self.timers:
            timer.cancel()


@dataclass(slots=True)
class Serving:
    """A question that a target is working on; `question` becomes None when it is answered or its stream is cut."""

    network: "Network"
    port: Port
    question: OpenQuestion | None

    def respond(self, answer: Envelope | None) -> None:
        """Send the answer, or cut the stream if `answer` is None; do nothing after the first call."""
        question, self.question = self.question, None
        if question is None:
            return
        if answer is not None:
            self.network.answer(question, self.port, answer)
        elif self.network.ports.get(self.port.peer) is self.port:
            self.port.refused[Reason.CUT] += 1
            self.network.cut(question, self.port.peer)

    def late(self) -> None:
        """Cut the stream if there is no answer yet; called after STREAM_ANSWER_S."""
        question, self.question = self.question, None
        if question is not None:
            self.network.late(question, self.port)


class Network:
    """The virtual network: the ports of all running peers, and the requests under way between them."""

    def __init__(self, agenda: Agenda, geography: Geography, faults: NetworkFaults) -> None:
        """Begin without ports; `faults` decides what happens to messages in flight."""
        self.agenda, self.geography, self.faults = agenda, geography, faults
        self.links = SharedLinks(agenda, geography)
        self.ports: dict[PeerId, Port] = {}
        self._answers, self._writes = TimeLimit(agenda, STREAM_ANSWER_S), TimeLimit(agenda, WRITE_S)
        self._header_bytes: dict[type[Message], int] = {}

    def plug(self, port: Port) -> None:
        """Connect a peer's port."""
        self.ports[port.peer] = port

    def unplug(self, peer: PeerId) -> None:
        """Disconnect a peer whose process has ended: end the questions that it asked, and cut the questions to it."""
        port = self.ports.pop(peer, None)
        if port is None:
            return
        for question in list(port.asked):
            self._end(question)
        for question in list(port.open):
            self.cut(question, peer)

    def drop(self, port: Port, peer: PeerId) -> None:
        """End all questions in both directions between a port and an excluded peer; each sender gets an error."""
        for question in [one for one in port.open if one.source.peer == peer]:
            self.cut(question, port.peer)
        for question in [one for one in port.asked if one.target == peer]:
            self._fail(question, Reason.CUT)

    def ask(self, source: Port, ask: Ask, done: Callable[[Outcome], None]) -> None:
        """Send a question; call `done` once, with an Answer or an AskError, within `ask.deadline_s` of virtual time.

        In a private swarm, proofs of membership may be exchanged first, or after a refusal; then the question is sent
        again. Each of these messages has its own deadline of `ask.deadline_s`.
        """
        if source.private is None:
            self._send(source, ask, done)
        else:
            ProvenAsk(source.private, partial(self._send, source), ask, done).begin()

    def _send(self, source: Port, ask: Ask, done: Callable[[Outcome], None]) -> None:
        question = OpenQuestion(source, ask.to, ask.envelope, self.agenda.now, ask.max_blob_bytes, done)
        source.asked[question] = None
        question.timers.append(self.agenda.after(ask.deadline_s, lambda: self._fail(question, Reason.DEADLINE)))
        if isinstance(ask.envelope.message, Probe) and ask.envelope.blob:  # measuring our uplink needs it free
            source.uplink.pause(lambda: self._probe(question))
        else:
            self._connect(question, CONNECT_RETRY_S)

    def _probe(self, question: OpenQuestion) -> bool:
        """Reserve the sender's uplink and send its upload probe; return False if the sender has given up."""
        if question.begin_alone(self.agenda.now):
            self._connect(question, CONNECT_RETRY_S)
        return question.alone

    def _connect(self, question: OpenQuestion, again_s: Seconds) -> None:
        """Open the stream and send the question; while packets are lost, retry at doubling intervals, as TCP does."""
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
        """Serve a question that has arrived at its target; if the target is frozen, serve it after `thaw`."""
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
        assert port.serve is not None, "a connected port has a handler"
        self._answers.watch(lambda: serving.question is None, serving.late)
        port.serve(question.source.peer, envelope, serving.respond)

    def answer(self, question: OpenQuestion, port: Port, answer: Envelope) -> None:
        """Send the answer of `port` to the sender; if the port is frozen, send it after `thaw`."""
        if port.frozen:
            port.waiting.append(lambda: self.answer(question, port, answer))
            return
        if self.ports.get(port.peer) is not port or not question.begin_answer(self.agenda.now):
            self._close(question, port)
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
        """Cut the stream of a question that `port` has not finished in time."""
        if question in port.open:
            port.refused[Reason.DEADLINE] += 1
            self.cut(question, port.peer)

    def cut(self, question: OpenQuestion, at: PeerId) -> None:
        """End a question at its target (`at`). The sender gets an error if packets of the target reach it."""
        port = self.ports.get(at)
        if port is not None:
            self._close(question, port)
        if question.done is not None and self._reaches(at, question.source.peer):
            self._fail_later(question, Reason.CUT, self.geography.delay_s(at, question.source.peer))

    def _end(self, question: OpenQuestion) -> None:
        """End a question for its sender; the target stops sending its answer if the sender's packets reach it."""
        question.end()
        question.stop_transfer(self.links)
        if question.alone:
            question.source.uplink.resume()
        port = self.ports.get(question.target)
        if port is not None and question.writing is not None and self._reaches(question.source.peer, question.target):
            self._close(question, port)

    def _close(self, question: OpenQuestion, port: Port) -> None:
        if port.open.pop(question, None) is not None:
            question.end_share()
        question.stop_transfer(self.links)

    def _reaches(self, source: PeerId, target: PeerId) -> bool:
        return self.faults.cut_off_at(source, target) is None

    def _travel(
        self,
        question: OpenQuestion,
        envelope: Envelope,
        back: bool = False,
        arriving: Envelope | ProtocolError | None = None,
    ) -> Envelope | ProtocolError | None:
        """Send the question to its target or, with `back`, the answer to the sender; return the message as it arrives.

        `arriving`: None or, for the second copy of a duplicated question, the first copy as it arrives, since both
        copies arrive with the same damage.
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
        """Return a message's size on the wire, in bytes.

        To save time, only the first header of each message type is measured; later headers count as equally long.
        """
        kind = type(envelope.message)
        if kind not in self._header_bytes:
            self._header_bytes[kind] = 4 + len(codec.encode(envelope.message, len(envelope.blob)))
        chunks = -(-len(envelope.blob) // blobs.CHUNK_BYTES)
        return self._header_bytes[kind] + len(envelope.blob) + chunks * blobs.DIGEST_BYTES

"""Answer or refuse the questions of other peers. See `Answers`.

Some answers take time: a pull waits for a snapshot, a newcomer waits for a state that the worker encodes. A question
without an answer is called open. A table has all open questions, so that this peer can refuse them when it leaves the
swarm, or gives up the fragment that a question is about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.rounds.round import Rounds
from decentral.comm.wire import messages
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PROBE_BYTES, Message, Refused
from decentral.comm.wire.transport import Asked, Effect, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import RetainedExported, StateExported
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.donor import Donor
from decentral.peers.membership.link_probes import zeros
from decentral.peers.runtime.fragment_exchanges import FragmentExchanges
from decentral.peers.runtime.handlers import Handlers, PeerEffect
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup

ROUTE_QUESTIONS = (
    messages.ForwardRequest,
    messages.Offer,
    messages.ForwardStatusQuery,
    messages.CommitDecision,
    messages.CommitQuery,
)
ROUND_QUESTIONS = (messages.RoundQuery, messages.CollectRequest)
NO_FRAGMENT = -1


class AnsweringPeer(Protocol):
    """The part of a node's interface that `Answers` uses; `Node` implements it."""

    def is_training(self) -> bool:
        """Return whether this peer trains; False while it joins and after it has left."""


@dataclass(slots=True)
class Answers:
    """The dispatcher that passes other peers' questions to their handlers, with a table of open questions."""

    setup: PresentSetup
    peer: AnsweringPeer = field(repr=False, compare=False)
    handlers: Handlers
    progress: TrainingProgress
    donor: Donor
    gossip: FragmentExchanges
    rounds: Rounds | None
    waiting: dict[int, int] = field(default_factory=dict)  # number of an open question -> its fragment or NO_FRAGMENT

    def __post_init__(self) -> None:
        """Register handlers for messages that this object answers itself, or passes to the donor or the exchanges."""
        self.handlers.register(self._any_run, messages.Hello, messages.Ping, messages.Probe)
        self.handlers.register(self._state, messages.StateRequest)
        self.handlers.register(self._pull, messages.Pull)

    def asked(self, event: Asked, now: Seconds) -> Sequence[PeerEffect]:
        """Answer or refuse another peer's question, or leave it open for a later reply.

        A question is refused if strangers may not ask it and the sender is a stranger (see `knows`), if the question
        names another run, or if it has no handler.
        """
        self.waiting[event.request] = NO_FRAGMENT
        question = event.envelope.message
        for_strangers = isinstance(question, messages.Question) and question.for_strangers
        if not for_strangers and not self.knows(event.sender):
            return [_reply(event, Refused(Reason.STRANGER))]
        if isinstance(question, messages.RunQuestion) and question.run != self.setup.now.run:
            return [_reply(event, self._other_run(question.run))]
        handler = self.handlers.find(question)
        return handler(event, now) if handler else [_reply(event, Refused(Reason.UNEXPECTED))]

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer has a valid record, or is a member of our round; all other peers are strangers."""
        return self.gossip.selection.knows(peer) or (self.rounds is not None and self.rounds.knows(peer))

    def replied(self, request: int) -> None:
        """Remove a question from the table of open questions; the node calls this method for each reply."""
        self.waiting.pop(request, None)

    def exported(self, event: StateExported | RetainedExported, now: Seconds) -> list[Effect]:
        """Return replies with the state that the worker has encoded, for the newcomers that wait for the state."""
        version = self.rounds.versions.get(event.fragment, bytes(16)) if self.rounds else bytes(16)
        return self.donor.exported(event, self._state_step, now, version)

    def refuse_about(self, given_up: Sequence[int]) -> list[Effect]:
        """Return refusals of all open questions about these fragments, because this peer gives the fragments up."""
        return [_refuse(request, Reason.FRAGMENT) for request, index in self.waiting.items() if index in given_up]

    def leave(self) -> list[Effect]:
        """Return refusals of all open questions, because this peer leaves the swarm."""
        return [_refuse(request, Reason.LEAVING) for request in sorted(self.waiting)]

    def blob_bound(self, message: Message) -> int:
        """Return the largest allowed blob in another peer's question, in bytes; 0 if the question must have none."""
        setup = self.setup.now
        match message:
            case messages.Probe():
                return MAX_PROBE_BYTES
            case messages.ForwardRequest() if setup.routes:
                return setup.routes.size(message)
        return 0

    def _any_run(self, event: Asked, now: Seconds) -> list[Effect]:
        """Answer Hello, Ping and Probe; these messages may also come from peers of other runs, or without a run."""
        match event.envelope.message:
            case messages.Hello(run):
                welcome = messages.Welcome(self.setup.now.run, self.setup.now.config.canonical())
                return [_reply(event, welcome if run in ("", self.setup.now.run) else self._other_run(run))]
            case messages.Ping(nonce):
                return [_reply(event, messages.Pong(nonce))]
            case messages.Probe(download_bytes):
                probed = messages.Probed(len(event.envelope.blob))
                return [Reply(event.request, Envelope(probed, zeros(download_bytes)))]
        raise AssertionError(f"expected Hello, Ping or Probe, got {event.envelope.message!r}")

    def lease_refusal(self, event: Asked) -> list[Effect]:
        """Return a refusal of this LeaseRequest if this peer does not train; else []."""
        return [] if self.peer.is_training() else [_reply(event, Refused(Reason.UNEXPECTED))]

    def lease(self, event: Asked, now: Seconds) -> list[Effect]:
        """Grant a LeaseRequest if we hold the fragment; this handler is for peers that never change their layers."""
        message = event.envelope.message
        assert isinstance(message, messages.LeaseRequest)
        held = message.fragment in self.setup.now.held
        return self.lease_refusal(event) or [_reply(event, messages.Done() if held else Refused(Reason.FRAGMENT))]

    def _state(self, event: Asked, now: Seconds) -> list[Effect]:
        message = event.envelope.message
        assert isinstance(message, messages.StateRequest)
        fallen_behind = self.rounds is not None and self.rounds.behind != ""
        if not self.peer.is_training() and (self.setup.now.restored_step is None or fallen_behind):
            return [_reply(event, Refused(Reason.NOT_READY))]
        known = self.knows(event.sender)
        if self.rounds and known:
            self.rounds.donor_holds.hold_for(event.sender, now)
        return self.donor.asked(event.request, event.sender, message, self._state_step, now, known)

    def _pull(self, event: Asked, now: Seconds) -> list[Effect]:
        message = event.envelope.message
        assert isinstance(message, messages.Pull)
        refusal = self.gossip.refusal(message.fragment)
        if refusal:
            return [_reply(event, refusal)]
        self.waiting[event.request] = message.fragment
        return self.gossip.tell(message.fragment, event, now)

    @property
    def _state_step(self) -> int:
        """Return the learning-rate step of our weights; newcomers get this step together with the weights."""
        return self.rounds.number if self.rounds and self.rounds.now_in else self.progress.lr_step

    def _other_run(self, run: str) -> Refused:
        return Refused(Reason.RUN, f"this peer is in {self.setup.now.run}, not in {run}"[:200])


def _refuse(request: int, reason: Reason) -> Reply:
    return Reply(request, Envelope(Refused(reason)))


def _reply(event: Asked, message: Message) -> Reply:
    return Reply(event.request, Envelope(message))

"""What other peers ask: each question gets one answer, sooner or later, or a refusal with its reason.

Some answers take time: a snapshot that is not there yet, a state that the worker encodes, a micro-batch. The
questions that wait are therefore known; they are refused when this peer leaves, or when it gives up the fragment that
they are about.
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
from decentral.peers.membership.prober import zeros
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
    def is_training(self) -> bool:
        """Whether this peer trains; else it is joining."""


@dataclass(slots=True)
class Answers:
    """Answers what no other machine is registered for in `handlers`, and gives the rest to those that are."""

    setup: PresentSetup
    peer: AnsweringPeer = field(repr=False, compare=False)
    handlers: Handlers
    progress: TrainingProgress
    donor: Donor
    gossip: FragmentExchanges
    rounds: Rounds | None
    waiting: dict[int, int] = field(default_factory=dict)  # the fragment of each open request, or NO_FRAGMENT

    def __post_init__(self) -> None:
        self.handlers.register(self._any_run, messages.Hello, messages.Ping, messages.Probe)
        self.handlers.register(self._state, messages.StateRequest)
        self.handlers.register(self._pull, messages.Pull)

    def asked(self, event: Asked, now: Seconds) -> Sequence[PeerEffect]:
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
        """Whether a peer has a standing with us: all others are answered only what a newcomer has to ask."""
        return self.gossip.selection.knows(peer) or (self.rounds is not None and self.rounds.knows(peer))

    def replied(self, request: int) -> None:
        self.waiting.pop(request, None)

    def exported(self, event: StateExported | RetainedExported, now: Seconds) -> list[Effect]:
        """The worker has encoded a state that newcomers wait for."""
        version = self.rounds.versions.get(event.fragment, bytes(16)) if self.rounds else bytes(16)
        return self.donor.exported(event, self._state_step, now, version)

    def refuse_about(self, lost: Sequence[int]) -> list[Effect]:
        """Refuses the open questions about these fragments, which this peer gives up."""
        return [_refuse(request, Reason.FRAGMENT) for request, index in self.waiting.items() if index in lost]

    def leave(self) -> list[Effect]:
        """Refuses all open questions."""
        return [_refuse(request, Reason.LEAVING) for request in sorted(self.waiting)]

    def blob_bound(self, message: Message) -> int:
        """The largest blob, in bytes, that may come with this question; 0 if it carries none."""
        setup = self.setup.now
        match message:
            case messages.Probe():
                return MAX_PROBE_BYTES
            case messages.ForwardRequest() if setup.routes:
                return setup.routes.size(message)
        return 0

    def _any_run(self, event: Asked, now: Seconds) -> list[Effect]:
        """Answers the questions that peers of any run, or of none, may ask."""
        match event.envelope.message:
            case messages.Hello(run):
                welcome = messages.Welcome(self.setup.now.run, self.setup.now.config.canonical())
                return [_reply(event, welcome if run in ("", self.setup.now.run) else self._other_run(run))]
            case messages.Ping(nonce):
                return [_reply(event, messages.Pong(nonce))]
            case messages.Probe(download_bytes):
                probed = messages.Probed(len(event.envelope.blob))
                return [Reply(event.request, Envelope(probed, zeros(download_bytes)))]
        raise AssertionError(f"nothing registers {event.envelope.message!r} here")

    def lease_refusal(self, event: Asked) -> list[Effect]:
        """Refuse a lease while this peer does not train; [] where nothing speaks against it."""
        return [] if self.peer.is_training() else [_reply(event, Refused(Reason.UNEXPECTED))]

    def lease(self, event: Asked, now: Seconds) -> list[Effect]:
        """Answer a LeaseRequest where this peer never changes its layers."""
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
        """The learning-rate step of our weights, for newcomers."""
        return self.rounds.number if self.rounds and self.rounds.now_in else self.progress.lr_step

    def _other_run(self, run: str) -> Refused:
        return Refused(Reason.RUN, f"this peer is in {self.setup.now.run}, not in {run}"[:200])


def _refuse(request: int, reason: Reason) -> Reply:
    return Reply(request, Envelope(Refused(reason)))


def _reply(event: Asked, message: Message) -> Reply:
    return Reply(event.request, Envelope(message))

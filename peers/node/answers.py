"""What others ask: which machine answers, or why nobody does. Every question gets one answer, sooner or later.

Some answers take time: a snapshot that is not there yet, a state that the compute thread encodes, a micro-batch. So the
questions that wait are known, and are refused when we leave, or give up the layers that they are about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentral.comm.rounds.round import Rounds
from decentral.comm.routes.router import Router
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    MAX_PROBE_BYTES,
    CollectRequest,
    CommitDecision,
    CommitQuery,
    Done,
    ForwardRequest,
    ForwardStatusQuery,
    Hello,
    LeaseRequest,
    Message,
    Offer,
    Ping,
    Pong,
    Probe,
    Probed,
    Pull,
    Push,
    Refused,
    RoundQuery,
    StateRequest,
    Swap,
    SwapCommit,
    Welcome,
)
from decentral.comm.wire.transport import Asked, Reply
from decentral.core.jobs import RetainedExported, StateExported
from decentral.core.machine import Effect
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.join import Donor
from decentral.peers.membership.prober import zeros
from decentral.peers.node.fragment_exchanges import FragmentExchanges
from decentral.peers.node.progress import TrainingProgress
from decentral.peers.node.setup import NodeSetup
from decentral.peers.placement.span_move import SpanMove

OF_NONE = -1
BLOB_BYTES_PER_PARAMETER = 8  # no algorithm's snapshot is larger


@dataclass(slots=True)
class Answers:
    """The machines that answer; those that this peer does without are None."""

    setup: Callable[[], NodeSetup]  # as it is now
    progress: TrainingProgress
    donor: Donor
    gossip: FragmentExchanges
    routes: Router | None
    rounds: Rounds | None
    moves: SpanMove | None
    waiting: dict[int, int] = field(default_factory=dict)  # by request: of which fragment it is, or OF_NONE

    def asked(self, event: Asked, training: bool, now: Seconds) -> list[Effect]:
        """`training`: or else joining."""
        self.waiting[event.request] = OF_NONE
        setup = self.setup()
        match event.envelope.message:
            case Hello(run):
                wanted = run in ("", setup.run)
                answer = Welcome(setup.run, setup.config.canonical())
                return [_reply(event, answer if wanted else self._other_run(run))]
            case Ping(nonce):
                return [_reply(event, Pong(nonce))]
            case Probe(download_bytes):
                probed = Probed(len(event.envelope.blob))
                return [Reply(event.request, Envelope(probed, zeros(download_bytes)))]
            case LeaseRequest(run=run, fragment=index) if run == setup.run and training:
                if self.moves:
                    return self.moves.handle(event, now)
                return [_reply(event, Done() if setup.holds(index) else Refused(Reason.FRAGMENT))]
            case StateRequest(run=run) as pull if run == setup.run:
                fallen_out = self.rounds is not None and self.rounds.behind != ""
                if not training and (setup.restored_step is None or fallen_out):
                    return [_reply(event, Refused(Reason.NOT_READY))]
                if self.rounds:
                    self.rounds.hold_for(event.sender, now)
                return self.donor.asked(event.request, event.sender, pull, self._state_step, now)
            case Pull(run=run, fragment=index) | SwapCommit(run=run, fragment=index):
                return self._gossip(event, run, index, now)
            case Swap(offered) | Push(offered):
                return self._gossip(event, offered.run, offered.fragment, now)
            case (
                ForwardRequest(run=run)
                | Offer(run=run)
                | ForwardStatusQuery(run=run)
                | CommitDecision(run=run)
                | CommitQuery(run=run)
            ) if run == setup.run and self.routes:
                return self.routes.handle(event, now)
            case RoundQuery(run=run) | CollectRequest(run=run) if run == setup.run and self.rounds:
                return self.rounds.handle(event, now)
            case (
                StateRequest(run=run)
                | ForwardRequest(run=run)
                | Offer(run=run)
                | ForwardStatusQuery(run=run)
                | CommitDecision(run=run)
                | CommitQuery(run=run)
                | RoundQuery(run=run)
                | CollectRequest(run=run)
            ) if run != setup.run:
                return [_reply(event, self._other_run(run))]
        return [_reply(event, Refused(Reason.UNEXPECTED))]

    def exported(self, event: StateExported | RetainedExported, now: Seconds) -> list[Effect]:
        """A state that newcomers wait for."""
        version = self.rounds.versions.get(event.fragment, bytes(16)) if self.rounds else bytes(16)
        return self.donor.exported(event, self._state_step, now, version)

    def part_with(self, lost: Sequence[int]) -> list[Effect]:
        """Whoever waits for something of these fragments is told that it does not come."""
        asked = [request for request, index in self.waiting.items() if index in lost]
        return [Reply(request, Envelope(Refused(Reason.FRAGMENT))) for request in asked]

    def leave(self) -> list[Effect]:
        return [Reply(request, Envelope(Refused(Reason.LEAVING))) for request in sorted(self.waiting)]

    def blob_bound(self, message: Message) -> int:
        """How large a blob may come with a question; everything else carries none."""
        setup = self.setup()
        match message:
            case Probe():
                return MAX_PROBE_BYTES
            case Swap(offered) | Push(offered):
                held = {fragment.index: fragment.parameters for fragment in setup.fragments}
                known = offered.fragment in held
                return held[offered.fragment] * BLOB_BYTES_PER_PARAMETER + 1024 if known else 0
            case ForwardRequest() if setup.routes:
                return setup.routes.size(message)
        return 0

    def _gossip(self, event: Asked, run: str, index: int, now: Seconds) -> list[Effect]:
        if run != self.setup().run:
            return [_reply(event, self._other_run(run))]
        refusal = self.gossip.refusal(event.envelope.message, index)
        if refusal:
            return [_reply(event, refusal)]
        self.waiting[event.request] = index
        return self.gossip.tell(index, event, now)

    @property
    def _state_step(self) -> int:
        """Of which step our weights are, for newcomers."""
        return self.rounds.number if self.rounds and self.rounds.now_in else self.progress.lr_step

    def _other_run(self, run: str) -> Refused:
        return Refused(Reason.RUN, f"this peer is in {self.setup().run}, not in {run}"[:200])


def _reply(event: Asked, message: Message) -> Reply:
    return Reply(event.request, Envelope(message))


__all__ = ["Answers"]

"""The state of one stage execution: a micro-batch's forward and backward pass through this peer.

Start with the table TRANSITIONS (comm/pipeline/router.py draws it). Only `StageExecution.move` changes the state. An
event that the table does not list for the present state raises InvalidTransition, whose text has the execution's last
events. In state AWAY another peer has the activations: `next_hop` names that peer and all peers that were tried.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import ClassVar

from decentral.comm.pipeline.next_peer import Offers
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, ExecutionId
from decentral.comm.wire.transport import Reply
from decentral.core.fragments import Layout, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import Backward, Undo
from decentral.core.units import Seconds

EVENTS_KEPT = 16  # each execution remembers its last EVENTS_KEPT events, for the error text of InvalidTransition


class ExecutionState(Enum):
    """The state of a stage execution."""

    FORWARD = auto()  # the forward pass is queued or running
    AWAY = auto()  # the activations are at the next peer, or wait until one is found
    BACKWARD = auto()  # the gradient has come back, and the backward pass is queued or running
    IN_DOUBT = auto()  # its gradients are in a sum, and wait for the origin peer's decision to commit or abort them
    GONE = auto()  # given up while the training thread still works on it
    ENDED = auto()


# Module-level names, because looking up a member of the enum costs as much as all of StageExecution.wake_at.
FORWARD, AWAY, BACKWARD, IN_DOUBT, GONE, ENDED = ExecutionState


class ExecutionEvent(Enum):
    """An event that changes the state of a stage execution."""

    SENT_ON = auto()  # the activations are offered or sent to a next peer, for the first time or after a failure
    GRADIENT_CAME = auto()
    COMPUTED = auto()  # another peer's micro-batch: its gradients are in a sum, and await the origin peer's decision
    COMPLETED = auto()  # one of our own micro-batches: its gradients are in a sum, and its route is committed
    DECIDED = auto()  # the origin peer has committed or aborted the gradients
    GIVEN_UP = auto()  # given up while the training thread is not at work on it
    GIVEN_UP_AT_WORK = auto()  # given up during a pass on the training thread, which cannot be stopped
    THREAD_DONE = auto()  # the training thread has finished the pass during which the execution was given up


TRANSITIONS: dict[ExecutionEvent, dict[ExecutionState, ExecutionState]] = {
    ExecutionEvent.SENT_ON: {FORWARD: AWAY, AWAY: AWAY, BACKWARD: AWAY},
    ExecutionEvent.GRADIENT_CAME: {AWAY: BACKWARD},
    ExecutionEvent.COMPUTED: {FORWARD: IN_DOUBT, BACKWARD: IN_DOUBT},
    ExecutionEvent.COMPLETED: {FORWARD: ENDED, BACKWARD: ENDED},
    ExecutionEvent.DECIDED: {IN_DOUBT: ENDED},
    ExecutionEvent.GIVEN_UP: {FORWARD: ENDED, AWAY: ENDED, BACKWARD: ENDED},
    ExecutionEvent.GIVEN_UP_AT_WORK: {FORWARD: GONE, BACKWARD: GONE},
    ExecutionEvent.THREAD_DONE: {GONE: ENDED},
}


class InvalidTransition(AssertionError):
    """Raised by `StageExecution.move` for an event that TRANSITIONS does not allow: a bug in this program."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A place of activations: no peer has them, and they are offered to peers again at time `due`."""

    due: Seconds


@dataclass(frozen=True, slots=True)
class Offered:
    """A place of activations: no peer has them, and candidates were asked (Offer) how soon they could compute."""

    offers: Offers
    due: ClassVar[Seconds] = math.inf


@dataclass(frozen=True, slots=True)
class Sent:
    """A place of activations: peer `to` has them, and is asked at time `due` whether it still computes.

    While an earlier status query is unanswered, `due` is infinite.
    """

    to: PeerId
    at: Seconds  # when the activations were sent
    late_at: Seconds  # when the gradient is due at the latest
    due: Seconds
    late: bool = False  # True: the gradient did not come by `late_at`


@dataclass(slots=True)
class NextHop:
    """Activations on their way to the next peer: the payload, where it is, and the peers that were tried."""

    tokens: int
    layout: Layout
    payload: bytes  # encoded activations, kept until the backward pass is done, in case another peer needs them
    gradients: tuple[Layout, ...]  # the layouts in which the gradient may come back
    place: Paused | Offered | Sent = Paused(0.0)
    attempts: int = 0  # number of times that the activations were offered or sent
    tried: list[PeerId] = field(default_factory=list)  # peers that got the activations; all but the last have failed
    busy: list[PeerId] = field(default_factory=list)  # peers that have refused as busy since the last pause
    refusals: int = 0  # number of refusals; a set of offers that no peer accepts counts as CANDIDATES refusals
    response: BackwardResponse | None = None  # the message that came with the gradient
    gradient: bytes = b""  # the encoded gradient that came with it
    took_s: Seconds = 0.0  # from the sending of the activations to the gradient

    @property
    def most_bytes(self) -> int:
        """Return the largest size that the gradient can have, in bytes."""
        return max(map(layout_bytes, self.gradients))

    @property
    def to(self) -> PeerId | None:
        """Return the peer that has the activations; None if no peer has them."""
        return self.place.to if isinstance(self.place, Sent) else None

    def pause(self, until: Seconds) -> None:
        """Record that no peer has the activations, and that they are due to be offered again at time `until`."""
        self.place = Paused(until)

    def offer(self, peers: Collection[PeerId]) -> None:
        """Record that these peers get an Offer, and count one more attempt."""
        self.place, self.attempts = Offered(Offers(set(peers))), self.attempts + 1

    def send(self, sent: Sent) -> None:
        """Record that a peer gets the activations, and count one more attempt."""
        self.place, self.attempts = sent, self.attempts + 1
        self.tried.append(sent.to)

    def look_again(self, sent: Sent, at: Seconds, late: bool = False) -> None:
        """Set the time at which the peer that has the activations is asked whether it still computes.

        Args:
            sent: The present `place`.
            at: Time of the next status query; infinite while an earlier query is unanswered.
            late: Whether the gradient has missed its deadline.
        """
        self.place = replace(sent, due=at, late=late)


@dataclass(slots=True, kw_only=True, eq=False)
class StageExecution:
    """A micro-batch's passes through this peer: the base class of OwnExecution and ForwardedExecution."""

    own: ClassVar[bool] = False
    local_id: int  # id of the execution inside this peer, as in jobs of the training thread
    id: ExecutionId
    last: int  # first layer that this peer does not compute; the next peer begins with it
    memory_share: float  # memory that it takes, as a share of what an execution through all our layers takes
    started_at: Seconds
    until: Seconds  # when the origin peer gives the micro-batch up
    drawn: Seconds  # when the origin peer began the micro-batch, by that peer's clock
    round: int  # number of the synchronous round; 0 in asynchronous training
    sequences: int = 0
    state: ExecutionState = FORWARD
    next_hop: NextHop | None = None  # None before the forward pass is done, and from state IN_DOUBT on
    events: deque[tuple[str, ExecutionState | str]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def move(self, event: ExecutionEvent, cause: str) -> None:
        """Change the state as TRANSITIONS says, and remember `cause` for the text that `story` returns.

        Raises:
            InvalidTransition: If TRANSITIONS does not list the event for the present state.
        """
        to = TRANSITIONS[event].get(self.state)
        if to is None:
            raise InvalidTransition(f"{event.name} ({cause}) is not allowed in state {self.state.name}: {self.story()}")
        self.state = to
        self.events.append((cause, to))

    def story(self) -> str:
        """Return the last events of this execution as text, the oldest first."""
        told = (f"{what}: {to.name}" if isinstance(to, ExecutionState) else f"{what} {to}" for what, to in self.events)
        name = f"{self.id.origin}/{self.id.number}@{self.id.first}"
        so_far = "; ".join(told) or "nothing has happened yet"
        return f"{name} (local id {self.local_id}, in {self.state.name}): {so_far}"

    @property
    def sent(self) -> NextHop:
        """Return `next_hop`. Call this only between the end of the forward pass and state IN_DOUBT."""
        assert self.next_hop is not None, self.story()
        return self.next_hop

    def forward_done(self, next_hop: NextHop, sequences: int) -> None:
        """Store the results of the forward pass: the activations, and the number of sequences in the micro-batch."""
        self.next_hop, self.sequences = next_hop, sequences

    def gradient_came(self, peer: PeerId, response: BackwardResponse, gradient: bytes, took_s: Seconds) -> None:
        """Enter state BACKWARD, because the next peer has returned the gradient and this response after `took_s`."""
        self.move(ExecutionEvent.GRADIENT_CAME, f"gradient from {peer}")
        self.sent.response, self.sent.gradient, self.sent.took_s = response, gradient, took_s

    @property
    def next_id(self) -> ExecutionId:
        """Return the id of the same micro-batch's execution at the next peer."""
        return ExecutionId(self.id.origin, self.id.number, self.last)

    @property
    def order(self) -> tuple[Seconds, str, int]:
        """Return the key that sorts micro-batches by age, oldest first; it is the same on every peer."""
        return self.drawn, self.id.origin, self.id.number

    def wake_at(self) -> Seconds:
        """Return when the router must act on this execution if no event comes earlier; infinity if never."""
        if self.state is GONE:
            return math.inf
        at, hop = self.deadline(), self.next_hop
        return hop.place.due if self.state is AWAY and hop is not None and hop.place.due < at else at

    def deadline(self) -> Seconds:
        """Return when this peer gives the execution up."""
        return self.until


@dataclass(slots=True, kw_only=True, eq=False)
class OwnExecution(StageExecution):
    """An execution of a micro-batch that this peer has begun; `name` sets its number after the forward pass."""

    own: ClassVar[bool] = True

    def name(self, number: int) -> None:
        """Set the micro-batch's number, which the training thread has chosen."""
        self.id = ExecutionId(self.id.origin, number, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class ForwardedExecution(StageExecution):
    """An execution of a micro-batch that another peer has sent to this peer."""

    askers: dict[PeerId, int | None]  # for each requesting peer: id of its open request; None after the answer
    answer_by: Seconds  # we stop computing at this time, so that the last requesting peer can still try another
    answer: Envelope | None = None  # the response for every requesting peer, from state IN_DOUBT on
    in_doubt_since: Seconds = 0.0
    undo: Undo | None = None  # takes its gradients out of a sum again; None: not possible here (StageConfig.undoes)

    def deadline(self) -> Seconds:
        """Return when this peer gives the execution up, because the requesting or the origin peer waits no longer."""
        return self.until if self.state is IN_DOUBT or self.until < self.answer_by else self.answer_by

    def asked_by(self, sender: PeerId, request: int, answer_by: Seconds) -> None:
        """Add a request of a new or an earlier sender, and extend the time for computing to `answer_by`."""
        self.events.append(("asked for again by", sender))
        self.askers[sender] = request
        self.answer_by = max(self.answer_by, answer_by)

    def keep_backward(self, job: Backward) -> None:
        """Keep the job of the backward pass in `undo`, if the gradients can be undone."""
        self.undo = replace(self.undo, backward=job) if self.undo else None

    def answered(self) -> list[int]:
        """Return the ids of the requests that wait for this execution, and mark them as answered."""
        waiting = [request for request in self.askers.values() if request is not None]
        self.askers = dict.fromkeys(self.askers)
        return waiting

    def replies(self) -> list[Reply]:
        """Return a Reply to each waiting request, and mark the requests as answered; [] if no answer is known yet."""
        return [] if self.answer is None else [Reply(request, self.answer) for request in self.answered()]

    def await_decision(self, answer: Envelope, until: Seconds, now: Seconds) -> None:
        """Enter IN_DOUBT until the origin peer decides or `until` comes, and keep `answer` for all who request it."""
        self.move(ExecutionEvent.COMPUTED, "backward pass done")
        self.next_hop, self.answer, self.in_doubt_since, self.until = None, answer, now, until

"""The state of one micro-batch's forward and backward pass through this peer (drawn in comm/pipeline/router.py).

Only StageExecution.move changes the state, by the table TRANSITIONS. An event that the table does not list for the
present state raises InvalidTransition, whose text has the execution's last events. `next_hop` names the peer that has
the activations while the state is AWAY, and the peers that were asked before.
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
from decentral.core.units import Seconds

EVENTS_KEPT = 16  # of each execution, for the story that an invalid transition tells


class ExecutionState(Enum):
    FORWARD = auto()  # its forward pass waits for the training thread, or runs
    AWAY = auto()  # the next peer has its activations, or a next peer is looked for
    BACKWARD = auto()  # its gradient has come back, and its backward pass waits or runs
    HELD = auto()  # its gradients are in a sum, and its origin peer has not decided on them
    GONE = auto()  # it was given up while the training thread was at work on it
    ENDED = auto()  # it has left this peer


# Looking up a member of the enum costs as much as all of StageExecution.wake_at.
FORWARD, AWAY, BACKWARD, HELD, GONE, ENDED = ExecutionState


class ExecutionEvent(Enum):
    SENT_ON = auto()  # activations are offered or sent to a next peer, the first one or one after a failure
    GRADIENT_CAME = auto()
    COMPUTED = auto()  # of a forwarded micro-batch: its gradients wait for the origin peer to commit or abort
    COMPLETED = auto()  # of an own micro-batch, which commits with that
    DECIDED = auto()  # committed or aborted
    GIVEN_UP = auto()
    GIVEN_UP_AT_WORK = auto()  # during a pass on the training thread, which is waited for
    THREAD_DONE = auto()


TRANSITIONS: dict[ExecutionEvent, dict[ExecutionState, ExecutionState]] = {
    ExecutionEvent.SENT_ON: {FORWARD: AWAY, AWAY: AWAY, BACKWARD: AWAY},
    ExecutionEvent.GRADIENT_CAME: {AWAY: BACKWARD},
    ExecutionEvent.COMPUTED: {FORWARD: HELD, BACKWARD: HELD},
    ExecutionEvent.COMPLETED: {FORWARD: ENDED, BACKWARD: ENDED},
    ExecutionEvent.DECIDED: {HELD: ENDED},
    ExecutionEvent.GIVEN_UP: {FORWARD: ENDED, AWAY: ENDED, BACKWARD: ENDED},
    ExecutionEvent.GIVEN_UP_AT_WORK: {FORWARD: GONE, BACKWARD: GONE},
    ExecutionEvent.THREAD_DONE: {GONE: ENDED},
}


class InvalidTransition(AssertionError):
    """An event that TRANSITIONS does not allow in the execution's state: a bug of ours."""


@dataclass(frozen=True, slots=True)
class Paused:
    """No peer has the activations. They are offered again at `due`."""

    due: Seconds


@dataclass(frozen=True, slots=True)
class Offered:
    """Candidate peers have been asked when they could finish the execution."""

    offers: Offers
    due: ClassVar[Seconds] = math.inf


@dataclass(frozen=True, slots=True)
class Sent:
    """Peer `to` has the activations. At `due` it is asked whether it still computes; infinite during that question."""

    to: PeerId
    at: Seconds
    late_at: Seconds  # from when on it has taken too long
    due: Seconds
    late: bool = False


@dataclass(slots=True)
class NextHop:
    """Activations on their way to the next peer: the payload, where it is, and the peers that were tried."""

    tokens: int
    layout: Layout  # of the payload
    payload: bytes  # kept until the backward pass is done: another peer may have to get the same
    gradients: tuple[Layout, ...]  # the forms of its gradient
    place: Paused | Offered | Sent = Paused(0.0)
    attempts: int = 0
    tried: list[PeerId] = field(default_factory=list)  # peers that took it; all but the last have failed
    busy: list[PeerId] = field(default_factory=list)  # peers that had no memory for it, since the last pause
    refusals: int = 0
    response: BackwardResponse | None = None  # from BACKWARD on

    @property
    def most_bytes(self) -> int:
        """Return the largest size that the gradient can have, in bytes."""
        return max(map(layout_bytes, self.gradients))

    @property
    def to(self) -> PeerId | None:
        """Return the peer that has the activations; None if no peer has them."""
        return self.place.to if isinstance(self.place, Sent) else None

    def pause(self, until: Seconds) -> None:
        self.place = Paused(until)

    def offer(self, peers: Collection[PeerId]) -> None:
        self.place, self.attempts = Offered(Offers(set(peers))), self.attempts + 1

    def send(self, sent: Sent) -> None:
        self.place, self.attempts = sent, self.attempts + 1
        self.tried.append(sent.to)

    def look_again(self, sent: Sent, at: Seconds, late: bool = False) -> None:
        """Ask the peer that has the activations at time `at` whether it still computes."""
        self.place = replace(sent, due=at, late=late)


@dataclass(slots=True, kw_only=True, eq=False)
class StageExecution:
    """The fields and transitions that own and forwarded micro-batches share."""

    own: ClassVar[bool] = False
    token: int  # its name at this peer's training thread
    id: ExecutionId  # its name among peers
    last: int  # the layer at which it leaves this peer
    memory_share: float  # StageConfig.memory_share
    started_at: Seconds
    until: Seconds  # when its origin peer gives up
    drawn: Seconds  # when its origin peer began it, by the origin peer's clock
    round: int  # of synchronous training
    sequences: int = 0
    state: ExecutionState = FORWARD
    next_hop: NextHop | None = None  # while it is AWAY or BACKWARD
    events: deque[tuple[str, ExecutionState | str]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def move(self, event: ExecutionEvent, cause: str) -> None:
        """Change the state by TRANSITIONS; `cause` is kept for `story`. Raises InvalidTransition."""
        to = TRANSITIONS[event].get(self.state)
        if to is None:
            raise InvalidTransition(f"{event.name} in {self.state.name} ({cause}) is no legal move of {self.story()}")
        self.state = to
        self.events.append((cause, to))

    def story(self) -> str:
        """Return the last events of this execution as text, the oldest first."""
        told = (f"{what}: {to.name}" if isinstance(to, ExecutionState) else f"{what} {to}" for what, to in self.events)
        name = f"{self.id.origin}/{self.id.number}@{self.id.first}"
        return f"{name} (token {self.token}, in {self.state.name}): {'; '.join(told) or 'nothing has happened yet'}"

    @property
    def sent(self) -> NextHop:
        """Return `next_hop`, which exists from the end of the forward pass until the gradients are held."""
        assert self.next_hop is not None, self.story()
        return self.next_hop

    def forward_done(self, next_hop: NextHop, sequences: int) -> None:
        self.next_hop, self.sequences = next_hop, sequences

    def gradient_came(self, peer: PeerId, response: BackwardResponse) -> None:
        self.move(ExecutionEvent.GRADIENT_CAME, f"gradient from {peer}")
        self.sent.response = response

    @property
    def next_id(self) -> ExecutionId:
        """Return the id of the same micro-batch's execution at the next peer."""
        return ExecutionId(self.id.origin, self.id.number, self.last)

    @property
    def order(self) -> tuple[Seconds, str, int]:
        """Return the sort key of its micro-batch, oldest first; equal on every peer."""
        return self.drawn, self.id.origin, self.id.number

    def wake_at(self) -> Seconds:
        """Return when the router has to look at this execution, if no event comes before; infinite: never."""
        if self.state is GONE:
            return math.inf
        at, hop = self.deadline(), self.next_hop
        return hop.place.due if self.state is AWAY and hop is not None and hop.place.due < at else at

    def deadline(self) -> Seconds:
        return self.until


@dataclass(slots=True, kw_only=True, eq=False)
class OwnExecution(StageExecution):
    """A micro-batch of which this peer is the origin. `name` sets its number after the forward pass."""

    own: ClassVar[bool] = True

    def name(self, number: int) -> None:
        self.id = ExecutionId(self.id.origin, number, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class ForwardedExecution(StageExecution):
    """A micro-batch that another peer sent here."""

    askers: dict[PeerId, int | None]  # the peers before this one on its routes, and which question of each waits
    answer_by: Seconds  # when the last of them sends it elsewhere
    answer: Envelope | None = None  # from HELD on
    held_at: Seconds = 0.0  # from HELD on

    def deadline(self) -> Seconds:
        return self.until if self.state is HELD or self.until < self.answer_by else self.answer_by

    def asked_by(self, sender: PeerId, request: int, answer_by: Seconds) -> None:
        """Note a peer's request for this execution, a repeated one or one of another peer."""
        self.events.append(("asked for again by", sender))
        self.askers[sender] = request
        self.answer_by = max(self.answer_by, answer_by)

    def answered(self) -> list[int]:
        """Return the ids of the requests that wait for this execution, and mark them as answered."""
        waiting = [request for request in self.askers.values() if request is not None]
        self.askers = dict.fromkeys(self.askers)
        return waiting

    def replies(self) -> list[Reply]:
        """Return the answer for each request that waits for it, once there is one."""
        return [] if self.answer is None else [Reply(request, self.answer) for request in self.answered()]

    def hold(self, answer: Envelope, until: Seconds, now: Seconds) -> None:
        """Keep the gradients until the origin peer decides, or until `until`; all askers get `answer`."""
        self.move(ExecutionEvent.COMPUTED, "backward pass done")
        self.next_hop, self.answer, self.held_at, self.until = None, answer, now, until

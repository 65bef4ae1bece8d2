"""A stage execution: one micro-batch's way through this peer, as a table of states (drawn in comm/routes/router.py).

Each change of state goes through StageExecution.move, which raises InvalidTransition on a move that is not in MOVES,
and tells the execution's last events. What is needed only while other peers have the micro-batch is in `next_hop`.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

from decentral.comm.routes.offers import Offers
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, ExecutionId
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

MOVES: dict[ExecutionState, frozenset[ExecutionState]] = {
    FORWARD: frozenset((AWAY, HELD, GONE, ENDED)),
    AWAY: frozenset((AWAY, BACKWARD, ENDED)),  # again AWAY: another peer is asked
    BACKWARD: frozenset((AWAY, HELD, GONE, ENDED)),  # AWAY: the gradient was not usable
    HELD: frozenset((ENDED,)),
    GONE: frozenset((ENDED,)),
    ENDED: frozenset(),
}


class InvalidTransition(AssertionError):
    """An execution was moved to a state that cannot follow its own. The text has its last events."""


@dataclass(slots=True)
class NextHop:
    """The activations that an execution sends on, and which peers were asked to take them."""

    tokens: int
    layout: Layout  # of the payload
    payload: bytes  # kept until the backward pass is done: another peer may have to get the same
    gradients: tuple[Layout, ...]  # the forms of its gradient
    to: PeerId | None = None  # the peer that has the activations
    sent_at: Seconds = 0.0
    attempts: int = 0
    tried: list[PeerId] = field(default_factory=list)  # peers that took it; all but the last have failed
    busy: list[PeerId] = field(default_factory=list)  # peers that had no memory for it, since the last pause
    refusals: int = 0
    offers: Offers | None = None
    retry_at: Seconds | None = None
    look_at: Seconds | None = None  # when to ask the next peer whether it still computes
    late_at: Seconds = 0.0  # from when on it has taken too long
    late: bool = False
    response: BackwardResponse | None = None  # from BACKWARD on

    @property
    def most_bytes(self) -> int:
        """Of its gradient."""
        return max(map(layout_bytes, self.gradients))


@dataclass(slots=True, kw_only=True, eq=False)
class StageExecution:
    """What own and forwarded micro-batches have in common."""

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

    def move(self, to: ExecutionState, cause: str) -> None:
        """Goes over to another state. Raises InvalidTransition if that state cannot follow this one."""
        if to not in MOVES[self.state]:
            raise InvalidTransition(f"{self.state.name} -> {to.name} ({cause}) is no legal move of {self.story()}")
        self.state = to
        self.events.append((cause, to))

    def story(self) -> str:
        """The last events of this execution, the oldest first."""
        told = (f"{what}: {to.name}" if isinstance(to, ExecutionState) else f"{what} {to}" for what, to in self.events)
        name = f"{self.id.origin}/{self.id.number}@{self.id.first}"
        return f"{name} (token {self.token}, in {self.state.name}): {'; '.join(told) or 'nothing has happened yet'}"

    @property
    def sent(self) -> NextHop:
        """What was sent on. The execution must have left its forward pass behind, and not be held yet."""
        assert self.next_hop is not None, self.story()
        return self.next_hop

    @property
    def next_id(self) -> ExecutionId:
        """The execution of the same micro-batch at the next peer."""
        return ExecutionId(self.id.origin, self.id.number, self.last)

    @property
    def order(self) -> tuple[Seconds, str, int]:
        """The place of its micro-batch among all, the same at every peer; an older one is less."""
        return self.drawn, self.id.origin, self.id.number

    def wake_at(self) -> Seconds:
        """When something has to be done about it, if nothing happens before."""
        if self.state is GONE:
            return math.inf
        at, hop = self.deadline(), self.next_hop
        if self.state is AWAY and hop is not None:
            if hop.retry_at is not None and hop.retry_at < at:
                at = hop.retry_at
            if hop.look_at is not None and hop.look_at < at:
                at = hop.look_at
        return at

    def deadline(self) -> Seconds:
        return self.until


@dataclass(slots=True, kw_only=True, eq=False)
class OwnExecution(StageExecution):
    """A micro-batch of which this peer is the origin. It has its number from the forward pass on."""

    own: ClassVar[bool] = True


@dataclass(slots=True, kw_only=True, eq=False)
class ForwardedExecution(StageExecution):
    """A micro-batch that another peer sent here."""

    askers: dict[PeerId, int | None]  # the peers before this one on its routes, and which question of each waits
    answer_by: Seconds  # when the last of them sends it elsewhere
    answer: Envelope | None = None  # from HELD on
    held_at: Seconds = 0.0  # likewise

    def deadline(self) -> Seconds:
        return self.until if self.state is HELD or self.until < self.answer_by else self.answer_by

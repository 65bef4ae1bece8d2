"""Search for a round that this peer can join, by asking other peers. Start at `RoundSearch`.

This peer asks all peers that it knows which round they are in, and enters the first valid round that a peer names. If
no peer is in a round, the peer with the latest weights begins a round. If several peers have the latest weights, the
peer with the lowest id begins it. The other peers ask again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds.collection import COLLECT_RETRY_S, RoundTag
from decentral.comm.rounds.members import is_valid
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import RoundQuery, RoundStatus
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

QUERY_DEADLINE_S = 5.0  # a peer must answer a RoundQuery this soon; the answer needs no computation


@dataclass(frozen=True, slots=True)
class FollowTag(RoundTag):
    """The tag of a RoundQuery that asks a peer which round it is in, and also asks it to admit us as a member."""


@dataclass(frozen=True, slots=True)
class ElsewhereTag(RoundTag):
    """The tag of a RoundQuery to a peer that trains but is not in our round.

    After a network split that peer may be in another round, which may take precedence over ours.
    """


class RoundView(Protocol):
    """Interface through which rounds read what this peer knows about other peers; `PeerSelection` implements it."""

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer has a record, or has answered our Hello."""

    def acquaintances(self) -> Sequence[PeerId]:
        """Return the peers to ask for a round: those with a record, and those that answered our Hello at start-up."""

    def trainers(self) -> Sequence[PeerId]:
        """Return the other peers whose records say that they train."""

    def member_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the longest time in seconds that an answer of `size` bytes from a member may take."""


def queries(tag: RoundTag, stage: StageConfig, round: int, peers: Iterable[str]) -> list[Effect]:
    """Return effects that ask these peers (RoundQuery) which round they are in.

    `round` is the number of our round; while we are in no round, it is the round to which our weights belong. With a
    FollowTag, the questions also ask the peers to admit this peer as a member.
    """
    query = RoundQuery(stage.run, round, stage.first, stage.last, isinstance(tag, FollowTag))
    return [Ask(tag, PeerId(peer), Envelope(query), QUERY_DEADLINE_S) for peer in peers]


@dataclass(slots=True)
class RoundSearch:
    """State of this peer's search for a round to join: which peers were asked, and what they answered."""

    stage: StageConfig
    round: int  # the round to which this peer's weights belong
    asked: set[PeerId] = field(default_factory=set)  # peers that were asked and have not answered yet
    searching: dict[PeerId, int] = field(default_factory=dict)  # peer that is in no round -> round of its weights
    retry_at: Seconds | None = 0.0  # when to ask all peers again; None: they were asked, and no time is set yet

    def ask(self, view: RoundView, now: Seconds) -> list[Effect]:
        """Return questions to all peers that the view knows if `self.retry_at` has come, else []."""
        if self.retry_at is None or now < self.retry_at:
            return []
        self.asked, self.searching, self.retry_at = set(view.acquaintances()), {}, None
        return queries(FollowTag(), self.stage, self.round, sorted(self.asked))

    def heard(self, event: Answered | AskFailed) -> RoundStatus | None:
        """Record a question's outcome; return the answer's RoundStatus if it describes a valid round, else None."""
        self.asked.discard(event.peer)
        match event:
            case Answered(envelope=Envelope(RoundStatus(members=()) as status)):
                self.searching[event.peer] = status.round
            case Answered(envelope=Envelope(RoundStatus() as status)) if is_valid(status, self.stage):
                return status
        return None

    def is_ours_to_begin(self, now: Seconds) -> bool:
        """Return whether this peer must begin the first round.

        This peer must begin if all asked peers have answered or failed, no peer is in a round, and no other peer has
        precedence. Another peer has precedence if its weights are of a later round than ours, or if they are of the
        same round and its id is lower than ours. If another peer has precedence, all peers are asked again at
        `self.retry_at`.
        """
        if self.asked or self.retry_at is not None:
            return False
        first = min(((-round, peer) for peer, round in self.searching.items()), default=None)
        if first is not None and first < (-self.round, self.stage.peer):
            self.retry_at = now + COLLECT_RETRY_S
            return False
        return True

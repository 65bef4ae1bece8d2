"""The search for a round to follow.

All peers that we know are asked which round they are in. One that names its members is followed. Where none is in a
round, the peer with the latest weights begins one, the lowest of several such peers; the others ask again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds.collection import COLLECT_RETRY_S
from decentral.comm.rounds.members import is_valid
from decentral.comm.rounds.tags import FollowTag, RoundTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import RoundQuery, RoundStatus
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

QUERY_DEADLINE_S = 5.0


class RoundView(Protocol):
    """What rounds need to know of the swarm; peers/runtime/peer_selection.py has it from the roster and the meter."""

    def knows(self, peer: PeerId) -> bool:
        """Whether it has a record, or has answered our Hello."""

    def acquaintances(self) -> Sequence[PeerId]:
        """Peers that may be in the run already."""

    def trainers(self) -> Sequence[PeerId]:
        """Peers that train, as far as we know."""

    def member_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long `size` bytes from that peer may take."""


def queries(tag: RoundTag, stage: StageConfig, round: int, peers: Iterable[str]) -> list[Effect]:
    """Asks these peers which round they are in. `round` is that of our weights; a FollowTag asks to be let in, too."""
    query = RoundQuery(stage.run, round, stage.first, stage.last, isinstance(tag, FollowTag))
    return [Ask(tag, PeerId(peer), Envelope(query), QUERY_DEADLINE_S) for peer in peers]


@dataclass(slots=True)
class RoundSearch:
    stage: StageConfig
    round: int  # of our weights
    asked: set[PeerId] = field(default_factory=set)  # peers that have not answered yet
    searching: dict[PeerId, int] = field(default_factory=dict)  # peers in no round: the round of their weights
    retry_at: Seconds | None = 0.0

    def ask(self, view: RoundView, now: Seconds) -> list[Effect]:
        if self.retry_at is None or now < self.retry_at:
            return []
        self.asked, self.searching, self.retry_at = set(view.acquaintances()), {}, None
        return queries(FollowTag(), self.stage, self.round, sorted(self.asked))

    def heard(self, event: Answered | AskFailed) -> RoundStatus | None:
        """The round to follow, if the answer names one."""
        self.asked.discard(event.peer)
        match event:
            case Answered(envelope=Envelope(RoundStatus(members=()) as status)):
                self.searching[event.peer] = status.round
            case Answered(envelope=Envelope(RoundStatus() as status)) if is_valid(status, self.stage):
                return status
        return None

    def is_ours_to_begin(self, now: Seconds) -> bool:
        """Whether all have answered, none is in a round, and no other peer will begin one. Else we ask again soon."""
        if self.asked or self.retry_at is not None:
            return False
        first = min(((-round, peer) for peer, round in self.searching.items()), default=None)
        if first is not None and first < (-self.round, self.stage.peer):
            self.retry_at = now + COLLECT_RETRY_S
            return False
        return True

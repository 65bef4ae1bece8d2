"""The members of a synchronous round, as pure functions, and how long donors hold a round back for newcomers.

The members of the first round are the peer that began it. The members of each later round are those that reported in
the one before, and those that such a report lets in. So all peers that have heard the same reports agree.

A newcomer fetches the weights of one round, so every donor holds its report back until the newcomer follows that round.
A donor hold ends when the newcomer asks to be let in, HOLD_S after its last question for state, and in any case
MAX_HOLD_S after the first one of all that hold. Then no new hold begins for as long as the round was held. So whoever
asks, with however many names, holds up no more than half of the time, and one newcomer has HOLDS_EACH.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.wire.messages import (
    MAX_MEMBERS,
    MOST_FOLLOWED,
    RoundMember,
    RoundMembers,
    RoundReport,
    RoundStatus,
)
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

HOLD_S = 3.0
MAX_HOLD_S = 60.0
MOST_HOLDS = 16  # donor holds at a time
HOLDS_EACH = 3  # donor holds for one newcomer within HOLDS_AGAIN_S
HOLDS_AGAIN_S = 600.0
MOST_HELD_FOR = 1024  # newcomers whose holds are counted; beyond them, the first ones are forgotten


def whole_fragments(member: RoundMember, cuts: Sequence[Fragment]) -> list[Fragment]:
    """The whole fragments among a member's layers; none, if the model has fewer layers than it claims to hold."""
    if member.last > cuts[-1].last:
        return []
    return [cut for cut in cuts if member.first <= cut.first and cut.last <= member.last]


def own_member(stage: StageConfig) -> RoundMember:
    return RoundMember(stage.peer, stage.first, stage.last)


def own_fragments(stage: StageConfig) -> list[Fragment]:
    return whole_fragments(own_member(stage), stage.cuts)


def is_valid(status: RoundStatus, stage: StageConfig) -> bool:
    """Whether this can be a round of our run. Its members are sorted, each once, each with a whole fragment."""
    if status.round >= MOST_FOLLOWED:
        return False
    peers = [member.peer for member in status.members]
    whole = all(whole_fragments(member, stage.cuts) for member in status.members)
    return status.run == stage.run and bool(peers) and peers == sorted(set(peers)) and whole


def covers_model(members: Sequence[RoundMember], layers: int) -> bool:
    """Whether the members together hold every layer of the model."""
    return all(any(member.first <= layer < member.last for member in members) for layer in range(layers))


def micro_batch_quota(members: RoundMembers, peer: PeerId, round: int, micro_batches: int) -> int:
    """How many of the round's `micro_batches` this peer draws.

    They are divided evenly over the members that hold layer 0; which of them draw one more changes from round to round.
    """
    origins = sorted(member.peer for member in members if member.first == 0)
    if peer not in origins:
        return 0
    each, odd = divmod(micro_batches, len(origins))
    return each + ((origins.index(peer) + round) % len(origins) < odd)


def precedence(number: int, members: RoundMembers, layers: int) -> tuple[bool, int, int, list[int]]:
    """A sort key: where a swarm has fallen apart, the greater round goes on, and members of the lesser one join it.

    A round whose members can train is greater than one whose members cannot. Of two that cannot, the later one is
    greater. Otherwise more members decide, and then the lowest peer.
    """
    able = covers_model(members, layers)
    lowest = min(member.peer for member in members)
    return able, 0 if able else number, len(members), [-ord(char) for char in lowest]


def next_members(reports: Mapping[PeerId, RoundReport]) -> RoundMembers:
    """The members of the next round, sorted by peer.

    A newcomer has the span that a report gives it, even where it has reported itself. Where two reports give it
    different spans, the lower peer's report counts. Where there are too many, those that have reported stay.
    """
    seats = {report.own.peer: report.own for report in reports.values()}
    stay, newcomers = sorted(seats), dict[str, RoundMember]()
    for _, report in sorted(reports.items(), reverse=True):
        newcomers |= {member.peer: member for member in report.newcomers}
    seats |= newcomers
    peers = [*stay, *sorted(newcomers.keys() - {*stay})][:MAX_MEMBERS]
    return tuple(seats[peer] for peer in sorted(peers))


@dataclass(slots=True)
class DonorHolds:
    holds: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # when a donor hold ends, at most
    _held_since: Seconds = 0.0  # when the first of these holds began
    _rests_until: Seconds = 0.0  # no hold begins before
    _begun: dict[PeerId, tuple[int, Seconds]] = field(default_factory=dict)  # holds that began, counted until then

    def hold_for(self, peer: PeerId, now: Seconds) -> None:
        """A newcomer has asked us for state. What it gets does not depend on whether a hold is granted."""
        self.expire(now)
        if peer in self.holds:
            limit = self.holds[peer][1]
        elif self._may_hold(peer, now):
            self._held_since = self._held_since if self.holds else now
            limit = self._held_since + MAX_HOLD_S
        else:
            return
        self.holds[peer] = min(now + HOLD_S, limit), limit

    def _may_hold(self, peer: PeerId, now: Seconds) -> bool:
        """Whether a new hold may begin for this newcomer; it is counted."""
        if len(self.holds) >= MOST_HOLDS or (not self.holds and now < self._rests_until):
            return False
        count, until = self._begun.get(peer, (0, 0.0))
        count, until = (count + 1, until) if now < until else (1, now + HOLDS_AGAIN_S)
        keep_latest(self._begun, peer, (min(count, HOLDS_EACH + 1), until), MOST_HELD_FOR)
        return count <= HOLDS_EACH

    def expire(self, now: Seconds) -> None:
        self._keep({peer: hold for peer, hold in self.holds.items() if now < hold[0]}, now)

    def _keep(self, holds: dict[PeerId, tuple[Seconds, Seconds]], now: Seconds) -> None:
        """These holds go on. When the last one ends, there is a rest."""
        if self.holds and not holds:
            self._rests_until = now + (now - self._held_since)
        self.holds = holds

    def release(self, newcomer: PeerId, now: Seconds) -> None:
        """It has all the state that it needs from us."""
        self._keep({one: hold for one, hold in self.holds.items() if one != newcomer}, now)

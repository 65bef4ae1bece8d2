"""Compute the members of a synchronous round, and delay a round while newcomers fetch its weights.

Start at `next_members` and `DonorHolds`. The only member of the first round is the peer that began it. The members of
each later round are the peers that reported in the previous round, and the newcomers that these reports admit. So all
peers with the same reports agree on the members.

A newcomer must fetch all its weights from the same round. So a peer that sends its weights to a newcomer (a donor)
delays its own report, and with it the end of the round. This delay is a donor hold. A hold ends when the newcomer has
the weights and asks to become a member; or HOLD_S after its last request for weights; or MAX_HOLD_S after the first of
the simultaneous holds began. After the last hold no new hold begins for as long as the holds lasted. So newcomers delay
rounds for at most half of the time, however many names they use. One newcomer gets HOLDS_EACH holds in HOLDS_AGAIN_S.
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

HOLD_S = 3.0  # the round waits for a newcomer until the newcomer has requested no weights for this many seconds
MAX_HOLD_S = 60.0  # newcomers that fetch weights at the same time delay a round by at most this much in total
MOST_HOLDS = 16  # a peer delays the round for at most this many newcomers at the same time
HOLDS_EACH = 3  # a peer delays the round for the same newcomer at most this many times within HOLDS_AGAIN_S
HOLDS_AGAIN_S = 600.0
MOST_HELD_FOR = 1024  # we count the delays of at most this many newcomers; then the oldest count is forgotten


def whole_fragments(member: RoundMember, cuts: Sequence[Fragment]) -> list[Fragment]:
    """Return the fragments that lie wholly within a member's layers; [] if the layers reach past the model's end."""
    if member.last > cuts[-1].last:
        return []
    return [cut for cut in cuts if member.first <= cut.first and cut.last <= member.last]


def own_member(stage: StageConfig) -> RoundMember:
    """Return this peer's entry in a list of members: its id and its layers."""
    return RoundMember(stage.peer, stage.first, stage.last)


def own_fragments(stage: StageConfig) -> list[Fragment]:
    """Return the fragments that lie wholly within this peer's layers."""
    return whole_fragments(own_member(stage), stage.cuts)


def is_valid(status: RoundStatus, stage: StageConfig) -> bool:
    """Return whether `status` can describe a round of our run.

    The round's number must be below MOST_FOLLOWED (2^61). There must be at least one member. The members must be sorted
    by peer id, without repetition, and the layers of each member must contain a whole fragment.
    """
    if status.round >= MOST_FOLLOWED:
        return False
    peers = [member.peer for member in status.members]
    whole = all(whole_fragments(member, stage.cuts) for member in status.members)
    return status.run == stage.run and bool(peers) and peers == sorted(set(peers)) and whole


def covers_model(members: Sequence[RoundMember], layers: int) -> bool:
    """Return whether the members together train every layer of the model."""
    return all(any(member.first <= layer < member.last for member in members) for layer in range(layers))


def micro_batch_quota(members: RoundMembers, peer: PeerId, round: int, micro_batches: int) -> int:
    """Return how many of the round's `micro_batches` this peer must start; 0 if the peer does not train layer 0.

    The micro-batches are divided evenly among the members that train layer 0. If the division leaves a remainder, some
    of these members start one more micro-batch; other members do so in the next round.
    """
    origins = sorted(member.peer for member in members if member.first == 0)
    if peer not in origins:
        return 0
    each, odd = divmod(micro_batches, len(origins))
    return each + ((origins.index(peer) + round) % len(origins) < odd)


def precedence(number: int, members: RoundMembers, layers: int) -> tuple[bool, int, int, list[int]]:
    """Return a sort key for rounds. After a swarm has split, all peers join the round with the greatest key.

    A round whose members train the whole model has a greater key than any other round. Of two rounds that lack layers,
    the round with the larger `number` has the greater key. If this does not decide, the round with more members has the
    greater key, and of rounds with equally many members, the round with the lowest peer id.
    """
    able = covers_model(members, layers)
    lowest = min(member.peer for member in members)
    return able, 0 if able else number, len(members), [-ord(char) for char in lowest]


def next_members(reports: Mapping[PeerId, RoundReport]) -> RoundMembers:
    """Return the members of the next round, sorted by peer: those that reported, and the newcomers in their reports.

    A newcomer gets the layers that a report names for it, even if the newcomer has reported other layers itself. If
    reports differ, the report of the lowest peer id decides. Newcomers beyond MAX_MEMBERS members are left out.
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
    """The donor holds of this peer: times in which it delays the round, so that newcomers can fetch its weights."""

    holds: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # newcomer -> (end, latest allowed end)
    _held_since: Seconds = 0.0  # while there are holds: since when at least one hold has delayed the round
    _rests_until: Seconds = 0.0  # before this time, no new hold may begin
    # Newcomer -> (number of its holds, when the number is reset to 0).
    _begun: dict[PeerId, tuple[int, Seconds]] = field(default_factory=dict)

    def hold_for(self, peer: PeerId, now: Seconds) -> None:
        """Begin or prolong a hold for a newcomer that has asked this peer for weights, unless a limit forbids the hold.

        The newcomer gets the weights even without a hold.
        """
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
        """Return whether the limits allow a new hold for this newcomer; count the attempt towards HOLDS_EACH."""
        if len(self.holds) >= MOST_HOLDS or (not self.holds and now < self._rests_until):
            return False
        count, until = self._begun.get(peer, (0, 0.0))
        count, until = (count + 1, until) if now < until else (1, now + HOLDS_AGAIN_S)
        keep_latest(self._begun, peer, (min(count, HOLDS_EACH + 1), until), MOST_HELD_FOR)
        return count <= HOLDS_EACH

    def expire(self, now: Seconds) -> None:
        """Delete the holds that have ended by `now`."""
        self._keep({peer: hold for peer, hold in self.holds.items() if now < hold[0]}, now)

    def _keep(self, holds: dict[PeerId, tuple[Seconds, Seconds]], now: Seconds) -> None:
        """Replace `self.holds` by `holds`. If no hold is left, forbid new holds for as long as the holds lasted."""
        if self.holds and not holds:
            self._rests_until = now + (now - self._held_since)
        self.holds = holds

    def release(self, newcomer: PeerId, now: Seconds) -> None:
        """End the hold for a newcomer that has all the weights that it needs from this peer."""
        self._keep({one: hold for one, hold in self.holds.items() if one != newcomer}, now)

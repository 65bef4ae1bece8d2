"""The members of a synchronous round, as pure functions: all peers that have heard the same reports agree.

The members of the first round are the peer that began it. The members of each later round are those that reported in
the one before, and those that such a report lets in.
"""

from collections.abc import Mapping, Sequence

from decentral.comm.wire.messages import MAX_MEMBERS, RoundMember, RoundMembers, RoundReport
from decentral.core.ids import PeerId
from decentral.core.jobs import Fragment


def whole_fragments(member: RoundMember, cuts: Sequence[Fragment]) -> list[Fragment]:
    """The whole fragments among a member's layers; none, if the model has fewer layers than it claims to hold."""
    if member.last > cuts[-1].last:
        return []
    return [cut for cut in cuts if member.first <= cut.first and cut.last <= member.last]


def valid_members(members: RoundMembers, cuts: Sequence[Fragment]) -> bool:
    """Whether a round can have these members: sorted by peer, each once, each with a whole fragment."""
    peers = [member.peer for member in members]
    return peers == sorted(set(peers)) and all(whole_fragments(member, cuts) for member in members)


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
    different spans, the lower peer's report counts.
    """
    seats = {report.own.peer: report.own for report in reports.values()}
    for _, report in sorted(reports.items(), reverse=True):
        seats |= {member.peer: member for member in report.newcomers}
    return tuple(seats[peer] for peer in sorted(seats))[:MAX_MEMBERS]

"""What a synchronous round consists of, as pure functions of what its members say: all who have heard the same agree.

    members     of the first round: whoever began it. Then: those who reported, and those whom a report lets in
    quota       the round's micro-batches, divided evenly over the members that hold layer 0; the odd ones in turns
    named       whose gradients of which micro-batches the reports count
    versions    a fragment's version is a digest of its last one and of the sums that went into the step

ContributionRecord takes the place of comm/routes/ledger.py: what is in a peer's sums is decided by the reports, once for the whole round.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from decentral.comm.routes.ledger import CommitState, GradientEntry
from decentral.comm.wire.messages import (
    MAX_MEMBERS,
    CompletedMicroBatch,
    ExecutionId,
    Hop,
    RoundMember,
    RoundReport,
    Snapshot,
)
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.jobs import Fragment
from decentral.core.machine import Effect
from decentral.core.reasons import Reason

RoundMembers = tuple[RoundMember, ...]
Versions = dict[int, bytes]  # by fragment
VERSION_BYTES = 16


@dataclass(slots=True)
class ContributionRecord:
    """The executions whose gradients are in this round's sums."""

    quiet: bool = True
    waiting: bool = False  # nothing here keeps forward passes back: weights change between rounds only
    sealing: bool = False
    micro_batches_per_step: int = 1
    counted: int = 0
    entries: dict[int, GradientEntry] = field(default_factory=dict)  # by token
    ways: dict[int, tuple[Hop, ...]] = field(default_factory=dict)  # of our own micro-batches, after our own hop

    def add(self, token: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        self.entries[token] = entry
        return []

    def completed(self, token: int, hops: tuple[Hop, ...]) -> None:
        self.ways[token] = hops

    def commit(self, token: int) -> list[Effect]:
        return []  # the origin peer's report decides

    def abort(self, token: int) -> list[Effect]:
        return []

    def sealed(self, tokens: tuple[int, ...], slot: int = 0) -> list[Effect]:
        return []

    def stepped(self, tokens: tuple[int, ...]) -> list[Effect]:
        return []

    def look(self, quiet: bool) -> list[Effect]:
        return []

    def take(self) -> dict[int, GradientEntry]:
        """The round is over: what comes now is of the next one."""
        entries, self.entries, self.ways = self.entries, {}, {}
        return entries

    def carried(self, members: RoundMembers, own: PeerId) -> tuple[tuple[CompletedMicroBatch, ...], float]:
        """Our own micro-batches that got through, for the report, and the sum of their losses."""
        places = {PeerId(member.peer): place for place, member in enumerate(members)}
        found, loss = [], 0.0
        for token, hops in self.ways.items():
            entry = self.entries[token]
            way = [(own, entry.last), *((PeerId(hop.peer), hop.last) for hop in hops)]
            if all(peer in places for peer, _ in way):
                through = tuple(places[peer] for peer, _ in way)
                found.append(
                    CompletedMicroBatch(entry.execution.number, entry.tokens, through, tuple(end for _, end in way))
                )
                loss += entry.loss
        return tuple(found), loss


def quota(members: RoundMembers, peer: PeerId, round: int, micro_batches: int) -> int:
    """Of a peer's micro-batches; `micro_batches`: of all."""
    origins = sorted(member.peer for member in members if member.first == 0)
    if peer not in origins:
        return 0
    each, odd = divmod(micro_batches, len(origins))
    return each + ((origins.index(peer) + round) % len(origins) < odd)


def sensible(members: RoundMembers, cuts: Sequence[Fragment]) -> bool:
    """Whether they can be a round's: in order, each once, each with a fragment."""
    peers = [member.peer for member in members]
    return peers == sorted(set(peers)) and all(held(member, cuts) for member in members)


def covered(members: RoundMembers, layers: int) -> bool:
    """Whether the members together hold the model."""
    return all(any(member.first <= layer < member.last for member in members) for layer in range(layers))


def rank(number: int, members: RoundMembers, layers: int) -> tuple[bool, int, int, list[int]]:
    """Where a swarm has fallen apart, the greater round goes on, and the members of the other one join it.

    That is the one whose members can train; where none can, the later one; that of more members; of the lowest peer.
    """
    able = covered(members, layers)
    lowest = min(member.peer for member in members)
    return able, 0 if able else number, len(members), [-ord(char) for char in lowest]


def next_members(members: RoundMembers, reports: Mapping[PeerId, RoundReport]) -> RoundMembers:
    """Sorted by peer. Who was let in has a span of today; two who differ about it: the lower peer's word counts."""
    seats = {report.own.peer: report.own for report in reports.values()}
    for _, report in sorted(reports.items(), reverse=True):
        seats |= {member.peer: member for member in report.newcomers}
    return tuple(seats[peer] for peer in sorted(seats))[:MAX_MEMBERS]


def check(report: RoundReport, members: RoundMembers, origin: PeerId, cuts: Sequence[Fragment]) -> None:
    """Raises ProtocolError unless it can be what that member did in the round. All members come to the same result."""
    layers = cuts[-1].last
    if report.own.peer != origin:
        raise ProtocolError(Reason.ORIGIN, "another member's report")
    for member in (report.own, *report.newcomers):
        if not held(member, cuts):
            raise ProtocolError(Reason.SPAN, f"layers [{member.first}, {member.last})")
    if len(report.versions) != len(held(report.own, cuts)):
        raise ProtocolError(Reason.VERSIONS, f"{len(report.versions)} of them")
    edges = {cut.last for cut in cuts}
    for one in report.micro_batches:
        begins = (0, *one.ends)
        whole = len(one.members) == len(one.ends) and one.ends[-1] == layers and set(one.ends) <= edges
        if not whole or any(end <= begin for begin, end in zip(begins, one.ends, strict=False)):
            raise ProtocolError(Reason.HOPS, "its hops do not lead through the model")
        for place, begin, end in zip(one.members, begins, one.ends, strict=False):
            if place >= len(members) or not members[place].first <= begin < end <= members[place].last:
                raise ProtocolError(Reason.HOPS, "a hop through layers that its member does not hold")
        if members[one.members[0]].peer != origin:
            raise ProtocolError(Reason.HOPS, "a micro-batch that another member began")
    if len({one.number for one in report.micro_batches}) < len(report.micro_batches):
        raise ProtocolError(Reason.NUMBER, "a micro-batch twice")


def check_sum(snapshot: Snapshot, size: int, tokens: int, expected: Snapshot) -> None:
    """Raises ProtocolError unless it fits `expected`, is of at most so many tokens, and empty only if of none."""
    same = (snapshot.run, snapshot.fragment, snapshot.seq) == (expected.run, expected.fragment, expected.seq)
    if not same or snapshot.tokens > tokens:
        raise ProtocolError(Reason.UNEXPECTED, "the sum of something else")
    layout = expected.layout if snapshot.tokens else ()
    if snapshot.layout != layout or size != sum(section.size for section in layout):
        raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")


@dataclass(frozen=True, slots=True)
class RoundCount:
    """What a round's reports say together."""

    executions: frozenset[ExecutionId]  # that count, as their peers name them, of one peer
    tokens: dict[tuple[PeerId, int], int]  # of a member in a fragment: how many its sum should be of
    loss: float  # mean over all tokens


def count(
    members: RoundMembers, reports: Mapping[PeerId, RoundReport], own: PeerId, cuts: Sequence[Fragment]
) -> RoundCount:
    executions, tokens = set(), dict[tuple[PeerId, int], int]()
    for origin, report in sorted(reports.items()):
        for one in report.micro_batches:
            begin = 0
            for place, end in zip(one.members, one.ends, strict=True):
                peer = PeerId(members[place].peer)
                if peer == own:
                    executions.add(ExecutionId(origin, one.number, begin))
                for cut in cuts:
                    if begin <= cut.first and cut.last <= end:
                        tokens[peer, cut.index] = tokens.get((peer, cut.index), 0) + one.tokens
                begin = end
    whole = sum(one.tokens for report in reports.values() for one in report.micro_batches)
    return RoundCount(frozenset(executions), tokens, sum(report.loss for report in reports.values()) / max(1, whole))


def held(member: RoundMember, cuts: Sequence[Fragment]) -> list[Fragment]:
    """The whole fragments among its layers; none, if there are not as many layers."""
    if member.last > cuts[-1].last:
        return []
    return [cut for cut in cuts if member.first <= cut.first and cut.last <= member.last]


# Versions


def first_version(run: str, fragment: int, steps: int) -> bytes:
    return _digest(f"{run} {fragment} {steps}".encode())


def next_version(version: bytes, sums: Iterable[tuple[PeerId, bytes]]) -> bytes:
    """After a step with the sums of these peers, whose digests these are."""
    return _digest(version + b"".join(peer.encode() + digest for peer, digest in sorted(sums)))


def agreed(reports: Mapping[PeerId, RoundReport], cuts: Sequence[Fragment]) -> Versions:
    """Of each fragment that a member holds: what most of its holders have; in a tie, what the lowest peer has."""
    votes: dict[int, dict[bytes, list[PeerId]]] = {}  # in the order of the peers, which max keeps
    for peer, report in sorted(reports.items()):
        for cut, version in zip(held(report.own, cuts), report.versions, strict=True):
            votes.setdefault(cut.index, {}).setdefault(version, []).append(peer)
    return {index: max(found, key=lambda version: len(found[version])) for index, found in votes.items()}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=VERSION_BYTES).digest()

"""The gradients that count in a synchronous step, as pure functions of the members' reports.

    reports     name the micro-batches that came through their routes, and the members that executed their stages
    count       says which executions these are, and how many tokens each member's sum of each fragment should hold
    versions    of a fragment are digests of its last version and of the sums that went into the step

In routes without rounds each peer decides which gradients go into its own steps (comm/pipeline/ledger.py). Here the
reports decide for all peers at once, so a ContributionRecord only remembers what is in a peer's sums.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from decentral.comm.pipeline.ledger import CommitState, GradientEntry, Ledger
from decentral.comm.rounds.members import whole_fragments
from decentral.comm.wire import blobs
from decentral.comm.wire.messages import (
    CompletedMicroBatch,
    ExecutionId,
    Hop,
    RoundMember,
    RoundMembers,
    RoundReport,
    Snapshot,
)
from decentral.comm.wire.transport import Effect
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason

MOST_LOSS = 1e6  # nats of a token; the loss of as many micro-batches as a report can name is one that it can carry
Versions = dict[int, bytes]
"""A fragment's version, by the fragment's index."""


@dataclass(slots=True)
class ContributionRecord(Ledger):
    """The executions whose gradients are in this round's sums: a Ledger that leaves all decisions to the reports."""

    quiet: bool = True
    waiting: bool = False  # weights change between rounds only, so nothing keeps forward passes back
    sealing: bool = False
    micro_batches_per_step: int = 1
    entries: dict[int, GradientEntry] = field(default_factory=dict)  # by token
    ways: dict[int, tuple[Hop, ...]] = field(default_factory=dict)  # the later hops of our own complete micro-batches
    members: dict[PeerId, RoundMember] = field(default_factory=dict)  # of the round; none before the first one
    ends: frozenset[int] = frozenset()  # layers after which a fragment ends

    def begin(self, members: RoundMembers, cuts: Sequence[Fragment]) -> None:
        """A round begins."""
        self.members = {PeerId(member.peer): member for member in members}
        self.ends = frozenset(cut.last for cut in cuts)

    def believes(self, hops: Sequence[Hop], loss: float, tokens: int) -> bool:
        """Whether others would take a report that names these hops, and this loss.

        One bad micro-batch makes a whole report invalid, so what a hop says is checked before it is believed.
        """
        seats = [(hop, self.members.get(PeerId(hop.peer))) for hop in hops]
        held = all(seat and seat.first <= hop.first < hop.last <= seat.last for hop, seat in seats)
        fits = held and {hop.last for hop in hops} <= self.ends
        return (fits or not self.members) and loss <= MOST_LOSS * tokens

    def add(self, token: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        self.entries[token] = entry
        return []

    def completed(self, token: int, hops: tuple[Hop, ...]) -> None:
        self.ways[token] = hops

    def take(self) -> dict[int, GradientEntry]:
        """The entries of the round, which is over. Entries that come later belong to the next round."""
        entries, self.entries, self.ways = self.entries, {}, {}
        return entries

    def named(self, executions: Container[ExecutionId]) -> tuple[int, ...]:
        """The tokens of these executions, each once: one that was given up while the training thread had it, and came
        again, is in the sum twice. Then one of both is not named here, and the sum does not count."""
        counted = {entry.execution: token for token, entry in self.entries.items() if entry.execution in executions}
        return tuple(counted.values())

    def completed_micro_batches(
        self, members: RoundMembers, own: PeerId, cuts: Sequence[Fragment]
    ) -> tuple[list[CompletedMicroBatch], float]:
        """Our own micro-batches that members alone have executed, for the report, and the sum of their losses.

        What others would not believe is left out: for one such micro-batch they would refuse the whole report.
        """
        places = {PeerId(member.peer): place for place, member in enumerate(members)}
        found, loss = [], 0.0
        for token, hops in self.ways.items():
            entry = self.entries[token]
            route = [(own, entry.last), *((PeerId(hop.peer), hop.last) for hop in hops)]
            if all(peer in places for peer, _ in route):
                through, ends = tuple(places[peer] for peer, _ in route), tuple(end for _, end in route)
                one = CompletedMicroBatch(entry.execution.number, entry.tokens, through, ends)
                if _is_route(one, members, own, cuts) and entry.loss <= MOST_LOSS * entry.tokens:
                    found.append(one)
                    loss += entry.loss
        return found, loss


# What a member may say


def check_report(report: RoundReport, members: RoundMembers, origin: PeerId, cuts: Sequence[Fragment]) -> None:
    """Raises ProtocolError unless member `origin` can have done this in the round. All members judge alike."""
    if report.own.peer != origin:
        raise ProtocolError(Reason.ORIGIN, "another member's report")
    for member in (report.own, *report.newcomers):
        if not whole_fragments(member, cuts):
            raise ProtocolError(Reason.SPAN, f"layers [{member.first}, {member.last})")
    if len(report.versions) != len(whole_fragments(report.own, cuts)):
        raise ProtocolError(Reason.VERSIONS, f"{len(report.versions)} of them")
    if not all(_is_route(one, members, origin, cuts) for one in report.micro_batches):
        raise ProtocolError(Reason.HOPS, "a micro-batch that cannot have gone through these members")
    if len({one.number for one in report.micro_batches}) < len(report.micro_batches):
        raise ProtocolError(Reason.NUMBER, "a micro-batch twice")


def _is_route(one: CompletedMicroBatch, members: RoundMembers, origin: PeerId, cuts: Sequence[Fragment]) -> bool:
    """Whether the hops lead from the origin through the whole model, each through layers that its member holds."""
    whole = len(one.members) == len(one.ends) and one.ends[-1] == cuts[-1].last
    held = all(
        place < len(members) and members[place].first <= begin < end <= members[place].last
        for place, begin, end in zip(one.members, (0, *one.ends), one.ends, strict=False)
    )
    return whole and held and set(one.ends) <= {cut.last for cut in cuts} and members[one.members[0]].peer == origin


def check_sum(snapshot: Snapshot, size: int, tokens: int, expected: Snapshot) -> None:
    """Raises ProtocolError unless a sum is the `expected` one, of at most `tokens` tokens, in a blob of `size` bytes.

    A sum of no tokens is empty.
    """
    same = (snapshot.run, snapshot.fragment, snapshot.seq) == (expected.run, expected.fragment, expected.seq)
    if not same or snapshot.tokens > tokens:
        raise ProtocolError(Reason.UNEXPECTED, "the sum of something else")
    layout = expected.layout if snapshot.tokens else ()
    if snapshot.layout != layout or size != layout_bytes(layout):
        raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")


# What the reports say together


@dataclass(frozen=True, slots=True)
class RoundCount:
    """The sum of all reports of a round."""

    executions: frozenset[ExecutionId] = frozenset()  # our own that count, as the other peers name them
    tokens: dict[tuple[PeerId, int], int] = field(default_factory=dict)  # in each member's sum of each fragment
    loss: float = 0.0  # mean over all tokens


def count_contributions(
    members: RoundMembers, reports: Mapping[PeerId, RoundReport], own: PeerId, cuts: Sequence[Fragment]
) -> RoundCount:
    """Adds up the hops of all micro-batches in the reports; `own` is the peer whose executions are wanted."""
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


# Versions


def first_version(run: str, fragment: int, steps: int) -> bytes:
    """The version of a fragment that `steps` steps have made, and of which nothing else is known."""
    return blobs.digest(f"{run} {fragment} {steps}".encode())


def next_version(version: bytes, sums: Iterable[tuple[PeerId, bytes]]) -> bytes:
    """The version after a step with these peers' sums, given as digests. Their order does not matter."""
    return blobs.digest(version + b"".join(peer.encode() + digest for peer, digest in sorted(sums)))


def majority_versions(reports: Mapping[PeerId, RoundReport], cuts: Sequence[Fragment]) -> Versions:
    """Each fragment's version at most of its holders; in a tie, at the lowest peer."""
    votes: dict[int, dict[bytes, list[PeerId]]] = {}  # in the order of the peers, which max keeps
    for peer, report in sorted(reports.items()):
        for cut, version in zip(whole_fragments(report.own, cuts), report.versions, strict=True):
            votes.setdefault(cut.index, {}).setdefault(version, []).append(peer)
    return {index: max(found, key=lambda version: len(found[version])) for index, found in votes.items()}

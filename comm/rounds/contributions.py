"""Compute which gradients a synchronous step uses, from the reports in which members name their micro-batches.

Start at `count_contributions`.

    RoundReport     names a member's completed micro-batches, and the members that executed their stages
    RoundCount      names the executions that count, and the most tokens in each member's sum of each fragment
    version         identifies a fragment's weights: a digest of the version before the last step, and of the sums of
                    gradients in that step

In routed training without rounds, each peer decides which gradients enter its own steps (comm/pipeline/ledger.py). In a
round, all peers compute the same result from the same reports. A ContributionRecord does not decide: it only records
which executions are in this peer's sums.
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

MOST_LOSS = 1e6  # nats per token; micro-batches with a larger mean loss are left out, so RoundReport.loss is below 1e18
Versions = dict[int, bytes]
"""A fragment's version, by the fragment's index."""


@dataclass(slots=True)
class ContributionRecord(Ledger):
    """A Ledger that records which executions are in this peer's sums; it does not decide which of them count."""

    quiet: bool = True
    sealing: bool = False
    micro_batches_per_step: int = 1
    entries: dict[int, GradientEntry] = field(default_factory=dict)  # `local_id` -> execution in one of our sums
    ways: dict[int, tuple[Hop, ...]] = field(default_factory=dict)  # `local_id` of our micro-batch -> hops after ours
    members: dict[PeerId, RoundMember] = field(default_factory=dict)  # of this round; {} before the first round
    ends: frozenset[int] = frozenset()  # layers at which fragments end; a stage execution must end at one of them

    def begin(self, members: RoundMembers, cuts: Sequence[Fragment]) -> None:
        """Start a round: from now on `accepts` checks hops against these members and fragments."""
        self.members = {PeerId(member.peer): member for member in members}
        self.ends = frozenset(cut.last for cut in cuts)

    def accepts(self, hops: Sequence[Hop], loss: float, tokens: int) -> bool:
        """Return whether other members would accept a report with these hops and this loss (nats, summed over tokens).

        If not, the caller drops the next peer's answer, because one invalid micro-batch makes a whole report invalid.
        Before the first round, the hops are not checked.
        """
        seats = [(hop, self.members.get(PeerId(hop.peer))) for hop in hops]
        held = all(seat and seat.first <= hop.first < hop.last <= seat.last for hop, seat in seats)
        fits = held and {hop.last for hop in hops} <= self.ends
        return (fits or not self.members) and loss <= MOST_LOSS * tokens

    def add(self, local_id: int, entry: GradientEntry, state: CommitState) -> list[Effect]:
        """Record that this round's sum contains an execution's gradient; return no effects."""
        self.entries[local_id] = entry
        return []

    def completed(self, local_id: int, hops: tuple[Hop, ...]) -> None:
        """Record that our micro-batch is complete. `hops` are the stages that other peers executed after ours."""
        self.ways[local_id] = hops

    def take(self) -> dict[int, GradientEntry]:
        """Return this round's executions by their id at this peer, and clear the record for the next round."""
        entries, self.entries, self.ways = self.entries, {}, {}
        return entries

    def named(self, executions: Container[ExecutionId]) -> tuple[int, ...]:
        """Return the ids at this peer (`local_id`) of those of the `executions` that are in this peer's sums.

        An execution that was given up and sent again may be in a sum twice, under two ids. Only one of these ids is
        returned. The job CloseRound then finds an id in the sum that was not returned, and discards the sum.
        """
        counted = {
            entry.execution: local_id for local_id, entry in self.entries.items() if entry.execution in executions
        }
        return tuple(counted.values())

    def completed_micro_batches(
        self, members: RoundMembers, own: PeerId, cuts: Sequence[Fragment]
    ) -> tuple[list[CompletedMicroBatch], float]:
        """Return our completed micro-batches for the report, and the sum of their losses in nats.

        A micro-batch is left out if it would make other members refuse the report, for example because a peer that is
        not a member has executed a stage.
        """
        places = {PeerId(member.peer): place for place, member in enumerate(members)}
        found, loss = [], 0.0
        for local_id, hops in self.ways.items():
            entry = self.entries[local_id]
            route = [(own, entry.last), *((PeerId(hop.peer), hop.last) for hop in hops)]
            if all(peer in places for peer, _ in route):
                through, ends = tuple(places[peer] for peer, _ in route), tuple(end for _, end in route)
                one = CompletedMicroBatch(entry.execution.number, entry.tokens, through, ends)
                if _is_route(one, members, own, cuts) and entry.loss <= MOST_LOSS * entry.tokens:
                    found.append(one)
                    loss += entry.loss
        return found, loss


def check_report(report: RoundReport, members: RoundMembers, origin: PeerId, cuts: Sequence[Fragment]) -> None:
    """Check that member `origin` can have sent this report in a round with these members.

    The result depends only on the arguments, so all members decide alike.

    Raises:
        ProtocolError: If another member wrote the report; if the layers of the member or a newcomer contain no whole
            fragment; if the number of versions is not the number of the member's fragments; or if a micro-batch occurs
            twice, or has a route that is not possible.
    """
    if report.own.peer != origin:
        raise ProtocolError(Reason.ORIGIN, f"expected the report of {origin}; got the report of {report.own.peer}")
    for member in (report.own, *report.newcomers):
        if not whole_fragments(member, cuts):
            raise ProtocolError(Reason.SPAN, f"layers [{member.first}, {member.last}) must contain a whole fragment")
    count, got = len(whole_fragments(report.own, cuts)), len(report.versions)
    if got != count:
        raise ProtocolError(Reason.VERSIONS, f"expected {count} versions, one per whole fragment; got {got} versions")
    if not all(_is_route(one, members, origin, cuts) for one in report.micro_batches):
        raise ProtocolError(Reason.HOPS, "each route must lead through all layers, by members that train these layers")
    if len({one.number for one in report.micro_batches}) < len(report.micro_batches):
        raise ProtocolError(Reason.NUMBER, "the report must name each micro-batch once; it names a micro-batch twice")


def _is_route(one: CompletedMicroBatch, members: RoundMembers, origin: PeerId, cuts: Sequence[Fragment]) -> bool:
    """Return whether the route begins at `origin`, and leads through all layers by members that train these layers."""
    whole = len(one.members) == len(one.ends) and one.ends[-1] == cuts[-1].last
    held = all(
        place < len(members) and members[place].first <= begin < end <= members[place].last
        for place, begin, end in zip(one.members, (0, *one.ends), one.ends, strict=False)
    )
    return whole and held and set(one.ends) <= {cut.last for cut in cuts} and members[one.members[0]].peer == origin


def check_sum(snapshot: Snapshot, size: int, tokens: int, expected: Snapshot) -> None:
    """Check the header of a member's sum of gradients.

    Args:
        snapshot: The header.
        size: Bytes of the blob that came with the header. A sum of no tokens must have an empty blob.
        tokens: Most tokens that may be in the sum, according to the reports.
        expected: A header with the expected run, fragment, round (`seq`) and layout.

    Raises:
        ProtocolError: If the header or size differs from the expected one, or the sum has more than `tokens` tokens.
    """
    same = (snapshot.run, snapshot.fragment, snapshot.seq) == (expected.run, expected.fragment, expected.seq)
    if not same or snapshot.tokens > tokens:
        ours = f"run {expected.run!r}, fragment {expected.fragment}, round {expected.seq}, at most {tokens} tokens"
        theirs = f"run {snapshot.run!r}, fragment {snapshot.fragment}, round {snapshot.seq}, {snapshot.tokens} tokens"
        raise ProtocolError(Reason.UNEXPECTED, f"expected a sum of {ours}; got {theirs}")
    layout = expected.layout if snapshot.tokens else ()
    if snapshot.layout != layout or size != layout_bytes(layout):
        raise ProtocolError(Reason.SHAPE, f"expected our layout, {layout_bytes(layout)} bytes; got {size} bytes")


@dataclass(frozen=True, slots=True)
class RoundCount:
    """The executions and tokens that count in a round, according to the reports of all members."""

    executions: frozenset[ExecutionId] = frozenset()  # this peer's executions whose gradients the step uses
    # (member, fragment) -> the most tokens that this member's sum of the fragment may have
    tokens: dict[tuple[PeerId, int], int] = field(default_factory=dict)
    loss: float = 0.0  # mean loss over all reported tokens, in nats per token


def count_contributions(
    members: RoundMembers, reports: Mapping[PeerId, RoundReport], own: PeerId, cuts: Sequence[Fragment]
) -> RoundCount:
    """Return which executions of the peer `own` count, how many tokens members' sums may have, and the mean loss."""
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


def first_version(run: str, fragment: int, steps: int) -> bytes:
    """Return the version of a fragment whose weights come from a checkpoint: a digest of the arguments.

    `next_version` computes the later versions from this one. `steps` is the number of steps before the checkpoint.
    """
    return blobs.digest(f"{run} {fragment} {steps}".encode())


def next_version(version: bytes, sums: Iterable[tuple[PeerId, bytes]]) -> bytes:
    """Return a fragment's version after a step with `sums`: pairs (peer, digest of the peer's sum) in any order."""
    return blobs.digest(version + b"".join(peer.encode() + digest for peer, digest in sorted(sums)))


def majority_versions(reports: Mapping[PeerId, RoundReport], cuts: Sequence[Fragment]) -> Versions:
    """Return the version that most members report for each fragment; in a tie, the version of the lowest peer id."""
    votes: dict[int, dict[bytes, list[PeerId]]] = {}  # votes are entered by peer id: in a tie, the lowest id decides
    for peer, report in sorted(reports.items()):
        for cut, version in zip(whole_fragments(report.own, cuts), report.versions, strict=True):
            votes.setdefault(cut.index, {}).setdefault(version, []).append(peer)
    return {index: max(found, key=lambda version: len(found[version])) for index, found in votes.items()}

"""One synchronous round: its members, their reports and sums, and its phase. Start at `Round`.

    REPORTS    collect the members' reports
    CLOSING    the reports are complete; the training thread packs our sums of gradients
    SUMS       collect the other holders' sums of our fragments
    STEPPING   the sums are complete; the training thread takes the step
    OVER       the step was taken, or no gradients count

A follower takes the same steps without computing gradients. It has no sums of its own, so its round goes from REPORTS
to SUMS directly. If no gradients count in a round, no step is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from decentral.comm.pipeline.ledger import GradientEntry
from decentral.comm.pipeline.stage import StageConfig
from decentral.comm.rounds import contributions
from decentral.comm.rounds.collection import Collection, Key, Wanted
from decentral.comm.rounds.contributions import ContributionRecord, RoundCount, Versions
from decentral.comm.rounds.members import (
    covers_model,
    is_valid,
    micro_batch_quota,
    own_fragments,
    own_member,
    precedence,
)
from decentral.comm.rounds.search import RoundView
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CollectRequest, Refused, RoundMembers, RoundReport, RoundStatus, Snapshot
from decentral.comm.wire.transport import Effect
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Section
from decentral.core.ids import PeerId
from decentral.core.jobs import Advance, Contribution, RoundClosed, WindowClosed
from decentral.core.journal.events import CountedLine, UncountedLine, WithoutLine
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds


class RoundPhase(Enum):
    """The phase of a round; the module's docstring describes the phases."""

    REPORTS = auto()
    CLOSING = auto()
    SUMS = auto()
    STEPPING = auto()
    OVER = auto()


LEGAL_MOVES = {
    RoundPhase.REPORTS: (RoundPhase.CLOSING, RoundPhase.SUMS),
    RoundPhase.CLOSING: (RoundPhase.SUMS,),
    RoundPhase.SUMS: (RoundPhase.STEPPING, RoundPhase.OVER),
    RoundPhase.STEPPING: (RoundPhase.OVER,),
    RoundPhase.OVER: (),
}


class IllegalRoundMove(AssertionError):
    """Raised by `Round.enter` if LEGAL_MOVES does not list the new phase for the present phase."""


@dataclass(slots=True)
class Round:
    """The state of one synchronous round at this peer."""

    stage: StageConfig
    number: int
    members: RoundMembers
    acting: bool  # whether this peer computes gradients and reports; if not, it only uses the members' gradients
    view: RoundView = field(repr=False, compare=False)
    covered: bool = field(init=False)  # whether the members train all layers; if not, the round waits for newcomers
    collection: Collection = field(init=False)
    phase: RoundPhase = RoundPhase.REPORTS
    report: RoundReport | None = None  # this peer's own report; None until its micro-batches are over
    sums: dict[int, Envelope] | None = None  # this peer's own sums of gradients, by fragment; None: not complete yet
    reports: dict[PeerId, RoundReport] = field(default_factory=dict)  # ours and others', set by `count_reports`
    count: RoundCount = field(default_factory=RoundCount)
    executions: list[GradientEntry] = field(default_factory=list)  # the executions whose gradients are in our sums
    versions: Versions = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compute `self.covered`, create `self.collection`, and set `self.acting` to False if we are not a member."""
        self.acting = self.acting and self.listed
        self.covered = covers_model(self.members, self.stage.layers)
        self.collection = Collection(self.stage.run, self.number, self.listed, self)

    @property
    def peers(self) -> list[PeerId]:
        """Return the members' ids, sorted."""
        return [PeerId(member.peer) for member in self.members]

    @property
    def listed(self) -> bool:
        """Return whether the round's list of members contains this peer."""
        return self.stage.peer in self.peers

    @property
    def quota(self) -> int:
        """Return how many micro-batches this peer must start; 0 unless `self.acting` and `self.covered`."""
        drawn = self.stage.micro_batches_per_step if self.acting and self.covered else 0
        return micro_batch_quota(self.members, self.stage.peer, self.number, drawn)

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the longest time in seconds that an answer of `size` bytes from a member may take."""
        return self.view.member_deadline_s(peer, size)

    def enter(self, phase: RoundPhase) -> None:
        """Move from the present phase to `phase`.

        Raises:
            IllegalRoundMove: If `phase` may not follow the present phase.
        """
        if phase not in LEGAL_MOVES[self.phase]:
            raise IllegalRoundMove(f"round {self.number} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    def present(self) -> RoundMembers:
        """Return the members, without those that this peer has given up before it got their reports."""
        reports = [one for one in self.collection.wanted.values() if one.fragment is None]
        gone = {one.origin for one in reports if one.origin_lost and not one.found}
        return tuple(member for member in self.members if member.peer not in gone)

    @property
    def still_covered(self) -> bool:
        """Return whether the members that `present` returns train all layers of the model."""
        return covers_model(self.present(), self.stage.layers)

    def yields_to(self, status: RoundStatus) -> bool:
        """Return whether the round that `status` describes is valid and takes precedence over this round.

        Return False if this peer is already a member of that round.
        """
        if not is_valid(status, self.stage) or self.stage.peer in {member.peer for member in status.members}:
            return False
        layers = self.stage.layers
        return precedence(status.round, status.members, layers) > precedence(self.number, self.members, layers)

    def want_reports(self, now: Seconds) -> None:
        """Begin to collect the other members' reports, and our own report if a restart has deleted it."""
        for peer in self.peers:
            self._want(peer, None, 0, self.peers, now)

    def write_report(self, record: ContributionRecord, newcomers: RoundMembers, versions: Versions) -> None:
        """Set `self.report`: our completed micro-batches, the newcomers to admit, and our fragments' versions."""
        stage = self.stage
        completed, loss = record.completed_micro_batches(self.members, stage.peer, stage.cuts)
        held = tuple(versions[cut.index] for cut in own_fragments(stage))
        self.report = RoundReport(stage.run, self.number, own_member(stage), tuple(completed), loss, newcomers, held)

    def count_reports(self) -> None:
        """Store our own and the collected reports in `self.reports`, and compute `self.count` from them."""
        if self.report:
            self.reports[self.stage.peer] = self.report
        for (origin, _), wanted in self.collection.wanted.items():
            if wanted.found and isinstance(wanted.found.message, RoundReport):
                self.reports[origin] = wanted.found.message
        self.count = contributions.count_contributions(self.members, self.reports, self.stage.peer, self.stage.cuts)

    def has_diverged(self, versions: Versions) -> bool:
        """Return whether our version of any fragment differs from the version that most members report."""
        majority = contributions.majority_versions(self.reports, self.stage.cuts)
        return any(majority.get(index, version) != version for index, version in versions.items())

    def answer(self, sender: PeerId, collect: CollectRequest, over: bool) -> Envelope | None:
        """Return the answer to a peer that asks for a report or sum, ours or another member's.

        Return None while we may still get the report or sum, so that the question waits. If `over`, the round has ended
        at this peer. We then collect no more reports and sums, and refuse a question for one that we lack.
        """
        if collect.member and sender not in self.peers:
            return Envelope(Refused(Reason.EXPELLED))
        if collect.origin == self.stage.peer:
            return self._own_answer(collect.fragment)
        answer = self.collection.answer_for(PeerId(collect.origin), collect.fragment)
        return Envelope(Refused(Reason.WITHOUT)) if answer is None and over else answer

    def _own_answer(self, fragment: int | None) -> Envelope | None:
        if not self.acting:
            return Envelope(Refused(Reason.GONE))  # a restart has deleted our report and sums
        if fragment is None:
            return Envelope(self.report) if self.report else None
        if fragment not in {cut.index for cut in own_fragments(self.stage)}:
            return Envelope(Refused(Reason.FRAGMENT))
        if self.sums is None:
            return None
        return self.sums.get(fragment) or self.sum_message(WindowClosed(fragment, self.number, 0, (), b""))

    def close_sums(self, closed: RoundClosed, entries: dict[int, GradientEntry]) -> None:
        """Store our packed sums as messages, and record which executions are in these sums.

        `entries` maps each execution's id at this peer (`local_id`) to its entry.
        """
        self.executions = [entries[local_id] for local_id in closed.executions]
        self.sums = {one.fragment: self.sum_message(one) for one in closed.sums}

    def want_sums(self, now: Seconds) -> None:
        """Enter SUMS, and begin to collect other members' sums for this peer's fragments."""
        self.enter(RoundPhase.SUMS)
        self.sums = self.sums or {}
        ours = {cut.index: cut for cut in own_fragments(self.stage)}
        for peer, index in sorted(self.count.tokens):
            if index in ours:
                cut = ours[index]
                holders = [PeerId(m.peer) for m in self.members if m.first <= cut.first and cut.last <= m.last]
                self._want(peer, index, 4 * cut.parameters, holders, now)

    def advance(self, versions: Versions) -> Advance:
        """Enter STEPPING, and return the job that takes the step with all sums.

        `versions` are our fragments' versions before the step; the versions after the step are stored in
        `self.versions`.
        """
        self.enter(RoundPhase.STEPPING)
        found = {key: wanted.found for key, wanted in self.collection.wanted.items() if wanted.found}
        found |= {(self.stage.peer, fragment): envelope for fragment, envelope in (self.sums or {}).items()}
        parts = tuple((cut.index, _contributions(cut.index, found)) for cut in own_fragments(self.stage))
        for fragment, used in parts:
            digests = [(part.peer, blobs.digest(part.blob)) for part in used]
            self.versions[fragment] = contributions.next_version(versions[fragment], digests)
        own = self.report.micro_batches if self.report else ()
        after = tuple(sorted(self.versions.items()))
        return Advance(self.number, parts, after, sum(one.tokens for one in own), len(own), self.count.loss)

    def sum_message(self, closed: WindowClosed) -> Envelope:
        """Return one of our sums of gradients as a message for the other members that train its fragment."""
        digest, run = blobs.digest(closed.blob), self.stage.run
        snapshot = Snapshot(run, closed.fragment, closed.seq, closed.tokens, 0.0, closed.layout, digest)
        return Envelope(snapshot, closed.blob)

    def journal(self, refused: Sequence[tuple[int, PeerId, str]]) -> list[Effect]:
        """Return journal lines about missing reports and sums, and about which of our executions counted.

        `refused` has an entry (fragment, peer, reason) for each sum that the step did not use.
        """
        wanted = self.collection.wanted.values()
        missing = [(one.fragment, one.origin, one.reason) for one in wanted if not one.found]
        lines: list[Effect] = [
            Log(WithoutLine(round=self.number, peer=peer, fragment=fragment, reason=reason))
            for fragment, peer, reason in [*missing, *refused]
        ]
        if self.executions:
            of = tuple(entry.counted() for entry in self.executions)
            if self.sums:
                lines.append(Log(CountedLine(of=of, round=self.number)))
            else:
                named = sum(entry.execution in self.count.executions for entry in self.executions)
                lines.append(Log(UncountedLine(of=of, void=len(of) - named, round=self.number)))
        return lines

    def _want(self, origin: PeerId, fragment: int | None, size: int, holders: Sequence[PeerId], now: Seconds) -> None:
        """Begin to collect the report of `origin` or, if `fragment` is given, its sum of `size` bytes.

        If `origin` fails, the other `holders` are asked for a copy. If a restart has deleted this peer's own report or
        sum (`origin` is this peer), the `holders` are asked at once.
        """
        own = self.stage.peer
        if origin == own and self.acting:
            return
        others = [peer for peer in holders if peer not in (origin, own)]
        wanted = self.collection.want(origin, fragment, size, others, now)
        report = self.collection.wanted.get((origin, None))
        if origin == own:
            wanted.lose_origin(Reason.RESTARTED, now)
        elif report and report.over and not report.found:
            wanted.lose_origin(Reason.GONE, now)

    def accept(self, wanted: Wanted, envelope: Envelope) -> None:
        """Check that an answer is the wanted report or sum; all members decide alike about the same answer.

        Raises:
            ProtocolError: If the answer is of another kind, run or round; if it fails `check_report` or `check_sum`; or
                if its blob does not match its digest.
        """
        stage = self.stage
        match envelope.message:
            case RoundReport() as report if wanted.fragment is None:
                if (report.run, report.round) != (stage.run, self.number):
                    raise ProtocolError(
                        Reason.ROUND, f"expected round {self.number} of {stage.run}; got {report.round} of {report.run}"
                    )
                contributions.check_report(report, self.members, wanted.origin, stage.cuts)
            case Snapshot() as snapshot if wanted.fragment is not None:
                (cut,) = (one for one in stage.cuts if one.index == wanted.fragment)
                layout = (Section("gradient", "fp32", cut.parameters, 4 * cut.parameters),)
                expected = Snapshot(stage.run, cut.index, self.number, 0, 0.0, layout, b"")
                tokens = self.count.tokens[wanted.origin, wanted.fragment]
                contributions.check_sum(snapshot, len(envelope.blob), tokens, expected)
                if blobs.digest(envelope.blob) != snapshot.digest:
                    raise ProtocolError(Reason.DIGEST, "the blob of the sum does not match the header's digest")
            case _:
                kind = "RoundReport" if wanted.fragment is None else "Snapshot"
                raise ProtocolError(Reason.UNEXPECTED, f"expected {kind}; got {type(envelope.message).__name__}")


def _contributions(fragment: int, found: dict[Key, Envelope]) -> tuple[Contribution, ...]:
    """Return a fragment's sums, without empty sums, sorted by the id of the peer that made each sum."""
    sums = sorted((origin, envelope) for (origin, index), envelope in found.items() if index == fragment)
    return tuple(
        Contribution(origin, head.tokens, head.layout, envelope.blob)
        for origin, envelope in sums
        if isinstance(head := envelope.message, Snapshot) and head.tokens
    )

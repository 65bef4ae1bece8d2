"""Synchronous training: rounds in which all peers together take one step, with the gradients of all micro-batches.

    SETTLING --a standing, or nobody has one--> REPORTS --all reports--> CLOSING --RoundClosed--> SUMS --all sums-->
    STEPPING --Stepped--> REPORTS of the next round

A round has `train.accumulate` micro-batches, divided over the members that hold layer 0. They travel as ever
(comm/routes/router.py), but meet weights of their round only, as no weights change while it lasts. When a member's own ones are
through, or given up, its report says by whom; a member that starts none reports at once. Who has all reports knows
whose gradients count, closes its sums, fetches those of all other holders of its layers, and takes the step.

Nobody leads. A member that is gone costs a deadline: the others agree on what of it they have (comm/rounds/collection.py), go on,
and the journal says without what. Its micro-batches, and what it carried of others', do not count where they are not
known. A sum that has more in it than the reports name (a micro-batch that went another way in the end) counts nowhere.

A newcomer fetches the weights and moments of one round, and every donor waits with its report until it has them. Then
it follows: it does what all do, but carries nothing, until a report lets it in. So do a peer that comes back, one that
was taken for dead, one whose fragment has another version than the other holders', and those of the smaller of two
parts into which a swarm had fallen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from decentral.comm.rounds import contributions
from decentral.comm.rounds.collection import COLLECT_RETRY_S, Collection, Wanted
from decentral.comm.rounds.contributions import ContributionRecord, RoundCount, RoundMembers, Versions
from decentral.comm.rounds.tags import CollectTag, ElsewhereTag, FollowTag
from decentral.comm.routes.ledger import GradientEntry
from decentral.comm.routes.router import Router
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    MAX_NEWCOMERS,
    CollectRequest,
    Refused,
    RoundMember,
    RoundQuery,
    RoundReport,
    RoundStatus,
    Snapshot,
)
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Reply
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.jobs import (
    Advance,
    CloseRound,
    Contribution,
    Fragment,
    RoundClosed,
    Section,
    SetClock,
    Stepped,
    WindowClosed,
)
from decentral.core.machine import Effect, Woke, earliest, log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

FOLLOW_S = 5.0  # deadline of a Follow
FOLLOW_AGAIN_S = 3.0  # how often a follower asks to be let in
ELSEWHERE_S = 5.0  # how often to ask those who train, and not with us, with whom they do
HOLD_S = 3.0  # after a newcomer's last question a round waits for it so long ...
HOLD_MOST_S = 60.0  # ... and no longer than this in all
MAX_WAITING_COLLECTS = 256  # questions that wait for what is not there yet
MAX_KNOWN = 64  # newcomers that wait to be let in


class RoundView(Protocol):
    """What rounds need to know of the swarm; peers/node/peer_selection.py has it from the roster and the meter."""

    def acquaintances(self) -> Sequence[PeerId]:
        """Who may be in the run already."""
        ...

    def trainers(self) -> Sequence[PeerId]:
        """Who trains, as far as we know."""
        ...

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long `size` bytes from there may take."""
        ...


class RoundPhase(Enum):
    REPORTS = auto()
    CLOSING = auto()
    SUMS = auto()
    STEPPING = auto()


@dataclass(slots=True)
class Round:
    number: int
    members: RoundMembers
    acting: bool  # whether we are one of the members; else we only follow
    covered: bool  # whether they hold the whole model; else the round waits for who holds the rest
    collected: Collection
    phase: RoundPhase = RoundPhase.REPORTS
    report: RoundReport | None = None  # our own
    sums: dict[int, Envelope] | None = None  # our own, by fragment; none yet
    reports: dict[PeerId, RoundReport] = field(default_factory=dict)  # all, once they are here
    count: RoundCount = field(default_factory=lambda: RoundCount(frozenset(), {}, 0.0))
    executions: list[GradientEntry] = field(default_factory=list)  # in our sums
    advanced: list[tuple[int, tuple[Contribution, ...]]] = field(default_factory=list)
    versions: Versions = field(default_factory=dict)  # after it


@dataclass(slots=True)
class Settling:
    """Looking for a round to follow. Whoever is furthest, of all that are in none, begins one."""

    round: int  # of our weights
    asked: set[PeerId] = field(default_factory=set)
    others: dict[PeerId, int] = field(default_factory=dict)  # in no round either: of which their weights are
    retry_at: Seconds | None = 0.0


@dataclass(slots=True)
class DonorHold:
    began: Seconds
    last: Seconds

    def ends(self) -> Seconds:
        return min(self.last + HOLD_S, self.began + HOLD_MOST_S)


@dataclass(frozen=True, slots=True)
class WaitingCollect:
    request: int
    sender: PeerId
    collect: CollectRequest
    until: Seconds


@dataclass(slots=True)
class Rounds:
    routes: Router
    view: RoundView
    restored: int = 0  # the round of our checkpoint's weights
    now_in: Round | None = None
    before: Round | None = None  # the round before, for those who are still in it
    behind: str = ""  # why we must fetch the state anew, if we must
    versions: Versions = field(default_factory=dict)
    _settling: Settling | None = None
    _steps: dict[int, int] = field(default_factory=dict)  # of which round each fragment is that we have fetched
    _joined: int = 0  # the round that we began to follow
    _ask_again_at: Seconds | None = None
    _elsewhere_at: Seconds = 0.0
    _newcomers: dict[PeerId, RoundMember] = field(default_factory=dict)
    _pins: dict[PeerId, DonorHold] = field(default_factory=dict)
    _held: list[WaitingCollect] = field(default_factory=list)

    @property
    def wake_at(self) -> Seconds | None:
        held = (one.until for one in self._held)
        if self._settling:
            return earliest((self._settling.retry_at, *held))
        if self.now_in is None:
            return earliest(held)
        pins = (pin.ends() for pin in self._pins.values()) if self._waits_for_newcomers() else ()
        return earliest((self.now_in.collected.wake_at, self._ask_again_at, self._elsewhere_at, *pins, *held))

    @property
    def number(self) -> int:
        return self.now_in.number if self.now_in else 0

    def successors(self, layer: int) -> list[PeerId]:
        """Members of our round that hold this layer."""
        members = self._present(self.now_in) if self.now_in else []
        return [PeerId(m.peer) for m in members if m.first <= layer < m.last and m.peer != self.routes.stage.peer]

    def begin(self, round: int, taken: dict[int, tuple[int, bytes]]) -> None:
        """We have the weights of this round; `taken`: round and version of the fragments that came from others."""
        self._settling, self.behind = Settling(round), ""
        for index in (cut.index for cut in self._ours()):
            first = contributions.first_version(self.routes.stage.run, index, self.restored)
            own = self.restored, self.versions.get(index, first)
            self._steps[index], self.versions[index] = taken.get(index, own)

    def stop(self) -> list[Effect]:
        """Our weights are not those of the others."""
        self.now_in = self.before = self._settling = None
        ended = self.routes.end_round(everything=True)
        self.routes.begin_round(0, False, 0)
        self._tally.take()
        return ended

    def pin(self, peer: PeerId, now: Seconds) -> None:
        """A newcomer fetches state here."""
        self._forget_pins(now)
        self._pins.setdefault(peer, DonorHold(now, now)).last = now

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        """Node also calls this with Woke after each event for others: a micro-batch may have been the last."""
        effects = self._react(event, now)
        effects += self._look(now) if self.now_in else self._settle(now)
        return effects + self._answer_held(now)

    def _react(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Asked(request, sender, Envelope(RoundQuery() as follow)):
                return [Reply(request, Envelope(self._followed(sender, follow)))]
            case Asked(request, sender, Envelope(CollectRequest() as collect)):
                self._held.append(WaitingCollect(request, sender, collect, now + collect.patience_s))
                return []
            case Answered(tag=FollowTag()) | AskFailed(tag=FollowTag()) if self._settling:
                return self._heard_of(event, now)
            case Answered(tag=ElsewhereTag(), envelope=Envelope(RoundStatus() as standing)) if self.now_in:
                self._compare_rounds(self.now_in, standing)
                return []
            case Answered(tag=CollectTag(round=number)) | AskFailed(tag=CollectTag(round=number)):
                if self.now_in and self.now_in.number == number:
                    self.now_in.collected.heard(event, now)
                    self.behind = self.behind or self.now_in.collected.behind
                return []
            case RoundClosed(round=number) if self.now_in and self.now_in.number == number:
                return self._closed(self.now_in, event, now)
            case Stepped() if self.now_in and self.now_in.phase is RoundPhase.STEPPING:
                return self._stepped(self.now_in, event, now)
        return []

    # Which round, and with whom

    def _settle(self, now: Seconds) -> list[Effect]:
        settling = self._settling
        if settling is None or settling.retry_at is None or now < settling.retry_at:
            return []
        settling.asked, settling.others, settling.retry_at = set(self.view.acquaintances()), {}, None
        return self._ask_to_follow(sorted(settling.asked)) or self._found(settling, now)

    def _ask_to_follow(self, peers: Sequence[str]) -> list[Effect]:
        return [Ask(FollowTag(), PeerId(peer), self._question(joining=True), FOLLOW_S) for peer in peers]

    def _question(self, joining: bool) -> Envelope:
        stage = self.routes.stage
        round = self._settling.round if self._settling else self.number
        return Envelope(RoundQuery(stage.run, round, stage.first, stage.last, joining))

    def _look_elsewhere(self, round: Round, now: Seconds) -> list[Effect]:
        self._elsewhere_at = now + ELSEWHERE_S
        ours = {member.peer for member in round.members} | self._newcomers.keys()
        strangers = [peer for peer in self.view.trainers() if peer not in ours][:MAX_NEWCOMERS]
        return [Ask(ElsewhereTag(), peer, self._question(joining=False), FOLLOW_S) for peer in strangers]

    def _compare_rounds(self, round: Round, standing: RoundStatus) -> None:
        """Somebody who trains without us may do so in a round that we should be in."""
        stage, members = self.routes.stage, standing.members
        if standing.run != stage.run or not members or not contributions.sensible(members, stage.cuts):
            return
        apart = stage.peer not in {member.peer for member in members}
        theirs = contributions.rank(standing.round, members, stage.layers)
        if apart and theirs > contributions.rank(round.number, round.members, stage.layers):
            self.behind = Reason.APART

    def _heard_of(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        settling = self._settling
        assert settling is not None
        settling.asked.discard(event.peer)
        match event:
            case Answered(envelope=Envelope(RoundStatus(members=members) as standing)) if members:
                if standing.run == self.routes.stage.run and contributions.sensible(members, self.routes.stage.cuts):
                    return self._follow(standing, now)
            case Answered(envelope=Envelope(RoundStatus(round=round))):
                settling.others[event.peer] = round
        if settling.asked or settling.retry_at is not None:
            return []
        ahead = [(-round, peer) for peer, round in settling.others.items()]
        if min(ahead, default=(1, "")) < (-settling.round, self.routes.stage.peer):
            settling.retry_at = now + COLLECT_RETRY_S  # that one begins
            return []
        return self._found(settling, now)

    def _found(self, settling: Settling, now: Seconds) -> list[Effect]:
        """Nobody is in a round: ours is the first."""
        stage = self.routes.stage
        self._settling, self._joined = None, settling.round - 1
        first = (RoundMember(stage.peer, stage.first, stage.last),)
        return [self._clock(settling.round), *self._begin(settling.round, first, now)]

    def _clock(self, round: int) -> SetClock:
        return SetClock(round, tuple(sorted(self.versions.items())))

    def _follow(self, standing: RoundStatus, now: Seconds) -> list[Effect]:
        assert self._settling is not None
        stage = self.routes.stage
        asked, self._settling, self._joined = self._settling.asked, None, standing.round
        others = [member for member in standing.members if member.peer != stage.peer]
        elsewhere = {cut.index for member in others for cut in contributions.held(member, stage.cuts)}
        if any(step != standing.round and index in elsewhere for index, step in self._steps.items()):
            self.behind = Reason.STALE
            return []
        more = self._ask_to_follow([member.peer for member in others if member.peer not in asked])
        return [self._clock(standing.round), *more, *self._begin(standing.round, standing.members, now)]

    def _followed(self, sender: PeerId, follow: RoundQuery) -> RoundStatus | Refused:
        """Somebody wants to be in."""
        stage, member = self.routes.stage, RoundMember(sender, follow.first, follow.last)
        if not contributions.held(member, stage.cuts):
            return Refused(Reason.SPAN)
        if not follow.joining:
            return self._standing()
        if follow.round >= self.number:
            self._pins.pop(sender, None)  # it has what it needs
        self._newcomers.pop(sender, None)
        self._newcomers[sender] = member
        while len(self._newcomers) > MAX_KNOWN:
            del self._newcomers[next(iter(self._newcomers))]
        return self._standing()

    def _standing(self) -> RoundStatus:
        run = self.routes.stage.run
        if self.now_in is None:
            return RoundStatus(run, self._settling.round if self._settling else self.restored, ())
        return RoundStatus(run, self.now_in.number, self.now_in.members)

    # A round

    def _begin(self, number: int, members: RoundMembers, now: Seconds) -> list[Effect]:
        stage = self.routes.stage
        peers = [PeerId(member.peer) for member in members]
        inside = stage.peer in peers
        acting = inside and number > self._joined
        collected = Collection(stage.run, number, inside, self._accept, self.view.deadline_s)
        covered = contributions.covered(members, stage.layers)
        self.before, self.now_in = self.now_in, Round(number, members, acting, covered, collected)
        self._newcomers = {peer: one for peer, one in self._newcomers.items() if peer not in peers}
        for peer in peers:
            self._want(self.now_in, peer, None, 0, peers, now)
        quota = (
            contributions.quota(members, stage.peer, number, stage.micro_batches_per_step) if acting and covered else 0
        )
        self._ask_again_at = None if inside else now
        return self.routes.begin_round(number, acting, quota) + self.routes.handle(Woke(), now)

    def _want(
        self, round: Round, origin: PeerId, fragment: int | None, size: int, holders: Sequence[PeerId], now: Seconds
    ) -> None:
        """From another member; or, where it was us before we came back, from those who heard it from us then."""
        own = self.routes.stage.peer
        if origin == own and round.acting:
            return
        others = [peer for peer in holders if peer not in (origin, own)]
        wanted = round.collected.want(origin, fragment, size, others, now)
        report = round.collected.wanted.get((origin, None))
        if origin == own:
            round.collected.bind(wanted, Reason.RESTARTED, now)
        elif report and report.over and not report.found:
            round.collected.bind(wanted, Reason.GONE, now)

    def _look(self, now: Seconds) -> list[Effect]:
        """Goes on as far as what is here allows."""
        round = self.now_in
        assert round is not None
        if self.behind:
            return []
        self._forget_pins(now)
        if round.acting and round.report is None and self._done(round):
            round.report = self._own_report(round)
        effects: list[Effect] = []
        if round.phase is RoundPhase.REPORTS and round.covered and not self._still_covered(round):
            effects += self.routes.give_up_own()
        if now >= self._elsewhere_at:
            effects += self._look_elsewhere(round, now)
        if self._ask_again_at is not None and now >= self._ask_again_at:
            self._ask_again_at = now + FOLLOW_AGAIN_S
            effects += self._ask_to_follow([member.peer for member in round.members])
        if round.phase is RoundPhase.REPORTS and round.collected.complete and (round.report or not round.acting):
            effects += self._all_reported(round, now)
        if round.phase is RoundPhase.SUMS and round.collected.complete:
            effects += self._all_here(round, now)
        return effects + round.collected.ask(now)

    def _present(self, round: Round) -> list[RoundMember]:
        """The members of whom we do not know that they are gone."""
        reports = {origin: one for (origin, fragment), one in round.collected.wanted.items() if fragment is None}
        gone = {origin for origin, one in reports.items() if one.bound and not one.found}
        return [member for member in round.members if member.peer not in gone]

    def _still_covered(self, round: Round) -> bool:
        return contributions.covered(tuple(self._present(round)), self.routes.stage.layers)

    def _done(self, round: Round) -> bool:
        """Whether we have nothing more to do for the round; where nothing can be done, others have to be let in."""
        return self.routes.all_begun_are_over and not self._pins and (round.covered or bool(self._newcomers))

    def _waits_for_newcomers(self) -> bool:
        return bool(self._pins) and self.now_in is not None and self.now_in.acting and self.now_in.report is None

    def _forget_pins(self, now: Seconds) -> None:
        self._pins = {peer: pin for peer, pin in self._pins.items() if now < pin.ends()}

    def _own_report(self, round: Round) -> RoundReport:
        stage = self.routes.stage
        carried, loss = self._tally.carried(round.members, stage.peer)
        own = RoundMember(stage.peer, stage.first, stage.last)
        newcomers = tuple(one for _, one in sorted(self._newcomers.items()))[:MAX_NEWCOMERS]
        versions = tuple(self.versions[cut.index] for cut in contributions.held(own, stage.cuts))
        return RoundReport(stage.run, round.number, own, carried, loss, newcomers, versions)

    def _all_reported(self, round: Round, now: Seconds) -> list[Effect]:
        stage = self.routes.stage
        if round.report:
            round.reports[stage.peer] = round.report
        for (origin, _), wanted in round.collected.wanted.items():
            if wanted.found and isinstance(wanted.found.message, RoundReport):
                round.reports[origin] = wanted.found.message
        self._compare(round)
        round.count = contributions.count(round.members, round.reports, stage.peer, stage.cuts)
        if not round.acting:
            round.sums = {}
            return self._want_sums(round, now)
        round.phase = RoundPhase.CLOSING
        ended = self.routes.end_round()
        named = tuple(
            token for token, entry in self._tally.entries.items() if entry.execution in round.count.executions
        )
        return [*ended, CloseRound(round.number, named)]

    def _compare(self, round: Round) -> None:
        """Our fragments with those of the other holders: they must be the same."""
        agreed = contributions.agreed(round.reports, self.routes.stage.cuts)
        if any(agreed.get(index, version) != version for index, version in self.versions.items()):
            self.behind = Reason.DIVERGED

    def _closed(self, round: Round, done: RoundClosed, now: Seconds) -> list[Effect]:
        entries = self._tally.take()
        round.executions = [entries[execution] for execution in done.executions]
        round.sums = {closed.fragment: self._sum(closed) for closed in done.sums}
        return self._want_sums(round, now)

    def _want_sums(self, round: Round, now: Seconds) -> list[Effect]:
        """Of all members whose gradients count in a fragment of ours."""
        round.phase = RoundPhase.SUMS
        ours = {cut.index: cut for cut in self._ours()}
        for peer, fragment in sorted(round.count.tokens):
            if fragment in ours:
                cut = ours[fragment]
                holders = [PeerId(m.peer) for m in round.members if m.first <= cut.first and cut.last <= m.last]
                self._want(round, peer, fragment, 4 * cut.parameters, holders, now)
        return []

    def _all_here(self, round: Round, now: Seconds) -> list[Effect]:
        round.phase = RoundPhase.STEPPING
        found: dict[int, dict[PeerId, Envelope]] = {cut.index: {} for cut in self._ours()}
        for (origin, fragment), wanted in round.collected.wanted.items():
            if fragment is not None and wanted.found:
                found[fragment][origin] = wanted.found
        for fragment, envelope in (round.sums or {}).items():
            found[fragment][self.routes.stage.peer] = envelope
        if not round.count.tokens:
            return [self._clock(round.number + 1), *self._next(round, (), now)]
        round.advanced = [(index, _contributions(sums)) for index, sums in sorted(found.items())]
        carried = round.report.micro_batches if round.report else ()
        tokens = sum(one.tokens for one in carried)
        for fragment, parts in round.advanced:
            sums = [(part.peer, blobs.digest(part.blob)) for part in parts]
            round.versions[fragment] = contributions.next_version(self.versions[fragment], sums)
        versions = tuple(sorted(round.versions.items()))
        return [Advance(round.number, tuple(round.advanced), versions, tokens, len(carried), round.count.loss)]

    def _stepped(self, round: Round, done: Stepped, now: Seconds) -> list[Effect]:
        self.versions |= round.versions
        return self._next(round, [(peer, fragment, reason) for fragment, peer, reason in done.refused], now)

    def _next(self, round: Round, refused: Sequence[tuple[PeerId, int, str]], now: Seconds) -> list[Effect]:
        effects = self._lines(round, refused)
        members = contributions.next_members(round.members, round.reports)
        round.advanced = []
        if members:
            return effects + self._begin(round.number + 1, members, now)
        self._settling, self.now_in = Settling(round.number + 1), None  # all whom we followed are gone
        self._steps = dict.fromkeys(self._steps, round.number + 1)
        return effects

    def _lines(self, round: Round, refused: Sequence[tuple[PeerId, int, str]]) -> list[Effect]:
        """What of the round counted, and what did not."""
        missing = [(one.origin, one.fragment, one.reason) for one in round.collected.wanted.values() if not one.found]
        lines: list[Effect] = [
            log("without", round=round.number, peer=peer, fragment=fragment, reason=reason)
            for peer, fragment, reason in [*missing, *refused]
        ]
        if round.executions:
            of = [entry.line() for entry in round.executions]
            named = sum(entry.execution in round.count.executions for entry in round.executions)
            if round.sums:
                self._tally.counted += len(of)
                lines.append(log("counted", of=of, round=round.number))
            else:
                lines.append(log("uncounted", of=of, void=len(of) - named, round=round.number))
        return lines

    # What others ask

    def _answer_held(self, now: Seconds) -> list[Effect]:
        held, self._held = self._held, []
        effects: list[Effect] = []
        for one in held:
            answer = self._answer(one.sender, one.collect)
            if answer is None and now < one.until and len(self._held) < MAX_WAITING_COLLECTS:
                self._held.append(one)
                continue
            effects.append(Reply(one.request, answer or Envelope(Refused(Reason.NOTHING_NEWER, str(self.number)))))
        return effects

    def _answer(self, sender: PeerId, collect: CollectRequest) -> Envelope | None:
        """None: not yet."""
        if self.now_in is None:
            return Envelope(Refused(Reason.GONE))
        if collect.round > self.now_in.number:
            return None
        round = self.now_in if collect.round == self.now_in.number else self.before
        if round is None or round.number != collect.round:
            return Envelope(Refused(Reason.LATE))
        if collect.member and sender not in {member.peer for member in round.members}:
            return Envelope(Refused(Reason.EXPELLED))
        if collect.origin == self.routes.stage.peer:
            return self._own(round, collect.fragment)
        answer = round.collected.has(PeerId(collect.origin), collect.fragment)
        return Envelope(Refused(Reason.WITHOUT)) if answer is None and round is self.before else answer

    def _own(self, round: Round, fragment: int | None) -> Envelope | None:
        if not round.acting:
            return Envelope(Refused(Reason.GONE))  # who acted in this round was we, but before we came back
        if fragment is None:
            return Envelope(round.report) if round.report else None
        if fragment not in {cut.index for cut in self._ours()}:
            return Envelope(Refused(Reason.FRAGMENT))
        if round.sums is None:
            return None
        nothing = self._sum(WindowClosed(fragment, round.number, 0, 0.0, (), b""))
        return round.sums.get(fragment, nothing)

    # Helpers

    @property
    def _tally(self) -> ContributionRecord:
        assert isinstance(self.routes.ledger, ContributionRecord)
        return self.routes.ledger

    def _ours(self) -> list[Fragment]:
        stage = self.routes.stage
        return contributions.held(RoundMember(stage.peer, stage.first, stage.last), stage.cuts)

    def _sum(self, closed: WindowClosed) -> Envelope:
        """As it travels. It has no time: what all holders check in the same way must not depend on when."""
        digest, run = blobs.digest(closed.blob), self.routes.stage.run
        snapshot = Snapshot(run, closed.fragment, closed.seq, closed.tokens, 0.0, 0.0, closed.layout, digest)
        return Envelope(snapshot, closed.blob)

    def _accept(self, wanted: Wanted, envelope: Envelope) -> None:
        """Raises ProtocolError. All members that get the same come to the same result."""
        round, stage = self.now_in, self.routes.stage
        assert round is not None
        match envelope.message:
            case RoundReport() as report if wanted.fragment is None:
                if (report.run, report.round) != (stage.run, round.number):
                    raise ProtocolError(Reason.ROUND, f"a report of round {report.round}")
                contributions.check(report, round.members, wanted.origin, stage.cuts)
            case Snapshot() as snapshot if wanted.fragment is not None:
                (cut,) = (one for one in stage.cuts if one.index == wanted.fragment)
                layout = (Section("gradient", "fp32", cut.parameters, 4 * cut.parameters),)
                expected = Snapshot(stage.run, cut.index, round.number, 0, 0.0, 0.0, layout, b"")
                tokens = round.count.tokens[wanted.origin, wanted.fragment]
                contributions.check_sum(snapshot, len(envelope.blob), tokens, expected)
                if blobs.digest(envelope.blob) != snapshot.digest:
                    raise ProtocolError(Reason.DIGEST, "the blob is not the one described")
            case _:
                raise ProtocolError(Reason.UNEXPECTED, "neither a report nor a sum")


def _contributions(sums: dict[PeerId, Envelope]) -> tuple[Contribution, ...]:
    """In the order of the peers; sums of nothing left out."""
    found = []
    for peer, envelope in sorted(sums.items()):
        assert isinstance(envelope.message, Snapshot)
        if envelope.message.tokens:
            found.append(Contribution(peer, envelope.message.tokens, 0.0, envelope.message.layout, envelope.blob))
    return tuple(found)

"""Synchronous training: in each round all peers together take one step, with the exact gradients of all micro-batches.

    searching --another peer's round, or ours is the first--> a round --its step is taken--> the next round
    a round   --all that we followed are gone--> searching

A round has `train.accumulate` micro-batches, divided over the members that hold layer 0. They travel as in any routed
run (comm/pipeline/router.py), but meet the weights of their round only, as no weights change while it lasts. When a
member's own micro-batches are complete or given up, its report says who has executed them; a member that draws none
reports at once. A peer that has all reports knows whose gradients count, closes its sums, fetches those of all other
holders of its layers, and takes the step (comm/rounds/round_state.py).

Nobody leads. A member that is gone costs a deadline: the others agree on what they have of it and go on without the
rest (comm/rounds/collection.py), and the journal says without what. Its own micro-batches, and what it executed for
others, do not count where they are not known. A sum with more in it than the reports name counts nowhere.

A newcomer fetches the weights and moments of one round. Then it follows: it does what all do, but executes nothing,
until a report lets it in (comm/rounds/join_requests.py). So do a peer that comes back or was taken for dead, one with
another version of a fragment than most of its holders, and the lesser of two parts of a swarm that had lost each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.comm.pipeline.router import Router
from decentral.comm.rounds import contributions
from decentral.comm.rounds.contributions import ContributionRecord, Versions
from decentral.comm.rounds.join_requests import JoinRequests
from decentral.comm.rounds.members import DonorHolds, next_members, own_fragments, own_member, whole_fragments
from decentral.comm.rounds.round_state import Round, RoundPhase
from decentral.comm.rounds.search import RoundSearch, RoundView, queries
from decentral.comm.rounds.tags import CollectTag, ElsewhereTag, FollowTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_NEWCOMERS, CollectRequest, Refused, RoundMember, RoundQuery, RoundStatus
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Effect, Event, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import CloseRound, RoundClosed, SetClock, Stepped
from decentral.core.machine import Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

FOLLOW_AGAIN_S = 3.0  # how often a follower asks to be let in
MAX_WAITING_COLLECTS = 256
ELSEWHERE_S = 5.0  # how often trainers outside our round are asked which round they are in


@dataclass(slots=True)
class Rounds:
    """This peer's part in all rounds. Node begins it with complete weights, and stops it once `behind` is set."""

    routes: Router
    view: RoundView
    restored: int = 0  # the round of our checkpoint's weights
    now_in: Round | None = None
    before: Round | None = None  # the round before, for those that are still in it
    behind: str = ""  # why the state has to be fetched anew, if it has
    versions: Versions = field(default_factory=dict)
    donor_holds: DonorHolds = field(default_factory=DonorHolds)
    join_requests: JoinRequests = field(init=False)
    _search: RoundSearch | None = None
    _fetched: dict[int, int] = field(default_factory=dict)  # the round of each fragment's weights when the search began
    _followed_from: int = 0  # the first round in which we do not act even if we are a member
    _follow_again_at: Seconds | None = None
    _elsewhere_at: Seconds = 0.0
    _waiting: list[tuple[Asked, CollectRequest, Seconds]] = field(default_factory=list)  # until then

    def __post_init__(self) -> None:
        self.join_requests = JoinRequests(self.view.knows)

    @property
    def wake_at(self) -> Seconds | None:
        ends = (until for _, _, until in self._waiting)
        if self._search:
            return earliest((self._search.retry_at, *ends))
        round = self.now_in
        if round is None:
            return earliest(ends)
        reports = round.acting and round.report is None
        holds = self.donor_holds.holds.values() if reports else ()
        waits_for_others = reports and not round.covered and self._has_nothing_to_do
        let_in_at = self.join_requests.next_at if waits_for_others else None
        times = round.collection.wake_at, self._follow_again_at, self._elsewhere_at, let_in_at
        return earliest((*times, *(end for end, _ in holds), *ends))

    @property
    def number(self) -> int:
        """The round we are in; 0: none."""
        return self.now_in.number if self.now_in else 0

    def knows(self, peer: PeerId) -> bool:
        """Whether it is a member of our round, or was one of the round before."""
        return any(round is not None and peer in round.peers for round in (self.now_in, self.before))

    def successors(self, layer: int) -> list[PeerId]:
        """The other members of our round that hold this layer, as far as we do not know that they are gone."""
        members = self.now_in.present() if self.now_in else []
        return [PeerId(m.peer) for m in members if m.first <= layer < m.last and m.peer != self.routes.stage.peer]

    def begin(self, round: int, taken: dict[int, tuple[int, bytes]]) -> None:
        """Looks for a round to follow: our weights are those of `round`.

        `taken` names the round and the version of each fragment that came from others; the rest is our checkpoint's.
        """
        stage = self.routes.stage
        self._search, self.behind = RoundSearch(stage, round), ""
        for index in (cut.index for cut in own_fragments(stage)):
            first = contributions.first_version(stage.run, index, self.restored)
            own = self.restored, self.versions.get(index, first)
            self._fetched[index], self.versions[index] = taken.get(index, own)

    def stop(self) -> list[Effect]:
        """Leaves the round: our weights are not those of the others."""
        self.now_in = self.before = self._search = None
        ended = self.routes.end_round(everything=True)
        self.routes.begin_round(0, False, 0)
        self._record.take()
        return ended

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Node also calls this with Woke after each event for others: a micro-batch may have been the last."""
        effects = self._react(event, now)
        effects += self._progress(self.now_in, now) if self.now_in else self._search_on(now)
        return effects + self._answer_collects(now)

    def _react(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Asked(request, sender, Envelope(RoundQuery() as query)):
                return [Reply(request, Envelope(self._answer_query(sender, query, now)))]
            case Asked(envelope=Envelope(CollectRequest() as collect)):
                self._waiting.append((event, collect, now + collect.patience_s))
            case Answered(tag=FollowTag()) | AskFailed(tag=FollowTag()) if self._search:
                status = self._search.heard(event)
                return self._follow(self._search, status, now) if status else self._begin_first(self._search, now)
            case Answered(tag=ElsewhereTag(), envelope=Envelope(RoundStatus() as status)) if self.now_in:
                if self.now_in.yields_to(status):
                    self.behind = Reason.APART
            case Answered(tag=CollectTag(round=number)) | AskFailed(tag=CollectTag(round=number)):
                if self.now_in and self.now_in.number == number:
                    self.now_in.collection.handle(event, now)
                    self.behind = self.behind or self.now_in.collection.behind
            case RoundClosed(round=number) if self.now_in and self.now_in.number == number:
                self.now_in.close_sums(event, self._record.take())
                self.now_in.want_sums(now)
            case Stepped() if self.now_in and self.now_in.phase is RoundPhase.STEPPING:
                self.versions |= self.now_in.versions
                return self._next(self.now_in, event.refused, now)
        return []

    # Which round, and with which members

    def _search_on(self, now: Seconds) -> list[Effect]:
        if self._search is None:
            return []
        return self._search.ask(self.view, now) or self._begin_first(self._search, now)

    def _begin_first(self, search: RoundSearch, now: Seconds) -> list[Effect]:
        """Nobody is in a round: where it is ours to begin one, we are its only member."""
        if not search.is_ours_to_begin(now):
            return []
        self._search, self._followed_from = None, search.round - 1
        return [self._set_clock(search.round), *self._enter(search.round, (own_member(search.stage),), now)]

    def _follow(self, search: RoundSearch, status: RoundStatus, now: Seconds) -> list[Effect]:
        stage = search.stage
        self._search, self._followed_from = None, status.round
        others = [member for member in status.members if member.peer != stage.peer]
        held = {cut.index for member in others for cut in whole_fragments(member, stage.cuts)}
        if any(round != status.round and index in held for index, round in self._fetched.items()):
            self.behind = Reason.STALE
            return []
        more = [member.peer for member in others if member.peer not in search.asked]
        asks = queries(FollowTag(), stage, self.number, more)
        return [self._set_clock(status.round), *asks, *self._enter(status.round, status.members, now)]

    def _set_clock(self, round: int) -> SetClock:
        return SetClock(round, tuple(sorted(self.versions.items())))

    def _answer_query(self, sender: PeerId, query: RoundQuery, now: Seconds) -> RoundStatus | Refused:
        member = RoundMember(sender, query.first, query.last)
        if not whole_fragments(member, self.routes.stage.cuts):
            return Refused(Reason.SPAN)
        if query.joining and query.round >= self.number:  # it has all the state that it needs from us
            self.donor_holds.release(sender, now)
        if query.joining:
            self.join_requests.ask(member, now)
        run = self.routes.stage.run
        if self.now_in is None:
            return RoundStatus(run, self._search.round if self._search else self.restored, ())
        return RoundStatus(run, self.now_in.number, self.now_in.members)

    def _ask_elsewhere(self, round: Round) -> list[Effect]:
        """Trainers that are neither members nor newcomers may be in a round that we should be in."""
        ours = {*round.peers, *self.join_requests.waiting}
        strangers = [peer for peer in self.view.trainers() if peer not in ours][:MAX_NEWCOMERS]
        return queries(ElsewhereTag(), round.stage, round.number, strangers)

    # A round

    def _enter(self, number: int, members: tuple[RoundMember, ...], now: Seconds) -> list[Effect]:
        round = Round(self.routes.stage, number, members, number > self._followed_from, self.view)
        self.before, self.now_in = self.now_in, round
        self.join_requests.round_begins(round.peers, now)
        self._record.begin(members, round.stage.cuts)
        round.want_reports(now)
        self._follow_again_at = None if round.listed else now
        return self.routes.begin_round(number, round.acting, round.quota) + self.routes.handle(Woke(), now)

    def _progress(self, round: Round, now: Seconds) -> list[Effect]:
        """Takes the round as far as what is here allows."""
        if self.behind:
            return []
        self.donor_holds.expire(now)
        if round.acting and round.report is None and self._own_work_is_over(round, now):
            round.write_report(self._record, self.join_requests.to_let_in(now), self.versions)
        effects: list[Effect] = []
        if round.phase is RoundPhase.REPORTS and round.covered and not round.still_covered:
            effects += self.routes.give_up_own()
        if now >= self._elsewhere_at:
            self._elsewhere_at = now + ELSEWHERE_S
            effects += self._ask_elsewhere(round)
        if self._follow_again_at is not None and now >= self._follow_again_at:
            self._follow_again_at = now + FOLLOW_AGAIN_S
            effects += queries(FollowTag(), round.stage, round.number, round.peers)
        if round.phase is RoundPhase.REPORTS and round.collection.complete and (round.report or not round.acting):
            effects += self._close(round, now)
        if round.phase is RoundPhase.SUMS and round.collection.complete:
            effects += self._step(round, now)
        return effects + round.collection.ask(now)

    @property
    def _has_nothing_to_do(self) -> bool:
        return self.routes.all_begun_are_over and not self.donor_holds.holds

    def _own_work_is_over(self, round: Round, now: Seconds) -> bool:
        """Whether we have nothing more to do before our report. A round that covers no model has to let others in."""
        return self._has_nothing_to_do and (round.covered or bool(self.join_requests.to_let_in(now)))

    def _close(self, round: Round, now: Seconds) -> list[Effect]:
        """All reports are here: what they name goes into our sums."""
        round.count_reports()
        if round.has_diverged(self.versions):
            self.behind = Reason.DIVERGED
        if not round.acting:
            round.want_sums(now)
            return []
        round.enter(RoundPhase.CLOSING)
        ended = self.routes.end_round()
        return [*ended, CloseRound(round.number, self._record.named(round.count.executions))]

    def _step(self, round: Round, now: Seconds) -> list[Effect]:
        """All sums are here. Without gradients there is no step, only the next round."""
        if round.count.tokens:
            return [round.advance(self.versions)]
        return [self._set_clock(round.number + 1), *self._next(round, (), now)]

    def _next(self, round: Round, refused: Sequence[tuple[int, PeerId, str]], now: Seconds) -> list[Effect]:
        round.enter(RoundPhase.OVER)
        effects, number = round.journal(refused), round.number + 1
        known = self.before.peers if self.before else round.peers
        self.join_requests.round_over({*round.peers} - {*known}, round.reports, now)
        members = next_members(round.reports)
        if members:
            return effects + self._enter(number, members, now)
        self._search, self.now_in = RoundSearch(round.stage, number), None  # all that we followed are gone
        self._fetched = dict.fromkeys(self._fetched, number)
        return effects

    # What others want to collect

    def _answer_collects(self, now: Seconds) -> list[Effect]:
        """Replies to each question that has an answer or can wait no longer."""
        waiting, self._waiting = self._waiting, []
        effects: list[Effect] = []
        for asked, collect, until in waiting:
            answer = self._answer_collect(asked.sender, collect)
            if answer is None and now < until and len(self._waiting) < MAX_WAITING_COLLECTS:
                self._waiting.append((asked, collect, until))
            else:
                nothing = Envelope(Refused(Reason.NOTHING_NEWER, str(self.number)))
                effects.append(Reply(asked.request, answer or nothing))
        return effects

    def _answer_collect(self, sender: PeerId, collect: CollectRequest) -> Envelope | None:
        if self.now_in is None:
            return Envelope(Refused(Reason.GONE))
        if collect.round > self.number:
            return None
        for round in (self.now_in, self.before):
            if round and round.number == collect.round:
                return round.answer(sender, collect, over=round is self.before)
        return Envelope(Refused(Reason.LATE))

    @property
    def _record(self) -> ContributionRecord:
        assert isinstance(self.routes.ledger, ContributionRecord)
        return self.routes.ledger

"""Synchronous training: in each round all members together take one step with the gradients of all micro-batches.

Start at `Rounds`.

    searching  --a peer names its round, or this peer begins the first round-->  in a round
    in a round --the step is taken-->                                            in the next round
    in a round --no member has reported-->                                       searching

A round has `train.accumulate` micro-batches, divided among the members that train layer 0. A micro-batch passes through
the peers as in any routed run (comm/pipeline/router.py), but weights never change during a round. When a member's own
micro-batches are complete or given up, the member's report names the peers that executed them. A member without
micro-batches reports at once. A peer that has all reports knows which gradients count. It packs its sums of gradients,
fetches the sums of all other members that train its layers, and takes the step (comm/rounds/round_state.py).

There is no leader. If a member fails, the other members wait for its report and sums until a deadline. They agree which
reports and sums they have, and continue without the missing ones (comm/rounds/collection.py), which the journal names.
If a member's report is missing, its micro-batches do not count. If a member's sum is missing, or contains more than the
reports name, the gradients in the sum do not count.

A newcomer fetches the weights and moments of one round. Then it is a follower: it takes the same steps but executes no
micro-batches, until a member's report admits it (comm/rounds/join_requests.py). A member becomes a follower again if it
returns after a restart, if the other members gave it up, if its version of a fragment differs from the majority's, or
if the swarm was split and the round of another part takes precedence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.comm.pipeline.router import Router
from decentral.comm.rounds import contributions
from decentral.comm.rounds.collection import CollectTag
from decentral.comm.rounds.contributions import ContributionRecord, Versions
from decentral.comm.rounds.join_requests import JoinRequests
from decentral.comm.rounds.members import DonorHolds, next_members, own_fragments, own_member, whole_fragments
from decentral.comm.rounds.round_state import Round, RoundPhase
from decentral.comm.rounds.search import ElsewhereTag, FollowTag, RoundSearch, RoundView, queries
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_NEWCOMERS, CollectRequest, Refused, RoundMember, RoundQuery, RoundStatus
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Effect, Event, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import CloseRound, RoundClosed, SetClock, Stepped
from decentral.core.machine import Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

FOLLOW_AGAIN_S = 3.0  # after this many seconds, a peer that follows the round asks again to become a member
MAX_WAITING_COLLECTS = 256  # at most this many CollectRequests wait for a report or sum; further ones are refused
ELSEWHERE_S = 5.0  # we look for a second round, which a network split can cause, once in this many seconds


@dataclass(slots=True)
class Rounds:
    """State machine of one peer in synchronous training: it finds a running round, then takes part in each round.

    The node calls `begin` once the peer's weights are complete, and `stop` once `self.behind` is set.
    """

    routes: Router
    view: RoundView
    restored: int = 0  # the round to which the weights in this peer's checkpoint belong
    now_in: Round | None = None  # the round that this peer is in
    before: Round | None = None  # the previous round, kept for slower members that still ask for its reports and sums
    behind: str = ""  # why this peer must leave its round and fetch the weights again; "": it may stay in the round
    versions: Versions = field(default_factory=dict)  # the present version of each fragment that this peer trains
    donor_holds: DonorHolds = field(default_factory=DonorHolds)
    join_requests: JoinRequests = field(init=False)
    _search: RoundSearch | None = None
    _fetched: dict[int, int] = field(default_factory=dict)  # fragment -> the round to which its fetched weights belong
    _followed_from: int = 0  # up to this round we only follow, even if listed as a member: a restart lost our report
    _follow_again_at: Seconds | None = None
    _elsewhere_at: Seconds = 0.0
    # Questions for a report or sum that we do not have yet, each with the time at which we refuse it.
    _waiting: list[tuple[Asked, CollectRequest, Seconds]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Create `self.join_requests`, which admits only newcomers that `self.view` knows."""
        self.join_requests = JoinRequests(self.view.knows)

    @property
    def wake_at(self) -> Seconds | None:
        """Return when `handle` needs a timer event (Woke) next; None while only other events can advance the round."""
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
        """Return the number of the round that this peer is in; 0 while it is in no round."""
        return self.now_in.number if self.now_in else 0

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer is a member of our round or of the round before."""
        return any(round is not None and peer in round.peers for round in (self.now_in, self.before))

    def successors(self, layer: int) -> list[PeerId]:
        """Return the other members of our round that train this layer and have not failed."""
        members = self.now_in.present() if self.now_in else []
        return [PeerId(m.peer) for m in members if m.first <= layer < m.last and m.peer != self.routes.stage.peer]

    def begin(self, round: int, taken: dict[int, tuple[int, bytes]]) -> None:
        """Start looking for a running round to join. The weights "of round n" are those before the step of round n.

        Args:
            round: Our latest weights are of this round. If no peer is in a round, the peer with the latest weights
                begins a round with this number.
            taken: For each fragment whose weights came from a donor: (round of the weights, version of the weights).
                All other fragments' weights come from this peer's checkpoint, whose round is `self.restored`.
        """
        stage = self.routes.stage
        self._search, self.behind = RoundSearch(stage, round), ""
        for index in (cut.index for cut in own_fragments(stage)):
            first = contributions.first_version(stage.run, index, self.restored)
            own = self.restored, self.versions.get(index, first)
            self._fetched[index], self.versions[index] = taken.get(index, own)

    def stop(self) -> list[Effect]:
        """Leave the round, or stop looking for one; return the effects that give up all executions at this peer.

        Called when this peer is behind the other members; `self.behind` has the reason.
        """
        self.now_in = self.before = self._search = None
        ended = self.routes.end_round(everything=True)
        self.routes.begin_round(0, False, 0)
        self._record.take()
        return ended

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Return the effects of an event: questions, answers, jobs and journal lines.

        The node must also call this with a timer event (Woke) after each event that it has passed to another state
        machine, because the event may have completed a micro-batch.
        """
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

    def _search_on(self, now: Seconds) -> list[Effect]:
        if self._search is None:
            return []
        return self._search.ask(self.view, now) or self._begin_first(self._search, now)

    def _begin_first(self, search: RoundSearch, now: Seconds) -> list[Effect]:
        """If this peer must begin the first round, begin it as the only member, and return the effects; else []."""
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
        if query.joining and query.round >= self.number:  # the newcomer needs no more weights from us
            self.donor_holds.release(sender, now)
        if query.joining:
            self.join_requests.ask(member, now)
        run = self.routes.stage.run
        if self.now_in is None:
            return RoundStatus(run, self._search.round if self._search else self.restored, ())
        return RoundStatus(run, self.now_in.number, self.now_in.members)

    def _ask_elsewhere(self, round: Round) -> list[Effect]:
        """Return the questions that ask trainers outside our round which round they are in."""
        ours = {*round.peers, *self.join_requests.waiting}
        strangers = [peer for peer in self.view.trainers() if peer not in ours][:MAX_NEWCOMERS]
        return queries(ElsewhereTag(), round.stage, round.number, strangers)

    def _enter(self, number: int, members: tuple[RoundMember, ...], now: Seconds) -> list[Effect]:
        round = Round(self.routes.stage, number, members, number > self._followed_from, self.view)
        self.before, self.now_in = self.now_in, round
        self.join_requests.round_begins(round.peers, now)
        self._record.begin(members, round.stage.cuts)
        round.want_reports(now)
        self._follow_again_at = None if round.listed else now
        return self.routes.begin_round(number, round.acting, round.quota) + self.routes.handle(Woke(), now)

    def _progress(self, round: Round, now: Seconds) -> list[Effect]:
        """Advance the round as far as the arrived reports and sums allow, and return the effects."""
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
        """Return whether our report is due: all our micro-batches and all donor holds have ended.

        If the members do not train the whole model, the report also waits until there is a newcomer to admit.
        """
        return self._has_nothing_to_do and (round.covered or bool(self.join_requests.to_let_in(now)))

    def _close(self, round: Round, now: Seconds) -> list[Effect]:
        """Count the reports, and return the job that packs our sums of gradients.

        A follower has no sums. It begins to collect the members' sums, and returns no effects.
        """
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
        """Return the job that takes the step with all sums; if no gradients count, enter the next round instead."""
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
        self._search, self.now_in = RoundSearch(round.stage, number), None  # no member has reported: search again
        self._fetched = dict.fromkeys(self._fetched, number)
        return effects

    def _answer_collects(self, now: Seconds) -> list[Effect]:
        """Return replies to the waiting questions that we can answer, and refuse those whose patience has run out."""
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

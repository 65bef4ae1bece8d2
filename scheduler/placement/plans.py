"""Plans without a leader: any peer may propose which peer should hold which fragments, and all may adopt the proposal.

    the swarm changed --pause, back-off--> evaluate, with a search --better--> announce, adopt
    another's plan    --checked----------> evaluate ---------------better--> adopt
    adopted           --own span differs-> move (scheduler/placement/move.py), again while it fails

`SwarmPlans` is the machine, `SearchSchedule` says when to search, and `SwarmPlan` (evaluate.py) is one proposal. Peers
that hold the whole model are in no plan.

**Figure of merit.** A plan is worth the number of tokens on which the swarm trains within HORIZON_S, including the time
for moves. It is computed from the speeds, memories and links in the records (`tokens_ahead` in
scheduler/throughput/span_search.py). The best plan is adopted if its worth exceeds the worth of staying by a margin
(`is_cheaper`), and dropped once it is worth no more than staying. An evaluation covers all known plans and may take
seconds, so the host runs it in a thread: effect EvaluatePlans, event PlansEvaluated.

**Agreement.** Measurements are averages, so peers that evaluate at different moments may prefer different plans.
Therefore known plans are evaluated again when peers have moved, and until the adopted plan is carried out. Each change
to another plan doubles the time until the next evaluation, so that a move has time to finish. If plans are equal within
the margin, all peers rank them in the same way: by the fewest outstanding moves, then by the earlier interval of TIES_S
in which a plan was proposed, then by the lower digest.

**Age.** A plan says when the speed or memory of each of its peers had last changed (`SwarmPlan.changed`). Once
one of these peers publishes a later change, the plan is not followed any more, and a search is due.

**Search.** A peer searches for a better plan when the swarm has changed: a peer has joined or left, or says that its
speed or memory has changed (`Profile.changed`). It first waits for a pause, so that measurements catch up, and for a
random back-off, so that mostly one peer proposes a plan before others search. One search may miss the best plan, so
SEARCHES_AGAIN of the peers that have adopted another's plan search later, too. While a layer has no holder, nothing is
planned, as recovery takes it over (scheduler/placement/recover.py). If recovery is stuck, a search is due soon, and
again when a peer comes or goes. Then any plan in which all layers have holders is better than staying, so a peer that
hears of a plan evaluates it before it searches.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.messages import MAX_PLANS
from decentral.comm.wire.transport import Announce, Found, Lookup
from decentral.core import rng
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import PlanLine
from decentral.core.machine import Log
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.units import Seconds
from decentral.scheduler.placement.evaluate import (
    HORIZON_S,
    EvaluatePlans,
    PlansEvaluated,
    PlanTask,
    Spans,
    SwarmPlan,
    TrainingPeer,
    pack,
    unpack,
)
from decentral.scheduler.throughput.link_limits import TokenLinks

SENIOR_S = HORIZON_S  # all proposers that have been in the roster for at least this long have equal rank
PLAN_S = HORIZON_S  # plans older than this are dropped
PLAN_LOOKUP_S = 4.0
FIRST_MOVE_WAIT_S = 6.0  # peers begin to move when a plan is this old, as by then they know a better one, if any
TIES_S = 10.0  # equal plans are ranked by their date, rounded down to a multiple of this, then by digest
PLAN_RETRY_S = 3.0  # between two tries to move, a peer waits a random time, from this to twice this
EVALUATE_AGAIN_S = 10.0  # the same plans are evaluated again no sooner than this
MOST_EVALUATION_SHARE = 0.1  # repeated evaluations of the same plans may take at most this share of the time
MOST_EVALUATION_S = 6.0  # a longer evaluation was probably suspended, so its duration is capped at this
MARGIN = 0.02  # a peer changes to a plan only if it gains more than this share
MEASUREMENT_NOISE = 0.03  # added to MARGIN, because speeds are measured with about this error
NEWCOMER_PAUSE_S = 20.0  # after a peer has joined, a search waits this long for its speed to be measured
# After a peer has left, or changed its speed or memory, a search waits this long; a further change restarts the wait.
PLAN_PAUSE_S = 3.0
MOST_PAUSE_S = 8.0  # however often the swarm changes, a search waits at most this long after the first change
PLAN_BACKOFF_S = 6.0  # each peer adds a random wait of up to this, so that not all peers search at once
STUCK_AGAIN_S = 20.0  # while recovery is stuck, a search is due at this interval
REPLAN_REST_S = 30.0  # after a plan is adopted, changed speeds alone cause no search for this long
SEARCHES_AGAIN = 6.0  # about this many peers search beside an adopted plan, as one search may miss the best one
SEARCH_AGAIN_S = 60.0  # they do so within this time after REPLAN_REST_S, one after the other
STEADY_TIMES = 1.1  # a change of speed or memory by at least this factor prolongs the wait before a search


def key_of(run: RunId) -> str:
    """Return the DHT key of a run's plans, under which each proposer has a subkey."""
    return f"{run}/plan"


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A proposer's latest valid plan."""

    plan: SwarmPlan
    expires: Seconds
    sealed: bytes  # the plan with its proposer's signature, which we pass on to other peers


@dataclass(frozen=True, slots=True)
class PendingEvaluation:
    """An evaluation that the host's thread is carrying out, with its inputs."""

    number: int
    plans: tuple[SwarmPlan, ...]
    members: dict[PeerId, TrainingPeer]
    change: str  # what has changed in the swarm, if the evaluation searches for a better plan
    searched: bool


@dataclass(frozen=True, slots=True)
class LastEvaluation:
    """The time, inputs and duration of the last evaluation of plans.

    `was_changed` is whether plans or spans had changed since the evaluation before it, or a search was due.
    """

    spans: Mapping[PeerId, range] = field(default_factory=dict)
    at: Seconds = 0.0
    was_changed: bool = False
    took_s: Seconds = 0.0


@dataclass(slots=True)
class SearchSchedule:
    """The schedule of one peer's searches for a better plan."""

    chance: Random
    at: Seconds | None = None  # when the next search is due; None if nothing has changed
    change: str = ""
    again_at: Seconds | None = None  # when a search is due although nothing has changed; None: no such search
    _last_searched: Mapping[PeerId, TrainingPeer] = field(default_factory=dict)
    _latest: Mapping[PeerId, TrainingPeer] = field(default_factory=dict)
    _changed_at: Seconds = 0.0
    _backoff_s: Seconds = 0.0
    _rest_until: Seconds = 0.0
    _stuck_again_at: Seconds = 0.0
    _stuck: frozenset[PeerId] = frozenset()  # the peers for which `hasten` last scheduled a search

    def is_due(self, now: Seconds) -> bool:
        """Return whether a search is due."""
        return any(at is not None and now >= at for at in (self.at, self.again_at))

    def observe(self, members: Mapping[PeerId, TrainingPeer], now: Seconds) -> None:
        """Schedule a search if the swarm has changed, or postpone a scheduled search if the swarm is still changing."""
        before, self._latest = self._latest, dict(members)
        if not self._last_searched:
            self._last_searched = dict(members)
        elif not self.change:
            self._schedule(members, now)
        elif self.at is not None:
            same = before.keys() == members.keys()
            if not same or any(_differ(before[peer], members[peer], STEADY_TIMES) for peer in before):
                self.at = max(self.at, min(now + PLAN_PAUSE_S, self._changed_at + MOST_PAUSE_S) + self._backoff_s)

    def hasten(self, peers: Collection[PeerId], now: Seconds) -> None:
        """Schedule a search soon, because recovery is stuck; for the same peers at most once in STUCK_AGAIN_S."""
        if now < self._stuck_again_at and self._stuck == frozenset(peers):
            return
        self._stuck_again_at, self._stuck = now + STUCK_AGAIN_S, frozenset(peers)
        self.change = self.change or "layers without a holder"
        due = now + PLAN_PAUSE_S + PLAN_BACKOFF_S * self.chance.random()
        self.at = due if self.at is None else min(self.at, due)

    def _schedule(self, members: Mapping[PeerId, TrainingPeer], now: Seconds) -> None:
        known = self._last_searched
        gone, come = known.keys() - members.keys(), members.keys() - known.keys()
        both = known.keys() & members.keys()
        other = [peer for peer in both if members[peer].changed > known[peer].changed]
        if not gone and not come and (not other or now < self._rest_until):
            return
        parts = [(len(gone), "gone"), (len(come), "new"), (len(other), "faster or slower")]
        self.change = ", ".join(f"{count} {word}" for count, word in parts if count)
        self._changed_at = now
        self._backoff_s = PLAN_BACKOFF_S * self.chance.random()
        self.at = now + (PLAN_PAUSE_S if gone or other else NEWCOMER_PAUSE_S) + self._backoff_s

    def begin(self, members: Mapping[PeerId, TrainingPeer], searches: bool = True) -> str:
        """Record that an evaluation of plans for this swarm begins, and return the change that caused it, in words.

        No other search is due until the swarm changes again, but for that of `again_at` unless the evaluation searches.
        """
        self.again_at = None if searches else self.again_at
        change, self.change = self.change or "searched again", ""
        self._last_searched, self.at = dict(members), None
        return change

    def adopted(self, members: Mapping[PeerId, TrainingPeer], now: Seconds, ours: bool) -> None:
        """Cancel a scheduled search, because a plan was adopted that names these peers; others count as new to it.

        For REPLAN_REST_S, changes of speeds alone do not cause a new search. Then, unless the plan is `ours`, one more
        search is due with such a probability that about SEARCHES_AGAIN of the peers search.
        """
        self.begin(members)
        self._rest_until = now + REPLAN_REST_S
        again = not ours and self.chance.random() * len(members) < SEARCHES_AGAIN
        self.again_at = self._rest_until + SEARCH_AGAIN_S * self.chance.random() if again else None


class RosterAges(Protocol):
    """Interface that tells how long a peer has been known; peers/runtime/span_manager.py implements it."""

    def known_for_s(self, peer: PeerId, now: Seconds) -> Seconds | None:
        """Return the seconds for which a peer has been in the roster; None if it is not in the roster."""


@dataclass(slots=True)
class SwarmPlans:
    """The state machine that proposes, evaluates and adopts plans, and tells this peer which span to move to."""

    run: RunId
    own: Signer
    needs: MemoryNeeds
    links: TokenLinks
    least_holders: int  # a search keeps so many holders of each fragment; fewer if the scarcest fragment has fewer
    seed: int
    chance: Random
    roster: RosterAges = field(repr=False, compare=False)
    adopted: SwarmPlan | None = None
    search: SearchSchedule = field(init=False)
    _move_at: Seconds = 0.0
    _lookup_at: Seconds = 0.0
    known: dict[PeerId, KnownPlan] = field(default_factory=dict)
    _has_new: bool = False
    _last: LastEvaluation = field(default_factory=LastEvaluation)
    all_held: bool = True  # whether each layer had a holder at the last review
    _pause_s: Seconds = EVALUATE_AGAIN_S
    _pending: PendingEvaluation | None = None
    _number: int = 0

    def __post_init__(self) -> None:
        """Create `self.search`, the schedule of searches."""
        self.search = SearchSchedule(self.chance)

    @property
    def key(self) -> str:
        """Return the DHT key of the run's plans."""
        return key_of(self.run)

    def sealed(self, now: Seconds) -> dict[PeerId, bytes]:
        """Return the sealed plans that are valid now, by proposer."""
        return {proposer: known.sealed for proposer, known in self.known.items() if now < known.expires}

    def review(
        self, swarm: Mapping[PeerId, TrainingPeer], now: Seconds, stuck: bool = False
    ) -> list[Lookup | EvaluatePlans]:
        """Look up plans, and evaluate all known plans if some are new or a search is due; call it every few seconds.

        Args:
            swarm: All peers that train, ourselves included.
            now: Unix time in seconds.
            stuck: Whether some layers have no holder, and recovery is stuck.
        """
        members = {peer: one for peer, one in swarm.items() if len(one.held) < len(self.needs.fragments)}
        effects: list[Lookup | EvaluatePlans] = []
        if now >= self._lookup_at:
            self._lookup_at = now + PLAN_LOOKUP_S
            effects.append(Lookup(self.key))
        if self.adopted is not None and (now > self.adopted.time + PLAN_S or self.adopted.is_outdated(members)):
            self.adopted = None
        self.search.observe(members, now)
        if stuck:
            self.search.hasten(members, now)
        self.all_held = self._hold_all(swarm)
        searches = self.search.is_due(now) and not (stuck and self._has_new)  # any plan is better than none
        spans = {peer: one.held for peer, one in members.items()}
        changed = searches or self._has_new or spans != self._last.spans
        unsettled = changed or self._last.was_changed or not self._is_carried_out(spans)
        if self._has_new or members.keys() != self._last.spans.keys():
            self._pause_s = EVALUATE_AGAIN_S
        pause_s = max(self._pause_s, self._last.took_s / MOST_EVALUATION_SHARE)
        again = len(self.known) > 1 and unsettled and now >= self._last.at + pause_s
        if self._pending is None and (self._hold_all(members) or stuck) and (searches or self._has_new or again):
            self._last = LastEvaluation(spans, now, changed, self._last.took_s)
            effects.append(self._begin_evaluation(members, searches))
        return effects

    def handle(self, event: Found | PlansEvaluated, now: Seconds) -> list[Log | Announce]:
        """Store the plans that were found, or adopt the best plan if an evaluation shows that it is better.

        Plans that another peer has passed on (peers/membership/record_gossip.py) come as `Found`, too.
        """
        match event:
            case Found(key, values) if key == self.key:
                self._read(values, now)
            case PlansEvaluated(number=number) if self._pending is not None and number == self._pending.number:
                asked, self._pending = self._pending, None
                if not asked.searched:
                    self._last = replace(self._last, took_s=min(now - self._last.at, MOST_EVALUATION_S))
                return self._adopt_best(asked, event, now)
        return []

    def _hold_all(self, members: Mapping[PeerId, TrainingPeer]) -> bool:
        """Return whether these peers together hold all fragments."""
        return len({index for one in members.values() for index in one.held}) == len(self.needs.fragments)

    def _is_carried_out(self, held: Mapping[PeerId, range]) -> bool:
        """Return whether all peers hold the fragments that the adopted plan gives them; True without a plan."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return all(held.get(PeerId(peer), range(begin, end)) == range(begin, end) for peer, begin, end in spans)

    def drop_adopted(self) -> None:
        """Stop following the adopted plan, so that it causes no more moves here."""
        self.adopted = None

    def planned_span(self, held: range) -> range:
        """Return the fragments that the adopted plan gives this peer; `held` without a plan."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return next((range(begin, end) for peer, begin, end in spans if peer == self.own.peer), held)

    def planned_spans(self, swarm: Collection[PeerId]) -> list[range]:
        """Return the spans that the adopted plan gives to these peers; [] without a plan."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return [range(begin, end) for peer, begin, end in spans if peer in swarm]

    def takers(self, fragment: int, swarm: Collection[PeerId]) -> list[PeerId]:
        """Return the peers of `swarm` that should hold a fragment by the adopted plan; [] without a plan."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return [PeerId(peer) for peer, begin, end in spans if begin <= fragment < end and peer in swarm]

    def due_move(self, held: range, now: Seconds) -> range | None:
        """Return the fragments that this peer should try to move to now by the adopted plan; None if no try is due.

        A call that returns fragments postpones the next try by a random time from PLAN_RETRY_S to twice PLAN_RETRY_S.
        """
        span = self.planned_span(held)
        if span == held or now < self._move_at:
            return None
        self._move_at = now + PLAN_RETRY_S * (1 + self.chance.random())
        return span

    def _begin_evaluation(self, members: Mapping[PeerId, TrainingPeer], searches: bool) -> EvaluatePlans:
        self._number += 1
        proposals = tuple(known.plan for known in self.known.values() if not known.plan.is_outdated(members))
        has_new, self._has_new = self._has_new, False
        change = self.search.begin(members, searches) if searches or (has_new and self.search.at is None) else ""
        self._pending = PendingEvaluation(self._number, proposals, dict(members), change, searches)
        task = PlanTask(self.needs, tuple(sorted(members.items())), self.links, self.least_holders)
        seed = rng.seed_of(self.seed, "plan", self.own.peer, self._number)
        return EvaluatePlans(self._number, task, tuple(plan.spans for plan in proposals), searches, seed)

    def _adopt_best(self, asked: PendingEvaluation, found: PlansEvaluated, now: Seconds) -> list[Log | Announce]:
        """Adopt the best evaluated plan if it is better than staying, and announce it if this peer has proposed it."""
        plans = list(zip(found.proposed, asked.plans, strict=True))
        if any(plan == self.adopted and tokens <= found.stay_tokens for tokens, plan in plans):
            self.adopted = None
        follows = any(plan == self.adopted for _, plan in plans)
        ours = self._own_proposal(found, asked, now)
        if ours is not None:
            plans.append((found.found_tokens, ours))
        # A peer that has adopted a plan accepts any gain over staying; other peers require a margin.
        is_better = operator.lt if follows else _is_better
        better = [(tokens, plan) for tokens, plan in plans if is_better(found.stay_tokens, tokens)]
        most = max((tokens for tokens, _ in better), default=0.0)
        equal = [one for one in better if not is_cheaper(1 / most, 1 / one[0]) and not is_cheaper(1 / one[0], 1 / most)]
        if not equal:
            return []
        tokens, best = min(equal, key=lambda one: _order(one[1], asked.members))
        if best == self.adopted:
            return []
        if follows:
            self._pause_s = min(2 * self._pause_s, PLAN_S)
        self.adopted, self._move_at = best, max(now, min(now, best.time) + FIRST_MOVE_WAIT_S)
        named = {PeerId(peer) for peer, _, _ in best.spans}
        known = {peer: one for peer, one in asked.members.items() if peer in named}
        self.search.adopted(known, now, best is ours)
        line = Log(PlanLine(digest=best.digest(), cost=round(tokens / HORIZON_S, 1), reason=best.reason))
        return [line, self._announce(best, now)] if best is ours else [line]

    def _own_proposal(self, found: PlansEvaluated, asked: PendingEvaluation, now: Seconds) -> SwarmPlan | None:
        """Return the plan that our search has found; None if it is not better than staying by a margin."""
        if not found.found or not _is_better(found.stay_tokens, found.found_tokens):
            return None
        before, after = found.stay_tokens / HORIZON_S, found.found_tokens / HORIZON_S
        reason = f"{asked.change}: {found.moved} move, {after:,.0f} instead of {before:,.0f} tokens/s"
        changed = tuple(asked.members[PeerId(peer)].changed for peer, _, _ in found.found)
        return SwarmPlan(self.run, now, reason, found.found, changed)

    def _announce(self, plan: SwarmPlan, now: Seconds) -> Announce:
        expires = now + PLAN_S
        sealed = self.own.seal(self.key, pack(plan), expires)
        self.known[self.own.peer] = KnownPlan(plan, expires, sealed)
        return Announce(self.key, self.own.peer, sealed, expires)

    def _read(self, values: Mapping[str, bytes], now: Seconds) -> None:
        """Store each proposer's latest valid plan, including our own plan from before a restart."""
        before = {proposer: one for proposer, one in self.known.items() if now < one.expires}
        found = dict(before)
        for subkey, value in sorted(values.items()):
            try:
                body, expires = self.own.open(self.key, PeerId(subkey), value, now)
                plan = unpack(body)
            except ProtocolError:
                continue
            sound = is_sound(plan.spans, len(self.needs.fragments)) and len(plan.changed) == len(plan.spans)
            sound = sound and abs(plan.time - now) < PLAN_S
            known = found.get(PeerId(subkey))
            # Of a proposer's plans with one date, the lowest bytes win, so all peers keep the same plan in the end.
            newer = known is None or (plan.time, known.sealed) > (known.plan.time, value)
            if plan.run == self.run and sound and newer:
                found[PeerId(subkey)] = KnownPlan(plan, min(expires, plan.time + PLAN_S), value)
        latest = self._best_known(found, now)
        self.known = {proposer: found[proposer] for proposer in latest}
        self._has_new |= any(before.get(one) != self.known[one] for one in latest)
        if all(known.plan != self.adopted for known in self.known.values()):
            self.adopted = None

    def _best_known(self, found: Mapping[PeerId, KnownPlan], now: Seconds) -> list[PeerId]:
        """Return up to MAX_PLANS proposers whose plans are kept, ranked by their time in the roster, longest first.

        Our own plan and the adopted plan come first. All times above SENIOR_S rank alike. Proposers of the same rank
        are ordered by the date of their plan, latest first; a date in the future counts as now. Plans of peers outside
        the roster are ignored.
        """
        ages = {peer: SENIOR_S if peer == self.own.peer else self.roster.known_for_s(peer, now) for peer in found}
        in_roster = {peer: min(age, SENIOR_S) for peer, age in ages.items() if age is not None}
        others = {peer: peer != self.own.peer and found[peer].plan != self.adopted for peer in in_roster}
        dates = {peer: min(found[peer].plan.time, now) for peer in in_roster}
        order = sorted(in_roster, key=lambda peer: (others[peer], -in_roster[peer], -dates[peer], peer))
        return order[:MAX_PLANS]


def is_sound(spans: Spans, fragments: int) -> bool:
    """Return whether a plan names each peer only once and only existing fragments; memory is not checked here."""
    peers = [peer for peer, _, _ in spans]
    return len(set(peers)) == len(peers) and all(begin < end <= fragments for _, begin, end in spans)


def _order(plan: SwarmPlan, members: Mapping[PeerId, TrainingPeer]) -> tuple[int, float, str]:
    """Return the key by which plans of equal worth are sorted, so that all peers prefer the same plan."""
    spans = ((members[PeerId(peer)].held, range(begin, end)) for peer, begin, end in plan.spans if peer in members)
    return sum(held != planned for held, planned in spans), plan.time // TIES_S, plan.digest()


def _is_better(stay: float, proposed: float) -> bool:
    """Return whether `proposed` tokens exceed `stay` tokens by MARGIN and MEASUREMENT_NOISE, or `stay` is 0."""
    return proposed > 0 and (stay <= 0 or is_cheaper((1 - MEASUREMENT_NOISE) / stay, 1 / proposed))


def is_cheaper(current: float, proposed: float) -> bool:
    """Return whether the cost `proposed` is lower than the cost `current` by more than the share MARGIN."""
    return proposed < current * (1 - MARGIN)


def _differ(one: TrainingPeer, other: TrainingPeer, times: float) -> bool:
    """Return whether the speeds or memory sizes of two peers differ by the factor `times` or more."""
    pairs = [(one.tokens_per_s, other.tokens_per_s), (one.memory_bytes, other.memory_bytes)]
    return any(not 1 / times < (a + 1e-9) / (b + 1e-9) < times for a, b in pairs)

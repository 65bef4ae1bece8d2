"""Plans without a leader: any peer may propose who holds what; every peer judges for itself, and moves if it agrees.

    the swarm changed --pause, back-off--> evaluate, with a search --better--> announce, adopt
    another's plan    --checked----------> evaluate ---------------better--> adopt
    adopted           --own span differs-> move (scheduler/placement/move.py), again while it fails

There is one figure of merit (`tokens_ahead` in scheduler/throughput/span_search.py): the tokens that the swarm trains
within HORIZON_S, moves included, by the measured speeds, memories and links in the records. A plan is adopted only if
its figure exceeds that of staying by a margin (`adopts`), and dropped when it does not any more. Of several plans the
best is adopted, and where several are known they are judged again when peers have moved, as a plan that is better by
then than staying may be the one that the others follow already, and until the plan that is followed has been carried
out: figures are averages that follow late, so peers that judge at other moments take another plan for the best, and who
has to move for one plan may follow another. Each change of mind doubles the time to the next judgement, so that in the
end a move has the time that it takes, however near two plans are. Plans that are equal within the margin have an order
that all peers agree on, whichever they heard of first: the one for which the fewest have still to move, so that each
move for one speaks for it, then those proposed in the earlier interval of TIES_S, then the lowest digest. An evaluation
takes all known plans, so that a newcomer finds the one that others follow. It may take seconds in a large swarm, so a
host does it beside its event loop: effect EvaluatePlans, event PlansEvaluated.

A search (`SearchSchedule`) follows when the swarm has changed and has become steady again, in this peer's turn. A
change is a peer that has come or gone, or one whose speed or memory is CHANGED_TIMES as much or as little as when plans
were last evaluated. Each peer then waits for a pause, so that others' measurements follow, and for a random back-off,
so that mostly one peer's plan is there before the others search.

Peers that hold the whole model train without routes, and are in no plan.
"""

import dataclasses
import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Annotated, Protocol

import msgpack
from pydantic import AfterValidator, Field, Strict, TypeAdapter

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.messages import Count, Digest, Index, Peer, Run, UnixTime
from decentral.comm.wire.transport import Announce, Found, Lookup
from decentral.core import rng
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.journal.events import PlanLine
from decentral.core.machine import Log
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.plain_text import plain_text
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.scheduler.placement.evaluate import (
    HORIZON_S,
    EvaluatePlans,
    PlansEvaluated,
    PlanTask,
    Spans,
    TrainingPeer,
)

MOST_PLANNED_SPANS = 4096
MOST_PLANS = 8  # plans that are evaluated at a time: of those that have been here for long, the latest ones
SENIOR_S = HORIZON_S  # after so long in the roster all peers are alike; new names displace nobody's plan
PLAN_S = HORIZON_S  # age at which all peers drop a plan
PLAN_LOOKUP_S = 4.0  # between two lookups of others' plans
FIRST_MOVE_WAIT_S = 6.0  # before the first move: meanwhile an equal plan may turn up that all adopt instead
TIES_S = 10.0  # interval of proposal: equal plans of an earlier one go first, as some peers have moved for them
PLAN_RETRY_S = 3.0  # between two tries to move
JUDGE_AGAIN_S = 10.0  # between two evaluations of the same plans, at least
JUDGED_SHARE = 0.1  # of the time goes to evaluations of the same plans, at most
MOST_JUDGING_S = 6.0  # an evaluation that took longer was held up by something else, such as a suspended machine
MARGIN = 0.02  # a new plan must be better by this share before a peer changes to it
MEASUREMENT_NOISE = 0.03  # relative, on top of the margin of a plan whose figures are exact

# When a search is due

NEWCOMER_PAUSE_S = 20.0  # after a peer has come: it chose a useful span itself, and its speed is not measured yet
PLAN_PAUSE_S = 3.0  # pause after another change, as speeds are averages; again while the swarm goes on changing ...
MOST_PAUSE_S = 8.0  # ... up to this long after the first change
PLAN_BACKOFF_S = 6.0  # upper bound of the random back-off after the pause
REPLAN_REST_S = 30.0  # pause after a plan was adopted, before changes of speeds alone lead to a search
CHANGED_TIMES = 1.5  # a speed or a memory this many times larger or smaller is a change
STEADY_TIMES = 1.1  # between two reviews; above that the change still goes on

Members = Mapping[PeerId, TrainingPeer]
PlanReason = Annotated[str, Strict(), Field(max_length=200), AfterValidator(partial(plain_text, most=200))]
Figure = Annotated[float, Strict(), Field(ge=0, lt=1e18, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """A proposal which peer should hold which fragments."""

    run: Run
    time: UnixTime  # when it was proposed
    topology: Digest  # digest of the proposer's measurements
    tokens_per_s: Figure  # expected by the proposer, moves included
    moves: Count  # number of peers that have to move for it
    reason: PlanReason
    spans: Annotated[tuple[tuple[Peer, Index, Index], ...], Field(max_length=MOST_PLANNED_SPANS)]  # [begin, end)

    def digest(self) -> str:
        return hashlib.blake2b(pack(self), digest_size=16).hexdigest()


_PLAN = TypeAdapter(SwarmPlan)


def pack(plan: SwarmPlan) -> bytes:
    body: bytes = msgpack.packb(dataclasses.asdict(plan))
    return body


def unpack(body: bytes) -> SwarmPlan:
    """Raises ProtocolError for anything that is not a SwarmPlan."""
    return records.checked(_PLAN, body)


def key_of(run: RunId) -> str:
    """The key of a run's plans in the DHT. Each proposer has a subkey."""
    return f"{run}/plan"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation under way: its number, the plans and the swarm that it is about, and the change that led to it."""

    number: int
    plans: tuple[SwarmPlan, ...]
    members: dict[PeerId, TrainingPeer]
    change: str
    searched: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """The last evaluation."""

    spans: Mapping[PeerId, range] = field(default_factory=dict)  # what each peer held
    at: Seconds = 0.0
    first: bool = False  # whether spans or proposals had changed
    took_s: Seconds = 0.0


@dataclass(slots=True)
class SearchSchedule:
    chance: Random
    at: Seconds | None = None  # when the next search is due; None: nothing has changed
    change: str = ""  # what has changed since plans were last evaluated
    led_by: str = ""  # the change that led to the last search
    _evaluated: Members = field(default_factory=dict)  # the swarm at that evaluation
    _latest: Members = field(default_factory=dict)  # the swarm at the last review
    _changed_at: Seconds = 0.0
    _backoff_s: Seconds = 0.0
    _rest_until: Seconds = 0.0

    def is_due(self, now: Seconds) -> bool:
        return self.at is not None and now >= self.at

    def observe(self, members: Members, now: Seconds) -> None:
        """Schedules a search if the swarm has changed, or postpones it while the swarm goes on changing."""
        before, self._latest = self._latest, dict(members)
        if not self._evaluated:
            self._evaluated = dict(members)
        elif not self.change:
            self._schedule(members, now)
        elif self.at is not None:
            same = before.keys() == members.keys()
            if not same or any(_differ(before[peer], members[peer], STEADY_TIMES) for peer in before):
                self.at = max(self.at, min(now + PLAN_PAUSE_S, self._changed_at + MOST_PAUSE_S) + self._backoff_s)

    def _schedule(self, members: Members, now: Seconds) -> None:
        known = self._evaluated
        gone, come = known.keys() - members.keys(), members.keys() - known.keys()
        both = known.keys() & members.keys()
        other = [peer for peer in both if _differ(known[peer], members[peer], CHANGED_TIMES)]
        if not gone and not come and (not other or now < self._rest_until):
            return
        parts = [(len(gone), "gone"), (len(come), "new"), (len(other), "faster or slower")]
        self.change = ", ".join(f"{count} {word}" for count, word in parts if count)
        self._changed_at = now
        self._backoff_s = PLAN_BACKOFF_S * self.chance.random()
        self.at = now + (PLAN_PAUSE_S if gone or other else NEWCOMER_PAUSE_S) + self._backoff_s

    def evaluated(self, members: Members) -> str:
        """Plans are evaluated for this swarm now. Gives the change that led to it."""
        change, self.change = self.change, ""
        self._evaluated, self.at = dict(members), None
        return change

    def adopted(self, members: Members, now: Seconds) -> None:
        """A plan was adopted that was evaluated for this swarm: no search is due any more."""
        self.evaluated(members)
        self._rest_until = now + REPLAN_REST_S


class RosterAges(Protocol):
    """Knows since when peers are in the roster."""

    def known_for_s(self, peer: PeerId, now: Seconds) -> Seconds | None:
        """Return for how long a peer has been in the roster; None: it is not there."""


@dataclass(slots=True)
class SwarmPlans:
    run: RunId
    own: Signer
    needs: MemoryNeeds
    hidden_bytes: float  # size of a token's hidden state between two layers
    holders: int  # other holders that a fragment keeps when a peer gives it up
    seed: int
    chance: Random
    roster: RosterAges = field(repr=False, compare=False)
    adopted: SwarmPlan | None = None
    search: SearchSchedule = field(init=False)
    _move_at: Seconds = 0.0  # the next try to move
    _lookup_at: Seconds = 0.0
    _known: dict[PeerId, tuple[SwarmPlan, Seconds]] = field(default_factory=dict)  # latest plan and expiry by proposer
    _has_new: bool = False  # whether some known plan has not been evaluated yet
    _judged: Judged = field(default_factory=Judged)
    _pause_s: Seconds = JUDGE_AGAIN_S  # until the same plans are judged again
    _evaluation: Evaluation | None = None
    _number: int = 0  # number of the last evaluation

    def __post_init__(self) -> None:
        self.search = SearchSchedule(self.chance)

    def review(self, swarm: Mapping[PeerId, TrainingPeer], now: Seconds) -> list[Lookup | EvaluatePlans]:
        """Looks up plans, and evaluates them if there are new ones or a search is due.

        `swarm`: all peers that train, ourselves included. To be called every few seconds.
        """
        members = {peer: one for peer, one in swarm.items() if len(one.held) < len(self.needs.fragments)}
        effects: list[Lookup | EvaluatePlans] = []
        if now >= self._lookup_at:
            self._lookup_at = now + PLAN_LOOKUP_S
            effects.append(Lookup(key_of(self.run)))
        if self.adopted is not None and now > self.adopted.time + PLAN_S:
            self.adopted = None
        self.search.observe(members, now)
        held = {index for one in members.values() for index in one.held}
        all_held = len(held) == len(self.needs.fragments)  # lost layers come first: scheduler/placement/recover.py
        searches = self.search.is_due(now)
        spans = {peer: one.held for peer, one in members.items()}
        changed = searches or self._has_new or spans != self._judged.spans
        unsettled = changed or self._judged.first or not self._is_carried_out(spans)
        if self._has_new or members.keys() != self._judged.spans.keys():
            self._pause_s = JUDGE_AGAIN_S
        pause_s = max(self._pause_s, self._judged.took_s / JUDGED_SHARE)
        again = len(self._known) > 1 and unsettled and now >= self._judged.at + pause_s
        if self._evaluation is None and all_held and (searches or self._has_new or again):
            self._judged = Judged(spans, now, changed, self._judged.took_s)
            effects.append(self._evaluate(members, searches))
        return effects

    def handle(self, event: Found | PlansEvaluated, now: Seconds) -> list[Log | Announce]:
        match event:
            case Found(key, values) if key == key_of(self.run):
                self._read(values, now)
            case PlansEvaluated(number=number) if self._evaluation is not None and number == self._evaluation.number:
                evaluation, self._evaluation = self._evaluation, None
                if not evaluation.searched:
                    self._judged = replace(self._judged, took_s=min(now - self._judged.at, MOST_JUDGING_S))
                return self._evaluated(evaluation, event, now)
        return []

    def _is_carried_out(self, held: Mapping[PeerId, range]) -> bool:
        """Whether nobody has to move any more for the plan that we follow."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return all(held.get(PeerId(peer), range(begin, end)) == range(begin, end) for peer, begin, end in spans)

    def drop_adopted(self) -> None:
        self.adopted = None

    def planned_span(self, held: range) -> range:
        """The span that the adopted plan gives this peer; `held` if there is none."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return next((range(begin, end) for peer, begin, end in spans if peer == self.own.peer), held)

    def due_move(self, held: range, now: Seconds) -> range | None:
        """The span that this peer should try to move to now, by the adopted plan."""
        span = self.planned_span(held)
        if span == held or now < self._move_at:
            return None
        self._move_at = now + PLAN_RETRY_S * (1 + self.chance.random())
        return span

    def _evaluate(self, members: Mapping[PeerId, TrainingPeer], searches: bool) -> EvaluatePlans:
        self._number += 1
        proposals = tuple(plan for plan, _ in self._known.values())
        has_new, self._has_new = self._has_new, False
        if searches or (has_new and self.search.at is None):
            self.search.led_by = self.search.evaluated(members)
        self._evaluation = Evaluation(self._number, proposals, dict(members), self.search.led_by, searches)
        task = PlanTask(self.needs, tuple(sorted(members.items())), self.hidden_bytes, self.holders)
        seed = rng.seed_of(self.seed, "plan", self.own.peer, self._number)
        return EvaluatePlans(self._number, task, tuple(plan.spans for plan in proposals), searches, seed)

    def _evaluated(self, evaluation: Evaluation, found: PlansEvaluated, now: Seconds) -> list[Log | Announce]:
        """Adopts the best plan, if one is better than staying and not adopted yet."""
        plans = list(zip(found.proposed, evaluation.plans, strict=True))
        if any(plan == self.adopted and tokens <= found.stay_tokens for tokens, plan in plans):
            self.adopted = None
        follows = any(plan == self.adopted for _, plan in plans)
        ours = self._own_proposal(found, evaluation.change, now)
        if ours is not None:
            plans.append((found.found_tokens, ours))
        # A peer that follows a plan switches without the margin.
        is_better = operator.lt if follows else _is_better
        better = [(tokens, plan) for tokens, plan in plans if is_better(found.stay_tokens, tokens)]
        most = max((tokens for tokens, _ in better), default=0.0)
        equal = [one for one in better if not adopts(1 / most, 1 / one[0]) and not adopts(1 / one[0], 1 / most)]
        if not equal:
            return []
        tokens, best = min(equal, key=lambda one: _order(one[1], evaluation.members))
        if best == self.adopted:
            return []
        if follows:
            self._pause_s = min(2 * self._pause_s, PLAN_S)
        self.adopted, self._move_at = best, now + FIRST_MOVE_WAIT_S
        self.search.adopted(evaluation.members, now)
        line = Log(PlanLine(digest=best.digest(), cost=round(tokens / HORIZON_S, 1), reason=best.reason))
        return [line, self._announce(best, now)] if best is ours else [line]

    def _own_proposal(self, found: PlansEvaluated, change: str, now: Seconds) -> SwarmPlan | None:
        """What the search has found, as a plan; None if it is no better than staying."""
        if not found.found or not _is_better(found.stay_tokens, found.found_tokens):
            return None
        before, after = found.stay_tokens / HORIZON_S, found.found_tokens / HORIZON_S
        reason = f"{change}: {found.moved} move, {after:,.0f} instead of {before:,.0f} tokens/s"
        return SwarmPlan(self.run, now, found.topology, after, found.moved, reason, found.found)

    def _announce(self, plan: SwarmPlan, now: Seconds) -> Announce:
        key, expires = key_of(self.run), now + PLAN_S
        self._known[self.own.peer] = plan, expires
        return Announce(key, self.own.peer, self.own.seal(key, pack(plan), expires), expires)

    def _read(self, values: Mapping[str, bytes], now: Seconds) -> None:
        """Takes each proposer's latest plan, among them ours from before a restart; the DHT may show older ones again.

        What is no plan of this run, or breaks its bounds, is ignored.
        """
        before = {proposer: one for proposer, one in self._known.items() if now < one[1]}
        found = dict(before)
        for subkey, value in sorted(values.items()):
            try:
                body, expires = self.own.open(key_of(self.run), PeerId(subkey), value, now)
                plan = unpack(body)
            except ProtocolError:
                continue
            sound = abs(plan.time - now) < PLAN_S and is_sound(plan.spans, len(self.needs.fragments))
            known = found.get(PeerId(subkey))
            if plan.run == self.run and sound and (known is None or plan.time > known[0].time):
                found[PeerId(subkey)] = plan, min(expires, plan.time + PLAN_S)
        latest = self._best_known(found, now)
        self._known = {proposer: found[proposer] for proposer in latest}
        self._has_new |= any(before.get(one, (None,))[0] != self._known[one][0] for one in latest)
        if all(plan != self.adopted for plan, _ in self._known.values()):
            self.adopted = None  # its proposer has a newer plan

    def _best_known(self, found: Mapping[PeerId, tuple[SwarmPlan, Seconds]], now: Seconds) -> list[PeerId]:
        """Of whom a plan is kept: our own, then of those longest in the roster, and of these the latest. A peer outside
        the roster proposes nothing."""
        ages = {peer: SENIOR_S if peer == self.own.peer else self.roster.known_for_s(peer, now) for peer in found}
        in_roster = {peer: min(age, SENIOR_S) for peer, age in ages.items() if age is not None}
        order = sorted(in_roster, key=lambda peer: (-in_roster[peer], -found[peer][0].time, peer))
        return order[:MOST_PLANS]


def is_sound(spans: Spans, fragments: int) -> bool:
    """Whether each peer is named once, with existing fragments. An evaluation checks memory and coverage."""
    peers = [peer for peer, _, _ in spans]
    return len(set(peers)) == len(peers) and all(begin < end <= fragments for _, begin, end in spans)


def _order(plan: SwarmPlan, members: Mapping[PeerId, TrainingPeer]) -> tuple[int, float, str]:
    """The order of equal plans: all peers adopt the first one."""
    spans = ((members[PeerId(peer)].held, range(begin, end)) for peer, begin, end in plan.spans if peer in members)
    return sum(held != planned for held, planned in spans), plan.time // TIES_S, plan.digest()


def _is_better(stay: float, proposed: float) -> bool:
    """Compares seconds per token, as the margin does. A swarm that trains is better than one that does not."""
    return proposed > 0 and (stay <= 0 or adopts((1 - MEASUREMENT_NOISE) / stay, 1 / proposed))


def adopts(current: float, proposed: float) -> bool:
    """Whether a peer that pays `current` seconds changes to a plan that its own evaluation puts at `proposed`."""
    return proposed < current * (1 - MARGIN)


def _differ(one: TrainingPeer, other: TrainingPeer, times: float) -> bool:
    """Whether its speed or its memory is larger or smaller by this factor."""
    pairs = [(one.tokens_per_s, other.tokens_per_s), (one.memory_bytes, other.memory_bytes)]
    return any(not 1 / times < (a + 1e-9) / (b + 1e-9) < times for a, b in pairs)

"""Plans without a leader: any peer may propose who holds what, every peer judges for itself, and moves if it agrees.

    something changed --pause, back-off--> weigh, with a search --better--> announce, adopt
    another's plan    --checked----------> weigh ---------------better--> adopt
    adopted           --own span differs-> move (peers/placement/span_move.py), again while it fails

One figure of merit (scheduler/throughput/replan.py): the tokens that the swarm trains within HORIZON_S, moves included, by the
measured speeds, memories and links in everybody's record. A plan is adopted only if its figure is better by a margin
(scheduler/sync/sync_plan.py) than that of staying, and let go when it is not better any more; of several the best one. Of equal
ones all take the same: of those proposed within the same TIES_S, the first ones, that with the fewest moves, then with
the lowest digest. That order is in the plans, so it does not matter who heard of which when; and whoever weighs weighs
all plans that are there, so that who came late finds what others follow. Weighing takes seconds in a large swarm, so a
host does it beside its event loop: effect EvaluatePlans, event PlansEvaluated.

Peers that hold the whole model train by themselves, and are in no plan.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Annotated

import msgpack
from pydantic import Field, Strict, TypeAdapter

from decentral.comm.wire.identity import Signer
from decentral.comm.wire.messages import Count, Digest, Index, Peer, Run, UnixTime
from decentral.comm.wire.transport import Announce, Found, Lookup
from decentral.core import rng
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Effect, log
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.units import Seconds
from decentral.peers.membership import records
from decentral.peers.placement.layer_recovery import TrainingPeer
from decentral.peers.planning.plan_evaluation import HORIZON_S, EvaluatePlans, PlansEvaluated, PlanTask, Spans
from decentral.scheduler.shared.margin import adopts

MOST_PLANNED_SPANS = 4096
MOST_PLANS = 8  # that are weighed at a time: the latest
PLAN_S = HORIZON_S  # from its proposal: then it is let go of, by all at the same time
PLAN_LOOK_S = 4.0  # between two looks at others' plans
NEW_S = 20.0  # after somebody came: it chose its span for the swarm's good, and its speed has to be measured
PLAN_PAUSE_S = 3.0  # after a change: others follow, and speeds are averages; again while it goes on ...
MOST_PAUSE_S = 8.0  # ... until so long after it began
PLAN_BACKOFF_S = 6.0  # at most, after the pause: mostly the first one's plan is there before the others search
REST_S = 30.0  # after a plan, before changes of speeds alone lead to another
WAIT_S = 6.0  # before the first move: an equal plan may turn up meanwhile that all take instead
TIES_S = 10.0  # of plans that are equal the first ones go before later ones: some have moved for them
PLAN_RETRY_S = 3.0  # between two tries to move
MEASUREMENT_NOISE = 0.03  # of what measurements say, beside the margin of a plan that is known exactly
CHANGED_TIMES = 1.5  # times faster or slower: a change
STEADY = 1.1  # no more than that between two looks: it is over

Reason = Annotated[str, Strict(), Field(max_length=200)]
Figure = Annotated[float, Strict(), Field(ge=0, lt=1e18, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """Who should hold which fragments [begin, end). `tokens_per_s`: what the proposer expects, moves included.

    `moves`: how many peers have to move for it. `topology`: digest of what the proposer knew of the swarm.
    """

    run: Run
    time: UnixTime
    topology: Digest
    tokens_per_s: Figure
    moves: Count
    reason: Reason
    spans: Annotated[tuple[tuple[Peer, Index, Index], ...], Field(max_length=MOST_PLANNED_SPANS)]

    def digest(self) -> str:
        return hashlib.blake2b(pack(self), digest_size=16).hexdigest()


_PLAN = TypeAdapter(SwarmPlan)


def pack(plan: SwarmPlan) -> bytes:
    body: bytes = msgpack.packb(dataclasses.asdict(plan))
    return body


def unpack(body: bytes) -> SwarmPlan:
    """Raises ProtocolError for anything that is not a Plan."""
    return records.checked(_PLAN, body)


def key_of(run: RunId) -> str:
    """Where the plans of a run are in the DHT, a subkey for each proposer."""
    return f"{run}/plan"


@dataclass(slots=True)
class SwarmPlans:
    run: RunId
    own: Signer
    needs: MemoryNeeds
    hidden_bytes: float
    holders: int
    seed: int
    chance: Random
    adopted: SwarmPlan | None = None
    tried: int = 0  # moves that were begun for it
    _move_at: Seconds = 0.0
    _known: dict[PeerId, TrainingPeer] = field(default_factory=dict)  # the swarm when we last weighed
    _latest: dict[PeerId, TrainingPeer] = field(default_factory=dict)  # at the last look
    _changed: str = ""  # what has changed since we weighed
    _changed_at: Seconds = 0.0
    _why: str = ""  # we search
    _backoff_s: Seconds = 0.0
    _search_at: Seconds | None = None
    _look_at: Seconds = 0.0
    _rest_until: Seconds = 0.0
    _there: dict[PeerId, tuple[SwarmPlan, Seconds]] = field(
        default_factory=dict
    )  # each proposer's latest, and until when
    _fresh: bool = False  # some of them were not weighed yet
    _weighing: tuple[int, tuple[SwarmPlan, ...], dict[PeerId, TrainingPeer]] | None = None
    _number: int = 0

    def look(self, swarm: Mapping[PeerId, TrainingPeer], now: Seconds) -> list[Effect]:
        """Now and then. `swarm`: who trains, ourselves included."""
        members = {peer: one for peer, one in swarm.items() if len(one.held) < len(self.needs.fragments)}
        effects: list[Effect] = []
        if now >= self._look_at:
            self._look_at = now + PLAN_LOOK_S
            effects.append(Lookup(key_of(self.run)))
        if self.adopted is not None and now > self.adopted.time + PLAN_S:
            self.adopted = None
        self._notice(members, now)
        covered = all(any(index in one.held for one in members.values()) for index in range(len(self.needs.fragments)))
        if self._weighing is not None or not covered:
            return effects  # lost layers come first: peers/placement/layer_recovery.py
        searches = self._search_at is not None and now >= self._search_at
        if searches or self._fresh:
            return [*effects, self._weigh(members, searches)]
        return effects

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Found(key, values) if key == key_of(self.run):
                self._read(values, now)
            case PlansEvaluated(number=number) if self._weighing is not None and number == self._weighing[0]:
                return self._weighed(event, now)
        return []

    def goal(self, held: range, now: Seconds) -> range | None:
        """Where the adopted plan wants us to move now."""
        wanted = self.wanted(held)
        if wanted == held or now < self._move_at:
            return None
        self.tried += 1
        self._move_at = now + PLAN_RETRY_S * (1 + self.chance.random())
        return wanted

    def wanted(self, held: range) -> range:
        """What the adopted plan has us hold."""
        spans = self.adopted.spans if self.adopted is not None else ()
        return next((range(begin, end) for peer, begin, end in spans if peer == self.own.peer), held)

    # What has changed

    def _notice(self, members: Mapping[PeerId, TrainingPeer], now: Seconds) -> None:
        """A change leads to a search, when nothing changes any more, and after a back-off: others may be first."""
        before, self._latest = self._latest, dict(members)
        if not self._known:
            self._known = dict(members)
            return
        if self._changed:
            moving = before.keys() != members.keys() or any(_differ(before[p], members[p], STEADY) for p in before)
            if moving and self._search_at is not None:
                paused = min(now + PLAN_PAUSE_S, self._changed_at + MOST_PAUSE_S) + self._backoff_s
                self._search_at = max(self._search_at, paused)
            return
        gone, come = self._known.keys() - members.keys(), members.keys() - self._known.keys()
        other = [
            peer
            for peer in self._known.keys() & members.keys()
            if _differ(self._known[peer], members[peer], CHANGED_TIMES)
        ]
        if not gone and not come and (not other or now < self._rest_until):
            return
        parts = [(len(gone), "gone"), (len(come), "new"), (len(other), "faster or slower")]
        self._changed = ", ".join(f"{count} {word}" for count, word in parts if count)
        self._changed_at = now
        self._backoff_s = PLAN_BACKOFF_S * self.chance.random()
        self._search_at = now + (PLAN_PAUSE_S if gone or other else NEW_S) + self._backoff_s

    # Weighing

    def _weigh(self, members: Mapping[PeerId, TrainingPeer], searches: bool) -> EvaluatePlans:
        self._number += 1
        proposals = tuple(plan for plan, _ in self._there.values())
        self._fresh = False
        self._weighing = (self._number, proposals, dict(members))
        if searches or self._search_at is None:
            self._why, self._changed = self._changed, ""
            self._known, self._search_at = dict(members), None
        task = PlanTask(self.needs, tuple(sorted(members.items())), self.hidden_bytes, self.holders)
        seed = rng.seed_of(self.seed, "plan", self.own.peer, self._number)
        return EvaluatePlans(self._number, task, tuple(plan.spans for plan in proposals), searches, seed)

    def _weighed(self, found: PlansEvaluated, now: Seconds) -> list[Effect]:
        assert self._weighing is not None
        (_, proposals, members), self._weighing = self._weighing, None
        plans = list(zip(found.proposed, proposals, strict=True))
        if any(plan == self.adopted and tokens <= found.stay_tokens for tokens, plan in plans):
            self.adopted = None
        ours = self._ours(found, self._why, now)
        if ours is not None:
            plans.append((found.found_tokens, ours))
        better = [(tokens, plan) for tokens, plan in plans if _better(found.stay_tokens, tokens)]
        most = max((tokens for tokens, _ in better), default=0.0)
        equal = [one for one in better if not adopts(1 / most, 1 / one[0]) and not adopts(1 / one[0], 1 / most)]
        if not equal:
            return []
        tokens, best = min(equal, key=lambda one: _rank(one[1]))
        if best == self.adopted:
            return []
        self.adopted, self.tried, self._known = best, 0, members
        self._rest_until = now + REST_S
        self._move_at = now + WAIT_S
        self._changed, self._search_at = "", None
        line = log("plan", digest=best.digest(), cost=round(tokens / HORIZON_S, 1), reason=best.reason)
        return [line, self._announce(best, now)] if best is ours else [line]

    def _ours(self, found: PlansEvaluated, changed: str, now: Seconds) -> SwarmPlan | None:
        if not found.found or not _better(found.stay_tokens, found.found_tokens):
            return None
        before, after = found.stay_tokens / HORIZON_S, found.found_tokens / HORIZON_S
        reason = f"{changed}: {found.moved} move, {after:,.0f} instead of {before:,.0f} tokens/s"
        return SwarmPlan(self.run, now, found.topology, after, found.moved, reason, found.found)

    def _announce(self, plan: SwarmPlan, now: Seconds) -> Announce:
        key, expires = key_of(self.run), now + PLAN_S
        self._there[self.own.peer] = plan, expires
        return Announce(key, self.own.peer, self.own.seal(key, pack(plan), expires), expires)

    # Others' plans

    def _read(self, values: Mapping[str, bytes], now: Seconds) -> None:
        """Each proposer's latest, ours from before a restart among them: the DHT may show an older one for a while.

        What is no plan of this run, or breaks its bounds, is left out.
        """
        before = {proposer: one for proposer, one in self._there.items() if now < one[1]}
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
        latest = sorted(found, key=lambda proposer: (-found[proposer][0].time, proposer))[:MOST_PLANS]
        self._there = {proposer: found[proposer] for proposer in latest}
        self._fresh |= any(before.get(one, (None,))[0] != self._there[one][0] for one in latest)
        if all(plan != self.adopted for plan, _ in self._there.values()):
            self.adopted = None  # whoever proposed it has a newer one


def is_sound(spans: Spans, fragments: int) -> bool:
    """Whether every peer is there once, with fragments that there are. Memory and coverage: when it is weighed."""
    peers = [peer for peer, _, _ in spans]
    return len(set(peers)) == len(peers) and all(begin < end <= fragments for _, begin, end in spans)


def _rank(plan: SwarmPlan) -> tuple[float, int, str]:
    """Of equal plans the least one is taken."""
    return plan.time // TIES_S, plan.moves, plan.digest()


def _better(stay: float, proposed: float) -> bool:
    """In seconds a token, as plans are compared; whatever trains is better than what does not."""
    return proposed > 0 and (stay <= 0 or adopts((1 - MEASUREMENT_NOISE) / stay, 1 / proposed))


def _differ(one: TrainingPeer, other: TrainingPeer, times: float) -> bool:
    """Whether its speed or its memory is more or less by this factor."""
    pairs = [(one.tokens_per_s, other.tokens_per_s), (one.memory_bytes, other.memory_bytes)]
    return any(not 1 / times < (a + 1e-9) / (b + 1e-9) < times for a, b in pairs)


__all__ = ["SwarmPlan", "SwarmPlans", "is_sound", "key_of", "pack", "unpack"]

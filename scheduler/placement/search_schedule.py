"""When a peer should search for a better plan: after the swarm has changed, when it has become steady, in its turn.

A change is a peer that has come or gone, or one whose speed or memory is CHANGED_TIMES as much or as little as when
plans were last evaluated. Each peer then waits for a pause, so that others' measurements follow, and for a random
back-off, so that mostly one peer's plan is there before the others search.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.scheduler.placement.recover import TrainingPeer

NEWCOMER_PAUSE_S = 20.0  # pause after a peer came, which chose its span well and whose speed has to be measured
PLAN_PAUSE_S = 3.0  # pause after another change, as speeds are averages; again while the swarm goes on changing ...
MOST_PAUSE_S = 8.0  # ... up to this long after the first change
PLAN_BACKOFF_S = 6.0  # upper bound of the random back-off after the pause
REPLAN_REST_S = 30.0  # pause after a plan was adopted, before changes of speeds alone lead to a search
CHANGED_TIMES = 1.5  # a speed or a memory this many times larger or smaller is a change
STEADY_TIMES = 1.1  # between two reviews; above that the change still goes on

Members = Mapping[PeerId, TrainingPeer]


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


def _differ(one: TrainingPeer, other: TrainingPeer, times: float) -> bool:
    """Whether its speed or its memory is larger or smaller by this factor."""
    pairs = [(one.tokens_per_s, other.tokens_per_s), (one.memory_bytes, other.memory_bytes)]
    return any(not 1 / times < (a + 1e-9) / (b + 1e-9) < times for a, b in pairs)

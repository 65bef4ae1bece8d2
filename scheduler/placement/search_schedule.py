"""Decide when a peer searches for a better plan. See `SearchSchedule`.

A search is due when the swarm has changed: a peer has joined or left, or says that its speed or memory has changed
since the last evaluation (`Profile.changed`). The peer first waits for a pause, so that measurements catch up, and for
a random back-off, so that mostly one peer proposes a plan before others search. If layers have no holder and recovery
is stuck (scheduler/placement/recover.py), a search is due soon.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.scheduler.placement.evaluate import TrainingPeer

NEWCOMER_PAUSE_S = 20.0  # after a peer has joined, a search waits this long for its speed to be measured
# After a peer has left, or changed its speed or memory, a search waits this long; a further change restarts the wait.
PLAN_PAUSE_S = 3.0
MOST_PAUSE_S = 8.0  # however often the swarm changes, a search waits at most this long after the first change
PLAN_BACKOFF_S = 6.0  # each peer adds a random wait of up to this, so that not all peers search at once
STUCK_AGAIN_S = 20.0  # while recovery is stuck, a search is due at this interval
REPLAN_REST_S = 30.0  # after a plan is adopted, changed speeds alone cause no search for this long
STEADY_TIMES = 1.1  # a change of speed or memory by at least this factor prolongs the wait before a search

Members = Mapping[PeerId, TrainingPeer]


@dataclass(slots=True)
class SearchSchedule:
    """The schedule of one peer's searches for a better plan."""

    chance: Random
    at: Seconds | None = None  # when the next search is due; None if nothing has changed
    change: str = ""
    led_by: str = ""
    _evaluated: Members = field(default_factory=dict)
    _latest: Members = field(default_factory=dict)
    _changed_at: Seconds = 0.0
    _backoff_s: Seconds = 0.0
    _rest_until: Seconds = 0.0
    _stuck_again_at: Seconds = 0.0

    def is_due(self, now: Seconds) -> bool:
        """Return whether a search is due."""
        return self.at is not None and now >= self.at

    def observe(self, members: Members, now: Seconds) -> None:
        """Schedule a search if the swarm has changed, or postpone a scheduled search if the swarm is still changing."""
        before, self._latest = self._latest, dict(members)
        if not self._evaluated:
            self._evaluated = dict(members)
        elif not self.change:
            self._schedule(members, now)
        elif self.at is not None:
            same = before.keys() == members.keys()
            if not same or any(_differ(before[peer], members[peer], STEADY_TIMES) for peer in before):
                self.at = max(self.at, min(now + PLAN_PAUSE_S, self._changed_at + MOST_PAUSE_S) + self._backoff_s)

    def hasten(self, now: Seconds) -> None:
        """Schedule a search soon, because recovery is stuck; do nothing if this happened within STUCK_AGAIN_S."""
        if now < self._stuck_again_at:
            return
        self._stuck_again_at = now + STUCK_AGAIN_S
        self.change = self.change or "layers without a holder"
        due = now + PLAN_PAUSE_S + PLAN_BACKOFF_S * self.chance.random()
        self.at = due if self.at is None else min(self.at, due)

    def _schedule(self, members: Members, now: Seconds) -> None:
        known = self._evaluated
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

    def evaluated(self, members: Members) -> str:
        """Record that plans are being evaluated for this swarm, and return the change that caused the evaluation.

        No search is due until the swarm changes again.
        """
        change, self.change = self.change, ""
        self._evaluated, self.at = dict(members), None
        return change

    def adopted(self, members: Members, now: Seconds) -> None:
        """Cancel a scheduled search, because a plan for this swarm was adopted.

        For REPLAN_REST_S, changes of speeds alone do not cause a new search.
        """
        self.evaluated(members)
        self._rest_until = now + REPLAN_REST_S


def _differ(one: TrainingPeer, other: TrainingPeer, times: float) -> bool:
    """Return whether the speeds or memory sizes of two peers differ by the factor `times` or more."""
    pairs = [(one.tokens_per_s, other.tokens_per_s), (one.memory_bytes, other.memory_bytes)]
    return any(not 1 / times < (a + 1e-9) / (b + 1e-9) < times for a, b in pairs)

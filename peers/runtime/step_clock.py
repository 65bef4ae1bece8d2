"""Raise one peer's learning-rate step to the swarm's step. See `StepClock`.

If a peer's step is below the upper median of its own step and the steps that reachable peers publish, it moves its step
to this median. So a slow peer does not train at a warm-up learning rate while the other peers' rate already decays, and
one peer that claims a billion steps has no effect. A single other peer can raise our step at most ONE_TIMES as fast as
we train, so that a liar cannot move us to the end of the schedule at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from decentral.comm.wire.messages import MOST_FOLLOWED
from decentral.core.jobs import Job, SetClock
from decentral.peers.runtime.progress import TrainingProgress

ONE_TIMES = 16  # if only one other peer is known, it may raise our step by at most this much for each step we train
ONE_MOST = 64 * ONE_TIMES  # if only one other peer is known, it can raise our step by at most this much at once


@dataclass(slots=True)
class StepClock:
    """Decides when a peer skips ahead in the learning-rate schedule, to the swarm's position.

    The node calls `follow` after each lookup of peers' records.
    """

    progress: TrainingProgress
    _own_step: int = 0
    _catches_up: int = 0  # by how many steps a single other peer may still move us ahead

    def follow(self, lr_steps: Iterable[int]) -> list[Job]:
        """Return a job that raises our step to the median of our step and `lr_steps`; [] if we are not behind."""
        own, trained = self.progress.lr_step, max(0, self.progress.step - self._own_step)
        self._own_step = self.progress.step
        self._catches_up = min(ONE_MOST, self._catches_up + ONE_TIMES * trained)
        known = sorted([own, *[step for step in lr_steps if step < MOST_FOLLOWED]])
        ahead = known[len(known) // 2] - own
        if len(known) == 2:
            ahead = min(ahead, self._catches_up)
            self._catches_up -= max(0, ahead)
        return [SetClock(own + ahead)] if ahead > 0 else []

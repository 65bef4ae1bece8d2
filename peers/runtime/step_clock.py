"""The learning-rate clock, which the swarm has in common.

The learning-rate step follows the fastest half of the swarm: each peer takes the upper median of what the live peers
advertise, where that is ahead of its own. So a slow peer does not train at a warm-up rate while the others decay, and
one peer that claims a billion steps moves nobody. Where there is only one other peer, it is followed ONE_TIMES as fast
as we train ourselves and no faster: a liar may move us, but not at once to the end of the schedule.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from decentral.comm.wire.messages import MOST_FOLLOWED
from decentral.core.jobs import Job, SetClock
from decentral.peers.runtime.progress import TrainingProgress

ONE_TIMES = 16  # our own steps: as many we catch up by the word of one other peer alone
ONE_MOST = 64 * ONE_TIMES  # steps that we catch up so at a time


@dataclass(slots=True)
class StepClock:
    progress: TrainingProgress
    _own_step: int = 0  # our own step when the clock was looked at last
    _catches_up: int = 0  # steps that one other peer's word may move us at present

    def follow(self, lr_steps: Iterable[int]) -> list[Job]:
        """Catches up with the upper median of the live peers' learning-rate steps."""
        own, trained = self.progress.lr_step, max(0, self.progress.step - self._own_step)
        self._own_step = self.progress.step
        self._catches_up = min(ONE_MOST, self._catches_up + ONE_TIMES * trained)
        known = sorted([own, *[step for step in lr_steps if step < MOST_FOLLOWED]])
        ahead = known[len(known) // 2] - own
        if len(known) == 2:
            ahead = min(ahead, self._catches_up)
            self._catches_up -= max(0, ahead)
        return [SetClock(own + ahead)] if ahead > 0 else []

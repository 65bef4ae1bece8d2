"""What a peer has done so far, and what its training thread has spent its time on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core import jobs
from decentral.core.time_spent import KINDS, TimeSpent
from decentral.core.units import Seconds


class TimeAccount:
    """Every second between two calls goes to one kind, so nothing is counted twice and nothing is left out."""

    def __init__(self, clock: Callable[[], Seconds] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = dict.fromkeys(KINDS, 0.0)

    def spent_on(self, kind: str) -> None:
        """The time since the last call went into this."""
        now = self._clock()
        self._seconds[kind] += now - self._since
        self._since = now

    def take(self, beside: Seconds = 0.0) -> TimeSpent:
        """What was spent since this was last taken."""
        taken, self._seconds = self._seconds, dict.fromkeys(KINDS, 0.0)
        return TimeSpent(**taken, beside=beside)


@dataclass(slots=True)
class Counters:
    """A checkpoint keeps all of these but `time` and `beside_s`."""

    own_steps: int = 0  # inner steps that this peer has taken
    lr_step: int = 0  # the swarm's learning-rate step, as far as this peer knows it
    tokens: int = 0
    micro_batches: int = 0  # the number of this peer's next micro-batch
    versions: dict[int, bytes] = field(default_factory=dict)  # by fragment, in synchronous runs: comm/rounds
    time: TimeAccount = field(default_factory=TimeAccount, compare=False)
    beside_s: Callable[[], Seconds] = field(default=lambda: 0.0, compare=False)  # the worker's, since it was last asked

    def stepped(self, tokens: int, loss: float, micro_batches: int, steps: int = 1) -> jobs.Stepped:
        """Counts so many steps, taken with so many tokens, and reports them with the time that they took."""
        self.own_steps += steps
        self.lr_step += steps
        self.tokens += tokens
        spent = self.time.take(self.beside_s())
        return jobs.Stepped(self.own_steps, self.lr_step, tokens, loss, spent, micro_batches)

    def follow(self, lr_step: int) -> None:
        """Takes over the swarm's learning-rate step where it is ahead of ours."""
        self.lr_step = max(self.lr_step, lr_step)

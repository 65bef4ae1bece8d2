"""Where the time of a training thread goes: each second is spent on one of these, so the shares add up to one."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import repeat

from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds of the training thread, by what it did, and of the processor beside it."""

    training: Seconds = 0.0  # forward, backward, optimizer; throttling included
    gossip: Seconds = 0.0
    checkpoint: Seconds = 0.0
    evaluation: Seconds = 0.0
    state: Seconds = 0.0  # for newcomers and for changes of this peer's own span
    waiting: Seconds = 0.0  # for the event loop to say what is to be done
    beside: Seconds = 0.0  # processor time of the worker beside training; it is no part of the total

    @classmethod
    def by_kind(cls, seconds: Mapping[str, Seconds]) -> "TimeSpent":
        """Return the time with so many seconds of some kinds, by their names; other kinds are left out."""
        return cls(*map(seconds.get, ALL_KINDS, repeat(0.0)))

    def __add__(self, other: "TimeSpent") -> "TimeSpent":
        return TimeSpent(
            self.training + other.training,
            self.gossip + other.gossip,
            self.checkpoint + other.checkpoint,
            self.evaluation + other.evaluation,
            self.state + other.state,
            self.waiting + other.waiting,
            self.beside + other.beside,
        )

    @property
    def total(self) -> Seconds:
        return sum((getattr(self, name) for name in KINDS), 0.0)

    @property
    def busy(self) -> Seconds:
        """The total without waiting."""
        return self.total - self.waiting

    def aside(self) -> dict[str, Seconds]:
        """What was spent on other things than training, by kind."""
        return {kind: seconds for kind in ALL_KINDS if kind != "training" and (seconds := getattr(self, kind))}

    def shares(self) -> dict[str, float]:
        """What part of the total each kind has; of no time at all, none has any."""
        total = self.total
        return {name: getattr(self, name) / total if total else 0.0 for name in KINDS}


NO_TIME = TimeSpent()
ALL_KINDS = tuple(one.name for one in fields(TimeSpent))
KINDS = tuple(kind for kind in ALL_KINDS if kind != "beside")

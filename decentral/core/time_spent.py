"""Count the seconds of a training thread by kind of work. The kinds do not overlap, so their shares sum to 1."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import repeat

from decentral.core.units import Seconds


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds of the training thread by kind of work, and processor seconds of its worker thread (`beside`)."""

    training: Seconds = 0.0  # includes the forward and backward passes, the optimizer step, and pauses that limit load
    gossip: Seconds = 0.0
    checkpoint: Seconds = 0.0
    evaluation: Seconds = 0.0
    state: Seconds = 0.0
    waiting: Seconds = 0.0
    beside: Seconds = 0.0  # processor time of the worker thread, which runs beside training; not part of the total

    @classmethod
    def by_kind(cls, seconds: Mapping[str, Seconds]) -> "TimeSpent":
        """Return the TimeSpent with these seconds of each kind; unknown kinds are ignored, and missing kinds are 0."""
        return cls(*map(seconds.get, ALL_KINDS, repeat(0.0)))

    def __add__(self, other: "TimeSpent") -> "TimeSpent":
        """Return the sum of both times for each kind of work."""
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
        """The seconds of the training thread over all kinds of work, `beside` left out."""
        return sum((getattr(self, name) for name in KINDS), 0.0)

    @property
    def busy(self) -> Seconds:
        """The seconds of the training thread, without `waiting` and `beside`."""
        return self.total - self.waiting

    def aside(self) -> dict[str, Seconds]:
        """Return the seconds of each kind of work except training, without kinds that took no time."""
        return {kind: seconds for kind in ALL_KINDS if kind != "training" and (seconds := getattr(self, kind))}

    def shares(self) -> dict[str, float]:
        """Return each kind's share, 0 to 1, of the training thread's total; all 0 if the total is 0."""
        total = self.total
        return {name: getattr(self, name) / total if total else 0.0 for name in KINDS}


NO_TIME = TimeSpent()
ALL_KINDS = tuple(one.name for one in fields(TimeSpent))
KINDS = tuple(kind for kind in ALL_KINDS if kind != "beside")

"""How long a search may go on, and who is told of its progress.

Searches work in rounds whose size does not depend on time, so that a longer budget continues the same search and
a given number of rounds gives the same result on any machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

Report = Callable[[float, float], None]
"""(fraction of the budget that is used, best cost so far)"""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Seconds on the caller's clock, or rounds, whichever ends first. Without a clock only the rounds count."""

    seconds: float = float("inf")
    rounds: float = float("inf")
    clock: Callable[[], float] = lambda: 0.0
    report: Report = lambda _fraction, _best: None

    def part(self, share: float) -> "SearchBudget":
        """The same clock and listener for a share of the seconds and rounds."""
        rounds = self.rounds if self.rounds == float("inf") else max(1, int(self.rounds * share))
        return replace(self, seconds=self.seconds * share, rounds=rounds)

    def less(self, seconds: float) -> "SearchBudget":
        """What is left after `seconds`; at least a thousandth of the budget, so that a search can begin."""
        return replace(self, seconds=max(self.seconds - seconds, 1e-3 * self.seconds))

    def silent(self) -> "SearchBudget":
        """The same budget without a listener, for a search whose cost is another quantity."""
        return replace(self, report=lambda _fraction, _best: None)


@dataclass(slots=True)
class SearchProgress:
    """How much of its budget one search has used, and the best cost that it has reported."""

    budget: SearchBudget
    best: float
    rounds: int = 0
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        assert self.budget.seconds < float("inf") or self.budget.rounds < float("inf"), "a search without end"
        self._start = self.budget.clock()

    def seconds(self) -> float:
        """Seconds since the search began."""
        return self.budget.clock() - self._start

    def goes_on(self, ahead_s: float = 0.0) -> bool:
        """Whether another round fits that cannot be cut short for `ahead_s` seconds."""
        return self.rounds < self.budget.rounds and not self.late(ahead_s)

    def late(self, ahead_s: float = 0.0) -> bool:
        """Whether `ahead_s` seconds of work that begin now would end after the budget's seconds."""
        return self.seconds() + ahead_s >= self.budget.seconds

    def report(self, best: float) -> None:
        """Ends a round and tells the listener. `best`: the least cost that the search has found so far."""
        self.rounds += 1
        self.best = min(self.best, best)
        fraction = max(self.seconds() / self.budget.seconds, self.rounds / self.budget.rounds)
        self.budget.report(min(1.0, fraction), self.best)

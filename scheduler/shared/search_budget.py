"""How long a search may go on, and who hears how it goes.

Searches work in rounds whose size does not depend on time, so that a longer budget continues the same search and
a given number of rounds gives the same result on any machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

Report = Callable[[float, float], None]
"""(fraction of the budget that is used, best cost so far)"""


def _silent(_fraction: float, _best: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Seconds on the caller's clock, or rounds, whichever ends first. Without a clock only the rounds count."""

    seconds: float = float("inf")
    rounds: float = float("inf")
    clock: Callable[[], float] = lambda: 0.0
    report: Report = _silent

    def part(self, share: float) -> "SearchBudget":
        """The same clock and listener for a share of the seconds and rounds."""
        rounds = self.rounds if self.rounds == float("inf") else max(1, int(self.rounds * share))
        return SearchBudget(self.seconds * share, rounds, self.clock, self.report)

    def less(self, seconds: float) -> "SearchBudget":
        """What is left after that many seconds; at least a thousandth of it, so that a search begins."""
        return SearchBudget(max(self.seconds - seconds, 1e-3 * self.seconds), self.rounds, self.clock, self.report)

    def silent(self) -> "SearchBudget":
        """The same without a listener: for a search with another measure."""
        return SearchBudget(self.seconds, self.rounds, self.clock)


@dataclass(slots=True)
class SearchProgress:
    """One search's use of its budget, and its record: (seconds, best cost) at each improvement."""

    budget: SearchBudget
    best: float
    rounds: int = 0
    record: list[tuple[float, float]] = field(default_factory=list)
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        assert self.budget.seconds < float("inf") or self.budget.rounds < float("inf"), "a search without end"
        self._start = self.budget.clock()
        self.record.append((0.0, self.best))

    def seconds(self) -> float:
        return self.budget.clock() - self._start

    def goes_on(self, ahead_s: float = 0.0) -> bool:
        """Whether there is another round, with `ahead_s` seconds of work that it cannot leave undone."""
        return self.rounds < self.budget.rounds and not self.late(ahead_s)

    def late(self, ahead_s: float = 0.0) -> bool:
        """Whether that much work, begun now, would end after the budget's seconds."""
        return self.seconds() + ahead_s >= self.budget.seconds

    def report(self, best: float) -> None:
        """Ends a round whose best cost so far is `best`."""
        self.rounds += 1
        used = self.seconds()
        if best < self.best:
            self.best = best
            self.record.append((used, best))
        fraction = max(used / self.budget.seconds, self.rounds / self.budget.rounds)
        self.budget.report(min(1.0, fraction), self.best)

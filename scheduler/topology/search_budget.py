"""Limit how long a planner's search may run, and report its progress.

A search works in rounds, and the work of a round does not depend on time. So a given number of rounds gives the same
result on any machine, and a search with a larger budget begins with the same rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

Report = Callable[[float, float], None]
"""A listener to a search's progress. Its arguments: the used fraction of the budget, 0 to 1; the lowest cost so far."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """The limits of a search, in seconds and in rounds. The default clock stands still, so that only rounds count."""

    seconds: float = float("inf")
    rounds: float = float("inf")
    clock: Callable[[], float] = lambda: 0.0
    report: Report = lambda _fraction, _best: None

    def part(self, share: float) -> "SearchBudget":
        """Return a budget with `share` (0 to 1) of the seconds and rounds, and with the same `clock` and `report`."""
        rounds = self.rounds if self.rounds == float("inf") else max(1, int(self.rounds * share))
        return replace(self, seconds=self.seconds * share, rounds=rounds)

    def less(self, seconds: float) -> "SearchBudget":
        """Return a budget with `seconds` less time; at least a thousandth is left, so that a search can begin."""
        return replace(self, seconds=max(self.seconds - seconds, 1e-3 * self.seconds))

    def silent(self) -> "SearchBudget":
        """Return a budget that reports no progress, for an inner search, whose costs would confuse the user."""
        return replace(self, report=lambda _fraction, _best: None)


@dataclass(slots=True)
class SearchProgress:
    """State of one running search: how much of its budget is used, and the lowest cost that it has reported."""

    budget: SearchBudget
    best: float
    rounds: int = 0
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        """Record the time at which the search begins."""
        assert self.budget.seconds < float("inf") or self.budget.rounds < float("inf"), "the budget has no limit"
        self._start = self.budget.clock()

    def seconds(self) -> float:
        """Return the seconds since the search began."""
        return self.budget.clock() - self._start

    def left_s(self) -> float:
        """Return the seconds of the budget that are left; at least 0."""
        return max(0.0, self.budget.seconds - self.seconds())

    def used(self) -> float:
        """Return the used share of the budget: of its seconds or of its rounds, whichever is larger."""
        return max(self.seconds() / self.budget.seconds, self.rounds / self.budget.rounds)

    def goes_on(self, ahead_s: float = 0.0) -> bool:
        """Return whether the budget allows another round that takes about `ahead_s` seconds."""
        return self.rounds < self.budget.rounds and not self.late(ahead_s)

    def late(self, ahead_s: float = 0.0) -> bool:
        """Return whether work of `ahead_s` seconds that begins now would exceed the budget's seconds."""
        return self.seconds() + ahead_s >= self.budget.seconds

    def report(self, best: float) -> None:
        """Count a finished round whose lowest cost is `best`, and report the lowest cost of all rounds so far."""
        self.rounds += 1
        self.best = min(self.best, best)
        self.budget.report(min(1.0, self.used()), self.best)

"""Limit how much a planner's search may do, and report its progress.

A search works in rounds, and the work of a round does not depend on time. So a given number of rounds gives the same
result on any machine, and a search with a larger budget begins with the same rounds.

A budget in seconds is a limit of work, too. A search counts its work in the seconds that this takes on a quiet core
(`SearchProgress.count`), times RESERVE. So on such a core it is done in about half of its seconds, and an equal seed
gives an equal plan there and on a core that is somewhat slower or busy. The clock only ends a search that would take
longer than its seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

Report = Callable[[float, float], None]
"""A listener to a search's progress. Its arguments: the used fraction of the budget, 0 to 1; the lowest cost so far."""

MOST_SOLVING_S = 1e6  # the most that a solver takes as its limit
# Seconds of a budget that work takes, for each second that it takes on a quiet core. The constants of all searches are
# processor seconds on an Intel Xeon at 2.5 GHz (2026-11-29; docs/results/planner.md).
RESERVE = 2.0
SOLVED_S, NONZERO_S, ITERATION_S = 1.5e-3, 1.8e-6, 5.2e-6  # of a linear programme by the simplex method


def programme_s(nonzeros: int, iterations: int) -> float:
    """Return the seconds in which the simplex method solves a linear programme on a quiet core.

    Args:
        nonzeros: Entries of the programme that are not zero.
        iterations: Steps of the method.
    """
    return SOLVED_S + NONZERO_S * nonzeros + ITERATION_S * iterations


def standing() -> float:
    """Return 0. A search with this clock is limited by its work only, so that equal seeds give equal plans."""
    return 0.0


@dataclass(slots=True)
class SharedWork:
    """What a search and all its parts have done together, in seconds of their outermost budget."""

    limit_s: float = 0.0  # seconds of the outermost budget
    counted_s: float = 0.0
    _began: float | None = None  # by the clock; None: not begun

    def within(self, seconds: float) -> None:
        """Record the seconds of one of the budgets; the outermost has the most."""
        self.limit_s = max(self.limit_s, seconds)

    def count(self, seconds: float) -> None:
        """Count work that takes so many seconds on a quiet core."""
        self.counted_s += RESERVE * seconds

    def elapsed_s(self, now: float) -> float:
        """Return the seconds since the outermost search began, which is at the first call; `now` is by the clock."""
        if self._began is None:
            self._began = now
        return now - self._began


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """The limits of a search, in seconds and in rounds. See `standing` for the default clock."""

    seconds: float = float("inf")
    rounds: float = float("inf")
    clock: Callable[[], float] = standing
    report: Report = lambda _fraction, _best: None
    work: SharedWork = field(default_factory=SharedWork)

    def __post_init__(self) -> None:
        """Record the seconds of the budget."""
        self.work.within(self.seconds)

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

    def elapsed_s(self) -> float:
        """Return the seconds by the clock since the outermost search began."""
        return self.work.elapsed_s(self.clock())

    def used_s(self) -> float:
        """Return the seconds of the outermost budget that are used: the counted work, unless the clock says more.

        The clock counts after the first half of the outermost budget only, at double speed. So it says more if work
        takes about twice as long as on a quiet core, and all seconds are used when as many have elapsed.
        """
        return max(self.work.counted_s, 2 * self.elapsed_s() - self.work.limit_s)


@dataclass(slots=True)
class SearchProgress:
    """State of one running search: how much of its budget is used, and the lowest cost that it has reported."""

    budget: SearchBudget
    best: float
    rounds: int = 0
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        """Record how much of the outermost budget was used when the search begins."""
        assert self.budget.seconds < float("inf") or self.budget.rounds < float("inf"), "the budget has no limit"
        self._start = self.budget.used_s()

    def count(self, seconds: float) -> None:
        """Count work that takes so many seconds on a quiet core."""
        self.budget.work.count(seconds)

    def seconds(self) -> float:
        """Return the seconds of the budget that the search has used since it began."""
        return self.budget.used_s() - self._start

    def work_left_s(self) -> float:
        """Return the seconds of work on a quiet core for which the budget suffices; at least 0."""
        return max(0.0, (self.budget.seconds - self.seconds()) / RESERVE)

    def clock_left_s(self) -> float:
        """Return the seconds by the clock until the outermost budget ends, between 0 and MOST_SOLVING_S.

        By a clock that stands still there is no end, so that a busy core does not end a solver early.
        """
        if self.budget.clock is standing:
            return MOST_SOLVING_S
        return min(MOST_SOLVING_S, max(0.0, self.budget.work.limit_s - self.budget.elapsed_s()))

    def used(self) -> float:
        """Return the used share of the budget: of its seconds or of its rounds, whichever is larger."""
        return max(self.seconds() / self.budget.seconds, self.rounds / self.budget.rounds)

    def goes_on(self, ahead_s: float = 0.0) -> bool:
        """Return whether the budget allows another round that takes about `ahead_s` seconds."""
        return self.rounds < self.budget.rounds and not self.late(ahead_s)

    def late(self, ahead_s: float = 0.0) -> bool:
        """Return whether work of `ahead_s` seconds that begins now would exceed the budget's seconds."""
        return self.seconds() + ahead_s >= self.budget.seconds

    def lacks(self, seconds: float) -> bool:
        """Return whether a search with a result has no time for work that takes so many seconds on a quiet core."""
        return self.best < float("inf") and self.late(RESERVE * seconds)

    def report(self, best: float) -> None:
        """Count a finished round whose lowest cost is `best`, and report the lowest cost of all rounds so far."""
        self.rounds += 1
        self.best = min(self.best, best)
        self.budget.report(min(1.0, self.used()), self.best)

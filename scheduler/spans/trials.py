"""Evaluate spans within a budget: `Trials`, the state that all searches for spans share."""

from dataclasses import dataclass, field

import numpy as np

from decentral.scheduler.spans.problem import SpanProblem, SpanValue
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchProgress

SLIGHTLY = 1e-9  # values that differ by a smaller share than this count as equal
LIMITS_A_ROUND = 100  # this many calls of `Trials.excluded` count as one round of the budget
LIMIT_GUIDES = 5  # a call of `Trials.excluded`, with the move and the guide before it, takes as long as so many guides


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Spans and the throughput that they reach; -inf if the spans are not valid."""

    spans_N2: Ints
    found: SpanValue

    @property
    def value(self) -> float:
        """Return the throughput, in tokens/s."""
        return self.found.value


@dataclass(slots=True)
class Trials:
    """The state of a search: its budget, of which each evaluation uses one round, and the best spans so far."""

    problem: SpanProblem
    progress: SearchProgress
    rng: np.random.Generator
    best: Candidate | None = None
    steps: int = 0  # moves that annealing has tried
    annealings: int = 0  # number of annealings that have begun
    annealed_to: dict[float, float] = field(default_factory=dict)  # weight of the soft minimum -> its best throughput
    limits: int = 0  # number of calls of `excluded`
    longest_s: float = 0.0  # most of the budget that an evaluation has taken; a search ends early enough for one more

    def goes_on(self) -> bool:
        """Return whether another evaluation may begin: the budget allows it, and the bound is not reached yet."""
        done = self.best is not None and self.best.value >= self.problem.bound() * (1 - SLIGHTLY)
        return not done and self.progress.goes_on(self.longest_s)

    def begun(self, starts: list[Ints]) -> list[Candidate]:
        """Return as many of these spans with their evaluations as the budget allows, but at least one."""
        found: list[Candidate] = []
        for spans_N2 in starts:
            if not found or self.goes_on():
                found.append(self.evaluated(spans_N2))
        return found

    def evaluated(self, spans_N2: Ints) -> Candidate:
        """Evaluate spans, which takes one round of the budget, and return them with the result.

        Only an evaluation before the first result may take more seconds than the budget has left.
        """
        begin = self.progress.seconds()
        candidate = Candidate(spans_N2, self._evaluation(spans_N2))
        self.longest_s = max(self.longest_s, self.progress.seconds() - begin)
        if self.best is None or candidate.value > self.best.value * (1 + SLIGHTLY):
            self.best = candidate
        self.progress.report(-self.best.value)
        return candidate

    def excluded(self, spans_N2: Ints, least: float) -> bool:
        """Return whether these spans are not valid, or `SpanProblem.limit` shows that they reach less than `least`."""
        self.limits += 1
        self.progress.count(LIMIT_GUIDES * self.problem.guide_s)
        if self.limits % LIMITS_A_ROUND == 0 and self.best is not None:
            self.progress.report(-self.best.value)
        return self.problem.limit(spans_N2) < least * (1 - SLIGHTLY) or not self.problem.valid(spans_N2)

    def affordable(self, steps: int, chunk: int) -> int:
        """Return how many moves of annealing the budget allows, at most `steps`; `chunk` moves count as one round."""
        budget, used_s = self.progress.budget, self.progress.seconds()
        allowed = min(float(steps), chunk * (budget.rounds - self.progress.rounds))
        if self.steps and used_s > 0:
            allowed = min(allowed, (budget.seconds - used_s - 3 * self.longest_s) * self.steps / used_s)
        return max(chunk, int(allowed))

    def next_annealing(self) -> int:
        """Return the number of the annealing that begins, counted from 0."""
        self.annealings += 1
        return self.annealings - 1

    def worked(self, steps: int) -> None:
        """Count one round of the budget, in which annealing has tried `steps` moves."""
        assert self.best is not None, "a search evaluates its starts before it anneals"
        self.steps += steps
        self.progress.count(steps * self.problem.guide_s)
        self.progress.report(-self.best.value)

    def _evaluation(self, spans_N2: Ints) -> SpanValue:
        if self.problem.valid(spans_N2):
            return self.problem.evaluate(spans_N2, self.progress)
        peers, layers = self.problem.reach_NL.shape
        return SpanValue(-np.inf, np.ones(peers), np.ones(layers))

"""The searches for spans, side by side behind one interface: `search`, and the table SEARCHES."""

from collections.abc import Callable

import numpy as np

from decentral.scheduler.spans import annealing, genetic, local_search, policy
from decentral.scheduler.spans.problem import SpanProblem
from decentral.scheduler.spans.trials import Candidate, Trials
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

Search = Callable[[Trials, list[Ints]], None]
"""A search (trials, starts). It works until `trials.goes_on()` is false; its result is `trials.best`."""

SEARCHES: dict[str, Search] = {
    "genetic": genetic.search,
    "annealing": annealing.search,
    "local": local_search.search,
    "policy": policy.search,
}


def search(
    problem: SpanProblem, solver: str, budget: SearchBudget, rng: np.random.Generator, first: Ints | None = None
) -> Candidate:
    """Return the best spans that a search finds within the budget; a value of -inf if it finds no valid spans.

    Args:
        problem: What spans may be held, and what they reach.
        solver: A name in SEARCHES.
        budget: Limit of the search. An evaluation is a round; so are `annealing.ROUND_MOVES` moves of annealing.
        rng: Source of all random choices.
        first: Spans from which the search begins, besides its own starts.
    """
    trials = Trials(problem, SearchProgress(budget, np.inf), rng)
    starts = [problem.repaired(spans_N2) for spans_N2 in problem.starts(rng)]
    SEARCHES[solver](trials, starts if first is None else [first, *starts])
    assert trials.best is not None, "a search evaluates at least one start"
    return trials.best

"""All solvers of the objective `throughput` by name, and their comparison: `solved` and `solver_records`."""

from collections.abc import Callable

import numpy as np

from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.core.near_names import listed
from decentral.scheduler.spans import moves
from decentral.scheduler.spans.searches import SEARCHES
from decentral.scheduler.spans.trials import Trials
from decentral.scheduler.throughput import milp, span_search
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

EXACT_OPTIONS = 2_000  # `exact` refuses a swarm with more pairs of peer and span than this

Solver = Callable[[FlowProblem, SearchBudget, np.random.Generator], Ints]
"""A solver (problem, budget, rng) -> spans_N2."""

Record = list[tuple[float, float]]
"""A search's history: (seconds since its begin, best tokens/s so far), at each improvement."""


def exact(problem: FlowProblem, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return the optimal spans; raise UserError if the swarm is too large for that."""
    costs = problem.costs
    found = milp.best_spans(costs, budget.seconds) if milp.options(costs) <= EXACT_OPTIONS else None
    if found is None:
        raise UserError(
            "--solver exact is for at most about 6 peers with 8 layers; it found no plan for "
            f"{costs.peers} peers with {costs.layers} layers: use --solver genetic"
        )
    return found


def flow(problem: FlowProblem, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return the spans of the best chain from which a search would start, without a search."""
    chains = [span_search.chains(problem, groups, rng) for groups in span_search.groupings(problem)]
    valid = [spans for spans in chains if problem.valid(spans)]
    valid = valid or [problem.repaired(moves.filled(problem, rng))]
    trials = Trials(problem, SearchProgress(budget, np.inf), rng)
    return max(trials.begun(valid), key=lambda one: one.value).spans_N2


def random(problem: FlowProblem, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return, for each peer, a randomly chosen stage of the model, which is cut into equal stages."""
    return span_search.equal_random(problem.costs, rng)


def _searching(name: str) -> Solver:
    return lambda problem, budget, rng: span_search.search(problem, budget, rng, solver=name)


THROUGHPUT_SOLVERS: dict[str, Solver] = {name: _searching(name) for name in SEARCHES} | {
    "exact": exact,
    "flow": flow,
    "random": random,
}


def solved(problem: FlowProblem, solver: str, seed: int, budget: SearchBudget) -> Ints:
    """Return the spans that the solver of this name finds.

    Raises:
        UserError: If there is no such solver, or the swarm is too large for it.
    """
    if solver not in THROUGHPUT_SOLVERS:
        known = listed(solver, THROUGHPUT_SOLVERS)
        raise UserError(f"--solver {solver} is unknown: --objective throughput expects one of {known}")
    return THROUGHPUT_SOLVERS[solver](problem, budget, chance.arrays(seed, "spans", solver))


def solver_records(problem: FlowProblem, seed: int, seconds: float, clock: Callable[[], float]) -> dict[str, Record]:
    """Return the histories by name of all solvers that can solve a swarm of this size; they share `seconds` equally."""
    found: dict[str, Record] = {}
    for name in THROUGHPUT_SOLVERS:
        begin, record = clock(), Record()
        fresh = FlowProblem(problem.costs, problem.region_N, problem.flights)  # without flows that other solvers cached

        def note(_fraction: float, best: float, record: Record = record, begin: float = begin) -> None:
            if np.isfinite(best) and (not record or -best > record[-1][1]):
                record.append((clock() - begin, -best))

        try:
            spans_N2 = solved(
                fresh, name, seed, SearchBudget(seconds / len(THROUGHPUT_SOLVERS), clock=clock, report=note)
            )
        except UserError:
            continue
        record.append((clock() - begin, fresh.evaluate(spans_N2).value))
        found[name] = record
    return found

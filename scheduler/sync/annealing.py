"""Simulated annealing alone (Metropolis on the moves of moves.py, as FlexFlow searches, arXiv 1807.05358).

Every round starts from a random layout and cools twice as slowly as the one before, up to a limit. It is what the
memetic search adds crossover, hand-drawn starts and the softened cost's changes to.
"""

import numpy as np

from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.sync import layouts, local_search
from decentral.scheduler.sync.layout_cost import Problem

CHUNK = 5_000
LONGEST = 400_000  # proposals in one round
ANNEALING_HOT, COLD, ANNEALING_SMOOTH = 0.1, 3e-4, 0.1  # shares of the start's cost; see moves.py for the last


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """The slots of the best layout that the budget finds."""
    twin_N = local_search.twins(problem.data_NN, problem.pipe_NN)
    best_slots = layouts.random(region_N, problem.stages, problem.replicas, rng)
    best, dice = np.inf, local_search.dice(rng)
    progress = SearchProgress(budget, best)
    while progress.goes_on():
        slots = layouts.random(region_N, problem.stages, problem.replicas, rng)
        state = local_search.start(problem.data_NN, problem.pipe_NN, problem.stages, problem.replicas, slots)
        scale = local_search.total(state[2], state[3]) * min(1.0, 8 / problem.stages)
        steps = min(LONGEST, 250 * len(problem) << min(10, progress.rounds))
        cooling = (COLD / ANNEALING_HOT) ** (CHUNK / steps)
        hot = ANNEALING_HOT * scale
        for _ in range(0, steps, CHUNK):
            best = local_search.anneal(
                problem.data_NN, problem.pipe_NN, problem.replicas, state, best_slots, best,
                CHUNK, hot, hot * cooling, ANNEALING_SMOOTH, twin_N, dice,
            )  # fmt: skip
            hot *= cooling
            if progress.seconds() > budget.seconds:
                break
        progress.report(best)
    return best_slots

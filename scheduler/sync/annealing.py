"""Simulated annealing alone (Metropolis on the moves of local_search.py, as FlexFlow searches, arXiv 1807.05358).

Every round starts from a random layout and cools twice as slowly as the one before, up to a limit. The memetic search
(evolve.py) adds crossover, hand-drawn starts and changing smoothness to it.
"""

import numpy as np

from decentral.scheduler.sync import layouts, local_search
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.sync.local_search import Cooling
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

CHUNK = 5_000  # proposals between two looks at the clock
LONGEST = 400_000  # proposals in one round
ANNEALING_HOT, COLD = 0.1, 3e-4  # temperatures, as shares of the cost of the round's first layout
ANNEALING_SMOOTH = 0.1  # see local_search.py


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """The slots of the best layout that the budget finds."""
    best_slots = layouts.random(region_N, problem.stages, problem.replicas, rng)
    best, proposals = np.inf, local_search.proposals(problem, rng)
    progress = SearchProgress(budget, best)
    while progress.goes_on():
        slots = layouts.random(region_N, problem.stages, problem.replicas, rng)
        state = local_search.initial_state(problem, slots)
        scale = local_search.total(state) * min(1.0, 8 / problem.stages)
        steps = min(LONGEST, 250 * problem.peers << min(10, progress.rounds))
        decay = (COLD / ANNEALING_HOT) ** (CHUNK / steps)
        hot = ANNEALING_HOT * scale
        for _ in range(0, steps, CHUNK):
            cooling = Cooling(CHUNK, hot, hot * decay, ANNEALING_SMOOTH)
            best = local_search.anneal(problem, state, best_slots, best, cooling, proposals)
            hot *= decay
            if progress.seconds() > budget.seconds:
                break
        progress.report(best)
    return best_slots

"""Find a synchronous layout by simulated annealing only: moves of local_search.py under Metropolis's rule.

Each round starts from a random layout and cools twice as slowly as the round before, up to LONGEST proposals. FlexFlow
(arXiv 1807.05358) searches in this way. The default solver (evolve.py) adds crossover and better starts.
"""

import numpy as np

from decentral.scheduler.sync import layouts, local_search
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.sync.local_search import Cooling
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

CHUNK = 5_000  # proposed moves between two looks at the budget
LONGEST = 400_000
ANNEALING_HOT, COLD = 0.1, 3e-4  # first and last temperature, as shares of the first layout's cost
ANNEALING_SMOOTH = 0.1  # weight of the mean costs in the smoothed cost, which guides the search (local_search.py)


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return the best layout found within the budget, as slots: the peers stage by stage, then the unused peers."""
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
            progress.count(CHUNK * local_search.move_s(problem))
            if progress.late():
                break
        progress.report(best)
    return best_slots

"""Cost against seconds for every solver of the synchronous objective, on one topology."""

from collections.abc import Callable

from decentral.core import rng as chance
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology, Workload, regions_of
from decentral.scheduler.sync.layout_cost import best_layout, problem_of
from decentral.scheduler.sync.sync_plan import SYNC_SOLVERS, hand_costs

Record = list[tuple[float, float]]
"""(seconds, best cost so far), at each improvement"""

COMPARED_SOLVERS = ("genetic", "annealing", "gcma")


def records(topology: Topology, seed: int, seconds: float, clock: Callable[[], float]) -> dict[str, Record]:
    """Each solver's progress within `seconds`, and the hand layouts as one point each."""
    problem = problem_of(topology, topology.workload or Workload())
    region_N = regions_of(topology)
    found: dict[str, Record] = {name: [(0.0, cost)] for name, cost in hand_costs(problem, region_N, seed).items()}
    for name in COMPARED_SOLVERS:
        if name == "gcma" and problem.stages * problem.replicas != problem.peers:
            continue
        begin = clock()
        record: Record = []

        def note(_fraction: float, best: float, record: Record = record, begin: float = begin) -> None:
            if not record or best < record[-1][1]:
                record.append((clock() - begin, best))

        budget = SearchBudget(seconds, clock=clock, report=note)
        slots = SYNC_SOLVERS[name](problem, region_N, budget, chance.arrays(seed, "plan", name))
        record.append((clock() - begin, best_layout(problem, slots).cost.total))
        found[name] = record
    return found

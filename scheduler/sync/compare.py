"""Cost against seconds for every solver of the synchronous objective, on one topology."""

from collections.abc import Callable

from decentral.core import rng as chance
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology, Workload
from decentral.scheduler.sync import annealing, evolve, gcma
from decentral.scheduler.sync.layout_cost import layout, problem
from decentral.scheduler.sync.sync_plan import Solver, hand_costs, regions_of

Record = list[tuple[float, float]]
"""(seconds, best cost so far), at each improvement"""

COMPARED_SOLVERS: dict[str, Solver] = {"genetic": evolve.search, "annealing": annealing.search, "gcma": gcma.search}


def records(topology: Topology, seed: int, seconds: float, clock: Callable[[], float]) -> dict[str, Record]:
    """Each solver's progress within `seconds`, and the hand layouts as one point each."""
    task = problem(topology, topology.workload or Workload())
    region_N = regions_of(topology)
    found: dict[str, Record] = {name: [(0.0, cost)] for name, cost in hand_costs(task, region_N, seed).items()}
    for name, solver in COMPARED_SOLVERS.items():
        if name == "gcma" and task.stages * task.replicas != len(task):
            continue
        begin = clock()
        record: Record = []

        def note(_fraction: float, best: float, record: Record = record, begin: float = begin) -> None:
            if not record or best < record[-1][1]:
                record.append((clock() - begin, best))

        slots = solver(
            task, region_N, SearchBudget(seconds, clock=clock, report=note), chance.arrays(seed, "plan", name)
        )
        record.append((clock() - begin, layout(task, slots).cost.total))
        found[name] = record
    return found

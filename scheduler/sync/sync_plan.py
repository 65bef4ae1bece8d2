"""The plan for the objective `sync`: least communication of a synchronous step, in which all gradients are exact.

    plan = sync_plan(topology, solver="genetic", seed=0, budget=SearchBudget(seconds=5, clock=time.monotonic))

A workload that leaves degrees open gets a search for them (as AMP, arXiv 2210.07297): each pair of degrees that uses
nearly all peers is tried briefly. Only communication is compared: with the same peers, computing is the same.

A plan is far cheaper to verify than to find: `layout_cost.cost_of_pipelines` gives the cost of its pipelines.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.plan import SyncPlan
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology, Workload, regions_of
from decentral.scheduler.sync import annealing, evolve, exact, gcma, layouts
from decentral.scheduler.sync.layout_cost import Layout, Problem, best_layout, problem_of

Solver = Callable[[Problem, Ints, SearchBudget, np.random.Generator], Ints]
"""(problem, region_N, budget, rng) -> slots, as in layout_cost.py"""

Record = list[tuple[float, float]]
"""(seconds, best cost so far), at each improvement"""

LEAST_USED = 0.95  # of the peers
MOST_STAGES_TRIED = 64
HAND_DRAWS = 5  # a hand layout depends on which region comes first, so the best of some draws counts


@dataclass(frozen=True, slots=True)
class SyncSolver:
    """A value of `--solver`."""

    search: Solver
    compared: bool = False  # by `--compare`
    uses_all_peers: bool = False  # it lays out no swarm that would leave some peers unused

    def takes(self, problem: Problem) -> bool:
        return not self.uses_all_peers or problem.stages * problem.replicas == problem.peers


SYNC_SOLVERS = {
    "genetic": SyncSolver(evolve.search, compared=True),
    "annealing": SyncSolver(annealing.search, compared=True),
    "gcma": SyncSolver(gcma.search, compared=True, uses_all_peers=True),
    "exact": SyncSolver(exact.search),
}


def sync_plan(topology: Topology, solver: str, seed: int, budget: SearchBudget) -> SyncPlan:
    """The plan of least communication, within the budget's seconds (without those for compiling).

    Raises UserError for an unknown solver, or a swarm too small for its workload or too large for the exact solver.
    """
    workload = topology.workload or Workload(stages=None, replicas=None)
    region_N = regions_of(topology)
    _compile(solver)
    start = begin = budget.clock()
    tried: dict[str, float] = {}
    if workload.stages is None or workload.replicas is None:
        workload, tried = best_degrees(topology, region_N, workload, seed, budget.part(0.4))
        budget, begin = budget.part(0.6), budget.clock()
    problem, digest = problem_of(topology, workload), topology.digest()
    between = budget.clock()
    baselines = hand_costs(problem, region_N, seed)
    used = budget.clock() - begin
    used += 2 * (budget.clock() - between) / (len(layouts.HAND) * HAND_DRAWS)  # for laying out the result
    slots = _solve(problem, region_N, solver, seed, budget.less(used))
    found = best_layout(problem, slots)
    return SyncPlan(
        solver=solver,
        seed=seed,
        seconds=round(budget.clock() - start, 3),
        cost={"total": found.cost.total} | asdict(found.cost),
        stages=_named(topology, found.stages_SR),
        pipelines=_named(topology, found.stages_SR.T),
        baselines=baselines | tried,
        reason=_reason(topology, found, baselines, solver),
        digest=digest,
    )


def best_degrees(
    topology: Topology, region_N: Ints, workload: Workload, seed: int, budget: SearchBudget
) -> tuple[Workload, dict[str, float]]:
    """The workload with both degrees set, and the cost of every pair tried, as `"8x8": seconds`."""
    pairs = candidates(len(topology), workload.stages, workload.replicas)
    costs: dict[str, float] = {}
    best, least = workload, float("inf")
    for stages, replicas in pairs:
        trial = divided(workload, stages, replicas)
        problem = problem_of(topology, trial)
        rng = chance.arrays(seed, "degrees", stages, replicas)
        slots = evolve.search(problem, region_N, budget.part(1 / len(pairs)), rng)
        cost = costs[f"{stages}x{replicas}"] = best_layout(problem, slots).cost.total
        if cost < least:
            best, least = trial, cost
    return best, costs


def divided(workload: Workload, stages: int, replicas: int) -> Workload:
    """The workload with these degrees; totals of the whole model and the whole batch are divided by them."""
    gradient, activation = workload.gradient_gbytes, workload.activation_gbytes
    return replace(
        workload,
        stages=stages,
        replicas=replicas,
        gradient_gbytes=gradient / stages if workload.stages is None else gradient,
        activation_gbytes=activation / replicas if workload.replicas is None else activation,
    )


def candidates(peers: int, stages: int | None, replicas: int | None) -> list[tuple[int, int]]:
    """The pairs of degrees to try. Pairs that leave more than a few peers unused count only where no other exists."""
    counts = np.arange(1, min(peers, MOST_STAGES_TRIED) + 1) if stages is None else np.array([stages])
    found = [(int(s), replicas or peers // int(s)) for s in counts if s * (replicas or peers // int(s)) <= peers]
    full = [pair for pair in found if pair[0] * pair[1] >= LEAST_USED * peers]
    return full or found or [(1, peers)]


def hand_costs(problem: Problem, region_N: Ints, seed: int) -> dict[str, float]:
    """What the layouts that a person would draw cost, in seconds; each is the best of HAND_DRAWS draws."""
    costs = {}
    for name in layouts.HAND:
        rng = chance.arrays(seed, "hand", name)
        draws = [layouts.STARTS[name](region_N, problem.stages, problem.replicas, rng) for _ in range(HAND_DRAWS)]
        costs[name] = min(best_layout(problem, slots).cost.total for slots in draws)
    return costs


def solver_records(topology: Topology, seed: int, seconds: float, clock: Callable[[], float]) -> dict[str, Record]:
    """Each solver's progress within `seconds`, and the hand layouts as one point each, which no time improves."""
    problem = problem_of(topology, topology.workload or Workload())
    region_N = regions_of(topology)
    found: dict[str, Record] = {name: [(0.0, cost)] for name, cost in hand_costs(problem, region_N, seed).items()}
    for name, solver in SYNC_SOLVERS.items():
        if not solver.compared or not solver.takes(problem):
            continue
        begin, record = clock(), Record()

        def note(_fraction: float, best: float, record: Record = record, begin: float = begin) -> None:
            if not record or best < record[-1][1]:
                record.append((clock() - begin, best))

        budget = SearchBudget(seconds, clock=clock, report=note)
        slots = solver.search(problem, region_N, budget, chance.arrays(seed, "plan", name))
        record.append((clock() - begin, best_layout(problem, slots).cost.total))
        found[name] = record
    return found


def _compile(solver: str) -> None:
    """Compiles what the solver runs, or loads it from disk, by solving for eight peers."""
    same = 1.0 - np.eye(8)
    _solve(Problem(same, same, 2, 4), np.zeros(8, np.int64), solver, 0, SearchBudget(rounds=1))


def _solve(problem: Problem, region_N: Ints, solver: str, seed: int, budget: SearchBudget) -> Ints:
    rng = chance.arrays(seed, "plan", solver)
    if solver in layouts.HAND:
        return layouts.STARTS[solver](region_N, problem.stages, problem.replicas, rng)
    if solver not in SYNC_SOLVERS:
        known = ", ".join([*SYNC_SOLVERS, *layouts.HAND])
        raise UserError(f"--solver {solver} is not one for --objective sync; there are: {known}")
    if not SYNC_SOLVERS[solver].takes(problem):
        raise UserError(f"--solver {solver} uses every peer: stages * replicas must be {problem.peers}; use genetic")
    return SYNC_SOLVERS[solver].search(problem, region_N, budget, rng)


def _named(topology: Topology, rows: Ints) -> list[list[str]]:
    return [[topology.ids[peer] for peer in row] for row in rows]


def _reason(topology: Topology, found: Layout, baselines: dict[str, float], solver: str) -> str:
    """One paragraph of plain words: what the layout costs, in which parts, and how it compares."""
    best = min(baselines, key=lambda name: baselines[name])
    gain = 1 - found.cost.total / baselines[best] if baselines[best] > 0 else 0.0
    word = "below" if gain > 0 else "above"
    against = f"{abs(gain):.1%} {word} the best hand layout ({best}, {baselines[best]:.3f} s)"
    if abs(gain) < 5e-4:
        against = f"the same as the hand layout {best}: on a swarm this regular, a person finds it too"
    stages, replicas = found.stages_SR.shape
    local = _inside(topology, found.stages_SR.T)
    return (
        f"{stages} stages of {replicas} replicas cost {found.cost.total:.3f} s of communication a step: "
        f"{found.cost.pipeline:.3f} s for activations and gradients between stages, and "
        f"{found.cost.data_parallel:.3f} s for averaging in the dearest stage. {local:.0%} of the pipelines' hops "
        f"and {_inside(topology, found.stages_SR):.0%} of the neighbours within a stage stay inside a region. "
        f"The {solver} plan is {against}."
    )


def _inside(topology: Topology, rows: Sequence[Sequence[int]] | Ints) -> float:
    """The share of neighbours in these rows that are in one region."""
    pairs = [topology.regions[a] == topology.regions[b] for row in rows for a, b in itertools.pairwise(row)]
    return sum(pairs) / len(pairs) if pairs else 1.0

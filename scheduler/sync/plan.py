"""The plan for the objective `sync`: the layout with the least communication in a synchronous training step.

    plan = sync_plan(topology, solver="genetic", seed=0, budget=SearchBudget(seconds=5, clock=time.monotonic))

Start at `sync_plan`. If the workload does not set the number of stages or of replicas, each pair (stages, replicas)
that uses nearly all peers is tried briefly (as in AMP, arXiv 2210.07297). Only communication is compared, because the
same peers do the same computation. `layout_cost.cost_of_pipelines` verifies the cost of a plan.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.scheduler.sync import annealing, evolve, exact, gcma, layouts
from decentral.scheduler.sync.layout_cost import Layout, Problem, best_layout, problem_of
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.plan import SyncPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology, Workload, regions_of

Solver = Callable[[Problem, Ints, SearchBudget, np.random.Generator], Ints]
"""A search (problem, region_N, budget, rng) -> slots (see layout_cost.py); `region_N` has the region of each peer."""

Record = list[tuple[float, float]]
"""A search's history: (seconds since its begin, best cost so far in seconds), at each improvement."""

LEAST_USED = 0.95  # numbers of stages and replicas that use a smaller share of the peers are a last resort
MOST_STAGES_TRIED = 64  # more stages are not tried, unless the workload asks for them
HAND_DRAWS = 5  # each hand layout is sampled this often, and the cheapest sample counts


@dataclass(frozen=True, slots=True)
class SyncSolver:
    """A search for a SyncPlan, which the user can choose with `--solver`, and the swarms that it accepts."""

    search: Solver
    compared: bool = False  # whether `solver_records` compares this solver with others
    uses_all_peers: bool = False  # whether the solver accepts only stages * replicas == number of peers

    def takes(self, problem: Problem) -> bool:
        """Return whether the solver accepts the problem's number of peers; the search itself checks other limits."""
        return not self.uses_all_peers or problem.stages * problem.replicas == problem.peers


SYNC_SOLVERS = {
    "genetic": SyncSolver(evolve.search, compared=True),
    "annealing": SyncSolver(annealing.search, compared=True),
    "gcma": SyncSolver(gcma.search, compared=True, uses_all_peers=True),
    "exact": SyncSolver(exact.search),
}


def sync_plan(topology: Topology, solver: str, seed: int, budget: SearchBudget) -> SyncPlan:
    """Return the plan with the least communication that a solver finds within the budget.

    The time to compile the solver does not count against the budget.

    Args:
        topology: The peers, their links and the workload.
        solver: A name in SYNC_SOLVERS or `layouts.HAND`.
        seed: Seed of all random choices.
        budget: Limits of the search.

    Raises:
        UserError: If the solver is unknown, the swarm is too small for its workload, or the solver cannot take a swarm
            of this size.
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
    used += 2 * (budget.clock() - between) / (len(layouts.HAND) * HAND_DRAWS)
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
    """Return the workload with the best numbers of stages and replicas, and the cost in seconds of each pair tried.

    The key of a cost is its pair, such as "8x4" for 8 stages of 4 replicas.
    """
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
    """Return the workload with these numbers of stages and replicas, and the gigabytes of one stage and one replica.

    If `workload.stages` is None, the workload's gradients are those of the whole model, and are divided by `stages`. If
    `workload.replicas` is None, its activations are those of the whole batch, and are divided by `replicas`.
    """
    gradient, activation = workload.gradient_gbytes, workload.activation_gbytes
    return replace(
        workload,
        stages=stages,
        replicas=replicas,
        gradient_gbytes=gradient / stages if workload.stages is None else gradient,
        activation_gbytes=activation / replicas if workload.replicas is None else activation,
    )


def candidates(peers: int, stages: int | None, replicas: int | None) -> list[tuple[int, int]]:
    """Return the pairs (stages, replicas) to try for this number of peers; a number that is not None stays as it is.

    Pairs that use less than LEAST_USED of the peers are returned only if no pair uses more.
    """
    counts = np.arange(1, min(peers, MOST_STAGES_TRIED) + 1) if stages is None else np.array([stages])
    found = [(int(s), replicas or peers // int(s)) for s in counts if s * (replicas or peers // int(s)) <= peers]
    full = [pair for pair in found if pair[0] * pair[1] >= LEAST_USED * peers]
    return full or found or [(1, peers)]


def hand_costs(problem: Problem, region_N: Ints, seed: int) -> dict[str, float]:
    """Return the cost in seconds of each hand layout, by name; each is the best of HAND_DRAWS random samples."""
    costs = {}
    for name in layouts.HAND:
        rng = chance.arrays(seed, "hand", name)
        draws = [layouts.STARTS[name](region_N, problem.stages, problem.replicas, rng) for _ in range(HAND_DRAWS)]
        costs[name] = min(best_layout(problem, slots).cost.total for slots in draws)
    return costs


def solver_records(topology: Topology, seed: int, seconds: float, clock: Callable[[], float]) -> dict[str, Record]:
    """Return cost histories by name, of each compared solver within `seconds` and of each hand layout (one point)."""
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
    """Compile the solver's functions, or load them from disk, by solving a problem of eight peers."""
    same = 1.0 - np.eye(8)
    _solve(Problem(same, same, 2, 4), np.zeros(8, np.int64), solver, 0, SearchBudget(rounds=1))


def _solve(problem: Problem, region_N: Ints, solver: str, seed: int, budget: SearchBudget) -> Ints:
    rng = chance.arrays(seed, "plan", solver)
    if solver in layouts.HAND:
        return layouts.STARTS[solver](region_N, problem.stages, problem.replicas, rng)
    if solver not in SYNC_SOLVERS:
        known = ", ".join([*SYNC_SOLVERS, *layouts.HAND])
        raise UserError(f"--solver {solver} is unknown: --objective sync expects one of {known}")
    if not SYNC_SOLVERS[solver].takes(problem):
        raise UserError(
            f"--solver {solver} needs as many peers as stages * replicas; there are {problem.peers} for "
            f"{problem.stages} * {problem.replicas}: use --solver genetic"
        )
    return SYNC_SOLVERS[solver].search(problem, region_N, budget, rng)


def _named(topology: Topology, rows: Ints) -> list[list[str]]:
    return [[topology.ids[peer] for peer in row] for row in rows]


def _reason(topology: Topology, found: Layout, baselines: dict[str, float], solver: str) -> str:
    """Return one paragraph that explains the layout's cost, its parts, and how it compares with the hand layouts."""
    best = min(baselines, key=lambda name: baselines[name])
    gain = 1 - found.cost.total / baselines[best] if baselines[best] > 0 else 0.0
    word = "below" if gain > 0 else "above"
    against = f"{abs(gain):.1%} {word} the best hand layout ({best}, {baselines[best]:.3f} s)"
    if abs(gain) < 5e-4:
        against = f"the same as the hand layout {best}: a swarm this regular needs no search"
    stages, replicas = found.stages_SR.shape
    local = _inside(topology, found.stages_SR.T)
    return (
        f"{stages} stages of {replicas} replicas cost {found.cost.total:.3f} s of communication a step: "
        f"{found.cost.pipeline:.3f} s for activations and gradients between stages, and "
        f"{found.cost.data_parallel:.3f} s for averaging in the slowest stage. {local:.0%} of the pipelines' hops "
        f"and {_inside(topology, found.stages_SR):.0%} of the neighbours within a stage stay inside a region. "
        f"The {solver} plan is {against}."
    )


def _inside(topology: Topology, rows: Sequence[Sequence[int]] | Ints) -> float:
    """Return the share, 0 to 1, of adjacent peers in `rows` that are in the same region."""
    pairs = [topology.regions[a] == topology.regions[b] for row in rows for a, b in itertools.pairwise(row)]
    return sum(pairs) / len(pairs) if pairs else 1.0

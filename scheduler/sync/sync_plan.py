"""The plan for the objective `sync`: the layout with the shortest synchronous training step.

    plan = sync_plan(topology, solver="genetic", seed=0, budget=SearchBudget(seconds=5, clock=time.monotonic))

Start at `sync_plan`. If the workload sets the numbers of stages and replicas, only communication is minimised, as in
the published cases (arXiv 2206.01288), because such a layout's computation hardly varies. Otherwise degrees.py searches
for the pair (stages, replicas) with the shortest step, which includes computation, and which peers to leave out.
`layout_cost.cost_of_pipelines` verifies the communication of a plan.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.core.near_names import listed
from decentral.scheduler.sync import annealing, degrees, evolve, exact, explain, gcma, layouts, local_search, step_needs
from decentral.scheduler.sync.layout_cost import Layout, Problem, best_layout
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.plan_forms import SyncPlan
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology

Solver = Callable[[Problem, Ints, SearchBudget, np.random.Generator], Ints]
"""A search (problem, region_N, budget, rng) -> slots (see layout_cost.py); `region_N` has the region of each peer."""

Record = list[tuple[float, float]]
"""A search's history: (seconds since its begin, best cost so far in seconds), at each improvement."""

DEGREES_SHARE = 0.6  # share of the budget for the choice of stages and replicas, if the workload leaves them open
HAND_SHARE = 0.1  # share of the budget for random samples of the hand layouts; each has at least one sample
HAND_DRAWS = 5  # each hand layout is sampled at most this many times, and the cheapest sample counts


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


def sync_plan(
    topology: Topology, solver: str, seed: int, budget: SearchBudget, utilisation: float = step_needs.UTILISATION
) -> SyncPlan:
    """Return the plan with the shortest step that a solver finds within the budget.

    The time to compile the solver does not count against the budget.

    Args:
        topology: The peers, their links and the workload.
        solver: A name in SYNC_SOLVERS or `layouts.HAND`.
        seed: Seed of all random choices.
        budget: Limits of the search.
        utilisation: Share of the topology's FLOP/s that training reaches; 1 if the FLOP/s were measured in training.

    Raises:
        UserError: If the solver is unknown, no plan fits the peers' number, memory and links, or the solver cannot take
            a swarm of this size.
    """
    _compile(solver)
    progress = SearchProgress(budget, np.inf)
    reached_N = utilisation * topology.flops
    choice = degrees.choose(replace(topology, flops=reached_N), seed, budget.part(DEGREES_SHARE))
    problem, region_N = choice.candidate.problem(topology), choice.candidate.region(topology)
    between = progress.seconds()
    baselines = hand_costs(problem, region_N, seed, budget.part(HAND_SHARE))
    ahead_s = (progress.seconds() - between) / len(layouts.HAND)  # estimate of this function's time after the search
    slots = _solve(problem, region_N, solver, seed, budget.less(progress.seconds() + ahead_s))
    layout = best_layout(problem, slots)
    if choice.slots is not None and solver in SYNC_SOLVERS:
        layout = min(layout, best_layout(problem, choice.slots), key=lambda layout: layout.cost.total)
    peers_SR = choice.candidate.members[layout.stages_SR]
    cost = {"total": layout.cost.total} | asdict(layout.cost)
    if degrees.speeds_known(topology):
        compute = step_needs.compute_seconds(choice.candidate.workload, float(reached_N[peers_SR].min()))
        cost |= {"compute": compute, "step": cost["total"] + compute}
    left_out = explain.left_out(topology, choice, peers_SR)
    reason = explain.reason(topology, choice, peers_SR, cost, left_out, utilisation)
    return SyncPlan(
        solver=solver,
        seed=seed,
        seconds=round(progress.seconds(), 3),
        cost=cost,
        stages=_named(topology, peers_SR),
        pipelines=_named(topology, peers_SR.T),
        left_out=left_out,
        degrees=choice.steps,
        baselines=baselines,
        reason=f"{reason} {_against(layout, baselines, solver)}".strip(),
        digest=topology.digest(),
    )


def hand_costs(problem: Problem, region_N: Ints, seed: int, budget: SearchBudget) -> dict[str, float]:
    """Return the seconds of communication of each hand layout, by name: the cheapest of several random samples."""
    progress, costs = SearchProgress(budget, np.inf), dict.fromkeys(layouts.HAND, np.inf)
    rngs = {name: chance.arrays(seed, "hand", name) for name in layouts.HAND}
    for sample in range(HAND_DRAWS):
        for name, rng in rngs.items():
            if sample and progress.late():
                return costs
            slots = layouts.STARTS[name](region_N, problem.stages, problem.replicas, rng)
            progress.count(degrees.LOOK_S + local_search.state_s(problem))
            costs[name] = min(costs[name], best_layout(problem, slots).cost.total)
    return costs


def solver_records(topology: Topology, seed: int, seconds: float, clock: Callable[[], float]) -> dict[str, Record]:
    """Return cost histories by name, of each hand layout (one point) and of each compared solver.

    All solvers search for the same pair of stages and replicas, each for an equal part of `seconds`. Where the workload
    leaves this pair open, its choice takes another part.
    """
    parts = 1 + sum(solver.compared for solver in SYNC_SOLVERS.values())
    reached = replace(topology, flops=step_needs.UTILISATION * topology.flops)
    choice = degrees.choose(reached, seed, SearchBudget(seconds / parts, clock=clock))
    problem, region_N = choice.candidate.problem(topology), choice.candidate.region(topology)
    hand = hand_costs(problem, region_N, seed, SearchBudget(HAND_SHARE * seconds / parts, clock=clock))
    found: dict[str, Record] = {name: [(0.0, cost)] for name, cost in hand.items()}
    for name, solver in SYNC_SOLVERS.items():
        if not solver.compared or not solver.takes(problem):
            continue
        _compile(name)
        begin, record = clock(), Record()

        def note(_fraction: float, best: float, record: Record = record, begin: float = begin) -> None:
            if not record or best < record[-1][1]:
                record.append((clock() - begin, best))

        budget = SearchBudget(seconds / parts, clock=clock, report=note)
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
        known = listed(solver, [*SYNC_SOLVERS, *layouts.HAND])
        raise UserError(f"--solver {solver} is unknown: --objective sync expects one of {known}")
    if not SYNC_SOLVERS[solver].takes(problem):
        raise UserError(
            f"--solver {solver} needs as many peers as stages * replicas; there are {problem.peers} for "
            f"{problem.stages} * {problem.replicas}: use --solver genetic"
        )
    return SYNC_SOLVERS[solver].search(problem, region_N, budget, rng)


def _named(topology: Topology, rows: Ints) -> list[list[str]]:
    return [[topology.ids[peer] for peer in row] for row in rows]


def _against(found: Layout, baselines: dict[str, float], solver: str) -> str:
    """Return a sentence that compares the layout's communication with that of the best hand layout."""
    if found.stages_SR.size == 1:
        return ""
    best = min(baselines, key=lambda name: baselines[name])
    gain = 1 - found.cost.total / baselines[best] if baselines[best] > 0 else 0.0
    if abs(gain) < 5e-4:
        return f"The {solver} plan is the same as the hand layout {best}: a swarm this regular needs no search."
    word = "below" if gain > 0 else "above"
    return f"The {solver} plan is {abs(gain):.1%} {word} the best hand layout ({best}, {baselines[best]:.3f} s)."

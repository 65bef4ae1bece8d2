"""A plan, and how one is made for the synchronous objective: solvers by name, hand layouts beside them, a reason.

    plan = sync_plan(topology, solver="genetic", seed=0, budget=Budget(seconds=5, clock=time.monotonic))

A plan is far cheaper to verify than to find: `cost.cost_of_pipelines` on `plan.pipelines` gives its cost.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology, Workload
from decentral.scheduler.sync import annealing, degrees, evolve, exact, gcma, layouts
from decentral.scheduler.sync.layout_cost import Layout, Problem, cost_of_pipelines, layout, problem

Solver = Callable[[Problem, Ints, SearchBudget, np.random.Generator], Ints]

SYNC_SOLVERS: dict[str, Solver] = {
    "genetic": evolve.search,
    "annealing": annealing.search,
    "gcma": gcma.search,
    "exact": exact.search,
}
HAND_DRAWS = 5  # a hand layout depends on which region comes first: the best of these draws stands for it


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what, what it costs, why, and the digest of the topology that it was made for."""

    objective: str
    solver: str
    seed: int
    seconds: float
    cost: dict[str, float] | None = None
    throughput: dict[str, float] | None = None
    stages: list[list[str]] | None = None
    pipelines: list[list[str]] | None = None
    spans: dict[str, list[int]] | None = None
    micro_batches: dict[str, Any] | None = None
    routes: list[dict[str, Any]] | None = None
    gossip: dict[str, Any] | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that this objective has, in a fixed order."""
        everything = asdict(self)
        return {one.name: everything[one.name] for one in fields(self) if everything[one.name] is not None}


def sync_plan(topology: Topology, solver: str, seed: int, budget: SearchBudget) -> Plan:
    """The plan of least communication for a synchronous step. Raises UserError.

    The budget's seconds are for all of it, but for compiling (or loading what was compiled).
    """
    work = topology.workload or Workload(stages=None, replicas=None)
    region_N = regions_of(topology)
    _compile(solver)
    start = begin = budget.clock()
    tried: dict[str, float] = {}
    if work.stages is None or work.replicas is None:
        work, tried = degrees.choose(topology, region_N, work, seed, budget.part(0.4))
        budget, begin = budget.part(0.6), budget.clock()
    task, digest = problem(topology, work), topology.digest()
    between = budget.clock()
    baselines = hand_costs(task, region_N, seed)
    used = budget.clock() - begin
    used += 2 * (budget.clock() - between) / (len(layouts.HAND) * HAND_DRAWS)  # what is found is laid out and checked
    slots = _solve(task, region_N, solver, seed, budget.less(used))
    found = layout(task, slots)
    claimed, realised = found.cost, cost_of_pipelines(task, found.stages_SR)
    assert abs(claimed.total - realised.total) < 1e-6, "pipelines must cost what the plan claims"
    return Plan(
        objective="sync",
        solver=solver,
        seed=seed,
        seconds=round(budget.clock() - start, 3),
        cost={"total": claimed.total, "data_parallel": claimed.data_parallel, "pipeline": claimed.pipeline},
        stages=_named(topology, found.stages_SR),
        pipelines=_named(topology, found.stages_SR.T),
        baselines=baselines | tried,
        reason=_reason(topology, found, baselines, solver),
        digest=digest,
    )


def regions_of(topology: Topology) -> Ints:
    """The number of each peer's region, in order of first appearance."""
    number = {name: i for i, name in enumerate(dict.fromkeys(topology.regions))}
    return np.array([number[region] for region in topology.regions])


def hand_costs(task: Problem, region_N: Ints, seed: int) -> dict[str, float]:
    """What the layouts cost that a person would draw: each the best of a few draws."""
    costs = {}
    for name in layouts.HAND:
        rng = chance.arrays(seed, "hand", name)
        draws = [layouts.STARTS[name](region_N, task.stages, task.replicas, rng) for _ in range(HAND_DRAWS)]
        costs[name] = min(layout(task, slots).cost.total for slots in draws)
    return costs


def _compile(solver: str) -> None:
    """Compiles what the solver runs, or loads it from disk, by a swarm of eight."""
    same = 1.0 - np.eye(8)
    _solve(Problem(same, same, 2, 4), np.zeros(8, np.int64), solver, 0, SearchBudget(rounds=1))


def _solve(task: Problem, region_N: Ints, solver: str, seed: int, budget: SearchBudget) -> Ints:
    rng = chance.arrays(seed, "plan", solver)
    if solver in layouts.HAND:
        return layouts.STARTS[solver](region_N, task.stages, task.replicas, rng)
    if solver not in SYNC_SOLVERS:
        known = ", ".join([*SYNC_SOLVERS, *layouts.HAND])
        raise UserError(f"--solver {solver} is not one for --objective sync; there are: {known}")
    if solver == "gcma" and task.stages * task.replicas != len(task):
        raise UserError(f"--solver gcma uses every peer: stages * replicas must be {len(task)}; use genetic")
    return SYNC_SOLVERS[solver](task, region_N, budget, rng)


def _named(topology: Topology, rows: Ints) -> list[list[str]]:
    return [[topology.ids[peer] for peer in row] for row in rows]


def _reason(topology: Topology, found: Layout, baselines: dict[str, float], solver: str) -> str:
    """One paragraph of plain words: what it costs, what the parts are, and how it compares."""
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

"""How many stages and how many replicas, when the workload leaves them open (the degree search of AMP, 2210.07297).

A stage's gradient is the whole model's over the number of stages, and a pipeline's activations are the whole
batch's over the number of replicas. Every pair of degrees that uses nearly all peers gets a short search; the best
is taken. Only communication is compared: with the same peers in use, the computing is the same.
"""

from dataclasses import replace

import numpy as np

from decentral.core import rng as chance
from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology, Workload
from decentral.scheduler.sync import evolve
from decentral.scheduler.sync.layout_cost import best_layout, problem_of

LEAST_USED = 0.95  # of the peers
MOST_STAGES_TRIED = 64


def choose(
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

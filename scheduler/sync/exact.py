"""The best synchronous layout, proven, for small swarms: branch and bound over partitions into stages.

Peers are placed one after the other, stages are filled in order of their first peer (so that no partition is met
twice), and a branch ends where its data-parallel cost, plus the least that any joint can cost, reaches the best.
"""

import numpy as np

from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Floats, Ints
from decentral.scheduler.shared.machine_code import compiled
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.sync.gcma import score
from decentral.scheduler.sync.layout_cost import Problem

MOST_PEERS = 16


def search(problem: Problem, _region_N: Ints, budget: SearchBudget, _rng: np.random.Generator) -> Ints:
    """The slots of an optimal layout. Raises UserError for swarms that it cannot finish."""
    if len(problem) > MOST_PEERS or problem.stages * problem.replicas != len(problem):
        raise UserError(
            f"--solver exact takes up to {MOST_PEERS} peers, all used; got {len(problem)} for "
            f"{problem.stages} x {problem.replicas}: use --solver genetic"
        )
    best_N = np.arange(len(problem)) // problem.replicas
    data, pipe = problem.data_NN, problem.pipe_NN
    best = score(data, pipe, problem.stages, problem.replicas, best_N)
    off = ~np.eye(len(problem), dtype=bool)
    floor = 2 * (problem.stages - 1) * float(pipe[off].min())
    sums = np.zeros(len(problem))
    stage_N = np.full(len(problem), -1, np.int64)
    best = _place(data, pipe, problem.stages, problem.replicas, 0, 0, stage_N, sums, floor, best, best_N)
    budget.report(1.0, best)
    return np.argsort(best_N, kind="stable")


@compiled
def _place(
    data_NN: Floats,
    pipe_NN: Floats,
    stages: int,
    replicas: int,
    peer: int,
    opened: int,
    stage_N: Ints,
    sums_N: Floats,
    floor: float,
    best: float,
    best_N: Ints,
) -> float:
    """Places `peer` and all after it in every way that may beat `best`. Returns the least cost found."""
    if peer == stage_N.size:
        cost = score(data_NN, pipe_NN, stages, replicas, stage_N)
        if cost < best - 1e-12:
            best = cost
            best_N[:] = stage_N
        return best
    for stage in range(min(opened + 1, stages)):
        mates = 0
        for other in range(peer):
            mates += stage_N[other] == stage
        if mates == replicas:
            continue
        peak, own = 0.0, 0.0
        for other in range(peer):
            if stage_N[other] == stage:
                own += data_NN[peer, other]
                peak = max(peak, sums_N[other] + data_NN[other, peer])
        if max(peak, own) + floor >= best:
            continue
        for other in range(peer):
            if stage_N[other] == stage:
                sums_N[other] += data_NN[other, peer]
        stage_N[peer], sums_N[peer] = stage, own
        best = _place(
            data_NN, pipe_NN, stages, replicas, peer + 1, max(opened, stage + 1), stage_N, sums_N, floor, best, best_N
        )
        stage_N[peer] = -1
        for other in range(peer):
            if stage_N[other] == stage:
                sums_N[other] -= data_NN[other, peer]
    return best

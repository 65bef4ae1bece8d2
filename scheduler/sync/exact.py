"""The best synchronous layout, proven, for small swarms: branch and bound over partitions into stages.

Peers are placed one after the other, stages are opened in order of their first peer (so that no partition is met
twice), and a branch ends where its data-parallel cost, plus the least that any boundary can cost, reaches the best.
"""

from typing import NamedTuple

import numpy as np

from decentral.core.compiled import compiled
from decentral.core.errors import UserError
from decentral.scheduler.sync.gcma import score
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget

MOST_PEERS = 16


class _Partition(NamedTuple):
    """The partition that is being enumerated, and the best one so far (N peers)."""

    stage_N: Ints  # -1: not placed yet
    sums_N: Floats  # each placed peer's data-parallel seconds within its stage
    best_N: Ints
    floor: float  # seconds that all boundaries cost at least


def search(problem: Problem, _region_N: Ints, budget: SearchBudget, _rng: np.random.Generator) -> Ints:
    """The slots of an optimal layout. Raises UserError for swarms that it cannot finish."""
    if problem.peers > MOST_PEERS or problem.stages * problem.replicas != problem.peers:
        raise UserError(
            f"--solver exact takes up to {MOST_PEERS} peers, all used; got {problem.peers} for "
            f"{problem.stages} x {problem.replicas}: use --solver genetic"
        )
    best_N = np.arange(problem.peers) // problem.replicas
    fastest = float(problem.pipe_NN[~np.eye(problem.peers, dtype=bool)].min())
    unplaced = np.full(problem.peers, -1, np.int64)
    partition = _Partition(unplaced, np.zeros(problem.peers), best_N, 2 * (problem.stages - 1) * fastest)
    best = _place(problem, partition, 0, 0, score(problem, best_N))
    budget.report(1.0, best)
    return np.argsort(best_N, kind="stable")


@compiled
def _place(problem: Problem, partition: _Partition, peer: int, opened: int, best: float) -> float:
    """The least cost of all ways to place `peer` and those after it; `opened` stages have a peer already."""
    stage_N, sums_N, data_NN = partition.stage_N, partition.sums_N, problem.data_NN
    if peer == stage_N.size:
        cost = score(problem, stage_N)
        if cost < best - 1e-12:
            best = cost
            partition.best_N[:] = stage_N
        return best
    for stage in range(min(opened + 1, problem.stages)):
        members = 0
        for other in range(peer):
            members += stage_N[other] == stage
        if members == problem.replicas:
            continue
        peak, own = 0.0, 0.0
        for other in range(peer):
            if stage_N[other] == stage:
                own += data_NN[peer, other]
                peak = max(peak, sums_N[other] + data_NN[other, peer])
        if max(peak, own) + partition.floor >= best:
            continue
        for other in range(peer):
            if stage_N[other] == stage:
                sums_N[other] += data_NN[other, peer]
        stage_N[peer], sums_N[peer] = stage, own
        best = _place(problem, partition, peer + 1, max(opened, stage + 1), best)
        stage_N[peer] = -1
        for other in range(peer):
            if stage_N[other] == stage:
                sums_N[other] -= data_NN[other, peer]
    return best

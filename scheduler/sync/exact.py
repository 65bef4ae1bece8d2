"""Find an optimal synchronous layout of a small swarm, by branch and bound over partitions. Start at `search`.

The search places one peer after the other, or leaves it out if the stages need fewer peers. It numbers stages in the
order of their first peers, so that it visits no partition twice. It abandons a branch whose data-parallel cost plus a
lower bound for all stage boundaries is not below the best cost.
"""

from typing import NamedTuple

import numpy as np

from decentral.core.compiled import compiled, inner
from decentral.core.errors import UserError
from decentral.scheduler.sync.gcma import score
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget

MOST_PEERS = 16  # an exact search may visit all partitions, which takes too long for more peers


class _Partition(NamedTuple):
    """The partition of N peers into stages that the search is building, and the best complete partition so far."""

    stage_N: Ints  # stage of each peer; -1 if not placed yet, S if left out
    sums_N: Floats  # each placed peer's seconds of gradient averaging with the peers of its stage
    best_N: Ints
    floor: float  # all boundaries between stages take at least this many seconds together


def search(problem: Problem, _region_N: Ints, budget: SearchBudget, _rng: np.random.Generator) -> Ints:
    """Return an optimal layout as slots, the peers stage by stage, then the peers that are left out.

    The budget does not limit the search.

    Raises:
        UserError: If there are more than MOST_PEERS peers.
    """
    if problem.peers > MOST_PEERS:
        raise UserError(
            f"--solver exact takes at most {MOST_PEERS} peers; there are {problem.peers}: use --solver genetic"
        )
    best_N = np.minimum(np.arange(problem.peers) // problem.replicas, problem.stages)
    fastest = float(problem.pipe_NN[~np.eye(problem.peers, dtype=bool)].min())
    unplaced = np.full(problem.peers, -1, np.int64)
    partition = _Partition(unplaced, np.zeros(problem.peers), best_N, 2 * (problem.stages - 1) * fastest)
    best = _place(problem, partition, 0, 0, score(problem, best_N))
    budget.report(1.0, best)
    return np.argsort(best_N, kind="stable")


@compiled
def _place(problem: Problem, partition: _Partition, peer: int, opened: int, best: float) -> float:
    """Return the lowest cost in seconds of all ways to place `peer` and the later peers, or `best` if that is lower.

    The first `opened` stages already have a peer. A partition that costs less than `best` is copied to
    `partition.best_N`.
    """
    stage_N, sums_N, data_NN = partition.stage_N, partition.sums_N, problem.data_NN
    if peer == stage_N.size:
        cost = score(problem, stage_N)
        if cost < best - 1e-12:
            best = cost
            partition.best_N[:] = stage_N
        return best
    for stage in range(min(opened + 1, problem.stages)):
        if _members(stage_N, peer, stage) == problem.replicas:
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
    if _members(stage_N, peer, problem.stages) < stage_N.size - problem.stages * problem.replicas:
        stage_N[peer] = problem.stages
        best = _place(problem, partition, peer + 1, opened, best)
        stage_N[peer] = -1
    return best


@inner
def _members(stage_N: Ints, peer: int, stage: int) -> int:
    """Return how many of the first `peer` peers are in a stage."""
    count = 0
    for other in range(peer):
        count += stage_N[other] == stage
    return count

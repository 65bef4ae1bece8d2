"""The published genetic scheduler (DT-FM, NeurIPS 2022), reimplemented as the baseline to beat. Start at `search`.

The population is 100 random balanced partitions. A trial crosses two partitions: the child is a copy of the second
parent, but five peers are in the stages that the first parent gives them. Then peers of stages that are too large move
to the first stage that is too small. One pass of cyclic partitioning (Kang and Moon: chains of single moves, each peer
moved once) improves the child. The stages' order is an exact travelling-salesman path; each boundary is an exact
bottleneck matching.

Two oddities of the published code are reproduced, because they influence the result:
- its replacement test reads `child > max(score of parent 1, child > score of parent 2)`. The second argument is a
  boolean, so a child no worse than the *first* parent replaces the worse parent, even if it is the worst of the three;
- a chain moves the peer that is nearest to another peer of its stage, to the stage with the greatest mean distance.
Two oddities are corrected, because they change only what is reported: the published code returns the matching of the
threshold *after* the last feasible one, and its seeding (`random.seed = i`) overwrites the function.

benchmarks/planner_published.py is an interpreted version that evaluates the same candidates in the same order.
"""

from typing import NamedTuple

import numpy as np

from decentral.core.compiled import compiled, inner
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.sync.local_search import boundary
from decentral.scheduler.sync.matching import held_karp, order_s
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

POPULATION = 100  # number of partitions, as in the paper
CROSSED = 5  # number of peers that a child's first parent places, as in the paper
TRIALS = 25


class _Population(NamedTuple):
    """P partitions with the stage of every peer, their costs in seconds, and the best partition found so far."""

    stage_PN: Ints
    score_P: Floats
    best_N: Ints


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return the best layout found within the budget, as slots: the peers of each stage in turn.

    A round of the budget is TRIALS trials. stages * replicas must equal the number of peers.
    """
    assert problem.stages * problem.replicas == problem.peers, "the published algorithm leaves no peer unused"
    stage_PN = np.array([rng.permutation(problem.peers) // problem.replicas for _ in range(POPULATION)])
    score_P = np.array([score(problem, stage_N) for stage_N in stage_PN])
    population = _Population(stage_PN, score_P, stage_PN[int(np.argmin(score_P))].copy())
    progress = SearchProgress(budget, float(score_P.min()))
    while progress.goes_on():
        parents, crossed = draws(rng, POPULATION, problem.peers)
        progress.count(TRIALS * trial_s(problem))
        progress.report(_trials(problem, population, progress.best, parents, crossed))
    return np.argsort(population.best_N, kind="stable")


def trial_s(problem: Problem) -> float:
    """Return the seconds of a trial on a quiet core: the chains of moves, and the best order of the stages."""
    return 5e-9 * problem.stages * problem.peers**2 + order_s(problem.stages)


def draws(rng: np.random.Generator, population: int, peers: int) -> tuple[Ints, Ints]:
    """Return the random choices of TRIALS trials: two parents [TRIALS, 2] and the peers to cross [TRIALS, CROSSED].

    In the child, the peers to cross are in the stages that the first parent gives them.
    """
    parents = rng.integers(0, population, (TRIALS, 2))
    return parents, np.array([rng.permutation(peers)[:CROSSED] for _ in range(TRIALS)])


@compiled
def score(problem: Problem, stage_N: Ints) -> float:
    """Return the true cost in seconds of a partition, with its stages in the best order.

    A peer whose stage is `problem.stages` is left out.
    """
    data_NN, stages, replicas = problem.data_NN, problem.stages, problem.replicas
    slots, filled = np.empty(stages * replicas, np.int64), np.zeros(stages, np.int64)
    for peer in range(stage_N.size):
        stage = stage_N[peer]
        if stage < stages:
            slots[stage * replicas + filled[stage]] = peer
            filled[stage] += 1
    peak = 0.0
    for slot in range(slots.size):
        start = slot // replicas * replicas
        seconds = 0.0
        for other in range(start, start + replicas):
            seconds += data_NN[slots[slot], slots[other]]
        peak = max(peak, seconds)
    cost_SS = np.zeros((stages, stages))
    for a in range(stages):
        for b in range(a + 1, stages):
            cost_SS[a, b] = cost_SS[b, a] = boundary(problem.pipe_NN, slots, replicas, a, b, np.inf)[0]
    order = held_karp(cost_SS)
    path = 0.0
    for position in range(stages - 1):
        path += cost_SS[order[position], order[position + 1]]
    return peak + 2.0 * path


@compiled
def _trials(problem: Problem, population: _Population, best: float, parents: Ints, crossed: Ints) -> float:
    """Run trials that change the population in place, and return the lowest cost in seconds; at most `best`."""
    stage_PN, score_P, _ = population
    for trial in range(len(parents)):
        one, two = parents[trial]
        child = _cyclic(problem, _crossover(problem, stage_PN[one], stage_PN[two], crossed[trial]))
        cost = score(problem, child)
        if cost <= max(score_P[one], 1.0 if cost > score_P[two] else 0.0):
            worse = one if score_P[one] > score_P[two] else two
            stage_PN[worse] = child
            score_P[worse] = cost
        if cost < best:
            best = cost
            population.best_N[:] = child
    return best


@compiled
def _crossover(problem: Problem, first_N: Ints, second_N: Ints, crossed: Ints) -> Ints:
    """Return a copy of `second_N` with the stages of `first_N` for the peers `crossed`, with balanced stage sizes."""
    child = second_N.copy()
    for i in range(crossed.size):
        child[crossed[i]] = first_N[crossed[i]]
    sizes = _sizes(child, problem.stages)
    for peer in range(child.size):
        if sizes[child[peer]] > problem.replicas:
            free = 0
            while sizes[free] >= problem.replicas:
                free += 1
            sizes[free] += 1
            sizes[child[peer]] -= 1
            child[peer] = free
    return child


@inner
def _sizes(stage_N: Ints, stages: int) -> Ints:
    sizes = np.zeros(stages, np.int64)
    for peer in range(stage_N.size):
        sizes[stage_N[peer]] += 1
    return sizes


@compiled
def _cyclic(problem: Problem, child: Ints) -> Ints:
    """Improve a partition by one pass of cyclic partitioning: up to S chains of moves, each peer moved at most once.

    Returns:
        The partition after the first k chains, where k makes the sum of their gains greatest; `child` itself if no k
        gains anything. `child` is not changed. As in the interpreted version, the last chain is never kept.
    """
    pipe_NN, stages = problem.pipe_NN, problem.stages
    locked_N = np.zeros(child.size, np.bool_)
    touched_S = np.zeros(stages, np.bool_)
    state, kept = child.copy(), child
    before, best = 0.0, 0.0  # gain of all chains but the newest, and of the best prefix of chains
    for _ in range(stages):
        previous = state.copy()
        gain = _chain(pipe_NN, state, stages, locked_N, touched_S)
        if before > best:
            best, kept = before, previous
        before += gain
        untouched = 0
        for stage in range(stages):
            untouched += not touched_S[stage]
        if untouched == 0:
            break
    return kept


@inner
def _chain(pipe_NN: Floats, stage_N: Ints, stages: int, locked_N: Flags, touched_S: Flags) -> float:
    """Move one peer from each stage in a chain of stages to the next stage, and return the chain's gain.

    The last peer of the chain moves to the first stage; the chain's length is chosen for the greatest gain. The
    function changes `stage_N`, locks the peers that it has moved, and marks the stages that received a peer.
    """
    peers = stage_N.size
    moved, left = np.empty(peers, np.int64), np.empty(peers, np.int64)
    step_gain, closing_gain = np.empty(peers), np.empty(peers)
    gain_SS, gain_S, peer_S, to_S = _gains(pipe_NN, stage_N, stages, locked_N)
    origin = 0
    for stage in range(stages):
        if gain_S[stage] > gain_S[origin]:
            origin = stage
    here = origin
    if peer_S[origin] < 0:  # no peer is left to move
        return 0.0
    length = 0
    for _ in range(peers):
        peer, target = peer_S[here], to_S[here]
        if peer < 0:
            peer, target = moved[length - 1], origin
        stage_N[peer] = target
        locked_N[peer] = True
        touched_S[target] = True
        moved[length], left[length] = peer, here
        step_gain[length], closing_gain[length] = gain_S[here], gain_SS[here, origin]
        length += 1
        here = target
        if here == origin:
            break
        gain_SS, gain_S, peer_S, to_S = _gains(pipe_NN, stage_N, stages, locked_N)
    best, last, before = 0.0, 0, 0.0
    for i in range(1, length):
        before += step_gain[i - 1]
        if before + closing_gain[i] > best:
            best, last = before + closing_gain[i], i
    for i in range(length - 1, last, -1):
        stage_N[moved[i]] = left[i]
    stage_N[moved[last]] = origin
    return best


@inner
def _gains(pipe_NN: Floats, stage_N: Ints, stages: int, locked_N: Flags) -> tuple[Floats, Floats, Ints, Ints]:
    """Return, for each stage, the gain of moving one peer to another stage.

    The peer is the unlocked peer that is nearest to another peer of its stage. The results are the gain for each target
    stage [S, S], the best gain [S], the peer [S], and the best target stage [S].
    """
    sizes = _sizes(stage_N, stages)
    gain_NS = np.zeros((stage_N.size, stages))
    gain_SS, gain_S, nearest_S = np.empty((stages, stages)), np.empty(stages), np.empty(stages)
    peer_S, to_S = np.empty(stages, np.int64), np.empty(stages, np.int64)
    for stage in range(stages):
        nearest_S[stage], gain_S[stage] = np.inf, -np.inf
        peer_S[stage] = to_S[stage] = -1
        for target in range(stages):
            gain_SS[stage, target] = -np.inf
    for peer in range(stage_N.size):
        if locked_N[peer]:
            continue
        own = stage_N[peer]
        gain_NS[peer, own] = np.inf
        for other in range(stage_N.size):
            stage = stage_N[other]
            if stage != own:
                gain_NS[peer, stage] += pipe_NN[peer, other] / sizes[stage]
            elif other != peer:
                gain_NS[peer, own] = min(gain_NS[peer, own], pipe_NN[peer, other])
        if gain_NS[peer, own] < nearest_S[own]:
            nearest_S[own] = gain_NS[peer, own]
            peer_S[own] = peer
    for stage in range(stages):
        if peer_S[stage] >= 0:
            for target in range(stages):
                if target != stage:
                    gain = gain_NS[peer_S[stage], target] - gain_NS[peer_S[stage], stage]
                    gain_SS[stage, target] = gain
                    if gain > gain_S[stage]:
                        gain_S[stage] = gain
                        to_S[stage] = target
    return gain_SS, gain_S, peer_S, to_S

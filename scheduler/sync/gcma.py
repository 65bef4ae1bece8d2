"""The published scheduler of Yuan et al. (NeurIPS 2022), as the baseline to beat: the same steps in our own code.

A population of 100 random balanced partitions. Each trial crosses two of them (five peers take the stage that they
have in the first parent; peers of overfull stages then move to the first stage with a free place), improves the child
by one pass of cyclic partitioning (Kang and Moon; chains of single moves, each peer moved once), and keeps it by the
rule below. The stages' order is an exact travelling-salesman path, each boundary an exact bottleneck matching.

Two oddities of the published code are kept, because they decide what it finds:
- its replacement test reads `child > max(score of parent 1, child > score of parent 2)`: the second is a boolean,
  so a child no worse than the *first* parent replaces the worse of both, even when it is the worst of the three;
- a chain chooses the peer whose nearest mate is nearest, and the stage whose mean distance is greatest.
Two are not kept, because they change only what is reported: the returned matching belongs to the threshold *after* the
last feasible one, and the seeding (`random.seed = i`) overwrites the function instead of calling it.

benchmarks/planner_published.py is the interpreted form, which walks candidate by candidate as this compiled one does.
"""

from typing import NamedTuple

import numpy as np

from decentral.core.compiled import compiled, inner
from decentral.scheduler.sync.layout_cost import Problem
from decentral.scheduler.sync.local_search import boundary
from decentral.scheduler.sync.matching import held_karp
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

POPULATION = 100
CROSSED = 5  # peers
TRIALS = 25  # between two looks at the clock


class _Population(NamedTuple):
    """Partitions, as the stage of each peer, and the best that was ever seen."""

    stage_PN: Ints
    score_P: Floats
    best_N: Ints


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """The slots of the best candidate within the budget; a round of the budget is TRIALS trials."""
    assert problem.stages * problem.replicas == problem.peers, "the published algorithm leaves no peer unused"
    stage_PN = np.array([rng.permutation(problem.peers) // problem.replicas for _ in range(POPULATION)])
    score_P = np.array([score(problem, stage_N) for stage_N in stage_PN])
    population = _Population(stage_PN, score_P, stage_PN[int(np.argmin(score_P))].copy())
    progress = SearchProgress(budget, float(score_P.min()))
    while progress.goes_on():
        parents, crossed = draws(rng, POPULATION, problem.peers)
        progress.report(_trials(problem, population, progress.best, parents, crossed))
    return np.argsort(population.best_N, kind="stable")


def draws(rng: np.random.Generator, population: int, peers: int) -> tuple[Ints, Ints]:
    """The random choices of one round: TRIALS pairs of parents, and the peers that take the first parent's stage."""
    parents = rng.integers(0, population, (TRIALS, 2))
    return parents, np.array([rng.permutation(peers)[:CROSSED] for _ in range(TRIALS)])


@compiled
def score(problem: Problem, stage_N: Ints) -> float:
    """The true cost of a partition in seconds, its stages in the best order."""
    data_NN, stages, replicas = problem.data_NN, problem.stages, problem.replicas
    slots, filled = np.empty(stage_N.size, np.int64), np.zeros(stages, np.int64)
    for peer in range(stage_N.size):
        stage = stage_N[peer]
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
    """Trials on the population, in place. `best`: the cost of `best_N` so far. Returns what it costs now."""
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
    """The second partition, with the first one's stage for the peers `crossed`, made balanced again."""
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
    """One pass of cyclic partitioning: up to S chains. Returns the partition after the best prefix of chains."""
    pipe_NN, stages = problem.pipe_NN, problem.stages
    locked_N = np.zeros(child.size, np.bool_)
    touched_S = np.zeros(stages, np.bool_)
    state, kept = child.copy(), child
    before, best = 0.0, 0.0  # what the chains before the last gain, and the most that a prefix gains
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
    """Moves peers along a chain of stages that ends where it began, and undoes it after its best prefix."""
    peers = stage_N.size
    moved, left = np.empty(peers, np.int64), np.empty(peers, np.int64)
    step_gain, closing_gain = np.empty(peers), np.empty(peers)
    gain_SS, gain_S, peer_S, to_S = _gains(pipe_NN, stage_N, stages, locked_N)
    origin = 0
    for stage in range(stages):
        if gain_S[stage] > gain_S[origin]:
            origin = stage
    here = origin
    if peer_S[origin] < 0:  # every peer has moved once
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
    """Of each stage's peer with the nearest mate: its gain in each other stage, the best gain, the peer, the target."""
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

"""The published genetic scheduler of Yuan et al. (NeurIPS 2022) in plain interpreted Python, to measure its rate.

It does the same work for each candidate as the published code (DS3Lab/DT-FM, read and written anew), and nothing that
would make it faster: no table of pair costs, no cached boundary, no compiled loop. Each candidate takes a five-point
crossover; one pass of cyclic partitioning, whose gains are computed from all pairs after every single move; the
data-parallel cost from all pairs; for each of the 28 pairs of stages a bottleneck matching, by forbidding the largest
pair and solving the assignment again until that is infeasible; and the stages' order by a memoised recursion from each
of the stages.

Its random choices are those of `scheduler/sync/gcma.py` (`gcma.draws`), so that both walk the same way and can be
compared candidate by candidate. It differs from the published code in two things: the matching value is that of the
last feasible threshold, as in gcma.py, and no list of all past candidates is kept (nothing reads it).
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from decentral.scheduler.sync import gcma
from decentral.scheduler.sync.matching import held_karp
from decentral.scheduler.topology.topology import Topology, Workload

FORBIDDEN = 1e6
Stages = list[list[int]]
Trace = list[list[Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """Delay in ms and bandwidth in Gb/s as the published code has them; sizes in GB."""

    delay_ms: Any
    bandwidth_gbps: Any
    stages: int
    replicas: int
    gradient: float  # of a stage
    activation: float  # of a pipeline

    @property
    def peers(self) -> int:
        return self.stages * self.replicas


def case_of(topology: Topology, workload: Workload) -> Case:
    """The topology in the units of the published code. The workload must name its stages and replicas."""
    assert workload.stages is not None
    assert workload.replicas is not None
    delay, rate = topology.delay_s * 1e3, topology.bandwidth * 8 / 1e9
    return Case(delay, rate, workload.stages, workload.replicas, workload.gradient_gbytes, workload.activation_gbytes)


class Search:
    """A population of random partitions, and trials on it. `candidates` counts the partitions that were scored."""

    def __init__(self, case: Case, population: int, rng: np.random.Generator) -> None:
        self.case, self.rng = case, rng
        self.members = [[int(s) for s in rng.permutation(case.peers) // case.replicas] for _ in range(population)]
        self.scores = [score(case, stages_of(case, member)) for member in self.members]
        self.best = min(self.scores)
        self.candidates = population

    def trials(self) -> None:
        """As many trials as one round of gcma.py."""
        parents, crossed = gcma.draws(self.rng, len(self.members), self.case.peers)
        for (one, two), peers in zip(parents.tolist(), crossed.tolist(), strict=True):
            self._trial(one, two, peers)

    def _trial(self, one: int, two: int, crossed: list[int]) -> None:
        child = crossover(self.case, self.members[one], self.members[two], crossed)
        child = cyclic(self.case, child)
        cost = score(self.case, stages_of(self.case, child))
        if not cost > max(self.scores[one], cost > self.scores[two]):
            worse = one if self.scores[one] > self.scores[two] else two
            self.members[worse], self.scores[worse] = child, cost
        self.best = min(self.best, cost)
        self.candidates += 1


def stages_of(case: Case, member: list[int]) -> Stages:
    stages: Stages = [[] for _ in range(case.stages)]
    for peer, stage in enumerate(member):
        stages[stage].append(peer)
    return stages


# The cost of a candidate


def score(case: Case, stages: Stages) -> float:
    """Seconds of communication in one step."""
    return data_parallel(case, stages) + 2 * pipeline(case, stages)


def data_parallel(case: Case, stages: Stages) -> float:
    largest = float("-inf")
    for stage in stages:
        within = [0.0] * case.replicas
        for i in range(case.replicas):
            for j in range(case.replicas):
                if i != j:
                    within[i] += 2 * (
                        case.delay_ms[stage[i], stage[j]] / 1e3
                        + case.gradient * 8 / (case.bandwidth_gbps[stage[i], stage[j]] * case.replicas)
                    )
        largest = max(largest, float(np.max(within)))
    return largest


def pipeline(case: Case, stages: Stages) -> float:
    edge = np.zeros(shape=(case.stages, case.stages))
    for i in range(case.stages):
        for j in range(i + 1, case.stages):
            edge[i, j] = edge[j, i] = bottleneck(case, stages[i], stages[j])
    return min(OpenPath(edge, start).length() for start in range(case.stages))


def bottleneck(case: Case, one: list[int], two: list[int]) -> float:
    cost = np.zeros(shape=(case.replicas, case.replicas))
    for i in range(case.replicas):
        for j in range(case.replicas):
            cost[i, j] = case.delay_ms[one[i], two[j]] / 1e3 + case.activation * 8 / case.bandwidth_gbps[one[i], two[j]]
    for index in np.argsort(cost.flatten())[::-1]:
        row, column = index // case.replicas, index % case.replicas
        value = cost[row][column]
        cost[row][column] = FORBIDDEN
        rows, columns = linear_sum_assignment(cost)
        if cost[rows, columns].sum() >= FORBIDDEN:
            return float(value)
    raise AssertionError("forbidding every pair is infeasible")


class OpenPath:
    """The cheapest path through all stages from one of them, by memoised recursion over the stages that are left."""

    def __init__(self, edge: Any, start: int) -> None:
        self.edge, self.start = edge, start
        count = len(edge)
        self.known = np.full(shape=(count, 2**count), fill_value=np.inf)
        self.trace = np.zeros(shape=(count, 2**count))

    def length(self) -> float:
        ahead = list(range(len(self.edge)))
        ahead.remove(self.start)
        return float(self.solve(self.start, ahead))

    def bits(self, ahead: list[int]) -> int:
        total = 0
        for stage in ahead:
            total += pow(2, stage)
        return total

    def solve(self, stage: int, ahead: list[int]) -> Any:
        if len(ahead) == 0:
            return 0
        lengths = []
        for following in ahead:
            rest = ahead.copy()
            rest.remove(following)
            bits = self.bits(rest)
            if self.known[following][bits] == np.inf:
                lengths.append(self.edge[stage][following] + self.solve(following, rest))
            else:
                lengths.append(self.edge[stage][following] + self.known[following][bits])
        least = min(lengths)
        bits = self.bits(ahead)
        self.known[stage][bits] = least
        self.trace[stage][bits] = ahead[lengths.index(least)]
        return least


def written_pipelines(case: Case, member: list[int]) -> float:
    """The cost of the pipelines that the published code writes down, whose matchings use a forbidden pair."""
    stages = stages_of(case, member)
    edge = np.zeros(shape=(case.stages, case.stages))
    for i in range(case.stages):
        for j in range(i + 1, case.stages):
            edge[i, j] = edge[j, i] = bottleneck(case, stages[i], stages[j])
    path = held_karp(edge)
    real = 0.0
    for i, j in itertools.pairwise(path):
        one, two = stages[min(i, j)], stages[max(i, j)]
        real += max(_seconds(case, one[row], two[column]) for row, column in _last_matching(case, one, two))
    return data_parallel(case, stages) + 2 * real


def _last_matching(case: Case, one: list[int], two: list[int]) -> list[tuple[int, int]]:
    """The assignment with which the search for the threshold ends: it uses a forbidden pair."""
    cost = np.array([[_seconds(case, a, b) for b in two] for a in one])
    for index in np.argsort(cost.flatten())[::-1]:
        cost[index // case.replicas][index % case.replicas] = FORBIDDEN
        rows, columns = linear_sum_assignment(cost)
        if cost[rows, columns].sum() >= FORBIDDEN:
            return list(zip(rows.tolist(), columns.tolist(), strict=True))
    raise AssertionError("forbidding every pair is infeasible")


def _seconds(case: Case, a: int, b: int) -> float:
    return float(case.delay_ms[a, b] / 1e3 + case.activation * 8 / case.bandwidth_gbps[a, b])


# How a child is made


def crossover(case: Case, first: list[int], second: list[int], crossed: list[int]) -> list[int]:
    child = second.copy()
    for peer in crossed:
        child[peer] = first[peer]
    sizes = [0] * case.stages
    for stage in child:
        sizes[stage] += 1
    for peer in range(case.peers):
        if sizes[child[peer]] > case.replicas:
            free = next(stage for stage in range(case.stages) if sizes[stage] < case.replicas)
            sizes[free] += 1
            sizes[child[peer]] -= 1
            child[peer] = free
    return child


def cyclic(case: Case, child: list[int]) -> list[int]:
    """One pass of cyclic partitioning (Kang and Moon): chains of moves, and the best prefix of the chains."""
    gains: list[float] = [0.0]
    touched, locked = [0] * case.stages, [0] * case.peers
    states = [child]
    for _ in range(case.stages):
        state = states[-1].copy()
        gains.append(_chain(case, state, locked, touched))
        states.append(state)
        if np.sum(touched) == len(touched):
            break
    best, kept = 0.0, 0
    for i in range(1, len(gains)):
        if np.sum(gains[:i]) > best:
            best, kept = float(np.sum(gains[:i])), i - 1
    return states[kept]


def _chain(case: Case, state: list[int], locked: list[int], touched: list[int]) -> float:
    """Moves peers from stage to stage until the chain closes; undoes what follows its best prefix."""
    moves: list[tuple[int, int]] = []
    step, closing = [], []
    gain_SS, gain_S, trace = _gains(case, state, locked)
    origin = here = int(np.argmax(gain_S))
    if trace[origin][0] is None:
        return 0.0
    for _ in range(case.peers):
        peer, target = trace[here]
        if peer is None:
            peer, target = moves[-1][0], origin
        state[peer] = target
        locked[peer] = touched[target] = 1
        moves.append((peer, here))
        step.append(gain_S[here])
        closing.append(gain_SS[here, origin])
        here = target
        if here == origin:
            break
        gain_SS, gain_S, trace = _gains(case, state, locked)
    best, last = 0.0, 0
    for i in range(1, len(step)):
        if np.sum(step[:i]) + closing[i] > best:
            best, last = float(np.sum(step[:i]) + closing[i]), i
    for i in range(len(step) - 1, last, -1):
        state[moves[i][0]] = moves[i][1]
    state[moves[last][0]] = origin
    return best


def _gains(case: Case, state: list[int], locked: list[int]) -> tuple[Any, Any, Trace]:
    """From all pairs: what moving each stage's chosen peer to each other stage gains."""
    sizes = [0] * case.stages
    for stage in state:
        sizes[stage] += 1
    gain = np.zeros(shape=(case.peers, case.stages))
    for peer, own in enumerate(state):
        if locked[peer] == 0:
            gain[peer][own] = np.inf
            for other, stage in enumerate(state):
                seconds = case.delay_ms[peer, other] / 1e3 + case.activation * 8 / case.bandwidth_gbps[peer, other]
                if own != stage:
                    gain[peer][stage] += seconds / sizes[stage]
                elif peer != other and gain[peer][stage] > seconds:
                    gain[peer][stage] = seconds
    nearest = np.full(shape=(case.stages), fill_value=np.inf)
    trace: Trace = [[None, None] for _ in range(case.stages)]
    for peer, own in enumerate(state):
        if locked[peer] == 0 and gain[peer][own] < nearest[own]:
            nearest[own] = gain[peer][own]
            trace[own][0] = peer
    return _best_targets(case, gain, trace)


def _best_targets(case: Case, gain: Any, trace: Trace) -> tuple[Any, Any, Trace]:
    gain_S = np.full(shape=(case.stages), fill_value=-np.inf)
    gain_SS = np.full(shape=(case.stages, case.stages), fill_value=-np.inf)
    for stage in range(case.stages):
        peer = trace[stage][0]
        if peer is not None:
            for target, value in enumerate(gain[peer]):
                if target != stage:
                    value = value - gain[peer][stage]
                    gain_SS[stage, target] = max(gain_SS[stage, target], value)
                    if value > gain_S[stage]:
                        gain_S[stage] = value
                        trace[stage] = [peer, target]
    return gain_SS, gain_S, trace

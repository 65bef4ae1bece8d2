"""The default solver: a memetic search (genetic, with a local search in every child) over synchronous layouts.

Each round makes one child and anneals it with compiled moves (moves.py), in turn: from a hand-drawn layout, from
nothing, from two parents (the stages on which they agree are kept, greedily: Galinier and Hao's partition crossover,
1999), or from one parent by letting go of part of it. The best distinct layouts are the parents. Every few rounds
the stages of the best are put in the exactly best order (Held-Karp).
"""

from dataclasses import dataclass, field

import numpy as np

from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.sync import layouts, local_search
from decentral.scheduler.sync.layout_cost import Problem, edges
from decentral.scheduler.sync.matching import EXACT_STAGES, stage_order

PARENTS = 10
CHUNK_WORK = 500_000  # about 20 ms between two looks at the clock
MOST_STEPS = 200_000  # in one child
MOST_DRAWS, DRAWN_PEERS = 1_000, 1_000_000  # in one round: of layouts, and of peers in all of them together
HOT = (0.04, 0.2)  # from nothing, in turn: small swarms are rough and want more
SMOOTH = (0.1, 0.3, 0.0, 1.0)  # in turn: no single one is best everywhere


@dataclass(slots=True)
class Pool:
    """The best layouts of distinct cost, cheapest first."""

    limit: int
    members: list[tuple[float, Ints]] = field(default_factory=list)

    def add(self, cost: float, slots: Ints) -> None:
        if all(abs(cost - other) > 1e-6 for other, _ in self.members):
            self.members.append((cost, slots.copy()))
            self.members.sort(key=lambda member: member[0])
            del self.members[self.limit :]

    def pick(self, rng: np.random.Generator) -> Ints:
        return self.members[int(rng.integers(len(self.members)))][1]


def search(
    problem: Problem,
    region_N: Ints,
    budget: SearchBudget,
    rng: np.random.Generator,
    first: Ints | None = None,
) -> Ints:
    """The slots of the best layout that the budget finds. `first`: a layout to begin with (replanning)."""
    progress = SearchProgress(budget, np.inf)
    twin_N = local_search.twins(problem.data_NN, problem.pipe_NN)
    search = _Search(problem, region_N, rng, Pool(PARENTS), twin_N, local_search.dice(rng))
    starts = list(layouts.STARTS)
    begin = [first] if first is not None else []
    begin += [layouts.STARTS[name](region_N, problem.stages, problem.replicas, rng) for name in starts]
    begin.sort(key=search.cost)
    for slots in begin:
        if not search.pool.members or not progress.late():
            search.settle(slots, progress)
    long = problem.stages > EXACT_STAGES
    while progress.goes_on(search.settling_s):
        slots, heat = search.long_child(progress, begin) if long else search.child(progress.rounds, begin)
        search.improve(slots, heat, SMOOTH[progress.rounds % len(SMOOTH)], progress)
        progress.report(search.best)
    return search.pool.members[0][1]


@dataclass(slots=True)
class _Search:
    problem: Problem
    region_N: Ints
    rng: np.random.Generator
    pool: Pool
    twin_N: Ints
    dice: local_search.Dice
    settling_s: float = np.inf  # what the quickest `settle` so far took: each child needs as much at its end

    @property
    def best(self) -> float:
        return self.pool.members[0][0]

    def cost(self, slots: Ints) -> float:
        state = self.state(slots)
        return local_search.total(state[2], state[3])

    def state(self, slots: Ints) -> local_search.State:
        problem = self.problem
        return local_search.start(problem.data_NN, problem.pipe_NN, problem.stages, problem.replicas, slots.copy())

    def child(self, number: int, begin: list[Ints]) -> tuple[Ints, float]:
        """Where round `number` begins, and how hot: the share of the best cost that a move may lose at first."""
        if number < len(begin):
            return begin[number], 0.01
        match number % 4:
            case 0:
                heat = HOT[number // 4 % len(HOT)]
                return layouts.random(self.region_N, self.problem.stages, self.problem.replicas, self.rng), heat
            case 1 | 2:
                one, two = self.pool.pick(self.rng), self.pool.pick(self.rng)
                return crossover(one, two, self.twin_N, self.problem.stages, self.problem.replicas, self.rng), 0.01
            case _:
                return self.pool.members[0][1], 0.02

    def long_child(self, progress: SearchProgress, begin: list[Ints]) -> tuple[Ints, float]:
        """Where a round begins in a long pipeline: every other time the best of many random runs of blocks.

        So many peers are beyond what single moves can rearrange in seconds, but a draw is judged in milliseconds.
        """
        if progress.rounds % 2:
            return self.child(progress.rounds // 2, begin)
        best, least = self.pool.members[0][1], np.inf
        for _ in range(min(MOST_DRAWS, DRAWN_PEERS // len(self.problem))):
            slots = layouts.random_blocks(self.region_N, self.problem.stages, self.problem.replicas, self.rng)
            cost = self.cost(slots)
            if cost < least:
                best, least = slots, cost
            if progress.late(self.settling_s):
                break
        return best, 0.01

    def improve(self, slots: Ints, heat: float, smooth: float, progress: SearchProgress) -> None:
        """Anneals the child and settles it, both within the budget's seconds."""
        problem = self.problem
        state = self.state(slots)
        best_slots, best = slots.copy(), np.inf
        steps = min(1500 * len(problem), MOST_STEPS)
        chunk = max(50, min(steps, CHUNK_WORK // (problem.replicas**2 + 100)))
        share = min(1.0, 8 / problem.stages) * self.best  # a move changes a few joints of all,
        share *= max(1.0, min(5.0, 64 / len(problem)))  # and in a small swarm more of the cost
        hot, cold = heat * share, 3e-4 * share
        cooling = (cold / hot) ** (chunk / steps)
        for _ in range(0, steps, chunk):
            begin = progress.seconds()
            best = local_search.anneal(
                problem.data_NN, problem.pipe_NN, problem.replicas, state, best_slots, best,
                chunk, hot, hot * cooling, smooth, self.twin_N, self.dice,
            )  # fmt: skip
            hot *= cooling
            if progress.late(self.settling_s + progress.seconds() - begin):
                break
        self.settle(best_slots, progress)

    def settle(self, slots: Ints, progress: SearchProgress) -> None:
        """Orders the child's stages and offers it to the pool."""
        begin = progress.seconds()
        ordered = self.ordered(slots)
        self.pool.add(self.cost(ordered), ordered)
        self.settling_s = min(self.settling_s, progress.seconds() - begin)

    def ordered(self, slots: Ints) -> Ints:
        """The same stages in the best order."""
        problem = self.problem
        used = problem.stages * problem.replicas
        stages = slots[:used].reshape(problem.stages, problem.replicas)
        order = stage_order(edges(problem, stages), np.arange(problem.stages))
        return np.concatenate((stages[order].ravel(), slots[used:]))


def crossover(one: Ints, two: Ints, twin_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """A child that takes, from each parent in turn, the stage of which most is still free; the rest at random.

    Peers that are twins count as one kind: stages of the same kinds agree, whoever their peers are. A stage keeps its
    place in the pipeline of the parent that it comes from, as far as that place is free; a parent that agrees better
    when walked backwards is.
    """
    kind_N: Ints = np.unique(twin_N, return_inverse=True)[1]
    free_K = np.bincount(kind_N)
    first, second = (_kinds(kind_N[parent[: stages * replicas]], stages, len(free_K)) for parent in (one, two))
    if np.minimum(first, second[::-1]).sum() > np.minimum(first, second).sum():
        second = second[::-1]
    parents, left = [first.copy(), second.copy()], list(range(stages))
    child = np.zeros_like(first)
    turn = int(rng.integers(2))
    for _ in range(stages):
        counts = np.minimum(parents[turn], free_K)
        source = int(np.argmax(counts.sum(axis=1) + 0.5 * rng.random(stages)))
        place = min(left, key=lambda place: abs(place - source))
        left.remove(place)
        child[place] = counts[source]
        free_K = free_K - counts[source]
        parents[turn][source] = 0
        turn = 1 - turn
    return _placed(child, kind_N, replicas, rng)


def _kinds(kind: Ints, stages: int, kinds: int) -> Ints:
    """How many of each kind are in each stage, S x K."""
    counts = np.zeros((stages, kinds), np.int64)
    np.add.at(counts, (np.arange(kind.size) // (kind.size // stages), kind), 1)
    return counts


def _placed(counts_SK: Ints, kind_N: Ints, replicas: int, rng: np.random.Generator) -> Ints:
    """Slots with so many of each kind in each stage, filled up at random."""
    peers = rng.permutation(kind_N.size)
    by_kind = [list(peers[kind_N[peers] == kind]) for kind in range(counts_SK.shape[1])]
    child = [[by_kind[kind].pop() for kind in np.repeat(np.arange(len(row)), row)] for row in counts_SK]
    rest = [peer for kind in by_kind for peer in kind]
    rng.shuffle(rest)
    for members in child:
        while len(members) < replicas:
            members.append(rest.pop())
    return np.array([peer for members in child for peer in members] + rest)

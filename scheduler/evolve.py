"""The default solver: a memetic search (genetic, with a local search in every child) over synchronous layouts.

Each round makes one child and anneals it with compiled moves (moves.py), in turn: from a hand-drawn layout, from
nothing, from two parents (the stages on which they agree are kept, greedily: Galinier and Hao's partition crossover,
1999), or from one parent by letting go of part of it. The best distinct layouts are the parents. Every few rounds
the stages of the best are put in the exactly best order (Held-Karp).
"""

from dataclasses import dataclass, field

import numpy as np

from decentral.scheduler import layouts, moves
from decentral.scheduler.arrays import Floats, Ints
from decentral.scheduler.cost import Problem, edges
from decentral.scheduler.matching import stage_order
from decentral.scheduler.progress import Budget, Progress

PARENTS = 10
CHUNK_WORK = 4_000_000  # about 20 ms between two looks at the clock
MOST_STEPS = 200_000  # in one child
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
    budget: Budget,
    rng: np.random.Generator,
    first: Ints | None = None,
) -> Ints:
    """The slots of the best layout that the budget finds. `first`: a layout to begin with (replanning)."""
    search = _Search(problem, region_N, rng, Pool(PARENTS), moves.twins(problem.data_NN, problem.pipe_NN))
    starts = list(layouts.STARTS)
    begin = [first] if first is not None else []
    begin += [layouts.STARTS[name](region_N, problem.stages, problem.replicas, rng) for name in starts]
    begin.sort(key=search.cost)
    for slots in begin:
        ordered = search.ordered(slots)
        search.pool.add(search.cost(ordered), ordered)
    progress = Progress(budget, search.best)
    while progress.goes_on():
        slots, heat = search.child(progress.rounds, begin)
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

    @property
    def best(self) -> float:
        return self.pool.members[0][0]

    def cost(self, slots: Ints) -> float:
        state = self.state(slots)
        return moves.total(state[2], state[3])

    def state(self, slots: Ints) -> moves.State:
        problem = self.problem
        return moves.start(problem.data_NN, problem.pipe_NN, problem.stages, problem.replicas, slots.copy())

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
                return crossover(one, two, self.problem.stages, self.problem.replicas, self.rng), 0.01
            case _:
                return self.pool.members[0][1], 0.02

    def improve(self, slots: Ints, heat: float, smooth: float, progress: Progress) -> None:
        """Anneals the child, orders its stages, and offers it to the pool."""
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
            best = moves.anneal(
                problem.data_NN, problem.pipe_NN, problem.replicas, state, best_slots, best,
                chunk, hot, hot * cooling, smooth, self.twin_N, self.rng,
            )  # fmt: skip
            hot *= cooling
            if progress.seconds() > progress.budget.seconds:
                break
        ordered = self.ordered(best_slots)
        self.pool.add(self.cost(ordered), ordered)

    def ordered(self, slots: Ints) -> Ints:
        """The same stages in the best order."""
        problem = self.problem
        used = problem.stages * problem.replicas
        stages = slots[:used].reshape(problem.stages, problem.replicas)
        order = stage_order(edges(problem, stages), np.arange(problem.stages))
        return np.concatenate((stages[order].ravel(), slots[used:]))


def crossover(one: Ints, two: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """A child that takes, from each parent in turn, the stage of which most is still free; the rest at random.

    A stage keeps its place in the pipeline of the parent that it comes from, as far as that place is free.
    """
    used = stages * replicas
    parents = [parent[:used].reshape(stages, replicas) for parent in (one, two)]
    free = np.ones(one.size, dtype=bool)
    open_places = list(range(stages))
    child: list[list[int]] = [[] for _ in range(stages)]
    turn = int(rng.integers(2))
    for _ in range(stages):
        parent = parents[turn]
        counts: Floats = free[parent].sum(axis=1) + 0.5 * rng.random(stages)
        source = int(np.argmax(counts))
        place = min(open_places, key=lambda place: abs(place - source))
        open_places.remove(place)
        child[place] = [int(peer) for peer in parent[source] if free[peer]]
        free[child[place]] = False
        turn = 1 - turn
    rest = list(rng.permutation(np.flatnonzero(free)))
    for members in child:
        while len(members) < replicas:
            members.append(int(rest.pop()))
    return np.array([peer for members in child for peer in members] + [int(peer) for peer in rest])

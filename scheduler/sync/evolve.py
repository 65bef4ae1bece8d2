"""The default solver: a memetic search (genetic, with a local search in every child) over synchronous layouts.

Each round makes one child and anneals it with compiled moves (local_search.py). The first children are hand-drawn
layouts; then a child is in turn random, made from two parents (the stages on which they agree are kept, greedily:
Galinier and Hao's partition crossover, 1999), or the best layout so far. The parents are the best distinct layouts.
Every child's stages are put in the best order (Held-Karp) before it joins them.
"""

from dataclasses import dataclass, field

import numpy as np

from decentral.scheduler.sync import layouts, local_search
from decentral.scheduler.sync.layout_cost import Problem, boundary_costs
from decentral.scheduler.sync.local_search import Cooling, Proposals
from decentral.scheduler.sync.matching import EXACT_STAGES, stage_order
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

PARENTS = 10
CHUNK_WORK = 500_000  # pairs of peers that proposals look at: about 20 ms between two looks at the clock
MOST_STEPS = 200_000  # proposals in one child
MOST_DRAWS, DRAWN_PEERS = 1_000, 1_000_000  # layouts in one round, and peers in all of them together
HOT = (0.04, 0.2)  # heat of random children, in turn: the cost of small swarms is rougher and needs more
SMOOTH = (0.1, 0.3, 0.0, 1.0)  # in turn, since no single value is best everywhere


@dataclass(slots=True)
class Pool:
    """The best PARENTS layouts of distinct cost, cheapest first."""

    members: list[tuple[float, Ints]] = field(default_factory=list)

    def add(self, cost: float, slots: Ints) -> None:
        if all(abs(cost - other) > 1e-6 for other, _ in self.members):
            self.members.append((cost, slots.copy()))
            self.members.sort(key=lambda member: member[0])
            del self.members[PARENTS:]

    def pick(self, rng: np.random.Generator) -> Ints:
        return self.members[int(rng.integers(len(self.members)))][1]


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """The slots of the best layout that the budget finds."""
    progress = SearchProgress(budget, np.inf)
    search = _Search(problem, region_N, rng, local_search.proposals(problem, rng))
    starts = [start(region_N, problem.stages, problem.replicas, rng) for start in layouts.STARTS.values()]
    starts.sort(key=search.cost)
    for slots in starts:
        if not search.pool.members or not progress.late():
            search.offer(slots, progress)
    long = problem.stages > EXACT_STAGES
    while progress.goes_on(search.offer_s):
        slots, heat = search.long_child(progress, starts) if long else search.child(progress.rounds, starts)
        search.improve(slots, heat, SMOOTH[progress.rounds % len(SMOOTH)], progress)
        progress.report(search.best)
    return search.pool.members[0][1]


@dataclass(slots=True)
class _Search:
    problem: Problem
    region_N: Ints
    rng: np.random.Generator
    proposals: Proposals
    pool: Pool = field(default_factory=Pool)
    offer_s: float = np.inf  # what the quickest `offer` so far took: each child needs as much at its end

    @property
    def best(self) -> float:
        return self.pool.members[0][0]

    def cost(self, slots: Ints) -> float:
        return local_search.total(local_search.initial_state(self.problem, slots.copy()))

    def child(self, number: int, starts: list[Ints]) -> tuple[Ints, float]:
        """Where round `number` begins, and its heat: the share of the best cost that a move may lose at first."""
        if number < len(starts):
            return starts[number], 0.01
        match number % 4:
            case 0:
                heat = HOT[number // 4 % len(HOT)]
                return layouts.random(self.region_N, self.problem.stages, self.problem.replicas, self.rng), heat
            case 1 | 2:
                one, two = self.pool.pick(self.rng), self.pool.pick(self.rng)
                problem, twin_N = self.problem, self.proposals.twin_N
                return crossover(one, two, twin_N, problem.stages, problem.replicas, self.rng), 0.01
            case _:
                return self.pool.members[0][1], 0.02

    def long_child(self, progress: SearchProgress, starts: list[Ints]) -> tuple[Ints, float]:
        """As `child`; single moves rearrange too few peers, so every other round takes the best of many cheap draws."""
        if progress.rounds % 2:
            return self.child(progress.rounds // 2, starts)
        best, least = self.pool.members[0][1], np.inf
        for _ in range(min(MOST_DRAWS, DRAWN_PEERS // self.problem.peers)):
            slots = layouts.random_blocks(self.region_N, self.problem.stages, self.problem.replicas, self.rng)
            cost = self.cost(slots)
            if cost < least:
                best, least = slots, cost
            if progress.late(self.offer_s):
                break
        return best, 0.01

    def improve(self, slots: Ints, heat: float, smooth: float, progress: SearchProgress) -> None:
        """Anneals the child and offers the result to the pool, both within the budget's seconds."""
        problem = self.problem
        state = local_search.initial_state(problem, slots.copy())
        best_slots, best = slots.copy(), np.inf
        steps = min(1500 * problem.peers, MOST_STEPS)
        chunk = max(50, min(steps, CHUNK_WORK // (problem.replicas**2 + 100)))
        share = min(1.0, 8 / problem.stages) * self.best  # a move changes a few of all boundaries,
        share *= max(1.0, min(5.0, 64 / problem.peers))  # and in a small swarm more of the cost
        hot, cold = heat * share, 3e-4 * share
        decay = (cold / hot) ** (chunk / steps)
        for _ in range(0, steps, chunk):
            begin = progress.seconds()
            cooling = Cooling(chunk, hot, hot * decay, smooth)
            best = local_search.anneal(problem, state, best_slots, best, cooling, self.proposals)
            hot *= decay
            if progress.late(self.offer_s + progress.seconds() - begin):
                break
        self.offer(best_slots, progress)

    def offer(self, slots: Ints, progress: SearchProgress) -> None:
        """Orders the child's stages and offers it to the pool."""
        begin = progress.seconds()
        ordered = self.ordered(slots)
        self.pool.add(self.cost(ordered), ordered)
        self.offer_s = min(self.offer_s, progress.seconds() - begin)

    def ordered(self, slots: Ints) -> Ints:
        """The same stages in the best order."""
        problem = self.problem
        used = problem.stages * problem.replicas
        stages = slots[:used].reshape(problem.stages, problem.replicas)
        order = stage_order(boundary_costs(problem, stages), np.arange(problem.stages))
        return np.concatenate((stages[order].ravel(), slots[used:]))


def crossover(one: Ints, two: Ints, twin_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """A child that takes, from each parent in turn, the stage with the most peers still free; the rest is random.

    Twins (local_search.py) count as one kind of peer: stages of the same kinds agree, whichever their peers are. A
    stage goes to its place in the parent's pipeline, or to the nearest free one. The second parent is reversed where
    that makes the two agree better.
    """
    kind_N: Ints = np.unique(twin_N, return_inverse=True)[1]
    free_K = np.bincount(kind_N)
    first, second = (_kinds(kind_N[parent[: stages * replicas]], stages, len(free_K)) for parent in (one, two))
    if np.minimum(first, second[::-1]).sum() > np.minimum(first, second).sum():
        second = second[::-1]
    parents, places = [first.copy(), second.copy()], list(range(stages))
    child = np.zeros_like(first)
    turn = int(rng.integers(2))
    for _ in range(stages):
        counts = np.minimum(parents[turn], free_K)
        source = int(np.argmax(counts.sum(axis=1) + 0.5 * rng.random(stages)))
        place = min(places, key=lambda place: abs(place - source))
        places.remove(place)
        child[place] = counts[source]
        free_K = free_K - counts[source]
        parents[turn][source] = 0
        turn = 1 - turn
    return _placed(child, kind_N, replicas, rng)


def _kinds(kinds: Ints, stages: int, count: int) -> Ints:
    """How many peers of each of `count` kinds are in each stage, S x K. `kinds`: the kind in each used slot."""
    counts_SK = np.zeros((stages, count), np.int64)
    np.add.at(counts_SK, (np.arange(kinds.size) // (kinds.size // stages), kinds), 1)
    return counts_SK


def _placed(counts_SK: Ints, kind_N: Ints, replicas: int, rng: np.random.Generator) -> Ints:
    """Slots whose stages have these numbers of each kind, and are filled up at random."""
    peers = rng.permutation(kind_N.size)
    by_kind = [list(peers[kind_N[peers] == kind]) for kind in range(counts_SK.shape[1])]
    child = [[by_kind[kind].pop() for kind in np.repeat(np.arange(len(row)), row)] for row in counts_SK]
    rest = [peer for kind in by_kind for peer in kind]
    rng.shuffle(rest)
    for members in child:
        members += [rest.pop() for _ in range(replicas - len(members))]
    return np.array([peer for members in child for peer in members] + rest)

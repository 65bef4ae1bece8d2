"""The default solver: a memetic search (genetic, with a local search on every child) over synchronous layouts.

Start at `search`. Each round makes one child and anneals it with compiled moves (local_search.py). The first children
are the layouts of layouts.py. Later children alternate: a random layout, crossovers of two parents, or a copy of the
best layout so far. A crossover greedily copies whole stages from both parents (like Galinier and Hao's partition
crossover, 1999). The parents are the best distinct layouts. A child's stages are put in the best order (Held-Karp)
before it becomes a parent.
"""

from dataclasses import dataclass, field

import numpy as np

from decentral.scheduler.sync import layouts, local_search
from decentral.scheduler.sync.layout_cost import Problem, boundary_costs
from decentral.scheduler.sync.local_search import Cooling, Proposals
from decentral.scheduler.sync.matching import EXACT_STAGES, order_s, stage_order
from decentral.scheduler.topology.arrays import Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress

PARENTS = 10
CHUNK_WORK = 500_000  # pairs of peers that are evaluated between two looks at the budget, about 20 ms
DRAW_S, DRAWN_PEER_S = 2e-4, 2e-6  # seconds to draw a layout on a quiet core: in all; per peer
ORDERED_S, ORDERED_PAIR_S = 4e-6, 2.5e-8  # seconds to match two stages for the order: in all; per two peers
MOST_STEPS = 200_000
MOST_DRAWS, DRAWN_PEERS = 1_000, 1_000_000  # a round draws at most MOST_DRAWS layouts, DRAWN_PEERS peers in all
HOT = (0.04, 0.2)  # first temperatures of random starts, in turn, as shares of the best cost; small swarms need 0.2
NEIGHBOURHOODS = 16  # the groups of nearest peers around this many random peers are compared; `starts` uses the closest
SMOOTH = (0.1, 0.3, 0.0, 1.0)  # weights of the mean costs in the smoothed cost, used in turn: no value is always best


@dataclass(slots=True)
class Pool:
    """The layouts from which children are made: the PARENTS layouts of lowest distinct costs, cheapest first."""

    members: list[tuple[float, Ints]] = field(default_factory=list)

    def add(self, cost: float, slots: Ints) -> None:
        """Add a copy of a layout if its cost, in seconds, is new and among the lowest."""
        if all(abs(cost - other) > 1e-6 for other, _ in self.members):
            self.members.append((cost, slots.copy()))
            self.members.sort(key=lambda member: member[0])
            del self.members[PARENTS:]

    def pick(self, rng: np.random.Generator) -> Ints:
        """Return a random layout of the pool (not a copy)."""
        return self.members[int(rng.integers(len(self.members)))][1]


def search(problem: Problem, region_N: Ints, budget: SearchBudget, rng: np.random.Generator) -> Ints:
    """Return the best layout found within the budget, as slots: the peers stage by stage, then the unused peers."""
    progress = SearchProgress(budget, np.inf)
    search = _Search(problem, region_N, rng, local_search.proposals(problem, rng))
    first = sorted(starts(problem, region_N, rng), key=search.cost)
    for slots in first:
        if not search.pool.members or not progress.late():
            search.offer(slots, progress)
    long = problem.stages > EXACT_STAGES
    while search.best > 0 and progress.goes_on(search.offer_s):
        slots, heat = search.long_child(progress, first) if long else search.child(progress.rounds, first)
        search.improve(slots, heat, SMOOTH[progress.rounds % len(SMOOTH)], progress)
        progress.report(search.best)
    return search.pool.members[0][1]


def starts(problem: Problem, region_N: Ints, rng: np.random.Generator) -> list[Ints]:
    """Return the hand-drawn layouts of all peers and, if a layout leaves peers out, of peers that are close together.

    Peers are close if it takes few seconds to send gradients and activations between them. For each of NEIGHBOURHOODS
    random peers, the group of its nearest peers is considered, and the group that is closest together is taken.
    """
    drawn = [start(region_N, problem.stages, problem.replicas, rng) for start in layouts.STARTS.values()]
    used = problem.stages * problem.replicas
    if used == problem.peers:
        return drawn
    seconds_NN = problem.data_NN + problem.pipe_NN
    middles = rng.permutation(problem.peers)[:NEIGHBOURHOODS]
    around = [np.argsort(seconds_NN[middle], kind="stable") for middle in middles]
    close = min(around, key=lambda near: float(seconds_NN[np.ix_(near[:used], near[:used])].sum()))
    near, far = close[:used], close[used:]
    region_U: Ints = np.unique(region_N[near], return_inverse=True)[1]
    for start in layouts.STARTS.values():
        drawn.append(np.concatenate((near[start(region_U, problem.stages, problem.replicas, rng)], far)))
    return drawn


@dataclass(slots=True)
class _Search:
    """The state of a memetic search, and its steps: make a child, improve it, and offer it to the pool."""

    problem: Problem
    region_N: Ints
    rng: np.random.Generator
    proposals: Proposals
    pool: Pool = field(default_factory=Pool)
    offer_s: float = np.inf  # time of the last call of `offer`; a round ends early enough for one more call

    @property
    def best(self) -> float:
        """Return the cost of the best layout so far, in seconds."""
        return self.pool.members[0][0]

    def cost(self, slots: Ints) -> float:
        """Return the true cost of a layout, in seconds."""
        return local_search.total(local_search.initial_state(self.problem, slots.copy()))

    def child(self, number: int, starts: list[Ints]) -> tuple[Ints, float]:
        """Return round `number`'s child before annealing, and its heat: first temperature relative to the best cost."""
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
        """Return the round's child before annealing, and its heat, for a pipeline of more than EXACT_STAGES stages.

        In such a long pipeline, a single move rearranges too few peers. In every second round the child is therefore
        the best of many random layouts. In the other rounds, `child` makes the child.
        """
        if progress.rounds % 2:
            return self.child(progress.rounds // 2, starts)
        best, least = self.pool.members[0][1], np.inf
        for _ in range(min(MOST_DRAWS, DRAWN_PEERS // self.problem.peers)):
            slots = layouts.random_blocks(self.region_N, self.problem.stages, self.problem.replicas, self.rng)
            cost = self.cost(slots)
            progress.count(DRAW_S + DRAWN_PEER_S * self.problem.peers + local_search.state_s(self.problem))
            if cost < least:
                best, least = slots, cost
            if progress.late(self.offer_s):
                break
        return best, 0.01

    def improve(self, slots: Ints, heat: float, smooth: float, progress: SearchProgress) -> None:
        """Anneal a copy of `slots` and offer the result to the pool, all within the budget's time."""
        problem = self.problem
        state = local_search.initial_state(problem, slots.copy())
        best_slots, best = slots.copy(), np.inf
        steps = min(1500 * problem.peers, MOST_STEPS)
        chunk = max(50, min(steps, CHUNK_WORK // (problem.replicas**2 + 100)))
        share = min(1.0, 8 / problem.stages) * self.best  # with many stages, a move changes a small share of the cost
        share *= max(1.0, min(5.0, 64 / problem.peers))  # with few peers, a move changes a larger share of the cost
        hot, cold = heat * share, 3e-4 * share
        decay = (cold / hot) ** (chunk / steps)
        for _ in range(0, steps, chunk):
            begin = progress.seconds()
            cooling = Cooling(chunk, hot, hot * decay, smooth)
            best = local_search.anneal(problem, state, best_slots, best, cooling, self.proposals)
            hot *= decay
            progress.count(chunk * local_search.move_s(problem))
            if progress.late(self.offer_s + progress.seconds() - begin):
                break
        self.offer(best_slots, progress)

    def offer(self, slots: Ints, progress: SearchProgress) -> None:
        """Put a layout's stages in the best order, and add the layout to the pool if its cost is among the lowest."""
        begin = progress.seconds()
        ordered = self.ordered(slots)
        self.pool.add(self.cost(ordered), ordered)
        progress.count(_offer_s(self.problem))
        self.offer_s = progress.seconds() - begin

    def ordered(self, slots: Ints) -> Ints:
        """Return the layout with its stages in the best order."""
        problem = self.problem
        used = problem.stages * problem.replicas
        stages = slots[:used].reshape(problem.stages, problem.replicas)
        order = stage_order(boundary_costs(problem, stages), np.arange(problem.stages))
        return np.concatenate((stages[order].ravel(), slots[used:]))


def _offer_s(problem: Problem) -> float:
    """Return the seconds that `offer` takes on a quiet core: it matches all stages, and finds their best order."""
    pairs, exact = problem.stages**2 / 2, problem.stages <= EXACT_STAGES
    ordered = pairs * (ORDERED_S + ORDERED_PAIR_S * problem.replicas**2) + (order_s(problem.stages) if exact else 0.0)
    return ordered + local_search.state_s(problem)


def crossover(one: Ints, two: Ints, twin_N: Ints, stages: int, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a child of two layouts: copy stages from both parents alternately, then fill the gaps with random peers.

    Each time, the stage with the most unplaced peers is copied. Twins (`local_search.twins`) are interchangeable, so a
    copied stage has as many peers of each group of twins as the original stage, but not always the same peers. A copied
    stage keeps its position in the pipeline, or gets the nearest free position. The order of the second parent's stages
    is reversed first if its stages then match those of the first parent better.

    Args:
        one: Slots of the first parent.
        two: Slots of the second parent.
        twin_N: For each peer, the peer that stands for its group of interchangeable peers.
        stages: Stages S.
        replicas: Peers in a stage, R.
        rng: Source of random choices.
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
    """Return the number of peers of each kind in each stage, [S, K] with K = `count`.

    `kinds` has the kind of the peer in each used slot, stage by stage.
    """
    counts_SK = np.zeros((stages, count), np.int64)
    np.add.at(counts_SK, (np.arange(kinds.size) // (kinds.size // stages), kinds), 1)
    return counts_SK


def _placed(counts_SK: Ints, kind_N: Ints, replicas: int, rng: np.random.Generator) -> Ints:
    """Return a layout whose stage s has `counts_SK[s, k]` peers of each kind k, and random peers in all other slots."""
    peers = rng.permutation(kind_N.size)
    by_kind = [list(peers[kind_N[peers] == kind]) for kind in range(counts_SK.shape[1])]
    child = [[by_kind[kind].pop() for kind in np.repeat(np.arange(len(row)), row)] for row in counts_SK]
    rest = [peer for kind in by_kind for peer in kind]
    rng.shuffle(rest)
    for members in child:
        members += [rest.pop() for _ in range(replicas - len(members))]
    return np.array([peer for members in child for peer in members] + rest)

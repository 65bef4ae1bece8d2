"""Choose the numbers of stages and replicas, and the peers that a layout may use.

Start at `choose`. As in AMP (arXiv 2210.07297), every pair (stages, replicas) that fits is a candidate. Candidates are
tried in order of a lower bound on the seconds of their steps; a candidate whose bound exceeds the best step found so
far is not tried. A step runs at the speed of its slowest device. A pair is therefore tried with the fastest peers only,
with the next fastest ones too, and so on: given its peers, only communication is left to minimise.

    step = computation (step_needs.py) + communication (layout_cost.py), in seconds
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.scheduler.sync import evolve, local_search, step_needs
from decentral.scheduler.sync.layout_cost import Problem, best_layout, problem_of
from decentral.scheduler.sync.step_needs import divided, named, pair
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology, Workload, regions_of

LEAST_USED = 0.8  # if speeds are not known, only pairs with at least this share of the largest pair's peers are tried
MOST_SPEEDS = 8  # for each pair, at most this many sets of peers are tried; each adds slower peers to the set before
LOOKS = 0.3  # share of the budget for a first look at candidates, which computes only the costs of hand-drawn layouts
COARSE = frozenset(size << power for size in (2, 3) for power in range(12)) | {1}
LOOK_S, PEERS_S = 1.5e-3, 2e-8  # seconds of a look on a quiet core: in all; per two peers
LEAST_LOOKS = 8  # this many candidates get a look even if their bounds exclude them, so that a plan can name others
# After the looks, searches: (number of the best candidates to search, share of the budget for all of them together).
PAIR_SEARCHES = ((64, 0.3), (8, 0.4))


@dataclass(frozen=True, slots=True, eq=False)
class DegreePair:
    """A pair of numbers of stages and replicas, and the peers that a layout may use."""

    workload: Workload  # gigabytes of one stage and one replica of this pair
    peers: Ints  # indices of peers that can hold a stage, fastest first
    count: int  # a layout may use the first `count` of `peers`
    compute_s: float  # seconds of computation in a step if the slowest of these takes part; 0 if it is not counted
    bound_s: float  # lower bound on the seconds of a step, for any layout of the pair

    @property
    def name(self) -> str:
        """Return the pair as text, such as "8x4" for 8 stages of 4 replicas."""
        stages, replicas = pair(self.workload)
        return f"{stages}x{replicas}"

    @property
    def members(self) -> Ints:
        """Return the indices of the peers that a layout may use, in the topology's order."""
        return np.sort(self.peers[: self.count])

    def problem(self, topology: Topology) -> Problem:
        """Return the problem of placing the pair on `members`."""
        return problem_of(topology, self.workload, self.members)

    def region(self, topology: Topology) -> Ints:
        """Return the region of each of `members`, numbered from 0."""
        found: Ints = np.unique(regions_of(topology)[self.members], return_inverse=True)[1]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The pair of stages and replicas with the best step that was found, and the steps of the other pairs."""

    candidate: DegreePair
    slots: Ints | None  # the best layout found, as indices into `candidate.members`; None: there was only one candidate
    steps: dict[str, float]  # for each pair that was tried: its name -> seconds of its best step, best first
    parts: list[Ints]  # the peers of each part of the swarm (`step_needs.parts`), largest first


def choose(topology: Topology, seed: int, budget: SearchBudget) -> Choice:
    """Return the best pair of stages and replicas that is found within the budget, and the peers that it may use.

    `topology.flops` are the FLOP/s that training reaches.

    Raises:
        UserError: If no pair fits the swarm's peers, links and memory.
    """
    begin = budget.used_s()
    ordered, parts = candidates(topology, topology.workload or Workload(stages=None, replicas=None))
    if len(ordered) == 1:
        return Choice(ordered[0], None, {}, parts)
    search = _Search(topology, ordered, seed)
    budget = budget.less(budget.used_s() - begin)
    search.look(budget.part(LOOKS))
    for most, share in PAIR_SEARCHES:
        search.improve(most, budget.part(share))
    number, (_, slots) = min(search.found.items(), key=lambda item: item[1][0])
    steps: dict[str, float] = {}
    for tried, (step, _) in sorted(search.found.items(), key=lambda item: item[1][0]):
        steps.setdefault(ordered[tried].name, step)
    return Choice(ordered[number], slots, steps, parts)


def pairs(peers: int, workload: Workload) -> list[tuple[int, int]]:
    """Return the pairs (stages, replicas) that need at most `peers` peers; numbers that the workload sets are fixed."""
    stages = range(1, peers + 1) if workload.stages is None else [workload.stages]
    return [
        (s, r)
        for s in stages
        for r in (range(1, peers // s + 1) if workload.replicas is None else [workload.replicas])
        if s * r <= peers
    ]


def speeds_known(topology: Topology) -> bool:
    """Return whether each peer's FLOP/s are given, so that steps can be compared with their computation."""
    return bool((topology.flops > 0).all())


def candidates(topology: Topology, workload: Workload) -> tuple[list[DegreePair], list[Ints]]:
    """Return the candidates of a swarm by rising bound, and its parts (`step_needs.parts`).

    Computation counts if the workload leaves a number open and `speeds_known`.

    Raises:
        UserError: If no pair fits the swarm's links and memory.
    """
    tried = pairs(len(topology), workload)
    if not tried:
        stages, replicas = workload.stages or 1, workload.replicas or 1
        raise UserError(
            f"workload: {named(stages, replicas)} need {stages * replicas} peers; the topology has {len(topology)}: "
            "lower stages or replicas, or leave both out"
        )
    loads = [divided(workload, stages, replicas) for stages, replicas in tried]
    parts = step_needs.parts(topology, loads)
    fixed = workload.stages is not None and workload.replicas is not None
    counted = not fixed and speeds_known(topology)
    bounds = None if fixed else _Bounds(topology)
    found = [one for part in parts for one in _of_part(topology, part, loads, bounds, counted)]
    if not found:
        raise UserError(_nothing_fits(topology, loads, parts))
    if not counted and not fixed:
        most = max(_used(one.workload) for one in found)
        found = [one for one in found if _used(one.workload) >= LEAST_USED * most]
    return sorted(found, key=lambda one: one.bound_s), parts


@dataclass(slots=True)
class _Search:
    """A search for the best candidate, in two steps: `look` at all, then `improve` the best of them."""

    topology: Topology
    ordered: Sequence[DegreePair]  # the candidates by rising `bound_s`
    seed: int
    # Index in `ordered` -> the seconds of the candidate's best step so far, and the slots of its layout.
    found: dict[int, tuple[float, Ints]] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """Return the seconds of the best step so far; inf before the first look."""
        return min((step for step, _ in self.found.values()), default=np.inf)

    def look(self, budget: SearchBudget) -> None:
        """Compute the costs of hand-drawn layouts for each candidate that its bound does not exclude.

        Pairs of COARSE numbers come first, so that the looks cover a wide range even if the budget allows only a few.
        """
        progress = SearchProgress(budget, np.inf)
        coarse = [number for number, one in enumerate(self.ordered) if COARSE.issuperset(pair(one.workload))]
        for number in dict.fromkeys([*coarse, *range(len(self.ordered))]):
            candidate = self.ordered[number]
            if self.found and progress.late():
                break
            if len(self.found) >= LEAST_LOOKS and candidate.bound_s >= self.best:
                continue
            problem, rng = candidate.problem(self.topology), self._rng(candidate)
            starts = evolve.starts(problem, candidate.region(self.topology), rng)
            costs = [local_search.total(local_search.initial_state(problem, slots.copy())) for slots in starts]
            progress.count(LOOK_S + PEERS_S * problem.peers**2 + len(starts) * local_search.state_s(problem))
            least = int(np.argmin(costs))
            self.found[number] = (candidate.compute_s + float(costs[least]), starts[least])
            progress.report(self.best)

    def improve(self, most: int, budget: SearchBudget) -> None:
        """Search the layouts of the best candidates, at most `most`, each for the same part of the budget."""
        progress = SearchProgress(budget, np.inf)
        numbers = sorted(self.found, key=lambda number: self.found[number][0])
        numbers = [number for number in numbers if self.ordered[number].bound_s < self.best][:most]
        for number in numbers:
            candidate, (before, _) = self.ordered[number], self.found[number]
            if progress.late():
                break
            if candidate.bound_s >= self.best:
                continue
            problem, part = candidate.problem(self.topology), budget.part(1 / len(numbers)).silent()
            slots = evolve.search(problem, candidate.region(self.topology), part, self._rng(candidate))
            step = candidate.compute_s + best_layout(problem, slots).cost.total
            if step < before:
                self.found[number] = (step, slots)
            progress.report(self.best)

    def _rng(self, candidate: DegreePair) -> np.random.Generator:
        return chance.arrays(self.seed, "degrees", candidate.name, candidate.count)


class _Bounds:
    """Lower bounds on the seconds of communication of any layout, computed from each peer's fastest links."""

    def __init__(self, topology: Topology) -> None:
        """Sort the links of each peer of the swarm."""
        self.delay_NN = _sums_of_least(topology.delay_s)
        self.inverse_NN = _sums_of_least(1 / topology.bandwidth)

    def seconds(self, workload: Workload) -> float:
        """Return seconds of communication that no layout of a divided workload goes below.

        Each peer averages with at least its R - 1 fastest links, and in S * R peers at least one is as slow as the
        (S * R)th fastest. A boundary has 2 R peers, and is not faster than the fastest link of any of them.
        """
        stages, replicas = pair(workload)
        bound = 0.0
        if replicas > 1:
            gradient = workload.gradient_gbytes * 1e9 / replicas
            row_N = 2 * (self.delay_NN[:, replicas - 2] + gradient * self.inverse_NN[:, replicas - 2])
            bound += float(np.partition(row_N, stages * replicas - 1)[stages * replicas - 1])
        if stages > 1:
            nearest_N = self.delay_NN[:, 0] + workload.activation_gbytes * 1e9 * self.inverse_NN[:, 0]
            bound += 2 * (stages - 1) * float(np.partition(nearest_N, 2 * replicas - 1)[2 * replicas - 1])
        return bound


def _sums_of_least(link_NN: Floats) -> Floats:
    """Return the sums of each row's 1, 2, ... N - 1 smallest entries, without the diagonal; directions are averaged."""
    mean_NN = (link_NN + link_NN.T) / 2
    np.fill_diagonal(mean_NN, np.inf)
    mean_NN.sort(axis=1)
    return np.cumsum(mean_NN[:, :-1], axis=1)


def _of_part(
    topology: Topology, part: Ints, loads: Sequence[Workload], bounds: _Bounds | None, counted: bool
) -> Iterator[DegreePair]:
    """Yield the candidates in one part of the swarm; `loads` are the workload divided by each pair."""
    fastest = part[np.argsort(-topology.flops[part], kind="stable")]
    memory_N = step_needs.memory_N(topology)[fastest]
    holders: dict[int, Ints] = {}  # so that candidates with equally many peers share an array
    for load in loads:
        holds = memory_N >= step_needs.stage_bytes(load)
        number, used = int(holds.sum()), _used(load)
        if number < used:
            continue
        peers = holders.setdefault(number, fastest[holds])
        communication = 0.0 if bounds is None else bounds.seconds(load)
        for count in _counts(topology.flops[peers], used) if counted else [number]:
            compute = step_needs.compute_seconds(load, topology.flops[peers[count - 1]]) if counted else 0.0
            yield DegreePair(load, peers, count, compute, communication + compute)


def _counts(flops: Floats, used: int) -> list[int]:
    """Return how many of the fastest peers candidates may use: at most MOST_SPEEDS counts, each at least `used`.

    Peers of equal speed are counted together. `flops` are the peers' speeds, fastest first.
    """
    ends = np.append(np.flatnonzero(np.diff(flops)) + 1, len(flops))
    ends = ends[ends >= used]
    chosen = np.unique(np.linspace(0, len(ends) - 1, MOST_SPEEDS).astype(np.int64))
    return [int(count) for count in ends[chosen]]


def _used(load: Workload) -> int:
    stages, replicas = pair(load)
    return stages * replicas


def _nothing_fits(topology: Topology, loads: Sequence[Workload], parts: Sequence[Ints]) -> str:
    """Return the error's text for a swarm in which no part has enough peers with enough memory."""
    small = [load for load in loads if _used(load) <= len(parts[0])]
    if not small:
        stages, replicas = pair(min(loads, key=_used))
        return (
            f"workload: {named(stages, replicas)} need {stages * replicas} peers; links too slow for a step cut the "
            f"swarm into parts of at most {len(parts[0])}: lower stages or replicas"
        )
    least = min(small, key=step_needs.stage_bytes)
    stages, replicas = pair(least)
    needed = step_needs.stage_bytes(least)
    held = int((step_needs.memory_N(topology) >= needed).sum())
    return (
        f"topology: no plan fits in memory: with {named(stages, replicas)} a device needs {needed / 1e9:.3g} GB "
        f"({step_needs.STATE_RATIO:.0f} bytes of state for each byte of gradients), which {held} of {len(topology)} "
        "peers have: add peers or memory_gb, or plan a smaller model (gradient_gbytes)"
    )

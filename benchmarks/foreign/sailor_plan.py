"""Our planner for Sailor's clusters: degrees by enumeration, places by the search of `decentral.scheduler.sync`.

Start at `best_plan`. Two models price a synchronous step of M micro-batches, both from the artifact's measured layers
and links: the scheduler's own (`scheduler_s`), and a finer one that plans are compared by (`step_of`; one forward, one
backward, in turn: Narayanan et al., SC 2021):

    step = sum of compute_s + pipeline + (M - 1) * max over stages of busy_s + data parallel + update

A stage is busy with its compute and with the hops from and to its neighbours, as a transfer keeps both ends waiting;
`data parallel` is the all-reduce of the slowest stage's ring, as slow as its slowest link.

The planner tries each tensor degree, micro-batch, number of stages and number of micro-batches (as AMP, arXiv
2210.07297), with all zones and without the farthest ones. A guess ranks them; for the best few, the search of
`scheduler/sync` places groups by its own cost (communication, all pairs of a stage). Beside its layout stand all that
fill the stages zone by zone. Then the replicas get an order in which each ring's slowest link is fast, and the plan
with the shortest step counts.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.foreign.sailor_profiles import LayerTimes, Profiles, Site
from decentral.core import rng as chance
from decentral.core.errors import UserError
from decentral.scheduler.sync import evolve, step_needs
from decentral.scheduler.sync.layout_cost import Problem, best_layout, cost_of_pipelines
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Workload

STATE_FACTOR = 6  # bytes that training keeps for a byte of weights: Adam's two, gradients, DeepSpeed's two copies
RESERVED_BYTES = 3e9  # of the framework
SEARCHED = 12  # the layouts of so many degrees are searched
MESSAGE_BYTES = 1e7  # for which zones are compared
ORDERS = 120  # orders of zones that are tried: all orders of five
LEAST_SEARCH_S = 0.02  # for each, if time runs out
FEWER_REPLICAS = 4  # for each number of stages, so many numbers of micro-batches from the fewest on


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind in zones, in nodes that a tensor-parallel group does not leave."""

    device: str
    devices: Mapping[str, int]  # by zone
    node: int  # devices
    memory: float  # bytes of a device

    def groups(self, degree: int) -> tuple[Site, ...]:
        """Return the site of each group of `degree` devices."""
        return tuple(Site(zone, self.device) for zone, count in self.devices.items() for _ in range(count // degree))


@dataclass(frozen=True, slots=True)
class Degrees:
    """How a batch is divided: `micro_batches` a step, each of `micro_batch` sequences, in every pipeline."""

    tensor: int
    stages: int
    replicas: int
    micro_batch: int
    micro_batches: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which layers (`cuts`: the first of each stage, and the end) which groups compute."""

    degrees: Degrees
    cuts: tuple[int, ...]
    sites: tuple[tuple[Site, ...], ...]  # of each replica, stage by stage

    @property
    def spans(self) -> list[range]:
        """Return each stage's layers."""
        return [range(first, end) for first, end in itertools.pairwise(self.cuts)]


@dataclass(frozen=True, slots=True)
class Step:
    """The seconds of a step, in parts."""

    compute: float  # of one micro-batch through all stages
    waiting: float  # of all others for the slowest stage
    pipeline: float
    data_parallel: float
    update: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute + self.waiting + self.pipeline + self.data_parallel + self.update


def step_of(profiles: Profiles, plan: Plan) -> Step:
    """Return the cost of a plan. A stage is as slow as its slowest replica, a hop as its slowest pipeline."""
    degrees = plan.degrees
    forward, back = _hops_s(profiles, plan, plan.sites), _hops_s(profiles, plan, plan.sites[::-1])[::-1]
    hop_s = np.array(forward) + np.array(back)
    compute_S = _compute_S(profiles, plan)
    busy_S = compute_S + np.append(hop_s, 0.0) + np.insert(hop_s, 0, 0.0)
    return Step(
        compute=float(compute_S.sum()),
        waiting=float((degrees.micro_batches - 1) * busy_S.max()),
        pipeline=float(hop_s.sum()),
        data_parallel=_ring_s(profiles, plan),
        update=max(one.update_s for stage in _times(profiles, plan) for one in stage),
    )


def scheduler_s(profiles: Profiles, plan: Plan) -> float:
    """Return the seconds of a step by the scheduler's own model (layout_cost.py, step_needs.py)."""
    degrees, sites = plan.degrees, tuple(itertools.chain(*plan.sites))
    stages_SR = np.arange(len(sites)).reshape(degrees.stages, degrees.replicas)
    communication = cost_of_pipelines(_problem(profiles, degrees, plan.cuts, sites), stages_SR)
    busiest_s = degrees.micro_batches * _compute_S(profiles, plan).max()
    flops = step_needs.compute_seconds(Workload(1, degrees.replicas), 1.0) / busiest_s  # of the slowest device
    return communication.total + step_needs.compute_seconds(Workload(degrees.stages, degrees.replicas), flops)


def _compute_S(profiles: Profiles, plan: Plan) -> Floats:
    """Return the seconds in which the slowest device of each stage computes a micro-batch, there and back."""
    pairs = zip(_times(profiles, plan), plan.spans, strict=True)
    return np.array([max(one.compute_L[span].sum() for one in stage) for stage, span in pairs])


def _times(profiles: Profiles, plan: Plan) -> list[list[LayerTimes]]:
    """Return the measurements of each stage's kinds of devices."""
    kinds = [{site.device for site in stage} for stage in plan.sites]
    degrees = plan.degrees
    return [[profiles.times[kind, degrees.micro_batch, degrees.tensor] for kind in stage] for stage in kinds]


def _hops_s(profiles: Profiles, plan: Plan, stages: tuple[tuple[Site, ...], ...]) -> list[float]:
    """Return the seconds of each hop from stage to stage for a micro-batch, on the slowest pipeline's links."""
    size = profiles.sizes[plan.degrees.tensor].output_L[1] * plan.degrees.micro_batch
    return [
        max(profiles.seconds(size, *link, plan.degrees.tensor) for link in set(zip(before, after, strict=True)))
        for before, after in itertools.pairwise(stages)
    ]


def best_plan(
    profiles: Profiles, cluster: Cluster, sequences: int, seed: int, seconds: float, clock: Callable[[], float]
) -> Plan:
    """Return the plan with the shortest step for a batch of `sequences`, found within about `seconds`.

    Raises UserError if no plan fits into the devices' memory.
    """
    begin = clock()
    rough = [
        (step, part, degrees)
        for part in _parts(profiles, cluster)
        for step, degrees in _rough(profiles, part, sequences)
    ]
    chosen: list[tuple[Cluster, Degrees, tuple[int, ...]]] = []
    for _, part, degrees in sorted(rough, key=lambda one: one[0]):
        if len(chosen) < SEARCHED and (cuts := _cuts(profiles, part, degrees)):
            chosen.append((part, degrees, cuts))
    if not chosen:
        raise UserError(f"no plan of {profiles.model} fits into {cluster.memory / 1e9:.1f} GB a device")
    plans: list[Plan] = []
    for at, (part, degrees, cuts) in enumerate(chosen):
        share = (seconds - (clock() - begin)) / (len(chosen) - at)
        budget = SearchBudget(max(share, LEAST_SEARCH_S), clock=clock)
        for placed in _placed(profiles, part, degrees, cuts, budget, chance.arrays(seed, "sailor", at)):
            plans += _with_fast_rings(profiles, placed)
    return min(plans, key=lambda plan: step_of(profiles, plan).seconds)


def by_zone(sites: tuple[Site, ...], degrees: Degrees) -> list[Ints]:
    """Return all different layouts that fill one stage after the other, zone by zone in some order.

    A zone fills whole stages first; the groups that all zones have left over fill the last stages. Layouts whose stages
    have the same numbers of groups of each zone are the same.
    """
    groups = {zone: [at for at, site in enumerate(sites) if site.zone == zone] for zone in {one.zone for one in sites}}
    found: dict[tuple[tuple[str, ...], ...], Ints] = {}
    for order in itertools.islice(itertools.permutations(sorted(groups)), ORDERS):
        cut = {zone: len(groups[zone]) // degrees.replicas * degrees.replicas for zone in order}
        slots = [at for zone in order for at in groups[zone][: cut[zone]]]
        slots += [at for zone in order for at in groups[zone][cut[zone] :]]
        stages = np.array(slots[: degrees.stages * degrees.replicas]).reshape(degrees.stages, degrees.replicas)
        kinds = sorted(tuple(sorted(sites[at].zone for at in stage)) for stage in stages)
        found.setdefault(tuple(kinds), stages.ravel())
    return list(found.values())


def balanced(costs_L: Floats, parts: int, fits: Callable[[int, int, int], bool]) -> tuple[int, ...] | None:
    """Return the cuts of L layers into parts of which the costliest is as cheap as possible; None: nothing fits.

    `fits(part, first, end)` says whether a part may hold the layers from `first` to before `end`.
    """
    count = len(costs_L)
    before = np.concatenate(([0.0], np.cumsum(costs_L)))
    worst = np.full((parts + 1, count + 1), np.inf)
    cut = np.zeros((parts + 1, count + 1), np.int64)
    worst[0, 0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count - parts + part + 1):
            for first in range(part - 1, end):
                value = max(worst[part - 1, first], before[end] - before[first])
                if value < worst[part, end] and fits(part - 1, first, end):
                    worst[part, end], cut[part, end] = value, first
    if worst[parts, count] == np.inf:
        return None
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(int(cut[part, cuts[-1]]))
    return tuple(reversed(cuts))


def ring(seconds_RR: Floats) -> Ints:
    """Return an order of R replicas whose slowest link from one to the next is as fast as was found.

    For a rising limit, an assignment gives each replica a successor over links within the limit, but for one link, as
    the ends of the order need none. Exchanges of two successors join the cycles.
    """
    count = len(seconds_RR)
    for limit in np.unique(seconds_RR):
        slow_RR = seconds_RR > limit
        after = linear_sum_assignment(slow_RR + count * np.eye(count))[1].tolist()
        is_slow, cycle = slow_RR.tolist(), _cycles(after)
        slow = sum(is_slow[one][after[one]] for one in range(count))
        for a, b in itertools.combinations(range(count), 2):
            if cycle[a] == cycle[b]:
                continue
            exchanged = slow - is_slow[a][after[a]] - is_slow[b][after[b]] + is_slow[a][after[b]] + is_slow[b][after[a]]
            if exchanged <= 1:
                after[a], after[b], slow = after[b], after[a], exchanged
                cycle = [cycle[a] if one == cycle[b] else one for one in cycle]
        if slow <= 1 and len(set(cycle)) == 1:
            order = [next((after[one] for one in range(count) if is_slow[one][after[one]]), 0)]
            while len(order) < count:
                order.append(after[order[-1]])
            return np.array(order)
    return np.arange(count)


def _cycles(after: list[int]) -> list[int]:
    """Return for each replica the least replica of its cycle."""
    cycle = [-1] * len(after)
    for first in range(len(after)):
        one = first
        while cycle[one] < 0:
            cycle[one], one = first, after[one]
    return cycle


def _with_fast_rings(profiles: Profiles, plan: Plan) -> list[Plan]:
    """Return the plan with its pipelines in another order, and with other pipelines, so that rings have fast links."""
    links = [
        profiles.matrix(_part_bytes(profiles, plan, stage), plan.sites[stage], 1) for stage in range(len(plan.sites))
    ]
    whole = [ring(np.max(links, axis=0))] * len(links)
    return [
        replace(
            plan, sites=tuple(tuple(stage[at] for at in order) for stage, order in zip(plan.sites, orders, strict=True))
        )
        for orders in (whole, [ring(seconds_RR) for seconds_RR in links])
    ]


def _ring_s(profiles: Profiles, plan: Plan) -> float:
    """Return the seconds of the slowest stage's all-reduce; the last of a ring sends to the first as fast as others."""
    slowest = 0.0
    for at, stage in enumerate(plan.sites):
        links = set(itertools.pairwise(stage))
        part = _part_bytes(profiles, plan, at)
        slowest = max([slowest, *(profiles.seconds(part, one, other, 1) for one, other in links)])
    return 2 * (plan.degrees.replicas - 1) * slowest


def _part_bytes(profiles: Profiles, plan: Plan, stage: int) -> float:
    """Return the bytes of a stage's gradients, divided by its replicas."""
    return float(profiles.sizes[plan.degrees.tensor].weights_L[plan.spans[stage]].sum() / plan.degrees.replicas)


def _parts(profiles: Profiles, cluster: Cluster) -> list[Cluster]:
    """Return the cluster without its farthest zone, without the next one too, and so on, after the whole cluster."""
    zones = [Site(zone, cluster.device) for zone in cluster.devices]
    far = {one: sum(profiles.seconds(MESSAGE_BYTES, one, other, 1) for other in zones) for one in zones}
    near = [site.zone for site in sorted(zones, key=far.__getitem__)]
    kept = [[zone for zone in cluster.devices if zone in near[:count]] for count in range(len(near), 0, -1)]
    return [replace(cluster, devices={zone: cluster.devices[zone] for zone in names}) for names in kept]


def _rough(profiles: Profiles, cluster: Cluster, sequences: int) -> Iterator[tuple[float, Degrees]]:
    """Yield degrees and a guess of the step's seconds: even stages, and slow links only in rings or only in hops."""
    for (device, batch, tensor), times in profiles.times.items():
        sites = cluster.groups(tensor)
        if device != cluster.device or cluster.node % tensor or tensor not in profiles.sizes or not sites:
            continue
        pairs = list(itertools.product(dict.fromkeys(sites), repeat=2))
        hops = [profiles.seconds(profiles.sizes[tensor].output_L[1] * batch, a, b, tensor) for a, b in pairs]
        compute = times.compute_L.sum()
        for stages in range(1, min(profiles.layers, len(sites)) + 1):
            most = min(len(sites) // stages, -(-sequences // batch))
            fewest = -(-sequences // (batch * most))
            for count in range(fewest, fewest + FEWER_REPLICAS):
                degrees = Degrees(tensor, stages, -(-sequences // (batch * count)), batch, count)
                rings = [_average_s(profiles, degrees, a, b) for a, b in pairs]
                steps = [
                    compute
                    + (count - 1) * (compute / stages + 2 * min(2, stages - 1) * hop)
                    + 2 * (stages - 1) * hop
                    + ring
                    for hop, ring in ((min(hops), max(rings)), (max(hops), min(rings)))
                ]
                yield float(min(steps)), degrees


def _cuts(profiles: Profiles, cluster: Cluster, degrees: Degrees) -> tuple[int, ...] | None:
    """Return cuts that keep the slowest stage short, its compute and its averaging; None: no cuts fit into memory."""
    sizes = profiles.sizes[degrees.tensor]
    times = profiles.times[cluster.device, degrees.micro_batch, degrees.tensor]
    site = cluster.groups(degrees.tensor)[0]
    averaged = sizes.weights_L / sizes.weights_L.sum() * _average_s(profiles, degrees, site, site) * degrees.stages

    def fits(stage: int, first: int, end: int) -> bool:
        state = STATE_FACTOR * sizes.weights_L[first:end].sum()
        waiting = (degrees.stages - stage) * degrees.micro_batch * sizes.kept_L[first:end].sum()
        return bool(state + waiting + RESERVED_BYTES <= cluster.memory)

    return balanced((degrees.micro_batches - 1) * times.compute_L + averaged, degrees.stages, fits)


def _average_s(profiles: Profiles, degrees: Degrees, sender: Site, receiver: Site) -> float:
    """Return the seconds to average the gradients of one of the even stages, if all links were like this one."""
    part = profiles.sizes[degrees.tensor].weights_L.sum() / degrees.stages / degrees.replicas
    return 2 * (degrees.replicas - 1) * profiles.seconds(part, sender, receiver, 1)


def _placed(
    profiles: Profiles,
    cluster: Cluster,
    degrees: Degrees,
    cuts: tuple[int, ...],
    budget: SearchBudget,
    rng: np.random.Generator,
) -> list[Plan]:
    """Return plans with these degrees and cuts: the one of the scheduler's search, and those filled zone by zone."""
    sites = cluster.groups(degrees.tensor)
    problem = _problem(profiles, degrees, cuts, sites)
    slots = by_zone(sites, degrees)
    zones = list(cluster.devices)
    region_N = np.array([zones.index(site.zone) for site in sites])
    slots.append(evolve.search(problem, region_N, budget, rng))
    found = [best_layout(problem, one).stages_SR for one in slots]
    return [Plan(degrees, cuts, tuple(tuple(sites[at] for at in stage) for stage in stages)) for stages in found]


def _problem(profiles: Profiles, degrees: Degrees, cuts: tuple[int, ...], sites: tuple[Site, ...]) -> Problem:
    sizes = profiles.sizes[degrees.tensor]
    gradient = max(sizes.weights_L[first:end].sum() for first, end in itertools.pairwise(cuts))
    data_NN = 2 * profiles.matrix(gradient / degrees.replicas, sites, 1)
    hop_NN = profiles.matrix(sizes.output_L[1] * degrees.micro_batch, sites, degrees.tensor)
    pipe_NN = degrees.micro_batches * hop_NN
    return Problem((data_NN + data_NN.T) / 2, (pipe_NN + pipe_NN.T) / 2, degrees.stages, degrees.replicas)

"""What a synchronous layout costs: the model of Yuan et al. (arXiv 2206.01288, section 3), exactly.

    data parallel = max over stages, max over the stage's devices d, of
                    the sum over its other devices d' of 2 (delay_dd' + gradient / (replicas * bandwidth_dd'))
    pipeline      = 2 * the cheapest open path through the stages, where joining two stages costs
                    the bottleneck perfect matching of delay + activation / bandwidth
    total         = data parallel + pipeline, in seconds

Where a link differs by direction, both directions are used equally (all-reduce exchanges both ways; activations
go forward, gradients back), so the mean of the two times stands for either. On symmetric links this is the paper's
formula. This file is the reference that the compiled search is tested against; it is not fast.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Floats, Ints
from decentral.scheduler.shared.topology import Topology, Workload
from decentral.scheduler.sync.matching import bottleneck_matching, stage_order


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Seconds per pair of peers, and the shape of the layout: S stages of R replicas, S * R <= N."""

    data_NN: Floats  # 2 (delay + gradient / (R * bandwidth)), symmetric, diagonal 0
    pipe_NN: Floats  # delay + activation / bandwidth, symmetric, diagonal 0
    stages: int
    replicas: int

    def __len__(self) -> int:
        return len(self.data_NN)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that one optimiser step communicates."""

    data_parallel: float
    pipeline: float

    @property
    def total(self) -> float:
        return self.data_parallel + self.pipeline


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """`stages_SR`: each stage's peers, in pipeline order; column r is one pipeline, so the matching is real."""

    stages_SR: Ints
    cost: Cost


def problem(topology: Topology, work: Workload) -> Problem:
    """Raises UserError where the swarm is too small for the stages and replicas."""
    if work.stages is None or work.replicas is None:
        raise UserError("workload: stages and replicas are left open; the degree search must set them first")
    if work.stages * work.replicas > len(topology):
        raise UserError(
            f"workload: {work.stages} stages of {work.replicas} replicas need {work.stages * work.replicas} peers; "
            f"the topology has {len(topology)}: lower stages or replicas, or leave both out"
        )
    gradient, activation = work.gradient_gbytes * 1e9, work.activation_gbytes * 1e9
    data = 2 * (topology.delay_s + gradient / (work.replicas * topology.bandwidth))
    pipe = topology.delay_s + activation / topology.bandwidth
    return Problem(_mean_of_directions(data), _mean_of_directions(pipe), work.stages, work.replicas)


def layout(problem: Problem, slots: Ints, reorder: bool = True) -> Layout:
    """The best layout with these stages: `slots` holds S stages of R peers one after the other, then the unused.

    Orders the stages (unless `reorder` is false: replanning keeps the old order, since a stage is what its peers
    hold), and each stage's peers so that they match their predecessor's.
    """
    stages = slots[: problem.stages * problem.replicas].reshape(problem.stages, problem.replicas)
    order = np.arange(problem.stages)
    if reorder:
        order = stage_order(edges(problem, stages), order)
    ordered = stages[order].copy()
    partner = np.empty(problem.replicas, np.int64)
    for before, after in itertools.pairwise(ordered):
        bottleneck_matching(problem.pipe_NN[np.ix_(before, after)], np.inf, partner)
        after[partner] = after.copy()  # after's column c goes where its row of `before` stands
    return Layout(ordered, cost_of_pipelines(problem, ordered))


def cost_of_pipelines(problem: Problem, stages_SR: Ints) -> Cost:
    """What these very pipelines (the columns) cost when run; every link taken from the matrices."""
    data = max((problem.data_NN[np.ix_(stage, stage)].sum(axis=1).max() for stage in stages_SR), default=0.0)
    hops = problem.pipe_NN[stages_SR[:-1], stages_SR[1:]]
    pipeline = 2 * float(hops.max(axis=1).sum()) if len(hops) else 0.0
    return Cost(float(data), pipeline)


def edges(problem: Problem, stages_SR: Ints) -> Floats:
    """The bottleneck matching between any two stages, seconds."""
    count = len(stages_SR)
    edge = np.zeros((count, count))
    partner = np.empty(problem.replicas, np.int64)
    for a in range(count):
        for b in range(a + 1, count):
            between = problem.pipe_NN[np.ix_(stages_SR[a], stages_SR[b])]
            edge[a, b] = edge[b, a] = bottleneck_matching(between, np.inf, partner)
    return edge


def _mean_of_directions(seconds_NN: Floats) -> Floats:
    mean: Floats = (seconds_NN + seconds_NN.T) / 2
    np.fill_diagonal(mean, 0.0)
    return mean

"""What a synchronous layout costs: the model of Yuan et al. (arXiv 2206.01288, section 3), exactly.

    data parallel = max over stages, max over the stage's devices d, of
                    the sum over its other devices d' of 2 (delay_dd' + gradient / (replicas * bandwidth_dd'))
    pipeline      = 2 * the cheapest open path through the stages, where the boundary of two stages costs
                    the bottleneck perfect matching of delay + activation / bandwidth
    total         = data parallel + pipeline, in seconds

Where a link differs by direction, both directions are used equally (all-reduce exchanges both ways; activations
go forward, gradients back), so the mean of the two times stands for either. On symmetric links this is the paper's
formula. This file is the reference that the compiled search is tested against; it is not fast.

`slots` lists the peers of S stages of R, one stage after the other, and then
the peers that no stage uses.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from decentral.core.errors import UserError
from decentral.scheduler.sync.matching import bottleneck_matching, stage_order
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.topology import Topology, Workload


class Problem(NamedTuple):
    """Seconds for each pair of peers, and how many to place: S * R <= N. Compiled functions take the tuple as it is."""

    data_NN: Floats  # 2 (delay + gradient / (R * bandwidth)), symmetric, diagonal 0
    pipe_NN: Floats  # delay + activation / bandwidth, symmetric, diagonal 0
    stages: int
    replicas: int

    @property
    def peers(self) -> int:
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
    """`stages_SR`: each stage's peers, in pipeline order. A column is one pipeline, so the matchings are realised."""

    stages_SR: Ints
    cost: Cost


def problem_of(topology: Topology, workload: Workload) -> Problem:
    """The problem of placing this workload. Raises UserError where the swarm has too few peers for it."""
    if workload.stages is None or workload.replicas is None:
        raise UserError("workload: stages and replicas are left open; the degree search must set them first")
    needed = workload.stages * workload.replicas
    if needed > len(topology):
        raise UserError(
            f"workload: {workload.stages} stages of {workload.replicas} replicas need {needed} peers; "
            f"the topology has {len(topology)}: lower stages or replicas, or leave both out"
        )
    gradient, activation = workload.gradient_gbytes * 1e9, workload.activation_gbytes * 1e9
    data = 2 * (topology.delay_s + gradient / (workload.replicas * topology.bandwidth))
    pipe = topology.delay_s + activation / topology.bandwidth
    return Problem(_mean_of_directions(data), _mean_of_directions(pipe), workload.stages, workload.replicas)


def best_layout(problem: Problem, slots: Ints) -> Layout:
    """The cheapest layout whose stages are those of `slots`: their order, and which peers form a pipeline."""
    stages = slots[: problem.stages * problem.replicas].reshape(problem.stages, problem.replicas)
    ordered = stages[stage_order(boundary_costs(problem, stages), np.arange(problem.stages))]
    partner = np.empty(problem.replicas, np.int64)
    for before, after in itertools.pairwise(ordered):
        bottleneck_matching(problem.pipe_NN[np.ix_(before, after)], np.inf, partner)
        after[partner] = after.copy()  # the partner of row r of `before` moves to place r of `after`
    return Layout(ordered, cost_of_pipelines(problem, ordered))


def cost_of_pipelines(problem: Problem, stages_SR: Ints) -> Cost:
    """What these very pipelines (the columns) cost when run; the cost of every link comes from the matrices."""
    data = max((problem.data_NN[np.ix_(stage, stage)].sum(axis=1).max() for stage in stages_SR), default=0.0)
    hops = problem.pipe_NN[stages_SR[:-1], stages_SR[1:]]
    pipeline = 2 * float(hops.max(axis=1).sum()) if len(hops) else 0.0
    return Cost(float(data), pipeline)


def boundary_costs(problem: Problem, stages_SR: Ints) -> Floats:
    """The bottleneck matching of any two stages, in seconds: S x S."""
    count = len(stages_SR)
    cost_SS = np.zeros((count, count))
    partner = np.empty(problem.replicas, np.int64)
    for a in range(count):
        for b in range(a + 1, count):
            between = problem.pipe_NN[np.ix_(stages_SR[a], stages_SR[b])]
            cost_SS[a, b] = cost_SS[b, a] = bottleneck_matching(between, np.inf, partner)
    return cost_SS


def _mean_of_directions(seconds_NN: Floats) -> Floats:
    mean: Floats = (seconds_NN + seconds_NN.T) / 2
    np.fill_diagonal(mean, 0.0)
    return mean

"""The communication cost of a synchronous layout, by the model of arXiv 2206.01288, section 3 (Yuan and others).

Start at `best_layout`.

    data parallel = max over stages, max over the stage's devices d, of
                    the sum over its other devices d' of 2 (delay_dd' + gradient / (replicas * bandwidth_dd'))
    pipeline      = 2 * the cheapest open path through the stages, where the boundary of two stages costs
                    the bottleneck perfect matching of delay + activation / bandwidth
    total         = data parallel + pipeline, in seconds

If a link's two directions differ, the mean of their times is used, because both directions carry the same bytes:
all-reduce exchanges both ways; activations go forward, gradients back. On symmetric links this is the paper's formula.
This file is slow; the compiled searches are tested against it.

`slots` lists the peers of S stages, R peers for each stage, then the peers that no stage uses.
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
    """A placement problem: seconds for each pair of N peers, and S stages of R replicas to fill, S * R <= N.

    It is a NamedTuple, because functions that numba compiles cannot take a dataclass.
    """

    data_NN: Floats  # seconds to average gradients: 2 (delay + gradient / (R * bandwidth)); symmetric, diagonal 0
    pipe_NN: Floats  # seconds to send activations: delay + activation / bandwidth; symmetric, diagonal 0
    stages: int
    replicas: int

    @property
    def peers(self) -> int:
        """Return the number of peers, N."""
        return len(self.data_NN)


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of communication in one optimizer step, in two parts."""

    data_parallel: float
    pipeline: float

    @property
    def total(self) -> float:
        """Return the sum of both parts, in seconds."""
        return self.data_parallel + self.pipeline


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A complete layout: its stages, its pipelines and its cost."""

    stages_SR: Ints  # a row is a stage, a column is a pipeline
    cost: Cost


def problem_of(topology: Topology, workload: Workload, members: Ints | None = None) -> Problem:
    """Return the problem of placing a workload on a swarm.

    Args:
        topology: The peers and their links.
        workload: The gigabytes of one stage's gradients and of one replica's activations.
        members: Indices of the peers that a layout may use; None: all.

    Raises:
        UserError: If the workload does not set stages and replicas, or needs more peers than there are.
    """
    if workload.stages is None or workload.replicas is None:
        raise UserError("workload: stages and replicas must both be set in the topology; at least one is missing")
    chosen = np.arange(len(topology)) if members is None else members
    grid = np.ix_(chosen, chosen)
    delay_NN, bandwidth_NN = topology.delay_s[grid], topology.bandwidth[grid]
    needed = workload.stages * workload.replicas
    if needed > len(delay_NN):
        raise UserError(
            f"workload: {workload.stages} stages of {workload.replicas} replicas need {needed} peers; "
            f"the topology has {len(delay_NN)}: lower stages or replicas, or leave both out"
        )
    gradient, activation = workload.gradient_gbytes * 1e9, workload.activation_gbytes * 1e9
    data = 2 * (delay_NN + gradient / (workload.replicas * bandwidth_NN))
    pipe = delay_NN + activation / bandwidth_NN
    return Problem(_mean_of_directions(data), _mean_of_directions(pipe), workload.stages, workload.replicas)


def best_layout(problem: Problem, slots: Ints) -> Layout:
    """Return the cheapest layout with the stages of `slots`: order the stages, and match peers to pipelines."""
    stages = slots[: problem.stages * problem.replicas].reshape(problem.stages, problem.replicas)
    ordered = stages[stage_order(boundary_costs(problem, stages), np.arange(problem.stages))]
    partner = np.empty(problem.replicas, np.int64)
    for before, after in itertools.pairwise(ordered):
        bottleneck_matching(problem.pipe_NN[np.ix_(before, after)], np.inf, partner)
        after[partner] = after.copy()  # put each peer below its partner in `before`, so that columns are pipelines
    return Layout(ordered, cost_of_pipelines(problem, ordered))


def cost_of_pipelines(problem: Problem, stages_SR: Ints) -> Cost:
    """Return the cost of the layout that has the rows of `stages_SR` as stages and its columns as pipelines."""
    data = max((problem.data_NN[np.ix_(stage, stage)].sum(axis=1).max() for stage in stages_SR), default=0.0)
    hops = problem.pipe_NN[stages_SR[:-1], stages_SR[1:]]
    pipeline = 2 * float(hops.max(axis=1).sum()) if len(hops) else 0.0
    return Cost(float(data), pipeline)


def boundary_costs(problem: Problem, stages_SR: Ints) -> Floats:
    """Return the cost in seconds of the bottleneck matching of each pair of stages, S x S."""
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

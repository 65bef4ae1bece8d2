"""Search spans by a learnt policy (REINFORCE): the baseline of other schedulers, for `--compare`. Start at `search`.

As in Spotlight (Gao et al., ICML 2018) and HeterPS (Liu et al., arXiv 2111.10635), a policy places one peer after
another and learns from the throughput of whole plans. The policy here is a softmax over a peer's possible spans, of a
linear function of FEATURES:

    p(span) = softmax(theta . features);  theta += RATE * mean over plans of advantage * grad log p(plan)

The advantage is a plan's throughput less the mean of the batch, divided by the standard deviation of the batch.
"""

from dataclasses import dataclass

import numpy as np

from decentral.scheduler.spans.problem import SpanProblem
from decentral.scheduler.spans.trials import Trials
from decentral.scheduler.topology.arrays import Flags, Floats, Ints

BATCH = 16  # number of plans that are sampled for each update of theta
RATE = 0.3
PLACED_S = 1e-4  # seconds in which a peer is placed on a quiet core
MOST_SIZES = 12  # for each first layer of a span, at most this many lengths of the span are considered
FEATURES = ("mean supply", "least supply", "own supply", "size", "begins at an edge", "ends at an edge")
FIRST_THETA = (-4.0, -4.0, 0.0, 2.0, 1.0, 1.0)  # initial weights prefer scarce layers, long spans, other spans' edges


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """The C spans that a peer may hold, and the tokens/s that it would compute in each."""

    spans_C2: Ints
    supply_C: Floats


def search(trials: Trials, starts: list[Ints]) -> None:
    """Evaluate the starts, then sample batches of plans and update the policy, until the budget ends."""
    trials.begun(starts)
    choices = [_choices(trials.problem, peer) for peer in range(len(trials.problem.reach_NL))]
    theta_F = np.array(FIRST_THETA)
    while trials.goes_on():
        values, gradients = list[float](), list[Floats]()
        while not values or (len(values) < BATCH and trials.goes_on()):
            spans_N2, gradient_F = _sampled(trials, choices, theta_F)
            trials.progress.count(PLACED_S * len(choices))
            values.append(max(0.0, trials.evaluated(trials.problem.repaired(spans_N2)).value))
            gradients.append(gradient_F)
        advantage = (np.array(values) - np.mean(values)) / (np.std(values) + 1e-9)
        theta_F += RATE * advantage @ np.array(gradients) / len(values)


def _choices(problem: SpanProblem, peer: int) -> _Choices:
    spans = [
        (first, last)
        for first, reach in enumerate(problem.reach_NL[peer].tolist())
        for last in np.unique(np.linspace(first + 1, reach, MOST_SIZES).astype(int)).tolist()
        if reach > first
    ]
    supply = [problem.supply(peer, first, last) for first, last in spans]
    return _Choices(np.array(spans, np.int64).reshape(-1, 2), np.array(supply))


def _sampled(trials: Trials, choices: list[_Choices], theta_F: Floats) -> tuple[Ints, Floats]:
    """Return a plan that the policy samples, and the gradient of its log probability, a mean over peers."""
    peers, layers = trials.problem.reach_NL.shape
    spans_N2, gradient_F = np.zeros((peers, 2), np.int64), np.zeros(len(theta_F))
    supply_L, edge_L = np.full(layers, 1e-9), np.zeros(layers + 1, np.bool_)
    edge_L[[0, layers]] = True
    for peer in trials.rng.permutation(peers):
        own = choices[peer]
        if not len(own.supply_C):
            continue
        features_CF = _features(own, supply_L, edge_L)
        score_C = features_CF @ theta_F
        p_C = np.exp(score_C - score_C.max())
        p_C /= p_C.sum()
        pick = int(trials.rng.choice(len(p_C), p=p_C))
        gradient_F += (features_CF[pick] - p_C @ features_CF) / peers
        first, last = spans_N2[peer] = own.spans_C2[pick]
        supply_L[first:last] += own.supply_C[pick]
        edge_L[[first, last]] = True
    return spans_N2, gradient_F


def _features(own: _Choices, supply_L: Floats, edge_L: Flags) -> Floats:
    """Return FEATURES of each possible span of the next peer, (C, 6), each between 0 and 1.

    `supply_L` are the tokens/s that the peers placed so far supply for each layer. `edge_L` marks the layers at which
    their spans begin or end.
    """
    first_C, last_C = own.spans_C2.T
    sums = np.concatenate(([0.0], np.cumsum(supply_L)))
    mean_C = (sums[last_C] - sums[first_C]) / (last_C - first_C)
    within = np.lib.stride_tricks.sliding_window_view
    least_C = np.empty(len(first_C))
    for size in np.unique(last_C - first_C):
        rows = last_C - first_C == size
        least_C[rows] = within(supply_L, size).min(axis=1)[first_C[rows]]
    columns = (mean_C / supply_L.max(), least_C / supply_L.max(), own.supply_C / own.supply_C.max(),
               (last_C - first_C) / len(supply_L), edge_L[first_C], edge_L[last_C])  # fmt: skip
    return np.stack(columns, axis=1).astype(np.float64)

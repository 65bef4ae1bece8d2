"""Whom to pull from, and how often: the probabilities that mix fastest per second under the links' capacities.

A peer that pulls from j is busy for seconds_ij = delay + bytes / bandwidth, and can give gossip `LINK_SHARE` of its
time. With rates r_ij (exchanges per second, symmetric) the expected mixing of a layer's holders is the flow
d/dt phi = -gamma L(r) phi, whose slowest part decays with the second eigenvalue of the Laplacian L(r). So

    maximise lambda_2(L(r))  over r >= 0  with  sum_j r_ij seconds_ij <= LINK_SHARE  for every i

(fastest mixing Markov process: Sun, Boyd, Xiao, Diaconis, SIAM Review 2006). It is concave: every unit vector v
orthogonal to one gives lambda_2 <= sum r_ij (v_i - v_j)^2, a linear cut; a linear programme over the cuts found so
far, repeated, closes in on the optimum (Kelley). Where spans differ, each layer's holders give their own cuts, and
the slowest layer counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from decentral.scheduler.arrays import Floats
from decentral.scheduler.topology import Topology

LINK_SHARE = 0.5  # of the time in which a peer's link may carry gossip
MOST_PEERS = 96  # above this, bandwidth-proportional probabilities are used as they are
CUTS = 4  # per round and group of holders
PAIR_ROUNDS = 12_000  # pairs of peers times rounds: 24 rounds for 32 peers, 5 for 64
Holds = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """Pulling probabilities (rows sum to 1), and lambda_2 per second of these and of two simple rules."""

    weight_NN: Floats
    mixing_per_s: float
    uniform_per_s: float
    bandwidth_per_s: float

    def to_json(self, ids: Sequence[str]) -> dict[str, Any]:
        weights = {
            ids[i]: {ids[int(j)]: round(float(row[j]), 5) for j in np.flatnonzero(row > 1e-4)}
            for i, row in enumerate(self.weight_NN)
        }
        mixing = {"plan": self.mixing_per_s, "uniform": self.uniform_per_s, "bandwidth": self.bandwidth_per_s}
        return {"weights": weights, "mixing_per_s": mixing}


def partners(topology: Topology, holds_NL: Holds, snapshot_L: Floats) -> Partners:
    """Probabilities for these holders; `snapshot_L`: bytes that one exchange of a layer moves."""
    common = holds_NL.astype(float) * snapshot_L @ holds_NL.T.astype(float)
    np.fill_diagonal(common, 0.0)
    shared = common > 0
    seconds = np.where(shared, topology.delay_s + common / topology.bandwidth, np.inf)
    seconds = np.maximum(seconds, seconds.T)  # an exchange is as slow as its slower direction
    groups = _distinct_groups(holds_NL)
    rules = {
        "uniform": scaled(shared.astype(float), seconds),
        "bandwidth": scaled(np.where(shared, 1 / seconds, 0.0), seconds),
    }
    mixing = {name: slowest(rate, groups) for name, rate in rules.items()}
    best = max(rules, key=lambda name: mixing[name])
    rate, value = rules[best], mixing[best]
    if len(seconds) <= MOST_PEERS and shared.any():
        found = fastest(seconds, groups)
        if slowest(found, groups) > value:
            rate, value = found, slowest(found, groups)
    total = rate.sum(axis=1, keepdims=True)
    weight = np.divide(rate, total, out=np.zeros_like(rate), where=total > 0)
    return Partners(weight, value, mixing["uniform"], mixing["bandwidth"])


def fastest(seconds: Floats, groups: Sequence[NDArray[np.int64]]) -> Floats:
    """Rates of the greatest slowest-mixing eigenvalue, by cutting planes."""
    i, j = np.nonzero(np.triu(np.isfinite(seconds), 1))
    peers, pairs = len(seconds), len(i)
    budget = np.zeros((peers, pairs + 1))
    budget[i, np.arange(pairs)] = seconds[i, j]
    budget[j, np.arange(pairs)] = seconds[i, j]
    best, best_value = np.zeros_like(seconds), -1.0
    rate = scaled(np.where(np.isfinite(seconds), 1 / seconds, 0.0), seconds)
    cuts: list[Floats] = []
    scale = max(slowest(rate, groups), 1e-9)
    for _ in range(max(5, min(40, PAIR_ROUNDS // max(1, pairs)))):
        cuts += [np.append(-((v[i] - v[j]) ** 2), scale) for v in _slow_vectors(rate, groups)]
        limits = np.concatenate((np.full(peers, LINK_SHARE), np.zeros(len(cuts))))
        value = np.append(np.zeros(pairs), -1.0)
        found = linprog(value, np.vstack((budget, *cuts)), limits, method="highs")
        if found.status != 0:
            break
        rate = np.zeros_like(seconds)
        rate[i, j] = rate[j, i] = found.x[:-1]
        reached = slowest(rate, groups)
        if reached > best_value:
            best, best_value = rate, reached
        if reached > 0.98 * found.x[-1] * scale:
            break
        rate = (rate + best) / 2  # cut between the two: Kelley's method alone jumps from corner to corner
        middle = slowest(rate, groups)
        if middle > best_value:
            best, best_value = rate, middle
    return best


def scaled(weight: Floats, seconds: Floats) -> Floats:
    """Symmetric rates in proportion to `weight`, as fast as the busiest peer's time allows."""
    weight = np.maximum(weight, weight.T)
    busy = np.where(weight > 0, weight * np.where(np.isfinite(seconds), seconds, 0.0), 0.0).sum(axis=1).max()
    rate: Floats = weight * (LINK_SHARE / busy) if busy > 0 else weight * 0.0
    return rate


def slowest(rate: Floats, groups: Sequence[NDArray[np.int64]]) -> float:
    """The least lambda_2, per second, over the groups of holders; inf-free: 0 where there is nobody to mix with."""
    return min((float(np.linalg.eigvalsh(_laplacian(rate, group))[1]) for group in groups), default=0.0)


def _laplacian(rate: Floats, group: NDArray[np.int64]) -> Floats:
    part = rate[np.ix_(group, group)]
    laplacian: Floats = np.diag(part.sum(axis=1)) - part
    return laplacian


def _slow_vectors(rate: Floats, groups: Sequence[NDArray[np.int64]]) -> list[Floats]:
    vectors = []
    for group in groups:
        _, columns = np.linalg.eigh(_laplacian(rate, group))
        for number in range(1, min(1 + CUTS, len(group))):
            vector = np.zeros(len(rate))
            vector[group] = columns[:, number]
            vectors.append(vector)
    return vectors


def _distinct_groups(holds_NL: Holds) -> list[NDArray[np.int64]]:
    """The different sets of at least two holders that a layer has."""
    groups = {tuple(np.flatnonzero(column)) for column in holds_NL.T}
    return [np.array(group) for group in sorted(groups) if len(group) > 1]

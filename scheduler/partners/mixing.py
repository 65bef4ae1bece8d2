"""How often a peer pulls from each partner: the probabilities that mix fastest under the links' capacities.

Peer i that pulls from j is busy for seconds_ij = delay + bytes / bandwidth, and can give gossip `LINK_SHARE` of its
time. With rates r_ij (exchanges per second, symmetric) the expected mixing of a layer's holders is the flow
d/dt phi = -gamma L(r) phi, whose slowest part decays with the second eigenvalue of the Laplacian L(r). So

    maximise lambda_2(L(r))  over r >= 0  with  sum_j r_ij seconds_ij <= LINK_SHARE  for every i

(fastest mixing Markov process: Sun, Boyd, Xiao, Diaconis, SIAM Review 2006). The objective is concave: every unit
vector v orthogonal to the vector of ones gives lambda_2 <= sum r_ij (v_i - v_j)^2, a linear cut, whose slope
(v_i - v_j)^2 says which pair's exchanges help most. Two anytime searches use it: `ascended` multiplies each pair's
share of time by what it helps over what it takes (exponentiated gradient; any swarm), and `fastest` repeats a linear
programme over the cuts found so far, which closes in on the optimum (Kelley; up to 32 peers). Where spans differ, each
layer's holders give their own cuts, and the slowest layer counts.

Everywhere `seconds` (inf where two peers share no layer) and `rate` (per second) are N x N,
and a group is the numbers of the peers that hold the same layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from decentral.core.strict_json import JsonObject
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress
from decentral.scheduler.topology.topology import Topology

LINK_SHARE = 0.5  # the share of its time for which a peer's link may carry gossip
MOST_EXACT = 32  # peers for which the linear programme is solved
CUTS = 4  # for each round and group of holders
SLOW = 6  # eigenvectors of a group whose slopes are mixed
STEPS = 20  # of the ascent in one round
ASCENT_ROUNDS = 40  # the most of either search


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """Pulling probabilities (rows sum to 1), and lambda_2 per second of these and of two simple rules."""

    weight_NN: Floats
    mixing_per_s: float
    uniform_per_s: float
    bandwidth_per_s: float

    def to_json(self, ids: Sequence[str]) -> JsonObject:
        """The partners of each peer with their probabilities, and mixing of the plan and of the simple rules."""
        weights = {
            ids[i]: {ids[int(j)]: round(float(row[j]), 5) for j in np.flatnonzero(row > 1e-4)}
            for i, row in enumerate(self.weight_NN)
        }
        mixing = {"plan": self.mixing_per_s, "uniform": self.uniform_per_s, "bandwidth": self.bandwidth_per_s}
        return {"weights": weights, "mixing_per_s": mixing}


def partners(topology: Topology, holds_NL: Flags, snapshot_L: Floats, budget: SearchBudget) -> Partners:
    """Pulling probabilities for these holders. `snapshot_L`: bytes that one exchange of a layer moves.

    They never mix more slowly than the better of the two simple rules, however small the budget.
    """
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
    if value > 0:
        rate = ascended(seconds, groups, rate, budget.part(0.5))
        if len(seconds) <= MOST_EXACT:
            rate = fastest(seconds, groups, rate, budget.part(0.5))
        value = slowest(rate, groups)
    total = rate.sum(axis=1, keepdims=True)
    weight = np.divide(rate, total, out=np.zeros_like(rate), where=total > 0)
    return Partners(weight, value, mixing["uniform"], mixing["bandwidth"])


def ascended(seconds: Floats, groups: Sequence[Ints], start: Floats, budget: SearchBudget) -> Floats:
    """Rates at least as fast as `start`, by ascent: lambda_2 over the busiest peer's time, pair by pair."""
    cost = np.where(np.isfinite(seconds), seconds, 0.0)
    share = 0.9 * start * cost + 0.1 * scaled(np.where(cost > 0, 1.0, 0.0), seconds) * cost
    worth = np.divide(1.0, cost, out=np.zeros_like(cost), where=cost > 0)
    best, best_value = start, slowest(start, groups)
    progress = SearchProgress(replace(budget, rounds=min(budget.rounds, ASCENT_ROUNDS)), -best_value)
    taken = 0
    while progress.goes_on():
        for _ in range(STEPS):
            busy = share.sum(axis=1) / LINK_SHARE
            share /= busy.max()
            value, slope = _slope(share * worth, groups)
            if value > best_value:
                best, best_value = share * worth, value
            price = np.exp(30.0 * (busy / busy.max() - 1))
            price /= price.sum() * LINK_SHARE
            push = slope * worth / max(value, 1e-30) - (price[:, None] + price[None, :])
            taken += 1
            share = share * np.exp(np.clip(push / np.abs(push[cost > 0]).max() / (1 + taken / 100) ** 0.5, -2, 2))
            if progress.seconds() > budget.seconds:
                break
        progress.report(-best_value)
    return best


def fastest(seconds: Floats, groups: Sequence[Ints], start: Floats, budget: SearchBudget) -> Floats:
    """Rates at least as fast as `start`, and with enough budget within 2% of the fastest, by cutting planes."""
    i, j = np.nonzero(np.triu(np.isfinite(seconds), 1))
    peers, pairs = len(seconds), len(i)
    busy = np.zeros((peers, pairs + 1))
    busy[i, np.arange(pairs)] = busy[j, np.arange(pairs)] = seconds[i, j]
    best = rate = start
    best_value = scale = slowest(start, groups)
    cuts: list[Floats] = []
    progress = SearchProgress(replace(budget, rounds=min(budget.rounds, ASCENT_ROUNDS)), -best_value)
    while progress.goes_on():
        cuts += [np.append(-((v[i] - v[j]) ** 2), scale) for v in _slow_vectors(rate, groups)]
        limits = np.concatenate((np.full(peers, LINK_SHARE), np.zeros(len(cuts))))
        left = {"time_limit": max(0.01, min(600.0, budget.seconds - progress.seconds()))}
        value = np.append(np.zeros(pairs), -1.0)
        found = linprog(value, np.vstack((busy, *cuts)), limits, method="highs", options=left)
        if found.status != 0:
            break  # out of time
        corner = np.zeros_like(seconds)
        corner[i, j] = corner[j, i] = found.x[:-1]
        middle = (corner + best) / 2  # cut between the two: Kelley's method alone jumps from corner to corner
        rate = max(corner, middle, key=lambda one: slowest(one, groups))
        if slowest(rate, groups) > best_value:
            best, best_value = rate, slowest(rate, groups)
        rate = middle
        progress.report(-best_value)
        if best_value > 0.98 * found.x[-1] * scale:
            break
    return best


def scaled(weight: Floats, seconds: Floats) -> Floats:
    """Symmetric rates in proportion to `weight` (N x N), as fast as the busiest peer's time allows."""
    weight = np.maximum(weight, weight.T)
    busy = np.where(weight > 0, weight * np.where(np.isfinite(seconds), seconds, 0.0), 0.0).sum(axis=1).max()
    return np.asarray(weight * (LINK_SHARE / busy if busy > 0 else 0.0))


def slowest(rate: Floats, groups: Sequence[Ints]) -> float:
    """The least lambda_2, per second, over the groups of holders; 0 without any group."""
    return min((float(np.linalg.eigvalsh(_laplacian(rate, group))[1]) for group in groups), default=0.0)


def _laplacian(rate: Floats, group: Ints) -> Floats:
    part = rate[np.ix_(group, group)]
    return np.asarray(np.diag(part.sum(axis=1)) - part)


def _slow_vectors(rate: Floats, groups: Sequence[Ints]) -> list[Floats]:
    """The CUTS slowest eigenvectors of each group, 0 for peers outside it."""
    return [np.nan_to_num(vector) for _, vector in _eigenvectors(rate, groups, CUTS)]


def _eigenvectors(rate: Floats, groups: Sequence[Ints], count: int) -> Iterator[tuple[float, Floats]]:
    """The `count` slowest eigenvalues and eigenvectors of each group but the constant one; NaN outside the group."""
    for group in groups:
        values, columns = np.linalg.eigh(_laplacian(rate, group))
        for number in range(1, min(1 + count, len(group))):
            vector = np.full(len(rate), np.nan)
            vector[group] = columns[:, number]
            yield float(values[number]), vector


def _slope(rate: Floats, groups: Sequence[Ints]) -> tuple[float, Floats]:
    """The slowest lambda_2, and its slope for each pair, mixed from the slowest few vectors of all groups."""
    found = list(_eigenvectors(rate, groups, SLOW))
    values = np.array([value for value, _ in found])
    least = float(values.min())
    weight = np.exp(-(values - least) / (0.02 * least + 1e-300))
    weight /= weight.sum()
    slope = np.zeros_like(rate)
    for share, (_, vector) in zip(weight, found, strict=True):
        if share > 1e-3:
            slope += share * np.nan_to_num(vector[:, None] - vector[None, :]) ** 2
    return least, slope


def _distinct_groups(holds_NL: Flags) -> list[Ints]:
    """The different sets of at least two holders that a layer has."""
    groups = {tuple(np.flatnonzero(column)) for column in holds_NL.T}
    return [np.array(group) for group in sorted(groups) if len(group) > 1]

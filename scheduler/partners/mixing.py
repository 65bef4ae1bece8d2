"""Choose how probable each gossip partner is, in plans of `decentral.plan` only, so that weights mix fastest.

Start at `partners`. A running peer draws its partners in peers/runtime/peer_selection.py instead. Weights mix when the
replicas of a layer's holders approach their mean. Peer i is busy for seconds_ij = delay + bytes / bandwidth when it
pulls from j, and may gossip for the share `gossip.link_share` of its time. With symmetric rates r_ij of exchanges per
second, the weights phi of a layer's holders change in expectation by d/dt phi = -gamma L(r) phi, where gamma is a
constant and L(r) is the Laplacian of the rates. The slowest component decays with the second smallest eigenvalue
lambda_2 of L(r). So the problem is

    maximise lambda_2(L(r))  over r >= 0  with  sum_j r_ij seconds_ij <= link_share  for every i

(fastest mixing Markov process: Sun, Boyd, Xiao, Diaconis, SIAM Review 2006). The objective is concave: for every unit
vector v orthogonal to the vector of ones, lambda_2 <= sum r_ij (v_i - v_j)^2. This bound, a cut, is linear in r; its
slope (v_i - v_j)^2 says which pair's exchanges help most. Rates are proportional to link_share, so the searches take it
as 1. Two searches use the slopes, and can be stopped at any time:

    ascended   exponentiated gradient: shift each pair's share of time towards pairs with much benefit for their cost
    fastest    Kelley's method, for up to MOST_EXACT peers: repeat a linear programme over the cuts found so far

If peers hold different layers, each layer's holders have their own cuts, and the smallest lambda_2 of any layer counts.

At the end, rates of exchanges are lowered (`fitted`) until the exchanges take at most link_share of each uplink,
downlink, link between two peers and shared link of a site, and fit into it together with the tokens' bytes.

In this file `seconds` (inf if two peers share no layer) and `rate` (per second) are N x N, and a group is an array of
the indices of the peers that hold the same layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import linprog
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from decentral.core.strict_json import JsonObject
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.search_budget import SearchBudget, SearchProgress, programme_s
from decentral.scheduler.topology.topology import Topology

MOST_EXACT = 32  # with more peers, the linear programme of `fastest` takes too long: only `ascended` runs
FASTEST_MODES = 4  # a round of `fastest` finds the slow modes about so many times
CUTS = 4  # one round of `fastest` adds at most this many cutting planes for each group of holders
SLOW = 6  # the slope of lambda_2 is averaged over this many eigenvectors of each group, those that decay most slowly
STEPS = 20  # steps of gradient ascent in one round of `ascended`
ASCENT_ROUNDS = 40
LARGE_GROUP = 128  # if a layer has more holders, Lanczos' method is faster than computing all eigenvalues
LANCZOS_TOLERANCE = 1e-6
# Seconds on a quiet core for the slowest modes of a group: in all; per peer; per two peers.
MODES_S = (5e-5, 5e-6, 1e-7)


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """The plan for gossip: each peer's probability of pulling from each partner, and how fast weights then mix.

    The speed of mixing is lambda_2, in 1/s. For comparison, the plan also contains the speeds of two simple rules.
    """

    weight_NN: Floats  # probability that the row's peer pulls from the column's peer; a row without partners is 0
    every_N: Floats  # seconds between two pulls of a peer; inf without partners
    mixing_per_s: float
    uniform_per_s: float  # lambda_2 if each peer chooses its partner uniformly
    bandwidth_per_s: float  # lambda_2 if each peer chooses a partner in proportion to 1 / (seconds of their exchange)

    def to_json(self, ids: Sequence[str]) -> JsonObject:
        """Return each peer's partners with their probabilities, the seconds between its pulls, and all lambda_2."""
        weights = {
            ids[i]: {ids[int(j)]: round(float(row[j]), 7) for j in np.flatnonzero(row > 1e-4)}
            for i, row in enumerate(self.weight_NN)
        }
        every_s = {ids[i]: every_s for i, every_s in enumerate(self.every_N.tolist()) if np.isfinite(every_s)}
        mixing = {"plan": self.mixing_per_s, "uniform": self.uniform_per_s, "bandwidth": self.bandwidth_per_s}
        return {"weights": weights, "every_s": every_s, "mixing_per_s": mixing}


def partners(
    topology: Topology,
    holds_NL: Flags,
    snapshot_L: Floats,
    tokens_NN: Floats,
    link_share: float,
    budget: SearchBudget,
) -> Partners:
    """Return probabilities of gossip partners with which weights mix at least as fast as with two simple rules.

    Args:
        topology: N peers and their links.
        holds_NL: Whether each peer holds each of L layers.
        snapshot_L: Bytes of each layer that one exchange moves, one way.
        tokens_NN: Bytes/s of activations and gradients between each two peers, in each direction.
        link_share: Gossip may take at most this share of a peer's time, and of each link (`gossip.link_share`).
        budget: Limits of the search.
    """
    common = holds_NL.astype(float) * snapshot_L @ holds_NL.T.astype(float)
    np.fill_diagonal(common, 0.0)
    shared = common > 0
    seconds = np.where(shared, topology.delay_s + common / topology.bandwidth, np.inf)
    seconds = np.maximum(seconds, seconds.T)  # the slower direction decides how long an exchange takes
    groups = _distinct_groups(holds_NL)
    rules = {
        "uniform": scaled(shared.astype(float), seconds),
        "bandwidth": scaled(np.where(shared, 1 / seconds, 0.0), seconds),
    }
    speeds = {name: slowest(rate, groups) for name, rate in rules.items()}
    best = rules[max(speeds, key=lambda name: speeds[name])]
    if max(speeds.values()) > 0:
        best = ascended(seconds, groups, best, budget.part(0.5))
        if len(seconds) <= MOST_EXACT:
            best = fastest(seconds, groups, best, budget.part(0.5))
    found = {"plan": best, **rules}
    options = {name: fitted(rate, common, topology, tokens_NN, link_share) for name, rate in found.items()}
    mixing = {name: slowest(rate, groups) for name, rate in options.items()}
    chosen = max(mixing, key=lambda name: mixing[name])
    total = options[chosen].sum(axis=1, keepdims=True)
    weight = np.divide(options[chosen], total, out=np.zeros_like(total * total.T), where=total > 0)
    every_N = np.divide(1.0, total[:, 0], out=np.full(len(total), np.inf), where=total[:, 0] > 0)
    return Partners(weight, every_N, mixing[chosen], mixing["uniform"], mixing["bandwidth"])


def fitted(rate: Floats, common: Floats, topology: Topology, tokens_NN: Floats, link_share: float) -> Floats:
    """Return the rates, lowered so that gossip takes at most `link_share` of each link, and fits in beside tokens.

    Args:
        rate: Exchanges per second, [N, N], symmetric, scaled so that the busiest peer never idles; each exchange
            moves bytes in both directions.
        common: Bytes that one exchange of two peers moves in each direction, [N, N].
        topology: N peers and their links.
        tokens_NN: Bytes/s of activations and gradients between each two peers, in each direction.
        link_share: Gossip may take at most this share of a peer's time, and of each link.
    """
    rate = link_share * rate
    used = rate * common
    links = np.minimum(topology.bandwidth, topology.bandwidth.T)
    lower = _fraction(links, used, tokens_NN, link_share)
    access_N = np.minimum(topology.up, topology.down)
    own_N = _fraction(access_N, used.sum(axis=1), tokens_NN.sum(axis=1), link_share)
    lower = np.minimum(lower, np.minimum.outer(own_N, own_N))
    region_N = np.array(topology.regions)
    for site in topology.sites:
        crosses = (region_N == site.region)[:, None] != (region_N == site.region)[None, :]
        both_ways = np.array([used[crosses].sum() / 2, tokens_NN[crosses].sum() / 2])
        fraction = _fraction(np.array([min(site.up, site.down)]), both_ways[:1], both_ways[1:], link_share)
        lower = np.where(crosses, np.minimum(lower, fraction), lower)
    return rate * lower


def _fraction(limit: Floats, used: Floats, tokens: Floats, link_share: float) -> Floats:
    """Return the share, at most 1, of gossip's `used` bytes/s that fits into links beside the `tokens`' bytes/s.

    `limit` are the rates of the links in bytes/s; gossip may take at most `link_share` of each.
    """
    left = np.maximum(0.0, np.minimum(link_share * limit, limit - tokens))
    return np.asarray(np.minimum(1.0, np.divide(left, used, out=np.ones_like(used), where=used > 0)))


def ascended(seconds: Floats, groups: Sequence[Ints], start: Floats, budget: SearchBudget) -> Floats:
    """Return rates of exchanges with which weights mix at least as fast as with the rates `start`.

    The method is exponentiated gradient ascent on lambda_2, the second-smallest eigenvalue of the rates' Laplacian.
    """
    cost = np.where(np.isfinite(seconds), seconds, 0.0)
    share = 0.9 * start * cost + 0.1 * scaled(np.where(cost > 0, 1.0, 0.0), seconds) * cost
    worth = np.divide(1.0, cost, out=np.zeros_like(cost), where=cost > 0)
    best, best_value = start, slowest(start, groups)
    progress = SearchProgress(replace(budget, rounds=min(budget.rounds, ASCENT_ROUNDS)), -best_value)
    taken, modes_s = 0, _modes_s(groups)
    while progress.goes_on():
        for _ in range(STEPS):
            busy = share.sum(axis=1)
            share /= busy.max()
            value, slope = _slope(share * worth, groups)
            progress.count(modes_s)
            if value > best_value:
                best, best_value = share * worth, value
            price = np.exp(30.0 * (busy / busy.max() - 1))
            price /= price.sum()
            push = slope * worth / max(value, 1e-30) - (price[:, None] + price[None, :])
            taken += 1
            share = share * np.exp(np.clip(push / np.abs(push[cost > 0]).max() / (1 + taken / 100) ** 0.5, -2, 2))
            if progress.late():
                break
        progress.report(-best_value)
    return best


def fastest(seconds: Floats, groups: Sequence[Ints], start: Floats, budget: SearchBudget) -> Floats:
    """Return rates that mix at least as fast as `start`, by cutting planes; with enough time, within 2% of optimal."""
    i, j = np.nonzero(np.triu(np.isfinite(seconds), 1))
    peers, pairs = len(seconds), len(i)
    busy = np.zeros((peers, pairs + 1))
    busy[i, np.arange(pairs)] = busy[j, np.arange(pairs)] = seconds[i, j]
    best = rate = start
    best_value = scale = slowest(start, groups)
    cuts: list[Floats] = []
    modes_s = _modes_s(groups)
    progress = SearchProgress(replace(budget, rounds=min(budget.rounds, ASCENT_ROUNDS)), -best_value)
    while progress.goes_on():
        cuts += [np.append(-((v[i] - v[j]) ** 2), scale) for v in _slow_vectors(rate, groups)]
        limits = np.concatenate((np.ones(peers), np.zeros(len(cuts))))
        left = {"time_limit": max(0.01, min(600.0, progress.clock_left_s()))}
        value = np.append(np.zeros(pairs), -1.0)
        programme = np.vstack((busy, *cuts))
        found = linprog(value, programme, limits, method="highs", options=left)
        progress.count(FASTEST_MODES * modes_s + programme_s(pairs * (2 + len(cuts)), found.nit))
        if found.status != 0:
            break  # no more time, or no solution: return the best so far
        corner = np.zeros_like(seconds)
        corner[i, j] = corner[j, i] = found.x[:-1]
        middle = (corner + best) / 2  # cut between corner and best, as cuts at corners make the search jump
        rate = max(corner, middle, key=lambda one: slowest(one, groups))
        if slowest(rate, groups) > best_value:
            best, best_value = rate, slowest(rate, groups)
        rate = middle
        progress.report(-best_value)
        if best_value > 0.98 * found.x[-1] * scale:
            break
    return best


def scaled(weight: Floats, seconds: Floats) -> Floats:
    """Return symmetric rates proportional to `weight` (N x N); the busiest peer gossips all the time."""
    weight = np.maximum(weight, weight.T)
    busy = np.where(weight > 0, weight * np.where(np.isfinite(seconds), seconds, 0.0), 0.0).sum(axis=1).max()
    return np.asarray(weight / busy if busy > 0 else 0.0 * weight)


def slowest(rate: Floats, groups: Sequence[Ints]) -> float:
    """Return the lambda_2, per second, of the group of holders that mixes most slowly; 0 if there is no group."""
    return min((float(_slow_modes(_laplacian(rate, group), 1)[0][0]) for group in groups), default=0.0)


def _modes_s(groups: Sequence[Ints]) -> float:
    """Return the seconds on a quiet core in which `_slope` or `slowest` finds the slow modes of all groups."""
    return sum(float(np.dot(MODES_S, (1, len(group), len(group) ** 2))) for group in groups)


def _laplacian(rate: Floats, group: Ints) -> Floats:
    part = rate[np.ix_(group, group)]
    return np.asarray(np.diag(part.sum(axis=1)) - part)


def _slow_vectors(rate: Floats, groups: Sequence[Ints]) -> list[Floats]:
    """Return the CUTS slowest eigenvectors of each group; their elements for peers outside the group are 0."""
    return [np.nan_to_num(vector) for _, vector in _eigenvectors(rate, groups, CUTS)]


def _eigenvectors(rate: Floats, groups: Sequence[Ints], count: int) -> Iterator[tuple[float, Floats]]:
    """Yield lambda_2 and the next eigenvalues of each group, `count` per group, each with its eigenvector.

    The elements of an eigenvector for peers outside the group are NaN.
    """
    for group in groups:
        values, columns = _slow_modes(_laplacian(rate, group), min(count, len(group) - 1))
        for value, column in zip(values, columns.T, strict=True):
            vector = np.full(len(rate), np.nan)
            vector[group] = column
            yield float(value), vector


def _slow_modes(laplacian: Floats, count: int) -> tuple[Floats, Floats]:
    """Return lambda_2 and the next eigenvalues of a Laplacian, `count` in all, and their eigenvectors as columns.

    In a large group, Lanczos' method on the inverse matrix finds them in a fraction of the time. So that the inverse
    exists, the eigenvalue of the vector of ones, 0, is first raised above lambda_2.
    """
    size = len(laplacian)
    if size > LARGE_GROUP:
        lifted = laplacian + 2 * np.trace(laplacian) / size**2
        try:
            factor = cho_factor(lifted)
            inverse = LinearOperator(laplacian.shape, matvec=lambda vector: cho_solve(factor, vector), dtype=float)
            start = np.cos(np.arange(size))
            values, columns = eigsh(inverse, k=count, which="LA", v0=start, tol=LANCZOS_TOLERANCE)
            return 1 / values[::-1], columns[:, ::-1]
        except (np.linalg.LinAlgError, ArpackNoConvergence):
            pass  # without an inverse, the group is in parts that exchange nothing: compute all eigenvalues
    values, columns = np.linalg.eigh(laplacian)
    return values[1 : 1 + count], columns[:, 1 : 1 + count]


def _slope(rate: Floats, groups: Sequence[Ints]) -> tuple[float, Floats]:
    """Return the smallest lambda_2 of all groups, and its slope for each pair: a mean over the slowest eigenvectors."""
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
    """Return the distinct groups of peers that hold a layer together; groups of one peer are left out."""
    groups = {tuple(np.flatnonzero(column)) for column in holds_NL.T}
    return [np.array(group) for group in sorted(groups) if len(group) > 1]

"""Tokens per second through given spans, and the routes that carry them: a maximum flow with compute and links.

A token is computed in layer x by some holder of x, then goes on in the same peer or moves to another holder of
x + 1; so spans may overlap, and a route may leave or enter a span anywhere (Helix, arXiv 2406.01566, generalised
from whole spans to parts). As a linear programme (HiGHS):

    y_jx   tokens/s that peer j computes in layer x
    k_jx   tokens/s that stay in j from layer x - 1 to x
    m_ijx  tokens/s that move from i, after layer x - 1, to j for layer x
    y_jx = k_jx + sum_i m_ijx  (x > 0);   y_j,x-1 = k_jx + sum_i m_jix;   maximise sum_j y_j0
    sum_x seconds_jx * y_jx <= 1                                           every second has one second
    hidden * sum_x (m_ijx + m_jix) <= link_ij - gossip_ij                  forward one way, gradients back
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.scheduler.shared.arrays import Floats, Ints
from decentral.scheduler.throughput.layer_costs import LayerCosts

Holds = NDArray[np.bool_]
FLOWS_REMEMBERED = 1024
NEAREST = 8  # of a peer's links between two layers that many peers hold


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """What the spans carry. `idle_N`: the share of time without work; `price_L`: worth of more compute there."""

    tokens_per_s: float
    computed_NL: Floats  # y
    moves: tuple[tuple[int, int, int, float], ...]  # (from, to, layer entered, tokens/s)
    idle_N: Floats
    price_L: Floats


def maximum(work: LayerCosts, spans_N2: Ints) -> MaxFlow:
    """The greatest throughput of these spans."""
    holds_NL = held(work, spans_N2)
    peer_y, layer_y = np.nonzero(holds_NL)
    stays = holds_NL[:, 1:] & holds_NL[:, :-1]
    peer_k, layer_k = np.nonzero(stays)
    layer_k = layer_k + 1
    sender, receiver, layer_m = _transfers(work, holds_NL)
    size_y, size_k, size_m = len(peer_y), len(peer_k), len(sender)
    count = size_y + size_k + size_m
    y, k, m = np.arange(size_y), size_y + np.arange(size_k), size_y + size_k + np.arange(size_m)
    peers, layers = holds_NL.shape
    inflow, outflow = layer_y > 0, layer_y < layers - 1
    row_in = np.full((peers, layers), -1)
    row_in[peer_y[inflow], layer_y[inflow]] = np.arange(inflow.sum())
    row_out = np.full((peers, layers), -1)  # by the layer that was computed
    row_out[peer_y[outflow], layer_y[outflow]] = inflow.sum() + np.arange(outflow.sum())
    rows = [row_in[peer_y[inflow], layer_y[inflow]], row_in[peer_k, layer_k], row_in[receiver, layer_m]]
    rows += [row_out[peer_y[outflow], layer_y[outflow]], row_out[peer_k, layer_k - 1], row_out[sender, layer_m - 1]]
    columns = [y[inflow], k, m, y[outflow], k, m]
    signs = [1.0, -1.0, -1.0, 1.0, -1.0, -1.0]
    values = [np.full(len(part), sign) for part, sign in zip(columns, signs, strict=True)]
    balance = _matrix(values, rows, columns, int(inflow.sum() + outflow.sum()), count)
    low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
    pairs, row_of = np.unique(low * peers + high, return_inverse=True)
    limit = link_left(work, holds_NL)[pairs // peers, pairs % peers] if size_m else np.zeros(0)
    scale = work.compute_bound()  # so that all numbers are near 1
    seconds = work.seconds_NL[peer_y, layer_y] * scale
    limits = _matrix(
        [seconds, np.full(size_m, work.hidden_bytes * scale / 1e6)], [peer_y, peers + row_of], [y, m],
        peers + len(pairs), count,
    )  # fmt: skip
    value = np.zeros(count)
    value[y[layer_y == 0]] = -1.0
    found = linprog(
        value, limits, np.concatenate((np.ones(peers), limit / 1e6)), balance, np.zeros(balance.shape[0]),
        method="highs",
    )  # fmt: skip
    assert found.status == 0, found.message
    computed = np.zeros((peers, layers))
    computed[peer_y, layer_y] = found.x[y] * scale
    moved = found.x[m] * scale
    carried = [
        (int(sender[i]), int(receiver[i]), int(layer_m[i]), float(moved[i])) for i in np.flatnonzero(moved > 1e-9)
    ]
    return MaxFlow(
        tokens_per_s=-float(found.fun) * scale,
        computed_NL=computed,
        moves=tuple(carried),
        idle_N=1 - (computed * work.seconds_NL).sum(axis=1),
        price_L=_prices(found.ineqlin.marginals[:peers], holds_NL, work.seconds_NL),
    )


@dataclass(slots=True)
class FlowSolver:
    """The flows of one task's spans. A search of a small swarm comes back to the same spans again and again."""

    work: LayerCosts
    _known: dict[bytes, MaxFlow] = field(default_factory=dict)

    def maximum(self, spans_N2: Ints) -> MaxFlow:
        """As the function of that name."""
        key = spans_N2.tobytes()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= FLOWS_REMEMBERED:
                self._known.clear()
            found = self._known[key] = maximum(self.work, spans_N2)
        return found


def held(work: LayerCosts, spans_N2: Ints) -> Holds:
    """Which peer holds which layer, N x L."""
    layer = np.arange(work.layers)
    holds: Holds = (spans_N2[:, :1] <= layer) & (layer < spans_N2[:, 1:])
    return holds


def link_left(work: LayerCosts, holds_NL: Holds) -> Floats:
    """Bytes/s between two peers, one way, that gossip of their common layers leaves."""
    holds = holds_NL.astype(np.float64)
    left: Floats = np.maximum(0.0, work.link_NN - (holds * work.snapshot_L) @ holds.T)
    return left


def routes(
    work: LayerCosts, spans_N2: Ints, flow: MaxFlow, most: int = 256
) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """The flow as routes: (share of all tokens, [(peer, first, last), ...]), widest first.

    Each step takes the widest way on; what is left after `most` routes is under one token in a thousand.
    """
    computed = flow.computed_NL.copy()
    moves = {(i, x, j): rate for i, j, x, rate in flow.moves}
    found: list[tuple[float, list[tuple[int, int, int]]]] = []
    left = flow.tokens_per_s
    while left > 1e-3 * flow.tokens_per_s and len(found) < most:
        path, width = _widest(computed, moves, work.layers)
        if width <= 1e-9 * flow.tokens_per_s:
            break
        for layer, peer in enumerate(path):
            computed[peer, layer] -= width
            if layer and path[layer - 1] != peer:
                moves[path[layer - 1], layer, peer] -= width
        cuts = [0, *(x for x in range(1, work.layers) if path[x] != path[x - 1]), work.layers]
        hops = [(path[first], first, last) for first, last in itertools.pairwise(cuts)]
        found.append((width / flow.tokens_per_s, hops))
        left -= width
    return sorted(found, key=lambda route: -route[0])


def _widest(computed: Floats, moves: dict[tuple[int, int, int], float], layers: int) -> tuple[list[int], float]:
    """One route whose narrowest part is widest (dynamic programme over the layers)."""
    peers = len(computed)
    stay = _stays(computed, moves, layers)
    width = computed[:, 0].copy()
    before = np.full((layers, peers), -1)
    by_layer: dict[int, list[tuple[int, int, float]]] = {}
    for (i, x, j), rate in moves.items():
        by_layer.setdefault(x, []).append((i, j, rate))
    for x in range(1, layers):
        after = np.minimum(width, stay[x])
        before[x] = np.arange(peers)
        for i, j, rate in by_layer.get(x, []):
            if min(width[i], rate) > after[j]:
                after[j], before[x, j] = min(width[i], rate), i
        width = np.minimum(after, computed[:, x])
    peer = int(np.argmax(width))
    path = [peer]
    for x in range(layers - 1, 0, -1):
        path.append(int(before[x, path[-1]]))
    return path[::-1], float(width[peer])


def _stays(computed: Floats, moves: dict[tuple[int, int, int], float], layers: int) -> Floats:
    """Tokens/s that stay in a peer between two layers: what it computed less what it sent away."""
    stay = np.zeros((layers, len(computed)))
    stay[1:] = computed[:, :-1].T
    for (i, x, _), rate in moves.items():
        stay[x, i] -= rate
    return np.maximum(0.0, stay)


def _transfers(work: LayerCosts, holds_NL: Holds) -> tuple[Ints, Ints, Ints]:
    """Every (sender, receiver, layer entered) that the spans and links allow.

    Where a layer has many holders, each sender and each receiver keeps its NEAREST by link only: the programme stays
    small, and what it finds is still a flow that the swarm can carry.
    """
    parts = []
    for layer in range(1, work.layers):
        senders, receivers = np.flatnonzero(holds_NL[:, layer - 1]), np.flatnonzero(holds_NL[:, layer])
        links = work.link_NN[np.ix_(senders, receivers)]
        keep = links > 0
        if min(keep.shape) > NEAREST:
            keep &= _largest(links) | _largest(links.T).T
        i, j = np.nonzero(keep)
        parts.append(np.vstack((senders[i], receivers[j], np.full(len(i), layer))))
    together = np.hstack(parts) if parts else np.zeros((3, 0), np.int64)
    return together[0], together[1], together[2]


def _largest(links: Floats) -> Holds:
    """The NEAREST largest of each row; among equal links a different choice in each row."""
    rows, columns = links.shape
    turn = (np.arange(columns)[None, :] - np.arange(rows)[:, None]) % columns
    order = np.lexsort((turn, -links), axis=1)[:, :NEAREST]
    keep = np.zeros(links.shape, dtype=np.bool_)
    np.put_along_axis(keep, order, True, axis=1)
    return keep


def _matrix(values: list[Floats], rows: list[Ints], columns: list[Ints], height: int, width: int) -> coo_matrix:
    place = (np.concatenate(rows), np.concatenate(columns))
    return coo_matrix((np.concatenate(values), place), shape=(height, width)).tocsr()


def _prices(marginal_N: Floats, holds_NL: Holds, seconds_NL: Floats) -> Floats:
    """What a layer's holders would give for more time, relative to their speed: high where a layer is scarce."""
    worth = np.maximum(0.0, -marginal_N)[:, None] / (1 / seconds_NL.sum(axis=1))[:, None]
    count = np.maximum(1, holds_NL.sum(axis=0))
    price: Floats = (worth * holds_NL).sum(axis=0) / count
    return price

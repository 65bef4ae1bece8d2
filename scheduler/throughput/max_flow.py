"""Compute the greatest flow of tokens through given spans and links (`maximum`), and its routes (`routes`).

A peer that holds layer x computes a token in layer x; then the token stays in the peer or moves to another peer that
holds layer x + 1. So spans may overlap, and a route may enter or leave a span at any layer (Helix, arXiv 2406.01566,
generalised from whole spans to parts of spans). The linear programme (HiGHS):

    y_jx   tokens/s that peer j computes in layer x
    k_jx   tokens/s that stay in peer j from layer x - 1 to x
    m_ijx  tokens/s that move from peer i, after layer x - 1, to peer j for layer x
    y_jx = k_jx + sum_i m_ijx  (x > 0);   y_j,x-1 = k_jx + sum_i m_jix;   maximise sum_j y_j0
    sum_x seconds_jx * y_jx <= 1                                           no peer computes for more than 1 s per second
    hidden * sum_x (m_ijx + m_jix) <= link_ij - gossip_ij                  forward one way, gradients back

Planners solve this programme. Running peers often solve a smaller programme without links to weight their routes
(routing.py).
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Flags, Floats, Ints

FLOWS_REMEMBERED = 1024
NEAREST = 8  # for each layer, only this many of a peer's fastest links enter the linear programme, to keep it small
LINK_UNIT = 1e6  # constraints of links are in units of this (bytes/s), as the solver needs numbers near 1

Transfer = tuple[int, int, int, float]
"""The flow from one peer to another: (sender, receiver, the layer that the receiver computes next, tokens/s)."""


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """The greatest flow of tokens through given spans."""

    tokens_per_s: float
    computed_NL: Floats  # tokens/s that each peer computes in each layer (y)
    transfers: tuple[Transfer, ...]
    idle_N: Floats  # share of each peer's time without work, 0 to 1
    price_L: Floats  # how scarce each layer is: proportional to the flow gained per speed added to its holders


@dataclass(frozen=True, slots=True, eq=False)
class _Variables:
    """The variables of the linear programme, in the order of its columns: all y, then all k, then all m."""

    holds_NL: Flags
    peer_Y: Ints
    layer_Y: Ints
    peer_K: Ints
    layer_K: Ints  # the layer that the tokens enter
    sender_M: Ints
    receiver_M: Ints
    layer_M: Ints  # the layer that the tokens enter

    @property
    def count(self) -> int:
        return len(self.peer_Y) + len(self.peer_K) + len(self.sender_M)

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Return the column numbers of all y, k and m."""
        first, second = len(self.peer_Y), len(self.peer_Y) + len(self.peer_K)
        return np.arange(first), np.arange(first, second), np.arange(second, self.count)


def maximum(costs: LayerCosts, spans_N2: Ints) -> MaxFlow:
    """Return the greatest flow through spans; a flow of 0 if the solver fails, which extreme costs may cause."""
    holds_NL = held(costs, spans_N2)
    peer_Y, layer_Y = np.nonzero(holds_NL)
    peer_K, layer_K = np.nonzero(holds_NL[:, 1:] & holds_NL[:, :-1])
    sender_M, receiver_M, layer_M = _transfers(costs, holds_NL)
    flow = _Variables(holds_NL, peer_Y, layer_Y, peer_K, layer_K + 1, sender_M, receiver_M, layer_M)
    scale = costs.compute_bound()  # rates are in units of this, as the solver needs numbers near 1
    balance, (use, limits) = _balance(flow), _capacities(costs, flow, scale)
    y, _, m = flow.columns()
    value = np.zeros(flow.count)
    value[y[flow.layer_Y == 0]] = -1.0
    found = linprog(value, use, limits, balance, np.zeros(balance.shape[0]), method="highs")
    if found.status != 0:
        return _nothing(costs)
    computed_NL = np.zeros(holds_NL.shape)
    computed_NL[flow.peer_Y, flow.layer_Y] = found.x[y] * scale
    moved = found.x[m] * scale
    return MaxFlow(
        tokens_per_s=-float(found.fun) * scale,
        computed_NL=computed_NL,
        transfers=tuple(
            (int(flow.sender_M[i]), int(flow.receiver_M[i]), int(flow.layer_M[i]), float(moved[i]))
            for i in np.flatnonzero(moved > 1e-9)
        ),
        idle_N=1 - (computed_NL * costs.seconds_NL).sum(axis=1),
        price_L=_prices(found.ineqlin.marginals[: costs.peers], holds_NL, costs.seconds_NL),
    )


def _nothing(costs: LayerCosts) -> MaxFlow:
    """Return a flow of 0, in which every peer is idle."""
    return MaxFlow(0.0, np.zeros(costs.seconds_NL.shape), (), np.ones(costs.peers), np.zeros(costs.layers))


def _balance(flow: _Variables) -> coo_matrix:
    """Return constraints for each peer and layer: tokens that enter = tokens computed = tokens that leave."""
    enters, leaves = flow.layer_Y > 0, flow.layer_Y < flow.holds_NL.shape[1] - 1
    row_in = np.full(flow.holds_NL.shape, -1)
    row_in[flow.peer_Y[enters], flow.layer_Y[enters]] = np.arange(enters.sum())
    row_out = np.full(flow.holds_NL.shape, -1)  # (peer, layer that tokens leave) -> row of the constraint
    row_out[flow.peer_Y[leaves], flow.layer_Y[leaves]] = enters.sum() + np.arange(leaves.sum())
    rows = [
        row_in[flow.peer_Y[enters], flow.layer_Y[enters]],
        row_in[flow.peer_K, flow.layer_K],
        row_in[flow.receiver_M, flow.layer_M],
        row_out[flow.peer_Y[leaves], flow.layer_Y[leaves]],
        row_out[flow.peer_K, flow.layer_K - 1],
        row_out[flow.sender_M, flow.layer_M - 1],
    ]
    y, k, m = flow.columns()
    columns = [y[enters], k, m, y[leaves], k, m]
    signs = [1.0, -1.0, -1.0, 1.0, -1.0, -1.0]
    values = [np.full(len(part), sign) for part, sign in zip(columns, signs, strict=True)]
    return _matrix(values, rows, columns, int(enters.sum() + leaves.sum()), flow.count)


def _capacities(costs: LayerCosts, flow: _Variables, scale: float) -> tuple[coo_matrix, Floats]:
    """Return the constraints as rows and upper bounds: the time of each of N peers, then the rate of each link."""
    peers = costs.peers
    low, high = np.minimum(flow.sender_M, flow.receiver_M), np.maximum(flow.sender_M, flow.receiver_M)
    pairs, row_of = np.unique(low * peers + high, return_inverse=True)
    limit = link_left(costs, flow.holds_NL)[pairs // peers, pairs % peers] if len(low) else np.zeros(0)
    seconds = costs.seconds_NL[flow.peer_Y, flow.layer_Y] * scale
    y, _, m = flow.columns()
    load = np.full(len(low), costs.hidden_bytes * scale / LINK_UNIT)
    use = _matrix([seconds, load], [flow.peer_Y, peers + row_of], [y, m], peers + len(pairs), flow.count)
    return use, np.concatenate((np.ones(peers), limit / LINK_UNIT))


@dataclass(slots=True)
class FlowSolver:
    """Computes flows with a cache, for searches that evaluate the same spans several times."""

    costs: LayerCosts
    _known: dict[bytes, MaxFlow] = field(default_factory=dict)

    def maximum(self, spans_N2: Ints) -> MaxFlow:
        """Return the greatest flow through spans, from the cache or by the function `maximum`."""
        key = spans_N2.tobytes()
        if key not in self._known:
            if len(self._known) >= FLOWS_REMEMBERED:
                self._known.clear()
            self._known[key] = maximum(self.costs, spans_N2)
        return self._known[key]


def held(costs: LayerCosts, spans_N2: Ints) -> Flags:
    """Return an N x L array of flags: whether each peer's span includes each layer."""
    layer = np.arange(costs.layers)
    return np.asarray((spans_N2[:, :1] <= layer) & (layer < spans_N2[:, 1:]))


def link_left(costs: LayerCosts, holds_NL: Flags) -> Floats:
    """Return the bytes/s, [N, N], that gossip of common layers leaves free on each link, in each direction."""
    holds = holds_NL.astype(np.float64)
    return np.asarray(np.maximum(0.0, costs.link_NN - (holds * costs.snapshot_L) @ holds.T))


def routes(flow: MaxFlow, most: int = 256) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """Split a flow into routes, and return the routes with the largest share of tokens first.

    Args:
        flow: A flow that `maximum` has returned.
        most: Largest number of routes.

    Returns:
        (share of all tokens, [(peer, first, last), ...]) of each route, with layers [first, last) of each peer. The
        shares sum to at least 0.999, unless `most` routes are too few.
    """
    computed = flow.computed_NL.copy()
    transfers = {(i, x, j): rate for i, j, x, rate in flow.transfers}
    found: list[tuple[float, list[tuple[int, int, int]]]] = []
    left = flow.tokens_per_s
    while left > 1e-3 * flow.tokens_per_s and len(found) < most:
        path, width = _widest(computed, transfers)
        if width <= 1e-9 * flow.tokens_per_s:
            break
        for layer, peer in enumerate(path):
            computed[peer, layer] -= width
            if layer and path[layer - 1] != peer:
                transfers[path[layer - 1], layer, peer] -= width
        cuts = [0, *(x for x in range(1, len(path)) if path[x] != path[x - 1]), len(path)]
        hops = [(path[first], first, last) for first, last in itertools.pairwise(cuts)]
        found.append((width / flow.tokens_per_s, hops))
        left -= width
    return sorted(found, key=lambda route: -route[0])


def _widest(computed: Floats, transfers: dict[tuple[int, int, int], float]) -> tuple[list[int], float]:
    """Return the route with the most tokens/s, as the peer of each layer, and its rate, by dynamic programming."""
    peers, layers = computed.shape
    stay = np.zeros((layers, peers))  # tokens/s that a peer passes to its own next layer
    stay[1:] = computed[:, :-1].T
    width = computed[:, 0].copy()
    before = np.full((layers, peers), -1)
    by_layer: dict[int, list[tuple[int, int, float]]] = {}
    for (i, x, j), rate in transfers.items():
        by_layer.setdefault(x, []).append((i, j, rate))
        stay[x, i] -= rate
    for x in range(1, layers):
        after = np.minimum(width, np.maximum(0.0, stay[x]))
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


def _transfers(costs: LayerCosts, holds_NL: Flags) -> tuple[Ints, Ints, Ints]:
    """Return all transfers that spans and links allow, as three arrays: sender, receiver, layer that tokens enter.

    If many transfers enter a layer, only the NEAREST fastest links of each sender and receiver are returned. The flow
    found may then be lower than the greatest flow, but the swarm can always carry it.
    """
    parts = []
    for layer in range(1, costs.layers):
        senders, receivers = np.flatnonzero(holds_NL[:, layer - 1]), np.flatnonzero(holds_NL[:, layer])
        links = costs.link_NN[np.ix_(senders, receivers)]
        keep = links > 0
        if min(keep.shape) > NEAREST:
            keep &= _largest(links) | _largest(links.T).T
        i, j = np.nonzero(keep)
        parts.append(np.vstack((senders[i], receivers[j], np.full(len(i), layer))))
    together = np.hstack(parts) if parts else np.zeros((3, 0), np.int64)
    return together[0], together[1], together[2]


def _largest(links: Floats) -> Flags:
    """Return a mask of the NEAREST largest entries of each row; among equal entries, each row prefers other columns."""
    rows, columns = links.shape
    turn = (np.arange(columns)[None, :] - np.arange(rows)[:, None]) % columns
    order = np.lexsort((turn, -links), axis=1)[:, :NEAREST]
    keep = np.zeros(links.shape, dtype=np.bool_)
    np.put_along_axis(keep, order, True, axis=1)
    return keep


def _matrix(values: list[Floats], rows: list[Ints], columns: list[Ints], height: int, width: int) -> coo_matrix:
    place = (np.concatenate(rows), np.concatenate(columns))
    return coo_matrix((np.concatenate(values), place), shape=(height, width)).tocsr()


def _prices(marginal_N: Floats, holds_NL: Flags, seconds_NL: Floats) -> Floats:
    """Return MaxFlow.price_L; minus `marginal_N` is the flow gained per second of time that is added to each peer."""
    worth = np.maximum(0.0, -marginal_N)[:, None] / (1 / seconds_NL.sum(axis=1))[:, None]
    return np.asarray((worth * holds_NL).sum(axis=0) / np.maximum(1, holds_NL.sum(axis=0)))

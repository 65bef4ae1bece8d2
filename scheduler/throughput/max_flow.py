"""Compute the maximum flow of tokens through given spans and links (`maximum`), with the fewest bytes on links.

A peer that holds layer x computes a token in layer x; then the token stays in the peer or moves to another peer that
holds layer x + 1. So spans may overlap, and a route may enter or leave a span at any layer (Helix, arXiv 2406.01566,
generalised from whole spans to parts of spans). The linear programme (HiGHS):

    y_jx   tokens/s that peer j computes in layer x
    k_jx   tokens/s that stay in peer j from layer x - 1 to x
    m_ijx  tokens/s that move from peer i, after layer x - 1, to peer j for layer x
    y_jx = k_jx + sum_i m_ijx  (x > 0);   y_j,x-1 = k_jx + sum_i m_jix
    sum_x seconds_jx * y_jx <= 1                            no peer computes for more than 1 s per second
    hidden * sum_ix (m_ijx + m_jix) <= left_j               a peer's uplink; its downlink carries as much
    the same for the pairs (i, j) with one end in a site: its shared link; for one pair: the link between i and j
    maximise sum_j y_j0 - MOVE_COST * sum of detour_ij * m_ijx

Activations travel one way and gradients of the same size back. `left` are the bytes/s that gossip leaves
(link_limits.py). To keep the programme small, interchangeable peers with the same span (peer_kinds.py) count as one
peer; and transfers from or to peers whose links only their access limits (`access_limited`) go through two pools, one
for what such peers send to all peers, one for what the others send to them. If access alone limits all links, layers
with the same holders count as one layer. Otherwise a third peer may compute such a layer, to pass by a slow link.

Planners solve this programme. Running peers often solve a smaller programme without links to weight their routes
(routing.py). routes.py splits a flow into routes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from decentral.scheduler.throughput import link_limits
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.peer_kinds import access_limited, kinds
from decentral.scheduler.throughput.sparse_rows import SparseRows
from decentral.scheduler.topology.arrays import Flags, Floats, Ints
from decentral.scheduler.topology.search_budget import SearchProgress, programme_s

FLOWS_REMEMBERED = 1024
NEAREST = 8  # for each layer, only this many of a peer's fastest links enter the linear programme, to keep it small
MOVE_COST = 1e-4  # cost of moving a token/s over a fast link, in tokens/s of throughput; a slow link costs twice that
LEAST_LINK = 1e-7  # a link that can carry at most this share of the flow's bound is left out: the solver takes it for 0
# With more variables than this, interior points (and a crossover to a vertex) take a third of the simplex's time.
LARGE_PROGRAMME = 5_000
LARGE_S = 2.8e-8  # seconds of interior points on a quiet core, for each nonzero entry to the power of 1.5
MADE_S, TRANSFER_S = 2e-3, 1e-4  # seconds on a quiet core to make a programme, and to split a transfer into routes

Transfer = tuple[int, int, int, float]
"""The flow from one peer to another: (sender, receiver, the layer that the receiver computes next, tokens/s)."""


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """The maximum flow of tokens through given spans."""

    tokens_per_s: float
    computed_NL: Floats  # tokens/s that each peer computes in each layer (y)
    transfers: tuple[Transfer, ...]
    idle_N: Floats  # share of each peer's time without work, 0 to 1
    price_L: Floats  # how scarce each layer is: proportional to the flow gained per speed added to its holders

    def bytes_between(self, hidden_bytes: float) -> Floats:
        """Return the bytes/s between each two peers, (N, N), in each direction: activations and gradients.

        Args:
            hidden_bytes: Bytes of one token's activations between two layers, one way.
        """
        sent_NN = np.zeros((len(self.idle_N), len(self.idle_N)))
        for sender, receiver, _, rate in self.transfers:
            sent_NN[sender, receiver] += hidden_bytes * rate
            sent_NN[receiver, sender] += hidden_bytes * rate
        return sent_NN


def maximum(costs: LayerCosts, spans_N2: Ints, progress: SearchProgress | None = None) -> MaxFlow:
    """Return the maximum flow through spans; a flow of 0 if the solver fails, or the search lacks time for it.

    Args:
        costs: What layers cost each peer.
        spans_N2: Each peer's layers.
        progress: The search in which the work counts, with that of routes, which is expected to follow.
    """
    holds_NL = held(costs, spans_N2)
    speed_L = (holds_NL / costs.seconds_NL).sum(axis=0)
    scale = min(float(speed_L.min()), costs.compute_bound())  # the unit of rates: the solver needs numbers near 1
    if not 0 < scale < np.inf:
        return _nothing(costs)
    programme = _Programme(costs, spans_N2, holds_NL, scale)
    options = {}
    if progress is not None and progress.best < np.inf:
        if progress.lacks(programme.solving_s(0)):
            return _nothing(costs)
        options = {"time_limit": progress.clock_left_s()}
    found = linprog(
        programme.cost,
        programme.use,
        programme.limits,
        programme.balance,
        programme.zeros,
        method="highs-ipm" if programme.width > LARGE_PROGRAMME else "highs",
        options=options,
    )
    if progress is not None:
        progress.count(programme.solving_s(found.nit))
    if found.status != 0:
        return _nothing(costs)
    rates = np.maximum(0.0, found.x) * scale
    computed_NL = programme.computed(rates)
    transfers = tuple(programme.transfers(rates))
    if progress is not None:
        progress.count(TRANSFER_S * len(transfers))
    price_C = -found.ineqlin.marginals[: programme.groups.count]
    return MaxFlow(
        tokens_per_s=float(computed_NL[:, 0].sum()),
        computed_NL=computed_NL,
        transfers=transfers,
        idle_N=1 - (computed_NL * costs.seconds_NL).sum(axis=1),
        price_L=_prices(np.append(price_C, 0.0)[programme.groups.number_N], holds_NL, costs.seconds_NL),
    )


def _nothing(costs: LayerCosts) -> MaxFlow:
    """Return a flow of 0, in which every peer is idle."""
    return MaxFlow(0.0, np.zeros(costs.seconds_NL.shape), (), np.ones(costs.peers), np.zeros(costs.layers))


def together(costs: LayerCosts, parts: Sequence[tuple[Ints, MaxFlow]]) -> MaxFlow:
    """Return the flow of the whole swarm in which tokens stay within groups of peers, from each group's own flow.

    Args:
        costs: What layers cost all N peers.
        parts: Each group's peer indices, and the flow of `costs.of_peers(group)`. No two groups share a site.
    """
    computed_NL, idle_N = np.zeros((costs.peers, costs.layers)), np.ones(costs.peers)
    price_L, transfers = np.zeros(costs.layers), list[Transfer]()
    for peers_G, flow in parts:
        computed_NL[peers_G], idle_N[peers_G] = flow.computed_NL, flow.idle_N
        price_L += flow.price_L
        names = peers_G.tolist()
        transfers += [(names[i], names[j], layer, rate) for i, j, layer, rate in flow.transfers]
    return MaxFlow(float(computed_NL[:, 0].sum()), computed_NL, tuple(transfers), idle_N, price_L)


@dataclass(slots=True)
class FlowSolver:
    """A cache of maximum flows through spans, for searches that evaluate the same spans several times."""

    costs: LayerCosts
    _known: dict[bytes, MaxFlow] = field(default_factory=dict)

    def maximum(self, spans_N2: Ints, progress: SearchProgress | None = None) -> MaxFlow:
        """Return the maximum flow through spans, from the cache or computed by the function `maximum`."""
        known = self._known.get(spans_N2.tobytes())
        if known is None:
            known = maximum(self.costs, spans_N2, progress)
            if known.tokens_per_s > 0:
                self.keep(spans_N2, known)
        return known

    def keep(self, spans_N2: Ints, flow: MaxFlow) -> None:
        """Put a flow through spans into the cache."""
        if len(self._known) >= FLOWS_REMEMBERED:
            self._known.clear()
        self._known[spans_N2.tobytes()] = flow


def held(costs: LayerCosts, spans_N2: Ints) -> Flags:
    """Return an N x L array of flags: whether each peer's span includes each layer."""
    layer = np.arange(costs.layers)
    return np.asarray((spans_N2[:, :1] <= layer) & (layer < spans_N2[:, 1:]))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """The C groups of interchangeable peers with the same span, and the P parts of consecutive layers."""

    number_N: Ints  # each peer's group; -1: the peer holds no layer
    first_C: Ints  # one peer of each group
    size_C: Ints
    cuts: Ints  # P + 1 layers: part p has the layers [cuts[p], cuts[p + 1])
    holds_CP: Flags

    @property
    def count(self) -> int:
        return len(self.first_C)

    def members(self, group: int) -> Ints:
        return np.flatnonzero(self.number_N == group)


def _grouped(costs: LayerCosts, spans_N2: Ints) -> _Groups:
    busy = np.flatnonzero(spans_N2[:, 0] < spans_N2[:, 1])
    rows = np.column_stack((kinds(costs)[busy], spans_N2[busy]))
    _, first, number, size = np.unique(rows, axis=0, return_index=True, return_inverse=True, return_counts=True)
    number_N = np.full(costs.peers, -1)
    number_N[busy] = number.ravel()
    merged = access_limited(costs)[busy].all()
    cuts = np.unique(np.append(spans_N2[busy], (0, costs.layers))) if merged else np.arange(costs.layers + 1)
    first_C = busy[first]
    spans_C2 = spans_N2[first_C]
    holds_CP = (spans_C2[:, :1] <= cuts[:-1]) & (cuts[:-1] < spans_C2[:, 1:])
    return _Groups(number_N, first_C, size, cuts, holds_CP)


class _Programme:
    """The linear programme for given spans. Cut c, a number from 1 to P - 1, is the boundary before part c.

    Its columns, in order: y (group, part); k (group, cut); m (sender, receiver, cut), both groups; o and i
    (group, cut, pool), the tokens/s that groups send to a pool and receive from it; leave and enter (site, cut, pool),
    the tokens/s that a site's peers together send to other peers, or receive. Rates are sums over a group's peers.
    """

    def __init__(self, costs: LayerCosts, spans_N2: Ints, holds_NL: Flags, scale: float) -> None:
        self.costs, self.scale, self.groups = costs, scale, _grouped(costs, spans_N2)
        groups = self.groups
        holds = groups.holds_CP
        self.site_C = costs.site_N[groups.first_C]
        self.pooled_C = access_limited(costs)[groups.first_C]
        self.peer_left_C = link_limits.peer_left(costs, holds_NL)[groups.first_C]
        self.pair_left_CC = link_limits.pair_left(costs, groups.first_C)
        self.site_left_Z = link_limits.site_left(costs)
        self.group_Y, self.part_Y = np.nonzero(holds)
        self.group_K, cut_K = np.nonzero(holds[:, 1:] & holds[:, :-1])
        self.cut_K = cut_K + 1
        self.sender_M, self.receiver_M, self.cut_M = self._pairs()
        able_C = self._carries(self.peer_left_C) & self.pooled_C.any()
        from_pool_C2 = np.column_stack((able_C, able_C & self.pooled_C & ~self.pooled_C.all()))
        self.group_O, self.cut_O = np.nonzero(holds[:, :-1] & able_C[:, None])
        self.pool_O = 1 - self.pooled_C[self.group_O].astype(np.int64)
        self.group_I, self.cut_I, self.pool_I = np.nonzero(holds[:, 1:, None] & from_pool_C2[:, None, :])
        self.cut_O, self.cut_I = self.cut_O + 1, self.cut_I + 1
        self.sites, self.cuts = len(costs.site_rate_Z), holds.shape[1] - 1
        crossing = np.indices((self.sites, self.cuts, 2)).reshape(3, -1)
        self.site_S, self.cut_S, self.pool_S = crossing[0], crossing[1] + 1, crossing[2]
        sizes = [len(part) for part in (self.group_Y, self.group_K, self.cut_M, self.group_O, self.group_I)]
        sizes += [len(self.site_S), len(self.site_S)]
        self.width = sum(sizes)
        self.y, self.k, self.m, self.o, self.i, self.leave, self.enter = np.split(
            np.arange(self.width), np.cumsum(sizes)[:-1]
        )
        self.cost = np.zeros(self.width)
        self.cost[self.y[self.part_Y == 0]] = -1.0
        self.cost[self.m] = MOVE_COST * self._detours(groups.first_C)[self.sender_M, self.receiver_M]
        self.cost[self.o] = MOVE_COST
        self.use, self.limits = self._capacities()
        self.balance = self._balance()
        self.zeros = np.zeros(self.balance.shape[0])

    def solving_s(self, iterations: int) -> float:
        """Return the seconds in which this programme is made and solved in so many iterations on a quiet core."""
        nonzeros, large = int(self.use.nnz + self.balance.nnz), self.width > LARGE_PROGRAMME
        return MADE_S + (LARGE_S * float(nonzeros) ** 1.5 if large else programme_s(nonzeros, iterations))

    def _carries(self, left: Floats) -> Flags:
        """Return whether this many bytes/s can carry more than the share LEAST_LINK of the flow's bound."""
        return np.asarray(left > LEAST_LINK * self.scale * self.costs.hidden_bytes)

    def _detours(self, peers_C: Ints) -> Floats:
        """Return the cost of a transfer between two groups, (C, C): 1 over a very fast link, 2 over the slowest one."""
        link_CC = self.costs.link_NN[np.ix_(peers_C, peers_C)]
        slowest = link_CC.min(initial=np.inf, where=link_CC > 0)
        return np.asarray(1 + np.divide(slowest, link_CC, out=np.ones_like(link_CC), where=link_CC > 0))

    def _pairs(self) -> tuple[Ints, Ints, Ints]:
        """Return sender, receiver and cut of each m; at a cut of many groups, use each one's NEAREST best links."""
        holds, left_CC = self.groups.holds_CP, self.pair_left_CC
        separate_CC = ~(self.pooled_C[:, None] | self.pooled_C[None, :])
        np.fill_diagonal(separate_CC, False)
        able = self._carries(self.peer_left_C)
        usable = separate_CC & self._carries(left_CC) & able[:, None] & able[None, :]
        sends_XC, takes_XC = holds[:, :-1].T, holds[:, 1:].T
        many_X = np.minimum(sends_XC.sum(axis=1), takes_XC.sum(axis=1)) > NEAREST
        few = np.flatnonzero(~many_X)
        at, sender, receiver = np.nonzero(usable & sends_XC[few, :, None] & takes_XC[few, None, :])
        parts = [np.stack((sender, receiver, few[at] + 1))]
        for cut in np.flatnonzero(many_X).tolist():
            senders, receivers = np.flatnonzero(sends_XC[cut]), np.flatnonzero(takes_XC[cut])
            grid = np.ix_(senders, receivers)
            links = np.where(usable[grid], left_CC[grid], 0.0)
            i, j = np.nonzero(usable[grid] & (_largest(links) | _largest(links.T).T))
            parts.append(np.stack((senders[i], receivers[j], np.full(len(i), cut + 1))))
        together = np.hstack(parts)
        return together[0], together[1], together[2]

    def _capacities(self) -> tuple[csr_matrix, Floats]:
        """Return the rows and upper bounds of all limits: groups' time, peers' links, sites' links, links of pairs."""
        costs, groups, rows = self.costs, self.groups, SparseRows()
        size_C, load = groups.size_C.astype(np.float64), costs.hidden_bytes * self.scale
        before = np.concatenate((np.zeros((costs.peers, 1)), np.cumsum(costs.seconds_NL, axis=1)), axis=1)
        seconds_CP = np.diff(before[groups.first_C][:, groups.cuts], axis=1)
        time = rows.reserve(groups.count)
        rows.add(time + self.group_Y, self.y, seconds_CP[self.group_Y, self.part_Y] * self.scale)
        link = rows.reserve(groups.count)
        weight_C = load / np.maximum(self.peer_left_C, LEAST_LINK * load)
        for group, columns in (
            (self.sender_M, self.m),
            (self.receiver_M, self.m),
            (self.group_O, self.o),
            (self.group_I, self.i),
        ):
            rows.add(link + group, columns, weight_C[group])
        site = rows.reserve(len(self.site_left_Z))
        weight_Z = load / np.maximum(self.site_left_Z, LEAST_LINK * load)
        for own, other in ((self.sender_M, self.receiver_M), (self.receiver_M, self.sender_M)):
            crosses = (self.site_C[own] >= 0) & (self.site_C[own] != self.site_C[other])
            site_of = self.site_C[own][crosses]
            rows.add(site + site_of, self.m[crosses], weight_Z[site_of])
        for columns in (self.leave, self.enter):
            rows.add(site + self.site_S, columns, weight_Z[self.site_S])
        low, high = np.minimum(self.sender_M, self.receiver_M), np.maximum(self.sender_M, self.receiver_M)
        pairs, row_of = np.unique(low * groups.count + high, return_inverse=True)
        pair = rows.reserve(len(pairs))
        rows.add(pair + row_of.ravel(), self.m, load / self.pair_left_CC[low, high])
        a, b = pairs // groups.count, pairs % groups.count
        limits = (size_C, size_C, np.ones(len(self.site_left_Z)), size_C[a] * size_C[b])
        return rows.matrix(self.width), np.concatenate(limits)

    def _balance(self) -> csr_matrix:
        """Return the rows that must be 0: tokens enter a part, are computed and leave; pools send what they receive."""
        groups, rows = self.groups, SparseRows()
        parts = groups.holds_CP.shape[1]
        row_in, row_out = np.full(groups.holds_CP.shape, -1), np.full(groups.holds_CP.shape, -1)
        enters, leaves = self.part_Y > 0, self.part_Y < parts - 1
        row_in[self.group_Y[enters], self.part_Y[enters]] = np.arange(enters.sum())
        row_out[self.group_Y[leaves], self.part_Y[leaves]] = enters.sum() + np.arange(leaves.sum())
        rows.reserve(int(enters.sum() + leaves.sum()))
        rows.add(row_in[self.group_Y[enters], self.part_Y[enters]], self.y[enters], 1.0)
        rows.add(row_in[self.group_K, self.cut_K], self.k, -1.0)
        rows.add(row_in[self.receiver_M, self.cut_M], self.m, -1.0)
        rows.add(row_in[self.group_I, self.cut_I], self.i, -1.0)
        rows.add(row_out[self.group_Y[leaves], self.part_Y[leaves]], self.y[leaves], 1.0)
        rows.add(row_out[self.group_K, self.cut_K - 1], self.k, -1.0)
        rows.add(row_out[self.sender_M, self.cut_M - 1], self.m, -1.0)
        rows.add(row_out[self.group_O, self.cut_O - 1], self.o, -1.0)
        first = rows.reserve((self.sites + 1) * self.cuts * 2)  # a row for each site, cut and pool
        rows.add(first + self._pool_row(self.site_C[self.group_O], self.cut_O, self.pool_O), self.o, 1.0)
        rows.add(first + self._pool_row(self.site_C[self.group_I], self.cut_I, self.pool_I), self.i, -1.0)
        for columns, sign in ((self.leave, 1.0), (self.enter, -1.0)):
            rows.add(first + self._pool_row(self.site_S, self.cut_S, self.pool_S), columns, -sign)
            rows.add(first + self._pool_row(-1, self.cut_S, self.pool_S), columns, sign)
        return rows.matrix(self.width)

    def _pool_row(self, site: Ints | int, cut: Ints, pool: Ints) -> Ints:
        """Return the number of the row of a site (-1: peers without a site), a cut and a pool."""
        return np.asarray(((site % (self.sites + 1)) * self.cuts + cut - 1) * 2 + pool)

    def computed(self, rates: Floats) -> Floats:
        """Return the tokens/s that each peer computes in each layer, (N, L); the peers of a group compute equally."""
        groups = self.groups
        own_CP: Floats = np.zeros(groups.holds_CP.shape)
        own_CP[self.group_Y, self.part_Y] = rates[self.y] / groups.size_C[self.group_Y]
        part_L = np.searchsorted(groups.cuts, np.arange(self.costs.layers), side="right") - 1
        with_idle = np.vstack((own_CP, np.zeros((1, own_CP.shape[1]))))
        return np.asarray(with_idle[np.ix_(groups.number_N, part_L)])

    def transfers(self, rates: Floats) -> Iterator[Transfer]:
        """Yield the transfers between single peers."""
        least = 1e-9 * self.scale
        members = [self.groups.members(group).tolist() for group in range(self.groups.count)]
        yield from self._between_groups(rates, members, least)
        if not len(self.o):
            return
        for cut, pool in itertools.product(range(1, self.cuts + 1), range(2)):
            gives = self._by_peer(rates[self.o], self.group_O, (self.cut_O == cut) & (self.pool_O == pool), members)
            takes = self._by_peer(rates[self.i], self.group_I, (self.cut_I == cut) & (self.pool_I == pool), members)
            layer = int(self.groups.cuts[cut])
            yield from ((i, j, layer, rate) for i, j, rate in self._from_pool(gives, takes, least))

    def _by_peer(self, rates: Floats, group: Ints, chosen: Flags, members: Sequence[list[int]]) -> dict[int, float]:
        """Return each peer's equal part of its group's tokens/s in the columns `chosen`, without peers that have 0."""
        found = zip(group[chosen].tolist(), rates[chosen].tolist(), strict=True)
        return {peer: rate / len(members[one]) for one, rate in found if rate > 0 for peer in members[one]}

    def _between_groups(self, rates: Floats, members: Sequence[list[int]], least: float) -> Iterator[Transfer]:
        """Yield transfers between peers of two groups; a sender has as few receivers as links between peers allow."""
        found: dict[tuple[int, int], list[tuple[int, int, int, float]]] = {}
        for column in np.flatnonzero(rates[self.m] > least):
            i, j = int(self.sender_M[column]), int(self.receiver_M[column])
            layer, rate = int(self.groups.cuts[self.cut_M[column]]), float(rates[self.m][column])
            found.setdefault((min(i, j), max(i, j)), []).append((i, j, layer, rate))
        for (low, high), moves in found.items():
            few: list[Transfer] = []
            used: dict[tuple[int, int], float] = {}
            for i, j, layer, rate in moves:
                gives = [(peer, rate / len(members[i])) for peer in members[i]]
                takes = [(peer, rate / len(members[j])) for peer in members[j]]
                for sender, receiver, part in _matched(gives, takes, least):
                    few.append((sender, receiver, layer, part))
                    pair = min(sender, receiver), max(sender, receiver)
                    used[pair] = used.get(pair, 0.0) + part
            if max(used.values(), default=0.0) * self.costs.hidden_bytes <= self.pair_left_CC[low, high] * (1 + 1e-9):
                yield from few
                continue
            for i, j, layer, rate in moves:
                part = rate / len(members[i]) / len(members[j])
                yield from ((sender, receiver, layer, part) for sender in members[i] for receiver in members[j])

    def _from_pool(
        self, gives: dict[int, float], takes: dict[int, float], least: float
    ) -> Iterator[tuple[int, int, float]]:
        """Yield (sender, receiver, tokens/s) of one cut's pool; within each site first."""
        for peer in gives.keys() & takes.keys():  # what a peer would send to itself, it keeps
            own = min(gives[peer], takes[peer])
            gives[peer] -= own
            takes[peer] -= own
        for site in [*range(len(self.site_left_Z)), None]:
            inside = [
                [(peer, rate) for peer, rate in side.items() if site is None or self.costs.site_N[peer] == site]
                for side in (gives, takes)
            ]
            for i, j, rate in _matched(inside[0], inside[1], least):
                gives[i] -= rate
                takes[j] -= rate
                yield i, j, rate


def _matched(
    gives: Sequence[tuple[int, float]], takes: Sequence[tuple[int, float]], least: float
) -> Iterator[tuple[int, int, float]]:
    """Match givers with takers in order, and yield (giver, taker, amount); amounts of at most `least` count as 0."""
    taking = iter(takes)
    taker, free = next(taking, (-1, 0.0))
    for giver, amount in gives:
        left = amount
        while taker >= 0 and left > least:
            part = min(left, free)
            if part > least:
                yield giver, taker, part
            left, free = left - part, free - part
            if free <= least:
                taker, free = next(taking, (-1, 0.0))


def _largest(links: Floats) -> Flags:
    """Return a mask of the NEAREST largest entries of each row; among equal entries, each row prefers other columns."""
    rows, columns = links.shape
    turn = (np.arange(columns)[None, :] - np.arange(rows)[:, None]) % columns
    order = np.lexsort((turn, -links), axis=1)[:, :NEAREST]
    keep = np.zeros(links.shape, dtype=np.bool_)
    np.put_along_axis(keep, order, True, axis=1)
    return keep


def _prices(marginal_N: Floats, holds_NL: Flags, seconds_NL: Floats) -> Floats:
    """Return MaxFlow.price_L; `marginal_N` is the flow gained per second of time that is added to each peer."""
    worth = np.maximum(0.0, marginal_N)[:, None] / (1 / seconds_NL.sum(axis=1))[:, None]
    return np.asarray((worth * holds_NL).sum(axis=0) / np.maximum(1, holds_NL.sum(axis=0)))

"""Find the optimal spans of a small swarm by one mixed-integer programme (HiGHS). Start reading at `best_spans`.

The programme is the linear programme of max_flow.py plus binary variables, which choose at most one span for each peer;
a peer computes only the layers of its span, and gossip about its span takes a part of its uplink. Where the peers'
access alone limits all links, tokens pass through a pool, so that no variable is needed for each pair of peers.
"""

from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from decentral.scheduler.throughput import link_limits
from decentral.scheduler.throughput.layer_costs import LayerCosts, reaches
from decentral.scheduler.throughput.max_flow import MOVE_COST
from decentral.scheduler.throughput.peer_kinds import access_limited
from decentral.scheduler.topology.arrays import Ints

SOLVER_S = 600.0
# Seconds on a quiet core to prepare the search, and for each of its nodes, for each (peer, span) pair.
ROOT_S, NODE_S = 8e-3, 6e-5
GAP = 1e-7  # share of the optimum by which the best spans may still fall short of the bound when the solver ends


def options(costs: LayerCosts) -> int:
    """Return the number of binary variables: the (peer, span) pairs that may fit into the peers' memories."""
    return int((reaches(costs) - np.arange(costs.layers)).sum())


def nodes_within(costs: LayerCosts, seconds: float) -> int:
    """Return how many branch-and-bound nodes the solver visits in so many seconds of a quiet core, about; 0 if none."""
    pairs = options(costs)
    return max(0, int((seconds / pairs - ROOT_S) / NODE_S))


def best_spans(costs: LayerCosts, seconds: float = SOLVER_S, nodes: int | None = None) -> Ints | None:
    """Return the best spans_N2 found within the limits; None if the solver finds no valid spans.

    Args:
        costs: What layers cost each peer.
        seconds: Limit of the solver's time by the clock; SOLVER_S at most.
        nodes: Limit of the solver's branch-and-bound nodes, so that equal swarms get equal spans on any machine.
    """
    model = _Model(costs)
    limits: dict[str, float] = {"time_limit": min(seconds, SOLVER_S), "mip_rel_gap": GAP}
    if nodes is not None:
        limits["node_limit"] = nodes
    found = milp(model.value, integrality=model.integer, bounds=model.bounds, constraints=model.rules(), options=limits)
    if found.x is None:
        return None
    spans = np.zeros((costs.peers, 2), np.int64)
    for number, (peer, first, last) in enumerate(model.choices):
        if found.x[number] > 0.5:
            spans[peer] = first, last
    return spans


def _choices(costs: LayerCosts) -> Iterator[tuple[int, int, int]]:
    for peer, reach_L in enumerate(reaches(costs).tolist()):
        for first, reach in enumerate(reach_L):
            for last in range(first + 1, reach + 1):
                if costs.fits(peer, first, last):
                    yield peer, first, last


class _Model:
    """The programme's columns and rows.

    Columns, in order: z (a possible span of a peer: 1 if chosen), y and k (peer, layer), m (sender, receiver, layer).
    max_flow.py defines y, k and m. The pool is sender and receiver number N.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        peers, layers = costs.peers, costs.layers
        self.choices = list(_choices(costs))
        self.pooled = bool(access_limited(costs).all() and (costs.site_N < 0).all())
        linked_NN = np.argwhere(np.triu(costs.link_NN > 0, 1))
        self.pairs = [(i, peers) for i in range(peers)] if self.pooled else [(i, j) for i, j in linked_NN.tolist()]
        ways = [*self.pairs, *((j, i) for i, j in self.pairs)]
        self.way = {pair: number for number, pair in enumerate(ways)}
        sizes = [len(self.choices), peers * layers, peers * layers, len(ways) * layers]
        self.at = np.concatenate(([0], np.cumsum(sizes)))
        self.count = int(self.at[-1])
        self.scale = costs.compute_bound()
        self.value = np.zeros(self.count)
        self.value[[self.y(peer, 0) for peer in range(peers)]] = -1.0
        self.value[self.at[3] :] = MOVE_COST / 2 if self.pooled else MOVE_COST
        self.integer = np.zeros(self.count)
        self.integer[: sizes[0]] = 1
        upper = np.ones(self.count)
        upper[self.at[2] :: layers] = 0  # k and m for layer 0 are 0, since tokens begin there
        self.bounds = Bounds(0.0, upper)
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def y(self, peer: int, layer: int) -> int:
        return int(self.at[1]) + peer * self.costs.layers + layer

    def k(self, peer: int, layer: int) -> int:
        return int(self.at[2]) + peer * self.costs.layers + layer

    def rules(self) -> LinearConstraint:
        """Return all constraints, each as a sparse row with a lower and an upper limit."""
        self._spans()
        self._tokens()
        self._links()
        terms = [(number, column, factor) for number, row in enumerate(self._rows) for column, factor in row[0].items()]
        rows, columns, factors = (np.array(part) for part in zip(*terms, strict=True))
        matrix = csr_matrix((factors, (rows, columns)), shape=(len(self._rows), self.count))
        low, high = [low for _, low, _ in self._rows], [high for _, _, high in self._rows]
        return LinearConstraint(matrix, low, high)

    def _holding(self, peer: int, layer: int, sign: float) -> dict[int, float]:
        """Return {column: sign} for each possible span of the peer that includes the layer."""
        return {n: sign for n, (p, first, last) in enumerate(self.choices) if p == peer and first <= layer < last}

    def _spans(self) -> None:
        """Add the rows that give each peer at most one span, and each layer at least `holders` holders."""
        costs = self.costs
        for peer in range(costs.peers):
            self._rows.append(({n: 1.0 for n, choice in enumerate(self.choices) if choice[0] == peer}, 0, 1))
        for layer in range(costs.layers):
            holding = {n: 1.0 for n, (_, first, last) in enumerate(self.choices) if first <= layer < last}
            self._rows.append((holding, costs.holders, np.inf))

    def _tokens(self) -> None:
        """Add the rows that let peers compute only layers that they hold, within their time, and conserve tokens."""
        costs = self.costs
        for j in range(costs.peers):
            seconds = {self.y(j, x): float(costs.seconds_NL[j, x] * self.scale) for x in range(costs.layers)}
            self._rows.append((seconds, 0, 1))
            for x in range(costs.layers):
                self._rows.append(({self.y(j, x): seconds[self.y(j, x)], **self._holding(j, x, -1.0)}, -np.inf, 0))
                if x > 0:
                    arrives, leaves = self._moves(j, x, -1.0, into=True), self._moves(j, x, -1.0, into=False)
                    self._rows.append(({self.y(j, x): 1.0, self.k(j, x): -1.0, **arrives}, 0, 0))
                    self._rows.append(({self.y(j, x - 1): 1.0, self.k(j, x): -1.0, **leaves}, 0, 0))
        if self.pooled:
            pool = costs.peers
            for x in range(1, costs.layers):
                self._rows.append((self._moves(pool, x, 1.0, into=True) | self._moves(pool, x, -1.0, into=False), 0, 0))

    def _links(self) -> None:
        """Add a row for each uplink, shared link of a site, and pair of peers: hidden values must fit beside gossip.

        Each row is divided by the link's rate.
        """
        costs, everyone = self.costs, np.arange(self.costs.peers)
        load = costs.hidden_bytes * self.scale
        for i in np.flatnonzero(np.isfinite(costs.rate_N)).tolist():
            rate = float(costs.rate_N[i])
            moved = self._crossing([pair for pair in self.pairs if i in pair], load / rate)
            for number, (peer, first, last) in enumerate(self.choices):
                if peer == i:
                    held = ((first <= np.arange(costs.layers)) & (np.arange(costs.layers) < last))[None, :]
                    moved[number] = 1 - float(link_limits.peer_left(costs, np.repeat(held, costs.peers, 0))[i]) / rate
            self._rows.append((moved, -np.inf, 1))
        if self.pooled:
            return
        for site, left in enumerate(link_limits.site_left(costs).tolist()):
            pairs = [(i, j) for i, j in self.pairs if (costs.site_N[i] == site) != (costs.site_N[j] == site)]
            self._rows.append((self._crossing(pairs, load / left), -np.inf, 1))
        left_NN = link_limits.pair_left(costs, everyone)
        for i, j in self.pairs:
            if np.isfinite(left_NN[i, j]):
                self._rows.append((self._crossing([(i, j)], load / float(left_NN[i, j])), -np.inf, 1))

    def _m(self, sender: int, receiver: int, layer: int) -> int:
        return int(self.at[3]) + self.way[sender, receiver] * self.costs.layers + layer

    def _moves(self, end: int, layer: int, sign: float, into: bool) -> dict[int, float]:
        """Return {column: sign} for all transfers into a layer that a peer (or the pool) receives or sends."""
        place = 1 if into else 0
        return {self._m(*way, layer): sign for way in self.way if way[place] == end}

    def _crossing(self, pairs: list[tuple[int, int]], weight: float) -> dict[int, float]:
        """Return {column: weight} for all transfers between these pairs of peers, in both directions."""
        both = [*pairs, *((j, i) for i, j in pairs)]
        return {self._m(*way, x): weight for way in both for x in range(1, self.costs.layers)}

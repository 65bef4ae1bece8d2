"""Find the optimal spans of a small swarm by one mixed-integer programme (HiGHS). Start reading at `best_spans`.

The programme is the linear programme of max_flow.py plus binary variables, which choose at most one span for each peer;
a peer computes only the layers of its span, and gossip about its span takes a part of its uplink.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from decentral.scheduler.throughput import link_limits
from decentral.scheduler.throughput.layer_costs import LayerCosts, reaches
from decentral.scheduler.throughput.max_flow import MOVE_COST
from decentral.scheduler.topology.arrays import Floats, Ints


def options(costs: LayerCosts) -> int:
    """Return the number of binary choices: at most so many (peer, span) pairs fit in the peers' memory."""
    return int((reaches(costs) - np.arange(costs.layers)).sum())


def best_spans(costs: LayerCosts, seconds: float = 600.0) -> Ints | None:
    """Return the best spans_N2 found in `seconds` (600 at most); None if the solver finds no valid spans in time."""
    model = _Model(costs)
    limits = {"time_limit": min(seconds, 600.0), "mip_rel_gap": 1e-7}
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
    max_flow.py defines y, k and m.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        peers, layers = costs.peers, costs.layers
        self.choices = list(_choices(costs))
        self.pairs = [(i, j) for i in range(peers) for j in range(i + 1, peers) if costs.link_NN[i, j] > 0]
        own = peers * layers
        sizes = [len(self.choices), own, own, peers * own]
        self.at = np.concatenate(([0], np.cumsum(sizes)))
        self.count = int(self.at[-1])
        self.scale = costs.compute_bound()
        self.value = np.zeros(self.count)
        self.value[[self.y(peer, 0) for peer in range(peers)]] = -1.0
        self.value[self.at[3] :] = MOVE_COST
        self.integer = np.zeros(self.count)
        self.integer[: sizes[0]] = 1
        self.bounds = Bounds(0.0, self._upper())
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def y(self, peer: int, layer: int) -> int:
        return int(self.at[1]) + peer * self.costs.layers + layer

    def k(self, peer: int, layer: int) -> int:
        return int(self.at[2]) + peer * self.costs.layers + layer

    def m(self, i: int, j: int, layer: int) -> int:
        return int(self.at[3]) + (i * self.costs.peers + j) * self.costs.layers + layer

    def _upper(self) -> Floats:
        """Return the columns' upper bounds: 0 for impossible transfers (into layer 0, without a link), else 1."""
        upper = np.ones(self.count)
        linked = set(self.pairs)
        for i in range(self.costs.peers):
            upper[self.k(i, 0)] = 0
            for j in range(self.costs.peers):
                upper[self.m(i, j, 0)] = 0
                if (min(i, j), max(i, j)) not in linked:
                    upper[[self.m(i, j, x) for x in range(self.costs.layers)]] = 0
        return upper

    def rules(self) -> LinearConstraint:
        """Return all constraints, each as a sparse row with a lower and an upper limit."""
        self._spans()
        self._tokens()
        self._links()
        matrix = lil_matrix((len(self._rows), self.count))
        for number, (terms, _, _) in enumerate(self._rows):
            for column, factor in terms.items():
                matrix[number, column] = factor
        low, high = [low for _, low, _ in self._rows], [high for _, _, high in self._rows]
        return LinearConstraint(matrix.tocsr(), low, high)

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
                    arrives = {self.m(i, j, x): -1.0 for i in range(costs.peers) if i != j}
                    leaves = {self.m(j, i, x): -1.0 for i in range(costs.peers) if i != j}
                    self._rows.append(({self.y(j, x): 1.0, self.k(j, x): -1.0, **arrives}, 0, 0))
                    self._rows.append(({self.y(j, x - 1): 1.0, self.k(j, x): -1.0, **leaves}, 0, 0))

    def _links(self) -> None:
        """Add a row for each uplink, shared link of a site, and pair of peers: hidden values must fit beside gossip.

        Each row is divided by the link's rate.
        """
        costs, everyone = self.costs, range(self.costs.peers)
        load = costs.hidden_bytes * self.scale
        for i in np.flatnonzero(np.isfinite(costs.rate_N)).tolist():
            rate = float(costs.rate_N[i])
            moved = self._moves([(i, j) for j in everyone], load / rate)
            for number, (peer, first, last) in enumerate(self.choices):
                if peer == i:
                    held = ((first <= np.arange(costs.layers)) & (np.arange(costs.layers) < last))[None, :]
                    moved[number] = 1 - float(link_limits.peer_left(costs, np.repeat(held, costs.peers, 0))[i]) / rate
            self._rows.append((moved, -np.inf, 1))
        for site, left in enumerate(link_limits.site_left(costs).tolist()):
            crossing = [(i, j) for i in everyone for j in everyone if costs.site_N[i] == site != costs.site_N[j]]
            self._rows.append((self._moves(crossing, load / left), -np.inf, 1))
        left_NN = link_limits.pair_left(costs, np.arange(costs.peers))
        for i, j in self.pairs:
            self._rows.append((self._moves([(i, j)], load / float(left_NN[i, j])), -np.inf, 1))

    def _moves(self, pairs: Sequence[tuple[int, int]], weight: float) -> dict[int, float]:
        """Return {column: weight} for all transfers between these pairs of peers, in both directions."""
        both = [*pairs, *((j, i) for i, j in pairs)]
        return {self.m(i, j, x): weight for i, j in both if i != j for x in range(1, self.costs.layers)}

"""Find the optimal spans of a small swarm by one mixed-integer programme (HiGHS). Start reading at `best_spans`.

The programme is the linear programme of max_flow.py plus binary variables, which choose at most one span for each peer;
a peer computes only the layers of its span. Gossip uses a part of a link for each layer that both ends hold. A link
that gossip overloads carries no tokens, as in max_flow.py.
"""

from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Floats, Ints


def options(costs: LayerCosts) -> int:
    """Return the number of binary choices: the (peer, span) pairs whose span fits in the peer's memory."""
    return sum(1 for _ in _choices(costs))


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
    for peer in range(costs.peers):
        for first in range(costs.layers):
            for last in range(first + 1, costs.reach(peer, first) + 1):
                if costs.fits(peer, first, last):
                    yield peer, first, last


class _Model:
    """The programme's columns and rows.

    Columns, in order: z (a possible span of a peer: 1 if chosen), y and k (peer, layer), m (sender, receiver, layer), b
    (pair, layer: 1 if both peers hold the layer), and v (pair: 1 if gossip uses up the link). max_flow.py defines y, k
    and m.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        peers, layers = costs.peers, costs.layers
        self.choices = list(_choices(costs))
        self.pairs = [(i, j) for i in range(peers) for j in range(i + 1, peers) if costs.link_NN[i, j] > 0]
        own, pairs = peers * layers, len(self.pairs)
        sizes = [len(self.choices), own, own, peers * own, pairs * layers, pairs]
        self.at = np.concatenate(([0], np.cumsum(sizes)))
        self.count = int(self.at[-1])
        self.scale = costs.compute_bound()
        self.value = np.zeros(self.count)
        self.value[[self.y(peer, 0) for peer in range(peers)]] = -1.0
        self.integer = np.zeros(self.count)
        self.integer[: sizes[0]] = 1
        self.integer[self.at[5] :] = 1
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
        """Add a row for each link: hidden values and gossip must fit its rate.

        If gossip alone uses up the link (v = 1), no micro-batch may travel over it.
        """
        costs = self.costs
        for number, (i, j) in enumerate(self.pairs):
            full = int(self.at[5]) + number
            link = float(costs.link_NN[i, j])
            moved = {self.m(a, b, x): costs.hidden_bytes * self.scale / link
                     for a, b in ((i, j), (j, i)) for x in range(1, costs.layers)}  # fmt: skip
            gossip = {}
            for x in range(costs.layers):
                both = int(self.at[4]) + number * costs.layers + x
                gossip[both] = float(costs.snapshot_L[x]) / link
                held = {both: -1.0, **self._holding(i, x, 1.0), **self._holding(j, x, 1.0)}
                self._rows.append((held, -np.inf, 1))
            excess = float(costs.snapshot_L.sum()) / link
            self._rows.append(({**moved, **gossip, full: -excess}, -np.inf, 1))
            self._rows.append(({**moved, full: 1.0}, -np.inf, 1))

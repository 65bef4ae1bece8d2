"""The best spans, proven, for small swarms: one mixed-integer programme (HiGHS).

flow.py's linear programme with every peer able to hold every layer, and a binary choice of one span (or none) per
peer: a layer is computed only where it is held. Gossip takes its part of a link for each layer that both ends hold;
a link that gossip overloads carries no tokens, as in flow.py.
"""

from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from decentral.scheduler.shared.arrays import Floats, Ints
from decentral.scheduler.throughput.layer_costs import LayerCosts


def options(work: LayerCosts) -> int:
    """How many spans all peers could hold, together: the number of binary choices."""
    return sum(1 for _ in _choices(work))


def best_spans(work: LayerCosts, seconds: float = 600.0) -> Ints | None:
    """Spans N x 2 of the greatest throughput; None if no choice gives every layer its holders in that time."""
    model = _Model(work)
    limits = {"time_limit": min(seconds, 600.0), "mip_rel_gap": 1e-7}
    found = milp(model.value, integrality=model.integer, bounds=model.bounds, constraints=model.rules(), options=limits)
    if found.x is None:
        return None
    spans = np.zeros((work.peers, 2), np.int64)
    for number, (peer, first, last) in enumerate(model.choices):
        if found.x[number] > 0.5:
            spans[peer] = first, last
    return spans


def _choices(work: LayerCosts) -> Iterator[tuple[int, int, int]]:
    for peer in range(work.peers):
        for first in range(work.layers):
            for last in range(first + 1, work.reach(peer, first) + 1):
                yield peer, first, last


class _Model:
    """Columns: z (choices), y and k (peer, layer), m (from, to, layer), b (pair, layer both hold), v (pair is full)."""

    def __init__(self, work: LayerCosts) -> None:
        self.work = work
        peers, layers = work.peers, work.layers
        self.choices = list(_choices(work))
        self.pairs = [(i, j) for i in range(peers) for j in range(i + 1, peers) if work.link_NN[i, j] > 0]
        sizes = [len(self.choices), peers * layers, peers * layers, peers * peers * layers]
        sizes += [len(self.pairs) * layers, len(self.pairs)]
        self.at = np.concatenate(([0], np.cumsum(sizes)))
        self.count = int(self.at[-1])
        self.scale = work.compute_bound()
        self.value = np.zeros(self.count)
        self.value[[self.y(peer, 0) for peer in range(peers)]] = -1.0
        self.integer = np.zeros(self.count)
        self.integer[: sizes[0]] = 1
        self.integer[self.at[5] :] = 1
        self.bounds = Bounds(0.0, self._upper())
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def y(self, peer: int, layer: int) -> int:
        return int(self.at[1]) + peer * self.work.layers + layer

    def k(self, peer: int, layer: int) -> int:
        return int(self.at[2]) + peer * self.work.layers + layer

    def m(self, i: int, j: int, layer: int) -> int:
        return int(self.at[3]) + (i * self.work.peers + j) * self.work.layers + layer

    def _upper(self) -> Floats:
        """All tokens at most the bound; nothing stays into or moves into layer 0; no missing link carries any."""
        upper = np.ones(self.count)
        linked = set(self.pairs)
        for i in range(self.work.peers):
            upper[self.k(i, 0)] = 0
            for j in range(self.work.peers):
                upper[self.m(i, j, 0)] = 0
                if (min(i, j), max(i, j)) not in linked:
                    upper[[self.m(i, j, x) for x in range(self.work.layers)]] = 0
        return upper

    def rules(self) -> LinearConstraint:
        """Every constraint, as sparse rows between two limits."""
        self._spans()
        self._tokens()
        self._links()
        matrix = lil_matrix((len(self._rows), self.count))
        for number, (terms, _, _) in enumerate(self._rows):
            for column, factor in terms.items():
                matrix[number, column] = factor
        return LinearConstraint(matrix.tocsr(), [row[1] for row in self._rows], [row[2] for row in self._rows])

    def _add(self, terms: dict[int, float], low: float, high: float) -> None:
        self._rows.append((terms, low, high))

    def _holding(self, peer: int, layer: int, sign: float) -> dict[int, float]:
        """The choices of this peer that hold the layer."""
        return {n: sign for n, (p, first, last) in enumerate(self.choices) if p == peer and first <= layer < last}

    def _spans(self) -> None:
        work = self.work
        for peer in range(work.peers):
            self._add({n: 1.0 for n, choice in enumerate(self.choices) if choice[0] == peer}, 0, 1)
        for layer in range(work.layers):
            everyone = {n: 1.0 for n, (_, first, last) in enumerate(self.choices) if first <= layer < last}
            self._add(everyone, work.holders, np.inf)

    def _tokens(self) -> None:
        work = self.work
        for j in range(work.peers):
            seconds = {self.y(j, x): float(work.seconds_NL[j, x] * self.scale) for x in range(work.layers)}
            self._add(seconds, 0, 1)
            for x in range(work.layers):
                self._add({self.y(j, x): seconds[self.y(j, x)], **self._holding(j, x, -1.0)}, -np.inf, 0)
                if x > 0:
                    arrives = {self.m(i, j, x): -1.0 for i in range(work.peers) if i != j}
                    leaves = {self.m(j, i, x): -1.0 for i in range(work.peers) if i != j}
                    self._add({self.y(j, x): 1.0, self.k(j, x): -1.0, **arrives}, 0, 0)
                    self._add({self.y(j, x - 1): 1.0, self.k(j, x): -1.0, **leaves}, 0, 0)

    def _links(self) -> None:
        """hidden * moved + gossip <= link, or nothing moves (v = 1)."""
        work = self.work
        for number, (i, j) in enumerate(self.pairs):
            full = int(self.at[5]) + number
            link = float(work.link_NN[i, j])
            moved = {self.m(a, b, x): work.hidden_bytes * self.scale / link
                     for a, b in ((i, j), (j, i)) for x in range(1, work.layers)}  # fmt: skip
            gossip = {}
            for x in range(work.layers):
                both = int(self.at[4]) + number * work.layers + x
                gossip[both] = float(work.snapshot_L[x]) / link
                held = {both: -1.0, **self._holding(i, x, 1.0), **self._holding(j, x, 1.0)}
                self._add(held, -np.inf, 1)
            excess = float(work.snapshot_L.sum()) / link
            self._add({**moved, **gossip, full: -excess}, -np.inf, 1)
            self._add({**moved, full: 1.0}, -np.inf, 1)

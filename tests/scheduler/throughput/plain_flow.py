"""The programme of max_flow.py in its plain form: a variable for each peer, layer and pair of peers, nothing merged."""

import numpy as np
from scipy.optimize import linprog

from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Ints


def plain_flow(costs: LayerCosts, spans_N2: Ints) -> float:
    """Return the greatest tokens/s through these spans."""
    peers, layers, scale = costs.peers, costs.layers, costs.compute_bound()
    y = {(j, x): number for number, (j, x) in enumerate(np.ndindex(peers, layers))}
    k = {(j, x): len(y) + number for number, (j, x) in enumerate(np.ndindex(peers, layers))}
    m = {one: 2 * len(y) + number for number, one in enumerate(np.ndindex(peers, peers, layers))}
    upper = np.full(2 * len(y) + len(m), np.inf)
    holds = [[first <= x < last for x in range(layers)] for first, last in spans_N2]
    upper[[y[j, x] for j, x in y if not holds[j][x]]] = 0
    upper[[k[j, 0] for j in range(peers)]] = 0
    upper[[m[i, j, x] for i, j, x in m if i == j or x == 0]] = 0
    equal, at_most, limits = [], [], []
    for j in range(peers):
        for x in range(1, layers):
            for at, sign in ((y[j, x], 1), (y[j, x - 1], -1)):
                row = np.zeros(len(upper))
                row[at] = 1
                row[k[j, x]] = -1
                row[[m[i, j, x] if sign > 0 else m[j, i, x] for i in range(peers)]] = -1
                equal.append(row)
        row = np.zeros(len(upper))
        row[[y[j, x] for x in range(layers)]] = costs.seconds_NL[j] * scale
        at_most.append(row)
        limits.append(1.0)

    def link(pairs: list[tuple[int, int]], rate: float, gossip: float) -> None:
        row = np.zeros(len(upper))
        for i, j in pairs:
            row[[m[i, j, x] for x in range(layers)]] = costs.hidden_bytes * scale / rate
        at_most.append(row)
        limits.append(1 - min(costs.link_share, gossip / rate))

    everyone = range(peers)
    for i in everyone:
        if np.isfinite(costs.rate_N[i]):
            held = float(costs.snapshot_L[spans_N2[i][0] : spans_N2[i][1]].sum())
            link([(a, b) for a in everyone for b in everyone if a != b and i in (a, b)], costs.rate_N[i], held)
        for j in range(i):
            if costs.link_NN[i, j] < min(costs.rate_N[i], costs.rate_N[j]):
                link([(i, j), (j, i)], costs.link_NN[i, j], float(costs.snapshot_L.sum()))
    for site, rate in enumerate(costs.site_rate_Z):
        inside = [peer for peer in everyone if costs.site_N[peer] == site]
        crossing = [(a, b) for a in everyone for b in everyone if (a in inside) != (b in inside)]
        link(crossing, float(rate), len(inside) * float(costs.snapshot_L.sum()))
    value = np.zeros(len(upper))
    value[[y[j, 0] for j in everyone]] = -1
    bounds = [(0, most) for most in upper]
    found = linprog(value, np.array(at_most), limits, np.array(equal), np.zeros(len(equal)), bounds)
    return float(-found.fun * scale)

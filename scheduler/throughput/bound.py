"""Bound the throughput of a swarm from above by its devices, memories and links: `throughput_bound`."""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Floats, Ints

CROSSINGS = (0, 1, 1, 2)  # transfers of one visit: of all layers, from the first layer, to the last layer, between


def access(costs: LayerCosts) -> Floats:
    """Return the bytes/s, (N,), that each peer can at most send to all others together; it receives as many."""
    return np.asarray(np.minimum(costs.rate_N, costs.link_NN.sum(axis=1)))


def throughput_bound(costs: LayerCosts, reach_NL: Ints) -> float:
    """Return tokens/s that no spans and routes exceed: the lesser of the compute bound and of a linear programme.

    A token visits a peer for at most as many layers as fit in the peer's memory. The programme counts visits, and
    leaves open which peers exchange tokens. `share` is a span's part of the work of a token:

        v_jc       visits/s of peer j that hold all layers, begin with the first, end with the last, or do neither
        work_jc    tokens/s that peer j computes in them;  work_jc <= v_jc * the largest share that fits in its memory
        sum_c work_jc <= speed_j;   hidden * sum_c crossings_c * v_jc <= access_j
        tokens/s <= sum_j (all + begin);   tokens/s <= sum_j (all + end);   tokens/s <= sum_jc work_jc

    Args:
        costs: What layers cost each peer.
        reach_NL: The end of each peer's longest span from each layer.
    """
    share_L = costs.seconds_NL.min(axis=0) / costs.seconds_NL.min(axis=0).sum()
    speed_N = (share_L / costs.seconds_NL).max(axis=1)
    scale = float(speed_N.sum())
    before = np.concatenate(([0.0], np.cumsum(share_L)))
    largest_NL = before[reach_NL] - before[: costs.layers]
    ends_N = np.array([before[-1] - before[int(np.argmax(row == costs.layers))] if (row == costs.layers).any() else 0.0
                       for row in reach_NL])  # fmt: skip
    whole_N = (reach_NL[:, 0] == costs.layers).astype(float)
    largest_N4 = np.stack((whole_N, largest_NL[:, 0], ends_N, largest_NL.max(axis=1)), axis=1)
    peers = costs.peers
    visits = np.arange(4 * peers).reshape(peers, 4)
    work = visits + 4 * peers
    total = 8 * peers
    hidden_N = np.minimum(1e6, costs.hidden_bytes * scale / np.maximum(access(costs), 1e-9))
    peer_N4 = np.repeat(np.arange(peers)[:, None], 4, axis=1)
    parts = [  # (rows, columns, values) of the constraints
        (visits, work, np.ones((peers, 4))),
        (visits, visits, -largest_N4),
        (4 * peers + peer_N4, work, np.ones((peers, 4))),
        (5 * peers + peer_N4, visits, hidden_N[:, None] * np.array(CROSSINGS)),
        *((np.full(some.shape, 6 * peers + row), some, -np.ones(some.shape)) for row, some in enumerate(
            (visits[:, :2], visits[:, ::2], work))),
        (6 * peers + np.arange(3), np.full(3, total), np.ones(3)),
    ]  # fmt: skip
    rows, columns, values = (np.concatenate([np.ravel(part[axis]) for part in parts]) for axis in range(3))
    limits = np.concatenate((np.zeros(4 * peers), speed_N / scale, np.ones(peers), np.zeros(3)))
    value = np.zeros(total + 1)
    value[total] = -1.0
    matrix = coo_matrix((values, (rows, columns)), shape=(6 * peers + 3, total + 1)).tocsr()
    found = linprog(value, matrix, limits, method="highs")
    return min(costs.compute_bound(), -float(found.fun) * scale) if found.status == 0 else costs.compute_bound()

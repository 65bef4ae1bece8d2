"""Bound the throughput of a swarm from above by its devices, memories and links: `throughput_bound`."""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from decentral.scheduler.throughput import link_limits
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Floats, Ints

# Number of transfers into and out of a peer in one visit of a token, by the layers that the visit covers: all layers,
# the first but not the last, the last but not the first, neither.
CROSSINGS = (0, 1, 1, 2)


def access(costs: LayerCosts) -> Floats:
    """Return the bytes/s, (N,), that each peer can at most send to all others together; it receives as many."""
    return np.asarray(np.minimum(costs.rate_N, costs.link_NN.sum(axis=1)))


def throughput_bound(costs: LayerCosts, reach_NL: Ints) -> float:
    """Return tokens/s that no spans and routes exceed: the compute bound or a linear programme's, whichever is lower.

    In a visit to a peer, a token is computed in consecutive layers, at most as many as fit in the peer's memory. The
    programme counts visits, and does not decide which peers exchange tokens. It also counts visits to sites, which
    cover at most as many layers as fit in the memories of the site's peers together. `share` is a span's part of the
    work of a token:

        v_jc       visits/s to peer or site j that cover all layers, begin with the first, end with the last, or neither
        work_jc    tokens/s that peer j computes in them;  work_jc <= v_jc * the largest share that fits in its memory
        sum_c work_jc <= speed_j;   hidden * sum_c crossings_c * v_jc <= access_j, or what gossip leaves site j
        sum of the work of a site's peers <= sum_c v_jc * the largest share that fits in the site
        tokens/s = sum_j (all + begin) = sum_j (all + end), of all peers, and of all sites and peers without a site
        tokens/s <= sum_jc work_jc

    Args:
        costs: What layers cost each peer.
        reach_NL: The end of each peer's longest span from each layer.
    """
    share_L = costs.seconds_NL.min(axis=0) / costs.seconds_NL.min(axis=0).sum()
    speed_N = (share_L / costs.seconds_NL).max(axis=1)
    scale, peers, sites = float(speed_N.sum()), costs.peers, len(costs.site_rate_Z)
    largest_N4 = _largest_shares(share_L, reach_NL)
    inside = np.flatnonzero(costs.site_N >= 0)
    site_of, outside = costs.site_N[inside], np.flatnonzero(costs.site_N < 0)
    fits_Z = np.bincount(site_of, largest_N4[inside, 3], sites)
    largest_Z4 = np.where(np.arange(4) == 0, fits_Z[:, None] >= 1, np.minimum(1.0, fits_Z)[:, None])
    load_N, load_Z = (
        np.minimum(1e6, costs.hidden_bytes * scale / np.maximum(rate, 1e-9))
        for rate in (access(costs), link_limits.site_left(costs))
    )
    total = 8 * peers + 4 * sites
    visits, work, tours = np.split(np.arange(total).reshape(-1, 4), [peers, 2 * peers])
    peer_N, site_Z = np.arange(peers)[:, None], np.arange(sites)[:, None]
    at = np.cumsum([0, 4 * peers, peers, peers, 1, sites])
    parts = [  # (rows, columns, values) of the constraints
        (visits, work, 1.0),
        (visits, visits, -largest_N4),
        (at[1] + peer_N, work, 1.0),
        (at[2] + peer_N, visits, load_N[:, None] * np.array(CROSSINGS)),
        (at[3], np.array(total), 1.0),
        (at[3], work, -1.0),
        (at[4] + site_of[:, None], work[inside], 1.0),
        (at[4] + site_Z, tours, -largest_Z4),
        (at[5] + site_Z, tours, load_Z[:, None] * np.array(CROSSINGS)),
    ]
    rows, columns, values = (
        np.concatenate([np.ravel(np.broadcast_to(part[axis], part[1].shape)) for part in parts]) for axis in range(3)
    )
    limits = np.concatenate((np.zeros(at[1]), speed_N / scale, np.ones(peers), np.zeros(1 + sites), np.ones(sites)))
    # Each token begins at one peer, and at one place: a site or a peer without a site. It ends at one of each, too.
    once = np.zeros((4, total + 1))
    for row, places in enumerate((visits, np.concatenate((visits[outside], tours)))):
        once[2 * row, places[:, :2]] = once[2 * row + 1, places[:, ::2]] = 1.0
    once[:, total] = -1.0
    value = np.append(np.zeros(total), -1.0)
    matrix = coo_matrix((values, (rows, columns)), shape=(at[5] + sites, total + 1)).tocsr()
    found = linprog(value, matrix, limits, once, np.zeros(4), method="highs")
    return min(costs.compute_bound(), -float(found.fun) * scale) if found.status == 0 else costs.compute_bound()


def _largest_shares(share_L: Floats, reach_NL: Ints) -> Floats:
    """Return the largest share of a token's work, (N, 4), that fits in each peer's memory, by kind of visit.

    The kinds of visits are those of CROSSINGS.
    """
    layers = len(share_L)
    before = np.concatenate(([0.0], np.cumsum(share_L)))
    largest_NL = before[reach_NL] - before[:layers]
    ends_N = 1 - before[np.where((reach_NL == layers).any(axis=1), (reach_NL == layers).argmax(axis=1), layers)]
    whole_N = (reach_NL[:, 0] == layers).astype(float)
    return np.stack((whole_N, largest_NL[:, 0], ends_N, largest_NL.max(axis=1)), axis=1)

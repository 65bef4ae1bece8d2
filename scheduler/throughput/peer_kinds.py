"""Group peers that are interchangeable, so that the linear programme of max_flow.py has few variables.

`kinds` numbers the peers so that two peers of a kind could swap their places without any change. `access_limited`
marks peers whose links are all as fast as the access of one of both ends: their transfers need no variable for each
pair. `anywhere` marks those of them that no site's shared link limits.
"""

from functools import lru_cache

import numpy as np

from decentral.scheduler.throughput.layer_costs import COSTS_REMEMBERED, LayerCosts
from decentral.scheduler.throughput.link_limits import SAME_RATE
from decentral.scheduler.topology.arrays import Flags, Floats, Ints


@lru_cache(maxsize=COSTS_REMEMBERED)
def kinds(costs: LayerCosts) -> Ints:
    """Return kind_N: peers with the same number have the same speeds, site, rate, and links to all other peers."""
    kind_N = np.zeros(costs.peers, np.int64)
    sorted_NN = np.sort(costs.link_NN, axis=1)  # interchangeable peers have the same links in another order
    # (site, rate, seconds per token, sorted link rates) -> the first peer of each kind with these properties
    alike: dict[tuple[int, float, bytes, bytes], list[int]] = {}
    count = 0
    for peer in range(costs.peers):
        key = (
            int(costs.site_N[peer]),
            float(costs.rate_N[peer]),
            costs.seconds_NL[peer].tobytes(),
            sorted_NN[peer].tobytes(),
        )
        firsts = alike.setdefault(key, [])
        same = next((first for first in firsts if _same_links(costs.link_NN, first, peer)), None)
        if same is None:
            firsts.append(peer)
            kind_N[peer], count = count, count + 1
        else:
            kind_N[peer] = kind_N[same]
    return kind_N


def _same_links(link_NN: Floats, one: int, other: int) -> bool:
    differs = link_NN[one] != link_NN[other]
    differs[[one, other]] = False
    return not differs.any()


@lru_cache(maxsize=COSTS_REMEMBERED)
def access_limited(costs: LayerCosts) -> Flags:
    """Return flags of peers, (N,), whose links to all other peers are as fast as one end's rate or its site's rate."""
    site_rate_N = np.append(costs.site_rate_Z, np.inf)[costs.site_N]
    between_sites = costs.site_N[:, None] != costs.site_N[None, :]
    enough = np.minimum.outer(costs.rate_N, costs.rate_N)
    enough = np.where(between_sites, np.minimum(enough, np.minimum.outer(site_rate_N, site_rate_N)), enough)
    slower = costs.link_NN < enough * (1 - SAME_RATE)
    np.fill_diagonal(slower, False)
    return np.asarray(np.isfinite(costs.rate_N) & ~slower.any(axis=1))


def anywhere(costs: LayerCosts) -> Flags:
    """Return flags of peers, (N,), whose place does not matter: no site, and links as fast as the access of an end."""
    return access_limited(costs) & (costs.site_N < 0)

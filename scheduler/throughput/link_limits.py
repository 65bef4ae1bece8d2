"""Compute the bytes/s that links can carry for tokens, beside gossip, and the seconds that downloads of layers take.

Activations travel one way and gradients of the same size back, so a link carries as much in both directions, and its
slower direction counts. A peer pulls the snapshots of its layers once in ROUND_S (layer_costs.py), and another peer
pulls as much from it, but gossip is slowed down where it would use more than LINK_SHARE of a link. This much is
subtracted: from a peer's rate for gossip about its own layers, and from the rate of a site or of a link between two
peers for gossip about the whole model.
"""

import numpy as np

from decentral.scheduler.partners.mixing import LINK_SHARE
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.topology.arrays import Flags, Floats, Ints

SAME_RATE = 1e-9  # rates that differ by a smaller share count as equal


def peer_left(costs: LayerCosts, holds_NL: Flags) -> Floats:
    """Return the bytes/s, (N,), that gossip about its layers leaves each peer for all its links; inf: unlimited."""
    return costs.rate_N - np.minimum(LINK_SHARE * costs.rate_N, holds_NL @ costs.snapshot_L)


def pair_left(costs: LayerCosts, peers_C: Ints) -> Floats:
    """Return the bytes/s, (C, C), that gossip leaves free between two peers.

    The result is inf for a link that is as fast as its ends' own rates allow, since these rates limit it already.
    """
    link_CC, rate_C = costs.link_NN[np.ix_(peers_C, peers_C)], costs.rate_N[peers_C]
    left_CC = link_CC - np.minimum(LINK_SHARE * link_CC, costs.snapshot_L.sum())
    return np.asarray(np.where(link_CC < (1 - SAME_RATE) * np.minimum.outer(rate_C, rate_C), left_CC, np.inf))


def site_left(costs: LayerCosts) -> Floats:
    """Return the bytes/s, one for each site, that gossip leaves free on the site's shared link; inf: unlimited."""
    peers_Z = np.bincount(costs.site_N[costs.site_N >= 0], minlength=len(costs.site_rate_Z))
    return np.asarray(costs.site_rate_Z - np.minimum(LINK_SHARE * costs.site_rate_Z, peers_Z * costs.snapshot_L.sum()))


def download_s(costs: LayerCosts, before_NL: Flags, after_NL: Flags) -> float:
    """Return the seconds until every peer has the layers that are new to it, if all peers download at once.

    A peer downloads over its fastest link. The old holders of a layer send its bytes in proportion to their uplinks. A
    site's shared link carries the layers that no peer of the site has held. The slowest of these counts.
    """
    fetched_NL = (after_NL & ~before_NL) * costs.fetched_L
    down_N = np.maximum(np.minimum(costs.rate_N, costs.link_NN.max(axis=1)), 1.0)
    up_N = np.maximum(np.minimum(costs.rate_N, costs.link_NN.sum(axis=1)), 1.0)
    sent_NL = before_NL * (fetched_NL.sum(axis=0) / np.maximum(up_N @ before_NL, 1.0))  # seconds of each peer's uplink
    seconds = [*(fetched_NL.sum(axis=1) / down_N), *sent_NL.sum(axis=1)]
    for site, rate in enumerate(costs.site_rate_Z):
        inside = costs.site_N == site
        foreign_L = ~before_NL[inside].any(axis=0)
        seconds.append(fetched_NL[inside][:, foreign_L].sum() / rate)
    return float(max(seconds))

"""Compute the bytes/s that links can carry for tokens, beside gossip, and the seconds that downloads of layers take.

Activations travel one way and gradients of the same size back, so a link carries as much in both directions, and its
slower direction counts. A peer pulls the snapshots of its layers once in ROUND_S (layer_costs.py), and another peer
pulls as much from it, but gossip is slowed down where it would use more than `GossipConfig.share_beside_tokens` of a
link. This much is subtracted: from a peer's rate for gossip about its own layers, and from the rate of a site or of a
link between two peers for gossip about the whole model.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from decentral.comm.wire.meter import FAST
from decentral.core.choices import wires_of
from decentral.core.config import Config
from decentral.core.fragments import Fragment
from decentral.core.layer_work import KindCosts, share
from decentral.scheduler.throughput.layer_costs import ROUND_S, SNAPSHOT_BYTES, LayerCosts, crossing_bytes
from decentral.scheduler.topology.arrays import Flags, Floats, Ints

SAME_RATE = 1e-9  # rates that differ by a smaller share count as equal
UNLIMITED = 1e12  # bytes/s that stand for an uplink above FAST, which probes of a few links cannot measure
UNMEASURED_LINK = 12.5e6  # assumed bytes/s of an unmeasured link, as in scheduler/topology/topology.py


@dataclass(frozen=True, slots=True)
class TokenLinks:
    """How a run's tokens and gossip use links; running peers plan and route by these figures."""

    hidden_bytes: float  # bytes of one token between two layers, as routes send it (`crossing_bytes`)
    link_share: float  # share of each link that gossip may use
    micro_batch_tokens: int = 0  # tokens of a micro-batch; 0: plans do not count micro-batches in flight
    accumulate: int = 0  # a step waits for this many micro-batches at least; 0: for none (`routes.overlap`)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return a run's figures."""
        sequences = config.train.micro_batch if isinstance(config.train.micro_batch, int) else 1
        crossing = crossing_bytes(config, wires_of(config.routes.wire)[0].value_bytes)
        awaited = 0 if config.routes.overlap else config.train.accumulate
        return cls(crossing, config.gossip.share_beside_tokens, sequences * config.model.context, awaited)

    def crossings_per_s(self, cuts: tuple[Fragment, ...], span: tuple[int, int], rate: float) -> float:
        """Return how many tokens/s may enter or leave a peer beside its gossip; a token that does both counts twice.

        Args:
            cuts: All fragments of the model.
            span: The peer's layers [first, last), about which it gossips.
            rate: Bytes/s of the peer's uplink; 0 if it was not measured. Only the uplink counts,
                since the downlink is seldom slower.
        """
        held = sum(cut.parameters for cut in cuts if span[0] <= cut.first and cut.last <= span[1])
        carried = UNLIMITED if rate > FAST else rate or UNMEASURED_LINK
        left = beside_gossip(carried, SNAPSHOT_BYTES * held / ROUND_S, self.link_share)
        return float(left) / self.hidden_bytes

    def supply(
        self, cuts: tuple[Fragment, ...], span: tuple[int, int], crossings: float, speed: float, costs: KindCosts
    ) -> float:
        """Return the speed, at most `speed`, at which a peer's links let it compute all its layers for other peers.

        Both are in tokens/s through the whole model: that many tokens pass the peer's layers in the time in which its
        device would take them through all layers.

        Args:
            cuts: All fragments of the model.
            span: The peer's layers [first, last).
            crossings: How many tokens/s may enter or leave the peer.
            speed: The device's speed.
            costs: The device's costs of each kind of layer.
        """
        ends = (span[0] > 0) + (span[1] < cuts[-1].last)
        return min(speed, crossings / ends * share(cuts, span[0], span[1], costs)) if ends else speed


def beside_gossip(rate: Floats | float, gossip: Floats | float, link_share: float) -> Floats:
    """Return what gossip leaves of links with these rates; it takes `gossip`, but at most `link_share` of a link.

    Rates and gossip are in bytes/s; an infinite rate stays infinite.
    """
    return np.asarray(rate - np.minimum(link_share * rate, gossip))


def peer_left(costs: LayerCosts, holds_NL: Flags) -> Floats:
    """Return the bytes/s, (N,), that gossip about its layers leaves each peer for all its links; inf: unlimited."""
    return beside_gossip(costs.rate_N, holds_NL @ costs.snapshot_L, costs.link_share)


def pair_left(costs: LayerCosts, peers_C: Ints) -> Floats:
    """Return the bytes/s, (C, C), that gossip leaves free between two peers.

    The result is inf for a link that is as fast as its ends' own rates allow, since these rates limit it already.
    """
    link_CC, rate_C = costs.link_NN[np.ix_(peers_C, peers_C)], costs.rate_N[peers_C]
    left_CC = beside_gossip(link_CC, costs.snapshot_L.sum(), costs.link_share)
    return np.asarray(np.where(link_CC < (1 - SAME_RATE) * np.minimum.outer(rate_C, rate_C), left_CC, np.inf))


def site_left(costs: LayerCosts) -> Floats:
    """Return the bytes/s, one for each site, that gossip leaves free on the site's shared link; inf: unlimited."""
    peers_Z = np.bincount(costs.site_N[costs.site_N >= 0], minlength=len(costs.site_rate_Z))
    return beside_gossip(costs.site_rate_Z, peers_Z * costs.snapshot_L.sum(), costs.link_share)


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

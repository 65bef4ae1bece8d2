"""The replicas of a simulated swarm: their weights, how far they are from one another, and how good their mean is."""

from collections.abc import Iterable

import torch
from torch import Tensor

from decentral.core.ids import PeerId
from decentral.sim.swarm import SimulatedPeer
from decentral.sim.virtual_host import VirtualHost
from decentral.train.fragment_gossip import GossipedFragment


def fragments_of(host: VirtualHost) -> list[GossipedFragment]:
    """The fragments that a peer holds, with their weights and update rules."""
    return host.training.gossip.fragments


def weights_of(host: VirtualHost) -> Tensor:
    """All weights that a peer holds, in one vector."""
    return torch.cat([held.live.theta for held in fragments_of(host)])


def distances(peers: Iterable[SimulatedPeer]) -> dict[PeerId, float]:
    """The distance of each replica from the mean of all that hold the same: root mean square over the numbers."""
    squares: dict[PeerId, list[Tensor]] = {}
    for replicas in _by_fragment(peers).values():
        mean = torch.stack(list(replicas.values())).mean(dim=0)
        for peer, theta in replicas.items():
            squares.setdefault(peer, []).append((theta - mean).square())
    return {peer: float(torch.cat(parts).mean().sqrt()) for peer, parts in squares.items()}


def loss_of_mean(peers: Iterable[SimulatedPeer]) -> float:
    """The mean square of the average of the replicas: a surrogate's distance from its optimum, which is zero."""
    replicas = _by_fragment(peers).values()
    means = [torch.stack(list(held.values())).mean(dim=0).square() for held in replicas]
    return float(torch.cat(means).mean()) if means else 0.0


def _by_fragment(peers: Iterable[SimulatedPeer]) -> dict[int, dict[PeerId, Tensor]]:
    found: dict[int, dict[PeerId, Tensor]] = {}
    for peer in peers:
        for held in fragments_of(peer.host) if peer.host is not None else ():
            found.setdefault(held.live.fragment.index, {})[peer.peer] = held.live.theta
    return found

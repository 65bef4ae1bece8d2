"""Which peers hold which layer, kept up to date record by record: a query costs the same in a swarm of any size.

A peer asks only a few of a layer's holders, its neighbours, so that it can measure each of them well. Different peers
have different neighbours (rendezvous hashing, Thaler and Ravishankar 1998), so work spreads over all holders.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.peers.membership.records import PeerRecord

NEIGHBOURS = 24  # holders of a layer that a peer knows


@dataclass(slots=True)
class Holders:
    """The holders of a model with so many layers, as `own` sees them. A peer that is not training holds nothing."""

    own: PeerId
    layers: int
    speeds: dict[tuple[int, int], float] = field(default_factory=dict)  # tokens/s of all peers with the same layers
    changes: int = 0  # how often a span or a speed has changed so far
    _places: dict[PeerId, tuple[int, int, float]] = field(default_factory=dict)  # layers [first, last), tokens/s
    _alike: dict[tuple[int, int], list[tuple[int, PeerId]]] = field(default_factory=dict)  # by layers, then distance
    _near: dict[int, list[PeerId]] = field(default_factory=dict)  # answers since the last change, by layer

    @property
    def count(self) -> int:
        """The number of peers that hold something."""
        return len(self._places)

    def put(self, peer: PeerId, record: PeerRecord) -> None:
        first, last = (record.first, min(record.last, self.layers)) if record.phase == "training" else (0, 0)
        speed = record.profile.tokens_per_s
        was = self._places.get(peer, (0, 0, 0.0))
        if was[:2] == (first, last) and first < last:
            if speed != was[2]:
                self._places[peer] = (first, last, speed)
                self.speeds[first, last] += speed - was[2]
                self.changes += 1
            return
        self.drop(peer)
        if first >= last:
            return
        self._places[peer] = (first, last, speed)
        self.changes += 1
        self.speeds[first, last] = self.speeds.get((first, last), 0.0) + speed
        bisect.insort(self._alike.setdefault((first, last), []), (self._distance(peer), peer))
        self._near.clear()

    def drop(self, peer: PeerId) -> None:
        first, last, speed = self._places.pop(peer, (0, 0, 0.0))
        if first >= last:
            return
        self.changes += 1
        self.speeds[first, last] -= speed
        held = self._alike[first, last]
        del held[bisect.bisect_left(held, (self._distance(peer), peer))]
        if not held:
            del self.speeds[first, last], self._alike[first, last]
        self._near.clear()

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        """The layers [first, last) that a peer holds, and its tokens/s; (0, 0, 0.0) if it holds none."""
        return self._places.get(peer, (0, 0, 0.0))

    def near(self, layer: int) -> Sequence[PeerId]:
        """Up to NEIGHBOURS holders of the layer, the nearest by hash, in the order of their ids."""
        if layer not in self._near:
            spans = [held[:NEIGHBOURS] for (first, last), held in self._alike.items() if first <= layer < last]
            self._near[layer] = sorted(peer for _, peer in sorted(chain.from_iterable(spans))[:NEIGHBOURS])
        return self._near[layer]

    def _distance(self, peer: PeerId) -> int:
        return rng.seed_of(0, "neighbours", self.own, peer)

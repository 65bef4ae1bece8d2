"""Who holds which layer, kept up to date record by record: a look costs the same however many peers there are.

Of a layer's holders a peer asks a few only, its neighbours: as many as it can know well, and others than its
neighbours' neighbours are (rendezvous hashing, Thaler and Ravishankar 1998). So work spreads over all holders though
nobody measures more than NEIGHBOURS of them.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.peers.records import PeerRecord

NEIGHBOURS = 24  # of a layer's holders


@dataclass(slots=True)
class Holders:
    """Of a model with so many layers, as `own` sees it. Who is not training holds nothing."""

    own: PeerId
    layers: int
    speeds: dict[tuple[int, int], float] = field(default_factory=dict)  # tokens/s of all with the same layers
    changes: int = 0  # so far, of who holds what and how fast it is
    _alike: Counter[tuple[int, int]] = field(default_factory=Counter)  # peers with the same layers
    _places: dict[PeerId, tuple[int, int, float]] = field(default_factory=dict)  # layers, tokens/s
    _by_layer: dict[int, list[tuple[int, PeerId]]] = field(default_factory=dict)  # by distance
    _near: dict[int, list[PeerId]] = field(default_factory=dict)  # what was asked for since it changed

    @property
    def count(self) -> int:
        """Peers that hold something."""
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
        self._alike[first, last] += 1
        self.speeds[first, last] = self.speeds.get((first, last), 0.0) + speed
        place = (self._distance(peer), peer)
        for layer in range(first, last):
            bisect.insort(self._by_layer.setdefault(layer, []), place)
            self._near.pop(layer, None)

    def drop(self, peer: PeerId) -> None:
        first, last, speed = self._places.pop(peer, (0, 0, 0.0))
        if first >= last:
            return
        self.changes += 1
        self._alike[first, last] -= 1
        self.speeds[first, last] -= speed
        if not self._alike[first, last]:
            del self.speeds[first, last], self._alike[first, last]
        place = (self._distance(peer), peer)
        for layer in range(first, last):
            held = self._by_layer[layer]
            del held[bisect.bisect_left(held, place)]
            self._near.pop(layer, None)

    def place(self, peer: PeerId) -> tuple[int, int, float]:
        """Layers [first, last) of one that holds some, and its tokens/s."""
        return self._places.get(peer, (0, 0, 0.0))

    def near(self, layer: int) -> Sequence[PeerId]:
        """Up to NEIGHBOURS holders of the layer, in the order of their ids."""
        if layer not in self._near:
            self._near[layer] = sorted(peer for _, peer in self._by_layer.get(layer, ())[:NEIGHBOURS])
        return self._near[layer]

    def _distance(self, peer: PeerId) -> int:
        return rng.seed_of(0, "neighbours", self.own, peer)

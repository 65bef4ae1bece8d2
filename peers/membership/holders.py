"""The index of which training peers hold which layers, and of what they can compute for other peers' micro-batches."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from decentral.core import rng
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId
from decentral.core.layer_work import KindCosts, Shape, shape_of
from decentral.peers.membership.records import PeerPhase, PeerRecord
from decentral.scheduler.throughput.link_limits import TokenLinks

NEIGHBOURS = 24  # a peer sends requests to only this many holders of a layer, so that it measures each link often
SPEED_UNIT = 2.0**-40  # speeds (tokens/s) are added as integer multiples of this: float sums depend on their order


@dataclass(slots=True)
class Holders:
    """An index of the training peers that hold each layer and compute for others, updated with each new record.

    A peer sends requests to only NEIGHBOURS holders of a layer, chosen by rendezvous hashing (Thaler and Ravishankar
    1998), so that the requests of all peers spread evenly over all holders. A peer's speed is what it publishes or, if
    that is less, what its links let it compute for other peers.
    """

    own: PeerId
    cuts: tuple[Fragment, ...]  # fragments of the whole model; with (), nothing is indexed
    links: TokenLinks
    speeds: dict[tuple[int, int], float] = field(default_factory=dict)  # (first, last) -> sum of its holders' tokens/s
    # (first, last) -> how many tokens/s its holders' links let enter or leave them (`TokenLinks.crossings_per_s`)
    crossings: dict[tuple[int, int], float] = field(default_factory=dict)
    changes: int = 0  # increases whenever a peer's layers or speed change, so that caches can tell that they are old
    # Layers (first, last) -> four sums over the peers with these layers, as integer multiples of SPEED_UNIT: speeds,
    # speeds times the embedding's share of a token's time, speeds times the head's share, and crossings.
    _totals: dict[tuple[int, int], tuple[int, int, int, int]] = field(default_factory=dict)
    _places: dict[PeerId, tuple[int, int, float]] = field(default_factory=dict)  # peer -> (first layer, end, tokens/s)
    _works: dict[PeerId, tuple[KindCosts, float]] = field(default_factory=dict)  # peer -> (layers' costs, crossings)
    # Layers (first, last) -> peers with exactly these layers, each with the distance of its hash from ours, sorted.
    _alike: dict[tuple[int, int], list[tuple[int, PeerId]]] = field(default_factory=dict)
    _near: dict[int, list[PeerId]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of peers that hold at least one layer."""
        return len(self._places)

    def put(self, peer: PeerId, record: PeerRecord) -> None:
        """Add a peer by its record, or update its span and speed."""
        if not self.cuts:
            return
        layers = self.cuts[-1].last
        takes_part = record.phase == PeerPhase.TRAINING and not record.profile.alone
        first, last = (record.first, min(record.last, layers)) if takes_part else (0, 0)
        was = self._places.get(peer, (0, 0, 0.0))
        stays = was[:2] == (first, last)
        if not stays:
            self.drop(peer)
        if first >= last:
            return
        profile = record.profile
        crossings = self.links.crossings_per_s(self.cuts, (first, last), profile.up)
        speed = self.links.supply(self.cuts, (first, last), crossings, profile.tokens_per_s, profile.costs)
        work = profile.costs, crossings
        if stays and (speed, work) == (was[2], self._works[peer]):
            return
        if stays:
            self._add(was, self._works[peer], -1)
        self._places[peer], self._works[peer] = (first, last, speed), work
        self._add(self._places[peer], work)
        self.changes += 1
        if stays:
            return
        bisect.insort(self._alike.setdefault((first, last), []), (self._distance(peer), peer))
        self._near.clear()

    def drop(self, peer: PeerId) -> None:
        """Remove a peer; do nothing if the index does not have it."""
        first, last, speed = self._places.pop(peer, (0, 0, 0.0))
        if first >= last:
            return
        self.changes += 1
        self._add((first, last, speed), self._works.pop(peer), -1)
        held = self._alike[first, last]
        del held[bisect.bisect_left(held, (self._distance(peer), peer))]
        if not held:
            del self.speeds[first, last], self.crossings[first, last]
            del self._totals[first, last], self._alike[first, last]
        self._near.clear()

    def shape(self, span: tuple[int, int]) -> Shape:
        """Return the shares of a token's time that the embedding, the blocks and the head take on the span's holders.

        Each is the holders' mean, weighted by speed. If no speed is known, the shares follow from the layers' FLOPs.
        """
        speed, embedding, head, _ = self._totals[span]
        if speed <= 0:
            return shape_of(self.cuts)
        blocks = max(0.0, 1 - (embedding + head) / speed)
        return embedding / speed, blocks, head / speed

    def span_and_speed(self, peer: PeerId) -> tuple[int, int, float]:
        """Return the layers [first, last) that a peer holds, and its tokens/s; (0, 0, 0.0) if it holds none."""
        return self._places.get(peer, (0, 0, 0.0))

    def near(self, layer: int) -> Sequence[PeerId]:
        """Return the holders of the layer that are nearest to us by hash distance, at most NEIGHBOURS, sorted by id."""
        if layer not in self._near:
            spans = [held[:NEIGHBOURS] for (first, last), held in self._alike.items() if first <= layer < last]
            self._near[layer] = sorted(peer for _, peer in sorted(chain.from_iterable(spans))[:NEIGHBOURS])
        return self._near[layer]

    def _add(self, place: tuple[int, int, float], work: tuple[KindCosts, float], sign: int = 1) -> None:
        """Add a peer's figures to the totals of its span, or with sign -1 subtract them, without a rounding error."""
        (first, last, tokens_per_s), (costs, crossings) = place, work
        embedding, _, head = shape_of(self.cuts, costs)
        figures = tokens_per_s, embedding * tokens_per_s, head * tokens_per_s, crossings
        before = self._totals.get((first, last), (0, 0, 0, 0))
        speed, first_s, last_s, crossed = (
            old + sign * round(figure / SPEED_UNIT) for old, figure in zip(before, figures, strict=True)
        )
        self._totals[first, last] = speed, first_s, last_s, crossed
        self.speeds[first, last], self.crossings[first, last] = speed * SPEED_UNIT, crossed * SPEED_UNIT

    def _distance(self, peer: PeerId) -> int:
        return rng.seed_of(0, "neighbours", self.own, peer)

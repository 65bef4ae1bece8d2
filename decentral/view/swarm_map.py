"""Draw a map of a swarm and the links in use; the distance between two places on the map shows the delay between them.

A place is a region, or a single peer in a small swarm. If there is room beside a link, its delay and the rate of its
slower direction are written there. Bottlenecks are red. Start reading at `SwarmMap`. Shapes: N peers, P places.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from decentral.core.plain_text import printable
from decentral.scheduler.topology.arrays import Floats, Ints
from decentral.scheduler.topology.topology import Topology, regions_of
from decentral.view.canvas import DIM, INK, NAME_CHARS, RED, USED, colours, counted, full_name, link_text, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_PEERS = 8  # with at most this many peers, the map shows each peer instead of regions
NAMED_PEERS = 32
NAMED_PLACES = 24  # a map with more places has smaller text, and does not list the peers of regions
MOST_PLACES = 40  # the map shows at most this many places; if there are more regions, the smallest ones share a place
DRAWN_LINKS = 60  # at most this many links are drawn: all bottlenecks first, then those with the most traffic
CHAR_IN, LINE_IN = 0.085, 0.17
NOTE_IN = 0.2
PUSHES = 300


@dataclass(slots=True)
class SwarmMap:
    """The places of a topology, and the text and colour of each place on the map."""

    topology: Topology
    place_N: Ints = field(init=False)
    names: list[str] = field(init=False)
    colours: list[tuple[float, float, float]] = field(init=False)

    def __post_init__(self) -> None:
        """Choose the places: one for each peer of a small swarm, else one for each region, but at most MOST_PLACES."""
        topology, region_N = self.topology, regions_of(self.topology)
        regions = list(dict.fromkeys(topology.regions))
        by_region = colours(len(regions))
        if len(regions) > MOST_PLACES:
            self._with_others_together(region_N, regions)
        elif len(topology) <= FEW_PEERS:
            self.place_N = np.arange(len(topology))
            self.names = [full_name(peer) for peer in topology.ids]
            self.colours = [by_region[number] for number in region_N]
        else:
            self.place_N = region_N
            self.names = [self._region_text(region) for region in regions]
            self.colours = by_region

    def _with_others_together(self, region_N: Ints, regions: list[str]) -> None:
        """Give the MOST_PLACES - 1 largest regions a place each, and all other regions the last place.

        Peers choose the names of their regions, so there may be any number of regions.
        """
        sizes = np.bincount(region_N)
        own = np.argsort(-sizes, kind="stable")[: MOST_PLACES - 1]
        place_of = np.full(len(regions), MOST_PLACES - 1)
        place_of[own] = np.arange(MOST_PLACES - 1)
        others, peers = len(regions) - len(own), len(self.topology) - int(sizes[own].sum())
        self.place_N = place_of[region_N]
        self.names = [*(self._region_text(regions[region]) for region in own), f"{others} other regions\n{peers} peers"]
        self.colours = colours(MOST_PLACES)

    def _region_text(self, region: str) -> str:
        """Return two lines of text: the name of a region, and the names or the number of the peers in the region."""
        topology = self.topology
        own = [peer for peer, where in zip(topology.ids, topology.regions, strict=True) if where == region]
        names = [short_name(peer, region) for peer in own]
        below = counted(names, 6) if len(topology) <= NAMED_PEERS else f"{len(own)} peers" if len(own) > 1 else "1 peer"
        return f"{printable(region, NAME_CHARS)}\n{below}"

    @property
    def count(self) -> int:
        """Number of places."""
        return len(self.names)

    def colour_of(self, peer: int) -> tuple[float, float, float]:
        """Return the colour of the place to which the peer with index `peer` belongs."""
        return self.colours[int(self.place_N[peer])]

    def between(self, used_NN: Floats) -> Floats:
        """Return (P, P): for each two places, the sum of a matrix (N, N) over pairs of their peers, both directions."""
        count, place_N = self.count, self.place_N
        sums = np.zeros((count, count))
        np.add.at(sums, (place_N[:, None], place_N[None, :]), used_NN)
        return np.asarray(sums + sums.T)

    def crossed(self, used_NN: Floats) -> bool:
        """Return whether the matrix of traffic `used_NN` is positive for two peers in different places."""
        return bool((self.between(used_NN) > 0)[~np.eye(self.count, dtype=bool)].any())

    def slowest(self, used_NN: Floats) -> Floats:
        """Return (N, N): 1.0 for two peers if the link between their places is one of the slowest in use, else 0.0.

        A link counts as one of the slowest if it is at most 5% faster than the slowest link. If all links in use are
        so slow, all values are 0.0.

        Args:
            used_NN: (N, N) traffic of the links, in any unit; a link is in use if its traffic is positive.
        """
        used, rate = self.between(used_NN) > 0, self._mean(self._rates())
        used &= ~np.eye(self.count, dtype=bool)
        rates = rate[used]
        slow = (
            used & (rate <= 1.05 * rates.min()) if len(rates) and np.ptp(rates) > 0.05 * rates.min() else ~used & used
        )
        return np.asarray(slow[np.ix_(self.place_N, self.place_N)].astype(float))

    def draw(self, axes: "Axes", links: "MapLinks") -> None:
        """Draw the places and the links between them on these axes."""
        axes.set_axis_off()
        place = axes.get_window_extent()
        size = place.width / axes.figure.dpi, place.height / axes.figure.dpi - NOTE_IN
        axes.set(xlim=(0, size[0]), ylim=(-NOTE_IN, size[1]))
        boxes = np.array([self._box(name) for name in self.names])
        places = _apart(_fitted(_positions(self._far()), size, boxes), boxes, size)
        self._links(axes, places, boxes, links)
        for name, colour, (x, y) in zip(self.names, self.colours, places, strict=True):
            shown = name if self.count <= NAMED_PLACES else name.split("\n")[0]
            box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": INK, "linewidth": 0.8}
            axes.text(x, y, shown, ha="center", va="center", fontsize=self._font, bbox=box, zorder=4)
        if note := self._note():
            axes.text(0, -NOTE_IN, note, fontsize=7.5, color=DIM, va="bottom")

    def _note(self) -> str:
        """Return the note below the map: median rate and delay inside places; between places, only if all are equal."""
        rate, delay = self._rates(), self.topology.delay_s
        same = self.place_N[:, None] == self.place_N[None, :]
        inside, between = same & ~np.eye(len(same), dtype=bool), ~same
        parts = [("between peers of one place", inside)] if inside.any() else []
        parts += [("between any two places", between)] if self._all_alike() else []
        return "; ".join(
            f"{name} {link_text(float(np.median(rate[of])), float(np.median(delay[of])))}" for name, of in parts
        )

    def _all_alike(self) -> bool:
        """Return whether all links between places have the same rate and delay."""
        between = self.place_N[:, None] != self.place_N[None, :]
        return bool(between.any()) and not any(np.ptp(of[between]) for of in (self._rates(), self.topology.delay_s))

    def _rates(self) -> Floats:
        """Return (N, N) rates of the links in bytes/s, measured in the slower direction of each link."""
        return np.minimum(self.topology.bandwidth, self.topology.bandwidth.T)

    def _box(self, name: str) -> tuple[float, float]:
        """Return the width and height of the frame around a place's text, in inches."""
        lines, size = name.split("\n") if self.count <= NAMED_PLACES else name.split("\n")[:1], self._font / 8.5
        return size * (0.2 + CHAR_IN * max(map(len, lines))), size * (0.16 + LINE_IN * len(lines))

    @property
    def _font(self) -> float:
        return 8.5 if self.count <= NAMED_PLACES else 6.0

    def _far(self) -> Floats:
        """Return (P, P) mean delays between places, in seconds."""
        return self._mean(self.topology.delay_s)

    def _mean(self, matrix: Floats) -> Floats:
        """Return (P, P) means of a matrix (N, N) over the peers of each pair of places. Infinite values count as 0."""
        pairs = self.between(np.where(np.isfinite(matrix), matrix, 0.0))
        sizes = np.bincount(self.place_N, minlength=self.count).astype(float)
        return np.asarray(pairs / (2 * np.outer(sizes, sizes)))

    def _links(self, axes: "Axes", places: Floats, boxes: Floats, links: "MapLinks") -> None:
        used, red, rate, far = (
            self.between(links.used),
            self.between(links.red),
            self._mean(self._rates()),
            self._far(),
        )
        pairs = [(a, b) for a, b in itertools.combinations(range(self.count), 2) if used[a, b] > 0]
        pairs = sorted(pairs, key=lambda pair: (-red[pair], -used[pair]))[:DRAWN_LINKS]
        wide = rate if links.wide_is_fast else used
        most = max((wide[pair] for pair in pairs), default=1.0)
        taken = [(*places[number], *boxes[number]) for number in range(self.count)]
        for a, b in pairs:
            colour = RED if red[a, b] else USED
            width, above = 0.6 + 3.4 * wide[a, b] / most, 2 if red[a, b] else 1
            across, up = places[[a, b]].T
            axes.plot(across, up, color=colour, linewidth=width, alpha=0.6, zorder=above)
            if self._all_alike():
                continue
            text = link_text(rate[a, b], far[a, b])
            place = _free_place(places[a], places[b], text, taken, needed=bool(red[a, b]))
            if place is None:
                continue
            back = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            colour = RED if red[a, b] else DIM
            axes.text(place[0], place[1], text, ha="center", va="center", fontsize=7, color=colour, bbox=back, zorder=3)


@dataclass(frozen=True, slots=True, eq=False)
class MapLinks:
    """Inputs of `SwarmMap.draw`: which links between peers to draw, and how."""

    used: Floats  # (N, N) traffic of each link
    red: Floats  # (N, N) links with a value above 0 are bottlenecks and drawn red
    wide_is_fast: bool = False  # whether wider lines mean faster links, not more traffic


def matrix_of(topology: Topology, pairs: Mapping[tuple[str, str], float]) -> Floats:
    """Return an (N, N) matrix of the values in `pairs`, whose keys are pairs of peer ids. Other entries are 0."""
    index = {peer: number for number, peer in enumerate(topology.ids)}
    found = np.zeros((len(topology), len(topology)))
    for (a, b), value in pairs.items():
        found[index[a], index[b]] += value
    return found


def _positions(far: Floats) -> Floats:
    """Return (P, 2) coordinates whose distances approximate the delays `far` (P, P), by classical scaling.

    If all delays are equal or there are fewer than three places, the places lie on a circle. Source: Torgerson, 1952.
    """
    count = len(far)
    angle = 2 * np.pi * np.arange(count) / count + np.pi / 4
    ring: Floats = np.stack((np.cos(angle), np.sin(angle)), axis=1)
    if count < 3 or np.ptp(far[~np.eye(count, dtype=bool)]) < 1e-9:
        return ring
    centre = np.eye(count) - 1 / count
    squares = np.where(np.eye(count, dtype=bool), 0.0, far**2)
    values, vectors = np.linalg.eigh(-0.5 * centre @ squares @ centre)
    flat: Floats = vectors[:, [-1, -2]] * np.sqrt(np.maximum(values[[-1, -2]], 0))
    return flat


def _fitted(places: Floats, size: tuple[float, float], boxes: Floats) -> Floats:
    """Scale coordinates (P, 2) to a drawing of `size` inches so that the text boxes of all places are inside."""
    low, span = places.min(axis=0), np.maximum(np.ptp(places, axis=0), 1e-12)
    edge = boxes.max(axis=0) / 2 + 0.05
    return np.asarray(edge + (places - low) / span * np.maximum(np.array(size) - 2 * edge, 0.1))


def _apart(places: Floats, boxes: Floats, size: tuple[float, float]) -> Floats:
    """Move overlapping text boxes apart in at most PUSHES iterations, and return their coordinates (P, 2) in inches."""
    places, half = places.copy(), boxes / 2
    for _ in range(PUSHES):
        moved = False
        for a, b in itertools.combinations(range(len(places)), 2):
            gap = places[b] - places[a]
            over = half[a] + half[b] + (0.25, 0.2) - np.abs(gap)
            if (over > 0).all():
                axis = int(np.argmin(over))
                push = np.zeros(2)
                push[axis] = 0.51 * over[axis] * (1.0 if gap[axis] >= 0 else -1.0)
                places[a], places[b], moved = places[a] - push, places[b] + push, True
        places = np.clip(places, half, np.array(size) - half)
        if not moved:
            break
    return places


def _free_place(
    a: Floats, b: Floats, text: str, taken: list[tuple[float, float, float, float]], needed: bool
) -> tuple[float, float] | None:
    """Return a point on the line from a to b at which a text covers no box in `taken`, and add its box to `taken`.

    If no point on the line is free, return None. If `needed` is True, try points beside the line as well; if they
    are not free either, return the middle of the line.
    """
    width, height = 0.062 * len(text), 0.15
    across = np.array([a[1] - b[1], b[0] - a[0]]) / max(1e-9, float(np.hypot(b[0] - a[0], b[1] - a[1])))
    for aside in (0.0, 0.17, -0.17, 0.34, -0.34) if needed else (0.0,):
        for part in (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74):
            x, y = a + part * (b - a) + aside * across
            if not any(abs(x - cx) < (width + w) / 2 and abs(y - cy) < (height + h) / 2 for cx, cy, w, h in taken):
                taken.append((x, y, width, height))
                return float(x), float(y)
    middle = (a + b) / 2
    return (float(middle[0]), float(middle[1])) if needed else None

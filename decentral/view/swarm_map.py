"""A map of a swarm: places that are near by delay are near on it, and links are drawn that carry something.

A place is a region, or a peer where these are few. A link has its rate (of the slower direction) and delay beside
it, where there is room, and is red if it decides how long the whole takes.
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

FEW_PEERS = 8  # each is a place of its own
NAMED_PEERS = 32  # in the whole swarm: their names stand in their regions
NAMED_PLACES = 24
MOST_PLACES = 40
DRAWN_LINKS = 60
CHAR_IN, LINE_IN = 0.085, 0.17  # size of a character and of a line of text
NOTE_IN = 0.2  # below the map
PUSHES = 300  # of pushing places apart


@dataclass(slots=True)
class SwarmMap:
    """Places of a topology, and what is drawn between them."""

    topology: Topology
    place_N: Ints = field(init=False)  # each peer's place
    names: list[str] = field(init=False)  # of the places
    colours: list[tuple[float, float, float]] = field(init=False)  # likewise

    def __post_init__(self) -> None:
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
        """The regions with the fewest peers share the last place: whoever likes names a region of its own."""
        sizes = np.bincount(region_N)
        own = np.argsort(-sizes, kind="stable")[: MOST_PLACES - 1]
        place_of = np.full(len(regions), MOST_PLACES - 1)
        place_of[own] = np.arange(MOST_PLACES - 1)
        others, peers = len(regions) - len(own), len(self.topology) - int(sizes[own].sum())
        self.place_N = place_of[region_N]
        self.names = [*(self._region_text(regions[region]) for region in own), f"{others} other regions\n{peers} peers"]
        self.colours = colours(MOST_PLACES)

    def _region_text(self, region: str) -> str:
        """A region's name, and below it those of its peers, or their number."""
        topology = self.topology
        own = [peer for peer, where in zip(topology.ids, topology.regions, strict=True) if where == region]
        names = [short_name(peer, region) for peer in own]
        below = counted(names, 6) if len(topology) <= NAMED_PEERS else f"{len(own)} peers" if len(own) > 1 else "1 peer"
        return f"{printable(region, NAME_CHARS)}\n{below}"

    @property
    def count(self) -> int:
        return len(self.names)

    def colour_of(self, peer: int) -> tuple[float, float, float]:
        return self.colours[int(self.place_N[peer])]

    def between(self, used_NN: Floats) -> Floats:
        """What is used between peers, added up between places, both directions together: places x places."""
        count, place_N = self.count, self.place_N
        sums = np.zeros((count, count))
        np.add.at(sums, (place_N[:, None], place_N[None, :]), used_NN)
        return np.asarray(sums + sums.T)

    def crossed(self, used_NN: Floats) -> bool:
        """Whether any link between two places is used."""
        return bool((self.between(used_NN) > 0)[~np.eye(self.count, dtype=bool)].any())

    def slowest(self, used_NN: Floats) -> Floats:
        """1 for the slowest of the links between places that are used; none where all are equally fast."""
        used, rate = self.between(used_NN) > 0, self._mean(self._rates())
        used &= ~np.eye(self.count, dtype=bool)
        rates = rate[used]
        slow = (
            used & (rate <= 1.05 * rates.min()) if len(rates) and np.ptp(rates) > 0.05 * rates.min() else ~used & used
        )
        return np.asarray(slow[np.ix_(self.place_N, self.place_N)].astype(float))

    def draw(self, axes: "Axes", links: "MapLinks") -> None:
        """Draws the places, and the links between them."""
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
        """What links inside places are like, and those between places where all are alike."""
        rate, delay = self._rates(), self.topology.delay_s
        same = self.place_N[:, None] == self.place_N[None, :]
        inside, between = same & ~np.eye(len(same), dtype=bool), ~same
        parts = [("between peers of one place", inside)] if inside.any() else []
        parts += [("between any two places", between)] if self._all_alike() else []
        return "; ".join(
            f"{name} {link_text(float(np.median(rate[of])), float(np.median(delay[of])))}" for name, of in parts
        )

    def _all_alike(self) -> bool:
        """Whether all links between places have one rate and one delay: then it stands once below the map."""
        between = self.place_N[:, None] != self.place_N[None, :]
        return bool(between.any()) and not any(np.ptp(of[between]) for of in (self._rates(), self.topology.delay_s))

    def _rates(self) -> Floats:
        """A link's rate is that of its slower direction, in bytes/s: N x N."""
        return np.minimum(self.topology.bandwidth, self.topology.bandwidth.T)

    def _box(self, name: str) -> tuple[float, float]:
        """Width and height of a place's text and frame, in inches."""
        lines, size = name.split("\n") if self.count <= NAMED_PLACES else name.split("\n")[:1], self._font / 8.5
        return size * (0.2 + CHAR_IN * max(map(len, lines))), size * (0.16 + LINE_IN * len(lines))

    @property
    def _font(self) -> float:
        return 8.5 if self.count <= NAMED_PLACES else 6.0

    def _far(self) -> Floats:
        """The mean delay between places, in seconds."""
        return self._mean(self.topology.delay_s)

    def _mean(self, matrix: Floats) -> Floats:
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
    """How much each link between two peers carries, in any unit, and which ones decide how long it takes: N x N."""

    used: Floats
    red: Floats
    wide_is_fast: bool = False  # the width of a line is the link's rate, not what it carries


def matrix_of(topology: Topology, pairs: Mapping[tuple[str, str], float]) -> Floats:
    """Numbers of pairs of peer ids as an N x N matrix."""
    index = {peer: number for number, peer in enumerate(topology.ids)}
    found = np.zeros((len(topology), len(topology)))
    for (a, b), value in pairs.items():
        found[index[a], index[b]] += value
    return found


def _positions(far: Floats) -> Floats:
    """Coordinates whose distances resemble the delays (classical scaling); a ring where all delays are equal."""
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
    """The places stretched over the drawing, in inches, so that their boxes are inside."""
    low, span = places.min(axis=0), np.maximum(np.ptp(places, axis=0), 1e-12)
    edge = boxes.max(axis=0) / 2 + 0.05
    return np.asarray(edge + (places - low) / span * np.maximum(np.array(size) - 2 * edge, 0.1))


def _apart(places: Floats, boxes: Floats, size: tuple[float, float]) -> Floats:
    """Pushes boxes apart that cover each other, or nearly, and keeps them inside."""
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
    """A place on the line from a to b where the text covers nothing that is `taken`; it is then. None: there is none.

    A text that is `needed` may stand beside the line, and at worst on something else.
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

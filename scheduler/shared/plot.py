"""Drawings of plans as maps, and of cost against seconds. They need the `plot` extra (matplotlib)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Floats
from decentral.scheduler.shared.topology import Topology, regions_of

MOST_PATHS = 12
MOST_NAMES = 24


def map_of(topology: Topology, title: str, paths: Sequence[Sequence[str]], file: str) -> None:
    """Draws regions so that near ones are near, and the first of these paths of peer ids. May raise UserError."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(topology.regions))
    position = _positions(topology, len(names))
    figure, axes = pyplot.subplots(figsize=(9, 7))
    region_of = dict(zip(topology.ids, (names.index(region) for region in topology.regions), strict=True))
    for number, path in enumerate(paths[:MOST_PATHS]):
        shift = 0.012 * np.array([np.cos(number), np.sin(number)])
        points = np.array([position[region_of[peer]] + shift for peer in path])
        axes.plot(points[:, 0], points[:, 1], "-", alpha=0.7, linewidth=1.5, color=pyplot.cm.tab20(number % 20))
    sizes = np.bincount(regions_of(topology))
    axes.scatter(position[:, 0], position[:, 1], s=60 + 20 * sizes, color="#dde", edgecolor="#335", zorder=3)
    for name, point, size in zip(names, position, sizes, strict=True):
        if len(names) <= MOST_NAMES:
            axes.annotate(f"{name}\n{size}", point, ha="center", va="center", fontsize=8, zorder=4)
    axes.set_title(title)
    axes.set_axis_off()
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def comparison(records: Mapping[str, Sequence[tuple[float, float]]], file: str) -> None:
    """Draws the best cost so far against seconds, a line per solver; a hand layout is level. May raise UserError."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    end = max(record[-1][0] for record in records.values()) or 1.0
    for name, record in records.items():
        seconds, costs = zip(*record, (end, record[-1][1]), strict=True)
        axes.step(seconds, costs, where="post", label=name, linestyle="--" if len(record) == 1 else "-")
    axes.set_xlabel("seconds")
    axes.set_ylabel("cost, s per step")
    axes.legend()
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'decentral[plot]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a region's name may have dollar signs
    from matplotlib import pyplot

    return pyplot


def _positions(topology: Topology, count: int) -> Floats:
    """Coordinates whose distances resemble the delays (classical scaling); a ring where all delays are equal."""
    region = regions_of(topology)
    first = np.array([int(np.argmax(region == number)) for number in range(count)])
    delay = topology.delay_s[np.ix_(first, first)]
    far = (delay + delay.T) / 2
    angle = 2 * np.pi * np.arange(count) / count
    ring: Floats = np.stack((np.cos(angle), np.sin(angle)), axis=1)
    if count < 3 or np.ptp(far[~np.eye(count, dtype=bool)]) == 0:
        return ring
    centre = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centre @ far**2 @ centre)
    flat: Floats = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0))
    return np.asarray(flat / np.abs(flat).max())

"""Drawings: regions, links and pipelines like a map; and cost against seconds. Needs the `plot` extra (matplotlib)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decentral.core.errors import UserError
from decentral.scheduler.shared.arrays import Floats
from decentral.scheduler.shared.topology import Topology
from decentral.scheduler.sync.sync_plan import Plan, regions_of


def map_of(topology: Topology, plan: Plan, path: str) -> None:
    """Regions placed so that near ones are near, links by their rate, and up to 12 pipelines or routes over them."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(topology.regions))
    place = _places(topology, len(names))
    figure, axes = pyplot.subplots(figsize=(9, 7))
    region_of = dict(zip(topology.ids, (names.index(region) for region in topology.regions), strict=True))
    for number, route in enumerate(_routes(plan)[:12]):
        shift = 0.012 * np.array([np.cos(number), np.sin(number)])
        points = np.array([place[region_of[peer]] + shift for peer in route])
        axes.plot(points[:, 0], points[:, 1], "-", alpha=0.7, linewidth=1.5, color=pyplot.cm.tab20(number % 20))
    sizes = np.bincount(regions_of(topology))
    axes.scatter(place[:, 0], place[:, 1], s=60 + 20 * sizes, color="#dde", edgecolor="#335", zorder=3)
    for name, point, size in zip(names, place, sizes, strict=True):
        if len(names) <= 24:
            axes.annotate(f"{name}\n{size}", point, ha="center", va="center", fontsize=8, zorder=4)
    what = plan.cost["total"] if plan.cost else (plan.throughput or {}).get("tokens_per_s", 0.0)
    axes.set_title(f"{plan.objective}, {plan.solver}: {what:.5g} {'s' if plan.cost else 'tokens/s'}")
    axes.set_axis_off()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def comparison(records: Mapping[str, Sequence[tuple[float, float]]], path: str) -> None:
    """Best cost so far against seconds, a line per solver; a hand layout is a level line."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    end = max(record[-1][0] for record in records.values()) or 1.0
    for name, record in records.items():
        seconds, costs = zip(*record, (end, record[-1][1]), strict=True)
        axes.step(seconds, costs, where="post", label=name, linestyle="--" if len(record) == 1 else "-")
    axes.set_xlabel("seconds")
    axes.set_ylabel("cost, s per step")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'decentral[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _routes(plan: Plan) -> list[list[str]]:
    if plan.pipelines is not None:
        return plan.pipelines
    return [[hop[0] for hop in route["hops"]] for route in plan.routes or []]


def _places(topology: Topology, count: int) -> Floats:
    """Coordinates for which distances resemble delays (classical scaling); a ring where delays say nothing."""
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
    scaled: Floats = flat / np.abs(flat).max()
    return scaled

"""Draw a scheduler's plan: where its peers are, which layers each peer holds, and which links are used or slow.

Start reading at `draw_plan`. Shapes: N peers, S stages, R replicas (pipelines).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from decentral.core.plain_text import printable
from decentral.core.units import readable_number
from decentral.scheduler.sync.layout_cost import Problem, problem_of
from decentral.scheduler.sync.step_needs import divided
from decentral.scheduler.topology.arrays import Flags, Floats
from decentral.scheduler.topology.plan_forms import Plan, SyncPlan, ThroughputPlan
from decentral.scheduler.topology.topology import Topology, Workload
from decentral.view.canvas import DIM, INK, NAME_CHARS, RED, USED, full_name, heading, picture, seconds_text
from decentral.view.swarm_map import MapLinks, SwarmMap, matrix_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import FancyBboxPatch

MAP_IN = 6.6
NAMED_CELLS = 160  # in a picture of a synchronous plan with more peers, the peers' names are left out
NAMED_ROWS = 32  # in a picture of a plan with more peers, peers of one region that hold the same layers share a row
MOST_SPAN_ROWS = 64  # the picture shows at most this many rows; its title gives their total number
SAME_TIME = 1e-6  # two durations with at most this relative difference count as equal


def draw_plan(plan: Plan, topology: Topology, file: str) -> None:
    """Draw a plan for the peers and links of `topology` into a file.

    Raises:
        UserError: If matplotlib is not installed, or the file cannot be written.
    """
    if isinstance(plan, SyncPlan):
        _draw_sync(plan, topology, file)
    else:
        assert isinstance(plan, ThroughputPlan), f"no picture for objective {plan.objective}"
        _draw_throughput(plan, topology, file)


def _draw_sync(plan: SyncPlan, topology: Topology, file: str) -> None:
    stages, replicas = len(plan.stages), len(plan.pipelines)
    workload = divided(topology.workload or Workload(stages=None, replicas=None), stages, replicas)
    grid, swarm = StageGrid(plan, topology, problem_of(topology, workload)), SwarmMap(topology)
    width, height = MAP_IN + max(6.6, 1.6 + 0.95 * stages), max(5.6, 2.6 + 0.42 * replicas)
    with picture(file, width, height) as figure:
        top = heading(
            figure, grid.heading(), f"{len(topology)} peers, objective {plan.objective}, solver {plan.solver}"
        )
        low = 0.2 / height
        place = figure.add_axes((0.2 / width, low, (MAP_IN - 0.4) / width, top - low))
        _title(place, "Links between places: the wider, the faster; red: the links that decide the step's time")
        swarm.draw(place, MapLinks(grid.used(), grid.slow(), wide_is_fast=True))
        grid.draw(figure.add_axes((MAP_IN / width, low, 1 - (MAP_IN + 0.2) / width, top - low)), swarm)


class StageGrid:
    """The peers of a synchronous plan as a grid: a column for each stage, a row for each pipeline."""

    def __init__(self, plan: SyncPlan, topology: Topology, problem: Problem) -> None:
        """Compute the plan's communication times from `problem`, the seconds of transfers between each two peers."""
        index = {peer: number for number, peer in enumerate(topology.ids)}
        self.topology, self.cost = topology, plan.cost
        self.peers_SR = np.array([[index[peer] for peer in stage] for stage in plan.stages])
        self.hops_SR = 2 * problem.pipe_NN[self.peers_SR[:-1], self.peers_SR[1:]]  # seconds, forward plus backward
        pairs = [problem.data_NN[np.ix_(stage, stage)] for stage in self.peers_SR]
        self.averaging_SRR = np.array(pairs)  # seconds that two peers of a stage need to average

    @property
    def joints(self) -> Floats:
        """(S - 1,) seconds of the slowest hop between each stage and the next stage, forward plus backward."""
        return np.asarray(self.hops_SR.max(axis=1)) if len(self.hops_SR) else np.zeros(0)

    @property
    def averaging_S(self) -> Floats:
        """(S,) seconds that the slowest peer of each stage needs to average weights with the stage's other peers."""
        return np.asarray(self.averaging_SRR.sum(axis=2).max(axis=1))

    def heading(self) -> str:
        """Return the picture's title, with the seconds of communication in a step."""
        stages, replicas = self.peers_SR.shape
        return (
            f"A synchronous step communicates for {seconds_text(self.cost['total'])}: "
            f"{seconds_text(self.cost['pipeline'])} along pipelines of {stages} stages, and "
            f"{seconds_text(self.cost['data_parallel'])} to average the {replicas} replicas of each stage"
        )

    def used(self) -> Floats:
        """Return (N, N): traffic between peers in a relative unit, and 0 for two peers that do not communicate."""
        found = np.zeros((len(self.topology), len(self.topology)))
        np.add.at(found, (self.peers_SR[:-1], self.peers_SR[1:]), 1.0)
        for stage in self.peers_SR:
            found[np.ix_(stage, stage)] += 1 / max(1, len(stage))
        np.fill_diagonal(found, 0.0)
        return found

    def slow(self) -> Floats:
        """Return (N, N): 1.0 for each bottleneck link, 0.0 for other links.

        Bottlenecks are the slowest hops between stages. If a peer needs the longest time of all peers to average
        weights, its slowest links to the other peers of its stage (within 10%) are bottlenecks as well.
        """
        found = np.zeros((len(self.topology), len(self.topology)))
        for joint, row in zip(*np.nonzero(self.deciding_hops()), strict=True):
            found[self.peers_SR[joint, row], self.peers_SR[joint + 1, row]] = 1.0
        for stage, row in zip(*np.nonzero(self.deciding_peers()), strict=True):
            links = self.averaging_SRR[stage, row]
            found[self.peers_SR[stage, row], self.peers_SR[stage][links * 1.1 >= links.max()]] = 1.0
        return found

    def deciding_hops(self) -> Flags:
        """Return (S - 1, R): True for the slowest hops between stages; all False if all hops take equally long."""
        if not self.hops_SR.size or np.ptp(self.hops_SR) <= SAME_TIME * self.hops_SR.max():
            return np.zeros(self.hops_SR.shape, bool)
        return np.asarray(self.hops_SR >= (1 - SAME_TIME) * self.hops_SR.max())

    def deciding_peers(self) -> Flags:
        """Return (S, R): True for the peers whose averaging takes longest; all False if all peers take equally long."""
        seconds = self.averaging_SRR.sum(axis=2)
        if np.ptp(seconds) <= SAME_TIME * seconds.max():
            return np.zeros(seconds.shape, bool)
        return np.asarray(seconds >= (1 - SAME_TIME) * seconds.max())

    def draw(self, axes: "Axes", swarm: SwarmMap) -> None:
        """Draw the grid on these axes, with the same colours of peers as on the map `swarm`."""
        stages, replicas = self.peers_SR.shape
        _title(axes, "Each row is a pipeline; the peers of a column hold the same layers")
        axes.set_axis_off()
        axes.set(xlim=(-1.05, stages - 0.4), ylim=(replicas + 0.2, -1.1))
        red_peers, red_hops = self.deciding_peers(), self.deciding_hops()
        for stage in range(stages):
            axes.text(stage, -0.78, f"stage {stage + 1}", ha="center", fontsize=8.5, color=DIM)
            for row, peer in enumerate(self.peers_SR[stage]):
                self._draw_cell(axes, (stage, row), swarm.colour_of(int(peer)), bool(red_peers[stage, row]))
            self._say(axes, stage, replicas - 0.15, self.averaging_S[stage], bool(red_peers[stage].any()))
        for joint in range(stages - 1):
            for row in range(replicas):
                colour, width = (RED, 2.6) if red_hops[joint, row] else (USED, 1.2)
                axes.plot([joint + 0.38, joint + 0.62], [row, row], color=colour, linewidth=width, zorder=2)
            self._say(axes, joint + 0.5, -0.45, self.joints[joint], bool(red_hops[joint].any()))
        if stages > 1:
            axes.text(-0.5, -0.45, "slowest hop,\nboth ways", ha="right", va="center", fontsize=7, color=DIM)
        axes.text(-0.5, replicas - 0.15, "averaging", ha="right", va="center", fontsize=7, color=DIM)

    def _draw_cell(self, axes: "Axes", at: tuple[int, int], colour: tuple[float, float, float], red: bool) -> None:
        (x, y), edge, width = at, RED if red else INK, 2.0 if red else 0.5
        axes.add_patch(_cell(x, y, colour, edge, width))
        if self.peers_SR.size <= NAMED_CELLS:
            name = full_name(self.topology.ids[self.peers_SR[at]])
            axes.text(x, y, name, ha="center", va="center", fontsize=min(8.0, 68 / max(6, len(name))), zorder=4)

    def _say(self, axes: "Axes", x: float, y: float, seconds: float, red: bool) -> None:
        """Write a time at (x, y), in bold and red if `red` is True."""
        color, weight, said = RED if red else DIM, "bold" if red else "normal", seconds_text(float(seconds))
        axes.text(x, y, said, ha="center", va="center", fontsize=8, color=color, fontweight=weight)


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, fontsize=9.5, loc="left", color=DIM)


def _cell(x: float, y: float, colour: tuple[float, float, float], edge: str, width: float) -> "FancyBboxPatch":
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x - 0.37, y - 0.3), 0.74, 0.6, boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour,
                          edgecolor=edge, linewidth=width, zorder=3)  # fmt: skip


def _draw_throughput(plan: ThroughputPlan, topology: Topology, file: str) -> None:
    swarm, rows = SwarmMap(topology), span_rows(plan, topology)
    maps: dict[str, Mapping[tuple[str, str], float]] = {
        "Who averages with whom: the wider, the more often": gossip_of(plan),
        "Routes of micro-batches: the wider, the more tokens": hops_of(plan),
    }
    drawn = [(title, matrix_of(topology, used)) for title, used in maps.items()]
    drawn = [(title, used) for title, used in drawn if swarm.crossed(used)]
    width, height = MAP_IN * len(drawn) + 6.4, max(5.6, 1.9 + 0.2 * min(MOST_SPAN_ROWS, len(rows)))
    with picture(file, width, height) as figure:
        rate, bound = plan.throughput["tokens_per_s"], plan.throughput["bound"]
        share = f"{rate / bound:.0%} of what the devices could compute if links cost nothing"
        text = f"{readable_number(rate)} tokens/s, {share}"
        top = heading(figure, text, f"{len(topology)} peers, objective {plan.objective}, solver {plan.solver}")
        for number, (title, used) in enumerate(drawn):
            high = min(top - 0.2 / height, MAP_IN / height)
            axes = figure.add_axes(((MAP_IN * number + 0.2) / width, top - high, (MAP_IN - 0.4) / width, high))
            _title(axes, f"{title}; red: the slowest links")
            swarm.draw(axes, MapLinks(used, swarm.slowest(used)))
        left, low = (MAP_IN * len(drawn) + 1.3) / width, 0.6 / height
        _draw_spans(figure.add_axes((left, low, 1 - left - 0.9 / width, top - low)), rows, swarm)


def gossip_of(plan: ThroughputPlan) -> dict[tuple[str, str], float]:
    """Return the probability that a peer pulls from another peer, for each pair (pulling peer, other peer)."""
    return {(peer, other): part for peer, row in plan.gossip["weights"].items() for other, part in row.items()}


def hops_of(plan: ThroughputPlan) -> dict[tuple[str, str], float]:
    """Return the share of all tokens that the sender passes on to the receiver, for each pair (sender, receiver)."""
    found: dict[tuple[str, str], float] = {}
    for route in plan.routes:
        names = [hop[0] for hop in route["hops"]]
        for pair in itertools.pairwise(names):
            found[pair] = found.get(pair, 0.0) + route["share"]
    return found


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A row of the picture: one peer, or peers of one region that hold the same layers."""

    name: str
    peer: int  # index in the topology of the row's first peer
    first: int  # the row's peers hold the layers from `first` to `last` - 1
    last: int
    share: float  # share of the swarm's work that the row's peers do


def span_rows(plan: ThroughputPlan, topology: Topology) -> list[SpanRow]:
    """Return the rows of the picture, sorted by layers. With over NAMED_ROWS peers, several peers may share a row."""
    share, shared = _shares(plan), len(plan.spans) > NAMED_ROWS
    groups: dict[tuple[int, int, str], list[int]] = {}
    for number, (peer, region) in enumerate(zip(topology.ids, topology.regions, strict=True)):
        if peer in plan.spans:
            first, last = plan.spans[peer]
            groups.setdefault((first, last, region if shared else peer), []).append(number)
    rows = []
    for (first, last, region), peers in sorted(groups.items(), key=lambda item: (item[0][:2], item[1])):
        one = full_name(topology.ids[peers[0]])
        name = f"{printable(region, NAME_CHARS)}, {len(peers)} peers" if len(peers) > 1 else one
        rows.append(SpanRow(name, peers[0], first, last, sum(share[topology.ids[peer]] for peer in peers)))
    return rows


def _draw_spans(axes: "Axes", rows: Sequence[SpanRow], swarm: SwarmMap) -> None:
    """Draw a bar over the layers of each row; at the right, write the device and the share of the swarm's work."""
    shown, layers = rows[:MOST_SPAN_ROWS], max(row.last for row in rows)
    more = f" (the first {len(shown)} of {len(rows)} rows)" if len(shown) < len(rows) else ""
    _title(axes, f"Who holds which layers; at the right the share of the work{more}")
    devices = swarm.topology.devices
    for number, row in enumerate(shown):
        colour = swarm.colour_of(row.peer)
        axes.barh(number, row.last - row.first, 0.72, row.first, color=colour, edgecolor=INK, linewidth=0.5)
        device = f"  {printable(devices[row.peer], 14)}" if len(set(devices)) > 1 else ""
        axes.text(1.01 * layers, number, f"{row.share:.1%}{device}", va="center", fontsize=7.5, color=DIM)
    axes.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=8)
    axes.set(xlim=(0, layers), ylim=(len(shown) - 0.4, -0.6))
    axes.set_xlabel("layers of the model, from tokens to logits", fontsize=8.5)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(length=0, labelsize=8)


def _shares(plan: ThroughputPlan) -> dict[str, float]:
    """Return each peer's share of the work. Work is tokens times layers, summed over all routes."""
    done = dict.fromkeys(plan.spans, 0.0)
    for route in plan.routes:
        for peer, first, last in route["hops"]:
            done[peer] += route["share"] * (last - first)
    total = sum(done.values()) or 1.0
    return {peer: done[peer] / total for peer in plan.spans}


def draw_comparison(records: Mapping[str, Sequence[tuple[float, float]]], file: str, unit: str) -> None:
    """Draw a line for each solver into a file.

    Args:
        records: For each solver, points (seconds of search, best value so far). A plan that is not the result of a
            search has one point.
        file: Path of the picture.
        unit: Unit of the values: `s`, the communication of a step, or `tokens/s`.

    Raises:
        UserError: If matplotlib is not installed, or the file cannot be written.
    """
    with picture(file, 9, 5) as figure:
        axes = figure.add_axes((0.08, 0.12, 0.68, 0.78))
        end = max(record[-1][0] for record in records.values()) or 1.0
        names = []
        for name, record in records.items():
            seconds, costs = zip(*record, (end, record[-1][1]), strict=True)
            (line,) = axes.step(seconds, costs, where="post", linestyle="--" if len(record) == 1 else "-")
            names.append((record[-1][1], f"{name}  {record[-1][1]:.4g} {unit}", line.get_color()))
        low, high = axes.get_ylim()
        last = low - 1.0
        for cost, text, colour in sorted(names):
            last = max(cost, last + 0.045 * (high - low))
            axes.text(end * 1.01, last, text, color=colour, fontsize=9, va="center")
        axes.set(
            xlim=(0, end), xlabel="seconds of search", ylabel="communication of a step, s" if unit == "s" else unit
        )
        axes.set_title(
            "The best plan of each solver so far; dashed: layouts that a person would draw",
            fontsize=11,
            loc="left",
            color=DIM,
        )

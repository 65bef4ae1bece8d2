"""A new plan from an old one, after peers left, joined, or slowed: moving layers costs time too.

    price of a plan = its seconds per step * steps ahead + the seconds that its moves take

A peer that keeps its stage moves nothing. One that changes, or joins, downloads the stage from the fastest survivor
that holds it; peers download at the same time, so the slowest download counts. What no survivor holds can only come
from a checkpoint, and is reported (Oobleck, arXiv 2309.08125, keeps such a set from being empty with its templates).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decentral.core import rng as chance
from decentral.scheduler.shared.arrays import Ints
from decentral.scheduler.shared.margin import MARGIN
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology
from decentral.scheduler.sync import evolve
from decentral.scheduler.sync.layout_cost import Layout, Problem, layout, problem
from decentral.scheduler.sync.sync_plan import regions_of
from decentral.scheduler.throughput import max_flow, span_search
from decentral.scheduler.throughput.layer_costs import LayerCosts


@dataclass(frozen=True, slots=True, eq=False)
class Replanned:
    """`repaired_s` and `fresh_s`: seconds until `steps` are done, moving included, of the two candidates."""

    layout: Layout
    moved: tuple[str, ...]  # peers that must download a stage
    move_s: float
    lost: tuple[int, ...]  # old stages that no survivor holds
    repaired_s: float
    fresh_s: float
    reason: str


def sync_replan(
    topology: Topology,
    old_stages: Sequence[Sequence[str]],
    steps: int,
    seed: int,
    budget: SearchBudget,
    stage_bytes: float | None = None,
) -> Replanned:
    """Repairs the old plan with the fewest moves, searches on from it, and takes what is done sooner.

    `stage_bytes`: what a peer downloads to take over a stage; default: the workload's gradient three times (weights
    and two moments). Raises UserError if the swarm no longer fills the workload.
    """
    assert topology.workload is not None
    task = problem(topology, topology.workload)
    size = stage_bytes if stage_bytes is not None else 3e9 * topology.workload.gradient_gbytes
    holding = _holding(topology, old_stages)
    repaired_slots = _repaired(task, topology, holding)
    rng = chance.arrays(seed, "replan")
    fresh_slots = evolve.search(task, regions_of(topology), budget, rng, first=repaired_slots)
    candidates = []
    for slots in (repaired_slots, fresh_slots):
        found = _named_like_old(layout(task, slots, reorder=slots is fresh_slots), holding)
        move_s, moved = move_seconds(topology, found.stages_SR, holding, size)
        candidates.append((found.cost.total * steps + move_s, move_s, moved, found))
    repaired, fresh = candidates
    chosen = fresh if fresh[0] < repaired[0] * (1 - MARGIN) else repaired
    lost = tuple(s for s in range(len(old_stages)) if s not in holding.values())
    word = "a new layout" if chosen is fresh else "the old layout with its holes filled"
    reason = (
        f"{word}: {len(chosen[2])} peers download a stage in {chosen[1]:.1f} s, then {chosen[3].cost.total:.3f} s a "
        f"step; over {steps} steps that is {chosen[0]:.0f} s (repaired {repaired[0]:.0f} s, new {fresh[0]:.0f} s)"
    ) + (f"; stages {list(lost)} have no survivor and come from a checkpoint" if lost else "")
    moved_ids = tuple(topology.ids[peer] for peer in chosen[2])
    return Replanned(chosen[3], moved_ids, chosen[1], lost, repaired[0], fresh[0], reason)


def move_seconds(
    topology: Topology, stages_SR: Ints, holding: Mapping[int, int], stage_bytes: float
) -> tuple[float, list[int]]:
    """The slowest download, and who downloads. A stage that nobody holds costs no link: it is a checkpoint's."""
    slowest, moved = 0.0, []
    for stage, members in enumerate(stages_SR):
        donors = [peer for peer, held in holding.items() if held == stage]
        for peer in map(int, members):
            if holding.get(peer) != stage:
                moved.append(peer)
                if donors:
                    seconds = topology.delay_s[donors, peer] + stage_bytes / topology.bandwidth[donors, peer]
                    slowest = max(slowest, float(seconds.min()))
    return slowest, moved


def spans_replan(
    task: LayerCosts, region_N: Ints, old: Ints, budget: SearchBudget, seed: int, seconds_ahead: float
) -> tuple[Ints, float]:
    """Spans after a change: (new spans, tokens done in `seconds_ahead`). `old`: N x 2, (0, 0) for newcomers.

    While a peer downloads layers that it did not hold it computes nothing: its share of the tokens is lost.
    """
    kept = np.array([span if task.fits(i, *map(int, span)) else (0, 0) for i, span in enumerate(old)])
    patched = span_search.repaired(task, _newcomers_placed(task, kept))
    found = span_search.search(task, region_N, budget, chance.arrays(seed, "replan"), first=patched)
    options = [way for way in (patched, found) if task.valid(way)] or [found]
    scored = [(tokens_ahead(task, old, way, seconds_ahead), i) for i, way in enumerate(options)]
    tokens, best = max(scored)
    return options[best], tokens


def tokens_ahead(task: LayerCosts, old: Ints, new: Ints, seconds_ahead: float) -> float:
    """Tokens that the new spans train in that time, less those of the time in which layers move."""
    before, after = max_flow.held(task, old), max_flow.held(task, new)
    fetched = ((after & ~before) * task.state_L).sum(axis=1) / 3  # weights and two moments of nine values
    rate = np.maximum(task.link_NN.max(axis=1), 1.0)
    pause = float((fetched / rate).max())
    return max_flow.maximum(task, new).tokens_per_s * max(0.0, seconds_ahead - pause)


def _newcomers_placed(task: LayerCosts, kept: Ints) -> Ints:
    """Peers without a span take the layers that the fewest hold."""
    placed = kept.copy()
    for peer in np.flatnonzero(kept[:, 0] >= kept[:, 1]):
        layer = int(np.argmin(max_flow.held(task, placed).sum(axis=0)))
        placed[peer] = span_search.grown(task, int(peer), layer, layer + 1)
    return placed


def _holding(topology: Topology, old_stages: Sequence[Sequence[str]]) -> dict[int, int]:
    """Surviving peer -> the stage that it holds."""
    index = {name: i for i, name in enumerate(topology.ids)}
    return {index[name]: s for s, stage in enumerate(old_stages) for name in stage if name in index}


def _repaired(task: Problem, topology: Topology, holding: Mapping[int, int]) -> Ints:
    """Survivors stay where they are; holes are filled by whoever adds least to the stage, the unused first."""
    stages: list[list[int]] = [[] for _ in range(task.stages)]
    spare = []
    for peer in range(len(task)):
        stage = holding.get(peer, task.stages)
        if stage < task.stages and len(stages[stage]) < task.replicas:
            stages[stage].append(peer)
        else:
            spare.append(peer)
    for members in stages:
        while len(members) < task.replicas:
            best = min(spare, key=lambda peer: float(task.data_NN[peer, members].sum()))
            spare.remove(best)
            members.append(best)
    return np.array([peer for members in stages for peer in members] + spare)


def _named_like_old(found: Layout, holding: Mapping[int, int]) -> Layout:
    """The same pipelines, walked from the end that keeps more peers in their old stage (cost is the same)."""

    def kept(stages_SR: Ints) -> int:
        return sum(holding.get(int(peer)) == s for s, members in enumerate(stages_SR) for peer in members)

    backwards = found.stages_SR[::-1].copy()
    return Layout(backwards, found.cost) if kept(backwards) > kept(found.stages_SR) else found

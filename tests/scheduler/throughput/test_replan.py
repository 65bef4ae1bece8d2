"""Replanning and uneven batches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.core.errors import UserError
from decentral.scheduler.shared import topology
from decentral.scheduler.shared.search_budget import SearchBudget
from decentral.scheduler.shared.topology import Topology, Workload
from decentral.scheduler.sync.layout_cost import layout, problem
from decentral.scheduler.sync.sync_plan import sync_plan
from decentral.scheduler.throughput import batches, replan


@pytest.fixture(scope="module")
def swarm() -> Topology:
    return replace(topology.load("eight-cities").subset(range(0, 64, 2)), workload=Workload(4, 7))


@pytest.fixture(scope="module")
def old(swarm: Topology) -> list[list[str]]:
    stages = sync_plan(swarm, "genetic", 0, SearchBudget(rounds=2)).stages
    assert stages is not None
    return stages


def test_nothing_moves_when_nothing_changed(swarm: Topology, old: list[list[str]]) -> None:
    again = replan.sync_replan(swarm, old, steps=10, seed=0, budget=SearchBudget(rounds=1))
    assert again.moved == ()
    assert again.move_s == 0.0


def test_after_a_peer_left_the_cheaper_of_repair_and_new_layout_is_taken(swarm: Topology, old: list[list[str]]) -> None:
    stay = [i for i, name in enumerate(swarm.ids) if name != old[1][0]]
    found = replan.sync_replan(swarm.subset(stay), old, steps=1, seed=0, budget=SearchBudget(rounds=1))
    assert found.lost == ()
    assert found.layout.cost.total + found.move_s <= found.repaired_s + 1e-9


def test_a_repair_downloads_one_stage_for_one_peer_that_left(swarm: Topology, old: list[list[str]]) -> None:
    stay = [i for i, name in enumerate(swarm.ids) if name != old[1][0]]
    smaller = swarm.subset(stay)
    assert smaller.workload is not None
    task = problem(smaller, smaller.workload)
    holding = replan._holding(smaller, old)
    repaired = layout(task, replan._repaired(task, smaller, holding), reorder=False)
    assert len(replan.move_seconds(smaller, repaired.stages_SR, holding, 1e9)[1]) == 1


def test_a_stage_without_survivors_is_reported(swarm: Topology, old: list[list[str]]) -> None:
    stay = [i for i, name in enumerate(swarm.ids) if name not in old[2]]
    smaller = replace(swarm.subset(stay), workload=Workload(4, 6))
    found = replan.sync_replan(smaller, old, steps=1, seed=0, budget=SearchBudget(rounds=1))
    assert found.lost == (2,)
    assert "checkpoint" in found.reason


def test_moving_pays_only_when_there_is_time_to_earn_it_back(swarm: Topology, old: list[list[str]]) -> None:
    bad = [list(stage) for stage in zip(*[iter([peer for stage in old for peer in sorted(stage)])] * 7, strict=True)]
    bad[0], bad[3] = bad[3], bad[0]
    soon, late = (replan.sync_replan(swarm, bad, steps, 0, SearchBudget(rounds=2)) for steps in (1, 100_000))
    assert len(soon.moved) <= len(late.moved)


def curve(rate: float, most: int) -> batches.Curve:
    return batches.Curve((1, 2, most), (0.5 / rate + 0.1, 1 / rate + 0.1, most / 2 / rate + 0.1))


def test_the_best_size_is_the_fastest_that_fits() -> None:
    assert batches.Curve((1, 4, 8), (1.0, 2.0, 6.0)).best_size() == 4
    assert batches.Curve((1, 4, 8), (1.0, 2.0, 3.0)).best_size() == 8
    assert batches.Curve((1, 4), (1.0, 2.0)).time(8) == float("inf")


def test_a_faster_peer_takes_more() -> None:
    share = batches.deal([curve(8, 32), curve(1, 16)], 64)
    assert sum(share) == 64
    assert share[0] > 3 * share[1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=3), st.integers(1, 24))
def test_no_other_deal_is_done_sooner(rates: list[int], sequences: int) -> None:
    curves = [curve(rate, 4 + 2 * rate) for rate in rates]

    def slowest(share: tuple[int, ...]) -> float:
        return max(one.step_time(n) for one, n in zip(curves, share, strict=True))

    grid = np.ndindex(*[sequences + 1] * len(rates))
    best = min(slowest(share) for share in grid if sum(share) == sequences)
    assert slowest(tuple(batches.deal(curves, sequences))) == pytest.approx(best, abs=1e-6)


def test_a_curve_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="sizes must increase"):
        batches.Curve((4, 2), (1.0, 2.0))

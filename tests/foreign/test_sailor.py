"""Sailor's files as plans and costs, and the orders and cuts of our planner, on synthetic clusters."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.foreign import sailor
from benchmarks.foreign.sailor_plan import (
    Cluster,
    Degrees,
    Plan,
    balanced,
    best_plan,
    by_zone,
    ring,
    scheduler_s,
    step_of,
)
from benchmarks.foreign.sailor_profiles import LayerSizes, LayerTimes, Profiles, Site

GBPS = [0.0, 0.0, 1.0]  # 1 GB/s whatever the size


def profiles(layers: int = 4, rates: dict[tuple[str, str], float] | None = None) -> Profiles:
    """Layers of 1 s, 1 MB of weights and 1 MB of output each; 1 GB/s unless `rates` says otherwise."""
    zones = ("a", "b", "c")
    links = {
        one: {
            "gpu": {
                "1": {other: {"gpu": {"1": [[0.0, 0.0, (rates or {}).get((one, other), 1.0)], 0]}} for other in zones}
            }
        }
        for one in zones
    }
    times = {("gpu", 1, 1): LayerTimes(np.ones(layers), 0.5)}
    return Profiles("model", times, {1: LayerSizes(*(np.full(layers, 1e6) for _ in range(3)))}, links)


def plan(stages: int, replicas: int, micro_batches: int, zones: str = "a") -> Plan:
    sites = tuple(tuple(Site(zones[at % len(zones)], "gpu") for _ in range(replicas)) for at in range(stages))
    return Plan(Degrees(1, stages, replicas, 1, micro_batches), tuple(range(0, 5, 4 // stages)), sites)


def test_one_device_alone_computes_and_updates() -> None:
    step = step_of(profiles(), plan(1, 1, 3))
    assert step.seconds == pytest.approx(3 * 4 + 0.5)


def test_a_pipeline_pays_each_hop_there_and_back_and_waits_for_its_busiest_stage() -> None:
    step = step_of(profiles(), plan(2, 1, 3))
    assert step.pipeline == pytest.approx(2 * 1e-3)
    assert step.waiting == pytest.approx(2 * (2 + 2e-3))
    assert step.seconds == pytest.approx(4 + 2e-3 + 2 * (2 + 2e-3) + 0.5)


def test_replicas_average_over_their_slowest_link() -> None:
    rates = {("a", "b"): 0.5}
    two = Plan(Degrees(1, 1, 3, 1, 1), (0, 4), ((Site("a", "gpu"), Site("b", "gpu"), Site("c", "gpu")),))
    assert step_of(profiles(rates=rates), two).data_parallel == pytest.approx(2 * 2 * (4e6 / 3 / 0.5e9))


def test_the_slower_kind_of_device_decides_a_stage() -> None:
    mixed = profiles()
    times = {**mixed.times, ("slow", 1, 1): LayerTimes(np.full(4, 3.0), 0.5)}
    links = {zone: {**kinds, "slow": kinds["gpu"]} for zone, kinds in mixed.links.items()}
    for row in links.values():
        for other in row["gpu"]["1"].values():
            other["slow"] = other["gpu"]
    both = Plan(Degrees(1, 1, 2, 1, 1), (0, 4), ((Site("a", "gpu"), Site("a", "slow")),))
    assert step_of(Profiles("model", times, mixed.sizes, links), both).compute == pytest.approx(12)


def test_the_scheduler_counts_the_busiest_stage_and_its_bubble_and_each_hop_of_the_whole_batch() -> None:
    bubble = (2 - 1) / (4 * 2)  # step_needs.py
    assert scheduler_s(profiles(), plan(2, 1, 3)) == pytest.approx(3 * 2 * (1 + bubble) + 2 * 3 * 1e-3)


def test_layouts_by_zone_are_each_tried_once() -> None:
    sites = Cluster("gpu", {"a": 2, "b": 2, "c": 2}, node=1, memory=1e12).groups(1)
    stages = [{sites[at].zone for at in slots} for slots in by_zone(sites, Degrees(1, 1, 2, 1, 1))]
    assert sorted(map(sorted, stages)) == [["a"], ["b"], ["c"]]
    assert len(by_zone(sites, Degrees(1, 3, 2, 1, 1))) == 1


def test_cuts_keep_the_costliest_part_cheap() -> None:
    assert balanced(np.array([3.0, 1.0, 1.0, 1.0]), 2, lambda *_: True) == (0, 1, 4)


def test_cuts_keep_to_what_fits() -> None:
    assert balanced(np.array([3.0, 1.0, 1.0, 1.0]), 2, lambda _, first, end: end - first <= 2) == (0, 2, 4)
    assert balanced(np.ones(4), 2, lambda *_: False) is None


def test_a_ring_avoids_slow_links_where_it_can() -> None:
    seconds = np.full((4, 4), 2.0)
    for one, other in ((2, 0), (0, 3), (3, 1)):
        seconds[one, other] = 1.0
    assert ring(seconds).tolist() == [2, 0, 3, 1]


def test_a_ring_of_one_is_that_replica() -> None:
    assert ring(np.zeros((1, 1))).tolist() == [0]


def test_of_two_zones_with_a_slow_link_one_is_left_out() -> None:
    far = dict.fromkeys((("a", "b"), ("b", "a")), 1e-6)
    cluster = Cluster("gpu", {"a": 2, "b": 2}, node=1, memory=1e12)
    ticks = itertools.count()
    found = best_plan(profiles(rates=far), cluster, 4, seed=0, seconds=0.0, clock=lambda: float(next(ticks)))
    assert len({site.zone for stage in found.sites for site in stage}) == 1


def test_a_plan_survives_the_way_into_their_form_and_back() -> None:
    ours = plan(2, 2, 4, "ab")
    theirs = {**sailor.as_sailor(ours), "gbs": 8}
    assert sailor.from_sailor(theirs) == ours


def test_a_folder_that_is_no_checkout_ends_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sailor.main([str(tmp_path)]) == 2
    assert "is no checkout of Sailor" in capsys.readouterr().err


def test_clusters_are_the_rows_of_the_trace(tmp_path: Path) -> None:
    configs = tmp_path / "sailor/Planner/simulations/configs"
    configs.mkdir(parents=True)
    (configs / "gpu_trace_multizone.csv").write_text(",Timestamp,A100-40_x,A100-40_y\n0,1.5,8,4\n")
    nodes: dict[str, Any] = {"A100-40": {"gpus_per_node": 4, "mem_per_gpu": 40}}
    (configs / "basic_cluster_config.json").write_text(json.dumps(nodes))
    assert sailor.clusters(tmp_path) == [Cluster("A100-40", {"x": 8, "y": 4}, 4, 40)]

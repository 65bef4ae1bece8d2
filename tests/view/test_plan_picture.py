"""What stands in the pictures of plans: their texts and marks, read back from SVG. How they look, people judge."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from decentral.commands import plan as command
from decentral.core import config
from decentral.scheduler.sync.layout_cost import problem_of
from decentral.scheduler.sync.step_needs import divided
from decentral.scheduler.sync.sync_plan import sync_plan
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.plan_forms import SyncPlan, ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology, Workload
from decentral.view.canvas import colours, link_text, seconds_text, speed_text
from decentral.view.plan_picture import StageGrid, draw_comparison, draw_plan, gossip_of, hops_of, span_rows
from decentral.view.swarm_map import MOST_PLACES, SwarmMap, matrix_of

FOUR = {
    "peers": [
        {"id": "ann", "region": "Berlin", "device": "RTX 4090", "memory_gb": 24, "tflops": 80, "up_gbps": 0.04},
        {"id": "bob", "region": "Berlin", "device": "GTX 1660", "memory_gb": 6, "tflops": 5, "up_gbps": 0.02},
        {"id": "lab", "region": "Paris", "device": "A100", "memory_gb": 40, "tflops": 300},
        {"id": "cara", "region": "$Oslo$", "device": "RTX 3060", "memory_gb": 12, "tflops": 13},
    ],
    "inside": {"delay_ms": 12, "bandwidth_gbps": 1},
    "across": {"delay_ms": 30, "bandwidth_gbps": 1},
}


def texts(path: Path) -> list[str]:
    """All texts of an SVG picture."""
    return ["".join(one.itertext()) for one in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def budget() -> SearchBudget:
    return SearchBudget(rounds=1)


def synchronous(topology: Topology) -> SyncPlan:
    return sync_plan(topology, "region-pipeline", 0, budget())


def asynchronous(topology: Topology, depth: int) -> ThroughputPlan:
    model = config.Config(model=config.ModelConfig(depth=depth, context=1024))
    return throughput_plan(topology, model, "flow", 0, budget())


def grid_of(plan: SyncPlan, topology: Topology) -> StageGrid:
    workload = divided(topology.workload or Workload(None, None), len(plan.stages), len(plan.pipelines))
    return StageGrid(plan, topology, problem_of(topology, workload))


@pytest.mark.parametrize("name", ["eight-cities", "spot", "24-in-ten-cities"])
def test_the_times_in_a_picture_add_up_to_the_plan_s_cost(name: str) -> None:
    topology = topologies.load(name)
    plan = synchronous(topology)
    grid = grid_of(plan, topology)
    assert grid.joints.sum() == pytest.approx(plan.cost["pipeline"])
    assert grid.averaging_S.max() == pytest.approx(plan.cost["data_parallel"])


def test_a_synchronous_plan_names_every_peer_stage_and_place(tmp_path: Path) -> None:
    topology = topologies.load("eight-cities")
    plan = synchronous(topology)
    draw_plan(plan, topology, str(tmp_path / "plan.svg"))
    shown = texts(tmp_path / "plan.svg")
    assert set(topology.ids) <= set(shown)
    assert {f"stage {number}" for number in range(1, 9)} <= set(shown)
    assert {"Tokyo", "London", "8 peers"} <= set(shown)
    assert shown.count(seconds_text(plan.cost["data_parallel"])) >= 1
    assert sum("Mb/s" in text or "Gb/s" in text for text in shown) > 10
    assert any(seconds_text(plan.cost["total"]) in text for text in shown)


def test_red_is_what_decides_and_nothing_where_all_are_alike() -> None:
    topology = topologies.load("eight-cities")
    grid = grid_of(synchronous(topology), topology)
    assert not grid.deciding_hops().any()  # inside each city all hops are alike
    red = {topology.regions[peer] for stage, row in zip(*np.nonzero(grid.deciding_peers()), strict=True)
           for peer in [grid.peers_SR[stage, row]]}  # fmt: skip
    assert red == {"Seoul"}
    even = topologies.parse({**FOUR, "peers": [{"id": name, "region": "here"} for name in "abcd"]})
    grid = grid_of(synchronous(even), even)
    assert not grid.slow().any()


def test_few_peers_are_places_of_their_own_and_many_share_their_regions() -> None:
    few, many = SwarmMap(topologies.parse(FOUR)), SwarmMap(topologies.load("eight-cities"))
    assert few.names == ["ann", "bob", "lab", "cara"]
    assert few.colour_of(0) == few.colour_of(1) != few.colour_of(2)
    assert many.names[0] == "Oregon\n8 peers"
    assert SwarmMap(topologies.load("24-in-ten-cities")).names[0] == "Frankfurt\n0, 1, 2"


def test_peers_that_name_a_region_each_share_a_place() -> None:
    many = [{"id": f"p{n}", "region": f"region {min(n, 300)}", "device": "A100"} for n in range(320)]
    swarm = SwarmMap(topologies.parse({**FOUR, "peers": many}))
    others = 301 - (MOST_PLACES - 1)
    assert swarm.count == MOST_PLACES
    assert swarm.names[0] == "region 300\n20 peers"
    assert swarm.names[-1] == f"{others} other regions\n{others} peers"
    assert len({swarm.colour_of(peer) for peer in range(320)}) == MOST_PLACES


def test_the_slowest_link_is_that_of_the_slowest_uplink() -> None:
    topology = topologies.parse(FOUR)
    swarm, pairs = SwarmMap(topology), itertools.combinations(topology.ids, 2)
    slow = swarm.slowest(matrix_of(topology, dict.fromkeys(pairs, 1.0)))
    red = {(topology.ids[a], topology.ids[b]) for a, b in zip(*np.nonzero(slow), strict=True) if a < b}
    assert red == {("ann", "bob"), ("bob", "lab"), ("bob", "cara")}


def test_an_asynchronous_plan_shows_spans_partners_and_devices(tmp_path: Path) -> None:
    topology = topologies.parse(FOUR)
    plan = asynchronous(topology, depth=4)
    draw_plan(plan, topology, str(tmp_path / "plan.svg"))
    shown = texts(tmp_path / "plan.svg")
    assert {"ann", "bob", "lab", "cara"} <= set(shown)
    assert any("RTX 4090" in text for text in shown)
    assert "20 Mb/s, 12 ms" in shown
    assert any(text.startswith("Who averages with whom") for text in shown)


def test_routes_are_drawn_where_micro_batches_travel(tmp_path: Path) -> None:
    topology = topologies.load("24-in-ten-cities")
    plan = asynchronous(topology, depth=30)
    draw_plan(plan, topology, str(tmp_path / "plan.svg"))
    shown = texts(tmp_path / "plan.svg")
    assert any(text.startswith("Routes") for text in shown)
    assert set(plan.spans) <= set(shown)
    rows = span_rows(plan, topology)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert len(hops_of(plan)) > 10
    assert all(0 < part <= 1 for part in gossip_of(plan).values())


def test_many_peers_that_are_alike_share_a_row() -> None:
    topology = topologies.load("eight-cities")
    rows = span_rows(asynchronous(topology, depth=2), topology)
    assert [row.name for row in rows][:2] == ["Oregon, 8 peers", "Virginia, 8 peers"]


def test_speeds_and_times_have_units_and_three_digits() -> None:
    assert speed_text(694e6 / 8) == "694 Mb/s"
    assert link_text(2.5e6, 0.05) == "20 Mb/s, 50 ms"
    assert [seconds_text(value) for value in (0.0, 0.0754, 3.78)] == ["0 s", "75.4 ms", "3.78 s"]
    assert len(set(colours(24))) == 24


@pytest.mark.parametrize(
    ("file", "said"), [("no/where.png", "choose a place that can be written"), ("plan.xyz", "not supported")]
)
def test_a_picture_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, said: str
) -> None:
    flags = ["four-homes", "--solver", "random", "--seconds", "0.2", "--plot", str(tmp_path / file)]
    assert command.main(flags) == 2
    assert said in capsys.readouterr().err


def test_solvers_are_compared_with_their_names_and_what_they_found(tmp_path: Path) -> None:
    records = {"genetic": [(0.1, 5.0), (1.0, 3.44)], "region-pipeline": [(0.0, 4.0)]}
    draw_comparison(records, str(tmp_path / "all.svg"), "s")
    assert {"genetic  3.44 s", "region-pipeline  4 s"} <= set(texts(tmp_path / "all.svg"))

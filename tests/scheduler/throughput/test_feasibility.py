"""What a plan uses of devices and links: cases computed by hand, and no plan uses more than there is."""

import itertools
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentral.core import config
from decentral.core.errors import UserError
from decentral.scheduler.throughput import feasibility, layer_costs
from decentral.scheduler.throughput.layer_costs import LayerCosts
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology

FOREIGN = Path(__file__).parent.parent / "topologies"
SHIPPED = Path(str(files("decentral.configs") / "topologies"))
MODELS = [FOREIGN / "m125-model.yaml", FOREIGN / "m1b3-model.yaml"]
TOPOLOGIES = sorted([*SHIPPED.glob("*.yaml"), *(path for path in FOREIGN.glob("*.yaml") if path not in MODELS)])


def pair() -> tuple[Topology, LayerCosts]:
    """Two peers of a lab that shares 80 kB/s up, 16 down, and one elsewhere; one layer takes 10 ms, 100 MB of 1 GB."""
    peers: list[dict[str, Any]] = [
        {"id": "a", "region": "lab", "memory_gb": 1, "tflops": 1, "up_gbps": 4e-4, "down_gbps": 8e-4},
        {"id": "b", "region": "lab", "memory_gb": 1, "tflops": 1},
        {"id": "c", "region": "far", "memory_gb": 1, "tflops": 1},
    ]
    sites = {"lab": {"up_gbps": 6.4e-4, "down_gbps": 1.28e-4}}
    link = {"delay_ms": 1, "bandwidth_gbps": 1.6e-3}
    swarm = topology.parse({"peers": peers, "inside": link, "across": link, "sites": sites})
    ones = np.ones(4)
    seconds, free, memory = np.full((3, 4), 0.01), np.full(3, np.inf), np.full(3, 1e9)
    costs = LayerCosts(
        seconds,
        1e8 * ones,
        ones,
        5e7 * ones,
        10 * ones,
        memory,
        swarm.bandwidth,
        100.0,
        1,
        free,
        np.zeros(3, np.int64),
        free,
    )
    return swarm, costs


def plan(**changed: Any) -> ThroughputPlan:
    """10 tokens/s, of which 60% go from a to c and 40% from a over b to c."""
    made = ThroughputPlan(
        solver="", seed=0, seconds=0.0, baselines={}, reason="", digest="", planned_for={"context": 10}, use={},
        throughput={"tokens_per_s": 10.0, "estimated": 10.0},
        spans={"a": [0, 2], "b": [1, 3], "c": [2, 4]},
        micro_batches={"a": 2, "b": 1, "c": 4},
        routes=[
            {"share": 0.6, "hops": [["a", 0, 2], ["c", 2, 4]]},
            {"share": 0.4, "hops": [["a", 0, 1], ["b", 1, 3], ["c", 3, 4]]},
        ],
        gossip={"weights": {}, "every_s": {}},
    )  # fmt: skip
    return replace(made, **changed)


def share(kind: str, **changed: Any) -> feasibility.Use:
    return feasibility.uses(plan(**changed), *pair())[kind]


def test_devices_compute_their_part_of_each_route() -> None:
    """c: 6 tokens/s of two layers and 4 of one are 16 layers, 0.16 s in each second; a as many."""
    assert share("device").share == pytest.approx(0.16)


def test_memory_is_that_of_the_layers_and_two_micro_batches() -> None:
    """c: two layers of 0.1 GB, and two micro-batches of four sequences of 0.05 GB in each."""
    assert share("memory") == feasibility.Use(pytest.approx(1.0), "c")  # type: ignore[arg-type]


def test_memory_holds_the_micro_batches_in_flight() -> None:
    """80 tokens/s in sequences of ten tokens, two at a time, of 50 MB in each layer. By Little's law.

    48 tokens/s: a keeps both layers for 0.8 s of computing there and in c, 2 ms of delay, and 2 kB over 50 and 16 kB/s.
    32 tokens/s: one layer for 0.8 s, 4 ms, and 2 kB over 50 and 100 kB/s to b, and over 80 and 16 kB/s to c.
    """
    direct_s = 0.8 + 0.002 + 0.04 + 0.125
    around_s = 0.8 + 0.004 + 0.04 + 0.02 + 0.025 + 0.125
    used = 2e8 + (48 * direct_s * 2 + 32 * around_s) * 5e7 / 10
    small = {"a": 2, "b": 1, "c": 1}
    found = share("memory", throughput={"estimated": 80.0}, micro_batches=small)
    assert found == feasibility.Use(pytest.approx(used / 1e9), "a")  # type: ignore[arg-type]


def test_activations_go_one_way_and_gradients_back() -> None:
    """a exchanges 10 tokens/s of 100 bytes both ways, up at 50 kB/s, down at 100 kB/s; a and c 600 B/s of 50 kB/s."""
    assert share("uplink") == feasibility.Use(pytest.approx(1000 / 50e3), "a")  # type: ignore[arg-type]
    assert share("downlink") == feasibility.Use(pytest.approx(1000 / 100e3), "a")  # type: ignore[arg-type]


def test_a_site_carries_what_leaves_it_and_what_comes_back() -> None:
    """From a and b to c: 10 tokens/s. The site sends 80 kB/s at most, and receives 16."""
    assert share("shared link") == feasibility.Use(pytest.approx(1000 / 16e3), "lab")  # type: ignore[arg-type]
    inside = [{"share": 1.0, "hops": [["a", 0, 2], ["b", 2, 4]]}]
    assert share("shared link", spans={"a": [0, 2], "b": [2, 4]}, routes=inside).share == 0.0


def test_gossip_moves_the_layers_that_both_hold() -> None:
    """b pulls from a every 600 s, half of the time: layer 1, which is 10 B/s times 600 s."""
    gossip = {"weights": {"b": {"a": 0.5, "c": 0.5}}, "every_s": {"b": 600.0}}
    idle = {"routes": [], "gossip": gossip}
    assert share("uplink", **idle) == feasibility.Use(pytest.approx(5.0 / 50e3), "a")  # type: ignore[arg-type]
    assert share("shared link", **idle) == feasibility.Use(pytest.approx(5.0 / 16e3), "lab")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hops", "line"),
    [
        ([["a", 0, 2]], "ends after 2 of 4 layers"),
        ([["a", 0, 2], ["c", 3, 4]], "computes layers 3 to 3 in c, after 2 layers"),
        ([["a", 0, 3], ["c", 3, 4]], "computes layers 0 to 2 in a"),
        ([["d", 0, 4]], "in d"),
    ],
)
def test_a_route_through_layers_that_nobody_holds_is_refused(hops: list[Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        share("device", routes=[{"share": 1.0, "hops": hops}])


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_no_plan_uses_more_than_there_is(path: Path, model: Path) -> None:
    swarm, run = topology.load(path), config.load(str(model))
    try:
        budget = SearchBudget(10.0, clock=map(float, itertools.count()).__next__)
        made = throughput_plan(swarm, run, "flow", 0, budget)
    except UserError:
        return  # the model is too large for these peers
    used = feasibility.uses(made, swarm, layer_costs.of_model(swarm, run))
    assert max(use.share for use in used.values()) <= 1.0, used
    assert sum(route["share"] for route in made.routes) == pytest.approx(1.0, abs=1e-4)
    assert made.use == {kind: use.share for kind, use in used.items()}

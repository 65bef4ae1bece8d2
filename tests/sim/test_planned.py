"""Plans that are played: the swarm begins in the planned layout, and its tokens are compared with the promise."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentral.core import config, layer_work, strict_json
from decentral.core.errors import UserError
from decentral.scheduler.throughput import layer_costs
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.topology import Topology
from decentral.sim import planned
from decentral.sim.planned import PlayedPlan, PlayedResult
from decentral.sim.run import run

RUN = config.load(
    None,
    [
        *("model.depth=4", "model.width=32", "model.context=32", "gossip.fragment_parameters=10000"),
        *("gossip.window_s=10", "gossip.start_window_s=10"),
    ],
)
LAYERS = len(RUN.model.layer_parameters)


def swarm(up_gbps: float = 1.0) -> Topology:
    """Two equal peers of a lab, which trains 64 tokens/s on each, and one elsewhere; the lab shares an uplink."""
    flops = 64 * layer_costs.flops_per_token(RUN) / layer_costs.UTILISATION
    peers = [
        {"id": name, "region": region, "memory_gb": 1, "tflops": flops / 1e12}
        for name, region in (("a", "lab"), ("b", "lab"), ("c", "far"))
    ]
    link = {"delay_ms": 5, "bandwidth_gbps": 1}
    sites = {"lab": {"up_gbps": up_gbps, "down_gbps": up_gbps}}
    return topologies.parse({"peers": peers, "inside": link, "across": link, "sites": sites})


def plan(topology: Topology, spans: dict[str, list[int]], promised: float, **changed: Any) -> ThroughputPlan:
    made = ThroughputPlan(
        solver="",
        seed=0,
        seconds=0.0,
        baselines={},
        reason="",
        digest=topology.digest(),
        planned_for={
            "layers": LAYERS,
            "parameters": sum(RUN.model.layer_parameters),
            "utilisation": layer_costs.UTILISATION,
        },
        throughput={"tokens_per_s": promised},
        spans=spans,
        micro_batches=dict.fromkeys(spans, 1),
        routes=[],
        gossip={},
        use={},
    )
    return dataclasses.replace(made, **changed)


def played(plan: ThroughputPlan, topology: Topology, seconds: float = 90.0) -> PlayedResult:
    scenario = planned.scenario_of(plan, topology, RUN, seconds, 0, noise=0.0)
    watch = PlayedPlan(plan, scenario)
    run(scenario, watches=[watch])
    return watch.result()


def test_peers_with_the_whole_model_reach_what_their_devices_can() -> None:
    topology = swarm()
    result = played(plan(topology, {"a": [0, LAYERS], "c": [0, LAYERS]}, 128.0), topology)
    assert result.promised == 128.0
    assert result.reached == pytest.approx(128.0, rel=0.03)
    assert min(result.busy.values()) > 0.95
    assert result.busy.keys() == {"a", "c"}
    assert (result.executions, result.dropped, result.abandoned) == (0, 0, 0)
    assert result.waits == {}


def test_a_route_counts_its_tokens_once_over_all_layers() -> None:
    topology = swarm()
    half = LAYERS // 2
    result = played(plan(topology, {"a": [0, half], "c": [half, LAYERS]}, 128.0), topology)
    assert result.executions > 50
    assert sum(result.busy.values()) / 2 + sum(result.waits.values()) == pytest.approx(1.0, abs=0.05)
    assert "a step, for which micro-batches must come back or be committed" in result.waits
    assert 0.5 * 128 < result.reached < 1.1 * 128
    assert result.abandoned == 0


def test_a_played_peer_has_the_memory_of_the_topology_and_counts_bytes_as_the_plan_does() -> None:
    """With as little memory as the plan allows, two micro-batches are in flight at each peer."""
    half, costs = LAYERS // 2, layer_costs.of_model(swarm(), RUN)
    spans = {"a": [0, half], "c": [half, LAYERS]}
    least = max(costs.bytes_of(first, last, 2) for first, last in spans.values())
    topology = dataclasses.replace(swarm(), memory_bytes=np.full(3, np.ceil(least)))
    scenario = planned.scenario_of(plan(topology, spans, 128.0), topology, RUN, 90.0, 0, noise=0.0)
    assert scenario.settings.memory == (math.ceil(least),) * 2
    needs, cut = scenario.settings.needs, [one.first for one in scenario.settings.fragments].index(half)
    ends = (0, cut), (cut, len(needs.fragments))
    assert min(needs.capacity(*span, math.ceil(least)) for span in ends) == 2
    assert max(needs.span_bytes(*span) for span in ends) == pytest.approx(least, abs=10)


def test_fragments_take_the_planned_time_and_have_the_size_of_their_snapshots() -> None:
    """An embedding takes no time; when its size was so small, windows became as long as they may be."""
    topology, costs = swarm(), layer_costs.of_model(swarm(), RUN)
    scenario = planned.scenario_of(plan(topology, {"a": [0, LAYERS]}, 64.0), topology, RUN, 90.0, 0, noise=0.0)
    cuts = scenario.settings.fragments
    assert {cut.parameters for cut in cuts} == {sum(RUN.model.layer_parameters) // len(cuts)}
    seconds_L = costs.seconds_NL[0] / costs.seconds_NL[0].sum()
    for cut in cuts:
        assert layer_work.share(cuts, cut.first, cut.last) == pytest.approx(seconds_L[cut.first : cut.last].sum())


def test_a_thin_uplink_that_a_site_shares_is_named_as_the_busiest_link() -> None:
    topology = swarm(up_gbps=5e-5)
    half = LAYERS // 2
    spans = {"a": [0, half], "c": [half, LAYERS]}
    result = played(plan(topology, spans, 128.0, micro_batches=dict.fromkeys(spans, 4)), topology)
    assert result.busiest_link in ("site lab up", "site lab down", "a to c", "c to a")
    assert 0.2 < result.busiest_share <= 1.05
    assert result.reached < 100.0


def test_a_plan_for_another_swarm_or_model_is_refused(tmp_path: Path) -> None:
    topology, whole = swarm(), {"a": [0, LAYERS]}
    for bad, said in (
        (plan(topology, whole, 1.0, digest="other"), "another topology"),
        (plan(topology, whole, 1.0, planned_for={"layers": 1, "parameters": 1}), "another model"),
    ):
        with pytest.raises(UserError, match=said):
            planned.scenario_of(bad, topology, RUN, 10.0, 0, 0.0)
    coarse = RUN.model_copy(update={"gossip": RUN.gossip.model_copy(update={"fragment_parameters": 30_000})})
    with pytest.raises(UserError, match="within a fragment"):
        planned.scenario_of(plan(topology, {"a": [0, 2], "b": [2, LAYERS]}, 1.0), topology, coarse, 10.0, 0, 0.0)


def test_a_plan_file_is_read_as_it_was_printed_and_others_are_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "plan.json", plan(swarm(), {"a": [0, LAYERS]}, 64.0)
    path.write_text(strict_json.dumps(made.to_json()))
    assert planned.read(path) == made
    for text in ("{", "[]", '{"objective": "sync"}', '{"objective": "throughput", "spans": 3}'):
        path.write_text(text)
        with pytest.raises(UserError, match="--plan"):
            planned.read(path)
    with pytest.raises(UserError, match="cannot read"):
        planned.read(tmp_path / "none.json")

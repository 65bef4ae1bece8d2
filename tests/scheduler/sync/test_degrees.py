"""Synchronous plans that choose their stages, replicas and peers: what a step needs, and who is left out."""

from typing import Any

import numpy as np
import pytest

from benchmarks import planner_enumerated
from decentral.core.errors import UserError
from decentral.scheduler.sync import degrees, step_needs
from decentral.scheduler.sync.layout_cost import best_layout
from decentral.scheduler.sync.sync_plan import solver_records, sync_plan
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.plan_forms import SyncPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology, Workload

Tree = dict[str, Any]
A100: Tree = {"device": "A100", "memory_gb": 40, "tflops": 312}
MODEM: Tree = {"id": "home", "region": "home", "memory_gb": 8, "tflops": 10, "up_gbps": 0.001, "down_gbps": 0.01}


def planned(swarm: Topology, rounds: int = 12) -> SyncPlan:
    return sync_plan(swarm, "genetic", 0, SearchBudget(rounds=rounds))


def dc_plus_modem(home: Tree) -> Topology:
    """Eight A100 and one home."""
    return topology.parse(
        {
            "peers": [*({**A100, "id": f"g{number}", "region": "dc"} for number in range(8)), home],
            "inside": {"delay_ms": 0.1, "bandwidth_gbps": 100},
            "across": {"delay_ms": 30, "bandwidth_gbps": 1},
        }
    )


def seven(**device: float) -> Topology:
    return topology.parse(
        {
            "regions": {"x": {"count": 4, **device}, "y": {"count": 3, **device}},
            "inside": {"delay_ms": 1, "bandwidth_gbps": 10},
            "across": {"delay_ms": 40, "bandwidth_gbps": 0.1},
            "workload": {"gradient_gbytes": 40, "activation_gbytes": 4},
        }
    )


def two_sites(link_gbps: float, near: int = 1) -> Topology:
    return topology.parse(
        {
            "regions": {"a": {"count": near, **A100}, "b": {"count": 1, **A100}},
            "inside": {"delay_ms": 1, "bandwidth_gbps": 100},
            "across": {"delay_ms": 10, "bandwidth_gbps": link_gbps},
            "workload": {"gradient_gbytes": 12, "activation_gbytes": 1},
        }
    )


def test_a_home_on_a_modem_is_left_out_of_a_data_centre_and_named() -> None:
    plan = planned(dc_plus_modem(MODEM))
    assert plan.cost["total"] < 0.06
    assert sorted(peer for stage in plan.stages for peer in stage) == [f"g{number}" for number in range(8)]
    assert list(plan.left_out) == ["home"]
    assert "slower links than the plan's" in plan.left_out["home"]
    assert f"Left out: home: {plan.left_out['home']}." in plan.reason


def test_a_slow_device_on_a_fast_link_is_left_out_because_all_would_wait_for_it() -> None:
    plan = planned(dc_plus_modem({**MODEM, "region": "dc", "up_gbps": 100, "down_gbps": 100}))
    assert plan.left_out == {"home": "slower than the plan's devices (312 TFLOP/s)"}


def test_seven_peers_are_not_stretched_over_a_slow_link() -> None:
    plan = planned(seven(tflops=71))
    assert plan.cost["total"] < 50
    assert {name[0] for stage in plan.stages for name in stage} == {"x"}
    assert set(plan.left_out) == {"y-0", "y-1", "y-2"}


def test_without_speeds_nearly_all_peers_are_used_at_the_least_communication() -> None:
    plan = planned(seven())
    assert plan.cost["total"] == pytest.approx(234.75, abs=0.01)
    assert (len(plan.stages), len(plan.pipelines), len(plan.left_out)) == (2, 3, 1)
    assert "step" not in plan.cost


def test_a_model_that_no_division_fits_into_memory_is_refused() -> None:
    with pytest.raises(UserError, match=r"7 stages of 1 replica a device needs 23.9 GB .* which 0 of 7 peers have"):
        planned(seven(tflops=71, memory_gb=6))


def test_a_fixed_plan_avoids_a_device_that_cannot_hold_its_stage() -> None:
    peers = [{**A100, "id": name, "region": "here", "memory_gb": 6 if name == "b" else 40} for name in "abcd"]
    swarm: Tree = {"peers": peers, "inside": {"delay_ms": 1, "bandwidth_gbps": 10}}
    load = {"stages": 3, "replicas": 1, "gradient_gbytes": 4}
    plan = planned(topology.parse({**swarm, "workload": load}))
    assert list(plan.left_out) == ["b"]
    assert plan.left_out["b"] == "memory below the 16.1 GB of a stage"
    with pytest.raises(UserError, match="which 3 of 4 peers have"):
        planned(topology.parse({**swarm, "workload": {**load, "stages": 4}}))


def test_a_link_that_no_step_can_use_cuts_two_peers_apart_and_is_refused() -> None:
    with pytest.raises(UserError, match=r"cut the swarm into two parts of one peer .* a-0 to b-0 with 1e-09 Gb/s"):
        planned(two_sites(1e-9))


def test_a_cut_swarm_is_planned_for_its_better_part() -> None:
    plan = planned(two_sites(1e-9, near=4))
    assert plan.left_out == {"b-0": "no link to the plan's peers can carry a step"}
    assert "cut the swarm in two: parts of 4, 1 peers" in plan.reason


def test_a_fixed_plan_that_needs_both_parts_of_a_cut_swarm_is_refused() -> None:
    swarm = topology.parse(
        {
            "regions": {"a": {"count": 2}, "b": {"count": 2}},
            "inside": {"delay_ms": 1, "bandwidth_gbps": 100},
            "across": {"delay_ms": 10, "bandwidth_gbps": 1e-9},
            "workload": {"stages": 1, "replicas": 4},
        }
    )
    with pytest.raises(UserError, match=r"need 4 peers; links too slow .* into parts of at most 2"):
        planned(swarm)


def test_one_peer_is_planned_alone_where_no_link_pays_and_the_next_best_is_named() -> None:
    plan = planned(topology.load("ten-cities"))
    assert len(plan.stages) == len(plan.pipelines) == 1
    assert len(plan.left_out) == 9
    assert "alone takes 1.448 s a step; with more peers the best found is 1x2" in plan.reason


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_the_enumerated_optimum_of_a_small_swarm(seed: int) -> None:
    swarm = planner_enumerated.random_swarm(np.random.default_rng(seed), most=6)
    best, _ = planner_enumerated.best_step(swarm)
    if best == np.inf:
        with pytest.raises(UserError, match="no plan fits in memory"):
            planned(swarm)
    else:
        assert planned(swarm).cost["step"] == pytest.approx(best, rel=0.005)


def test_no_layout_costs_less_than_its_pair_s_bound() -> None:
    rng = np.random.default_rng(3)
    swarm = planner_enumerated.random_swarm(rng)
    found, _ = degrees.candidates(swarm, Workload(None, None, 1.0, 0.5, tokens=4e6))
    assert {one.name for one in found} == {f"{s}x{r}" for s in range(1, 9) for r in range(1, len(swarm) // s + 1)}
    for one in found:
        slots = rng.permutation(one.count)
        assert one.compute_s + best_layout(one.problem(swarm), slots).cost.total >= one.bound_s - 1e-9


def test_computation_waits_for_the_slowest_device_and_for_the_pipeline_to_fill() -> None:
    whole = Workload(None, None, gradient_gbytes=4, activation_gbytes=1, tokens=1e6)
    one = step_needs.compute_seconds(step_needs.divided(whole, 1, 1), 1e14)
    assert one == pytest.approx(6 * 1e9 * 1e6 / 1e14)
    assert step_needs.compute_seconds(step_needs.divided(whole, 1, 4), 1e14) == pytest.approx(one / 4)
    assert step_needs.compute_seconds(step_needs.divided(whole, 4, 1), 1e14) == pytest.approx(one / 4 * 19 / 16)


def test_solvers_are_compared_on_the_pair_that_was_chosen() -> None:
    swarm = planner_enumerated.random_swarm(np.random.default_rng(2))
    records = solver_records(swarm, 0, 0.2, iter(np.arange(0, 1e6, 0.01)).__next__)
    assert {"genetic", "annealing", "random"} <= set(records)
    assert records["genetic"][-1][1] <= records["random"][-1][1] + 1e-9

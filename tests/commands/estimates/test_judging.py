"""Which of some plans a judge chooses, and what it promises of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decentral.commands.estimates import judging, playing
from decentral.commands.estimates.judging import CUT_SHARE, LEAST_COUNTED, UNPLAYED_SHARE, judge, part_of
from decentral.commands.estimates.playing import Rates
from decentral.core import config
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology.plan_forms import ThroughputPlan
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import topology_from_profiles
from decentral.sim.report import RunReport
from decentral.sim.run import Scenario
from decentral.sim.run import run as simulate

RUN = config.load(None, ["model.depth=4", "model.width=32", "model.context=32"])
PROFILE = {"device": "gpu", "memory_bytes": 1.6e6, "up": 2.5e6, "down": 1e7, "latency_s": 0.02}
SPEEDS = {"fast0": 2e8, "slow0": 1e8, "fast1": 2e8, "slow1": 1e8}
SWARM = topology_from_profiles({name: {**PROFILE, "flops": one} for name, one in SPEEDS.items()}, {})
"""Two chains of two peers, one of them at half the speed."""


def planned(seconds: float = 1.0) -> ThroughputPlan:
    """Return a plan of `SWARM` that a judge has chosen within these seconds."""
    chooses = judge(RUN, SWARM, SearchBudget(seconds))
    return throughput_plan(SWARM, RUN, "genetic", 0, SearchBudget(rounds=5), judge=chooses)


def test_a_judge_plays_plans_and_promises_the_same_again() -> None:
    plan, again = planned(), planned()
    assert plan.throughput == again.throughput
    assert 0.6 < plan.throughput["tokens_per_s"] / plan.throughput["estimated"] < 2
    assert plan.reason.startswith("Played: ")


def test_of_a_plan_that_is_too_large_a_part_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MOST_PLAYED", 1)
    monkeypatch.setattr(judging, "PART_PEERS", 2)
    plan = planned()
    assert plan.reason.startswith("Played for 2 peers only; promised is ")
    assert 0.6 * CUT_SHARE < plan.throughput["tokens_per_s"] / plan.throughput["estimated"] <= 1
    monkeypatch.setattr(judging, "PART_PEERS", 1)
    unplayed = planned()
    assert unplayed.throughput["tokens_per_s"] == pytest.approx(UNPLAYED_SHARE * unplayed.throughput["estimated"])
    assert unplayed.reason.startswith("Not played, as the swarm is too large for the time: promised is 20% of")


def test_a_part_of_a_plan_has_whole_routes_and_an_estimate_of_its_own() -> None:
    plan = planned()
    part = part_of(RUN, SWARM, plan, 2)
    assert part is not None
    assert len(part.spans) == 2
    assert [sorted(hop[0] for hop in route["hops"]) for route in part.routes] == [sorted(part.spans)]
    assert 0 < part.throughput["estimated"] < plan.throughput["estimated"]
    assert part_of(RUN, SWARM, plan, 1) is None


def test_a_part_has_all_routes_of_its_peers_if_it_may() -> None:
    """Routes from a and b share c, and d and e have a route: four peers would be a route from a or b, and that."""
    swarm = topology_from_profiles({name: {**PROFILE, "flops": 1e8} for name in "abcde"}, {})
    spans = {name: [3, 6] if name in "ce" else [0, 3] for name in "abcde"}
    routes = [{"share": 1 / 3, "hops": [[a, 0, 3], [b, 3, 6]]} for a, b in ("ac", "bc", "de")]
    plan = replace(planned(), spans=spans, micro_batches=dict.fromkeys(spans, 1), routes=routes)
    parts = [part_of(RUN, swarm, replace(plan, seed=seed), 4) for seed in range(8)]
    assert {"".join(part.spans) for part in parts if part} == {"abc", "de"}
    alone = part_of(RUN, swarm, replace(plan, routes=routes[:2]), 2)
    assert alone is not None
    assert "".join(alone.spans) in {"ac", "bc"}


def test_a_play_in_which_peers_have_only_begun_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers, of the smaller of two finalists, count one micro-batch fewer than they must."""
    micro_batch = RUN.model.context * min(planned().micro_batches.values())
    least = 2.0 * LEAST_COUNTED * micro_batch
    for counted, reason in (least - micro_batch, "Not played"), (least, "Played: 1 tokens/s."):
        monkeypatch.setattr(
            judging, "simulate_within", lambda *_, counted=counted: Rates(1.0, np.zeros((4, 4)), (), counted)
        )
        assert planned().reason.startswith(reason)


def test_once_the_time_is_too_short_for_a_plan_no_larger_one_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    finalists: list[ThroughputPlan] = []
    throughput_plan(SWARM, RUN, "genetic", 0, SearchBudget(rounds=5), judge=lambda plans: finalists.extend(plans))
    sizes: list[int] = []

    def noted(scenario: Scenario, *args: Any, **options: Any) -> RunReport:
        sizes.append(scenario.peers)
        return simulate(scenario, *args, **options)

    monkeypatch.setattr(playing, "run", noted)
    monkeypatch.setattr(judging, "LEAST_COUNTED", 1e9)
    monkeypatch.setattr(judging, "PART_PEERS", 1)
    verdict = judge(RUN, SWARM, SearchBudget(1.0))(finalists)
    assert len({len(plan.spans) for plan in finalists}) > 1
    assert sizes == [min(len(plan.spans) for plan in finalists)] * 2
    assert verdict is not None
    assert verdict.reason.startswith("Not played")

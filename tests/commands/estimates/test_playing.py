"""What a played swarm did, counted from samples of it."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decentral.commands.estimates import playing
from decentral.commands.estimates.machines import machines_of
from decentral.commands.estimates.places import groups_of, topology_of
from decentral.commands.estimates.playing import (
    CUT_SHARE,
    EVENT_S,
    LEAST_COUNTED,
    RATE_S,
    UNPLAYED_SHARE,
    WARM_UP_S,
    PlayedSwarm,
    Rates,
    judge,
    part_of,
    play,
)
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.scheduler.throughput.plan import throughput_plan
from decentral.scheduler.topology.plan import ThroughputPlan
from decentral.scheduler.topology.search_budget import RESERVE, SearchBudget
from decentral.scheduler.topology.topology import topology_from_profiles
from decentral.sim.report import RunReport
from decentral.sim.run import Scenario
from decentral.sim.run import run as simulate

LARGE = ["model.depth=12", "model.width=768", "model.vocabulary=50304", "model.context=1024", "train.micro_batch=8"]
ANN, BOB = PeerId("QmAnn"), PeerId("QmBob")


def played(window_s: float, end: float, every_s: float = 5.0, phase_s: float = 0.0) -> PlayedSwarm:
    """A swarm of two, in which Ann sends Bob 1000 bytes at each end of a window, and both train 10 tokens/s."""
    watch = PlayedSwarm(number={ANN: 0, BOB: 1}, windows={ANN: (window_s, "link"), BOB: (window_s, "link")})
    for count in range(int(end / every_s) + 1):
        t = count * every_s
        sent = Counter({(ANN, BOB): 1000 * int((t + phase_s) / window_s)})
        watch.at.append((t, 10 * t, sent))
    return watch


@pytest.mark.parametrize("phase_s", [0.0, 60.0, 127.0])
def test_bytes_that_come_once_a_window_have_the_rate_of_whole_windows(phase_s: float) -> None:
    rates = played(128.0, 1400.0, phase_s=phase_s).rates()
    assert rates.sent_NN[0, 1] == pytest.approx(1000 / 128, rel=0.04)
    assert rates.sent_NN[1, 0] == 0
    assert rates.tokens == pytest.approx(10)


def test_what_comes_before_the_warm_up_does_not_count() -> None:
    watch = played(8.0, WARM_UP_S)
    later = played(64.0, 2000.0)
    watch.at += [(WARM_UP_S + t, tokens, watch.at[-1][2] + sent) for t, tokens, sent in later.at[1:]]
    assert watch.rates().sent_NN[0, 1] == pytest.approx(1000 / 64, rel=0.02)


def test_time_in_which_pipelines_fill_does_not_count() -> None:
    """The first tokens come after 30 s, and all peers train after 50 s."""
    watch = PlayedSwarm(number={ANN: 0})
    watch.at = [(t, 10 * max(0.0, t - 50) + (t >= 30), Counter()) for t in map(float, range(0, 81, 5))]
    assert watch.rates().tokens == pytest.approx(10)


def test_a_swarm_is_played_for_as_many_events_however_slowly_the_clock_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "PLAYED_S", 240.0)  # so that samples are near each other
    run, groups = config.load(None, LARGE), groups_of("2xT4 home:50/500")
    kinds = machines_of(run, groups)
    where = topology_of(groups, [kinds[0].memory_bytes / 1e9], [1.0])
    budget_s = RESERVE * (EVENT_S + RATE_S) * 2_000
    slow = itertools.count(0.0, 1e-6)
    fast = itertools.count(0.0, budget_s / 4)
    still, slowly, cut = (
        play(run, where, kinds * 2, None, 8.0, SearchBudget(budget_s, clock=clock))
        for clock in (lambda: 0.0, slow.__next__, fast.__next__)
    )
    np.testing.assert_array_equal(still.sent_NN, slowly.sent_NN)
    assert still.tokens == slowly.tokens > 0
    assert cut.tokens != still.tokens


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
    monkeypatch.setattr(playing, "MOST_PLAYED", 1)
    monkeypatch.setattr(playing, "PART_PEERS", 2)
    plan = planned()
    assert plan.reason.startswith("Played for 2 peers only; promised is ")
    assert 0.6 * CUT_SHARE < plan.throughput["tokens_per_s"] / plan.throughput["estimated"] <= 1
    monkeypatch.setattr(playing, "PART_PEERS", 1)
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
        monkeypatch.setattr(playing, "_played", lambda *_, counted=counted: Rates(1.0, np.zeros((4, 4)), (), counted))
        assert planned().reason.startswith(reason)


def test_once_the_time_is_too_short_for_a_plan_no_larger_one_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    finalists: list[ThroughputPlan] = []
    throughput_plan(SWARM, RUN, "genetic", 0, SearchBudget(rounds=5), judge=lambda plans: finalists.extend(plans))
    sizes: list[int] = []

    def noted(scenario: Scenario, *args: Any, **options: Any) -> RunReport:
        sizes.append(scenario.peers)
        return simulate(scenario, *args, **options)

    monkeypatch.setattr(playing, "run", noted)
    monkeypatch.setattr(playing, "LEAST_COUNTED", 1e9)
    monkeypatch.setattr(playing, "PART_PEERS", 1)
    verdict = judge(RUN, SWARM, SearchBudget(1.0))(finalists)
    assert len({len(plan.spans) for plan in finalists}) > 1
    assert sizes == [min(len(plan.spans) for plan in finalists)] * 2
    assert verdict is not None
    assert verdict.reason.startswith("Not played")

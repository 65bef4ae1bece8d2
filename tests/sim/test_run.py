"""One run, from a scenario to a report: reproducible, honest about what it saw, and small when it fails."""

from dataclasses import replace
from pathlib import Path

import pytest

from decentral.comm.gossip import snapshots
from decentral.core import config
from decentral.core.units import Seconds
from decentral.sim import faults, sweep
from decentral.sim import run as runs
from decentral.sim.host import Pace
from decentral.sim.invariants.evidence import Violation
from decentral.sim.network.geography import TypicalLink
from decentral.sim.real_training import real_gradients
from decentral.sim.run import Scenario, StopRun, run, shrink
from decentral.sim.swarm import SwarmSettings


def scenario(spec: str = "", seconds: float = 40.0, seed: int = 1, throttles: tuple[float, ...] = (1.0,)) -> Scenario:
    settings = SwarmSettings.of(
        config.load(None, sweep.SETTINGS), Pace(0.4, 0.05, report_s=2.0), throttles, 1024, sweep.QUICK
    )
    return Scenario(settings, 3, seconds, seed, tuple(faults.parse(spec)))


def test_the_same_seed_gives_the_same_digest_and_another_seed_another() -> None:
    spec = "crash 1 at 20; restart 1 at 25; loss 0.1 at 10 for 10; lie 2 scaled at 10 for 10"
    first, again, other = (run(scenario(spec, seed=seed)) for seed in (1, 1, 2))
    assert first.audit.digest == again.audit.digest != other.audit.digest
    assert first.to_json() == again.to_json()


def test_whether_it_is_audited_changes_nothing() -> None:
    assert run(scenario()).audit.digest == run(replace(scenario(), audited=False)).audit.digest


def test_the_report_counts_what_was_done() -> None:
    report = run(scenario(throttles=(1.0, 1.0, 4.0)))
    tokens = [one["tokens"] for one in report.by_peer]
    assert report.throughput.tokens == sum(tokens)
    assert tokens[2] == pytest.approx(tokens[0] / 4, rel=0.15)
    assert report.gossip.exchanges["done"] > 20
    assert report.throughput.sent_bytes > 0
    assert 0.9 < report.throughput.busy_fraction <= 1
    assert report.audit.checks > 100


def test_rounding_near_zero_is_no_progress_that_a_fold_forgot() -> None:
    """A peer trains alone for so long that its weights cross zero, and folds all of it when the second one joins."""
    windows = config.load(None, ["gossip.window_s=3", "gossip.start_window_s=1"])
    settings = SwarmSettings.of(windows, Pace(1.0, 0.05, report_s=5.0), (1.0,), 64)
    alone = Scenario(settings, 1, 430.0, 0, tuple(faults.parse("join 1 at 400")))
    assert run(alone).audit.checks


def test_json_is_flat_and_its_keys_have_one_order() -> None:
    keys = list(run(scenario(seconds=5.0)).to_json())
    assert keys == [
        *("peers", "seconds", "seed", "tokens", "tokens_per_s", "busy_fraction", "sent_bytes", "received_bytes"),
        *("exchanges", "failures", "exchange_s", "routed", "moves", "plans", "loss", "spread", "roster_error"),
        *("recovery_s", "events", "checks", "farthest", "digest", "by_peer", "samples"),
    ]


def test_samples_cover_the_run_and_see_who_is_there() -> None:
    report = run(scenario("crash 1 at 20; restart 1 at 30"))
    assert (len(report.samples), report.samples[-1].at) == (runs.SAMPLES, 40.0)
    live = {round(one.at, 6): one.live for one in report.samples}
    assert (live[19.0], live[25.0], live[35.0]) == (3, 2, 3)


def test_a_run_whose_watcher_has_seen_enough_reports_what_there_is() -> None:
    def on_progress(at: Seconds) -> None:
        if at >= 10:
            raise StopRun

    stopped, whole = run(scenario(), on_progress), run(scenario(seconds=10.0))
    assert (stopped.seconds, stopped.samples[-1].at) == (10.0, 10.0)
    assert (stopped.throughput.tokens, stopped.audit.digest) == (whole.throughput.tokens, whole.audit.digest)


def test_recovery_is_timed_from_the_end_of_each_fault() -> None:
    report = run(scenario("crash 1 at 20; restart 1 at 25; leave 2 at 39.9"))
    assert set(report.recovery_s) == {"crash 1 at 20", "restart 1 at 25", "leave 2 at 39.9"}
    after = report.recovery_s["restart 1 at 25"]
    assert after is not None
    assert 0 < after < 10


@pytest.mark.night
def test_a_device_ten_times_slower_stays_near_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of its takes two of the others' windows, so slow weights alone tell it of most of them.

    By day tests/comm/gossip/test_snapshots.py checks that who asks late is answered at later windows.
    """
    overrides = (*sweep.SETTINGS, "gossip.window_s=1", "gossip.start_window_s=0.5", "gossip.core_share=1")
    settings = SwarmSettings.of(
        config.load(None, overrides), Pace(0.2, 0.05, report_s=2.0), (1.0, 1.0, 1.0, 10.0), 1024, sweep.QUICK
    )

    def spread() -> float:
        """Over six seeds, as one swarm's spread depends on when the slow device last merged."""
        return sum(run(Scenario(settings, 4, 60.0, seed)).replicas.spread for seed in range(3, 9))

    near = spread()
    monkeypatch.setattr(snapshots, "ASKED_LATE_WINDOWS", 0)
    assert near < 0.7 * spread()


def test_many_newcomers_at_once_get_the_state_over_their_donors_slow_uplinks() -> None:
    """The first donor shared its uplink among so many that every piece came after its deadline: nobody ever began."""
    slow, windows = TypicalLink(0.02, up=6e5, spread=0.0), ("gossip.window_s=60", "gossip.start_window_s=60")
    settings = SwarmSettings.of(config.load(None, windows), Pace(0.5, 0.05, report_s=5.0), (1.0,), 1024)
    assert run(Scenario(settings, 40, 90.0, 1, link=slow, audited=False)).samples[-1].training == 40


def test_real_gradients_learn_and_are_reproducible(text: Path, tmp_path: Path) -> None:
    small = [
        *("model.depth=1", "model.width=32", "model.context=16"),
        *("data.kind=text", f"data.path={text}", "train.micro_batch=4", "train.learning_rate=0.01"),
        "gossip.fragment_parameters=1000",
    ]
    settings = SwarmSettings.of(config.load(None, [*sweep.SETTINGS, *small]), Pace(0.5), (1.0,), 64, sweep.QUICK)
    reports = [run(Scenario(real_gradients(settings, tmp_path / place), 2, 20.0, 1, audited=False)) for place in "ab"]
    assert reports[0].audit.digest == reports[1].audit.digest
    assert reports[0].gossip.exchanges["done"] > 0


# A violation


@pytest.mark.usefixtures("uncounted")
def test_a_violation_names_the_rule_the_time_and_what_the_peer_did_last() -> None:
    with pytest.raises(Violation) as caught:
        run(scenario())
    assert caught.value.rule == "baseline"
    assert 0 < caught.value.at < 10
    assert "s of virtual time" in str(caught.value)
    assert caught.value.latest


@pytest.mark.usefixtures("uncounted")
def test_a_violation_that_needs_no_fault_shrinks_to_none() -> None:
    noisy = scenario("loss 0.1 at 5 for 10; nat 1 at 2; crash 2 at 8; restart 2 at 9")
    assert shrink(noisy, "baseline") == ()


def test_shrinking_leaves_the_faults_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fragile(played: Scenario) -> None:
        if {"crash", "join"} <= {fault.kind for fault in played.faults}:
            raise Violation("roster", "", 1.0, [])

    monkeypatch.setattr(runs, "run", fragile)
    spec = "nat 0 at 1; crash 1 at 5; skew 0 by 1 at 6; loss 0.1 at 7 for 3; join 2 at 8; restart 1 at 9; leave 0 at 10"
    fewest = shrink(scenario(spec), "roster")
    assert [fault.kind for fault in fewest] == ["crash", "join"]


def test_another_rule_s_violation_does_not_count_when_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    def fragile(played: Scenario) -> None:
        raise Violation("roster" if len(played.faults) > 1 else "bounded", "", 1.0, [])

    monkeypatch.setattr(runs, "run", fragile)
    assert len(shrink(scenario("nat 0 at 1; nat 1 at 5; nat 2 at 6"), "roster")) == 2

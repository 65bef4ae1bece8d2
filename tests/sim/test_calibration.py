"""Calibration: figures from journals, a device from a reference run, and a prediction from both."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import calibration_model
from benchmarks.calibration_model import DevicePace, Figures, Setting

MODEL = ("model.depth=1", "model.width=32", "model.context=32", "train.micro_batch=2")
REFERENCE = Setting("reference", (1, 1), 0.5, 0.05, (*MODEL, "gossip.start_steps=100"))
DEVICE = DevicePace(beside_s=0.002, job_bytes=5e7, latency_s=0.004, rate=1e8, start_s=3.0, noise=0.01)


def step(t: float, steps: int, seconds: float, gossip_s: float = 0.0) -> dict[str, Any]:
    return {
        "t": t,
        "event": "step",
        "micro_batches": steps,
        "tokens": 64 * steps,
        "seconds": seconds,
        "aside": {"gossip": gossip_s},
    }


def exchange(t: float, seconds: float, received: int, age_s: float, fragment: int = 0) -> dict[str, Any]:
    moved = {"sent_bytes": 100, "received_bytes": received, "age_s": age_s}
    return {"t": t, "event": "exchange", "fragment": fragment, "outcome": "done", "seconds": seconds, **moved}


def figures_of(**changed: float) -> Figures:
    zero = Figures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return replace(zero, **changed)


def test_what_was_before_the_warm_up_s_end_does_not_count() -> None:
    lines = [{"t": 0.0, "event": "joined"}, step(1.0, 90, 0.9), step(11.0, 10, 1.0), step(12.0, 10, 0.5)]
    (one,) = calibration_model.figures([lines], 5.0, 10.0)
    assert one.tokens_per_s == pytest.approx(640)
    assert one.step_s == pytest.approx(0.05)
    assert one.busy == pytest.approx(0.5)


def test_exchanges_are_counted_between_the_first_step_line_and_the_last() -> None:
    lines = [{"t": 0.0, "event": "joined"}, exchange(1.0, 9.0, 900, 0.0), step(2.0, 1, 1.0)]
    lines += [
        exchange(2.5, 0.1, 900, 0.0),
        exchange(3.5, 0.3, 1900, 0.0),
        step(4.0, 1, 1.0),
        exchange(5.0, 9.0, 900, 0.0),
    ]
    (one,) = calibration_model.figures([lines], 0.5, 10.0)
    assert one.exchanges_per_s == 1.0
    assert one.exchange_s == pytest.approx(0.2)
    assert one.exchange_bytes == 1500
    assert one.bytes_per_s == 1500


def test_a_swarm_s_exchange_is_the_mean_over_exchanges_not_over_peers() -> None:
    often, seldom = figures_of(exchanges_per_s=3.0, exchange_s=0.1), figures_of(exchanges_per_s=1.0, exchange_s=0.5)
    assert calibration_model.swarm_figures([often, seldom]).exchange_s == pytest.approx(0.2)


def test_steps_and_jobs_are_told_apart_by_what_the_time_was_spent_on() -> None:
    """Steps take 52 ms, and each window 2 kB at 1 MB/s and what its two jobs take in any case."""
    lines: list[dict[str, Any]] = [{"t": 0.0, "event": "joined"}]
    for second in range(20):
        windows = 10 if second < 10 else 2
        lines += [exchange(second + 0.05 * (number + 1), 0.004, 1000, 0.01) for number in range(windows)]
        lines.append(step(second + 1.0, 18, 18 * 0.052, windows * (0.002 + 2 * calibration_model.JOB_S)))
    other = [{"t": 3.0, "event": "joined"}]
    device = calibration_model.device_of(REFERENCE, [lines, other])
    assert device.beside_s == pytest.approx(0.002)
    assert device.job_bytes == pytest.approx(1e6)
    assert device.start_s == 3.0


def test_a_question_that_was_held_says_nothing_about_the_link() -> None:
    """A held request gets a snapshot that is younger than itself, or when patience is over one that is much older."""
    told = [exchange(1.0, 0.005, 36_000, 0.006), exchange(2.0, 0.006, 106_000, 0.03, fragment=1)]
    held = [exchange(3.0, 0.05, 36_000, 0.002), exchange(4.0, 0.015, 36_000, 0.4)]
    latency_s, rate = calibration_model._link(told + held, fresh_s=0.05)
    assert latency_s == pytest.approx(0.0045, abs=5e-4)
    assert rate == pytest.approx(7e7, rel=0.05)


def test_an_answer_that_had_to_be_encoded_says_nothing_about_the_link() -> None:
    told = [exchange(1.0, 0.005, 36_000, 0.006), exchange(2.0, 0.006, 106_000, 0.03, fragment=1)]
    encoded = [exchange(3.0, 0.04, 106_000, 0.05), exchange(4.0, 0.05, 310_000, 0.06, fragment=1)]
    assert calibration_model._link(told + encoded, fresh_s=0.05) == calibration_model._link(told, fresh_s=0.05)


def test_throttling_stretches_the_micro_batch_and_nothing_else() -> None:
    assert DEVICE.step_s(10.0, 0.05) == pytest.approx(0.502)


def test_the_simulator_finds_in_its_own_journals_what_it_was_given() -> None:
    journals = calibration_model.simulate(REFERENCE, DEVICE, [0.052, 0.052], 25.0)
    found = calibration_model.device_of(REFERENCE, journals)
    assert found.beside_s == pytest.approx(DEVICE.beside_s, abs=5e-4)
    assert found.job_bytes == pytest.approx(DEVICE.job_bytes, rel=0.3)
    assert found.latency_s == pytest.approx(DEVICE.latency_s, rel=0.3)


def test_a_slower_peer_is_predicted_slower_by_its_throttle() -> None:
    setting = Setting("two", (1, 4), 0.5, 0.05, MODEL)
    fast, slow = calibration_model.predict(setting, DEVICE, 3.0, 10.0)
    assert fast.tokens_per_s == pytest.approx(4 * slow.tokens_per_s, rel=0.1)
    assert fast.busy > 0.95

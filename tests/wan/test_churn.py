"""What the report of a run with churn says of survivors and newcomers."""

from typing import Any

import pytest

from benchmarks.wan.churn import of_newcomer, of_survivor, report

Line = dict[str, Any]


def step(at: float, waiting: float = 0.0, tokens: int = 100) -> Line:
    return {"t": at, "event": "step", "tokens": tokens, "seconds": 1.0, "aside": {"waiting": waiting}}


def test_a_survivor_that_waits_after_the_first_kill_has_a_lower_share_and_speed() -> None:
    calm = [step(float(at)) for at in range(10)]
    held_up = [step(10.0 + 2 * at, waiting=1.0) for at in range(10)]
    steady = of_survivor([*calm, *[step(10.0 + at) for at in range(10)]], 0.0, 10.0, 30.0)
    assert (steady["share_before"], steady["share_after"], steady["speed"]) == pytest.approx((1.0, 1.0, 1.0))
    slowed = of_survivor([*calm, *held_up], 0.0, 10.0, 30.0)
    assert slowed["share_after"] == pytest.approx(0.5)
    assert slowed["speed"] == pytest.approx(0.5)


def test_a_newcomer_that_never_trains_is_counted_as_such() -> None:
    started, joined = {"t": 5.0, "event": "started"}, {"t": 8.0, "event": "joined", "seconds": 2.5}
    assert of_newcomer([started, joined], 1.0) == {"trained": False}
    trained = of_newcomer([started, joined, step(9.0), step(10.0)], 1.0)
    assert trained == {"trained": True, "seconds": 4.0, "join_s": 2.5, "needed_s": 1.0}


def test_the_report_names_tracebacks_and_newcomers_that_did_not_train() -> None:
    survivor = {"share_before": 1.0, "share_after": 0.9, "speed": 0.8}
    newcomers = [of_newcomer([], 1.0), {"trained": True, "seconds": 4.0, "join_s": 2.5, "needed_s": 1.0}]
    found = {"seconds": 60.0, "killed": 2, "survivors": [survivor], "newcomers": newcomers}
    text = report(found | {"trouble": ["peer 7: a traceback in its output"], "router": {"complaints": []}})
    assert "median 0.900" in text
    assert "1 of 2 newcomers trained" in text
    assert "peer 7: a traceback" in text

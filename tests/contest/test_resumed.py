"""A contest that goes on counts the runs that are of what is asked for now."""

from typing import Any

import pytest

from benchmarks.contest import contestants, scenarios
from benchmarks.contest.__main__ import asked_for, finished
from benchmarks.contest.runner import Task

TASK = Task(contestants.contestant("gloo DiLoCo"), scenarios.scenario("household/equal"), 0, 40.0)


def line(**others: Any) -> dict[str, Any]:
    overrides, options = TASK.settings()
    same = {"contestant": "gloo DiLoCo", "scenario": "household/equal", "repetition": 0, "seconds": 40.0}
    return {**same, "overrides": overrides, "options": options, **others}


def test_a_run_that_is_there_is_not_run_again() -> None:
    assert finished(TASK, [line(repetition=1), line()])


@pytest.mark.parametrize(
    "other",
    [{"seconds": 120.0}, {"overrides": ["train.learning_rate=0.5"]}, {"options": {"inner_steps": 1}}],
    ids=["length", "rate", "options"],
)
def test_a_run_of_another_setting_counts_neither_as_run_nor_in_the_report(other: dict[str, Any]) -> None:
    assert not finished(TASK, [line(**other)])
    assert asked_for([TASK], [line(**other), line()]) == [line()]

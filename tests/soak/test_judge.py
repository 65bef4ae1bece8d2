"""Each thing that a soak must not find is found where it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak import judge
from benchmarks.soak.evidence import Evidence, Exit, Hit, Line, Sample, without
from benchmarks.soak.report import report, table
from decentral.core.journal.micro_batch_counts import NOT_TAKEN_YET

QUIET, FAULTY, TAIL = (0.0, 100.0), (100.0, 700.0), (700.0, 730.0)
LAYERS = 3


def step(at: float, training: float = 1.0, waiting: float = 0.0) -> dict[str, Any]:
    return {"t": at, "event": "step", "seconds": training, "aside": {"waiting": waiting}}


def whole_peer() -> list[Line]:
    """It trains 0.9 of each second, and learns."""
    steps = [step(float(at), 0.9, 0.1) for at in range(1, 731)]
    evals = [{"t": 10.0, "event": "eval", "loss": 5.0}, {"t": 690.0, "event": "eval", "loss": 2.0}]
    return [*steps, *evals, {"t": 710.0, "event": "exchange", "outcome": "done"}]


def counted(number: int, first: int = 0, last: int = LAYERS, at: float = 50.0) -> Line:
    return {"t": at, "event": "counted", "of": [["A", number, first, last, 100]]}


def samples(role: str, pid: int, growth: float = 0.0) -> list[Sample]:
    """Of a process of ten minutes whose memory grows by this share of itself in an hour."""
    ages = [float(age) for age in range(0, 600, 5)]
    return [Sample(age, 0, pid, role, age, int(4e8 * (1 + growth * age / 3600)), 40) for age in ages]


@pytest.fixture
def found() -> Evidence:
    """A soak in which nothing went wrong: two places with the whole model, one with a part."""
    journals = {0: [whole_peer()], 1: [whole_peer()], 2: [[*whole_peer(), counted(0), counted(1)]]}
    result = Evidence(3, frozenset({0, 1}), QUIET, FAULTY, TAIL, LAYERS, journals)
    result.hits = [Hit("kill", 0, 200.0, lifted=205.0, over=220.0), Hit("daemon", 2, 300.0, lifted=300.0, over=302.0)]
    result.exits = [Exit(0, 0, -9, (-9,)), *(Exit(place, place, 0, (0,)) for place in range(3))]
    result.samples = samples("peer", 1) + samples("daemon", 2)
    result.disk_bytes = dict.fromkeys(range(3), 5_000_000)
    return result


def test_a_soak_in_which_nothing_went_wrong_passes(found: Evidence) -> None:
    assert judge.violations(found) == []
    assert "passed" in list(table(report(found)))


def slower(found: Evidence, places: Sequence[int] = (0, 1), training: float = 0.855) -> None:
    """The survivors train less under faults, 5% less where nothing else is said."""
    for place in places:
        found.journals[place][0] = [
            {**line, "seconds": training, "aside": {"waiting": 1 - training}}
            if line["event"] == "step" and line["t"] > 100
            else line
            for line in found.journals[place][0]
        ]


def starving(found: Evidence) -> None:
    """Who holds a part is sent much less under faults."""
    slower(found, (2,), training=0.7)


def hanging(found: Evidence) -> None:
    """A peer without a fault writes nothing for a minute, and then goes on as if nothing had been."""
    found.journals[1][0] = [line for line in found.journals[1][0] if not 400 < line["t"] <= 460]


def counting_twice(found: Evidence) -> None:
    found.journals[1].append([counted(1, first=2)])


def counting_what_no_step_took(found: Evidence) -> None:
    claims = [counted(number) for number in range(1000, 1000 + 2 * NOT_TAKEN_YET)]
    found.journals[0].append([{"t": 50.0, "event": "applied", "of": [[0, LAYERS, 0]]}, *claims])


def counting_nothing(found: Evidence) -> None:
    found.journals[2] = [whole_peer()]


def failing(found: Evidence) -> None:
    found.journals[1].append([{"t": 400.0, "event": "error", "reason": "no checkpoint could be written"}])


def not_recovering(found: Evidence) -> None:
    found.hits.append(Hit("cut", 1, 500.0, lifted=510.0))


def recovering_late(found: Evidence) -> None:
    found.hits.append(Hit("cut", 1, 300.0, lifted=310.0, over=500.0))


def growing(found: Evidence) -> None:
    found.samples = samples("peer", 1, growth=0.5) + samples("daemon", 2)


def too_large(found: Evidence) -> None:
    found.samples.append(replace(found.samples[-1], pid=3, resident_bytes=2_000_000_000))


def opening(found: Evidence) -> None:
    found.samples.append(replace(found.samples[0], files=900))


def learning_nothing(found: Evidence) -> None:
    for place in range(3):
        found.journals[place][0].append({"t": 695.0, "event": "eval", "loss": 5.5})


def alone(found: Evidence) -> None:
    found.journals[1][0] = [line for line in found.journals[1][0] if line["event"] != "exchange"]


CHANGES: list[tuple[Callable[[Evidence], None], str]] = [
    (slower, "survivors with the whole model trained 0.9"),
    (starving, "survivors trained 0.9"),
    (hanging, "survivors with the whole model trained 0.9"),
    (counting_twice, "1 micro-batch counted twice"),
    (counting_what_no_step_took, "800 tokens counted that no step took"),
    (counting_nothing, "no micro-batch was counted"),
    (lambda found: found.tracebacks.append("peer 3"), "a traceback in the output of peer 3"),
    (failing, "place 1, without a fault of its own: no checkpoint"),
    (lambda found: found.exits.append(Exit(1, 1, 1, ())), "peer 1 ended with 1, where none was expected"),
    (lambda found: found.exits.append(Exit(1, 1, 1, (0,))), "peer 1 ended with 1, where 0 was expected"),
    (not_recovering, "place 1 did not recover from cut at 400 s"),
    (recovering_late, "place 1 took 190 s to recover from cut"),
    (growing, "a peer's memory grows by 4"),
    (too_large, "a daemon had 2000 MB in memory"),
    (opening, "a peer had 900 files open"),
    (lambda found: found.disk_bytes.update({2: 100_000_000}), "place 2 took 100 MB of disk"),
    (learning_nothing, "the held-out loss went from 5.000 to 5.500"),
    (alone, "place 1 exchanged nothing after the last fault"),
]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_what_goes_wrong_is_a_violation(found: Evidence, change: Callable[[Evidence], None], what: str) -> None:
    change(found)
    (line,) = judge.violations(found)
    assert line.startswith(what)
    assert not report(found)["passed"]


def test_a_peer_s_own_fault_and_the_time_it_takes_to_settle_do_not_count(found: Evidence) -> None:
    assert judge.clear(found, 0) == [(100.0, 200.0), (225.0, 700.0)]
    found.journals[0][0] = [line for line in found.journals[0][0] if not 201 <= line["t"] <= 224]
    assert judge.violations(found) == []


def test_a_peer_that_says_what_its_own_fault_did_to_it_is_right(found: Evidence) -> None:
    found.journals[2].append([{"t": 301.0, "event": "error", "reason": "the libp2p daemon has ended (signal 9)"}])
    assert judge.violations(found) == []


def test_time_in_which_the_soak_itself_stood_still_says_nothing(found: Evidence) -> None:
    for place in range(3):
        found.journals[place][0] = [line for line in found.journals[place][0] if not 400 < line["t"] <= 460]
    found.stalls = [(400.0, 460.0)]
    found.hits.append(Hit("cut", 1, 390.0, lifted=395.0, over=600.0, stalled_s=60.0))
    assert judge.violations(found) == []


def test_a_line_counts_for_the_part_of_its_time_that_is_in_a_span() -> None:
    assert judge.trained([step(10.0, training=4.0, waiting=4.0)], [(0.0, 4.0), (8.0, 12.0)]) == pytest.approx(
        (2.0, 8.0)
    )


def test_what_is_left_of_a_span() -> None:
    assert without((0.0, 10.0), [(8.0, 12.0), (2.0, 3.0), (2.5, 4.0)]) == [(0.0, 2.0), (4.0, 8.0)]
    assert without((0.0, 10.0), [(-1.0, 11.0)]) == []


def test_processes_of_different_sizes_have_one_slope_and_young_ones_none() -> None:
    larger = [replace(one, pid=2, resident_bytes=2 * one.resident_bytes) for one in samples("peer", 1, growth=0.1)]
    together = judge.growth_per_hour(samples("peer", 1, growth=0.1) + larger)
    assert together == pytest.approx(0.1, rel=0.05)
    assert judge.growth_per_hour(samples("peer", 1)[:60]) is None

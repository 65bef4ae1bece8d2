"""Two threads and the phases of jobs between them: which comes when, on which thread, and what an error does.

The test is the training thread. Nothing here sleeps: a thread that waits is waited for, with a limit that is only
reached where something is broken.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from decentral.core import jobs
from decentral.core.errors import ProtocolError
from decentral.core.reasons import Reason
from decentral.core.time_spent import KINDS
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.job_runner import time_kind
from decentral.engine.threads import JobThreads, Phase, Program, finish
from tests.patient_time import LIMIT_S

EDGE, BESIDE, HELD = Phase.EDGE, Phase.BESIDE, Phase.HELD


@dataclass
class Two:
    """The two threads. `log` has each phase that was begun, and what was reported, in order."""

    plans: dict[jobs.Job, list[Phase]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    threads: JobThreads = field(init=False)
    within: dict[tuple[jobs.Job, int], Callable[[], None]] = field(default_factory=dict)  # (job, phase): what it does
    on: dict[str, int] = field(default_factory=dict)  # by the log's line: the thread

    def __post_init__(self) -> None:
        self.threads = JobThreads(self._program, failure)
        self.threads.report = lambda outcome: self.log.append(f"{name_of(outcome)} reported")
        self.worker = threading.Thread(target=self.threads.work_beside, daemon=True)

    def submit(self, job: jobs.Job, *phases: Phase) -> jobs.Job:
        self.plans[job] = list(phases)
        self.threads.submit(job)
        return job

    def submit_busy(self, job: jobs.Job) -> tuple[threading.Event, threading.Event]:
        """A job with which the worker is busy: an event for its beginning, and one that lets it end."""
        began, may_end = threading.Event(), threading.Event()

        def work() -> None:
            began.set()
            may_end.wait(LIMIT_S)

        self.within[self.submit(job, BESIDE), 0] = work
        return began, may_end

    def _program(self, job: jobs.Job) -> Program:
        for number, phase in enumerate(self.plans[job]):
            yield phase
            line = f"{name_of(job)} {phase.name.lower()}"
            self.log.append(line)
            self.on[line] = threading.get_ident()
            self.within.get((job, number), lambda: None)()
        return jobs.ExecutionFailed(number_of(job), "")

    def edge(self) -> None:
        """All that is waiting for a step edge, then a step."""
        while (task := self.threads.at_edge(wait=False)) is not None:
            self.threads.do_at_edge(task)
        self.log.append("step")
        self.threads.begin_edge()

    def wait_for_edge(self) -> None:
        """One phase on this thread, as soon as there is one."""
        task = self.threads.at_edge(wait=True)
        assert task is not None
        self.threads.do_at_edge(task)

    def end(self) -> list[str]:
        """Everything that is still to be done; gives the log."""
        self.threads.submit(jobs.Finish())
        while not self.threads.done:
            if (task := self.threads.at_edge(wait=True)) is not None:
                self.threads.do_at_edge(task)
        self.worker.join(LIMIT_S)
        assert not self.worker.is_alive()
        return self.log


def name_of(one: jobs.Job | jobs.Outcome) -> str:
    return chr(ord("a") + number_of(one))


def number_of(one: jobs.Job | jobs.Outcome) -> int:
    number: int = getattr(one, "local_id", getattr(one, "fragment", 0))
    return number


def job(name: str) -> jobs.Job:
    """A job of no fragment, by its letter."""
    return jobs.Draw(ord(name) - ord("a"), 0)


def do_all(threads: JobThreads) -> None:
    """Finish all jobs, on this thread and a worker thread."""
    threads.submit(jobs.Finish())
    worker = threading.Thread(target=threads.work_beside, daemon=True)
    worker.start()
    while not threads.done:
        if (task := threads.at_edge(wait=True)) is not None:
            threads.do_at_edge(task)
    worker.join(LIMIT_S)


def breaks() -> None:
    raise ZeroDivisionError


def failure(failed: jobs.Job, error: Exception) -> jobs.JobFailed:
    raise error


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    if made.worker.is_alive():
        made.threads._beside.end()


def test_each_phase_runs_on_its_thread(two: Two) -> None:
    two.submit(job("a"), EDGE, BESIDE, HELD)
    two.worker.start()
    two.end()
    assert two.log == ["a edge", "a beside", "a held", "a reported"]
    here = threading.get_ident()
    assert [two.on[line] == here for line in two.log[:3]] == [True, False, True]


def test_phases_follow_one_another_without_threads() -> None:
    two = Two(plans={job("a"): [EDGE, BESIDE, HELD, BESIDE]})
    assert finish(two._program(job("a"))) == jobs.ExecutionFailed(0, "")
    assert set(two.on.values()) == {threading.get_ident()}


def test_jobs_that_begin_at_an_edge_begin_in_their_order(two: Two) -> None:
    for name in "cab":
        two.submit(job(name), EDGE)
    two.edge()
    assert [line for line in two.log if "edge" in line] == ["c edge", "a edge", "b edge"]


def test_jobs_that_begin_beside_begin_in_their_order(two: Two) -> None:
    for name in "cab":
        two.submit(job(name), BESIDE)
    two.worker.start()
    assert [line for line in two.end() if "beside" in line] == ["c beside", "a beside", "b beside"]


def test_a_job_with_many_phases_at_edges_has_one_of_them_between_two_steps(two: Two) -> None:
    two.submit(job("a"), EDGE, EDGE, EDGE)
    two.submit(job("b"), EDGE)
    two.edge()
    two.edge()
    two.edge()
    assert two.log == [
        *("a edge", "b edge", "b reported", "step"),
        *("a edge", "step"),
        *("a edge", "a reported", "step"),
    ]


def test_the_worker_goes_on_with_other_jobs_until_the_edge_of_a_held_phase(two: Two) -> None:
    done = threading.Event()
    two.submit(job("a"), HELD, BESIDE)
    other = two.submit(job("b"), BESIDE)
    two.within[other, 0] = done.set
    two.worker.start()
    assert done.wait(LIMIT_S)  # and this thread has not come to an edge yet
    assert "a held" not in two.log
    assert set(two.end()) == {"a held", "a beside", "a reported", "b beside", "b reported"}


def test_a_held_phase_holds_the_worker_and_what_is_beside_after_it_comes_at_once(two: Two) -> None:
    held = two.submit(job("a"), HELD, BESIDE)

    def more() -> None:
        two.worker.start()
        two.submit(job("c"), BESIDE)

    two.within[held, 0] = more
    two.submit(job("b"), BESIDE)
    two.edge()
    assert [line for line in two.end() if line != "step"] == [
        *("a held", "a beside", "a reported"),
        *("b beside", "b reported", "c beside", "c reported"),
    ]


def test_corrections_that_the_worker_has_computed_come_before_a_held_phase(two: Two) -> None:
    computed = threading.Event()
    two.submit(job("b"), HELD)
    two.submit(job("d"), HELD)
    two.submit(job("a"), BESIDE, EDGE)
    next_one = two.submit(job("c"), BESIDE)
    two.within[next_one, 0] = computed.set
    two.worker.start()
    assert computed.wait(LIMIT_S)
    order = [line for line in two.end() if line in ("a edge", "b held", "d held")]
    assert order == ["a edge", "b held", "d held"]


def test_training_does_not_wait_for_a_busy_worker_but_takes_a_step_before_the_held_phase(two: Two) -> None:
    began, may_end = two.submit_busy(job("a"))
    two.submit(job("b"), HELD)
    two.submit(job("c"), BESIDE)  # the worker does not begin it before the held phase
    two.worker.start()
    assert began.wait(LIMIT_S)
    two.edge()
    may_end.set()
    log = two.end()
    assert log.index("step") < log.index("b held") < log.index("c beside")


def test_a_held_phase_that_waits_for_a_step_comes_before_later_ones(two: Two) -> None:
    began, may_end = two.submit_busy(job("a"))
    two.submit(job("b"), HELD)
    two.worker.start()
    assert began.wait(LIMIT_S)
    task = two.threads.at_edge(wait=False)
    assert task is not None
    two.threads.do_at_edge(task)
    may_end.set()
    two.threads._beside.hold(wait=True)  # the worker is free before the step has ended
    two.submit(job("c"), HELD)
    two.edge()
    assert [line for line in two.end() if line in ("b held", "c held", "step")] == ["step", "b held", "c held"]


def test_no_other_held_phase_comes_between_a_held_phase_and_what_is_beside_after_it(two: Two) -> None:
    two.submit(job("a"), HELD, BESIDE)
    two.submit(job("b"), HELD)
    two.edge()
    two.worker.start()
    assert two.end() == ["a held", "step", "a beside", "a reported", "b held", "b reported"]


def test_a_held_phase_that_fails_releases_the_worker(two: Two) -> None:
    failing = two.submit(job("a"), HELD)
    two.within[failing, 0] = breaks
    two.worker.start()
    with pytest.raises(ZeroDivisionError):
        two.wait_for_edge()
    two.submit(job("b"), BESIDE)
    two.threads._beside.end()
    two.worker.join(LIMIT_S)
    assert two.log[-1] == "b reported"


def test_finish_waits_for_all_jobs_and_for_those_behind_them(two: Two) -> None:
    two.submit(job("a"), EDGE, BESIDE, EDGE, BESIDE)
    two.submit(jobs.Rest(1), EDGE)
    two.submit(jobs.ExportState(1), BESIDE, EDGE)
    two.worker.start()
    assert not two.threads.done
    log = two.end()
    assert {"a reported", "b reported"} <= set(log)
    assert log.count("b reported") == 2


def test_with_nothing_to_do_finish_ends_both_threads(two: Two) -> None:
    two.worker.start()
    assert two.end() == []


def test_a_bug_beside_training_is_raised_on_the_training_thread(two: Two) -> None:
    failing = two.submit(job("a"), BESIDE)
    two.within[failing, 0] = breaks
    two.worker.start()
    with pytest.raises(ZeroDivisionError):
        two.wait_for_edge()


def test_jobs_of_a_fragment_are_done_one_after_another_and_others_do_not_wait_for_them(two: Two) -> None:
    for one in (jobs.CloseWindow(1, 1), jobs.Merge(1, 1, ())):
        two.submit(one, EDGE, BESIDE, EDGE)
    two.submit(jobs.CloseWindow(2, 1), EDGE, BESIDE, EDGE)
    two.edge()
    two.worker.start()
    log = two.end()
    ours = [line for line in log if line.startswith("b")]
    assert ours == ["b edge", "b beside", "b edge", "b reported"] * 2
    assert log.index("c edge") < log.index("step")


def test_one_checkpoint_is_written_after_another(two: Two) -> None:
    """The last one of a peer that stops began while the worker still wrote the one before."""
    for _ in range(2):
        two.submit(jobs.Save(), HELD, BESIDE)
    two.submit(job("b"), BESIDE)
    two.worker.start()
    ours = [line for line in two.end() if not line.startswith("b")]
    assert ours == ["a held", "a beside", "a reported"] * 2


def test_the_worker_s_time_is_taken_once(two: Two) -> None:
    two.submit(job("a"), EDGE, BESIDE)
    two.worker.start()
    two.end()
    assert two.threads.take_beside_s() > 0
    assert two.threads.take_beside_s() == 0


# Errors that a peer can go on after


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory"),
        (ProtocolError(Reason.NAN, "not finite"), "diverged"),
    ],
    ids=["disk", "device", "weights"],
)
def test_an_error_that_a_peer_can_go_on_after_is_an_outcome_whatever_the_phase(
    setup_of: Callable[..., ComputeSetup], phase: Phase, error: Exception, reason: str
) -> None:
    def program(asked: jobs.Job) -> Program:
        yield phase
        raise error

    outcomes: list[jobs.Outcome] = []
    threads = JobThreads(program, Compute(setup_of())._failure_of)
    threads.report = outcomes.append
    threads.submit(jobs.Save())
    do_all(threads)
    (failed,) = outcomes
    assert isinstance(failed, jobs.SaveFailed)
    assert reason in failed.reason


def test_a_job_costs_no_time_in_which_the_machine_ran_other_processes(
    setup_of: Callable[..., ComputeSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=3600.0).__next__)  # an hour passes at each reading
    compute = Compute(setup_of())
    outcomes: list[jobs.Outcome] = []
    compute.threads.report = outcomes.append
    compute.submit(jobs.CloseWindow(0, 1))
    do_all(compute.threads)
    (closed,) = outcomes
    assert isinstance(closed, jobs.WindowClosed)
    assert 0 < closed.cost_s < 3600


# What time is spent on

TIME: dict[str, set[type]] = {
    "training": {
        *{jobs.Draw, jobs.Forward, jobs.Backward, jobs.Forget, jobs.Seal, jobs.Apply, jobs.Drop, jobs.Undo},
        jobs.Advance,
    },
    "gossip": {jobs.CloseWindow, jobs.Rest, jobs.EncodeSections, jobs.Merge, jobs.CloseRound},
    "checkpoint": {jobs.Save},
    "evaluation": {jobs.Evaluate, jobs.Compare},
    "state": {
        *{jobs.ExportState, jobs.ImportState, jobs.ChangeSpan, jobs.ExportRetained, jobs.RetainCopy, jobs.DropCopy},
        *{jobs.SetClock, jobs.Start},
    },
    "waiting": set(),
}


def test_every_job_but_the_last_has_a_kind_of_time_that_was_chosen_for_it() -> None:
    assert set(TIME) == set(KINDS)
    chosen = [kind for kinds in TIME.values() for kind in kinds]
    assert len(chosen) == len(set(chosen))
    every = set(get_args(jobs.Job)) - {jobs.Finish}
    assert set(chosen) == every, "each needs a place in TIME of tests/engine/test_threads.py"


@pytest.mark.parametrize("kind", TIME)
def test_the_time_of_a_job_goes_to_its_kind(kind: str) -> None:
    for one in TIME[kind]:
        made: Any = object.__new__(one)
        assert time_kind(made) == kind


def test_a_worker_that_waits_keeps_no_vector_of_its_last_job(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer held the whole downloaded model until its worker got another job."""
    get, programs, alive = two.threads._beside.get, list[weakref.ref[Program]](), list[bool]()

    def noted() -> Any:
        alive.append(any(one() is not None for one in programs))
        return get()

    monkeypatch.setattr(two.threads._beside, "get", noted)

    def program_of(job: jobs.Job) -> Program:
        program = two._program(job)
        programs.append(weakref.ref(program))
        return program

    two.threads._program_of = program_of
    two.submit(job("a"), BESIDE)
    two.worker.start()
    two.end()
    assert alive == [True, False]

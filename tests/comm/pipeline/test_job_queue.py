"""Which job the compute thread gets next."""

from collections.abc import Callable

from decentral.comm.pipeline.execution_table import JOBS_AT_ONCE, JobQueue
from decentral.core.jobs import Backward, Forward


def forward(local_id: int) -> Forward:
    return Forward(local_id, 1, 3, 1, (), b"")


def backward(local_id: int) -> Backward:
    return Backward(local_id, (), b"")


def through(work: JobQueue, may: Callable[[int], bool] | None = None) -> list[int]:
    """The order in which a thread that takes one job after another gets what is there."""
    order: list[int] = []
    while jobs := work.dispatch(may):
        for job in jobs:
            order.append(job.local_id)
            work.running.discard(job.local_id)
    return order


def test_backward_passes_go_first_and_older_executions_before_newer_ones() -> None:
    work = JobQueue()
    for job in (forward(4), forward(1), backward(3), backward(2)):
        work.push(job)
    assert through(work) == [2, 3, 1, 4]


def test_forward_passes_that_may_not_begin_wait_and_others_pass_them() -> None:
    work = JobQueue()
    for job in (forward(1), backward(2), forward(3)):
        work.push(job)
    assert through(work, lambda local_id: local_id == 3) == [2, 3]
    assert work.waiting == {1}
    assert through(work) == [1]


def test_the_thread_has_one_job_in_work_and_one_that_follows() -> None:
    work = JobQueue()
    work.running.add(1)
    for local_id in range(2, 9):
        work.push(forward(local_id))
    assert [job.local_id for job in work.dispatch()] == [2]
    assert work.full
    assert len(work.running) == JOBS_AT_ONCE
    work.running.discard(1)
    assert [job.local_id for job in work.dispatch()] == [3]


def test_what_is_dropped_is_never_computed() -> None:
    work = JobQueue()
    for local_id in (3, 1, 2):
        work.push(forward(local_id))
    work.drop(1)
    assert through(work) == [2, 3]

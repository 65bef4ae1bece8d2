"""Carry out jobs while training goes on. A job runs in phases, each on one of two threads.

    EDGE    on the training thread, between two steps: may read and change live weights, and should be short
    BESIDE  on the worker thread, while training goes on: may only touch data that training does not use
    HELD    on the training thread while the worker waits: may change data that both threads use; a BESIDE phase of the
            same job that follows comes before other work of the worker

A job's program is a generator. It yields the phase in which it wants to continue, and returns the job's outcome. So a
job's code reads from top to bottom, whichever thread runs each phase; tests and the simulator run all phases on one
thread (`finish`). Jobs that begin in the same phase begin in the order in which they were submitted. Jobs of the same
fragment run one after another; otherwise a merge could change the weights while another job uses an older copy. So do
jobs that write the checkpoint.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from enum import Enum, auto
from threading import Condition, Lock

from decentral.core import jobs
from decentral.core.units import Seconds


class Phase(Enum):
    """The thread on which a part of a job runs, and the data that it may change (see the module's docstring)."""

    EDGE = auto()
    BESIDE = auto()
    HELD = auto()


Program = Generator[Phase, None, jobs.Outcome]
"""The code of a job, which yields the phase of its next part. The first yield, before any work, is its first phase."""


def finish(program: Program) -> jobs.Outcome:
    """Run all phases of a program on the calling thread, and return the job's outcome."""
    while True:
        try:
            next(program)
        except StopIteration as ended:
            outcome: jobs.Outcome = ended.value
            return outcome


@dataclass(slots=True, eq=False)
class Task:
    """State of a job that was submitted: its program, and how far the program has run."""

    job: jobs.Job
    program: Program
    phase: Phase | None
    cost_s: Seconds = 0.0


Failure = jobs.JobFailed | jobs.SaveFailed


class WorkerQueue:
    """The queue of BESIDE phases, which the training thread can hold: the worker then begins no phase."""

    def __init__(self) -> None:
        """Begin with an empty queue."""
        self._tasks: deque[Task] = deque()
        self._first: Task | None = None  # comes before `_tasks`, even while the queue is held
        self._changed = Condition()
        self._busy = False  # whether the worker runs a phase, or has to run `_first`
        self._held = False
        self._ended = False

    def put(self, task: Task) -> None:
        """Append a task."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def end(self) -> None:
        """Let `get` return None once the queue is empty; the worker calls it too if a bug ends it."""
        with self._changed:
            self._ended, self._busy = True, False
            self._changed.notify_all()

    def get(self) -> Task | None:
        """Say that the worker's last phase has ended, and wait for the next task; return None after `end`."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._first or (not self._held and (self._tasks or self._ended)))
            task, self._first = self._first, None
            if task is None and self._tasks:
                task = self._tasks.popleft()
            self._busy = task is not None
            return task

    def hold(self, wait: bool) -> bool:
        """Let the worker begin no phase until `release`, and return whether it runs none now.

        `wait`: wait until it runs none.
        """
        with self._changed:
            self._held = True
            return self._changed.wait_for(lambda: not self._busy, None if wait else 0)

    def release(self, first: Task | None) -> None:
        """Let the worker go on, with the task `first` before all others and before the next `hold` succeeds."""
        with self._changed:
            self._held, self._first, self._busy = False, first, first is not None
            self._changed.notify_all()


class JobThreads:
    """The two queues of tasks: one for the training thread, which does tasks between steps, and one for the worker."""

    def __init__(
        self,
        program_of: Callable[[jobs.Job], Program],
        failure_of: Callable[[jobs.Job, Exception], Failure],
        edge_clock: Callable[[], Seconds] = time.thread_time,
    ) -> None:
        """Begin with empty queues.

        Args:
            program_of: Returns the program of a job.
            failure_of: Returns the outcome for an expected error of a job, and raises any other error again.
            edge_clock: Measures the cost of a phase on the training thread. `time.thread_time` leaves out the time in
                which the machine ran other processes; `time.perf_counter` includes waits for a GPU or other ranks.
        """
        self._program_of, self._failure_of, self._edge_clock = program_of, failure_of, edge_clock
        self._edge: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._beside = WorkerQueue()
        self._waits = False  # whether training takes no steps now
        self._put_last = set[Task]()  # HELD tasks that have been put behind the corrections in `_edge`
        self._later: list[Task] = []  # tasks whose next EDGE phase must wait until another step was taken
        self._lock = Lock()
        self._unfinished = 0
        self._behind: dict[object, deque[Task]] = {}  # by `_shared_by`: tasks that wait for an unfinished one
        self._bug: Exception | None = None
        self._beside_s: Seconds = 0.0  # processor time of the worker thread since the last `take_beside_s`
        self.report: Callable[[jobs.Outcome], None] = lambda outcome: None
        self.finishing = False  # after Finish was submitted, no more jobs come and no more steps are taken

    def submit(self, job: jobs.Job) -> None:
        """Queue a job behind the unfinished jobs with which it must not run at the same time (`_shared_by`).

        Any thread may call this until Finish is submitted.
        """
        if isinstance(job, jobs.Finish):
            self.finishing = True
        else:
            program = self._program_of(job)
            task = Task(job, program, next(program))
            with self._lock:
                self._unfinished += 1
                begins = self._may_begin(task)
            if begins:
                self._queue(task)
        self._end_if_done()

    def at_edge(self, wait: bool) -> Task | None:
        """Return the next task for the training thread, or None.

        Args:
            wait: True: training takes no step now, so wait for a task; the result None means that all jobs are done.
                False: do not wait; the result None means that no task is ready.

        Raises:
            Exception: The unexpected error that ended the worker thread, if there was one.
        """
        self._waits = wait
        if wait:
            self.begin_edge()
        try:
            task = self._edge.get() if wait else self._edge.get_nowait()
        except queue.Empty:
            return None
        if self._bug is not None:
            raise self._bug
        return task

    def do_at_edge(self, task: Task) -> None:
        """Run the present phase of a task on the calling training thread, and queue the task for its next phase."""
        if task.phase is Phase.HELD:
            self._do_held(task)
            return
        self._go_on(task, self._edge_clock)
        if task.phase is Phase.EDGE:
            self._later.append(task)
        else:
            self._queue(task)

    def _do_held(self, task: Task) -> None:
        """Run a HELD phase while the worker waits, after all corrections that the worker has computed.

        If the worker is busy, training does not wait for it: the phase comes after the next step, and the worker begins
        nothing until then. Later HELD phases come after it.
        """
        others_wait = any(other.phase is Phase.HELD for other in self._later)
        if others_wait or not self._beside.hold(wait=self._waits):
            self._later.append(task)
            return
        if task not in self._put_last and not self._edge.empty():
            self._put_last.add(task)
            self._edge.put(task)
            return
        try:
            self._go_on(task, self._edge_clock)
        finally:
            beside = task.phase is Phase.BESIDE
            self._put_last.clear()
            self._beside.release(task if beside else None)
        if not beside:
            self._queue(task)

    def begin_edge(self) -> None:
        """Queue the tasks that have waited for a step to end. Call it after each step."""
        later, self._later = self._later, []
        for task in later:
            self._queue(task)

    def work_beside(self) -> None:
        """Run phases of tasks on the calling worker thread until Finish was submitted and all jobs are done.

        An unexpected error ends the worker, and `at_edge` then raises it on the training thread.
        """
        try:
            while self._work_once():  # a call for each phase, so that a waiting worker keeps no task's vectors
                pass
        except Exception as bug:
            self._bug = bug
            self._beside.end()
            self._edge.put(None)

    def _work_once(self) -> bool:
        """Run the next phase of the worker, and return whether there was one."""
        task = self._beside.get()
        if task is not None:
            self._go_on(task, time.thread_time)
            self._queue(task)
        return task is not None

    def take_beside_s(self) -> Seconds:
        """Return the worker's processor time since the last call, in seconds."""
        with self._lock:
            taken, self._beside_s = self._beside_s, 0.0
        return taken

    def _go_on(self, task: Task, clock: Callable[[], Seconds]) -> None:
        began, beside, outcome = clock(), task.phase is Phase.BESIDE, None
        try:
            task.phase = next(task.program)
        except StopIteration as ended:
            task.phase, outcome = None, ended.value
        except Exception as error:
            task.phase, outcome = None, self._failure_of(task.job, error)
        took_s = clock() - began
        task.cost_s += took_s
        if beside:
            with self._lock:
                self._beside_s += took_s
        if outcome is not None:
            self._finished(task, outcome)

    def _finished(self, task: Task, outcome: jobs.Outcome) -> None:
        if isinstance(outcome, jobs.WindowClosed | jobs.SectionsEncoded | jobs.Merged | jobs.Saved):
            outcome = replace(outcome, cost_s=task.cost_s)
        self.report(outcome)
        with self._lock:
            self._unfinished -= 1
            behind = self._next_after(task)
        if behind is not None:
            self._queue(behind)
        self._end_if_done()

    def _may_begin(self, task: Task) -> bool:
        """Return whether the task may begin now; if not, it waits for an unfinished task (see `_shared_by`)."""
        shared = _shared_by(task.job)
        if shared in self._behind:
            self._behind[shared].append(task)
            return False
        if shared is not None:
            self._behind[shared] = deque()
        return True

    def _next_after(self, done: Task) -> Task | None:
        shared = _shared_by(done.job)
        if shared is None:
            return None
        if self._behind[shared]:
            return self._behind[shared].popleft()
        del self._behind[shared]
        return None

    def _queue(self, task: Task) -> None:
        if task.phase is Phase.BESIDE:
            self._beside.put(task)
        elif task.phase is not None:
            self._edge.put(task)

    @property
    def done(self) -> bool:
        """Whether the job Finish was submitted and all jobs are done."""
        with self._lock:
            return self.finishing and not self._unfinished

    def _end_if_done(self) -> None:
        if self.done:
            self._edge.put(None)
            self._beside.end()


def _shared_by(job: jobs.Job) -> object:
    """Return what the jobs that must not run at the same time have in common; None: this job waits for no other."""
    return jobs.Save if isinstance(job, jobs.Save) else getattr(job, "fragment", None)

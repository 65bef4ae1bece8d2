"""How a job is done while training goes on: in phases, each on one of two threads.

    EDGE    on the training thread, between two steps: it may read and change live weights, and should be short
    BESIDE  on the worker, while the training thread goes on: it may only touch what nobody trains
    HELD    on the training thread while the worker waits: what both of them own may change together

A job's program is a generator. It yields the phase in which it wants to go on, and returns the job's outcome. So a job
reads from top to bottom whichever threads carry it out, and without threads its phases follow one another: tests and
the simulator do it so. Jobs that begin beside training begin in the order in which they were given, and so do those
that begin at an edge. Jobs of the same fragment are done one after another, all phases of one before the first of the
next: a copy of weights that one has taken is of no use to it any more, once another has corrected them.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from threading import Event, Lock

from decentral.core import jobs
from decentral.core.units import Seconds


class Phase(Enum):
    EDGE = auto()
    BESIDE = auto()
    HELD = auto()


Program = Generator[Phase, None, jobs.Outcome]
"""A job under way: every program yields the phase of its beginning before it does anything."""


def finish(program: Program) -> jobs.Outcome:
    """All phases of a program, one after another on the calling thread."""
    while True:
        try:
            next(program)
        except StopIteration as ended:
            outcome: jobs.Outcome = ended.value
            return outcome


@dataclass(slots=True)
class Task:
    """A job under way, and the phase in which it goes on; None: it is over."""

    job: jobs.Job
    program: Program
    phase: Phase | None
    cost_s: Seconds = 0.0  # of the training thread, and processor time of the worker
    released: Event = field(default_factory=Event)  # the training thread is done with a HELD phase


Failure = jobs.JobFailed | jobs.SaveFailed


class JobThreads:
    """Two queues of tasks: one for the training thread, which takes them at step edges, and one for the worker."""

    def __init__(
        self, program_of: Callable[[jobs.Job], Program], failure_of: Callable[[jobs.Job, Exception], Failure]
    ) -> None:
        """`failure_of` turns an error that a peer can go on after into an outcome, and raises any other again."""
        self._program_of, self._failure_of = program_of, failure_of
        self._edge: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._beside: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._later: list[Task] = []  # tasks that have had a phase at this edge and want another at the next one
        self._lock = Lock()
        self._unfinished = 0
        self._behind: dict[int, deque[Task]] = {}  # the jobs that wait for one of the same fragment, by fragment
        self._bug: Exception | None = None  # of the worker
        self._beside_s: Seconds = 0.0
        self.report: Callable[[jobs.Outcome], None] = lambda outcome: None
        self.finishing = False  # no further job comes, and no further step is taken

    def submit(self, job: jobs.Job) -> None:
        """Begins a job. Any thread may call it; after Finish, none does."""
        if isinstance(job, jobs.Finish):
            self.finishing = True
        else:
            program = self._program_of(job)
            task = Task(job, program, next(program))
            with self._lock:
                self._unfinished += 1
                begins = self._is_first_of_its_fragment(task)
            if begins:
                self._queue(task)
        self._end_if_done()

    def at_edge(self, wait: bool) -> Task | None:
        """The next task of the training thread, or None if there is none; with `wait`, if there will never be one.

        Without steps there is one long edge. Raises what the worker has raised.
        """
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
        """One phase of a task, on the training thread."""
        held = task.phase is Phase.HELD
        try:
            self._go_on(task, time.perf_counter)
        finally:
            if held:
                task.released.set()
        if task.phase is Phase.EDGE and not held:
            self._later.append(task)
        elif not held:
            self._queue(task)

    def begin_edge(self) -> None:
        """A step was taken: what wanted another phase at an edge may have it."""
        later, self._later = self._later, []
        for task in later:
            self._queue(task)

    def work_beside(self) -> None:
        """The worker's life, until everything is done."""
        try:
            while (task := self._beside.get()) is not None:
                if task.phase is Phase.HELD:
                    task.released.clear()
                    self._edge.put(task)
                    task.released.wait()
                if task.phase is Phase.BESIDE:  # nothing else comes between a HELD phase and this
                    self._go_on(task, time.thread_time)
                self._queue(task)
        except Exception as bug:
            self._bug = bug
            self._edge.put(None)

    def take_beside_s(self) -> Seconds:
        """The worker's processor time since the last call."""
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
            behind = self._next_of_its_fragment(task)
        if behind is not None:
            self._queue(behind)
        self._end_if_done()

    def _is_first_of_its_fragment(self, task: Task) -> bool:
        """Whether no job of the same fragment is under way; else the task waits for it."""
        fragment = _fragment_of(task.job)
        if fragment in self._behind:
            self._behind[fragment].append(task)
            return False
        if fragment is not None:
            self._behind[fragment] = deque()
        return True

    def _next_of_its_fragment(self, done: Task) -> Task | None:
        fragment = _fragment_of(done.job)
        if fragment is None:
            return None
        if self._behind[fragment]:
            return self._behind[fragment].popleft()
        del self._behind[fragment]
        return None

    def _queue(self, task: Task) -> None:
        if task.phase is not None:
            (self._edge if task.phase is Phase.EDGE else self._beside).put(task)

    @property
    def done(self) -> bool:
        """Whether Finish has come and no task is left."""
        with self._lock:
            return self.finishing and not self._unfinished

    def _end_if_done(self) -> None:
        if self.done:
            self._edge.put(None)
            self._beside.put(None)


def _fragment_of(job: jobs.Job) -> int | None:
    fragment: int | None = getattr(job, "fragment", None)
    return fragment

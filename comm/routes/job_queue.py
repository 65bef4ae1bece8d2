"""Work for the compute thread: backward passes before forward ones, older executions before newer ones.

    pushed --dispatch--> running --done-->

An execution has one job at a time. A few jobs are at the thread; the others wait here, where they can still be dropped.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core.jobs import Backward, Draw, Forward

BACKWARD, FORWARD = 0, 1  # priorities
JOBS_AT_ONCE = 2  # jobs at the compute thread: one in work, one that follows without a pause


@dataclass(slots=True)
class JobQueue:
    running: set[int] = field(default_factory=set)  # tokens of executions whose job is at the thread
    _ready: list[tuple[int, int, Forward | Backward]] = field(default_factory=list)  # heap, by order and token

    @property
    def full(self) -> bool:
        return len(self.running) >= JOBS_AT_ONCE

    @property
    def waiting(self) -> set[int]:
        """Executions whose forward pass has not begun."""
        return {token for order, token, _ in self._ready if order == FORWARD}

    def push(self, job: Forward | Backward) -> None:
        order = BACKWARD if isinstance(job, Backward) else FORWARD
        heapq.heappush(self._ready, (order, job.token, job))

    def begin(self, draw: Draw) -> Draw:
        """A micro-batch of our own goes to the thread at once: it begins only where nothing else waits."""
        self.running.add(draw.token)
        return draw

    def done(self, token: int) -> None:
        self.running.discard(token)

    def drop(self, token: int) -> None:
        """The job of this execution that waits here is not computed."""
        if any(item[1] == token for item in self._ready):
            self._ready = [item for item in self._ready if item[1] != token]
            heapq.heapify(self._ready)

    def dispatch(self, may: Callable[[int], bool] | None = None) -> list[Forward | Backward]:
        """The jobs that the thread gets now. `may(token)`: whether that forward pass may begin; None: any may."""
        jobs: list[Forward | Backward] = []
        kept: list[tuple[int, int, Forward | Backward]] = []
        while self._ready and not self.full:
            order, token, job = heapq.heappop(self._ready)
            if may is not None and order == FORWARD and not may(token):
                kept.append((order, token, job))
                continue
            self.running.add(token)
            jobs.append(job)
        for item in kept:
            heapq.heappush(self._ready, item)
        return jobs


__all__ = ["JOBS_AT_ONCE", "JobQueue"]

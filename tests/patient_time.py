"""Time for tests that passes no faster than their processes get a processor, and their one limit against hanging.

A machine that is busy with other things lets a test wait for seconds between two turns of its event loop, and its
threads and libp2p daemons wait, too. For peers whose deadlines go by the clock that is a network which stalls: they
give each other up, and a test fails for no fault of the code. On a PatientLoop each turn takes at most TURN_S, and less
of it where the processes get only a part of the processor time that they ask for. Sleeps, deadlines and limits against
hanging go by its time, so they wait for as long as the machine is busy.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

LIMIT_S = 900.0  # against hanging, not a measurement: whatever takes so long never ends
STORY_LIMIT_S = 240.0  # the same, by a PatientLoop's time
TURN_S = 0.02
SHARE_EVERY_S = 0.05  # between two looks at what the processes get
SHARE_KEPT = 0.9  # of what was seen, from one look to the next
LEAST_SHARE = 0.1  # deadlines are many times what they wait for, and tests that wait for them end
PROMPT_NS = 1e6  # a process that asks for nothing would get all of it


class ProcessorShare:
    """Which part of the processor time that this process and its children ask for they get, of late.

    Linux counts for each thread how long it has run, and how long it could have run and had no processor. Where the
    system counts nothing the part is 1.
    """

    def __init__(self, processes: Path = Path("/proc")) -> None:
        self._processes = processes
        self._known = dict(self._counts())
        self._ran = self._waited = 0.0

    def look(self) -> float:
        """Return the part, from LEAST_SHARE to 1, after another look."""
        counts = dict(self._counts())
        self._ran, self._waited = SHARE_KEPT * self._ran, SHARE_KEPT * self._waited
        for thread, (ran, waited) in counts.items():
            ran_before, waited_before = self._known.get(thread, (0, 0))
            self._ran += ran - ran_before
            self._waited += waited - waited_before
        self._known = counts
        return max(LEAST_SHARE, (self._ran + PROMPT_NS) / (self._ran + self._waited + PROMPT_NS))

    def _counts(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each thread, and how long it has run and waited, ns."""
        waiting = ["self"]
        for process in waiting:
            for thread in self._processes.glob(f"{process}/task/*"):
                with suppress(OSError, ValueError):  # it has ended
                    ran, waited, _ = (thread / "schedstat").read_text().split()
                    waiting += (thread / "children").read_text().split()
                    yield thread.name, (int(ran), int(waited))


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts at most TURN_S from one look at it to the next."""

    def __init__(self, steady: Callable[[], float] = time.monotonic, share: Callable[[], float] | None = None) -> None:
        self._steady, self._looked_at, self._now = steady, steady(), steady()
        self._share_of, self._share, self._shared_at = share or ProcessorShare().look, 1.0, self._now
        self._look = threading.RLock()  # threads that compute look at it, too
        super().__init__()

    def time(self) -> float:
        with self._look:
            at = self._steady()
            if at - self._shared_at >= SHARE_EVERY_S:
                self._share, self._shared_at = self._share_of(), at
            self._now += min(TURN_S, at - self._looked_at) * self._share
            self._looked_at = at
            return self._now

    def run_forever(self) -> None:
        """Run as any loop does, and look at the clock so often that time goes on while nothing happens."""
        self._look_on()
        try:
            super().run_forever()
        finally:
            self._looking.cancel()

    def _look_on(self) -> None:
        self._looking = self.call_later(TURN_S / 4, self._look_on)

    def play(self, story: Coroutine[Any, Any, Result], limit_s: float = STORY_LIMIT_S) -> Result:
        """Run a story to its end, close the loop, and return the story's result. Raises TimeoutError."""

        async def limited() -> Result:
            async with asyncio.timeout(limit_s):
                return await story

        with asyncio.Runner(loop_factory=lambda: self) as runner:
            return runner.run(limited())


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is at 0 first, and goes on to the next timer at once while nothing else is to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]

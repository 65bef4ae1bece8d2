"""Time for swarms inside one process that passes no faster than this process gets a processor.

A machine that is busy with other things lets a test wait for seconds between two turns of its event loop. For peers
whose deadlines go by the clock that is a network which stalls: they give each other up, and a test fails for no fault
of the code. On this loop each turn takes at most TURN_S. Sleeps, deadlines and limits against hanging go by its time,
so they wait for as long as the machine is busy.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

TURN_S = 0.02


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts at most TURN_S from one look at it to the next."""

    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady, self._looked_at, self._now = steady, steady(), steady()
        self._look = threading.Lock()  # threads that compute look at it, too
        super().__init__()

    def time(self) -> float:
        with self._look:
            at = self._steady()
            self._now += min(TURN_S, at - self._looked_at)
            self._looked_at = at
            return self._now

    def play(self, story: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Run a story to its end, and close the loop. Raises TimeoutError."""

        async def limited() -> None:
            turns = asyncio.create_task(self._turns())
            try:
                async with asyncio.timeout(limit_s):
                    await story
            finally:
                turns.cancel()

        with asyncio.Runner(loop_factory=lambda: self) as runner:
            runner.run(limited())

    async def _turns(self) -> None:
        """Looks at the clock so often that time goes on as it should while nothing happens."""
        while True:
            await asyncio.sleep(TURN_S / 4)

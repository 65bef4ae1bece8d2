"""Whose turn it is: how many requests are answered at once, how many wait, and the thread that generates.

A few requests take turns token by token on one thread, so that a short one need not wait for a long one. One more than
may wait is refused at once (429), which programs take as a sign to try again later.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from decentral.serving import decoding
from decentral.serving.openai_requests import ApiError

ANSWERED_AT_ONCE = 4  # requests: each keeps keys and values of its own
MOST_WAITING_REQUESTS = 16

T = TypeVar("T")


class Turns:
    def __init__(self, at_once: int = ANSWERED_AT_ONCE, waiting: int = MOST_WAITING_REQUESTS) -> None:
        self._most, self._free = at_once + waiting, asyncio.Semaphore(at_once)
        self._thread = ThreadPoolExecutor(1, "generation", initializer=decoding.use_one_thread)
        self.present = 0  # requests that are answered, or wait

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Until the block ends, the request is one of those that are answered. Raises ApiError where too many wait."""
        if self.present >= self._most:
            raise ApiError(429, f"{self.present} requests are here already; try again in a while", "too_many_requests")
        self.present += 1
        try:
            async with self._free:
                yield
        finally:
            self.present -= 1

    async def in_thread(self, function: Callable[[], T]) -> T:
        """What the function gives, in the thread that generates; those of all requests come in the order of asking."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

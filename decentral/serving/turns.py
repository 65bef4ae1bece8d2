"""Limit how many requests are answered at once and how many wait, and own the thread that generates text.

A few requests share one thread: it generates a token for each of them in turn, so that a short answer does not wait
for a long answer. If too many requests wait, a new request is refused with status 429, and its client may try again.
`FairShare` divides both numbers between the networks of the clients, so that no client takes all.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from decentral.comm.net.fair_shares import FairShare
from decentral.serving import decoding
from decentral.serving.openai_requests import ApiError

ANSWERED_AT_ONCE = 4  # more requests wait, since each answer takes memory for a key-value cache
MOST_WAITING_REQUESTS = 16

T = TypeVar("T")


class Turns:
    """Limits the requests that are answered at the same time, and owns the thread that generates their text."""

    def __init__(self, at_once: int = ANSWERED_AT_ONCE, waiting: int = MOST_WAITING_REQUESTS) -> None:
        """Allow `at_once` requests to be answered at the same time, and `waiting` more requests to wait."""
        self._present, self._answered = FairShare(at_once + waiting), FairShare(at_once)
        self._freed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, "generation", initializer=decoding.use_one_thread)

    @property
    def present(self) -> int:
        """Number of requests that are being answered or wait."""
        return self._present.used

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait until fewer than `at_once` requests are being answered; this request counts until the context ends.

        Args:
            caller: The network of the client.

        Raises:
            ApiError: If too many requests, or too many of this caller, wait already (status 429).
        """
        if not self._present.take(caller):
            own = self._present.by_sender.get(caller, 0)
            said = f"the server already has {self.present} requests, {own} of them from your network; try again later"
            raise ApiError(429, said, "too_many_requests")
        try:
            async with self._freed:
                await self._freed.wait_for(lambda: self._answered.take(caller))
            try:
                yield
            finally:
                self._answered.give_back(caller)
                async with self._freed:
                    self._freed.notify_all()
        finally:
            self._present.give_back(caller)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a function in the generation thread and return its result. Functions run one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

"""Wait for any number of coroutines at once."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def at_once(works: Iterable[Awaitable[T]]) -> list[T]:
    """Run coroutines concurrently, wait for all of them, and return their results in order.

    Raises:
        Exception: The first error that a coroutine raises. The other coroutines keep running; their results are lost.
    """
    return await asyncio.gather(*works)

"""Wait for any number of coroutines at once."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def at_once(works: Iterable[Awaitable[T]]) -> list[T]:
    """Run these at the same time, and return what each gives, in their order. Raise the first error of any."""
    return await asyncio.gather(*works)

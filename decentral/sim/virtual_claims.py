"""decentral/claim_span.py in virtual time: what a real peer awaits happens on an agenda."""

import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from decentral.comm.net.virtual_directory import VirtualDirectory
from decentral.core.agenda import Agenda
from decentral.core.units import Seconds

T = TypeVar("T")


@types.coroutine
def wait(seconds: Seconds) -> Generator[Seconds, None, None]:
    """What everything that is awaited here comes down to."""
    yield seconds


def play(agenda: Agenda, work: Coroutine[Seconds, None, T], done: Callable[[T], None]) -> None:
    """Lets the coroutine run, each wait as long as it says, and gives its result to `done`."""
    try:
        seconds = work.send(None)
    except StopIteration as over:
        done(over.value)
    else:
        agenda.after(seconds, lambda: play(agenda, work, done))


@dataclass(frozen=True, slots=True)
class VirtualClock:
    now: Callable[[], Seconds]

    async def sleep(self, seconds: Seconds) -> None:
        await wait(seconds)


@dataclass(frozen=True, slots=True)
class FarDirectory:
    """A directory whose looks take their time."""

    near: VirtualDirectory
    look_s: Seconds

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        return await self.near.store(key, subkey, value, expires)

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        await wait(self.look_s)
        return await self.near.fetch(key)

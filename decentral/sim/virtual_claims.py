"""scheduler/placement/claim_span.py in virtual time: the waits of its coroutine happen on an agenda."""

import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.virtual_directory import Records, VirtualDirectory

T = TypeVar("T")


@types.coroutine
def wait(seconds: Seconds) -> Generator[Seconds, None, None]:
    """Suspends the coroutine for this long. Everything that is awaited here comes down to it."""
    yield seconds


def play(agenda: Agenda, work: Coroutine[Seconds, None, T], done: Callable[[T], None]) -> None:
    """Runs the coroutine on the agenda: each wait takes as long as it says, and `done` gets the result."""
    try:
        seconds = work.send(None)
    except StopIteration as over:
        done(over.value)
    else:
        agenda.after(seconds, lambda: play(agenda, work, done))


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """A Clock (scheduler/placement/claim_span.py) that waits on the agenda."""

    now: Callable[[], Seconds]

    async def sleep(self, seconds: Seconds) -> None:
        await wait(seconds)


class DelayedDirectory(VirtualDirectory):
    """A directory whose lookups take `lookup_s` each."""

    def __init__(self, records: Records, peer: PeerId, lookup_s: Seconds) -> None:
        super().__init__(records, peer)
        self.lookup_s = lookup_s

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        await wait(self.lookup_s)
        return await super().fetch(key)


class NewestRecords(VirtualDirectory):
    """A directory whose lookups take no time, for what a peer has read before its node begins."""

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        return self._records.newest(self._peer, key)

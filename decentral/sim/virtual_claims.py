"""scheduler/placement/claim_span.py in virtual time: the waits of its coroutine happen on an agenda."""

import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from decentral.core.ids import PeerId, RunId
from decentral.core.units import Seconds
from decentral.peers.membership.swarm_size import Look
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.virtual_directory import Records, VirtualDirectory
from decentral.sim.simulated_peer import SimulatedPeer

T = TypeVar("T")
EPOCH = 1_700_000_000.0  # unix time at the agenda's zero


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
    """The clock of a simulated peer (a Clock of scheduler/placement/claim_span.py), which waits on the agenda."""

    agenda: Agenda
    member: SimulatedPeer

    def now(self) -> Seconds:
        return EPOCH + self.agenda.now + self.member.skew_s + self.member.clock_s

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


class _NewestRecords(VirtualDirectory):
    """A directory whose lookups take no time, and find what has reached the peer's side."""

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        return self._records.newest(self._peer, key)


def measured(records: Records, run: RunId, peer: PeerId) -> float:
    """Return about how many peers the swarm has, as a real peer measures it before its node begins."""
    look = Look(_NewestRecords(records, peer), run, peer)
    play(records.agenda, look.measure(), lambda _: None)
    return max(1.0, look.peers)

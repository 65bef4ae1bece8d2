"""Run coroutines in virtual time, such as a peer's choice of its layers (scheduler/placement/claim_span.py)."""

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
EPOCH = 1_700_000_000.0  # Unix time at virtual time 0


@types.coroutine
def wait(seconds: Seconds) -> Generator[Seconds, None, None]:
    """Suspend the calling coroutine for `seconds` of virtual time, after which `play` resumes it."""
    yield seconds


def play(agenda: Agenda, work: Coroutine[Seconds, None, T], done: Callable[[T], None]) -> None:
    """Run a coroutine in virtual time, and call `done` with its result."""
    try:
        seconds = work.send(None)
    except StopIteration as over:
        done(over.value)
    else:
        agenda.after(seconds, lambda: play(agenda, work, done))


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """The clock of a simulated peer, including its error; implements `Clock` of scheduler/placement/claim_span.py."""

    agenda: Agenda
    member: SimulatedPeer

    def now(self) -> Seconds:
        """Return the Unix time that the peer's clock shows."""
        return EPOCH + self.agenda.now + self.member.skew_s + self.member.clock_s

    async def sleep(self, seconds: Seconds) -> None:
        """Wait for `seconds` of virtual time."""
        await wait(seconds)


class DelayedDirectory(VirtualDirectory):
    """A peer's view of the DHT in which each lookup takes `lookup_s` of virtual time."""

    def __init__(self, records: Records, peer: PeerId, lookup_s: Seconds) -> None:
        """Prepare to look up `records` as `peer` sees them."""
        super().__init__(records, peer)
        self.lookup_s = lookup_s

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        """Return the records under a key, after `lookup_s`."""
        await wait(self.lookup_s)
        return await super().fetch(key)


class _NewestRecords(VirtualDirectory):
    """A peer's view of the DHT: lookups take no time, and find the newest records that no partition hides from it."""

    async def fetch(self, key: str) -> Mapping[str, bytes]:
        return self._records.newest(self._peer, key)


def measured(records: Records, run: RunId, peer: PeerId) -> float:
    """Return how many peers the swarm has, as `peer` estimates it from DHT records before it joins; at least 1."""
    look = Look(_NewestRecords(records, peer), run, peer)
    play(records.agenda, look.measure(), lambda _: None)
    return max(1.0, look.peers)

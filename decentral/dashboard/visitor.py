"""A visitor's lines: the records in a live swarm's DHT, and which of their peers answer.

A visitor is no member, holds no layers, and throws its key away. Every few seconds it reads the records, which peers
renew about every 20 s, and asks some peers for a sign of life: one that leaves two in a row unanswered is missed, long
before its record expires.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping
from decentral.comm.wire.transport import AskError
from decentral.core.ids import PeerId
from decentral.core.swarm_config import facts_of
from decentral.dashboard.record_lines import ToldRecords
from decentral.dashboard.sources import Told
from decentral.invitation_files import read_holding
from decentral.peers.membership import records
from decentral.peers.membership.records import PeerRecord
from decentral.visit import VisitedSwarm, visit

LOOK_S = 3.0
MOST_PINGED = 32  # in one look, in turn
PING_S = 2.0
UNANSWERED = 2  # in a row: the peer is missed
LINES_KEPT = 10_000  # that nobody has taken yet
NOTE = (
    "This page is a visitor's: it shows what peers say in their records, about every 20 s, and which of them answer. "
    "Events, reasons of failed exchanges and plans stand in the peers' own journals."
)


@dataclass(slots=True)
class Visitor:
    """A Source: what a visited swarm's records say."""

    swarm: VisitedSwarm
    over: bool = False
    _lines: deque[Told] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    _told: ToldRecords = field(default_factory=ToldRecords)
    _known: dict[PeerId, PeerRecord] = field(default_factory=dict)
    _failures: dict[PeerId, int] = field(default_factory=dict)
    _turn: int = 0

    def lines(self) -> Iterator[Told]:
        while self._lines:
            yield self._lines.popleft()

    async def look(self) -> None:
        """For as long as the swarm is looked at."""
        facts = {"run": self.swarm.run, "note": NOTE, **facts_of(self.swarm.config)}
        self._say("facts", facts=facts)
        while True:
            try:
                found = await self._records()
            except Exception:  # of the directory: it is looked up again
                found = self._known
            for line in self._told.news(found, self.swarm.clock()):
                self._lines.append(("", line))
            for peer in self._known.keys() - found.keys():
                self._say("missed", peer=peer, reason="left" if not self._failures.get(peer) else "expired")
                self._failures.pop(peer, None)
            self._known = found
            await asyncio.gather(*(self._ping(peer) for peer in self._next()))
            await asyncio.sleep(LOOK_S)

    async def _records(self) -> dict[PeerId, PeerRecord]:
        swarm = self.swarm
        shards = swarm.config.swarm.shards
        found = await records.lookup(swarm.directory, swarm.run, shards, swarm.clock(), swarm.own.open)
        for peer, record in found.items():
            if peer not in self._known:
                swarm.transport.learn(peer, record.addresses)
        return found

    def _next(self) -> Sequence[PeerId]:
        """The peers whose turn it is."""
        known = sorted(self._known)
        turn = self._turn % max(1, len(known))
        self._turn = turn + MOST_PINGED
        return [*known[turn:], *known[:turn]][:MOST_PINGED]

    async def _ping(self, peer: PeerId) -> None:
        try:
            await self.swarm.transport.ask(peer, Envelope(Ping(0)), PING_S, 0)
            self._failures[peer] = 0
        except AskError as error:
            self._failures[peer] = self._failures.get(peer, 0) + 1
            if self._failures[peer] == UNANSWERED:
                self._say("missed", peer=peer, reason=error.reason)

    def _say(self, event: str, **fields: Any) -> None:
        self._lines.append(("", {"t": self.swarm.clock(), "event": event, **fields}))


@asynccontextmanager
async def visiting(join: Sequence[str], invite: str | None) -> AsyncIterator[Visitor]:
    """Raises UserError if no peer at these addresses answers."""
    async with visit(join, read_holding(Path(invite)) if invite else None) as swarm:
        visitor = Visitor(swarm)
        looking = asyncio.create_task(visitor.look())
        looking.add_done_callback(lambda _: setattr(visitor, "over", True))
        try:
            yield visitor
        finally:
            looking.cancel()

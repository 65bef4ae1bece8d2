"""Watch a live swarm from outside: convert the records in its DHT to lines for the page.

A visitor is not a member of the swarm: it holds no layers, and its key is temporary. Every few seconds it reads the
records, which peers renew about every 20 s, and pings some peers (record_lines.py). Start reading at `visiting`.
"""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from decentral.comm.net.keep_daemon import keep_daemon
from decentral.core.ids import PeerId
from decentral.core.journal.lines import Recorded
from decentral.core.received import facts_of
from decentral.peers.membership.records import PeerRecord
from decentral.peers.startup.invitation_files import read_holding
from decentral.peers.startup.visit import VisitedSwarm, visit
from decentral.view.page.record_lines import ASKED_EVERY_S, SignsOfLife, ToldRecords
from decentral.view.page.source_lines import FactsLine, MissedLine, SourceEvent, Told

LINES_KEPT = 10_000  # at most this many lines wait for the page; if it reads too slowly, the oldest are dropped
VISITOR_NOTE = (
    "This page watches from outside: it shows the records that peers publish about every 20 s, and which peers answer. "
    "Events, reasons for failed exchanges and plans are only in the peers' own journals."
)


@dataclass(slots=True)
class Visitor:
    """The source of lines from the DHT records of a visited swarm and from pings; implements `LineSource`."""

    swarm: VisitedSwarm
    over: bool = False
    _lines: deque[Told] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    _told: ToldRecords = field(default_factory=ToldRecords)
    _known: dict[PeerId, PeerRecord] = field(default_factory=dict)
    _signs: SignsOfLife = field(init=False)

    def __post_init__(self) -> None:
        """Prepare to ping peers over the visit's connections."""
        self._signs = SignsOfLife(self.swarm.transport)

    def lines(self) -> Iterator[Told]:
        """Yield the lines that `look` has added since the last call."""
        while self._lines:
            yield self._lines.popleft()

    async def stay(self) -> None:
        """Read records and ping peers every ASKED_EVERY_S seconds, until cancelled."""
        facts = {"run": self.swarm.run, "note": VISITOR_NOTE} | facts_of(self.swarm.config)
        self._say(FactsLine(facts=facts))
        while True:
            await self.look()
            await asyncio.sleep(ASKED_EVERY_S)

    async def look(self) -> None:
        """Read the records and ping the next group of peers once. Add a line for each change."""
        try:
            found = await self._records()
        except Exception:  # if the DHT fails, use the records known so far
            found = self._known
        for record in self._told.news(found):
            self._say(record)
        for peer in self._known.keys() - found.keys():
            self._say(MissedLine(peer=peer, reason=self._why_gone(peer)))
        self._known = found
        for peer, reason in await self._signs.missed(found):
            self._say(MissedLine(peer=peer, reason=reason))

    def _why_gone(self, peer: PeerId) -> str:
        """Return why a record is gone: "expired" if its lifetime is over and the last ping failed, else "left"."""
        over = self.swarm.clock() > self._known[peer].time + self._known[peer].lifetime_s
        return "expired" if over and self._signs.failures.get(peer) else "left"

    async def _records(self) -> dict[PeerId, PeerRecord]:
        found = await self.swarm.records()
        for peer, record in found.items():
            if peer not in self._known:
                self.swarm.transport.learn(peer, record.addresses)
        return found

    def _say(self, event: SourceEvent) -> None:
        self._lines.append(("", Recorded(self.swarm.clock(), event)))


@asynccontextmanager
async def visiting(join: Sequence[str], invite: str | None) -> AsyncIterator[Visitor]:
    """Visit a swarm until the block ends, and yield the source of lines about the swarm.

    Args:
        join: Addresses of peers.
        invite: Path of an invitation file, for a private swarm.

    Raises:
        UserError: If no peer at these addresses answers.
    """
    async with visit(join, read_holding(Path(invite)) if invite else None) as swarm:
        visitor = Visitor(swarm)
        say = partial(print, file=sys.stderr, flush=True)
        tasks = [asyncio.create_task(work) for work in (visitor.stay(), keep_daemon(swarm.transport, swarm.clock, say))]
        for task in tasks:
            task.add_done_callback(lambda _: setattr(visitor, "over", True))
        try:
            yield visitor
        finally:
            for task in tasks:
                task.cancel()

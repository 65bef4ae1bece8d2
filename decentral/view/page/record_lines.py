"""Send the live page lines that no journal contains: other peers' DHT records, and peers that do not answer a ping.

Start reading at `ToldRecords`. `feed_page` sends the records that a training peer knows, and `watch_for_page` the
results of its pings: the record of a dead peer stays in the DHT for a minute.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping
from decentral.comm.wire.transport import AskError, Transport
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerRecord
from decentral.peers.runtime.host import Host
from decentral.view.page.child import DashboardProcess
from decentral.view.page.source_lines import MissedLine, RecordLine

FEED_S = 1.0
RECORDS_AT_ONCE = 100  # an update has at most this many records, because each takes the event loop about 30 us
ASKED_EVERY_S = 3.0
MOST_PINGED = 32  # at most this many peers are pinged at once, in larger swarms by turns
SIGN_S = 2.0
UNANSWERED = 2  # a peer is reported after this many unanswered pings in a row


@dataclass(slots=True)
class ToldRecords:
    """A filter that sends each version of a peer's record to the page only once."""

    _times: dict[PeerId, Seconds] = field(default_factory=dict)  # peer -> time of the peer's record that was sent last

    def news(self, live: Mapping[PeerId, PeerRecord]) -> Iterator[RecordLine]:
        """Yield lines for the records in `live` that were not sent yet, at most RECORDS_AT_ONCE lines.

        The next call yields further records. Peers without a sent record come first, then peers whose record was
        sent longest ago. So a peer that renews its record very often does not delay the records of other peers.
        """
        turn = {peer: number for number, peer in enumerate(self._times)}
        new = [peer for peer, record in live.items() if self._times.get(peer) != record.time]
        for peer in nsmallest(RECORDS_AT_ONCE, new, key=lambda peer: turn.get(peer, -1)):
            self._times.pop(peer, None)
            self._times[peer] = live[peer].time
            yield RecordLine(peer=peer, record=live[peer])
        if len(self._times) > 2 * len(live) + RECORDS_AT_ONCE:
            self._times = {peer: time for peer, time in self._times.items() if peer in live}


@dataclass(slots=True)
class SignsOfLife:
    """State of the pings to a swarm: which peers are next, and how many pings in a row each peer has not answered."""

    transport: Transport
    failures: dict[PeerId, int] = field(default_factory=dict)
    _turn: int = 0

    async def missed(self, peers: Collection[PeerId]) -> list[tuple[PeerId, str]]:
        """Ping the next MOST_PINGED of these peers.

        Returns:
            (peer, reason of the failure) for each peer that has now failed to answer UNANSWERED pings in a row.
        """
        self.failures = {peer: count for peer, count in self.failures.items() if peer in peers}
        found = await at_once(self._ask(peer) for peer in self._next(sorted(peers)))
        return [one for one in found if one is not None]

    def _next(self, known: Sequence[PeerId]) -> Sequence[PeerId]:
        """Return the next MOST_PINGED peers after the last call's peers; after the last peer comes the first."""
        turn = self._turn % max(1, len(known))
        self._turn = turn + MOST_PINGED
        return [*known[turn:], *known[:turn]][:MOST_PINGED]

    async def _ask(self, peer: PeerId) -> tuple[PeerId, str] | None:
        """Ping a peer. Return (peer, reason) if it has now failed to answer UNANSWERED pings in a row, else None."""
        try:
            await self.transport.ask(peer, Envelope(Ping(0)), SIGN_S, 0)
        except AskError as error:
            self.failures[peer] = self.failures.get(peer, 0) + 1
            return (peer, error.reason) if self.failures[peer] == UNANSWERED else None
        self.failures.pop(peer, None)
        return None


async def feed_page(host: Host, page: DashboardProcess) -> None:
    """Send the page the records of all other peers that `host` knows, once a second, until cancelled."""
    told = ToldRecords()
    while True:
        live = {peer: entry.record for peer, entry in host.node.roster.live.items()}
        for record in told.news(live):
            page.tell("", host.now(), record)
        await asyncio.sleep(FEED_S)


async def watch_for_page(host: Host, page: DashboardProcess) -> None:
    """Ping the other peers, and tell the page which peers do not answer, until cancelled.

    Without pings, the page would learn that a peer is gone only from a failed gossip exchange, which may come late.
    """
    signs = SignsOfLife(host.transport)
    while True:
        for peer, reason in await signs.missed(host.node.roster.live):
            page.tell("", host.now(), MissedLine(peer=peer, reason=reason))
        await asyncio.sleep(ASKED_EVERY_S)

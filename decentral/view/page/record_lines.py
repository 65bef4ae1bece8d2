"""Send the live page lines that no journal contains: other peers' DHT records, and peers that do not answer a ping.

Start reading at `ToldRecords`. `feed_page` sends the records that a training peer knows, and `watch_for_page` the
results of its pings.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerRecord
from decentral.peers.runtime.host import Host
from decentral.view.page.child import DashboardProcess
from decentral.view.page.signs_of_life import ASKED_EVERY_S, SignsOfLife
from decentral.view.page.source_lines import MissedLine, RecordLine

FEED_S = 1.0
RECORDS_AT_ONCE = 100  # an update has at most this many records, because each takes the event loop about 30 us


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

"""What peers' records in the DHT say, as lines for the page; and how a peer that trains hands them on."""

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
RECORDS_AT_ONCE = 100  # in that time: each takes the event loop 30 us


@dataclass(slots=True)
class ToldRecords:
    """Which records the page has, so that each is told once."""

    _times: dict[PeerId, Seconds] = field(default_factory=dict)  # of the last one, by peer; told last, it stands last

    def news(self, live: Mapping[PeerId, PeerRecord]) -> Iterator[RecordLine]:
        """Lines about the records that are new, RECORDS_AT_ONCE at most; the others come the next time.

        Those come first that were never told, and then those that were told longest ago: a peer that renews its record
        all the time keeps no other out.
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
    """Hands what this peer knows of the others on to its page, once a second, for as long as it runs."""
    told = ToldRecords()
    while True:
        live = {peer: entry.record for peer, entry in host.node.roster.live.items()}
        for record in told.news(live):
            page.tell("", host.now(), record)
        await asyncio.sleep(FEED_S)


async def watch_for_page(host: Host, page: DashboardProcess) -> None:
    """Asks the others for signs of life, and tells the page who gives none. Exchanges find that out much later, where
    windows are long."""
    signs = SignsOfLife(host.transport)
    while True:
        for peer, reason in await signs.missed(host.node.roster.live):
            page.tell("", host.now(), MissedLine(peer=peer, reason=reason))
        await asyncio.sleep(ASKED_EVERY_S)

"""What a peer tells of itself: its record in the DHT, with the profile as it is measured by now.

The profile is first measured before a peer joins, but for the speed of a newcomer that gets the whole model. From then
on its links are known from what they carried, and its speed from what it trained. Others plan and route by both, so the
record is renewed when the speed has changed much.
"""

from dataclasses import dataclass, replace

from decentral.comm.pipeline.router import Router
from decentral.comm.wire.meter import Meter
from decentral.core.ids import suffix
from decentral.core.journal.events import AddressesLine, StatusLine
from decentral.core.journal.field_kinds import MeasuredLink
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.joining.donor import Donor
from decentral.peers.membership.records import (
    MOST_KEPT,
    MOST_LOSS,
    MOST_PER_S,
    MOST_RECORDED_LINKS,
    PeerPhase,
    PeerRecord,
    Profile,
    RecordedLink,
    Standing,
)
from decentral.peers.runtime.fragment_exchanges import FragmentExchanges
from decentral.peers.runtime.peer_selection import PeerSelection
from decentral.peers.runtime.progress import TrainingProgress
from decentral.peers.runtime.setup import PresentSetup
from decentral.peers.runtime.traffic import TrafficCounter


@dataclass(slots=True)
class OwnRecord:
    setup: PresentSetup
    meter: Meter
    selection: PeerSelection
    progress: TrainingProgress
    donor: Donor
    gossip: FragmentExchanges
    traffic: TrafficCounter
    routes: Router | None
    published: Profile | None = None  # in our last record; None: there was none yet
    window_s: Seconds = 0.0  # in our last record
    moved_to: tuple[str, ...] = ()  # current addresses, if they changed since the start; (): those of the start hold

    @property
    def windows_outdated(self) -> bool:
        """Whether we need windows of another length than our last record says."""
        return self.gossip.needed_s != self.window_s

    @property
    def speed_outdated(self) -> bool:
        """Whether the speed that our routes have measured differs much from the one in our last record."""
        speed = self.routes.load.speed if self.routes else 0.0
        published = self.published.tokens_per_s if self.published else 0.0
        return speed != 0 and not 0.8 < published / speed < 1.25

    def compose(self, phase: PeerPhase, now: Seconds) -> PeerRecord:
        setup, progress, profile = self.setup.now, self.progress, self.profile(now)
        self.published, self.window_s = profile, self.gossip.needed_s
        return PeerRecord(
            run=setup.run,
            time=now,
            addresses=self.moved_to or setup.addresses,
            profile=profile,
            first=setup.fragments[0].first,
            last=setup.fragments[-1].last,
            step=progress.step,
            lr_step=progress.lr_step,
            tokens=progress.tokens,
            round=self.gossip.round,
            phase=phase,
            window_s=self.window_s,
            kept=self.donor.retained[:MOST_KEPT],
            standing=self._standing(),
        )

    def move_to(self, addresses: tuple[str, ...]) -> Log:
        """Tell these addresses from the next record on, which is due in `renew_s` of the last one at the latest."""
        self.moved_to = addresses
        return Log(AddressesLine(addresses=addresses))

    def status(self) -> Log:
        """The journal's line about what this peer holds, how long its windows are and why, and its latest links."""
        setup, (count, bound) = self.setup.now, self.gossip.windows
        first, last = setup.fragments[0].first, setup.fragments[-1].last
        links = tuple(MeasuredLink(suffix, rate, latency_ms / 1e3) for suffix, rate, latency_ms in self._links())
        window_s = self.selection.lengths.window_s() * count
        return Log(StatusLine(first=first, last=last, window_s=window_s, bound=bound, links=links))

    def _standing(self) -> Standing:
        progress, exchanges = self.progress, self.gossip.counts.outcomes
        return Standing(
            loss=_told(None if progress.losses.lost else progress.losses.mean),
            held_out=_told(progress.evaluations.held_out),
            shares=tuple(round(1000 * share) for share in progress.spent.shares().values()),
            exchanges=(exchanges["done"], exchanges["solo"], exchanges["failed"]),
            sent_bytes=self.traffic.sent_bytes,
            received_bytes=self.traffic.received_bytes,
            links=tuple(self._links()),
        )

    def _links(self) -> list[RecordedLink]:
        latest = list(self.meter.links.items())[: -MOST_RECORDED_LINKS - 1 : -1]
        return [
            (suffix(peer), int(min(MOST_PER_S, link.down.known or 0)), round(1e3 * (link.latency_s or 0)))
            for peer, link in latest
        ]

    def profile(self, now: Seconds) -> Profile:
        setup = self.setup.now
        # A peer with the whole model trains alone. The speed of the others is that of their part in routes.
        measured = self.progress.speed(now) if setup.whole else self.routes.load.speed if self.routes else 0.0
        return replace(
            setup.profile,
            down=min(MOST_PER_S, self.meter.typical_down() or 0.0),
            up=min(MOST_PER_S, self.meter.best_up() or 0.0),
            latency_s=min([known for link in self.meter.links.values() if (known := link.latency_s)], default=0.0),
            tokens_per_s=min(MOST_PER_S, measured or setup.profile.tokens_per_s),
        )


def _told(loss: float | None) -> float | None:
    """A record with another number would be refused by all peers."""
    return loss if loss is not None and abs(loss) <= MOST_LOSS else None

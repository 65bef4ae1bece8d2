"""Compose this peer's own record for the DHT, and its status line for the journal. See `OwnRecord`.

This peer's device is measured before it joins. Only the speed of a newcomer that fetches the whole model is measured in
its first training steps. Later, transfers measure the links, and training measures the speed. Other peers plan and
route by these speeds, so the record is renewed early when the speed has changed much.
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
from decentral.peers.runtime.witness import Witness

LEAST_FIGURE = 1e-9  # added to two values before one is divided by the other: a speed that is not measured is 0
CHANGED_TIMES = 1.5  # a speed or memory size has changed if it is larger or smaller than before by this factor


@dataclass(slots=True)
class OwnRecord:
    """Builder of this peer's DHT record; it remembers the profile in the last record."""

    setup: PresentSetup
    meter: Meter
    selection: PeerSelection
    progress: TrainingProgress
    donor: Donor
    gossip: FragmentExchanges
    traffic: TrafficCounter
    routes: Router | None
    witness: Witness
    published: Profile | None = None
    window_s: Seconds = 0.0
    _version: Profile | None = None  # our profile as it was when speed or memory last changed (see `has_changed`)
    moved_to: tuple[str, ...] = ()  # new addresses of this machine; () while those it started with are valid

    @property
    def windows_outdated(self) -> bool:
        """Return whether our record must be renewed because we now need another window length."""
        return self.gossip.needed_s != self.window_s

    @property
    def speed_outdated(self) -> bool:
        """Return whether our speed, as routes measure it, is outside 0.8 to 1.25 times the speed in our last record."""
        speed = self.routes.load.speed if self.routes else 0.0
        published = self.published.tokens_per_s if self.published else 0.0
        return speed != 0 and not 0.8 < published / speed < 1.25

    def compose(self, phase: PeerPhase, now: Seconds) -> PeerRecord:
        """Return our record as of `now`, and remember its profile and window length."""
        setup, progress, profile = self.setup.now, self.progress, self.profile(now)
        if self._version is None or has_changed(self._version, profile):
            self._version = replace(profile, changed=now)
        profile = replace(profile, changed=self._version.changed)
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
            tokens=setup.trained_tokens + progress.tokens,
            round=self.gossip.round,
            phase=phase,
            window_s=self.window_s,
            kept=self.donor.retained[:MOST_KEPT],
            standing=self._standing(),
        )

    def move_to(self, addresses: tuple[str, ...]) -> Log:
        """Use these addresses in later records, and return a journal line; the caller must then renew the record."""
        self.moved_to = addresses
        return Log(AddressesLine(addresses=addresses))

    def status(self, now: Seconds) -> Log:
        """Return a journal line with our layers, our window length and why it is so long, our MFU and our links."""
        setup, (count, bound) = self.setup.now, self.gossip.windows
        first, last = setup.fragments[0].first, setup.fragments[-1].last
        links = tuple(MeasuredLink(suffix, rate, latency_ms / 1e3) for suffix, rate, latency_ms in self._links())
        window_s, known = self.selection.lengths.window_s() * count, self.utilisation(now)
        mfu = None if known is None else round(known, 4)
        return Log(StatusLine(first=first, last=last, window_s=window_s, bound=bound, mfu=mfu, links=links))

    def utilisation(self, now: Seconds) -> float | None:
        """Return the model FLOPs utilisation (MFU; PaLM, arXiv 2204.02311, appendix B); None if it is not known.

        It is the FLOP/s that both passes through our layers need at the present tokens/s, divided by the FLOP/s of the
        device in a large matrix product, as measured at the start. It is not known where micro-batches take routes: a
        peer's tokens are then those of its own micro-batches, while its device also computes for others.
        """
        setup, speed = self.setup.now, self.progress.speed(now)
        if not setup.whole or setup.config.synchronous:
            return None
        flops = sum(sum(one.work) for one in setup.fragments) * speed  # 0.0 for layers of user code
        return flops / setup.profile.flops if flops and setup.profile.flops else None

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
            seen=self.witness.rows(),
        )

    def _links(self) -> list[RecordedLink]:
        latest = list(self.meter.links.items())[: -MOST_RECORDED_LINKS - 1 : -1]
        return [
            (suffix(peer), int(min(MOST_PER_S, link.down.known or 0)), round(1e3 * (link.latency_s or 0)))
            for peer, link in latest
        ]

    def profile(self, now: Seconds) -> Profile:
        """Return our device's profile, with links and speed as measured by `now`."""
        setup = self.setup.now
        # If this peer holds the whole model, its training steps measure its speed; else its routed micro-batches do.
        measured = self.progress.speed(now) if setup.whole else self.routes.load.speed if self.routes else 0.0
        return replace(
            setup.profile,
            down=min(MOST_PER_S, self.meter.typical_down() or 0.0),
            up=min(MOST_PER_S, self.meter.typical_up() or 0.0),
            latency_s=min([known for link in self.meter.links.values() if (known := link.latency_s)], default=0.0),
            tokens_per_s=min(MOST_PER_S, measured or setup.profile.tokens_per_s),
        )


def has_changed(before: Profile, now: Profile) -> bool:
    """Return whether a device's speed or memory has changed by the factor CHANGED_TIMES or more.

    Measurements under changing load differ by less. The costs of layers are measured only once. Links are left out:
    transfers measure them again and again, and plans are evaluated by the latest rates.
    """
    pairs = (before.tokens_per_s, now.tokens_per_s), (before.memory_bytes, now.memory_bytes)
    return any(
        not 1 / CHANGED_TIMES < (new + LEAST_FIGURE) / (old + LEAST_FIGURE) < CHANGED_TIMES for old, new in pairs
    )


def _told(loss: float | None) -> float | None:
    """Return the loss to publish: None if it exceeds MOST_LOSS, since other peers would refuse such a record."""
    return loss if loss is not None and abs(loss) <= MOST_LOSS else None

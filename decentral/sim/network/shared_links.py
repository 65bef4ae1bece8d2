"""Compute how long transfers on shared links take, by an event-driven fluid model. Start at `SharedLinks.start`.

All transfers of a sender share its uplink, all transfers to a receiver share its downlink, and all transfers on the
link between two peers share that link. The peers of a site may share a link, too: one for all transfers that leave the
site, and one for all that enter it. Shares are nearly max-min fair, as TCP's are: each transfer has at least an equal
share of each of its links, and what one cannot use, the others of the link get. A transfer that waits for
acknowledgements (congestion.py) has no share. The start or end of a transfer raises the rates only of the other
transfers of its sender, its receiver and their sites; what more distant transfers could then use stays unused.

Bytes in flight beyond the path's capacity wait in a queue before the sender's uplink, or before the link between both
peers if that link is slower. Small messages and acknowledgements wait behind these bytes. If a transfer sends more
bytes at once than fit in the uplink's queue, the rest is dropped.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.net.uplink_queue import PROBE_HOLD_S
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda, Timer
from decentral.sim.network.congestion import CongestionWindow, Sender

QUEUE_S = 0.25  # a link drops a packet that would have to wait longer than this in its queue
LEAST_BYTES = 1e-3  # fewer unsent bytes than this are a rounding error, and count as 0
ROUNDING = 1e-6  # rates that differ by less than this share of them are equal, but for rounding
MOST_WINDOWS = 100_000  # the congestion windows of at most this many connections are kept, those used most recently


@dataclass(frozen=True, slots=True)
class SiteLink:
    """One direction of the link that the peers of a site share, for transfers to or from peers elsewhere."""

    site: str
    leaves: bool  # True: the direction out of the site; False: the direction into the site
    rate: float  # bytes/s


class Geography(Protocol):
    """Interface of the rates and delays of all peers' links; implemented by `SwarmGeography`."""

    def up(self, peer: PeerId) -> float:
        """Return the rate of a peer's uplink, in bytes/s."""

    def down(self, peer: PeerId) -> float:
        """Return the rate of a peer's downlink, in bytes/s."""

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        """Return the one-way delay of a message between two processes."""

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        """Return the round-trip time of a packet, without queues."""

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        """Return the bytes/s that the path between two peers' access links carries; infinite without a limit."""

    def site_links(self, source: PeerId, target: PeerId) -> Sequence[SiteLink]:
        """Return the links of sites that the path between two peers uses: none, one or two."""


Link = tuple[bool, PeerId] | SiteLink
"""A shared link: a peer's uplink (True, peer), a peer's downlink (False, peer), or a direction of a site's link."""


@dataclass(slots=True)
class Free:
    """What a link has for transfers whose rates are to be set: bytes/s, and the number of these transfers."""

    rate: float
    transfers: int


@dataclass(slots=True, eq=False)
class Transfer:
    """A message in flight over shared links."""

    source: PeerId
    target: PeerId
    size: int  # bytes
    sender: Sender
    done: Callable[[], None]
    site_links: Sequence[SiteLink] = ()
    rate: float = 0.0  # bytes/s since `sender.at`; 0 while the transfer waits for acknowledgements
    timer: Timer | None = None
    over: bool = False
    counted: int = 0  # bytes that `SharedLinks.take_sent` has returned, or will return
    links: Sequence[Link] = ()  # all links that the transfer shares

    def __post_init__(self) -> None:
        """Collect the links."""
        self.links = ((True, self.source), (False, self.target), *self.site_links)

    def set_rate(self, rate: float, now: Seconds) -> None:
        """Send at `rate` bytes/s from now on; 0 pauses the transfer."""
        self.sender.send(self.rate, now)
        self.rate = rate

    def schedule(self, agenda: Agenda, when: Seconds, action: Callable[[], None]) -> None:
        """Set the transfer's only timer; call this only after an earlier timer has run or was cancelled."""
        self.timer = agenda.at(when, action)

    def cancel(self) -> None:
        """Cancel the timer."""
        if self.timer is not None:
            self.timer.cancel()

    def end(self) -> bool:
        """End the transfer; return False if the transfer has ended already."""
        was_over, self.over = self.over, True
        return not was_over


@dataclass(slots=True)
class SharedLinks:
    """All transfers in flight, and the congestion windows of connections."""

    agenda: Agenda
    geography: Geography
    sending: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)
    receiving: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)
    crossing: dict[SiteLink, dict[Transfer, None]] = field(default_factory=dict)
    windows: dict[tuple[PeerId, PeerId], CongestionWindow] = field(default_factory=dict)
    sent: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)  # (source, target) -> bytes of all transfers
    rates_set: int = 0  # how often a transfer's rate was computed; takes most of a simulation's time on shared links
    # (source, target) -> number of transfers; `_in_flight` counts only those not waiting for acknowledgements
    _sharing: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)
    _in_flight: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)
    _untaken: dict[PeerId, Counter[PeerId]] = field(default_factory=dict)  # sender -> receiver -> bytes for `take_sent`
    # Sender -> its bandwidth probe, during which its other transfers pause (comm/net/uplink.py).
    _alone: dict[PeerId, Transfer] = field(default_factory=dict)

    def start(
        self, source: PeerId, target: PeerId, size: float, done: Callable[[], None], alone: bool = False
    ) -> Transfer:
        """Begin to send `size` bytes from `source` to `target`; `done` is called when the last byte has left.

        If `alone`, the other transfers of `source` pause until this one ends, for PROBE_HOLD_S at most.
        """
        self._sharing[source, target] += 1
        geography, window = self.geography, self._window(source, target)
        path_rate = min(geography.up(source), geography.down(target), geography.bandwidth(source, target))
        round_trip_s = geography.round_trip_s(source, target)
        window.use(self.agenda.now, round_trip_s)
        sender = window.sender(size, path_rate, round_trip_s, alone)
        transfer = Transfer(source, target, round(size), sender, done, geography.site_links(source, target))
        if alone:
            self._alone[source] = transfer
            self.agenda.after(PROBE_HOLD_S, lambda: self._let_others_go(transfer))
        self._begin_round(transfer)
        return transfer

    def stop(self, transfer: Transfer) -> None:
        """End a transfer, finished or not, without calling `done`; other transfers get the transfer's shares."""
        if not transfer.end():
            return
        self._pause(transfer)
        self._let_others_go(transfer)
        connection = transfer.source, transfer.target
        if (window := self.windows.get(connection)) is not None:
            window.leave(transfer.sender, self.agenda.now)
        self._sharing[connection] -= 1
        if not self._sharing[connection]:
            del self._sharing[connection], self._in_flight[connection]
        self.use(transfer.target, transfer.source)  # acknowledgements use the opposite direction

    def _let_others_go(self, transfer: Transfer) -> None:
        """Resume the transfers that pause for this one, if there are any."""
        if self._alone.get(transfer.source) is transfer:
            del self._alone[transfer.source]
            self._share(transfer)

    def take_sent(self, source: PeerId) -> Mapping[PeerId, int]:
        """Return the bytes that have left from `source` to each peer since the last call for `source`."""
        for transfer in self.sending.get(source, ()):
            transfer.sender.send(transfer.rate, self.agenda.now)
            self._count(transfer)
        return self._untaken.pop(source, {})

    def _count(self, transfer: Transfer) -> None:
        """Keep the bytes that this transfer has sent since the last call for `take_sent`."""
        sent = int(transfer.size - transfer.sender.left)
        if sent > transfer.counted:
            self._untaken.setdefault(transfer.source, Counter())[transfer.target] += sent - transfer.counted
            transfer.counted = sent

    def use(self, source: PeerId, target: PeerId) -> None:
        """Record that a small message was sent, so that the connection does not count as idle."""
        window = self.windows.get((source, target))
        if window is not None:
            window.use(self.agenda.now, self.geography.round_trip_s(source, target))

    def queue_s(self, source: PeerId, target: PeerId) -> Seconds:
        """Return how long a packet from source to target would wait in queues now; the downlink has no queue."""
        sending = self.sending.get(source)
        if not sending:
            return 0.0
        up, path, waits_s = self.geography.up(source), self.geography.bandwidth(source, target), 0.0
        if up <= 0 or path <= 0:
            return QUEUE_S
        for transfer in sending:
            if self._pauses(transfer):
                continue  # what it had in flight has left the queue by now
            transfer.sender.send(transfer.rate, self.agenda.now)
            waits_s += transfer.sender.queued(transfer.rate) / (min(up, path) if transfer.target == target else up)
        return min(QUEUE_S, waits_s)

    def _window(self, source: PeerId, target: PeerId) -> CongestionWindow:
        window = self.windows.get((source, target)) or CongestionWindow(used_at=self.agenda.now)
        keep_latest(self.windows, (source, target), window, MOST_WINDOWS)
        return window

    def _begin_round(self, transfer: Transfer) -> None:
        source, target, sender = transfer.source, transfer.target, transfer.sender
        self._drop(transfer)
        sender.begin_round(self.agenda.now, self.queue_s(target, source))
        self.sending.setdefault(source, {})[transfer] = None
        self.receiving.setdefault(target, {})[transfer] = None
        self._in_flight[source, target] += 1
        for link in transfer.site_links:
            self.crossing.setdefault(link, {})[transfer] = None
        self._share(transfer)

    def _drop(self, transfer: Transfer) -> None:
        """Drop the bytes of the window to be sent that exceed the free space in the uplink's queue."""
        up = self.geography.up(transfer.source)
        dropped = transfer.sender.burst - (QUEUE_S - self.queue_s(transfer.source, transfer.target)) * up
        if dropped > 0 and up > 0:
            transfer.sender.lose(dropped, QUEUE_S, self.agenda.now)

    def _stopped_sending(self, transfer: Transfer) -> None:
        """Finish the transfer if all its bytes are sent; otherwise let it wait for acknowledgements."""
        self._pause(transfer)
        sender, agenda = transfer.sender, self.agenda
        if sender.left > LEAST_BYTES:
            transfer.schedule(agenda, sender.acknowledged_at, lambda: self._next_round(transfer))
        elif sender.resent_at > agenda.now:
            transfer.schedule(agenda, sender.resent_at, lambda: self._finish(transfer))
        else:
            self._finish(transfer)

    def _pause(self, transfer: Transfer) -> None:
        """Stop a transfer's sending for now; other transfers get the transfer's shares."""
        source, target = transfer.source, transfer.target
        transfer.cancel()
        if transfer in self.sending.get(source, ()):
            del self.sending[source][transfer], self.receiving[target][transfer]
            self._in_flight[source, target] -= 1
            for link in transfer.site_links:
                del self.crossing[link][transfer]
            transfer.set_rate(0.0, self.agenda.now)
            self._count(transfer)
            self._share(transfer)

    def _next_round(self, transfer: Transfer) -> None:
        transfer.sender.acknowledge()
        self._begin_round(transfer)

    def _finish(self, transfer: Transfer) -> None:
        self.stop(transfer)
        self.sent[transfer.source, transfer.target] += transfer.size
        transfer.done()

    def _share(self, changed: Transfer) -> None:
        """Set the rates of all transfers that share a link with a transfer that has begun or stopped to send.

        The transfers with the smallest equal shares come first, so that the others get what these cannot use.
        """
        sharing = {**self.sending.get(changed.source, {}), **self.receiving.get(changed.target, {})}
        for link in changed.site_links:
            sharing |= self.crossing[link]
        self.rates_set += len(sharing)
        least = {one: 0.0 if self._pauses(one) else self._least_share(one) for one in sharing}
        free = self._free(least)
        for transfer in sorted(least, key=least.__getitem__):
            rate = least[transfer]
            if rate > 0:
                own = [free[link] for link in transfer.links]
                more = min(self._path_share(transfer), min(one.rate / one.transfers for one in own))
                rate = more if more > (1 + ROUNDING) * rate else rate  # equal transfers have exactly equal rates
                for one in own:
                    one.rate, one.transfers = one.rate - rate, one.transfers - 1
            self._set_rate(transfer, rate)

    def _free(self, least: Mapping[Transfer, float]) -> dict[Link, Free]:
        """Return what the links have for transfers with these least shares, beside their links' other transfers.

        Another transfer that has more than its equal share is slowed to that, as these transfers now need the rest.
        """
        counts = Counter(link for one, rate in least.items() if rate > 0 for link in one.links)
        free = {}
        for link, transfers in counts.items():
            rate, users = self._capacity(link)
            others = [one for one in users if one not in least] if transfers < len(users) else []
            equal = rate / len(users)
            if others and rate - sum(one.rate for one in others) < equal * transfers:
                for one in others:
                    self._set_rate(one, min(one.rate, equal))
            free[link] = Free(rate - sum(one.rate for one in others), transfers)
        return free

    def _capacity(self, link: Link) -> tuple[float, Mapping[Transfer, None]]:
        """Return the bytes/s of a link, and the transfers that share it."""
        match link:
            case SiteLink():
                return link.rate, self.crossing[link]
            case True, peer:
                return self.geography.up(peer), self.sending[peer]
            case _, peer:
                return self.geography.down(peer), self.receiving[peer]

    def _set_rate(self, transfer: Transfer, rate: float) -> None:
        if abs(rate - transfer.rate) <= ROUNDING * rate:
            return
        transfer.set_rate(rate, self.agenda.now)
        transfer.cancel()
        if rate > 0:
            stops_at = transfer.sender.take_share(rate)
            transfer.schedule(self.agenda, stops_at, lambda: self._stopped_sending(transfer))

    def _pauses(self, transfer: Transfer) -> bool:
        """Return whether a transfer pauses, because a bandwidth probe has its sender's uplink to itself."""
        return self._alone.get(transfer.source, transfer) is not transfer

    def _least_share(self, transfer: Transfer) -> float:
        """Return an unpaused transfer's smallest equal share of any link, in bytes/s."""
        source, target, geography = transfer.source, transfer.target, self.geography
        sent = 1 if source in self._alone else len(self.sending[source])
        rate = min(geography.up(source) / sent, geography.down(target) / len(self.receiving[target]))
        for shared in transfer.site_links:
            rate = min(rate, shared.rate / len(self.crossing[shared]))
        return min(rate, self._path_share(transfer))

    def _path_share(self, transfer: Transfer) -> float:
        """Return an unpaused transfer's share of the link between its two peers, in bytes/s."""
        source, target = transfer.source, transfer.target
        in_flight = 1 if source in self._alone else self._in_flight[source, target]
        return self.geography.bandwidth(source, target) / in_flight

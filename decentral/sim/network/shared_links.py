"""How long transfers take that share links: a fluid model, event by event.

A transfer sends at the least of three equal shares: of the sender's uplink among all that it sends, of the receiver's
downlink among all that it receives, and of the link between the two among all transfers on it. Those that wait for
acknowledgements (decentral/sim/network/congestion.py) have no share meanwhile. What a transfer cannot use of its share
is not given to others, so the model errs on the slow side; in return a change touches only the transfers at its two
ends.

What is under way beyond what the path holds stands in the queue before the sender's uplink, or before the link of the
pair where that is slower. Small messages and acknowledgements wait behind it. Where a transfer begins to send more than
the uplink's queue has room for, the rest of it is dropped.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds
from decentral.sim.network.agenda import Agenda, Timer
from decentral.sim.network.congestion import CongestionWindow, Sender

QUEUE_S = 0.25  # the longest that a packet waits before a link; one that would wait longer is dropped (tail drop)
LEAST_BYTES = 1e-3  # less is a rounding error
MOST_WINDOWS = 100_000  # connections whose windows are remembered


class Geography(Protocol):
    """A peer's uplink and downlink and the limit of a pair's link, in bytes per second.

    `delay_s` is a message's way from one process to the other, `round_trip_s` a packet's way there and back.
    """

    def up(self, peer: PeerId) -> float: ...

    def down(self, peer: PeerId) -> float: ...

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds: ...

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds: ...

    def bandwidth(self, source: PeerId, target: PeerId) -> float: ...


@dataclass(slots=True, eq=False)
class Transfer:
    """A message on its way over shared links."""

    source: PeerId
    target: PeerId
    sender: Sender
    done: Callable[[], None]
    rate: float = 0.0  # bytes/s, its share since `sender.at`; 0 while it waits for acknowledgements
    timer: Timer | None = None
    over: bool = False

    def set_rate(self, rate: float, now: Seconds) -> None:
        """Send at another rate from now on, or not at all."""
        self.sender.send(self.rate, now)
        self.rate = rate

    def schedule(self, agenda: Agenda, when: Seconds, action: Callable[[], None]) -> None:
        """Set the transfer's only timer, which must have been cancelled before."""
        self.timer = agenda.at(when, action)

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def end(self) -> bool:
        """Return whether it was under way; from now on it is over."""
        was_over, self.over = self.over, True
        return not was_over


@dataclass(slots=True)
class SharedLinks:
    agenda: Agenda
    geography: Geography
    sending: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)  # without those that wait
    receiving: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)
    windows: dict[tuple[PeerId, PeerId], CongestionWindow] = field(default_factory=dict)
    _sharing: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)  # transfers on a connection

    def start(self, source: PeerId, target: PeerId, size: float, done: Callable[[], None]) -> Transfer:
        """Begins to send `size` bytes; `done` is called when the last one has left."""
        self._sharing[source, target] += 1
        geography, window = self.geography, self._window(source, target)
        path_rate = min(geography.up(source), geography.down(target), geography.bandwidth(source, target))
        round_trip_s = geography.round_trip_s(source, target)
        window.use(self.agenda.now, round_trip_s)
        sender = window.sender(size, path_rate, round_trip_s, self._sharing[source, target])
        transfer = Transfer(source, target, sender, done)
        self._begin_round(transfer)
        return transfer

    def stop(self, transfer: Transfer) -> None:
        """Ends the transfer, finished or not; the others get its share."""
        if not transfer.end():
            return
        self._pause(transfer)
        connection = transfer.source, transfer.target
        if (window := self.windows.get(connection)) is not None:
            window.leave(transfer.sender, self.agenda.now, self._sharing[connection])
        self._sharing[connection] -= 1
        if not self._sharing[connection]:
            del self._sharing[connection]
        self.use(transfer.target, transfer.source)  # it has acknowledged what came

    def use(self, source: PeerId, target: PeerId) -> None:
        """A small message is sent, so that the connection is not idle."""
        window = self.windows.get((source, target))
        if window is not None:
            window.use(self.agenda.now, self.geography.round_trip_s(source, target))

    def queue_s(self, source: PeerId, target: PeerId) -> Seconds:
        """How long a packet from one peer to the other waits before the links now, the receiver's downlink left out."""
        sending = self.sending.get(source)
        if not sending:
            return 0.0
        up, path, waits_s = self.geography.up(source), self.geography.bandwidth(source, target), 0.0
        if up <= 0 or path <= 0:
            return QUEUE_S
        for transfer in sending:
            transfer.sender.send(transfer.rate, self.agenda.now)
            waits_s += transfer.sender.queued(transfer.rate) / (min(up, path) if transfer.target == target else up)
        return min(QUEUE_S, waits_s)

    def _window(self, source: PeerId, target: PeerId) -> CongestionWindow:
        window = self.windows.get((source, target)) or CongestionWindow(used_at=self.agenda.now)
        keep_latest(self.windows, (source, target), window, MOST_WINDOWS)
        return window

    # Rounds

    def _begin_round(self, transfer: Transfer) -> None:
        source, target, sender = transfer.source, transfer.target, transfer.sender
        self._drop(transfer)
        sender.begin_round(self.agenda.now, self.queue_s(target, source))
        self.sending.setdefault(source, {})[transfer] = None
        self.receiving.setdefault(target, {})[transfer] = None
        self._share(source, target)

    def _drop(self, transfer: Transfer) -> None:
        """Drops what the uplink's queue has no room for."""
        up = self.geography.up(transfer.source)
        dropped = transfer.sender.burst - (QUEUE_S - self.queue_s(transfer.source, transfer.target)) * up
        if dropped > 0 and up > 0:
            transfer.sender.lose(dropped, QUEUE_S, self.agenda.now)

    def _stopped_sending(self, transfer: Transfer) -> None:
        """It has sent all, or all that it may until acknowledgements come."""
        self._pause(transfer)
        sender, agenda = transfer.sender, self.agenda
        if sender.left > LEAST_BYTES:
            transfer.schedule(agenda, sender.acknowledged_at, lambda: self._next_round(transfer))
        elif sender.resent_at > agenda.now:
            transfer.schedule(agenda, sender.resent_at, lambda: self._finish(transfer))
        else:
            self._finish(transfer)

    def _pause(self, transfer: Transfer) -> None:
        """It sends nothing for now: the others have its share."""
        source, target = transfer.source, transfer.target
        transfer.cancel()
        if transfer in self.sending.get(source, ()):
            del self.sending[source][transfer], self.receiving[target][transfer]
            transfer.set_rate(0.0, self.agenda.now)
            self._share(source, target)

    def _next_round(self, transfer: Transfer) -> None:
        transfer.sender.acknowledge()
        self._begin_round(transfer)

    def _finish(self, transfer: Transfer) -> None:
        self.stop(transfer)
        transfer.done()

    # Shares

    def _share(self, source: PeerId, target: PeerId) -> None:
        for transfer in {**self.sending.get(source, {}), **self.receiving.get(target, {})}:
            self._set_rate(transfer)

    def _set_rate(self, transfer: Transfer) -> None:
        geography, sent, received = self.geography, self.sending[transfer.source], self.receiving[transfer.target]
        rate = min(geography.up(transfer.source) / len(sent), geography.down(transfer.target) / len(received))
        link = geography.bandwidth(transfer.source, transfer.target)
        if link < rate * len(sent):  # else its shares are no less than the sender's
            rate = min(rate, link / sum(1 for other in sent if other.target == transfer.target))
        if rate == transfer.rate:
            return
        transfer.set_rate(rate, self.agenda.now)
        transfer.cancel()
        if rate > 0:
            stops_at = transfer.sender.take_share(rate)
            transfer.schedule(self.agenda, stops_at, lambda: self._stopped_sending(transfer))

"""How long transfers take that share links: a fluid model, event by event.

A transfer runs from one peer to another at the least of three equal shares: of the sender's uplink among all that it
sends, of the receiver's downlink among all that it receives, and of the link between the two among all transfers on it.
What a transfer cannot use of its share is not given to others, so the model errs on the slow side (max-min fairness
would give it away); in return a change touches only the transfers at its two ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decentral.core.agenda import Agenda, Timer
from decentral.core.ids import PeerId
from decentral.core.units import Seconds


class Geography(Protocol):
    """A peer's uplink and downlink and the limit of a pair's link, in bytes per second; and the delay one way."""

    def up(self, peer: PeerId) -> float: ...

    def down(self, peer: PeerId) -> float: ...

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds: ...

    def bandwidth(self, source: PeerId, target: PeerId) -> float: ...


@dataclass(slots=True, eq=False)
class Transfer:
    source: PeerId
    target: PeerId
    left: float  # bytes, at time `since`
    done: Callable[[], None]
    rate: float = 0.0  # bytes/s since then
    since: Seconds = 0.0
    timer: Timer | None = None


@dataclass(slots=True)
class SharedLinks:
    agenda: Agenda
    geography: Geography
    sending: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)
    receiving: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)

    def start(self, source: PeerId, target: PeerId, size: float, done: Callable[[], None]) -> Transfer:
        """Begins to send `size` bytes; `done` is called when the last one has left."""
        transfer = Transfer(source, target, size, done, since=self.agenda.now)
        self.sending.setdefault(source, {})[transfer] = None
        self.receiving.setdefault(target, {})[transfer] = None
        self._share(source, target)
        return transfer

    def stop(self, transfer: Transfer) -> None:
        """Ends the transfer, finished or not; the others get its share."""
        if transfer not in self.sending.get(transfer.source, ()):
            return
        del self.sending[transfer.source][transfer], self.receiving[transfer.target][transfer]
        if transfer.timer is not None:
            transfer.timer.cancel()
        self._share(transfer.source, transfer.target)

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
        now = self.agenda.now
        transfer.left -= transfer.rate * (now - transfer.since)
        transfer.rate, transfer.since = rate, now
        if transfer.timer is not None:
            transfer.timer.cancel()
        transfer.timer = (
            self.agenda.at(now + max(0.0, transfer.left) / rate, lambda: self._finish(transfer)) if rate > 0 else None
        )

    def _finish(self, transfer: Transfer) -> None:
        self.stop(transfer)
        transfer.done()

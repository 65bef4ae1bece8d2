"""How long transfers take that share links: a fluid model, event by event.

A flow runs from one peer to another at the least of three equal shares: of the sender's uplink among all that it
sends, of the receiver's downlink among all that it receives, and of the link between the two among all that is on it.
What a flow cannot use of its share is not given to others, so the model errs on the slow side (max-min fairness
would give it away); in return a change touches only the flows at its two ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decentral.core.agenda import Agenda, Timer
from decentral.core.ids import PeerId
from decentral.core.units import Seconds


class Geography(Protocol):
    """What the wires can do."""

    def up(self, peer: PeerId) -> float:
        """Bytes/s that leave the peer at most."""
        ...

    def down(self, peer: PeerId) -> float: ...

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        """One way."""
        ...

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        """Bytes/s between the two at most."""
        ...


@dataclass(slots=True, eq=False)
class Transfer:
    source: PeerId
    target: PeerId
    left: float  # bytes
    done: Callable[[], None]
    rate: float = 0.0
    since: Seconds = 0.0
    timer: Timer | None = None


@dataclass(slots=True)
class SharedLinks:
    agenda: Agenda
    geography: Geography
    sending: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)
    receiving: dict[PeerId, dict[Transfer, None]] = field(default_factory=dict)

    def start(self, source: PeerId, target: PeerId, size: float, done: Callable[[], None]) -> Transfer:
        """`done` is called when the last byte has left."""
        flow = Transfer(source, target, size, done, since=self.agenda.now)
        self.sending.setdefault(source, {})[flow] = None
        self.receiving.setdefault(target, {})[flow] = None
        self._share(source, target)
        return flow

    def stop(self, flow: Transfer) -> None:
        """It is over, finished or not; the others get its share."""
        if flow not in self.sending.get(flow.source, ()):
            return
        del self.sending[flow.source][flow], self.receiving[flow.target][flow]
        if flow.timer is not None:
            flow.timer.cancel()
        self._share(flow.source, flow.target)

    def changed(self, peer: PeerId) -> None:
        """What its wires can do has changed."""
        self._share(peer, peer)

    def _share(self, source: PeerId, target: PeerId) -> None:
        touched = {**self.sending.get(source, {}), **self.receiving.get(target, {})}
        for flow in touched:
            self._set_rate(flow)

    def _set_rate(self, flow: Transfer) -> None:
        wires, sent, received = self.geography, self.sending[flow.source], self.receiving[flow.target]
        rate = min(wires.up(flow.source) / len(sent), wires.down(flow.target) / len(received))
        link = wires.bandwidth(flow.source, flow.target)
        if link < rate * len(sent):  # else its shares are no less than the sender's
            rate = min(rate, link / sum(1 for other in sent if other.target == flow.target))
        if rate == flow.rate:
            return
        now = self.agenda.now
        flow.left -= flow.rate * (now - flow.since)
        flow.rate, flow.since = rate, now
        if flow.timer is not None:
            flow.timer.cancel()
        flow.timer = self.agenda.at(now + max(0.0, flow.left) / rate, lambda: self._finish(flow)) if rate > 0 else None

    def _finish(self, flow: Transfer) -> None:
        self.stop(flow)
        flow.done()

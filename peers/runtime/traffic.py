"""Counts what a node sends and receives; the journal gets the totals now and then."""

from dataclasses import dataclass

from decentral.comm.gossip.gossip_cost import GossipTraffic
from decentral.comm.gossip.tags import ExchangeTag
from decentral.comm.wire.transport import Answered, Asked
from decentral.core.journal.events import TrafficLine
from decentral.core.machine import Log
from decentral.core.units import KiB, Seconds

TRAFFIC_S = 10.0  # between two `traffic` lines in the journal
QUESTION_BYTES = 64 * KiB  # what a question costs besides its bytes, on either side
NO_EXCHANGES: dict[tuple[str, ...], float] = {
    ("done", ""): 0,
    ("solo", ""): 0,
    ("failed", ""): 0,
}  # by outcome and reason


@dataclass(slots=True)
class TrafficCounter:
    sent_bytes: int = 0
    received_bytes: int = 0
    _line_at: Seconds = 0.0
    _work_bytes: float = 0.0  # since gossip was asked for
    _exchange_bytes: float = 0.0  # of it, that of exchanges which we have asked for

    def received(self, event: Asked | Answered) -> None:
        moved = len(event.envelope.blob) if isinstance(event, Asked) else event.sent_bytes + event.received_bytes
        self._work_bytes += QUESTION_BYTES + moved
        if isinstance(event, Answered) and isinstance(event.tag, ExchangeTag):
            self._exchange_bytes += QUESTION_BYTES + moved
        if isinstance(event, Asked):
            self.received_bytes += len(event.envelope.blob)
        else:
            self.sent_bytes += event.sent_bytes
            self.received_bytes += event.received_bytes

    def replied(self, blob_bytes: int) -> None:
        """An answer of ours goes out."""
        self.sent_bytes += blob_bytes
        self._work_bytes += blob_bytes

    def gossip(self) -> GossipTraffic:
        """What exchanges had of the traffic since the last time. As many ask us as we ask; more is not gossip."""
        work, own = self._work_bytes, 2 * self._exchange_bytes
        self._work_bytes = self._exchange_bytes = 0.0
        return GossipTraffic(min(1.0, own / work) if work else 1.0, own)

    def lines(self, now: Seconds) -> list[Log]:
        """The totals, if it is time for them."""
        if now < self._line_at:
            return []
        self._line_at = now + TRAFFIC_S
        return [self.line()]

    def line(self) -> Log:
        return Log(TrafficLine(sent_bytes=self.sent_bytes, received_bytes=self.received_bytes))

"""Count the bytes that a node sends and receives, for the journal and for the cost of gossip."""

from dataclasses import dataclass

from decentral.comm.gossip.exchange import ExchangeTag
from decentral.comm.gossip.gossip_cost import GossipTraffic
from decentral.comm.wire.transport import Answered, Asked
from decentral.core.journal.events import TrafficLine
from decentral.core.machine import Log
from decentral.core.units import KiB, Seconds

TRAFFIC_S = 10.0
QUESTION_BYTES = 64 * KiB  # one question costs about as much processor time as the transfer of this many bytes
# Counts of exchanges by (outcome, reason) before the first exchange, so that the metrics show these counts at once.
NO_EXCHANGES: dict[tuple[str, ...], float] = {
    ("done", ""): 0,
    ("solo", ""): 0,
    ("failed", ""): 0,
}


@dataclass(slots=True)
class TrafficCounter:
    """A count of the bytes of the blobs in messages that a node has sent and received, without message headers."""

    sent_bytes: int = 0
    received_bytes: int = 0
    _line_at: Seconds = 0.0
    _work_bytes: float = 0.0  # processor cost of all traffic since the last call of `gossip`, in byte equivalents
    _exchange_bytes: float = 0.0

    def received(self, event: Asked | Answered) -> None:
        """Count the bytes of another peer's question, or of our own question together with its answer."""
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
        """Count the bytes of our answer's blob."""
        self.sent_bytes += blob_bytes
        self._work_bytes += blob_bytes

    def gossip(self) -> GossipTraffic:
        """Return gossip's part of the traffic since the last call of this method, and begin to count anew.

        Gossip's part is estimated as twice the traffic of our own exchanges, since about as many peers pull from us as
        we pull from. If more peers pull from us, the excess is not counted as gossip.
        """
        work, own = self._work_bytes, 2 * self._exchange_bytes
        self._work_bytes = self._exchange_bytes = 0.0
        return GossipTraffic(min(1.0, own / work) if work else 1.0, own)

    def lines(self, now: Seconds) -> list[Log]:
        """Return the journal line with the totals if TRAFFIC_S have passed since the last line; else []."""
        if now < self._line_at:
            return []
        self._line_at = now + TRAFFIC_S
        return [self.line()]

    def line(self) -> Log:
        """Return the journal line with the total bytes sent and received."""
        return Log(TrafficLine(sent_bytes=self.sent_bytes, received_bytes=self.received_bytes))

"""Counts what a node sends and receives, and how its exchanges end; the journal gets the totals now and then."""

from collections import Counter
from dataclasses import dataclass, field

from decentral.comm.gossip.tags import ExchangeTag
from decentral.comm.wire.transport import Answered, Asked, Reply
from decentral.core.machine import Effect, Log, log
from decentral.core.reasons import Reason
from decentral.core.units import KiB, Seconds
from decentral.peers.node.gossip_cost import GossipTraffic

TRAFFIC_S = 10.0  # between two `traffic` lines in the journal
QUESTION_BYTES = 64 * KiB  # what a question costs besides its bytes, on either side
NO_EXCHANGES: dict[tuple[str, ...], float] = {
    ("done", ""): 0,
    ("solo", ""): 0,
    ("failed", ""): 0,
}  # by outcome and reason
OTHER_REASON = "other"  # a word that another peer has made up


def known_reason(text: str) -> str:
    """The text, if it is a reason of ours or none at all: what counts by reason counts by few."""
    return text if text in _REASONS else OTHER_REASON


_REASONS = frozenset({"", *map(str, Reason)})


@dataclass(slots=True)
class TrafficCounter:
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: Counter[str] = field(default_factory=Counter)  # by outcome
    reasons: Counter[tuple[str, ...]] = field(default_factory=Counter)  # the same, by outcome and known reason
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

    def emitted(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self.sent_bytes += len(effect.envelope.blob)
            self._work_bytes += len(effect.envelope.blob)
        elif isinstance(effect, Log) and effect.event == "exchange":
            outcome, reason = effect.fields["outcome"], effect.fields["reason"]
            self.exchanges[outcome] += 1
            self.reasons[outcome, known_reason(reason)] += 1

    def gossip(self) -> GossipTraffic:
        """What exchanges had of the traffic since the last time. As many ask us as we ask; more is not gossip."""
        work, own = self._work_bytes, 2 * self._exchange_bytes
        self._work_bytes = self._exchange_bytes = 0.0
        return GossipTraffic(min(1.0, own / work) if work else 1.0, own)

    def lines(self, now: Seconds) -> list[Effect]:
        """The totals, if it is time for them."""
        if now < self._line_at:
            return []
        self._line_at = now + TRAFFIC_S
        return [self.line()]

    def line(self) -> Log:
        return log("traffic", sent_bytes=self.sent_bytes, received_bytes=self.received_bytes)

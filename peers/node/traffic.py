"""Counts what a node sends and receives, and how its exchanges end; the journal gets the totals now and then."""

from collections import Counter
from dataclasses import dataclass, field

from decentral.comm.wire.transport import Answered, Asked, Reply
from decentral.core.machine import Effect, Log, log
from decentral.core.units import Seconds

TRAFFIC_S = 10.0  # between two `traffic` lines in the journal


@dataclass(slots=True)
class TrafficCounter:
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: Counter[str] = field(default_factory=Counter)  # by outcome
    _line_at: Seconds = 0.0

    def received(self, event: Asked | Answered) -> None:
        if isinstance(event, Asked):
            self.received_bytes += len(event.envelope.blob)
        else:
            self.sent_bytes += event.sent_bytes
            self.received_bytes += event.received_bytes

    def emitted(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self.sent_bytes += len(effect.envelope.blob)
        elif isinstance(effect, Log) and effect.event == "exchange":
            self.exchanges[effect.fields["outcome"]] += 1

    def lines(self, now: Seconds) -> list[Effect]:
        """The totals, if it is time for them."""
        if now < self._line_at:
            return []
        self._line_at = now + TRAFFIC_S
        return [self.line()]

    def line(self) -> Log:
        return log("traffic", sent_bytes=self.sent_bytes, received_bytes=self.received_bytes)

"""What happened in the swarm, as people are told it; the oldest events are forgotten."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from decentral.core.units import Seconds

EVENTS_SHOWN = 300
EVENTS_AT_ONCE = 100  # in one update


@dataclass(slots=True)
class EventLog:
    """Rows of [number of the event, time, number of the peer, how serious, words]."""

    rows: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    count: int = 0
    _settled: int = 0

    def add(self, t: Seconds, peer: int, level: str, words: str) -> None:
        """An event that follows the same one of the same peer is left out."""
        if self.rows and self.rows[-1][2:] == [peer, level, words]:
            return
        self.count += 1
        self.rows.append([self.count, round(t, 1), peer, level, words])

    def changed(self) -> list[list[Any]]:
        return [row for row in self.rows if row[0] > self._settled][-EVENTS_AT_ONCE:]

    def settle(self) -> None:
        self._settled = self.count

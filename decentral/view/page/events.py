"""Store the latest events of the swarm as text for the live page."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from decentral.core.units import Seconds

EVENTS_SHOWN = 300
EVENTS_AT_ONCE = 100  # an update of the page has at most this many events; older ones are left out


@dataclass(slots=True)
class EventLog:
    """Store of the latest events. A row is [number of the event, Unix time, number of the peer, level, text]."""

    rows: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    count: int = 0
    _settled: int = 0

    def add(self, t: Seconds, peer: int, level: str, words: str) -> None:
        """Add an event, unless the last row has the same peer, level and words."""
        if self.rows and self.rows[-1][2:] == [peer, level, words]:
            return
        self.count += 1
        self.rows.append([self.count, round(t, 1), peer, level, words])

    def changed(self) -> list[list[Any]]:
        """Return the rows that were added since the last call of `settle`, but only the latest EVENTS_AT_ONCE rows."""
        return [row for row in self.rows if row[0] > self._settled][-EVENTS_AT_ONCE:]

    def settle(self) -> None:
        """Mark all rows as sent, so that `changed` does not return them again."""
        self._settled = self.count

"""Store what the page shows of the links between peers: measured rates and delays, and the last gossip exchanges."""

from dataclasses import dataclass, field
from typing import Any

from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

LINKS_SHOWN = 4096  # the view keeps at most this many links, and drops the least recently used ones to save memory
LINKS_AT_ONCE = 300  # an update has at most this many links, because a map with more links is unreadable


@dataclass(slots=True)
class LinkView:
    """What the page shows of the link between two peers in both directions; `low` and `high` are the peers' numbers."""

    low: int
    high: int
    to_low: float = 0.0  # bytes/s towards peer `low`; 0.0: not measured
    to_high: float = 0.0  # bytes/s towards peer `high`; 0.0: not measured
    latency_s: Seconds = 0.0  # 0.0 if not measured
    used_at: Seconds = 0.0
    outcome: str = ""  # outcome of the last exchange; "" if not known
    done: int = 0
    failed: int = 0

    def exchanged(self, t: Seconds, outcome: str) -> None:
        """Record a gossip exchange between the two peers at Unix time `t`; count it if it is `done` or `failed`."""
        self.used_at, self.outcome = max(t, self.used_at), outcome
        self.done += outcome == "done"
        self.failed += outcome == "failed"

    def measured(self, peer: int, rate: float, latency_s: Seconds) -> None:
        """Record the measured rate towards this peer, in bytes/s, and the delay. A delay of 0 is ignored as unknown."""
        if peer == self.low:
            self.to_low = rate
        else:
            self.to_high = rate
        self.latency_s = latency_s or self.latency_s

    def row(self) -> list[Any]:
        """Return the values of LINK_ROW, ready for JSON."""
        rates = round(self.to_low), round(self.to_high)
        used = round(self.used_at, 1), self.outcome, self.done, self.failed
        return [self.low, self.high, *rates, round(self.latency_s, 4), *used]


# Browsers get a link as a list of these values.
LINK_ROW = ("low", "high", "to_low", "to_high", "latency_s", "used_at", "outcome", "done", "failed")


@dataclass(slots=True)
class LinkTable:
    """Table of the LINKS_SHOWN most recently used links, and of the links that have changed since the last update."""

    links: dict[tuple[int, int], LinkView] = field(default_factory=dict)
    _changed: dict[tuple[int, int], LinkView] = field(default_factory=dict)

    def between(self, one: int, other: int) -> LinkView:
        """Return the link between two peers (by number), and mark it as used and changed. Create it if needed."""
        key = low, high = min(one, other), max(one, other)
        link = self.links.get(key) or LinkView(low, high)
        keep_latest(self.links, key, link, LINKS_SHOWN)
        keep_latest(self._changed, key, link, LINKS_AT_ONCE)
        return link

    def exchanged(self, peer: int, partner: int, t: Seconds, outcome: str) -> None:
        """Count an exchange of two peers at Unix time `t`."""
        self.between(peer, partner).exchanged(t, outcome)

    def measured(self, peer: int, partner: int, rate: float, latency_s: Seconds) -> None:
        """Record what a peer measured: the rate from the partner to the peer in bytes/s, and the delay."""
        self.between(peer, partner).measured(peer, rate, latency_s)

    def drop(self, peer: int) -> None:
        """Remove all links of a peer."""
        self.links = {key: link for key, link in self.links.items() if peer not in key}
        self._changed = {key: link for key, link in self._changed.items() if peer not in key}

    def newest(self) -> list[list[Any]]:
        """Return rows of the LINKS_AT_ONCE most recently used links."""
        return [link.row() for link in list(self.links.values())[-LINKS_AT_ONCE:]]

    def changed(self) -> list[list[Any]]:
        """Return rows of the links that have changed since the last call of `settle`, at most LINKS_AT_ONCE rows."""
        return [link.row() for link in self._changed.values()]

    def settle(self) -> None:
        """Mark all links as sent, so that `changed` does not return them until they change again."""
        self._changed.clear()

"""Links between peers as the page shows them: measured rates and delays, and who exchanged with whom and when."""

from dataclasses import dataclass, field
from typing import Any

from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

LINKS_SHOWN = 4096  # the most recently used; a peer of a large swarm has a few neighbours
LINKS_AT_ONCE = 300  # in one update: a page that draws more shows a carpet


@dataclass(slots=True)
class LinkView:
    """Between peers `low` and `high`, by their numbers. Rates in bytes/s, 0 where none was measured."""

    low: int
    high: int
    to_low: float = 0.0
    to_high: float = 0.0
    latency_s: Seconds = 0.0
    used_at: Seconds = 0.0  # the last exchange
    outcome: str = ""  # of that exchange
    done: int = 0
    failed: int = 0

    def exchanged(self, t: Seconds, outcome: str) -> None:
        self.used_at, self.outcome = max(t, self.used_at), outcome
        self.done += outcome == "done"
        self.failed += outcome == "failed"

    def measured(self, peer: int, rate: float, latency_s: Seconds) -> None:
        """Take the rate towards this peer, and the delay where it is known."""
        if peer == self.low:
            self.to_low = rate
        else:
            self.to_high = rate
        self.latency_s = latency_s or self.latency_s

    def row(self) -> list[Any]:
        rates = round(self.to_low), round(self.to_high)
        used = round(self.used_at, 1), self.outcome, self.done, self.failed
        return [self.low, self.high, *rates, round(self.latency_s, 4), *used]


LINK_ROW = ("low", "high", "to_low", "to_high", "latency_s", "used_at", "outcome", "done", "failed")


@dataclass(slots=True)
class LinkTable:
    """The links that were used last, and those that have changed since `settle`."""

    links: dict[tuple[int, int], LinkView] = field(default_factory=dict)
    _changed: dict[tuple[int, int], LinkView] = field(default_factory=dict)

    def between(self, one: int, other: int) -> LinkView:
        """The link, which is about to change."""
        key = low, high = min(one, other), max(one, other)
        link = self.links.get(key) or LinkView(low, high)
        keep_latest(self.links, key, link, LINKS_SHOWN)
        keep_latest(self._changed, key, link, LINKS_AT_ONCE)
        return link

    def exchanged(self, peer: int, partner: int, t: Seconds, outcome: str) -> None:
        self.between(peer, partner).exchanged(t, outcome)

    def measured(self, peer: int, partner: int, rate: float, latency_s: Seconds) -> None:
        """`rate`: from the partner to the peer."""
        self.between(peer, partner).measured(peer, rate, latency_s)

    def drop(self, peer: int) -> None:
        """Forgets the links of a peer that is forgotten."""
        self.links = {key: link for key, link in self.links.items() if peer not in key}
        self._changed = {key: link for key, link in self._changed.items() if peer not in key}

    def newest(self) -> list[list[Any]]:
        """The links that were used last, as many as a page gets."""
        return [link.row() for link in list(self.links.values())[-LINKS_AT_ONCE:]]

    def changed(self) -> list[list[Any]]:
        return [link.row() for link in self._changed.values()]

    def settle(self) -> None:
        self._changed.clear()

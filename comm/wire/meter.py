"""Measured latency and bandwidth of the link to each peer, from probes at first and from every exchange after.

A question's time is modelled as `latency + bytes / bandwidth`, with the bandwidth in bytes per second. Both are
running averages in which the newest measurement counts for a fifth.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB, Seconds

NEWEST = 0.2
LARGE = 64 * KiB  # smaller transfers say more about latency than about bandwidth
UNKNOWN_LATENCY_S = 0.2
UNKNOWN_BANDWIDTH = 1 * MiB  # bytes/s of a weak home uplink: the guess errs on the patient side
SLACK = 4.0  # a deadline is so many times the expected duration, within the two limits below
DEADLINE_FLOOR_S = 3.0
DEADLINE_TOP_S = 60.0
MOST_LINKS = 4096  # beyond them, the peers that we have not heard from for longest are forgotten


@dataclass(slots=True)
class Link:
    latency_s: float | None = None
    down: float | None = None  # bytes/s towards us
    up: float | None = None  # bytes/s towards the peer


@dataclass(slots=True)
class Meter:
    links: dict[PeerId, Link] = field(default_factory=dict)
    _typical: tuple[float | None, float | None] | None = None  # medians down and up; None: to be computed anew

    def saw(self, peer: PeerId, seconds: Seconds, sent: int, received: int) -> None:
        """Records that a question took `seconds`, with so many bytes each way."""
        link = self.links[peer] = self.links.pop(peer, Link())  # the latest comes last
        while len(self.links) > MOST_LINKS:
            del self.links[next(iter(self.links))]
            self._typical = None
        large = max(sent, received)
        if large < LARGE:
            link.latency_s = _mixed(link.latency_s, seconds)
            return
        self._typical = None
        rate = large / max(1e-4, seconds - min(link.latency_s or 0.0, seconds / 2))
        if received >= sent:
            link.down = _mixed(link.down, rate)
        else:
            link.up = _mixed(link.up, rate)

    def latency_s(self, peer: PeerId) -> float:
        known = self.links.get(peer, Link()).latency_s
        return UNKNOWN_LATENCY_S if known is None else known

    def bandwidth(self, peer: PeerId) -> float | None:
        """Bytes/s towards us; None if nothing was measured."""
        return self.links.get(peer, Link()).down

    def typical_down(self) -> float | None:
        """The median over all peers, in bytes/s."""
        return self._medians()[0]

    def typical_up(self) -> float | None:
        return self._medians()[1]

    def _medians(self) -> tuple[float | None, float | None]:
        if self._typical is None:
            links = self.links.values()
            self._typical = _median(link.down for link in links), _median(link.up for link in links)
        return self._typical

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long to wait for `size` bytes from this peer: longer on slow links, but never beyond DEADLINE_TOP_S."""
        expected = self.latency_s(peer) + size / (self.bandwidth(peer) or UNKNOWN_BANDWIDTH)
        return min(DEADLINE_TOP_S, max(DEADLINE_FLOOR_S, SLACK * expected))


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEWEST) * old + NEWEST * new


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

"""What links really carry: delay and bandwidth by peer, from probes at first and from every exchange after.

Bandwidth is bytes per second of useful transfer, delay included in neither: a question's time is modelled as
`latency + bytes / bandwidth`. Both are running averages in which the newest counts for a fifth.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from decentral.core.ids import PeerId
from decentral.core.units import KiB, MiB, Seconds

NEWEST = 0.2
LARGE = 64 * KiB  # transfers below say more about delay than about bandwidth
UNKNOWN_LATENCY_S = 0.2
UNKNOWN_BANDWIDTH = 1 * MiB  # bytes/s, a weak home uplink: a first guess that errs on the patient side
SLACK = 4.0  # a deadline is this many times the expected duration, and the floor below
DEADLINE_FLOOR_S = 3.0
DEADLINE_TOP_S = 60.0
MOST_LINKS = 4096  # peers come and go; the ones that we have not heard of for longest are forgotten


@dataclass(slots=True)
class Link:
    latency_s: float | None = None
    down: float | None = None  # bytes/s towards us
    up: float | None = None  # bytes/s towards the peer


@dataclass(slots=True)
class Meter:
    links: dict[PeerId, Link] = field(default_factory=dict)
    _typical: tuple[float | None, float | None] | None = None  # down and up, until something new is seen

    def saw(self, peer: PeerId, seconds: Seconds, sent: int, received: int) -> None:
        """A question took `seconds` with so many bytes each way."""
        link = self.links[peer] = self.links.pop(peer, Link())  # the latest last
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
        """Towards us, bytes/s; None where nothing was measured."""
        link = self.links.get(peer)
        return None if link is None else link.down

    def typical_down(self) -> float | None:
        return self._medians()[0]

    def typical_up(self) -> float | None:
        return self._medians()[1]

    def _medians(self) -> tuple[float | None, float | None]:
        if self._typical is None:
            links = self.links.values()
            self._typical = _median(link.down for link in links), _median(link.up for link in links)
        return self._typical

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """When to give up on `size` bytes from there: patient with slow links, done with dead ones."""
        expected = self.latency_s(peer) + size / (self.bandwidth(peer) or UNKNOWN_BANDWIDTH)
        return min(DEADLINE_TOP_S, max(DEADLINE_FLOOR_S, SLACK * expected))


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEWEST) * old + NEWEST * new


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

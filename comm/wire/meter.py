"""Measured latency and rate of the link to each peer, from probes at first and from every exchange after.

Latency and rate are told apart (comm/wire/slow_start.py): the latency is the least of the last answers' times to their
first byte, and the rate is what the time from the first byte to the last says beside the sender's slow start. It is
what a transfer gets while others run beside it: the mean over the last bytes, of about nine transfers.

An answer that is late is not measured. So a deadline that was too short would be so for ever: the next ones are longer,
as TCP backs its timer off (RFC 6298, 5.5), until answers come again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from decentral.comm.wire.slow_start import rate_of, transfer_s
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import KiB, MiB, Seconds

UPLOADS = 6  # the last ones, that tell what our uplink carries
LIMITED = 1.5  # times what slow start takes: an upload that lasted longer had a link for its limit
FAST = 25e6  # bytes/s: whoever has so much need not share it out
PACED = 0.9  # of our uplink's rate: its queue stays empty, also where we believe a little more than it carries
ALIKE = 1.5  # rates of an uplink to different peers differ by less
REMEMBERED = 8  # transfers of the newest one's size that count beside it
LARGE = 64 * KiB  # smaller transfers say nothing about the rate
ROUND_TRIP = 0.7  # of a latency: what answers' first bytes take has their peer's work in it, a round trip has not
LATENCIES = 32  # answers of which the first to come tells the latency: others have waited for their peer
LEAST_S = 1e-4  # a transfer takes at least so long, whatever the clock says
UNKNOWN_LATENCY_S = 0.2
UNKNOWN_BANDWIDTH = 1 * MiB  # bytes/s of a weak home uplink: the guess errs on the patient side
SLACK = 4.0  # a deadline is so many times the expected duration, within the two limits below
DEADLINE_FLOOR_S = 3.0
DEADLINE_TOP_S = 60.0
BACK_OFF = 2.0  # times as long after each answer in a row that was late
MOST_LATE = 3  # answers in a row that lengthen a deadline: a peer that is gone should not be waited for much longer
MOST_LINKS = 4096  # beyond them, the peers that we have not heard from for longest are forgotten


@dataclass(slots=True)
class Rate:
    """The mean of the times that the last bytes took, as bytes/s."""

    known: float | None = None  # None: nothing was measured
    _bytes: int = 0  # that it was measured by

    def saw(self, rate: float, size: int) -> None:
        newest = size / (self._bytes + size)
        self.known = 1 / ((1 - newest) / self.known + newest / rate) if self.known else rate
        self._bytes = min(self._bytes + size, REMEMBERED * size)


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes that we have sent, and how long it took until the answer. What that says of our uplink depends on the
    latency: as it was measured first, beside others' probes, it may be twice as long as it is."""

    peer: PeerId
    size: int
    seconds: Seconds

    def rate(self, latency_s: Seconds) -> float:
        """In bytes/s."""
        return rate_of(self.size, max(LEAST_S, self.seconds - latency_s), ROUND_TRIP * latency_s)

    def limited(self, latency_s: Seconds) -> bool:
        """By a link, and not by slow start."""
        return self.seconds - latency_s > LIMITED * transfer_s(self.size, math.inf, ROUND_TRIP * latency_s)


@dataclass(slots=True)
class Link:
    down: Rate = field(default_factory=Rate)  # towards us
    up: float | None = None  # bytes/s towards the peer, when it was measured last
    latencies: list[Seconds] = field(default_factory=list)  # of the last answers
    late: int = 0  # answers in a row that did not come in time; small ones that did take one back each

    def answered(self, first_byte_s: Seconds) -> None:
        self.latencies.append(first_byte_s)
        del self.latencies[:-LATENCIES]

    def came(self, large: bool) -> None:
        """Count an answer that came in time."""
        self.late = 0 if large else max(0, self.late - 1)

    def missed(self) -> None:
        """Count an answer that did not come in time."""
        self.late = min(MOST_LATE, self.late + 1)

    def uploaded(self, upload: Upload, latency_s: Seconds) -> None:
        self.up = upload.rate(latency_s)

    @property
    def latency_s(self) -> Seconds | None:
        """The time of a round trip; None if nothing was measured."""
        return min(self.latencies, default=None)


class UplinkRates(NamedTuple):
    """What uploads say of our uplink: `Meter.best_up` and `Meter.pace`."""

    best: float | None = None
    pace: float | None = None

    @classmethod
    def of(cls, uploads: Sequence[tuple[float, bool, PeerId]]) -> "UplinkRates":
        """Judge uploads by their rates in bytes/s, whether a link limited them, and to whom they went."""
        best = max((rate for rate, _, _ in uploads), default=None)
        if best is None or best > FAST:
            return cls(best)
        alike = {peer for rate, limited, peer in uploads if limited and rate > best / ALIKE}
        is_limited = any(limited and rate == best for rate, limited, _ in uploads)
        paced = is_limited and (len(alike) > 1 or len({peer for _, _, peer in uploads}) == 1)
        return cls(best, PACED * best if paced else None)


@dataclass(slots=True)
class Meter:
    links: dict[PeerId, Link] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)  # the last ones
    _typical_down: float | None = None  # 0: nothing was measured; None: to be computed anew
    _uplink: UplinkRates | None = None  # what the last uploads say; None: to be judged anew

    def saw(self, peer: PeerId, seconds: Seconds, first_byte_s: Seconds, sent: int, received: int) -> None:
        """Records that a question took `seconds`, and `first_byte_s` until its answer began; with so many bytes."""
        link = self._link(peer)
        if sent < LARGE:
            link.answered(first_byte_s)
        large = max(sent, received) >= LARGE
        link.came(large)
        if not large:
            return
        self._typical_down = None
        latency_s = self._known_latency_s(peer)
        if received >= sent:
            link.down.saw(rate_of(received, max(LEAST_S, seconds - first_byte_s), ROUND_TRIP * latency_s), received)
        else:
            upload = Upload(peer, sent, seconds)
            link.uploaded(upload, latency_s)
            self.uploads.append(upload)
            del self.uploads[:-UPLOADS]

    def missed(self, peer: PeerId) -> None:
        """Records that an answer of this peer did not come in time."""
        self._link(peer).missed()

    def _link(self, peer: PeerId) -> Link:
        self._uplink = None
        link = self.links.get(peer) or Link()
        if len(self.links) == MOST_LINKS:
            self._typical_down = None
        keep_latest(self.links, peer, link, MOST_LINKS)
        return link

    def latency_s(self, peer: PeerId) -> float:
        known = self.links[peer].latency_s if peer in self.links else None
        return UNKNOWN_LATENCY_S if known is None else known

    def bandwidth(self, peer: PeerId) -> float | None:
        """Bytes/s towards us; None if nothing was measured."""
        return self.links[peer].down.known if peer in self.links else None

    def typical_down(self) -> float | None:
        """The median over all peers, in bytes/s."""
        if self._typical_down is None:
            downs = [link.down.known for link in self.links.values() if link.down.known is not None]
            self._typical_down = median(downs) if downs else 0.0
        return self._typical_down or None

    def best_up(self) -> float | None:
        """The highest rate of the last uploads, in bytes/s: what our uplink carries. In others the peer's downlink, or
        our other transfers at that moment, were the limit, and no upload is measured faster than it was."""
        return self._uplink_rates().best

    def pace(self) -> float | None:
        """The rate at which to send, in bytes/s, where our uplink is what has limited our uploads; else None.

        Two peers to whom we send equally fast have told of our uplink, one alone perhaps of its own downlink.
        """
        return self._uplink_rates().pace

    def _uplink_rates(self) -> UplinkRates:
        """Judge the last uploads, unless nothing was measured since: each piece of a message asks for the pace."""
        if self._uplink is None:
            known = [(one, self._known_latency_s(one.peer)) for one in self.uploads]
            rates = [(one.rate(latency_s), one.limited(latency_s), one.peer) for one, latency_s in known]
            self._uplink = UplinkRates.of(rates)
        return self._uplink

    def _known_latency_s(self, peer: PeerId) -> Seconds:
        """As far as it is known now; 0 for a peer that answered large questions alone."""
        return (self.links[peer].latency_s if peer in self.links else None) or 0.0

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long to wait for `size` bytes from this peer: longer on slow links, but never beyond DEADLINE_TOP_S."""
        late = self.links[peer].late if peer in self.links else 0
        return min(DEADLINE_TOP_S, BACK_OFF**late * self.first_deadline_s(peer, size))

    def first_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """The same, however many answers were late: for those who take a peer that is late for gone."""
        latency_s, rate = self.latency_s(peer), self.bandwidth(peer) or UNKNOWN_BANDWIDTH
        expected = latency_s + transfer_s(size, rate, latency_s)
        return min(DEADLINE_TOP_S, max(DEADLINE_FLOOR_S, SLACK * expected))

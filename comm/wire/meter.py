"""Measure latency and rate of the link to each peer, by probes at first and by every question later.

`Meter.saw` records a measurement. `Meter.deadline_s` and `Meter.pace` compute deadlines and our rate of sending.

The latency of a link is the shortest time to the first byte among its last answers. The rate of a link is computed from
the time between the first and the last byte of a transfer, less the sender's slow start (comm/wire/slow_start.py). The
rate is averaged over about nine transfers, so it includes the effect of other transfers that run at the same time.

An answer that misses its deadline yields no measurement, so a deadline that is too short would stay too short.
Therefore late answers lengthen the next deadlines until answers come in time, as TCP backs its timer off (RFC 6298,
5.5).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import NamedTuple

from decentral.comm.wire.carried import CarriedRates, TakeSent
from decentral.comm.wire.slow_start import SLOW_PART, rate_of, transfer_s
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import KiB, MiB, Seconds

# Our uplink is measured by this many last uploads to near peers, and as many to far ones: few, so that a slower uplink
# shows in minutes.
UPLOADS = 3
# Peers with a lower latency count as near: in our local network, which is often faster than our internet uplink.
LOCAL_S = 0.01
RECENT_LINKS = 256  # `typical_up` is a mean over this many links: those with the latest answers
WARM_UP_BYTES = 256 * KiB  # an upload that is measured follows one of this size, so that slow start is over by then
LIMITED = 1.5  # a link's rate limited an upload if it took more than this many times as long as TCP slow start alone
FAST = 20e6  # bytes/s; a faster uplink counts as unlimited: the paths to single peers are usually slower
PACED = 0.9  # we send at this fraction of our uplink's measured rate, so that no queue builds up in the router
ALIKE = 1.5  # uploads whose rates differ by less than this factor count as equally fast
REMEMBERED = 8  # in an average rate, all older transfers together weigh at most this many times as much as the newest
LARGE = 64 * KiB  # a smaller transfer is not used to measure a rate, since its time is mostly latency
ROUND_TRIP = 0.7  # this fraction of a measured latency is the network's round trip; the rest is the other peer's work
LATENCIES = 32  # a link's latency is the shortest time to the first byte among this many of the peer's last answers
LEAST_S = 1e-4  # a transfer that was measured as shorter counts as this long, to avoid a division by zero
UNKNOWN_LATENCY_S = 0.2
UNKNOWN_BANDWIDTH = 1 * MiB  # bytes/s assumed before the first measurement: a weak home uplink, so deadlines are long
SLACK = 4.0  # a deadline is this many times the expected duration, limited to DEADLINE_FLOOR_S to DEADLINE_TOP_S
DEADLINE_FLOOR_S = 3.0
DEADLINE_TOP_S = 60.0
BACK_OFF = 2.0  # every consecutive late answer multiplies the peer's deadlines by this
MOST_LATE = 3  # at most this many late answers in a row lengthen a deadline, so that we notice soon if a peer is gone
MOST_LINKS = 4096  # at most this many links are remembered; then the link that was updated longest ago is forgotten


@dataclass(slots=True)
class Rate:
    """A running average of transfer rates in bytes/s, weighted by size: total bytes divided by total seconds."""

    known: float | None = None  # the average; None before the first transfer
    _bytes: int = 0  # weight of the average: bytes of its transfers, at most REMEMBERED times those of the newest one

    def saw(self, rate: float, size: int) -> None:
        """Add a transfer of `size` bytes, measured at `rate` bytes/s, to the average."""
        newest = size / (self._bytes + size)
        self.known = 1 / ((1 - newest) / self.known + newest / rate) if self.known else rate
        self._bytes = min(self._bytes + size, REMEMBERED * size)


@dataclass(frozen=True, slots=True)
class Upload:
    """A large question that we sent after a warm-up: its size in bytes, and the seconds until its answer.

    The rate is computed when it is needed, from the link's latency as known at that time. The first measured latency
    may be twice the true latency, because other peers' probes ran at the same time. A later one that is longer, since
    the uplink carries more by then, is not used.
    """

    peer: PeerId
    size: int
    seconds: Seconds
    latency_s: Seconds = math.inf  # the link's latency as known then; infinite if it was not measured yet

    def rate(self, latency_s: Seconds) -> float:
        """Return the rate of this upload in bytes/s, given the link's latency.

        If the upload took less time than slow start should take, the latency was measured too high, and the result is
        the highest rate that `rate_of` would give with slow start.
        """
        least_s = max(LEAST_S, (1 - SLOW_PART) * self._slow_start_s(latency_s))
        return rate_of(self.size, max(least_s, self.seconds - latency_s), ROUND_TRIP * latency_s, WARM_UP_BYTES)

    def limited(self, latency_s: Seconds) -> bool:
        """Return whether the rate of some link limited this upload; if not, TCP slow start alone limited it."""
        return self.seconds - latency_s > LIMITED * self._slow_start_s(latency_s)

    def _slow_start_s(self, latency_s: Seconds) -> Seconds:
        return transfer_s(self.size, math.inf, ROUND_TRIP * latency_s, WARM_UP_BYTES)


@dataclass(slots=True)
class Link:
    """All measurements of the link to one peer."""

    down: Rate = field(default_factory=Rate)
    up: float | None = None  # rate of our last upload to the peer, in bytes/s
    latencies: list[Seconds] = field(default_factory=list)  # for each of the last answers, the time to its first byte
    late: int = 0  # late answers in a row, up to MOST_LATE; they lengthen deadlines, and answers in time lower `late`
    latency_s: Seconds | None = None  # the shortest of `latencies`; None before the first answer
    left: bool = False  # whether the peer has left the swarm since its last answer

    def answered(self, first_byte_s: Seconds) -> None:
        """Record the time from a question to the first byte of its answer."""
        self.latencies.append(first_byte_s)
        del self.latencies[:-LATENCIES]
        self.latency_s = min(self.latencies)

    def came(self, large: bool) -> None:
        """Lower `late` after an answer in time: to 0 if the question or the answer was large, otherwise by one."""
        self.late = 0 if large else max(0, self.late - 1)

    def missed(self) -> None:
        """Raise `late` by one, up to MOST_LATE, after an answer that did not come in time."""
        self.late = min(MOST_LATE, self.late + 1)

    def uploaded(self, upload: Upload, latency_s: Seconds) -> None:
        """Record the rate of the last upload to the peer, given the link's latency."""
        self.up = upload.rate(latency_s)


class UplinkRates(NamedTuple):
    """Rates of our uplink in bytes/s, computed from the last uploads."""

    typical: float | None = None  # mean rate at which we send to a peer; None without uploads
    pace: float | None = None  # rate at which we send; None: we send without a limit

    @classmethod
    def of(cls, uploads: Sequence[tuple[float, bool, PeerId]], typical: float | None) -> "UplinkRates":
        """Compute the rates of our uplink from these uploads.

        Args:
            uploads: For each upload its rate in bytes/s, whether a link limited it, and the peer that received it.
            typical: Mean rate at which we send to a peer.
        """
        best = max((rate for rate, _, _ in uploads), default=None)
        if best is None or best > FAST:
            return cls(typical)
        alike = {peer for rate, limited, peer in uploads if limited and rate > best / ALIKE}
        is_limited = any(limited and rate == best for rate, limited, _ in uploads)
        paced = is_limited and (len(alike) > 1 or len({peer for _, _, peer in uploads}) == 1)
        return cls(typical, PACED * best if paced else None)


@dataclass(slots=True)
class Meter:
    """All measurements of this peer's links, and the deadlines and the sending rate computed from them."""

    links: dict[PeerId, Link] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    _carried: CarriedRates = field(default_factory=CarriedRates)
    _typical_down: float | None = None  # cached `typical_down`; 0: no rate is known; None: to be computed again
    _uplink: UplinkRates | None = None

    def saw(self, peer: PeerId, seconds: Seconds, first_byte_s: Seconds, sent: int, received: int) -> None:
        """Record an answer that came in time.

        Args:
            peer: The peer that answered.
            seconds: Time from the question to the end of the answer.
            first_byte_s: Time from the question to the first byte of the answer.
            sent: Bytes of the question.
            received: Bytes of the answer.
        """
        link = self._link(peer)
        link.left = False
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
            upload = Upload(peer, sent, seconds, latency_s or math.inf)
            link.uploaded(upload, latency_s)
            self.uploads.append(upload)
            for near in (True, False):
                alike = [one for one in self.uploads if self.is_near(one.peer) == near]
                for old in alike[:-UPLOADS]:
                    self.uploads.remove(old)

    def follow(self, take_sent: TakeSent) -> None:
        """Measure our uplink also by the bytes that `take_sent` returns, at each call of `sample_sent` from now on."""
        self._carried.follow(take_sent)

    def sample_sent(self, now: Seconds) -> None:
        """Compute again, from the bytes that have left until `now`, what our uplink carries at least."""
        self._carried.sample(now, self.is_near)
        self._uplink = None

    def missed(self, peer: PeerId) -> None:
        """Record that an answer of this peer did not come in time, which lengthens the next deadlines."""
        self._link(peer).missed()

    def _link(self, peer: PeerId) -> Link:
        self._uplink = None
        link = self.links.get(peer) or Link()
        if len(self.links) == MOST_LINKS:
            self._typical_down = None
        keep_latest(self.links, peer, link, MOST_LINKS)
        return link

    def latency_s(self, peer: PeerId) -> float:
        """Return the latency of the link to this peer in seconds; UNKNOWN_LATENCY_S if nothing was measured."""
        known = self.links[peer].latency_s if peer in self.links else None
        return UNKNOWN_LATENCY_S if known is None else known

    def bandwidth(self, peer: PeerId) -> float | None:
        """Return the rate from this peer to us in bytes/s; None if nothing was measured."""
        return self.links[peer].down.known if peer in self.links else None

    def typical_down(self) -> float | None:
        """Return the median over all peers of the rate towards us, in bytes/s; None if nothing was measured."""
        if self._typical_down is None:
            downs = [link.down.known for link in self.links.values() if link.down.known is not None]
            self._typical_down = median(downs) if downs else 0.0
        return self._typical_down or None

    def is_near(self, peer: PeerId) -> bool:
        """Return whether the peer is in our local network, by its latency; False if the latency was not measured."""
        known = self.links[peer].latency_s if peer in self.links else None
        return known is not None and known < LOCAL_S

    def typical_up(self) -> float | None:
        """Return the mean rate at which we send to a peer, in bytes/s; None if nothing was sent.

        To far peers we send at the rate of the fastest recent upload to a far peer, or at that of all our messages to
        far peers together if this is higher (comm/wire/carried.py); to near peers likewise. No upload is faster than
        the link to its peer, and a slower one was limited by the receiver's downlink, or by other transfers. The mean
        over all peers is the harmonic mean, which is the rate of sending each the same bytes.
        """
        return self._uplink_rates().typical

    def pace(self) -> float | None:
        """Return the rate at which to send, in bytes/s; None to send without a limit.

        There is a limit only if our uplink is not faster than FAST, and our uplink limited the fastest of the last
        uploads. We assume that it did if uploads to two peers were equally fast, or if all uploads went to one peer.
        Otherwise, the downlink of the peer with the fastest upload may have been the limit.
        """
        return self._uplink_rates().pace

    def _uplink_rates(self) -> UplinkRates:
        """Return the rates of our uplink, computed from the last uploads unless the cached rates are still valid."""
        if self._uplink is None:
            known = [(one, min(one.latency_s, self._known_latency_s(one.peer))) for one in self.uploads]
            rates = [(one.rate(latency_s), one.limited(latency_s), one.peer) for one, latency_s in known]
            self._uplink = UplinkRates.of(rates, self._mean_up([(rate, peer) for rate, _, peer in rates]))
        return self._uplink

    def _mean_up(self, uploads: Sequence[tuple[float, PeerId]]) -> float | None:
        """Return what `typical_up` says of these uploads: their rates in bytes/s, and the peers that received them."""
        near = max([self._carried.near, *(rate for rate, peer in uploads if self.is_near(peer))])
        far = max([self._carried.far, *(rate for rate, peer in uploads if not self.is_near(peer))])
        here = (peer for peer, link in reversed(self.links.items()) if not link.left)
        recent = list(islice(here, RECENT_LINKS)) if near and far else []
        if not recent:
            return near or far or None
        count = sum(map(self.is_near, recent))
        return len(recent) / (count / near + (len(recent) - count) / far)

    def left(self, peer: PeerId) -> None:
        """Leave a peer out of `typical_up` because it has left the swarm; its next answer counts again."""
        if peer in self.links:
            self.links[peer].left, self._uplink = True, None
            self.uploads = [one for one in self.uploads if one.peer != peer]

    def _known_latency_s(self, peer: PeerId) -> Seconds:
        """Return the measured latency of the link to this peer; 0 if it was not measured yet."""
        return (self.links[peer].latency_s if peer in self.links else None) or 0.0

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the seconds to wait for an answer of `size` bytes from this peer.

        The deadline is longer on slow links and after late answers, and at most DEADLINE_TOP_S.
        """
        late = self.links[peer].late if peer in self.links else 0
        return min(DEADLINE_TOP_S, BACK_OFF**late * self.first_deadline_s(peer, size))

    def there_and_back_s(self, peer: PeerId | None, sent: int, received: int) -> Seconds:
        """Return the seconds in which `sent` bytes reach a peer and `received` bytes come back.

        The time in which the peer works on its answer is not included. A rate that was not measured on this link is
        assumed to be that of our other links or, if none was measured, UNKNOWN_BANDWIDTH. A latency that was not
        measured is assumed to be UNKNOWN_LATENCY_S.

        Args:
            peer: The other peer; None: a typical one.
            sent: Bytes of the question.
            received: Bytes of the answer.
        """
        link = (self.links.get(peer) if peer is not None else None) or Link()
        latency_s = UNKNOWN_LATENCY_S if link.latency_s is None else link.latency_s
        up, down = link.up or self.typical_up(), link.down.known or self.typical_down()
        there_s = transfer_s(sent, up or UNKNOWN_BANDWIDTH, latency_s)
        return latency_s + there_s + transfer_s(received, down or UNKNOWN_BANDWIDTH, latency_s)

    def first_deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the seconds to wait for an answer of `size` bytes, without regard to earlier late answers.

        Use this deadline if one late answer is enough to treat the peer as gone.
        """
        latency_s, rate = self.latency_s(peer), self.bandwidth(peer) or UNKNOWN_BANDWIDTH
        expected = latency_s + transfer_s(size, rate, latency_s)
        return min(DEADLINE_TOP_S, max(DEADLINE_FLOOR_S, SLACK * expected))

"""Measure the links to a few peers: latency with pings, bandwidth with a 256 KiB download and a 1 MiB upload.

One link is probed at a time, with a pause before the next link, since 1 MiB takes seconds on a home uplink, and peers
that join at the same time would slow down each other's probes. Later, gossip exchanges measure the downlink
(comm/wire/meter.py), but only probes measure the uplink. So once PROBED_PEERS links are measured, and those to much
nearer peers, uploads over the two fastest links are repeated in turn, at growing intervals; if some peers are in our
local network and others are not, over the two fastest links of either kind. Intervals also grow with
gossip's windows, since a peer that seldom sends should not use its uplink mostly for probes.

An upload of WARM_UP_BYTES comes first, so that TCP slow start hardly counts, whether or not other messages used the
connection before. Repeated uploads have LONG_PROBE_BYTES if that takes at most LONG_PROBE_S, or if a shorter one took
too little time: the longer an upload, the less an error in the link's latency counts. The first upload over a link is
short, since the latency may have been measured while queues were full.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import ClassVar

from decentral.comm.net.uplink_queue import PROBE_HOLD_S
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PROBE_BYTES, Ping, Probe
from decentral.comm.wire.meter import WARM_UP_BYTES, Meter, Upload
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Event, Tag
from decentral.core.ids import PeerId
from decentral.core.machine import Woke
from decentral.core.reasons import Reason
from decentral.core.units import KiB, MiB, Seconds

PROBED_PEERS = 3  # at first, links to this many peers are probed; after that, only the two fastest links again
PROBE_BYTES = 1 * MiB  # an upload has this size until one misses its deadline, or would take over PROBE_HOLD_S
DOWN_PROBE_BYTES = 256 * KiB  # downloads are small, because other newcomers may use the same peer's uplink
LONG_PROBE_BYTES = MAX_PROBE_BYTES  # such an upload takes longer than TCP slow start, which would hide the link's rate
LONG_PROBE_S = 2.0  # uploads of LONG_PROBE_BYTES are repeated over links that need at most this long for one
SHORT_PROBE_S = 0.3  # an upload that takes less time than this is repeated with more bytes
LEAST_PROBE_BYTES = 64 * KiB  # the smallest upload, which an uplink of 3 kB/s still sends within PROBE_DEADLINE_S
NEARER = 0.5  # a peer whose latency is below this share of every measured link's may be reached over a faster path
PROBE_STEP = 4  # factor by which uploads shrink after a missed deadline, and grow if they were too short to measure
PROBE_AFTER_S = 2.0
PROBE_AGAIN_S = 15.0  # the pause between probes begins with this time and doubles up to PROBE_EVERY_S
PROBE_EVERY_S = 120.0
PROBE_WINDOWS = 4  # the pause may become longer than PROBE_EVERY_S, up to this many gossip windows
SPREAD = 0.5  # pauses are longer or shorter by up to this share, so that peers which started together do not collide
PROBE_SOON_S = 5.0  # while no other peer is known, the next try comes after this time
PROBE_DEADLINE_S = 20.0
FIRST_PROBES = ("ping", "ping", "down", "warm up", "up")  # the kinds of probes of a link, in their order


@lru_cache(maxsize=4)
def zeros(size: int) -> bytes:
    """Return `size` zero bytes from a cache; `size` is at most MAX_PROBE_BYTES, the bound of Probe messages."""
    return bytes(size)


@dataclass(frozen=True, slots=True)
class ProbeTag(Tag):
    """The tag of a probe; `what` is its kind: `ping`, `down` (a download), `up`, `up again` or `long up` (uploads)."""

    what: str


@dataclass(frozen=True, slots=True)
class UploadTag(ProbeTag):
    """The tag of an upload; `what` is `up` (the first over a link), `up again`, or `long up` (LONG_PROBE_BYTES)."""

    may_be_late: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WarmUpTag(UploadTag):
    """The tag of the upload before an upload that is measured; `what` is `warm up`."""

    measures_link: ClassVar[bool] = False


def longest_pause_s(window_s: Seconds) -> Seconds:
    """Return the longest pause between two probes in seconds, given the length of gossip's windows in seconds."""
    return max(PROBE_EVERY_S, PROBE_WINDOWS * window_s)


@dataclass(slots=True)
class Prober:
    """The state machine that probes the link to one peer at each wake-up: with pings, a download and uploads."""

    meter: Meter
    rng: Random
    wake_at: Seconds | None = None  # time of the next probe; None before training starts
    _again_s: Seconds = PROBE_AGAIN_S
    _up_bytes: int = PROBE_BYTES
    _queue: list[tuple[PeerId, str]] = field(default_factory=list)  # next probes: (peer, kind), such as "ping"
    _silent: set[PeerId] = field(default_factory=set)
    _failed: set[PeerId] = field(default_factory=set)  # peers whose probe has failed; they are never preferred

    def begin(self, now: Seconds) -> None:
        """Schedule the first probe, about PROBE_AFTER_S from now; the node calls it when this peer starts to train."""
        self.wake_at = now + self._pause(PROBE_AFTER_S)

    def handle(self, event: Event, now: Seconds, peers: Sequence[PeerId], window_s: Seconds = 0.0) -> list[Ask]:
        """Handle a wake-up, or a probe's answer or failure, and return the next probe, if any.

        `peers` are the peers that may be probed. If a probe fails, another of these peers is probed instead. A wake-up
        needs `window_s`, the present length of gossip's windows.
        """
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                self.wake_at = now + (self._pause(self._again_s) if peers else PROBE_SOON_S)
                self._again_s = min(2 * self._again_s, longest_pause_s(window_s)) if peers else PROBE_AGAIN_S
                self._silent.clear()
                return self._choose(peers)
            case Answered(tag=UploadTag("up"), peer=peer) if self._up_bytes < PROBE_BYTES and self._was_short(event):
                self._up_bytes = min(PROBE_BYTES, PROBE_STEP * self._up_bytes)
                self._queue.insert(0, (peer, "up"))
                return self._next()
            case Answered(tag=UploadTag("up again"), peer=peer) if self._was_short(event):
                self._queue.insert(0, (peer, "long up"))
                return self._next()
            case Answered(tag=WarmUpTag()) if PROBE_STEP * event.seconds > PROBE_HOLD_S:
                # A short upload, since our queued messages wait while it runs.
                self._up_bytes = min(self._up_bytes, PROBE_BYTES // PROBE_STEP)
                return self._next()
            case Answered(tag=ProbeTag()):
                return self._next()
            case AskFailed(tag=ProbeTag()):
                if isinstance(event.tag, UploadTag) and event.reason == Reason.DEADLINE:
                    if self._up_bytes > LEAST_PROBE_BYTES:  # the uplink may have become slower
                        self._again_s = PROBE_AGAIN_S
                        self.wake_at = now + PROBE_DEADLINE_S + self._pause(PROBE_AGAIN_S)
                    self._up_bytes = max(LEAST_PROBE_BYTES, self._up_bytes // PROBE_STEP)
                self._silent.add(event.peer)
                self._failed.add(event.peer)
                return self._choose([peer for peer in peers if peer not in self._silent])
        return []

    def _pause(self, mean_s: Seconds) -> Seconds:
        return mean_s * self.rng.uniform(1 - SPREAD, 1 + SPREAD)

    def _was_short(self, upload: Answered) -> bool:
        """Return whether an upload was too short to show our bandwidth, or TCP slow start explains its duration."""
        latency_s = self.meter.latency_s(upload.peer)
        measured = Upload(upload.peer, upload.sent_bytes, upload.seconds)
        return upload.seconds - latency_s < SHORT_PROBE_S or not measured.limited(latency_s)

    def _choose(self, peers: Sequence[PeerId]) -> list[Ask]:
        """Choose the link to probe, and return its first probe.

        Until PROBED_PEERS links are measured, and one of them to a far peer if there is any, choose an unmeasured link;
        later, one of the two fastest links to near peers or to far peers, in turn. The link
        to a much nearer peer comes first: links inside a laboratory are faster than links out of it. If only the
        latter were measured, our uplink would seem slow, and every message would be slowed to match.
        """
        links = self.meter.links
        ups = {peer: links[peer].up or 0.0 for peer in sorted(peers) if peer in links and links[peer].up}
        new = [peer for peer in sorted(peers) if peer not in ups]
        latency_s = {peer: links[peer].latency_s or math.inf for peer in {*new, *ups} & links.keys()}
        untried = [peer for peer in new if peer not in self._failed]
        far_s = min((latency_s[peer] for peer in ups), default=math.inf)
        nearer = [peer for peer in untried if latency_s.get(peer, math.inf) < NEARER * far_s]
        far = [peer for peer in untried if peer in latency_s and not self.meter.is_near(peer)]
        only_near = bool(ups) and all(map(self.meter.is_near, ups))
        if nearer or (far and only_near) or (new and len(ups) < PROBED_PEERS):
            others = far if far and only_near else new
            peer = min(nearer, key=latency_s.__getitem__) if nearer else self.rng.choice(others)
            whole = peer not in links or not links[peer].down.known  # skip the download if one from this peer is known
            self._queue = [(peer, what) for what in FIRST_PROBES if whole or what != "down"]
            return self._next()
        again = self._fastest(ups)
        # Ping first, because a latency measured during gossip includes the time that the partner takes to answer.
        self._queue = [(peer, what) for peer in again for what in ("ping", "warm up", self._again(ups[peer]))]
        return self._next()

    def _fastest(self, ups: Mapping[PeerId, float]) -> list[PeerId]:
        """Return the peer over whose link to upload again: one of the two fastest. A list of one, or [] without links.

        Args:
            ups: For each measured link, the rate of the last upload over it, in bytes/s.
        """
        probed = [one.peer for one in self.meter.uploads]
        turn = [peer for peer in ups if probed and self.meter.is_near(peer) != self.meter.is_near(probed[-1])] or [*ups]
        fastest = sorted(turn, key=lambda peer: -ups[peer])[:2]
        last = next((peer for peer in reversed(probed) if peer in turn), None)
        return [peer for peer in fastest if peer != last or len(fastest) == 1][:1]

    def _again(self, rate: float) -> str:
        """Return the kind of a repeated upload over a link whose last upload had `rate` bytes/s."""
        is_fast = self._up_bytes == PROBE_BYTES and rate * LONG_PROBE_S >= LONG_PROBE_BYTES
        return "long up" if is_fast else "up again"

    def _next(self) -> list[Ask]:
        if not self._queue:
            return []
        peer, what = self._queue.pop(0)
        match what:
            case "ping":
                tag, question = ProbeTag(what), Envelope(Ping(self.rng.getrandbits(32)))
            case "down":
                tag, question = ProbeTag(what), Envelope(Probe(DOWN_PROBE_BYTES))
            case "warm up":
                tag, question = WarmUpTag(what), Envelope(Probe(0), zeros(min(WARM_UP_BYTES, self._up_bytes)))
            case _:
                size = LONG_PROBE_BYTES if what == "long up" else self._up_bytes
                tag, question = UploadTag(what), Envelope(Probe(0), zeros(size))
        return [Ask(tag, peer, question, PROBE_DEADLINE_S, PROBE_BYTES)]

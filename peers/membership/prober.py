"""Measures the links to a few peers: latency with small questions, bandwidth with a short download and a megabyte up.

One link is measured at a time and the next one some time later, because a megabyte is seconds of a home's uplink, and
peers that have come together would fill each other's links. Later every exchange measures the link towards us
(comm/wire/meter.py), but our uplink is known from probes alone: when a few links are known, an upload is repeated over
one of the two that were the fastest, in turn, and more and more rarely. One that says more of TCP's slow start than of
our uplink is followed by four megabytes; not the first over a link, when latencies may have been measured through full
queues. A peer that is alone looks for others more often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import ClassVar

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PROBE_BYTES, Ping, Probe
from decentral.comm.wire.meter import Meter, Upload
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Event, Tag
from decentral.core.ids import PeerId
from decentral.core.machine import Woke
from decentral.core.reasons import Reason
from decentral.core.units import KiB, MiB, Seconds

PROBED_PEERS = 3  # as many links, one each time, before any is measured again
PROBE_BYTES = 1 * MiB
DOWN_PROBE_BYTES = 256 * KiB  # it fills the other's uplink, perhaps beside those of others that have just come
LONG_PROBE_BYTES = MAX_PROBE_BYTES
LEAST_PROBE_BYTES = 64 * KiB  # of an upload: in time over 3 kB/s
PROBE_STEP = 4  # by which an upload that was too long, or said little, is changed
PROBE_AFTER_S = 2.0  # from the start of training to the first probe
PROBE_AGAIN_S = 15.0  # at first; twice as long each time, until
PROBE_EVERY_S = 120.0
PROBE_SOON_S = 5.0  # while nobody is there: the first peer that comes must not find our uplink unknown for long
PROBE_DEADLINE_S = 20.0


@lru_cache(maxsize=4)
def zeros(size: int) -> bytes:
    """A block of zeros, cached; no peer can ask for more than MAX_PROBE_BYTES."""
    return bytes(size)


@dataclass(frozen=True, slots=True)
class ProbeTag(Tag):
    """A probe: `ping` or `down`."""

    what: str


@dataclass(frozen=True, slots=True)
class UploadTag(ProbeTag):
    """A probe: `up`, `up again`, or `long up`."""

    may_be_late: ClassVar[bool] = True


@dataclass(slots=True)
class Prober:
    """Probes one peer each time: ping, ping, download, upload."""

    meter: Meter
    rng: Random
    wake_at: Seconds | None = None  # None: it has not begun
    _again_s: Seconds = PROBE_AGAIN_S
    _up_bytes: int = PROBE_BYTES  # of the next upload
    _queue: list[tuple[PeerId, str]] = field(default_factory=list)
    _silent: set[PeerId] = field(default_factory=set)  # did not answer this time

    def begin(self, now: Seconds) -> None:
        """This peer trains from now on."""
        self.wake_at = now + PROBE_AFTER_S

    def handle(self, event: Event, now: Seconds, peers: Sequence[PeerId]) -> list[Ask]:
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                self.wake_at = now + (self._again_s if peers else PROBE_SOON_S)
                self._again_s = min(2 * self._again_s, PROBE_EVERY_S) if peers else PROBE_AGAIN_S
                self._silent.clear()
                return self._choose(peers)
            case Answered(tag=UploadTag("up"), peer=peer) if self._up_bytes < PROBE_BYTES and self._was_slow_start(
                event
            ):
                self._up_bytes = min(PROBE_BYTES, PROBE_STEP * self._up_bytes)
                self._queue.insert(0, (peer, "up"))
                return self._next()
            case Answered(tag=UploadTag("up again"), peer=peer) if self._was_slow_start(event):
                self._queue.insert(0, (peer, "long up"))
                return self._next()
            case Answered(tag=ProbeTag()):
                return self._next()
            case AskFailed(tag=ProbeTag()):
                if isinstance(event.tag, UploadTag) and event.reason == Reason.DEADLINE:
                    self._up_bytes = max(LEAST_PROBE_BYTES, self._up_bytes // PROBE_STEP)
                self._silent.add(event.peer)
                return self._choose([peer for peer in peers if peer not in self._silent])
        return []

    def _was_slow_start(self, upload: Answered) -> bool:
        """Whether it took no longer than it would have over an uplink without a limit."""
        measured = Upload(upload.peer, upload.sent_bytes, upload.seconds)
        return not measured.limited(self.meter.latency_s(upload.peer))

    def _choose(self, peers: Sequence[PeerId]) -> list[Ask]:
        """Begins the probes of one link: of a new one until PROBED_PEERS are known, which is enough to know ours."""
        links = self.meter.links
        ups = {peer: links[peer].up or 0.0 for peer in sorted(peers) if peer in links and links[peer].up}
        new = [peer for peer in sorted(peers) if peer not in ups]
        if new and len(ups) < PROBED_PEERS:  # no download from a peer whose downlink is known, such as a donor
            peer = self.rng.choice(new)
            whole = peer not in links or not links[peer].down.known
            self._queue = [(peer, what) for what in ("ping", "ping", "down", "up") if whole or what != "down"]
            return self._next()
        last = self.meter.uploads[-1].peer if self.meter.uploads else None
        fastest = sorted(ups, key=lambda peer: -ups[peer])[:2]
        again = [peer for peer in fastest if peer != last or len(fastest) == 1][:1]
        self._queue = [(peer, what) for peer in again for what in ("ping", "up again")]  # pulls wait for their peer
        return self._next()

    def _next(self) -> list[Ask]:
        if not self._queue:
            return []
        peer, what = self._queue.pop(0)
        match what:
            case "ping":
                tag, question = ProbeTag(what), Envelope(Ping(self.rng.getrandbits(32)))
            case "down":
                tag, question = ProbeTag(what), Envelope(Probe(DOWN_PROBE_BYTES))
            case _:
                size = LONG_PROBE_BYTES if what == "long up" else self._up_bytes
                tag, question = UploadTag(what), Envelope(Probe(0), zeros(size))
        return [Ask(tag, peer, question, PROBE_DEADLINE_S, PROBE_BYTES)]

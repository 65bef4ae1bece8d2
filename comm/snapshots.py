"""Snapshots: describing what we publish, checking what others publish, and the shelf that others pull from."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm import blobs
from decentral.comm.codec import Envelope
from decentral.comm.messages import Pull, Refused, Snapshot
from decentral.comm.transport import Reply
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Contribution, Layout, WindowClosed
from decentral.core.machine import Effect
from decentral.core.units import Seconds

CLOCK_SKEW_S = 10.0  # a snapshot may be this far in the future
KEPT = 2  # the last one, and the one before for an allreduce peer that is a round behind
MAX_HELD = 256  # questions that wait for a snapshot that is not there yet


class View(Protocol):
    """What gossip needs to know of the swarm; peers/node.py has it from the roster and the meter."""

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """Whom to ask in this window."""
        ...

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long `size` bytes from there may take."""
        ...

    def period_s(self, size: int) -> Seconds:
        """Seconds between two windows of a fragment whose snapshots have `size` bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What all exchanges of one fragment have in common."""

    run: RunId
    peer: PeerId
    fragment: int
    max_age_s: Seconds

    def describe(self, closed: WindowClosed, now: Seconds) -> Snapshot:
        return Snapshot(
            self.run, self.fragment, closed.seq, closed.tokens, now, closed.layout, blobs.digest(closed.blob)
        )

    def check(self, snapshot: Snapshot, blob: bytes, layout: Layout, after: int, now: Seconds) -> None:
        """Raises ProtocolError unless it is of this run and fragment, new, fresh, shaped like ours, and whole."""
        if snapshot.run != self.run:
            raise ProtocolError("run", f"a snapshot of {snapshot.run!r}")
        if snapshot.fragment != self.fragment:
            raise ProtocolError("fragment", f"{snapshot.fragment} instead of {self.fragment}")
        if snapshot.seq <= after:
            raise ProtocolError("replay", f"number {snapshot.seq} after {after}")
        if not -CLOCK_SKEW_S <= now - snapshot.time <= self.max_age_s:
            raise ProtocolError("stale", f"{now - snapshot.time:.1f} s old")
        if snapshot.layout != layout or len(blob) != sum(section.size for section in layout):
            raise ProtocolError("shape", "its sections are not this fragment's")
        if blobs.digest(blob) != snapshot.digest:
            raise ProtocolError("digest", "the blob is not the one described")


def contribution(peer: PeerId, snapshot: Snapshot, blob: bytes) -> Contribution:
    return Contribution(peer, snapshot.tokens, snapshot.layout, blob)


@dataclass(slots=True)
class Shelf:
    """The latest snapshots of a fragment. Putting a new one there is one assignment: nobody sees half of it."""

    latest: deque[tuple[Snapshot, bytes]] = field(default_factory=lambda: deque(maxlen=KEPT))
    held: list[tuple[int, Pull]] = field(default_factory=list)

    def put(self, snapshot: Snapshot, blob: bytes) -> list[Effect]:
        """Shelves it, and answers those who waited for it."""
        self.latest.append((snapshot, blob))
        waiting, self.held = self.held, []
        return [effect for request, pull in waiting for effect in self.answer(request, pull)]

    def answer(self, request: int, pull: Pull) -> list[Effect]:
        found = [one for one in self.latest if one[0].seq > pull.after]
        if pull.exact:
            found = [one for one in found if one[0].seq == pull.after + 1]
            if not found and self._may_come(pull):
                self.held.append((request, pull))
                return []
        if not found:
            newest = self.latest[-1][0].seq if self.latest else 0
            return [Reply(request, Envelope(Refused("nothing-newer", str(newest))))]
        return [Reply(request, Envelope(*found[-1]))]

    def _may_come(self, pull: Pull) -> bool:
        newest = self.latest[-1][0].seq if self.latest else 0
        return newest <= pull.after and len(self.held) < MAX_HELD

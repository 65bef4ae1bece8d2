"""Snapshots: describing what we publish, checking what others publish, and the shelf that others pull from."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Pull, Refused, Snapshot
from decentral.comm.wire.transport import Reply
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Contribution, Layout, WindowClosed
from decentral.core.machine import Effect
from decentral.core.reasons import Reason
from decentral.core.synthetic import joined
from decentral.core.units import Seconds

CLOCK_SKEW_S = 10.0  # a snapshot may be this far in the future
SNAPSHOTS_KEPT = 2  # the last one, and the one before for an allreduce peer that is a round behind
MAX_WAITING_PULLS = 256  # questions that wait for a snapshot that is not there yet


class GossipView(Protocol):
    """What gossip needs to know of the swarm; peers/node/peer_selection.py has it from the roster and the meter."""

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
class FragmentContext:
    """What all exchanges of one fragment have in common."""

    run: RunId
    peer: PeerId
    fragment: int
    phase: float  # of its windows, as a part of the period
    max_age_s: Seconds

    def next_close(self, now: Seconds, period_s: Seconds) -> Seconds:
        """When the fragment's next window ends: at the same instants on every peer that has the same phase.

        Aligned windows make fresh partners: their snapshots are as old as the exchange takes, not half a window
        older (docs/CONVERGENCE.md has what that is worth). Clocks need agree to a small part of the period only.
        """
        offset = period_s * self.phase
        return ((now - offset) // period_s + 1) * period_s + offset

    def describe(self, closed: WindowClosed, now: Seconds) -> Snapshot:
        return Snapshot(
            run=self.run,
            fragment=self.fragment,
            seq=closed.seq,
            tokens=closed.tokens,
            lr_sum=closed.lr_sum,
            time=now,
            layout=closed.layout,
            digest=blobs.digest(closed.blob),
        )

    def check(self, snapshot: Snapshot, blob: bytes, layout: Layout, after: int, now: Seconds) -> None:
        """Raises ProtocolError unless it is of this run and fragment, new, fresh, shaped like ours, and whole."""
        if snapshot.run != self.run:
            raise ProtocolError(Reason.RUN, f"a snapshot of {snapshot.run!r}")
        if snapshot.fragment != self.fragment:
            raise ProtocolError(Reason.FRAGMENT, f"{snapshot.fragment} instead of {self.fragment}")
        if snapshot.seq <= after:
            raise ProtocolError(Reason.REPLAY, f"number {snapshot.seq} after {after}")
        if not -CLOCK_SKEW_S <= now - snapshot.time <= self.max_age_s:
            raise ProtocolError(Reason.STALE, f"{now - snapshot.time:.1f} s old")
        if snapshot.layout != layout or len(blob) != sum(section.size for section in layout):
            raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")
        if blobs.digest(blob) != snapshot.digest:
            raise ProtocolError(Reason.DIGEST, "the blob is not the one described")


def contribution(peer: PeerId, snapshot: Snapshot, blob: bytes) -> Contribution:
    return Contribution(peer, snapshot.tokens, snapshot.lr_sum, snapshot.layout, blob)


def pick(layout: Layout, names: Sequence[str]) -> Layout:
    """The sections with these names; all of them for none."""
    return tuple(section for section in layout if section.name in names) if names else layout


@dataclass(frozen=True, slots=True)
class WaitingPull:
    """A question whose answer waits for the next snapshot, or until its patience is over."""

    request: int
    pull: Pull
    until: Seconds


@dataclass(slots=True)
class SnapshotStore:
    """The latest snapshots of a fragment. Putting a new one there is one assignment: nobody sees half of it."""

    latest: deque[tuple[Snapshot, bytes]] = field(default_factory=lambda: deque(maxlen=SNAPSHOTS_KEPT))
    held: list[WaitingPull] = field(default_factory=list)

    @property
    def wake_at(self) -> Seconds | None:
        return min((one.until for one in self.held), default=None)

    def put(self, snapshot: Snapshot, blob: bytes, now: Seconds) -> list[Effect]:
        """Shelves it, and answers those who waited for it."""
        self.latest.append((snapshot, blob))
        waiting, self.held = self.held, []
        return [effect for one in waiting for effect in self._answer(one, now)]

    def answer(self, request: int, pull: Pull, now: Seconds) -> list[Effect]:
        return self._answer(WaitingPull(request, pull, now + pull.patience_s), now)

    def lose_patience(self, now: Seconds) -> list[Effect]:
        """Answers those who have waited long enough with what there is."""
        over = [one for one in self.held if one.until <= now]
        self.held = [one for one in self.held if one.until > now]
        return [effect for one in over for effect in self._answer(one, now)]

    def _answer(self, held: WaitingPull, now: Seconds) -> list[Effect]:
        pull = held.pull
        found = [one for one in self.latest if one[0].seq > pull.after]
        if pull.exact:
            found = [one for one in found if one[0].seq == pull.after + 1]
        if found and (pull.exact or found[-1][0].time >= pull.since):
            return [self._reply(held, found[-1])]
        newest = self.latest[-1][0].seq if self.latest else 0
        may_come = not pull.exact or newest <= pull.after
        if may_come and now < held.until and len(self.held) < MAX_WAITING_PULLS:
            self.held.append(held)
            return []
        if found:
            return [self._reply(held, found[-1])]
        return [Reply(held.request, Envelope(Refused(Reason.NOTHING_NEWER, str(newest))))]

    def _reply(self, held: WaitingPull, found: tuple[Snapshot, bytes]) -> Reply:
        """The snapshot, or those of its sections that were asked for."""
        snapshot, blob = found
        layout = pick(snapshot.layout, held.pull.sections)
        if layout == snapshot.layout:
            return Reply(held.request, Envelope(snapshot, blob))
        parts, start = [], 0
        for section in snapshot.layout:
            if section in layout:
                parts.append(blob[start : start + section.size])
            start += section.size
        part = joined(parts)
        return Reply(held.request, Envelope(replace(snapshot, layout=layout, digest=blobs.digest(part)), part))

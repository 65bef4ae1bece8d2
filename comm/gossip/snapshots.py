"""The store of published snapshots, answers to pulls, and bounds on claimed tokens: parts of comm/gossip/exchange.py.

FragmentContext                 what the machine gets from the node: a view of other peers, and the times of closes
describe, check                 the header of our snapshot; the reason to refuse a partner's snapshot
SnapshotStore                   our latest snapshots, from which partners pull
TokenClaims                     bounds on the tokens that partners claim, by their published speed
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol
from weakref import WeakValueDictionary

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Pull, Refused, Snapshot
from decentral.comm.wire.transport import Effect, Reply
from decentral.core.config import GossipConfig
from decentral.core.fragments import Layout, layout_bytes
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Contribution, EncodeSections, SectionsEncoded, WindowClosed
from decentral.core.journal.events import ExchangeLine
from decentral.core.journal.field_kinds import Outcome
from decentral.core.journal.peer_totals import ExchangeTotals
from decentral.core.latest import keep_latest
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.synthetic import joined
from decentral.core.units import Seconds

FRESH_SNAPSHOT_S = 60.0  # a snapshot up to this age is merged, even if windows are much shorter
CLOCK_SKEW_S = 10.0  # a snapshot's time may lie this far in the future, because peers' clocks differ
ROUNDS_KEPT = (
    2  # with numbered rounds, the snapshot before the newest one is kept as well: a partner may be a round behind
)
MOST_SEEN = 8192  # to refuse replays, we store the newest window number of this many partners; a roster has fewer peers
MOST_PARTS = 4  # answers with slow weights hold at most this many times the bytes of a snapshot with all its sections
MAX_WAITING_PULLS = 256  # at most this many pulls wait for the next snapshot; further pulls are answered at once
ASKED_LATE_WINDOWS = 32  # for this many windows after a late pull, each close also encodes the on-request sections
LATE = 0.5  # a pull is late if more than this part of a window has passed since our last close
CLAIM_SLACK = 2.0  # a partner may claim tokens at up to this many times its published speed, which is an average
CLAIM_BURST_S = 60.0  # one claim may cover up to this many seconds of training at CLAIM_SLACK times the published speed
MOST_BUDGETS = 1024  # we store the token budgets of this many partners; any other partner starts with a full budget


class GossipView(Protocol):
    """Interface through which gossip learns about other peers and our link; `PeerSelection` implements it."""

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """Return the peers to pull from in this window; each call may choose different peers."""

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """Return all other peers that hold the fragment and train."""

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        """Return an upper bound of the tokens/s at which a peer trains the fragment, from its record; 0 if unknown."""

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the longest time in seconds that a transfer of `size` bytes from a peer may take."""


class WindowTimes(Protocol):
    """Interface that says how long this peer's windows are; `WindowLengths` implements it."""

    def window_s(self) -> Seconds:
        """Return the length in seconds of the shortest windows; peers on slow links have longer windows."""

    def period_s(self, fragment: int, size: int) -> Seconds:
        """Return the seconds between closes of a fragment with snapshots of `size` bytes: a multiple of `window_s`."""

    def is_thin(self, fragment: int, size: int) -> bool:
        """Return whether our uplink decides how long a fragment's windows are; its snapshots have `size` bytes."""


@dataclass(frozen=True, slots=True)
class FragmentContext:
    """The fixed values of one fragment's exchange machine, the machine's view of the swarm, and its windows' times."""

    run: RunId
    peer: PeerId
    fragment: int
    phase: float  # shift of all closes of the fragment, as a multiple of the shortest window; equal on all peers
    gossip: GossipConfig
    view: GossipView
    lengths: WindowTimes
    counts: ExchangeTotals = field(default_factory=ExchangeTotals)
    # Unix time at which this peer restored a checkpoint. Older snapshots are refused: the checkpoint may include them.
    restored_at: Seconds = 0.0
    fresh_s: Seconds = FRESH_SNAPSHOT_S

    def period_s(self, size: int) -> Seconds:
        """Return the seconds between two closes of the fragment, with snapshots of `size` bytes."""
        return self.lengths.period_s(self.fragment, size)

    def next_close(self, now: Seconds, size: int) -> Seconds:
        """Return when the fragment's next window ends (Unix time, after `now`), with snapshots of `size` bytes.

        All peers with the same phase close at the same instants. So a partner's snapshot is only as old as the exchange
        takes; with random phases it would be half a window older (docs/GOSSIP.md has the gain). Clocks must agree to a
        small fraction of the period. If a period is as long as several of the shortest windows, different fragments
        close at the ends of different windows. Peers with shorter windows also close when peers with longer windows do.
        """
        period_s, window_s = self.period_s(size), self.lengths.window_s()
        turn = self.fragment % max(1, round(period_s / window_s))
        offset = window_s * (turn + self.phase)
        end = ((now - offset) // period_s + 1) * period_s + offset
        return end if end > now else end + period_s  # rounding errors may yield `now` if a window ends now

    def partners(self, now: Seconds) -> Sequence[PeerId]:
        """Return the peers to pull from in this window; each call may choose different peers."""
        return self.view.partners(self.fragment, now)

    def max_age_s(self, size: int) -> Seconds:
        """Return the age in seconds above which a partner's snapshot is too old to merge.

        This is twice the time between two closes with snapshots of `size` bytes, or `fresh_s` if that is longer.
        """
        return max(self.fresh_s, 2 * self.period_s(size))

    def exchange_ended(
        self,
        partner: PeerId | None,
        outcome: Outcome,
        reason: str,
        seconds: Seconds,
        moved: tuple[int, int] = (0, 0),
        age_s: Seconds | None = None,
    ) -> Log:
        """Count an exchange that has ended, and return its journal line.

        `partner` is None if no partner's window was merged. `seconds` is the exchange's duration, `moved` the bytes
        sent and received, `age_s` the age of the merged snapshot.
        """
        line = ExchangeLine(
            fragment=self.fragment,
            partner=partner,
            outcome=outcome,
            reason=reason,
            seconds=round(seconds, 4),
            sent_bytes=moved[0],
            received_bytes=moved[1],
            age_s=None if age_s is None else round(age_s, 3),
        )
        self.counts.take(line)
        return Log(line)


def describe(context: FragmentContext, closed: WindowClosed, lasted_s: Seconds, now: Seconds) -> Snapshot:
    """Return the header of the snapshot that we publish when a window, which lasted `lasted_s`, has been closed."""
    run, fragment, at, digest = context.run, context.fragment, now - closed.ago_s, blobs.digest(closed.blob)
    return Snapshot(run, fragment, closed.seq, closed.tokens, at, closed.layout, digest, round(lasted_s, 3))


def reason_to_refuse(
    context: FragmentContext, snapshot: Snapshot, blob: bytes, layout: Layout, after: int, now: Seconds, own_bytes: int
) -> str:
    """Return the reason to refuse a partner's snapshot, or "" if the snapshot is valid.

    A valid snapshot is of this run and fragment, newer than sequence number `after`, fresh at `now`, and intact: its
    blob has the expected layout and the announced digest. The greatest allowed age depends on `own_bytes`, the size of
    our own snapshots. It does not depend on the size of the partner's snapshot, which the partner could choose.
    """
    if snapshot.run != context.run:
        return Reason.RUN
    if snapshot.fragment != context.fragment:
        return Reason.FRAGMENT
    if snapshot.seq <= after:
        return Reason.REPLAY
    if not -CLOCK_SKEW_S <= now - snapshot.time <= context.max_age_s(own_bytes) or snapshot.time < context.restored_at:
        return Reason.STALE
    if snapshot.layout != layout or len(blob) != layout_bytes(layout):
        return Reason.SHAPE
    return "" if blobs.digest(blob) == snapshot.digest else Reason.DIGEST


def coded_as(layout: Layout, sent: Layout, codings: Layout) -> Layout:
    """Return our `layout`, with each section in the codec that the partner has `sent`, if `codings` allows it."""
    theirs = {section.name: section for section in sent if section in codings}
    return tuple(theirs.get(section.name, section) for section in layout)


def contribution(peer: PeerId, header: Snapshot | WindowClosed, blob: bytes) -> Contribution:
    """Return a peer's window as the Contribution that the worker merges."""
    return Contribution(peer, header.tokens, header.layout, blob)


@dataclass(frozen=True, slots=True)
class Request:
    """A partner's pull that this peer has to answer."""

    id: int
    peer: PeerId
    pull: Pull
    until: Seconds  # latest time to answer


@dataclass(slots=True)
class PublishedSnapshot:
    """A snapshot with its blob, and with the sections that are encoded only when a partner asks for them."""

    snapshot: Snapshot
    blob: bytes
    on_request: Layout  # layout of the sections that are encoded only on request
    settled: bool = False  # True once the merge has begun, after which on-request sections can no longer be encoded
    making: set[str] = field(default_factory=set)  # names of the on-request sections that the worker encodes now
    encoded: dict[str, bytes] = field(default_factory=dict)  # on-request sections by name
    parts: dict[Layout, Snapshot] = field(default_factory=dict)  # headers of the answers with on-request sections
    # The answers that are being sent. An answer is freed once it is sent, since it is larger than the snapshot's blob.
    sending: WeakValueDictionary[Layout, Envelope] = field(default_factory=WeakValueDictionary)
    given: set[PeerId] = field(default_factory=set)  # peers that have got such an answer

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that are names of on-request sections, in the order of the layout."""
        return [one.name for one in self.on_request if one.name in names]

    def reply(self, asked: Request) -> Reply:
        """Return the answer to a pull: the snapshot with those on-request sections that it names and are encoded.

        Answers with the same sections share one blob while it is sent. So that questions cannot fill the memory, each
        peer gets on-request sections once, and different answers have at most MOST_PARTS times the bytes of all
        sections.
        """
        more = [one for one in self.on_request if one.name in asked.pull.sections and one.name in self.encoded]
        layout = (*self.snapshot.layout, *more)
        if not more or asked.peer in self.given:
            return Reply(asked.id, Envelope(self.snapshot, self.blob))
        if layout not in self.parts:
            made, whole = sum(map(layout_bytes, [*self.parts, layout])), (*self.snapshot.layout, *self.on_request)
            if made > MOST_PARTS * layout_bytes(whole):
                return Reply(asked.id, Envelope(self.snapshot, self.blob))
        self.given.add(asked.peer)
        answer = self.sending.get(layout) or self._joined(layout, [self.encoded[one.name] for one in more])
        self.sending[layout] = answer
        return Reply(asked.id, answer)

    def _joined(self, layout: Layout, more: Sequence[bytes]) -> Envelope:
        """Return the answer that has these on-request sections behind the snapshot's blob."""
        part = joined([self.blob, *more])
        if layout not in self.parts:
            self.parts[layout] = replace(self.snapshot, layout=layout, digest=blobs.digest(part))
        return Envelope(self.parts[layout], part)

    def add(self, layout: Layout, blob: bytes) -> None:
        """Add on-request sections that the worker has encoded."""
        for section, end in zip(layout, accumulate(section.size for section in layout), strict=True):
            self.making.discard(section.name)
            self.encoded[section.name] = blob[end - section.size : end]

    def make(self, names: Sequence[str]) -> list[Effect]:
        """Return the job that encodes these on-request sections; [] if all are encoded, or in the making, already."""
        missing = tuple(name for name in names if name not in self.encoded and name not in self.making)
        self.making.update(missing)
        return [EncodeSections(self.snapshot.fragment, self.snapshot.seq, missing)] if missing else []


@dataclass(slots=True)
class SnapshotStore:
    """The latest snapshots of a fragment, and the pulls that wait for the next snapshot or for on-request sections.

    On-request sections (the slow weights) can be encoded only before the window's merge. A much slower partner pulls at
    any moment, mostly after the merge. That partner misses most of our windows, and can catch up only with our slow
    weights. So after a late pull, all of them are encoded at each of the next ASKED_LATE_WINDOWS closes.
    """

    latest: deque[PublishedSnapshot] = field(default_factory=deque)
    waiting: list[Request] = field(default_factory=list)  # pulls that wait for the next snapshot
    encoding: list[Request] = field(default_factory=list)  # pulls that wait until on-request sections are encoded
    asked_late: int = 0  # number of further closes that also encode the on-request sections

    @property
    def wake_at(self) -> Seconds | None:
        """Return when the first waiting pull must be answered; None if no pull waits."""
        return min((asked.until for asked in self.waiting), default=None)

    def put(self, snapshot: Snapshot, closed: WindowClosed, now: Seconds, keep: int = 1) -> list[Effect]:
        """Publish a snapshot; return answers to the pulls that waited for it, and the job for on-request sections.

        The job is returned only if a late pull came within the last ASKED_LATE_WINDOWS. Only the `keep` newest
        snapshots are kept.
        """
        while len(self.latest) >= keep:
            self.latest.popleft()
        newest = PublishedSnapshot(snapshot, closed.blob, closed.on_request)
        self.latest.append(newest)
        begun = newest.make([one.name for one in closed.on_request]) if self.asked_late else []
        self.asked_late = max(0, self.asked_late - 1)
        waited, self.waiting = self.waiting, []
        return [*begun, *self._answer_all(waited, now)]

    def answer(self, request: int, peer: PeerId, pull: Pull, now: Seconds) -> list[Effect]:
        """Return the answer to a peer's pull, or the job that encodes on-request sections for it.

        Return no effects if the pull has to wait for a newer snapshot; it waits for at most `pull.patience_s` seconds.
        """
        return self._answer(Request(request, peer, pull, now + pull.patience_s), now)

    def lose_patience(self, now: Seconds) -> list[Effect]:
        """Return answers to the pulls that have waited for their whole `patience_s`, from the snapshots stored now."""
        over = [asked for asked in self.waiting if asked.until <= now]
        self.waiting = [asked for asked in self.waiting if asked.until > now]
        return self._answer_all(over, now)

    def encoded(self, done: SectionsEncoded) -> list[Effect]:
        """Add encoded on-request sections to the newest snapshot, and answer the pulls that waited for them."""
        if not self.latest:
            return []  # this peer gave up the fragment during the job, and then took it over again
        newest = self.latest[-1]
        if newest.snapshot.seq == done.seq:
            newest.add(done.layout, done.blob)
        waited, self.encoding = self.encoding, []
        for asked in waited:
            if newest.making.intersection(newest.wanted(asked.pull.sections)):
                self.encoding.append(asked)
        return [newest.reply(asked) for asked in waited if asked not in self.encoding]

    def settle(self) -> None:
        """Record that the newest window's merge has begun: its on-request sections can no longer be encoded."""
        if self.latest:
            self.latest[-1].settled = True

    def _answer_all(self, waited: Sequence[Request], now: Seconds) -> list[Effect]:
        return [effect for asked in waited for effect in self._answer(asked, now)]

    def _answer(self, asked: Request, now: Seconds) -> list[Effect]:
        pull = asked.pull
        found = [kept for kept in self.latest if kept.snapshot.seq > pull.after]
        if pull.exact:
            found = [kept for kept in found if kept.snapshot.seq == pull.after + 1]
        if found and (pull.exact or found[-1].snapshot.time >= pull.since):
            return self._send(asked, found[-1], now)
        newest = self.latest[-1].snapshot.seq if self.latest else 0
        may_come = not pull.exact or newest <= pull.after
        if may_come and now < asked.until and len(self.waiting) < MAX_WAITING_PULLS:
            self.waiting.append(asked)
            return []
        if found:
            return self._send(asked, found[-1], now)
        return [Reply(asked.id, Envelope(Refused(Reason.NOTHING_NEWER, str(newest))))]

    def _send(self, asked: Request, found: PublishedSnapshot, now: Seconds) -> list[Effect]:
        wanted = found.wanted(asked.pull.sections)
        if found is not self.latest[-1] or not wanted:
            return [found.reply(asked)]
        if self._is_late(now):
            self.asked_late = ASKED_LATE_WINDOWS
        begun = [] if found.settled else found.make(wanted)
        if not found.making.intersection(wanted):
            return [found.reply(asked)]
        self.encoding.append(asked)
        return begun

    def _is_late(self, now: Seconds) -> bool:
        """Return whether a pull at time `now` is late (LATE): its sender does not close windows when this peer does."""
        newest = self.latest[-1].snapshot
        return newest.lasted_s > 0 and now - newest.time > LATE * newest.lasted_s


@dataclass(slots=True)
class TokenClaims:
    """Bound on the tokens that partners claim for one fragment: a budget for each partner, by its published speed.

    A partner's budget grows at CLAIM_SLACK times its published speed, up to CLAIM_BURST_S seconds of growth, since a
    step may be longer than a window and we do not pull every window. Each accepted claim is subtracted from the budget.
    A peer that publishes too high a speed gets a larger budget, but other peers also send it more micro-batches.
    """

    # Each partner's token budget: (time of the last update, tokens left at that time).
    left: dict[PeerId, tuple[Seconds, float]] = field(default_factory=dict)

    def covered(self, peer: PeerId, tokens: int, tokens_per_s: float, now: Seconds) -> int:
        """Return how many of the claimed tokens the peer's budget covers, and take them from the budget.

        A claim is covered in full while the peer has published no speed (`tokens_per_s` is 0).
        """
        if tokens_per_s <= 0:
            return tokens
        most = CLAIM_SLACK * CLAIM_BURST_S * tokens_per_s
        since, left = self.left.get(peer, (now, most))
        budget = min(most, left + CLAIM_SLACK * tokens_per_s * max(0.0, now - since))
        covered = min(tokens, int(budget))
        keep_latest(self.left, peer, (now, budget - covered), MOST_BUDGETS)
        return covered

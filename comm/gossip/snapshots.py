"""What the machine of one fragment's exchanges (comm/gossip/exchange.py) knows and keeps.

FragmentContext, GossipView     what the node tells the machine: when windows end, and what is known of the swarm
describe, check                 the header of a snapshot of ours, and why one of a partner is refused
SnapshotStore                   our latest snapshots, from which partners pull
TokenClaims                     how many tokens of a partner's snapshot are believed
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

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

FRESH_SNAPSHOT_S = 60.0  # a snapshot that is no older is merged, whatever the windows' length
CLOCK_SKEW_S = 10.0  # a snapshot may be this far in the future
SNAPSHOTS_KEPT = 2  # the last one, and the one before for a partner that is a round behind, where merges block
MOST_SEEN = 8192  # partners; more than a roster holds, so that nobody in it can replay what we have merged
MOST_PARTS = 3  # answers of a snapshot that are kept: those with all its sections, with only the added ones, with none
MAX_WAITING_PULLS = 256  # questions that wait for a snapshot which is not there yet
ASKED_LATE_WINDOWS = 32  # in which more sections are made at once, after somebody has asked for them late
LATE = 0.5  # of a window: who asks later after its end has windows that do not end when ours do
CLAIM_SLACK = 2.0  # times the published speed, which is a mean and follows a change late
CLAIM_BURST_S = 60.0  # of the published speed: what one claim may hold
MOST_BUDGETS = 1024  # partners; who is forgotten begins with a full budget, as a newcomer does


class GossipView(Protocol):
    """What gossip needs to know of the swarm; peers/runtime/peer_selection.py knows it from the roster and the
    meter."""

    def partners(self, fragment: int, now: Seconds) -> Sequence[PeerId]:
        """The peers to exchange with in this window."""

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """All other peers that hold the fragment and train."""

    def tokens_per_s(self, peer: PeerId, fragment: int) -> float:
        """The speed at which that peer can train the fragment at most, by its record; 0: not published yet."""

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """How long a transfer of `size` bytes from that peer may take."""

    def window_s(self) -> Seconds:
        """The length of the shortest windows."""

    def period_s(self, fragment: int, size: int) -> Seconds:
        """Seconds between two windows of a fragment whose snapshots have `size` bytes: a multiple of `window_s`."""

    def is_thin(self, fragment: int, size: int) -> bool:
        """Whether our link, and nothing else, would stretch the fragment's windows with snapshots of `size` bytes."""


@dataclass(frozen=True, slots=True)
class FragmentContext:
    """What the exchange machine of one fragment is told when it is made."""

    run: RunId
    peer: PeerId  # ourselves
    fragment: int
    phase: float  # when its windows end, as a part of the period
    gossip: GossipConfig
    view: GossipView
    counts: ExchangeTotals = field(default_factory=ExchangeTotals)  # of all fragments of this peer
    restored_at: Seconds = 0.0  # what was published before it may be in the checkpoint that this peer goes on from
    fresh_s: Seconds = FRESH_SNAPSHOT_S  # a snapshot that is no older is merged

    def period_s(self, size: int) -> Seconds:
        """Seconds between two windows of the fragment, where its snapshots have `size` bytes."""
        return self.view.period_s(self.fragment, size)

    def next_close(self, now: Seconds, size: int) -> Seconds:
        """When the fragment's next window ends: at the same instants on every peer that has the same phase.

        Aligned windows make fresh partners: their snapshots are as old as the exchange takes, not half a window
        older (docs/CONVERGENCE.md has what that is worth). Clocks need agree to a small part of the period only. Where
        windows are stretched, fragments take turns at the ends of the shortest windows; so a peer whose windows are
        twice as long as its partner's ends each of them together with one of the partner's.
        """
        period_s, window_s = self.period_s(size), self.view.window_s()
        turn = self.fragment % max(1, round(period_s / window_s))
        offset = window_s * (turn + self.phase)
        end = ((now - offset) // period_s + 1) * period_s + offset
        return end if end > now else end + period_s  # at a window's end, rounding may give that end again

    def partners(self, now: Seconds) -> Sequence[PeerId]:
        return self.view.partners(self.fragment, now)

    def max_age_s(self, size: int) -> Seconds:
        """An older snapshot is not merged. One of a partner whose windows are long may be as old as two of them."""
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
        """Count an exchange, and return its line. `moved`: bytes sent and received; `age_s`: of the snapshot."""
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


def describe(context: FragmentContext, closed: WindowClosed, now: Seconds) -> Snapshot:
    """The header of what we publish at a window's end."""
    run, fragment, at, digest = context.run, context.fragment, now - closed.ago_s, blobs.digest(closed.blob)
    return Snapshot(run, fragment, closed.seq, closed.tokens, closed.lr_sum, at, closed.layout, digest)


def check(
    context: FragmentContext, snapshot: Snapshot, blob: bytes, layout: Layout, after: int, now: Seconds, own_bytes: int
) -> str:
    """Why it is refused; "": it is of this run and fragment, newer than `after`, fresh, shaped as `layout`, whole.

    `own_bytes`: of our snapshots. What a partner sends says nothing about how long our own windows have to be.
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
    """Our layout, with those sections as `sent` has them that may come in several codes."""
    theirs = {section.name: section for section in sent if section in codings}
    return tuple(theirs.get(section.name, section) for section in layout)


def contribution(peer: PeerId, header: Snapshot | WindowClosed, blob: bytes) -> Contribution:
    return Contribution(peer, header.tokens, header.lr_sum, header.layout, blob)


def pick(layout: Layout, names: Sequence[str]) -> Layout:
    """The sections with these names; all sections if no name is given."""
    return tuple(section for section in layout if section.name in names) if names else layout


@dataclass(slots=True)
class PublishedSnapshot:
    """A snapshot with its blob, and the sections that are added when somebody asks for them."""

    snapshot: Snapshot
    blob: bytes
    on_request: Layout
    settled: bool = False  # the window is being merged, or has been: no sections can be begun any more
    added: Layout = ()
    added_blob: bytes = b""
    parts: dict[Layout, Envelope] = field(default_factory=dict)  # answers with other sections than the snapshot's own

    def reply(self, request: int, names: Sequence[str]) -> Reply:
        """The sections with these names, as far as they are there. All answers that are alike share their bytes."""
        layout = pick((*self.snapshot.layout, *self.added), names)
        if layout == self.snapshot.layout:
            return Reply(request, Envelope(self.snapshot, self.blob))
        if layout not in self.parts:
            keep_latest(self.parts, layout, self._part(layout), MOST_PARTS)
        return Reply(request, self.parts[layout])

    def add(self, layout: Layout, blob: bytes) -> None:
        """The sections that were asked for are there."""
        self.added, self.added_blob = layout, blob
        self.parts.clear()

    def _part(self, layout: Layout) -> Envelope:
        whole = (*self.snapshot.layout, *self.added)
        blob = joined([self.blob, self.added_blob])
        placed = zip(whole, accumulate(section.size for section in whole), strict=True)
        part = joined([blob[end - section.size : end] for section, end in placed if section in layout])
        return Envelope(replace(self.snapshot, layout=layout, digest=blobs.digest(part)), part)


@dataclass(slots=True)
class SnapshotStore:
    """The latest snapshots of a fragment, and the questions that wait for the next one or for more of its sections.

    A partner that is much slower than we are asks at any moment, mostly after the window's merge, when slow weights can
    be made no more. It misses most of our windows, and only slow weights tell it of those. So once somebody has asked
    late they are made at once, before the merge, for as long as anybody goes on to ask late.
    """

    latest: deque[PublishedSnapshot] = field(default_factory=lambda: deque(maxlen=SNAPSHOTS_KEPT))
    waiting: list[tuple[int, Pull, Seconds]] = field(default_factory=list)  # requests, and when their patience is over
    encoding: list[tuple[int, Pull]] = field(default_factory=list)  # requests for sections that are being made
    making: bool = False  # sections of the newest snapshot
    asked_late: int = 0  # for so many more windows sections are made at once

    @property
    def wake_at(self) -> Seconds | None:
        return min((until for _, _, until in self.waiting), default=None)

    def put(self, snapshot: Snapshot, closed: WindowClosed, now: Seconds) -> list[Effect]:
        """Publishes it, and answers those who waited for it."""
        self.latest.append(PublishedSnapshot(snapshot, closed.blob, closed.on_request))
        begun = self._make(self.latest[-1]) if self.asked_late and closed.on_request else []
        self.asked_late = max(0, self.asked_late - 1)
        waited, self.waiting = self.waiting, []
        return [*begun, *self._answer_all(waited, now)]

    def answer(self, request: int, pull: Pull, now: Seconds) -> list[Effect]:
        return self._answer(request, pull, now + pull.patience_s, now)

    def lose_patience(self, now: Seconds) -> list[Effect]:
        """Answers those who have waited long enough, with what there is."""
        over = [one for one in self.waiting if one[2] <= now]
        self.waiting = [one for one in self.waiting if one[2] > now]
        return self._answer_all(over, now)

    def encoded(self, done: SectionsEncoded) -> list[Effect]:
        """More sections of the newest snapshot are there: answers those who asked for them."""
        self.making = False
        if not self.latest:
            return []  # they are of a window from before this fragment was given up and taken up again
        newest = self.latest[-1]
        if newest.snapshot.seq == done.seq:
            newest.add(done.layout, done.blob)
        asked, self.encoding = self.encoding, []
        return [newest.reply(request, pull.sections) for request, pull in asked]

    def settle(self) -> None:
        """The window is being merged: what was not asked for until now cannot be made any more."""
        if self.latest:
            self.latest[-1].settled = True

    def _answer_all(self, waited: Sequence[tuple[int, Pull, Seconds]], now: Seconds) -> list[Effect]:
        return [effect for request, pull, until in waited for effect in self._answer(request, pull, until, now)]

    def _answer(self, request: int, pull: Pull, until: Seconds, now: Seconds) -> list[Effect]:
        found = [kept for kept in self.latest if kept.snapshot.seq > pull.after]
        if pull.exact:
            found = [kept for kept in found if kept.snapshot.seq == pull.after + 1]
        if found and (pull.exact or found[-1].snapshot.time >= pull.since):
            return self._send(request, pull, found[-1], now)
        newest = self.latest[-1].snapshot.seq if self.latest else 0
        may_come = not pull.exact or newest <= pull.after
        if may_come and now < until and len(self.waiting) < MAX_WAITING_PULLS:
            self.waiting.append((request, pull, until))
            return []
        if found:
            return self._send(request, pull, found[-1], now)
        return [Reply(request, Envelope(Refused(Reason.NOTHING_NEWER, str(newest))))]

    def _send(self, request: int, pull: Pull, found: PublishedSnapshot, now: Seconds) -> list[Effect]:
        if found is not self.latest[-1] or not pick(found.on_request, pull.sections):
            return [found.reply(request, pull.sections)]
        if self._is_late(now):
            self.asked_late = ASKED_LATE_WINDOWS
        if found.added or (found.settled and not self.making):
            return [found.reply(request, pull.sections)]
        self.encoding.append((request, pull))
        return self._make(found)

    def _is_late(self, now: Seconds) -> bool:
        """Whether the newest window ended so long ago that who asks now does not end its windows when we do."""
        times = [one.snapshot.time for one in self.latest]
        return len(times) > 1 and now - times[-1] > LATE * (times[-1] - times[-2])

    def _make(self, newest: PublishedSnapshot) -> list[Effect]:
        """Begins to make the sections on request, if nobody has begun."""
        if self.making:
            return []
        self.making = True
        return [EncodeSections(newest.snapshot.fragment, newest.snapshot.seq)]


@dataclass(slots=True)
class TokenClaims:
    """How many tokens partners may have trained of one fragment, by the speeds that their records publish.

    Each partner has a budget, which grows CLAIM_SLACK times as fast as its published speed, up to CLAIM_BURST_S of it:
    steps may be longer than windows, and a partner is not asked in all of its windows. A claim takes from the budget,
    so over time no more is believed than that. Inflating the published speed backfires: others send more work.
    """

    left: dict[PeerId, tuple[Seconds, float]] = field(default_factory=dict)  # tokens, and at which time

    def believed(self, peer: PeerId, tokens: int, tokens_per_s: float, now: Seconds) -> int:
        """What we believe of a claim. Of a peer that has published no speed yet all is believed."""
        if tokens_per_s <= 0:
            return tokens
        most = CLAIM_SLACK * CLAIM_BURST_S * tokens_per_s
        since, left = self.left.get(peer, (now, most))
        budget = min(most, left + CLAIM_SLACK * tokens_per_s * max(0.0, now - since))
        believed = min(tokens, int(budget))
        keep_latest(self.left, peer, (now, budget - believed), MOST_BUDGETS)
        return believed

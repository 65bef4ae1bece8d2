"""The exchange machine of one fragment: publish a window, pull partners' windows, merge. Start at `PullExchange`.

    OPEN --close_at--> CLOSING --WindowClosed--> ASKING --last answer--> MERGING --Merged--> OPEN

A window is the training between two closes, and a period is the time between them. Partners pull a window's
pseudo-gradient, and from one of them the next slices of its slow weights phi (comm/gossip/outer_kernels.py has the
formulas). Slices are encoded if a partner asks for them before the merge begins or, for some windows after a late
question, at each close. Training goes on during an exchange. While a fragment has no partners, its windows are not
closed.

If pulls take nearly a period, the next window may be due to end during the merge. That window ends right after the
merge, at most LATE_PERIODS late, and still matches the partners' windows. If a partner does not answer within
ENOUGH_PERIODS, the windows of the other partners are merged before they are too old.

The same machine runs blocking algorithms: a window has a round number, all partners are asked for exactly that round,
and training waits for the merge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import ClassVar

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.snapshots import FragmentContext, SnapshotStore, TokenClaims, contribution
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PATIENCE_S, Pull, Refused, Snapshot
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Tag
from decentral.core.fragments import Layout, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import CloseWindow, Contribution, Merge, Merged, Rest, SectionsEncoded, WindowClosed
from decentral.core.latest import keep_latest
from decentral.core.machine import Log, Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

WHOLE_EVERY = 3  # a peer pulls pseudo-gradients in every window, and each slice of slow weights once in this many
MOST_READ = 0.6  # a peer that pulls from at least this share of a fragment's holders pulls slow weights less often
# A peer that pulls from at least MOST_READ of the holders pulls each slice once in RARER * WHOLE_EVERY windows
# (docs/results/convergence.md).
RARER = 3
# With shorter codes slices are pulled less often, so that their share of the bytes stays small: N times less,
# N = max(1, their bytes // (DENSE_TIMES * a window's bytes)) (q4: 1, q1: 3, sparse: 8).
DENSE_TIMES = 2
ENOUGH_PERIODS = 2.0  # we wait this many periods after a close for partners' answers, then merge the windows that came
LATE_PERIODS = 0.5  # after a merge that took too long, the next window may end up to this many periods late
# We pull nothing from a partner for so many windows after it has replayed one, or the merge has refused one.
DOUBTED_WINDOWS = 16
REST_S = 1.0  # if a fragment has no partners, we wait at least this long before we look for partners again
PATIENCE_PERIODS = 0.25  # a partner may delay its answer by up to this many periods, to close its own window first


@dataclass(frozen=True, slots=True)
class ExchangeTag(Tag):
    """Base class of the tags of pulls. An answer is dropped if `seq` is the number of an earlier window."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class PullTag(ExchangeTag):
    """The tag of a pull that is answered at once, or after a short wait for the partner's next window."""


@dataclass(frozen=True, slots=True)
class BlockingPullTag(ExchangeTag):
    """The tag of a pull of a blocking algorithm.

    The answer waits until the partner has closed the same window, so its delay does not measure the link.
    """

    measures_link: ClassVar[bool] = False


class ExchangePhase(Enum):
    """The phase of the exchange machine of one fragment; the module's docstring shows the order of the phases."""

    OPEN = auto()
    CLOSING = auto()
    ASKING = auto()
    MERGING = auto()


@dataclass(frozen=True, slots=True)
class PulledSnapshot:
    """A partner's snapshot that `snapshots.reason_to_refuse` has accepted, with the times and bytes of its transfer."""

    contribution: Contribution
    published_at: Seconds  # Unix time, by the partner's clock
    lasted_s: Seconds  # how long the window lasted, as the partner says
    came_at: Seconds
    seconds: Seconds  # time from the pull request to the arrival of the snapshot
    moved: tuple[int, int]  # (bytes sent, bytes received) in the transfer


@dataclass(frozen=True, slots=True)
class PullWindow:
    """One window of this peer, and the pulls that fetch partners' windows for its merge."""

    layout: Layout = ()
    codings: Layout = ()  # for sections that may be sent in several codecs: one entry for each codec
    partners: Sequence[PeerId] = ()  # the peers whose windows are pulled
    enough_at: Seconds = 0.0  # from this time on, the merge does not wait for the answers that are still missing
    slices: Layout = ()  # the sections on request that are pulled from the first partner
    pending: set[PeerId] = field(default_factory=set)  # partners that have not answered yet
    pulled: list[PulledSnapshot] = field(default_factory=list)
    skipped: str = ""  # the reason for the journal if no partner's window is merged although no pull has failed


@dataclass(frozen=True, slots=True)
class AnswerSizes:
    """The sizes in bytes that we expect of partners' answers, estimated from our own last snapshot."""

    largest: int = 0  # size of an answer without sections on request, each in the codec that takes the most bytes
    dense: int = 0  # mean size of an answer whose sections use their largest codecs; 0 if each section has one codec


@dataclass(slots=True)
class PullExchange:
    """The exchange machine of one fragment: events in, effects out, with the time as an argument."""

    context: FragmentContext
    close_at: Seconds  # when the present window ends
    state: ExchangePhase = ExchangePhase.OPEN
    seq: int = 0  # number of the last closed window
    usual_answer_bytes: int = 0  # expected bytes of a partner's answer: the mean size of our own answers
    lasted_s: Seconds = 0.0  # time between our last two closes; 0.0 before the second
    blocking: bool = False  # True: windows are numbered rounds, and training waits for each merge
    published: SnapshotStore = field(default_factory=SnapshotStore)
    seen: dict[PeerId, int] = field(default_factory=dict)  # by partner: number of its newest accepted window
    claims: TokenClaims = field(default_factory=TokenClaims)
    _began: Seconds = 0.0
    _published_at: Seconds = 0.0
    _resting: bool = False
    _sizes: AnswerSizes = field(default_factory=AnswerSizes)
    _slow_due: float = 0.0  # bytes of sections on request that are due to be pulled
    _turn: int = 0  # index of the section on request that is pulled next
    _doubted: dict[PeerId, int] = field(default_factory=dict)  # partner -> how many more windows we do not pull from it
    _goal: int = 0  # in blocking mode we skip the rounds up to this number, because a partner is already further ahead
    _window: PullWindow = field(default_factory=PullWindow)

    @property
    def pulled(self) -> dict[PeerId, tuple[Seconds, Seconds]]:
        """Return each pulled partner's (time of the close, seconds that the window lasted), as the partner says."""
        return {one.contribution.peer: (one.published_at, one.lasted_s) for one in self._window.pulled}

    @property
    def wake_at(self) -> Seconds | None:
        """Return when this machine needs a timer event (Woke) next; None while it waits only for other events."""
        own = self.close_at if self.state is ExchangePhase.OPEN else None
        own = self._window.enough_at if self._may_be_enough() else own
        return earliest((self.published.wake_at, own)) if self.published.waiting else own

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Return the effects of an event: jobs, pulls, answers to partners' pulls, and journal lines."""
        match event:
            case Woke():
                return self.published.lose_patience(now) + self._due(now)
            case WindowClosed(seq=seq) if self.state is ExchangePhase.CLOSING and seq == self.seq:
                return self._publish(event, now)
            case SectionsEncoded():
                return self.published.encoded(event)
            case Asked(request, peer, Envelope(Pull() as pull)):
                return self.published.answer(request, peer, pull, now)
            case Answered(tag=ExchangeTag(seq=seq)) | AskFailed(tag=ExchangeTag(seq=seq)):
                if self.state is ExchangePhase.ASKING and seq == self.seq:
                    return self._answered(event, now)
            case Merged(seq=seq) if self.state is ExchangePhase.MERGING and seq == self.seq:
                return self._merged(event, now)
        return []

    def _due(self, now: Seconds) -> list[Effect]:
        if self.state is ExchangePhase.OPEN and now >= self.close_at:
            return self._close_or_rest(now)
        if self._may_be_enough() and now >= self._window.enough_at:
            pending, self._window = sorted(self._window.pending), replace(self._window, pending=set())
            late = [self._failed(partner, Reason.LATE, now - self._published_at) for partner in pending]
            return [*late, *self._merge(now)]
        return []

    def _may_be_enough(self) -> bool:
        return self.state is ExchangePhase.ASKING and bool(self._window.pulled) and not self.blocking

    def _partners(self, now: Seconds) -> Sequence[PeerId]:
        """Return the peers to pull from in the next window, if possible without peers that recently misbehaved.

        A peer that replayed a window, or whose window the merge refused, is doubted for DOUBTED_WINDOWS calls of this
        method. If the view names a doubted peer, the view is asked twice more, and doubted peers are left out. They are
        not left out if the view names no other peers, or if the algorithm is blocking.
        """
        drawn = self.context.partners(now)
        self._doubted = {peer: left - 1 for peer, left in self._doubted.items() if left > 1}
        if self.blocking or not self._doubted.keys() & set(drawn):
            return drawn
        more = dict.fromkeys([*drawn, *self.context.partners(now), *self.context.partners(now)])
        trusted = [peer for peer in more if peer not in self._doubted]
        return trusted[: len(drawn)] or drawn

    def _close_or_rest(self, now: Seconds) -> list[Effect]:
        partners = self._partners(now)
        if partners or self.blocking:
            self._window = PullWindow(partners=partners)
            self._resting = False
            return self._close(now)
        self.close_at = self.context.next_close(now + REST_S, self.usual_answer_bytes)
        begin, self._resting = not self._resting, True
        return [Rest(self.context.fragment)] if begin else []

    def replan(self, now: Seconds) -> None:
        """End the present window earlier if periods have become so short that its end is over one period ahead."""
        if self.close_at > now + self.context.period_s(self.usual_answer_bytes):
            self.close_at = self.context.next_close(now, self.usual_answer_bytes)

    def _close(self, now: Seconds) -> list[Effect]:
        """Enter CLOSING, and return the job that closes the window.

        The window's number is the round or, without blocking, our clock in milliseconds, so that the number grows
        across restarts.
        """
        self.state, self._began = ExchangePhase.CLOSING, now
        self.seq = max(self.seq, self._goal if self.blocking else int(now * 1000) - 1) + 1
        thin = not self.blocking and self._is_thin()
        return [CloseWindow(self.context.fragment, self.seq, blocking=self.blocking, thin=thin)]

    def _is_thin(self) -> bool:
        """Return whether our link is so slow that sections are sent in their shorter codecs.

        False before the first window is closed, and if no section has a choice of codecs.
        """
        return self._sizes.dense > 0 and self.context.lengths.is_thin(self.context.fragment, self._sizes.dense)

    def _publish(self, closed: WindowClosed, now: Seconds) -> list[Effect]:
        window, on_request = self._window, layout_bytes(closed.on_request)
        densest = len(closed.blob) + _more_when_dense(closed)
        (every, self.usual_answer_bytes), (_, dense) = (
            self._expected(size, on_request) for size in (len(closed.blob), densest)
        )
        self._sizes = AnswerSizes(largest=densest, dense=dense if closed.codings else 0)
        period_s = self.context.period_s(self.usual_answer_bytes)
        since_s = now - self._published_at
        missed = max(0, round(since_s / period_s) - 1)
        self.lasted_s, self._published_at = since_s if self._published_at else 0.0, now
        header = snapshots.describe(self.context, closed, self.lasted_s, now)
        effects = self.published.put(header, closed, now, keep=snapshots.ROUNDS_KEPT if self.blocking else 1)
        if not window.partners:
            self._window = replace(window, skipped=Reason.ALONE)
            return [*effects, *self._merge(now)]
        self.state = ExchangePhase.ASKING
        self._window = replace(
            window,
            layout=closed.layout,
            codings=closed.codings,
            enough_at=now + ENOUGH_PERIODS * period_s,
            pending=set(window.partners),
            slices=self._choose_slices(closed.on_request, every, missed * len(closed.blob)),
        )
        return effects + [self._ask(partner, now) for partner in window.partners]

    def _choose_slices(self, on_request: Layout, every: int, missed_bytes: int) -> Layout:
        """Return the sections on request to pull in this window: the next ones in turn, of one in `every` of all bytes.

        Missed windows reach us only in slow weights. So for each missed window we pull as many bytes of slow weights
        as its answer would have had: a slow link carries no more bytes in a period than without misses.
        """
        total, chosen = layout_bytes(on_request), []
        self._slow_due = min(total, self._slow_due + total / every + missed_bytes)
        for place in range(len(on_request)):
            section = on_request[(self._turn + place) % len(on_request)]
            if section.size > self._slow_due + 0.01:  # less is a rounding error
                break
            chosen.append(section)
            self._slow_due -= section.size
        self._turn += len(chosen)
        return tuple(section for section in on_request if section in chosen)

    def _expected(self, window_bytes: int, on_request: int) -> tuple[int, int]:
        """Return N, if a window pulls an N-th of the slow weights (see `whole_every`), and an answer's mean bytes."""
        partners, holders = len(self._window.partners), len(self.context.view.holders(self.context.fragment))
        every = whole_every(partners, holders, window_bytes, on_request)
        return every, window_bytes + on_request // (every * max(1, partners))

    def _ask(self, partner: PeerId, now: Seconds) -> Ask:
        kind = BlockingPullTag if self.blocking else PullTag
        tag = kind(self.context.fragment, self.seq)
        period_s = self.context.period_s(self.usual_answer_bytes)
        after = self.seq - 1 if self.blocking else self.seen.get(partner, 0)
        patience_s = MAX_PATIENCE_S if self.blocking else min(PATIENCE_PERIODS * period_s, MAX_PATIENCE_S)
        since = max(0.0, now - period_s / 2)
        slices = self._slices_from(partner)
        names = tuple(section.name for section in slices)
        pull = Pull(self.context.run, self.context.fragment, after, since, patience_s, self.blocking, names)
        most = self._sizes.largest + layout_bytes(slices)
        return Ask(tag, partner, Envelope(pull), patience_s + self.context.view.deadline_s(partner, most), most)

    def _slices_from(self, partner: PeerId) -> Layout:
        return self._window.slices if partner == self._window.partners[0] else ()

    def _answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """Record a partner's answer or failure; return journal lines and, after the last answer, the merge job."""
        failed: str | None = None  # None: the pull has not failed; "": it has failed, and the partner gave no reason
        match event:
            case Answered(envelope=Envelope(Snapshot() as snapshot)):
                failed = self._received(event, snapshot, now) or None
            case Answered(envelope=Envelope(Refused(Reason.NOTHING_NEWER, newest))):
                if self.blocking and newest.isdecimal() and len(newest) < 16:
                    self._goal = max(self._goal, int(newest) - 1)  # skip all rounds before the partner's newest round
                self._window = replace(self._window, skipped=Reason.NOTHING_NEWER)
            case Answered(envelope=Envelope(Refused(reason))) | AskFailed(reason=reason):
                failed = reason
            case _:
                failed = Reason.UNEXPECTED
        lines = [self._failed(event.peer, failed, event.seconds)] if failed is not None else []
        self._window.pending.discard(event.peer)
        return [*lines, *([] if self._window.pending else self._merge(now))]

    def _received(self, event: Answered, snapshot: Snapshot, now: Seconds) -> str:
        """Accept a partner's snapshot and return "", or return the reason to refuse it."""
        blob, after, window = event.envelope.blob, self.seen.get(event.peer, 0), self._window
        own = snapshots.coded_as(window.layout, snapshot.layout, window.codings)
        came = tuple(section for section in self._slices_from(event.peer) if section in snapshot.layout)
        layout, own_bytes = (*own, *came), self.usual_answer_bytes
        refused = snapshots.reason_to_refuse(self.context, snapshot, blob, layout, after, now, own_bytes)
        if refused:
            if refused == Reason.REPLAY:  # an honest partner sends only windows newer than `after`
                self._doubted[event.peer] = DOUBTED_WINDOWS
            return refused
        keep_latest(self.seen, event.peer, snapshot.seq, snapshots.MOST_SEEN)
        moved = event.sent_bytes, event.received_bytes
        taken = self._bounded(contribution(event.peer, snapshot, blob), now)
        self._window.pulled.append(PulledSnapshot(taken, snapshot.time, snapshot.lasted_s, now, event.seconds, moved))
        return ""

    def _bounded(self, one: Contribution, now: Seconds) -> Contribution:
        """Return the contribution with its tokens bounded by the partner's published speed (`TokenClaims`).

        In blocking algorithms the contribution is unchanged, since all peers must merge the same numbers of tokens.
        """
        if self.blocking:
            return one
        speed = self.context.view.tokens_per_s(one.peer, self.context.fragment)
        return replace(one, tokens=self.claims.covered(one.peer, one.tokens, speed, now))

    def _merge(self, now: Seconds) -> list[Effect]:
        """Enter MERGING; return the merge job with all fresh snapshots, and a journal line for each stale snapshot.

        A snapshot can become stale after its arrival, for example if this process was suspended.
        """
        self.state = ExchangePhase.MERGING
        self.published.settle()
        pulled, limit_s = (
            self._window.pulled,
            math.inf if self.blocking else self.context.max_age_s(self.usual_answer_bytes),
        )
        stale = [one for one in pulled if now - one.published_at > limit_s]
        self._window = replace(self._window, pulled=[one for one in pulled if one not in stale])
        lines = [self._failed(one.contribution.peer, Reason.STALE, 0.0) for one in stale]
        fresh = tuple(one.contribution for one in self._window.pulled)
        came = {section for one in fresh for section in one.layout}
        lost = layout_bytes(tuple(section for section in self._window.slices if section not in came))
        self._slow_due += min(lost, layout_bytes(self._window.layout))  # as for a window that we have missed
        return [*lines, Merge(self.context.fragment, self.seq, fresh)]

    def _merged(self, merged: Merged, now: Seconds) -> list[Effect]:
        self.state = ExchangePhase.OPEN
        late_s = 0.0 if self.blocking else LATE_PERIODS * self.context.period_s(self.usual_answer_bytes)
        self.close_at = self.context.next_close(max(self.close_at, now - late_s), self.usual_answer_bytes)
        refused = dict(merged.rejected)
        self._doubted |= dict.fromkeys(refused, DOUBTED_WINDOWS)
        lines: list[Effect] = [
            _done(self.context, one) for one in self._window.pulled if one.contribution.peer not in refused
        ]
        lines += [self._failed(peer, reason, 0.0) for peer, reason in merged.rejected]
        if not merged.used:
            reason = self._window.skipped or Reason.FAILED
            lines.append(self.context.exchange_ended(None, "solo", reason, now - self._began))
        self._window = PullWindow()  # this frees the partners' snapshots
        return lines

    def _failed(self, partner: PeerId, reason: str, seconds: Seconds) -> Log:
        return self.context.exchange_ended(partner, "failed", reason, seconds)


def whole_every(partners: int, holders: int, window_bytes: int, on_request: int) -> int:
    """Return N: each of a fragment's windows pulls an N-th of the sections on request, besides those of the window.

    Args:
        partners: Number of peers that a window pulls from.
        holders: Number of other peers that hold the fragment.
        window_bytes: Bytes of the sections that each window pulls from a partner.
        on_request: Bytes of the sections on request, the slow weights.
    """
    every = WHOLE_EVERY * (RARER if partners >= MOST_READ * holders else 1)
    return every * max(1, on_request // (DENSE_TIMES * max(1, window_bytes)))


def _done(context: FragmentContext, merged: PulledSnapshot) -> Log:
    age_s = merged.came_at - merged.published_at
    return context.exchange_ended(merged.contribution.peer, "done", "", merged.seconds, merged.moved, age_s)


def _more_when_dense(closed: WindowClosed) -> int:
    """Return how many more bytes the window would have if each section were in the codec that takes the most bytes."""
    longest: dict[str, int] = {}
    for section in closed.codings:
        longest[section.name] = max(section.size, longest.get(section.name, 0))
    return sum(longest.get(section.name, section.size) - section.size for section in closed.layout)

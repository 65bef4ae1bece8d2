"""One fragment's exchanges by pulling: publish at the window's end, pull from partners, merge. No training waits.

    OPEN --window over--> CLOSING --WindowClosed--> ASKING --last answer--> MERGING --Merged--> OPEN

While there is no partner, no window is closed: the fragment rests. The slow weights of a window are encoded when the
first partner asks for them, as long as the window is not being merged; after that, partners get its pseudo-gradient
alone. Where pulls take nearly a period, the next window's end may pass before the merge: that window ends right after
it, while partners still count it as the same one. A partner that does not answer must not make the others' answers old:
after ENOUGH_PERIODS what is here is merged.

The same machine runs blocking algorithms: there a window has a round number, everyone is asked for exactly that round,
and the training thread waits for the merge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.snapshots import FragmentContext, SnapshotStore, TokenClaims, contribution, pick
from decentral.comm.gossip.tags import BlockingPullTag, ExchangeTag, PullTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PATIENCE_S, Pull, Refused, Snapshot
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event
from decentral.core.fragments import Layout, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.jobs import CloseWindow, Contribution, Merge, Merged, Rest, SectionsEncoded, WindowClosed
from decentral.core.latest import keep_latest
from decentral.core.machine import Log, Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

WHOLE_EVERY = 3  # windows between two pulls of slow weights; pseudo-gradients are pulled in each
MOST_READ = 0.6  # of the holders: where a window reads so many, slow weights, which tell of the others, are pulled
RARER = 3  # then slow weights are pulled this many times more rarely (docs/results/convergence.md)
BEHIND_PERIODS = 1.5  # periods between two windows of ours, from which on we have missed some of the partners'
ENOUGH_PERIODS = 2.0  # periods after which the answers that are here wait for no others
LATE_PERIODS = 0.5  # a window may end so much later than on other peers, where the last one's merge took until then
DOUBTED_WINDOWS = 16  # in which a partner is not asked, after its window was refused by the merge
REST_S = 1.0  # at least so long until a fragment that rests looks for partners again
PATIENCE_PERIODS = 0.25  # of the period: how long a pull waits for the partner's snapshot of the same window


class ExchangePhase(Enum):
    """Where the exchange of a window is."""

    OPEN = auto()  # the window is filling
    CLOSING = auto()  # the worker is encoding it
    ASKING = auto()  # a question to a partner is under way
    MERGING = auto()  # the worker is merging


@dataclass(frozen=True, slots=True)
class PulledSnapshot:
    """A partner's snapshot that we may merge."""

    contribution: Contribution
    published_at: Seconds
    came_at: Seconds
    seconds: Seconds  # from our question to its answer
    moved: tuple[int, int]  # bytes sent and received


@dataclass(frozen=True, slots=True)
class PullWindow:
    """A window of ours that is over, and what partners have answered about it."""

    layout: Layout = ()
    on_request: Layout = ()  # more sections of the same window, which a partner may have by now or not
    codings: Layout = ()  # of sections that a partner may have in another code than we
    partners: Sequence[PeerId] = ()
    whole_every: int = 1  # in every so many windows all sections are asked of the first partner
    enough_at: Seconds = 0.0
    sections: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)  # asked of each partner; (): all
    pending: set[PeerId] = field(default_factory=set)
    pulled: list[PulledSnapshot] = field(default_factory=list)
    skipped: str = ""  # why a partner had nothing for us, when that is nobody's fault


@dataclass(frozen=True, slots=True)
class AnswerSizes:
    """Bytes of answers to our questions; an exchange's `size` is that of the mean answer."""

    largest: int = 0  # with all sections, in the longest codes
    dense: int = 0  # the mean one in the longest codes, where windows have several; else zero


@dataclass(slots=True)
class PullExchange:
    context: FragmentContext
    close_at: Seconds
    state: ExchangePhase = ExchangePhase.OPEN
    seq: int = 0  # number of the last window that was closed
    size: int = 0  # bytes that a partner sends us in a window, by our last snapshot
    blocking: bool = False
    light: tuple[str, ...] = ()  # sections asked of every partner in every window; none: all
    published: SnapshotStore = field(default_factory=SnapshotStore)
    seen: dict[PeerId, int] = field(default_factory=dict)  # newest seq merged or refused, by partner
    claims: TokenClaims = field(default_factory=TokenClaims)
    _began: Seconds = 0.0  # when the exchange began
    _published_at: Seconds = 0.0
    _resting: bool = False
    _sizes: AnswerSizes = field(default_factory=AnswerSizes)
    _light_windows: int = 0  # since all sections were asked of a partner
    _doubted: dict[PeerId, int] = field(default_factory=dict)  # windows left in which this partner is not asked
    _goal: int = 0  # blocking only: our next round is at least this plus one
    _window: PullWindow = field(default_factory=PullWindow)

    @property
    def wake_at(self) -> Seconds | None:
        own = self.close_at if self.state is ExchangePhase.OPEN else None
        own = self._window.enough_at if self._may_be_enough() else own
        return earliest((self.published.wake_at, own)) if self.published.waiting else own

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return self.published.lose_patience(now) + self._due(now)
            case WindowClosed(seq=seq) if self.state is ExchangePhase.CLOSING and seq == self.seq:
                return self._publish(event, now)
            case SectionsEncoded():
                return self.published.encoded(event)
            case Asked(request, _, Envelope(Pull() as pull)):
                return self.published.answer(request, pull, now)
            case Answered(tag=ExchangeTag(seq=seq)) | AskFailed(tag=ExchangeTag(seq=seq)):
                if self.state is ExchangePhase.ASKING and seq == self.seq:
                    return self._answered(event, now)
            case Merged(seq=seq) if self.state is ExchangePhase.MERGING and seq == self.seq:
                return self._merged(event, now)
        return []  # it speaks of an exchange that is over

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
        """Those that are drawn; in the place of doubted ones others, as far as two more draws find any."""
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
            self._window = PullWindow(partners=partners, whole_every=self._whole_every(partners))
            self._resting = False
            return self._close(now)
        self.close_at = self.context.next_close(now + REST_S, self.size)
        begin, self._resting = not self._resting, True
        return [Rest(self.context.fragment)] if begin else []

    def replan(self, now: Seconds) -> None:
        """Brings the window's end forward, where it lies further ahead than a window is long now."""
        if self.close_at > now + self.context.period_s(self.size):
            self.close_at = self.context.next_close(now, self.size)

    def _close(self, now: Seconds) -> list[Effect]:
        """Ends the window. Its number is a round, or the milliseconds of our clock: it grows even over a restart."""
        self.state, self._began = ExchangePhase.CLOSING, now
        self.seq = max(self.seq, self._goal if self.blocking else int(now * 1000) - 1) + 1
        sparse = not self.blocking and self._is_sparse()
        return [CloseWindow(self.context.fragment, self.seq, hold=self.blocking, sparse=sparse)]

    def _is_sparse(self) -> bool:
        """Where the link is thin. The machine knows of a second code from the first window on."""
        return self._sizes.dense > 0 and self.context.view.is_thin(self.context.fragment, self._sizes.dense)

    def _publish(self, closed: WindowClosed, now: Seconds) -> list[Effect]:
        window, on_request = self._window, layout_bytes(closed.on_request)
        more = _more_when_dense(closed)
        self.size = len(closed.blob) + on_request // (window.whole_every * max(1, len(window.partners)))
        dense = self.size + more if closed.codings else 0
        self._sizes = AnswerSizes(largest=len(closed.blob) + more + on_request, dense=dense)
        period_s = self.context.period_s(self.size)
        behind = now - self._published_at > BEHIND_PERIODS * period_s
        self._published_at = now
        effects = self.published.put(snapshots.describe(self.context, closed, now), closed, now)
        if not window.partners:
            self._window = replace(window, skipped=Reason.ALONE)
            return [*effects, *self._merge(now)]
        self.state = ExchangePhase.ASKING
        self._window = replace(
            window,
            layout=closed.layout,
            on_request=closed.on_request,
            codings=closed.codings,
            enough_at=now + ENOUGH_PERIODS * period_s,
            pending=set(window.partners),
            sections=self._choose_sections(window.partners, behind),
        )
        return effects + [self._ask(partner, now) for partner in window.partners]

    def _choose_sections(self, partners: Sequence[PeerId], behind: bool) -> dict[PeerId, tuple[str, ...]]:
        """The light sections (pseudo-gradients) from all; all sections (slow weights too) from one now and then.

        A window that was missed (ours were longer, or the partners were not drawn) leaves its pseudo-gradient out of
        our slow weights, and only a partner's slow weights can tell us: then they are due as well. From one: where a
        link is what made us late, more bytes would keep us so.
        """
        self._light_windows += 1
        chosen = dict.fromkeys(partners, self.light)
        if behind or self._light_windows >= self._window.whole_every:
            chosen[partners[0]], self._light_windows = (), 0
        return chosen

    def _whole_every(self, partners: Sequence[PeerId]) -> int:
        holders = len(self.context.view.holders(self.context.fragment))
        return WHOLE_EVERY * (RARER if len(partners) >= MOST_READ * holders else 1)

    def _ask(self, partner: PeerId, now: Seconds) -> Ask:
        kind = BlockingPullTag if self.blocking else PullTag
        tag = kind(self.context.fragment, self.seq)
        period_s = self.context.period_s(self.size)
        after = self.seq - 1 if self.blocking else self.seen.get(partner, 0)
        patience_s = MAX_PATIENCE_S if self.blocking else min(PATIENCE_PERIODS * period_s, MAX_PATIENCE_S)
        since = max(0.0, now - period_s / 2)
        sections = self._window.sections[partner]
        pull = Pull(self.context.run, self.context.fragment, after, since, patience_s, self.blocking, sections)
        deadline_s = patience_s + self.context.view.deadline_s(partner, self._sizes.largest)
        return Ask(tag, partner, Envelope(pull), deadline_s, self._sizes.largest)

    def _answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """Takes the answer of a partner, and merges after the last one."""
        failed: str | None = None  # a partner may give an empty reason
        match event:
            case Answered(envelope=Envelope(Snapshot() as snapshot)):
                failed = self._received(event, snapshot, now) or None
            case Answered(envelope=Envelope(Refused(Reason.NOTHING_NEWER, newest))):
                if self.blocking and newest.isdecimal() and len(newest) < 16:
                    self._goal = max(self._goal, int(newest) - 1)  # where it is rounds ahead of us, we go where it is
                self._window = replace(self._window, skipped=Reason.NOTHING_NEWER)
            case Answered(envelope=Envelope(Refused(reason))) | AskFailed(reason=reason):
                failed = reason
            case _:
                failed = Reason.UNEXPECTED
        lines = [self._failed(event.peer, failed, event.seconds)] if failed is not None else []
        self._window.pending.discard(event.peer)
        return [*lines, *([] if self._window.pending else self._merge(now))]

    def _received(self, event: Answered, snapshot: Snapshot, now: Seconds) -> str:
        """Takes a partner's snapshot, or returns why it is refused."""
        blob, after = event.envelope.blob, self.seen.get(event.peer, 0)
        window, names = self._window, self._window.sections.get(event.peer, ())
        own = snapshots.coded_as(window.layout, snapshot.layout, window.codings)
        whole = (*own, *window.on_request)
        came = whole if snapshot.layout == whole else own
        refused = snapshots.check(self.context, snapshot, blob, pick(came, names), after, now, self.size)
        if refused:
            if refused == Reason.REPLAY:  # it was told what we have
                self._doubted[event.peer] = DOUBTED_WINDOWS
            return refused
        if pick(whole, names) != snapshot.layout:
            self._light_windows = RARER * WHOLE_EVERY  # it had no slow weights any more: they are due next time
        keep_latest(self.seen, event.peer, snapshot.seq, snapshots.MOST_SEEN)
        moved = event.sent_bytes, event.received_bytes
        taken = self._believed(contribution(event.peer, snapshot, blob), now)
        self._window.pulled.append(PulledSnapshot(taken, snapshot.time, now, event.seconds, moved))
        return ""

    def _believed(self, one: Contribution, now: Seconds) -> Contribution:
        """With no more tokens than the partner's speed explains; where merges block all must judge alike: as it is."""
        if self.blocking:
            return one
        speed = self.context.view.tokens_per_s(one.peer, self.context.fragment)
        return replace(one, tokens=self.claims.believed(one.peer, one.tokens, speed, now))

    def _merge(self, now: Seconds) -> list[Effect]:
        """Merges what is still fresh: a process that was stopped finds answers of long ago."""
        self.state = ExchangePhase.MERGING
        self.published.settle()
        pulled, limit_s = self._window.pulled, math.inf if self.blocking else self.context.max_age_s(self.size)
        stale = [one for one in pulled if now - one.published_at > limit_s]
        self._window = replace(self._window, pulled=[one for one in pulled if one not in stale])
        lines = [self._failed(one.contribution.peer, Reason.STALE, 0.0) for one in stale]
        fresh = tuple(one.contribution for one in self._window.pulled)
        return [*lines, Merge(self.context.fragment, self.seq, fresh)]

    def _merged(self, merged: Merged, now: Seconds) -> list[Effect]:
        self.state = ExchangePhase.OPEN
        late_s = 0.0 if self.blocking else LATE_PERIODS * self.context.period_s(self.size)
        self.close_at = self.context.next_close(max(self.close_at, now - late_s), self.size)
        refused = dict(merged.rejected)
        self._doubted |= dict.fromkeys(refused, DOUBTED_WINDOWS)
        lines: list[Effect] = [
            _done(self.context, one) for one in self._window.pulled if one.contribution.peer not in refused
        ]
        lines += [self._failed(peer, reason, 0.0) for peer, reason in merged.rejected]
        if not merged.used:
            reason = self._window.skipped or Reason.FAILED
            lines.append(self.context.exchange_ended(None, "solo", reason, now - self._began))
        return lines

    def _failed(self, partner: PeerId, reason: str, seconds: Seconds) -> Log:
        return self.context.exchange_ended(partner, "failed", reason, seconds)


def _done(context: FragmentContext, merged: PulledSnapshot) -> Log:
    age_s = merged.came_at - merged.published_at
    return context.exchange_ended(merged.contribution.peer, "done", "", merged.seconds, merged.moved, age_s)


def _more_when_dense(closed: WindowClosed) -> int:
    """The bytes by which the window would be larger with the longest codes of its sections."""
    longest: dict[str, int] = {}
    for section in closed.codings:
        longest[section.name] = max(section.size, longest.get(section.name, 0))
    return sum(longest.get(section.name, section.size) - section.size for section in closed.layout)

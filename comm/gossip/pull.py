"""One fragment's exchanges: publish at the window's end, pull from partners, merge. Nobody's training waits.

    OPEN --window over--> CLOSING --WindowClosed--> PULLING --last answer--> MERGING --Merged--> OPEN

A partner that does not answer must not make the others' answers old: after ENOUGH periods what is here is merged.

The same machine runs `pull`, the default, and `allreduce`, its synchronous counterpart: there a window has a round
number, everyone is asked for exactly that round, and the compute thread waits for the merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from decentral.comm.gossip.snapshots import FragmentContext, GossipView, SnapshotStore, contribution, pick
from decentral.comm.gossip.tags import BlockingPullTag, ExchangeTag, PullTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PATIENCE_S, Pull, Refused, Snapshot
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.jobs import CloseWindow, Contribution, Layout, Merge, Merged, WindowClosed
from decentral.core.machine import Effect, Log, Woke, earliest, log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

BEHIND_PERIODS = 1.5  # periods between two windows of ours, from which on we have missed some of the partners'
MOST_SEEN = 8192  # partners; more than a roster holds, so that nobody in it can replay what we have merged
ENOUGH_PERIODS = 2.0  # periods after which answers that are here wait for no others
PATIENCE_PERIODS = 0.1  # of the period: how long a pull waits for the partner's snapshot of the same window


class PullPhase(Enum):
    OPEN = auto()
    CLOSING = auto()
    PULLING = auto()
    MERGING = auto()


@dataclass(slots=True)
class PullExchange:
    context: FragmentContext
    view: GossipView
    close_at: Seconds
    synchronous: bool = False
    light: tuple[str, ...] = ()  # sections asked of every partner in every window; none: all
    whole_every: int = 1  # in every so many windows all sections are asked of the first partner
    state: PullPhase = PullPhase.OPEN
    seq: int = 0
    shelf: SnapshotStore = field(default_factory=SnapshotStore)
    layout: Layout = ()
    size: int = 0  # of a snapshot, bytes
    seen: dict[PeerId, int] = field(default_factory=dict)  # newest seq merged or refused, by partner
    _windows: int = 0
    _asked_for: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    _pending: set[PeerId] = field(default_factory=set)
    _got: list[tuple[Contribution, Log, Seconds]] = field(default_factory=list)  # and when it was published
    _began: Seconds = 0.0
    _published: Seconds = 0.0
    _enough_at: Seconds = 0.0
    _goal: int = 0  # the round before the one that a partner was in
    _skipped: str = ""  # why a partner had nothing for us, when that is nobody's fault

    @property
    def wake_at(self) -> Seconds | None:
        own = self.close_at if self.state is PullPhase.OPEN else self._enough_at if self._may_be_enough() else None
        return earliest((self.shelf.wake_at, own)) if self.shelf.held else own

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return self.shelf.lose_patience(now) + self._due(now)
            case WindowClosed(seq=seq) if self.state is PullPhase.CLOSING and seq == self.seq:
                return self._publish(event, now)
            case Asked(request, _, Envelope(Pull() as pull)):
                return self.shelf.answer(request, pull, now)
            case Answered(tag=ExchangeTag(seq=seq)) if self.state is PullPhase.PULLING and seq == self.seq:
                return self._answered(event, now)
            case AskFailed(tag=ExchangeTag(seq=seq)) if self.state is PullPhase.PULLING and seq == self.seq:
                return [self._failed(event.peer, event.reason, event.seconds), *self._settled(event.peer, now)]
            case Merged(seq=seq) if self.state is PullPhase.MERGING and seq == self.seq:
                return self._merged(event, now)
        return []  # it speaks of an exchange that is over

    def _due(self, now: Seconds) -> list[Effect]:
        if self.state is PullPhase.OPEN and now >= self.close_at:
            return self._close(now)
        if self._may_be_enough() and now >= self._enough_at:
            late = [self._failed(partner, Reason.LATE, now - self._published) for partner in sorted(self._pending)]
            self._pending.clear()
            return [*late, *self._merge(now)]
        return []

    def _may_be_enough(self) -> bool:
        return self.state is PullPhase.PULLING and bool(self._got) and not self.synchronous

    def _close(self, now: Seconds) -> list[Effect]:
        self.state, self._began = PullPhase.CLOSING, now
        self.seq = max(self.seq, self._goal) + 1 if self.synchronous else max(self.seq + 1, int(now * 1000))
        return [CloseWindow(self.context.fragment, self.seq, hold=self.synchronous)]

    def _publish(self, closed: WindowClosed, now: Seconds) -> list[Effect]:
        behind = now - self._published > BEHIND_PERIODS * self.view.period_s(len(closed.blob))
        self.layout, self.size, self._published = closed.layout, len(closed.blob), now
        self._enough_at = now + ENOUGH_PERIODS * self.view.period_s(self.size)
        effects = self.shelf.put(self.context.describe(closed, now), closed.blob, now)
        partners = self.view.partners(self.context.fragment, now)
        self._pending, self._got, self._skipped = set(partners), [], ""
        if not partners:
            self._skipped = Reason.ALONE
            return [*effects, *self._merge(now)]
        self.state = PullPhase.PULLING
        self._asked_for = self._choose_sections(partners, behind)
        return effects + [self._ask(partner, now) for partner in partners]

    def _choose_sections(self, partners: Sequence[PeerId], behind: bool) -> dict[PeerId, tuple[str, ...]]:
        """Deltas from all. Slow weights from one of them now and then, and from all when windows were missed.

        A window that was missed (ours were longer, or the partners were not drawn) leaves its delta out of our slow
        weights; only the partners' slow weights can tell us.
        """
        self._windows += 1
        if behind:
            return dict.fromkeys(partners, ())
        chosen = dict.fromkeys(partners, self.light)
        if self._windows % self.whole_every == 0:
            chosen[partners[0]] = ()
        return chosen

    def _ask(self, partner: PeerId, now: Seconds) -> Ask:
        kind = BlockingPullTag if self.synchronous else PullTag
        tag = kind(self.context.fragment, self.seq)
        period_s = self.view.period_s(self.size)
        after = self.seq - 1 if self.synchronous else self.seen.get(partner, 0)
        patience_s = MAX_PATIENCE_S if self.synchronous else min(PATIENCE_PERIODS * period_s, MAX_PATIENCE_S)
        since = max(0.0, now - period_s / 2)
        sections = self._asked_for[partner]
        pull = Pull(self.context.run, self.context.fragment, after, since, patience_s, self.synchronous, sections)
        return Ask(tag, partner, Envelope(pull), patience_s + self.view.deadline_s(partner, self.size), self.size)

    def _answered(self, event: Answered, now: Seconds) -> list[Effect]:
        match event.envelope.message:
            case Snapshot() as snapshot:
                return self._received(event, snapshot, now) + self._settled(event.peer, now)
            case Refused(Reason.NOTHING_NEWER, newest):
                self._catch_up(newest)
                self._skipped = Reason.NOTHING_NEWER
                return self._settled(event.peer, now)
            case Refused(reason):
                return [self._failed(event.peer, reason, event.seconds), *self._settled(event.peer, now)]
        return [self._failed(event.peer, Reason.UNEXPECTED, event.seconds), *self._settled(event.peer, now)]

    def _received(self, event: Answered, snapshot: Snapshot, now: Seconds) -> list[Effect]:
        after = self.seen.get(event.peer, 0)
        try:
            layout = pick(self.layout, self._asked_for.get(event.peer, ()))
            self.context.check(snapshot, event.envelope.blob, layout, after, now)
        except ProtocolError as error:
            return [self._failed(event.peer, error.reason, event.seconds)]
        self.seen.pop(event.peer, None)
        self.seen[event.peer] = snapshot.seq
        while len(self.seen) > MOST_SEEN:
            del self.seen[next(iter(self.seen))]
        done = log(
            "exchange",
            fragment=self.context.fragment,
            partner=event.peer,
            outcome="done",
            reason="",
            seconds=round(event.seconds, 4),
            sent_bytes=event.sent_bytes,
            received_bytes=event.received_bytes,
            age_s=round(now - snapshot.time, 3),
        )
        self._got.append((contribution(event.peer, snapshot, event.envelope.blob), done, snapshot.time))
        return []

    def _settled(self, partner: PeerId, now: Seconds) -> list[Effect]:
        self._pending.discard(partner)
        return [] if self._pending else self._merge(now)

    def _merge(self, now: Seconds) -> list[Effect]:
        """With what is still fresh: a process that was stopped finds answers of long ago."""
        self.state = PullPhase.MERGING
        stale = [] if self.synchronous else [one for one, _, t in self._got if now - t > self.context.max_age_s]
        self._got = [got for got in self._got if got[0] not in stale]
        lines = [self._failed(one.peer, Reason.STALE, 0.0) for one in stale]
        return [*lines, Merge(self.context.fragment, self.seq, tuple(one for one, _, _ in self._got))]

    def _merged(self, merged: Merged, now: Seconds) -> list[Effect]:
        self.state = PullPhase.OPEN
        self.close_at = self.context.next_close(now, self.view.period_s(self.size))
        refused = dict(merged.rejected)
        lines: list[Effect] = [done for one, done, _ in self._got if one.peer not in refused]
        lines += [self._failed(peer, reason, 0.0) for peer, reason in merged.rejected]
        if not merged.used:
            solo = {
                "outcome": "solo",
                "reason": self._skipped or "failed",
                "seconds": round(now - self._began, 4),
            }
            nothing = {"sent_bytes": 0, "received_bytes": 0}
            lines.append(log("exchange", fragment=self.context.fragment, partner=None, **solo, **nothing))
        return lines

    def _failed(self, partner: PeerId, reason: str, seconds: Seconds) -> Log:
        fields = {"outcome": "failed", "reason": reason, "seconds": round(seconds, 4)}
        return log(
            "exchange", fragment=self.context.fragment, partner=partner, **fields, sent_bytes=0, received_bytes=0
        )

    def _catch_up(self, newest: str) -> None:
        """A partner is rounds ahead of us, so ours is over: our next one is the one it is in."""
        if self.synchronous and newest.isdecimal() and len(newest) < 16:
            self._goal = max(self._goal, int(newest) - 1)

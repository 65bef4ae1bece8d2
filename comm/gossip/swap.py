"""Symmetric exchanges of one fragment: two peers swap snapshots, and both merge or neither does.

    asker      OPEN -> CLOSING -> ASKING --Snapshot--> MERGING, and Commit to the other until it is acknowledged
    responder  OPEN --Swap--> CLOSING -> OFFERED --Commit--> MERGING; no Commit in time: a solo step

Crossed offers become one exchange: the peer with the lower id keeps asking, and the other answers it with the window
that it has closed. A Commit may be lost in all its tries: then one side has merged and the other has not, the swarm's
mean has moved, and the journal says `commit-lost`. An asker that our answer reached too late tells nobody: so a
responder waits no longer than the answer and all tries of a Commit may take, and others find it busy meanwhile. After
that it rests: for REST_TIMES as long it takes swaps only of partners that have committed their last one, and soon. So a
tenth of its time is all that partners without that can block, however many names they have. A swap that can be refused
is refused before a window is closed for it.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.snapshots import Exchange, ExchangePhase, contribution
from decentral.comm.gossip.tags import SwapCommitTag, SwapTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, Refused, Snapshot, Swap, SwapCommit
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution, Merge, Merged, WindowClosed
from decentral.core.latest import keep_latest
from decentral.core.machine import Woke, log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

COMMIT_TRIES = 3
REST_TIMES = 9  # times what a swap that was not committed has blocked: no other begins so long, but with TRUSTED
SOON = 0.5  # of the time in which a Commit may come: an honest one takes about a quarter of it
MOST_TRUSTED = 1024  # partners whose last swap was committed: the latest of them


@dataclass(slots=True)
class SwapExchange(Exchange):
    _partner: PeerId | None = None
    _swap: tuple[int, Swap, bytes] | None = None  # the request, its message and its blob, which we close a window for
    _commit_by: Seconds = 0.0  # until then the Commit may come
    _offered_seq: int = 0  # the window that the Swap which we answered offered us
    _committed_seq: int = 0  # the partner's window that we merged last
    _closed: WindowClosed | None = None
    _theirs: Contribution | None = None
    _seen: dict[PeerId, int] = field(default_factory=dict)
    _reason: str = ""
    _trusted: dict[PeerId, None] = field(default_factory=dict)  # partners whose last swap with us was committed
    _rests_until: Seconds = 0.0
    _bytes: tuple[int, int] = (0, 0)  # sent and received
    snapshots_moved: ClassVar[int] = 2

    @property
    def wake_at(self) -> Seconds | None:
        if self.state is ExchangePhase.OFFERED:
            return self._commit_by
        return self.close_at if self.state is ExchangePhase.OPEN else None

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Woke() if self.state is ExchangePhase.OPEN and now >= self.close_at:
                return self._close_unless_alone(now)
            case Woke() if self.state is ExchangePhase.OFFERED and now >= self._commit_by:
                return self._not_committed(now)
            case WindowClosed(seq=seq) if self.state is ExchangePhase.CLOSING and seq == self.seq:
                self._closed, self.size = event, len(event.blob)
                return self._offer(now) if self._swap else self._ask(now)
            case Asked(request, sender, Envelope(Swap() as swap, blob)):
                return self._swapped(request, sender, swap, blob, now)
            case Asked(request, sender, Envelope(SwapCommit() as commit)):
                return self._committed(request, sender, commit, now)
            case Answered(tag=SwapCommitTag(), envelope=Envelope(Done())):
                return []
            case Answered(tag=SwapCommitTag(seq=seq, tries=tries)) | AskFailed(tag=SwapCommitTag(seq=seq, tries=tries)):
                return [self._commit(event.peer, seq, tries + 1)]
            case Answered(tag=SwapTag(seq=seq)) | AskFailed(tag=SwapTag(seq=seq)):
                if self.state is ExchangePhase.ASKING and seq == self.seq:
                    return self._answered(event, now)
            case Merged(seq=seq) if self.state is ExchangePhase.MERGING and seq == self.seq:
                return self._merged(event, now)
        return []  # it speaks of an exchange that is over

    # The asker

    def _ask(self, now: Seconds) -> list[Effect]:
        assert self._closed is not None
        partners = self.context.partners(now)
        if not partners:  # the last one has just gone
            return self._merge(Reason.ALONE)
        self.state, self._partner = ExchangePhase.ASKING, partners[0]
        swap = Envelope(Swap(snapshots.describe(self.context, self._closed, now)), self._closed.blob)
        tag = SwapTag(self.context.fragment, self.seq)
        return [Ask(tag, self._partner, swap, self.context.view.deadline_s(self._partner, 2 * self.size), self.size)]

    def _answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        match event:
            case Answered(envelope=Envelope(Snapshot() as snapshot, blob)):
                self._bytes = (event.sent_bytes, event.received_bytes)
                refused = self._take(event.peer, snapshot, blob, now)
                if refused:
                    return self._merge(refused)
                return [*self._merge("", self._theirs), self._commit(event.peer, self.seq, 1)]
            case Answered(envelope=Envelope(Refused(reason))) | AskFailed(reason=reason):
                return self._merge(reason)
        return self._merge(Reason.UNEXPECTED)

    def _commit(self, partner: PeerId, seq: int, tries: int) -> Effect:
        """Tells the partner to merge, for the `tries`-th time, unless that is once too often."""
        fragment = self.context.fragment
        if tries > COMMIT_TRIES:
            fields = {"outcome": "failed", "reason": Reason.COMMIT_LOST, "seconds": 0.0}
            return log("exchange", fragment=fragment, partner=partner, **fields)
        commit = Envelope(SwapCommit(self.context.run, fragment, seq))
        return Ask(SwapCommitTag(fragment, seq, tries), partner, commit, self.context.view.deadline_s(partner, 0))

    # The responder

    def _swapped(self, request: int, sender: PeerId, swap: Swap, blob: bytes, now: Seconds) -> list[Effect]:
        crossed = self.state is ExchangePhase.ASKING and self._partner == sender and self.context.peer > sender
        if self.state is not ExchangePhase.OPEN and not crossed:
            reason = Reason.CROSSED if self._partner == sender else Reason.BUSY
            return [Reply(request, Envelope(Refused(reason)))]
        if not crossed and now < self._rests_until and sender not in self._trusted:
            return [Reply(request, Envelope(Refused(Reason.BUSY)))]
        if not crossed and (refused := self._refused_before(sender, swap.offered, blob, now)):
            return [Reply(request, Envelope(Refused(refused)))]
        self._swap, self._partner = (request, swap, blob), sender
        return self._offer(now) if crossed else self._close(now)

    def _refused_before(self, sender: PeerId, offered: Snapshot, blob: bytes, now: Seconds) -> str:
        """Why a swap is refused without closing a window for it. Before our first one its shape is not known."""
        layout = self._closed.layout if self._closed else offered.layout
        return snapshots.check(self.context, offered, blob, layout, self._seen.get(sender, 0), now, self.size)

    def _offer(self, now: Seconds) -> list[Effect]:
        """Answers the Swap of a partner with the window that we have closed."""
        assert self._swap
        assert self._partner
        assert self._closed
        (request, swap, blob), self._swap = self._swap, None
        refused = self._take(self._partner, swap.offered, blob, now)
        if refused:
            self._distrust(self._partner, now)
            return [Reply(request, Envelope(Refused(refused))), *self._merge(refused)]
        self.state, self._began, self._offered_seq = ExchangePhase.OFFERED, now, swap.offered.seq
        self._commit_by = now + self._commit_wait_s(self._partner)
        self._bytes = (self.size, len(blob))
        ours = Envelope(snapshots.describe(self.context, self._closed, now), self._closed.blob)
        return [Reply(request, ours)]

    def _commit_wait_s(self, asker: PeerId) -> Seconds:
        """What the asker may take for our answer, and for all its tries to tell us, by our own measurements."""
        deadline_s = self.context.view.deadline_s
        return deadline_s(asker, self.size) + COMMIT_TRIES * deadline_s(asker, 0)

    def _not_committed(self, now: Seconds) -> list[Effect]:
        """The partner may be gone, or may want nothing but to block us."""
        assert self._partner is not None
        self._distrust(self._partner, now)
        return self._merge(Reason.NO_COMMIT)

    def _distrust(self, partner: PeerId, now: Seconds) -> None:
        """The partner has blocked us since the exchange began, or all but that."""
        self._trusted.pop(partner, None)
        self._rests_until = now + REST_TIMES * (now - self._began)

    def _committed(self, request: int, sender: PeerId, commit: SwapCommit, now: Seconds) -> list[Effect]:
        if sender != self._partner or commit.seq != self._offered_seq:
            return [Reply(request, Envelope(Refused(Reason.NO_OFFER)))]
        if self.state is ExchangePhase.OFFERED:
            self._committed_seq = commit.seq
            if now - self._began <= SOON * (self._commit_by - self._began):
                keep_latest(self._trusted, sender, None, MOST_TRUSTED)
            else:
                self._distrust(sender, now)
            return [Reply(request, Envelope(Done())), *self._merge("", self._theirs)]
        again = commit.seq == self._committed_seq  # our first acknowledgement was lost
        return [Reply(request, Envelope(Done() if again else Refused(Reason.NO_OFFER)))]

    # Both sides

    def _take(self, peer: PeerId, snapshot: Snapshot, blob: bytes, now: Seconds) -> str:
        """Takes the partner's snapshot, or returns why it is refused."""
        assert self._closed is not None
        layout, after = self._closed.layout, self._seen.get(peer, 0)
        refused = snapshots.check(self.context, snapshot, blob, layout, after, now, self.size)
        if not refused:
            keep_latest(self._seen, peer, snapshot.seq, snapshots.MOST_SEEN)
            self._theirs = contribution(peer, snapshot, blob)
        return refused

    def _merge(self, reason: str, theirs: Contribution | None = None) -> list[Effect]:
        """Merges the partner's snapshot; without one, `reason` says why, in the partner's own word if it is one."""
        self.state, self._reason, self._theirs = ExchangePhase.MERGING, reason, None
        return [Merge(self.context.fragment, self.seq, (theirs,) if theirs else ())]

    def _merged(self, merged: Merged, now: Seconds) -> list[Effect]:
        self.state = ExchangePhase.OPEN
        self.close_at = self.context.next_close(now, self.snapshots_moved * self.size)
        reason = merged.rejected[0][1] if merged.rejected else self._reason
        calm = reason in (Reason.ALONE, Reason.CROSSED, Reason.BUSY, Reason.STRANGER)
        outcome = "done" if merged.used else "solo" if calm else "failed"
        moved = self._bytes if merged.used else (0, 0)
        partner = None if reason == Reason.ALONE else self._partner
        return [self.context.exchange_ended(partner, outcome, reason, now - self._began, moved)]

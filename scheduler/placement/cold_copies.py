"""Copy layers that only one peer holds to another peer's disk, so that they survive the loss of their holder.

Start at `ColdCopies`. A **cold copy** is the state of a fragment that its holder sends to newcomers, on the disk of a
peer that does not hold the fragment. With a copy and a holder, one of the two peers may fail (f + 1 copies survive f
failures: Oobleck, Jang et al., SOSP 2023). A copy is stored, announced and served just like the state of a fragment
that the peer has given up, so recovery (recover.py), moves (move.py) and joining peers need no other code.

**Who copies.** The peers that train without the fragment are ordered by a hash of peer and fragment (rendezvous
hashing), so peers with equal rosters agree without a message. The first of them copies the fragment; each further peer
does so one interval later, unless another peer has announced a fresh copy: the first may have too little space on its
disk. A peer that has a fresh copy renews it, unless an earlier peer has one too.

**When.** A fragment is copied once in each checkpoint interval, or less often if copies of all layers that only its
holder has would take more than COPY_SHARE of the holder's uplink. A copy is deleted one interval after the fragment has
got a second holder, or after another peer has become the one that copies the fragment.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from decentral.comm.wire.transport import Answered, AskFailed, Effect
from decentral.core.fragments import Fragment, layout_bytes
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import DropCopy, RetainCopy, RetainedChanged, RetainedStates
from decentral.core.journal.events import CopyLine
from decentral.core.journal.field_kinds import Outcome
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.fetch import Fetch, FetchTag, Incoming
from decentral.peers.membership.records import MOST_KEPT
from decentral.scheduler.placement.evaluate import TrainingPeer
from decentral.scheduler.placement.move import FETCH_STALLED_S, MemoryBudget

COPY_SHARE = 0.1  # copies take at most this share of their holder's uplink
MOST_EVERY_S = 3600.0  # two copies of a fragment are at most this far apart, however slow a link its holder claims
FRESH_TIMES = 3  # a copy counts as fresh for this many copy intervals, since records may show its renewal one late
REVIEWED_S = 2.0  # a copy may begin this much late, because reviews are this far apart
COPY_RETRY_S = 5.0  # after a failed fetch, the next try is this much later
DECLINED_S = 600.0  # after the disk has refused a copy, the next try is this much later
HASHES_KEPT = 1 << 16  # at most this many hashes of (peer, fragment) stay in the cache


@dataclass(frozen=True, slots=True)
class CopyTag(FetchTag):
    """The tag of a StateRequest that fetches the state of a fragment to copy."""


@dataclass(frozen=True, slots=True)
class LoneFragment:
    """A fragment with one holder: the holder, its learning-rate step, and the time between two copies."""

    holder: PeerId
    lr_step: int  # 0: the holder has not trained, so that its state is not worth a copy
    every_s: Seconds


@dataclass(frozen=True, slots=True)
class SeenCopy:
    """A state of a fragment that a peer has announced: its learning-rate step, and when we first saw this step."""

    step: int
    since: Seconds


@dataclass(slots=True)
class ColdCopies:
    """The state machine that copies fragments to this peer's disk, one at a time, and deletes needless copies."""

    run: RunId
    own: PeerId
    budget: MemoryBudget
    checkpoint_every_s: Seconds
    chance: Random
    lone: Mapping[int, LoneFragment] = field(default_factory=dict)  # fragment -> its only holder, at the last review
    fetch: Fetch = field(init=False)
    _seen: dict[PeerId, dict[int, SeenCopy]] = field(default_factory=dict)  # peer -> {fragment: state on its disk}
    _needed_since: dict[int, Seconds] = field(default_factory=dict)  # fragment -> since when we may have to copy it
    # Fragment on our disk -> since when no copy of it is needed here.
    _needless_since: dict[int, Seconds] = field(default_factory=dict)
    _next_at: dict[int, Seconds] = field(default_factory=dict)  # fragment -> earliest time of our next copy of it
    _reviewed_at: Seconds = 0.0
    _began_at: Seconds = 0.0
    _writes: RetainCopy | None = None  # the copy that the disk is writing

    def __post_init__(self) -> None:
        """Create `self.fetch`, the machine that fetches a fragment's state from its holder."""
        self.fetch = self._new_fetch()

    def review(
        self, members: Mapping[PeerId, TrainingPeer], stored: Mapping[PeerId, RetainedStates], now: Seconds
    ) -> list[Effect]:
        """Begin or continue a copy that is due, and delete a needless one; call it every few seconds.

        Args:
            members: The peers that train, ourselves included.
            stored: The states on each peer's disk, ourselves included.
            now: Unix time in seconds.
        """
        self._reviewed_at = now
        self._observe(stored, now)
        self.lone = self._lone_fragments(members)
        ours, held = dict(stored[self.own]), {index for one in members.values() for index in one.held}
        due = self._due_times(members, now)
        untrained = {index for index, one in self.lone.items() if not one.lr_step}
        needless = ours.keys() & held - due.keys() - untrained
        self._needless_since = {index: self._needless_since.get(index, now) for index in needless}
        if self._writes is not None:
            return []
        if self.fetch.incoming:
            return self._go_on(now)
        for index, since in self._needless_since.items():
            if now >= since + self.checkpoint_every_s:
                return [DropCopy(index, ours[index])]
        allowed = [index for index in due if index in ours or len(ours) < MOST_KEPT]
        first = min(allowed, key=lambda index: (due[index], index), default=None)
        return [] if first is None or now < due[first] else self._begin(first, now)

    def handle(self, event: Answered | AskFailed | RetainedChanged, now: Seconds) -> list[Effect]:
        """Continue the fetch with a holder's answer, or end the copy that the disk has written or refused."""
        if not isinstance(event, RetainedChanged):
            effects = self.fetch.handle(event, now) if self.fetch.incoming else []
            return [*effects, *(self._keep() if self.fetch.incoming and self.fetch.complete else ())]
        if self._writes is None or self._writes.fragment != event.fragment:
            return []
        written, self._writes = self._writes, None
        if event.reason:
            self._next_at[event.fragment] = now + DECLINED_S
            return [self._line(event.fragment, "failed", now, reason=event.reason)]
        # The next copy shall have arrived one interval after this one began.
        every_s = self.lone[event.fragment].every_s if event.fragment in self.lone else self.checkpoint_every_s
        lead_s = min(now - self._began_at + REVIEWED_S, every_s / 2)
        self._next_at[event.fragment] = self._began_at + every_s - lead_s
        return [self._line(event.fragment, "done", now, written.step, len(written.blob))]

    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        """Return whether a peer is the fragment's only holder, from which we copy its state."""
        lone = self.lone.get(fragment.index)
        return lone is not None and lone.holder == peer

    def _observe(self, stored: Mapping[PeerId, RetainedStates], now: Seconds) -> None:
        """Note when each peer's states were first seen at their present steps."""
        before, self._seen = self._seen, {}
        for peer, states in stored.items():
            known = before.get(peer, {})
            self._seen[peer] = {
                index: known[index] if index in known and known[index].step == step else SeenCopy(step, now)
                for index, step in states
            }

    def _lone_fragments(self, members: Mapping[PeerId, TrainingPeer]) -> dict[int, LoneFragment]:
        """Return the fragments that only one peer holds."""
        holders: dict[int, list[PeerId]] = {}
        for peer, member in members.items():
            for index in member.held:
                holders.setdefault(index, []).append(peer)
        alone = {index: peers[0] for index, peers in holders.items() if len(peers) == 1}
        found = {}
        for index, peer in alone.items():
            size = sum(layout_bytes(self.budget.layouts[one]) for one, other in alone.items() if other == peer)
            rate = members[peer].rate or float("inf")  # 0: not measured
            every_s = max(self.checkpoint_every_s, size / max(COPY_SHARE * rate, size / MOST_EVERY_S))
            found[index] = LoneFragment(peer, members[peer].lr_step, every_s)
        return found

    def _due_times(self, members: Mapping[PeerId, TrainingPeer], now: Seconds) -> dict[int, Seconds]:
        """Return the fragments that this peer should copy, each with the time at which to copy it.

        These are the fragments with one holder, another peer, of which no other peer has a fresh copy. If we have a
        fresh copy ourselves, only the copies of peers that come before us in the order of hashes count.
        """
        due, since = {}, {}
        for index, lone in self.lone.items():
            if index in members[self.own].held or not lone.lr_step:
                continue
            candidates = [peer for peer, member in members.items() if index not in member.held and peer != self.own]
            earlier = [peer for peer in candidates if _hash(peer, index) < _hash(self.own, index)]
            renews = self._is_fresh(self.own, index)
            if any(self._is_fresh(peer, index) for peer in (earlier if renews else candidates)):
                continue
            since[index] = self._needed_since.get(index, now)
            if renews:
                due[index] = self._next_at.get(index, self._seen[self.own][index].since + lone.every_s)
            else:
                due[index] = max(since[index] + len(earlier) * lone.every_s, self._next_at.get(index, 0.0))
        self._needed_since = since
        return due

    def _is_fresh(self, peer: PeerId, fragment: int) -> bool:
        copy, lone = self._seen.get(peer, {}).get(fragment), self.lone.get(fragment)
        if copy is None or lone is None:
            return False
        return copy.step >= lone.lr_step or self._reviewed_at < copy.since + FRESH_TIMES * lone.every_s

    def _begin(self, fragment: int, now: Seconds) -> list[Effect]:
        self._began_at = now
        self.fetch = self._new_fetch()
        self.fetch.begin([Incoming(self.budget.needs.fragments[fragment], self.budget.layouts[fragment])], now)
        return self._go_on(now)

    def _go_on(self, now: Seconds) -> list[Effect]:
        """Ask the holder for further pieces; stop if the fragment no longer needs our copy, or no piece arrives."""
        (fragment,) = self.fetch.incoming
        if fragment not in self._needed_since:
            self.fetch = self._new_fetch()
            return []
        if now > self.fetch.last_piece_at + FETCH_STALLED_S:
            self._next_at[fragment], self.fetch = now + COPY_RETRY_S, self._new_fetch()
            return [self._line(fragment, "failed", now, reason=Reason.DONORS)]
        self.fetch.choose([self.lone[fragment].holder])
        return self.fetch.ask()

    def _keep(self) -> list[Effect]:
        (incoming,) = self.fetch.incoming.values()
        ((fragment, layout, blob),) = self.fetch.donated()
        self._writes, self.fetch = RetainCopy(fragment, layout, blob, incoming.step), self._new_fetch()
        return [self._writes]

    def _line(
        self, fragment: int, outcome: Outcome, now: Seconds, step: int = 0, size: int = 0, reason: str = ""
    ) -> Log:
        seconds = round(now - self._began_at, 3)
        return Log(CopyLine(fragment=fragment, outcome=outcome, reason=reason, step=step, bytes=size, seconds=seconds))

    def _new_fetch(self) -> Fetch:
        return Fetch(self.run, CopyTag, self.chance, self)


@lru_cache(maxsize=HASHES_KEPT)
def _hash(peer: PeerId, fragment: int) -> bytes:
    return hashlib.blake2b(f"{peer} {fragment}".encode(), digest_size=16).digest()

"""A newcomer's start: the state of every fragment, from two or more donors at once (peers/joining/fetch.py).

    WAITING --roster known--> FETCHING --all pieces here--> IMPORTING --StateImported--> DONE

A peer with a checkpoint that is ahead of its donors keeps its own state; so does a whole swarm that starts again.

Donor serves the other side: the fragment's state, encoded every few seconds at most and given out in pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, AskFailed, Reply
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import (
    ExportRetained,
    ExportState,
    Fragment,
    ImportState,
    Layout,
    RetainedExported,
    RetainedStates,
    Start,
    StateExported,
    StateImported,
)
from decentral.core.machine import Effect, Woke, log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.fetch import Fetch, FetchTag, Incoming

ROSTER_S = 4.0  # how long to wait for the roster
JOIN_RETRY_S = 2.0
MOST_PATIENT = 2  # more times that, where all donors are busy with newcomers
GIVE_UP_S = 12.0  # without any donor that answers, after which we start from what we have
HOLDER_LOOKS = 5  # for a new record of a layer's holder whose last one is over: after a pause all are
MOST_SERVED = 8  # newcomers at a time: eight that are done soon are donors themselves
SERVED_S = 5.0  # who has asked for nothing for so long is served no more
EXPORT_KEPT_S = 5.0  # longer, and a newcomer would start where the swarm was


class JoinPhase(Enum):
    WAITING = auto()
    FETCHING = auto()
    IMPORTING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class JoinTag(FetchTag):
    """A question of a newcomer."""


@dataclass(slots=True)
class Join:
    run: RunId
    fragments: Sequence[Fragment]
    layouts: Sequence[Layout]  # of the fragments' states
    contacts: tuple[PeerId, ...]  # who answered our Hello
    own_step: int  # of our checkpoint; 0 without one
    restored: bool  # whether there is one
    chance: Random
    holds: Callable[[PeerId, Fragment], bool] = lambda peer, fragment: True
    kept: Callable[[int], tuple[int, Sequence[PeerId]]] = lambda index: (-1, ())  # the newest that others keep
    exact: bool = False  # a fragment's pieces have to be of one version
    state: JoinPhase = JoinPhase.WAITING
    imported: bool = False
    wake_at: Seconds | None = 0.0
    began: Seconds = 0.0
    fetch: Fetch = field(init=False)

    def __post_init__(self) -> None:
        self.fetch = Fetch(self.run, JoinTag, self.chance, self._has, self.exact)

    @property
    def donors(self) -> list[PeerId]:
        return self.fetch.donors

    @property
    def used(self) -> set[PeerId]:
        """Who gave us something."""
        return self.fetch.used

    def begin(self, now: Seconds) -> None:
        self.began = now
        self.wake_at = now + ROSTER_S if self.contacts else now
        self.fetch.begin(self._nothing_yet(), now)

    def handle(self, event: object, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._look(now, live)
            case Answered(tag=JoinTag()) | AskFailed(tag=JoinTag()) if self.state is JoinPhase.FETCHING:
                return self._heard(event, now)
            case StateImported(accepted, reason) if self.state is JoinPhase.IMPORTING:
                return self._done("swarm", now) if accepted else self._start_over(reason, now)
        return []

    def roster_known(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """The first look into the DHT is done: no need to wait longer."""
        if self.state is not JoinPhase.WAITING or (self.contacts and not live):
            return []
        return self._look(now, live)

    def _look(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """Finds donors, or starts from what we have where there are none."""
        known = sorted({*live, *self.contacts})
        self._take_what_is_kept(known)
        wanted = [one.fragment for one in self.fetch.incoming.values() if not one.complete()]
        self.fetch.choose([peer for peer in known if any(self._has(peer, fragment) for fragment in wanted)])
        if not self.donors and (not known or now > self.fetch.last_piece + GIVE_UP_S):
            self.fetch.incoming = {index: one for index, one in self.fetch.incoming.items() if one.complete()}
            return self._go_on(now)
        if not self.donors:
            self.fetch.failures.clear()
        if not live and self._only_strangers(known) and now < self.began + GIVE_UP_S:
            self.wake_at = now + JOIN_RETRY_S  # they answered our Hello; what they hold their records will tell
            return []
        self._leave_out_what_nobody_holds(known)
        if self.fetch.complete:
            return self._go_on(now)
        self.state, self.wake_at = JoinPhase.FETCHING, now + JOIN_RETRY_S * (1 + min(self.fetch.busy, MOST_PATIENT))
        return self.fetch.ask()

    def _take_what_is_kept(self, known: Sequence[PeerId]) -> None:
        """Of layers without a holder somebody may keep a state, and it may be newer than ours."""
        for index, one in self.fetch.incoming.items():
            if not one.pieces:
                step, keepers = self.kept(index)
                held = any(self.holds(peer, one.fragment) for peer in known)
                one.kept = not held and bool(keepers) and (not self.restored or step > self.own_step)

    def _go_on(self, now: Seconds) -> list[Effect]:
        """With what was fetched, if anything."""
        if self.fetch.incoming:
            return self._import()
        return self._done("checkpoint" if self.restored else "alone", now)

    def _only_strangers(self, known: Sequence[PeerId]) -> bool:
        incoming = self.fetch.incoming.values()
        return bool(known) and not any(self._has(peer, one.fragment) for peer in known for one in incoming)

    def _has(self, peer: PeerId, fragment: Fragment) -> bool:
        """Whether it holds the fragment, or, where we take what was kept, whether it keeps the newest."""
        incoming = self.fetch.incoming.get(fragment.index)
        kept = incoming is not None and incoming.kept
        return peer in self.kept(fragment.index)[1] if kept else self.holds(peer, fragment)

    def _leave_out_what_nobody_holds(self, known: Sequence[PeerId]) -> None:
        """Layers without another holder keep our checkpoint's, or the initial weights.

        A holder that is gone in the middle of it may come back, and is waited for by who has nothing to go on from.
        """
        for index, one in list(self.fetch.incoming.items()):
            if any(self._has(peer, one.fragment) for peer in known):
                one.held, one.looks = True, 0
                continue
            one.looks += one.held
            waits = one.held and one.looks <= HOLDER_LOOKS and not self.restored
            if not one.complete() and not waits:
                del self.fetch.incoming[index]

    def _heard(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        match event:
            case Answered(envelope=Envelope(StateChunk(step=step))) if self.restored and step < self.own_step:
                return self._done("checkpoint", now)  # the swarm is behind us: gossip will reconcile
        effects = self.fetch.handle(event, now)
        return self._import() if self.fetch.complete else effects

    def taken(self) -> dict[int, tuple[int, bytes]]:
        """Step and version of each fragment that we have from donors."""
        return {index: (one.step, one.version) for index, one in self.fetch.incoming.items() if self.imported}

    def _import(self) -> list[Effect]:
        if self.exact and self.fetch.fetch_again():
            return self.fetch.ask()
        self.state, self.wake_at = JoinPhase.IMPORTING, None
        return [ImportState(self.fetch.donated(), self.fetch.step)]

    def _start_over(self, reason: str, now: Seconds) -> list[Effect]:
        """What the donors sent is not a state of this model: ask again, after a pause."""
        self.state, self.wake_at = JoinPhase.WAITING, now + JOIN_RETRY_S
        self.fetch.failures.update(dict.fromkeys(self.used, 1))
        self.fetch.begin(self._nothing_yet(), self.fetch.last_piece)
        return [log("error", reason=f"the donated state was refused: {reason}")]

    def _nothing_yet(self) -> list[Incoming]:
        return [Incoming(fragment, layout) for fragment, layout in zip(self.fragments, self.layouts, strict=True)]

    def _done(self, source: str, now: Seconds) -> list[Effect]:
        self.state, self.wake_at, self.imported = JoinPhase.DONE, None, source == "swarm"
        return [Start(newcomer=source == "swarm" and not self.restored)]


@dataclass(slots=True)
class Export:
    step: int  # at which it was kept, or encoded
    layout: Layout
    blob: bytes
    kept_until: Seconds
    version: bytes = bytes(16)


@dataclass(slots=True)
class Donor:
    """Serves PullState. Encoding is the compute thread's; a fragment's export is reused for some seconds."""

    run: RunId
    fragments: Sequence[Fragment]  # that we hold
    kept: RetainedStates = ()  # that the disk keeps
    exact: bool = False  # give out no export of an earlier step
    exports: dict[tuple[int, bool], Export] = field(default_factory=dict)  # by fragment, and whether it is a kept one
    _waiting: dict[tuple[int, bool], list[tuple[int, StateRequest]]] = field(default_factory=dict)
    _served: dict[PeerId, Seconds] = field(default_factory=dict)  # when each newcomer asked last

    def _takes(self, newcomer: PeerId, now: Seconds) -> bool:
        """Whether it is one of those that are served."""
        if newcomer not in self._served and len(self._served) >= MOST_SERVED:
            self._served = {peer: at for peer, at in self._served.items() if now < at + SERVED_S}
        if newcomer not in self._served and len(self._served) >= MOST_SERVED:
            return False
        self._served[newcomer] = now
        return True

    def asked(self, request: int, sender: PeerId, pull: StateRequest, step: int, now: Seconds) -> list[Effect]:
        if not self._takes(sender, now):
            return [Reply(request, Envelope(Refused(Reason.BUSY)))]
        there = (index for index, _ in self.kept) if pull.kept else (fragment.index for fragment in self.fragments)
        if pull.fragment not in there:
            return [Reply(request, Envelope(Refused(Reason.FRAGMENT)))]
        name = (pull.fragment, pull.kept)
        export = self.exports.get(name)
        old = self.exact and export is not None and not pull.kept and export.step != step
        if export is not None and now < export.kept_until and not old:
            return [self._piece(request, pull, export)]
        self._waiting.setdefault(name, []).append((request, pull))
        job = ExportRetained(pull.fragment) if pull.kept else ExportState(pull.fragment)
        return [job] if len(self._waiting[name]) == 1 else []

    def exported(
        self, done: StateExported | RetainedExported, step: int, now: Seconds, version: bytes = bytes(16)
    ) -> list[Effect]:
        kept = isinstance(done, RetainedExported)
        name = (done.fragment, kept)
        waiting = self._waiting.pop(name, [])
        if not done.layout:
            return [Reply(request, Envelope(Refused(Reason.FRAGMENT))) for request, _ in waiting]
        of = done.step if isinstance(done, RetainedExported) else step
        export = self.exports[name] = Export(of, done.layout, done.blob, now + EXPORT_KEPT_S, version)
        return [self._piece(request, pull, export) for request, pull in waiting]

    def forget_old(self, now: Seconds) -> None:
        self.exports = {name: one for name, one in self.exports.items() if now < one.kept_until}

    def _piece(self, request: int, pull: StateRequest, export: Export) -> Reply:
        piece = export.blob[pull.offset : pull.offset + pull.length]
        if not piece:
            return Reply(request, Envelope(Refused(Reason.OFFSET)))
        digest, total = blobs.digest(piece), len(export.blob)
        place = (self.run, pull.fragment, pull.offset, total, export.step)
        chunk = StateChunk(*place, export.layout, digest, export.version)
        return Reply(request, Envelope(chunk, piece))

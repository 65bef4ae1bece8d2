"""A newcomer's start: the state of every fragment, from two or more donors at once, piece by piece.

    WAITING --roster known--> FETCHING --all pieces here--> IMPORTING --StateImported--> DONE

Each piece carries its digest. A donor that fails twice is left out; its pieces go to the others, and what is already
here stays. Pieces of one fragment may come from several donors: replicas differ by little, and the numbers of a piece
stand for themselves (no block of a codec crosses a piece). A peer with a checkpoint that is ahead of its donors
keeps its own state; so does a whole swarm that starts again.

Donor serves the other side: the fragment's state, encoded every few seconds at most and given out in pieces.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

from decentral.comm import blobs
from decentral.comm.codec import Envelope
from decentral.comm.messages import MAX_CHUNK_BYTES, PullState, Refused, StateChunk
from decentral.comm.transport import Answered, Ask, AskFailed, Reply
from decentral.core.errors import ProtocolError
from decentral.core.hollow import joined
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import (
    ExportState,
    Fragment,
    ImportState,
    Layout,
    Start,
    StateExported,
    StateImported,
)
from decentral.core.machine import Effect, Woke, log
from decentral.core.units import MiB, Seconds

PIECE_BYTES = 1 * MiB
DONORS = 4  # asked at a time; the others are spared
IN_FLIGHT = 2  # pieces asked of one donor at a time
FAILURES = 2  # then a donor is left out
ROSTER_S = 4.0  # how long to wait for the roster
RETRY_S = 2.0
MOST_PATIENT = 2  # more times that, where all donors are busy with newcomers
GIVE_UP_S = 12.0  # without any donor that answers, after which we start from what we have
LOOKS = 5  # for a new record of a layer's holder whose last one is over: after a pause all are
PIECE_DEADLINE_S = 30.0
EXPORT_KEPT_S = 5.0  # longer, and a newcomer would start where the swarm was


class State(Enum):
    WAITING = auto()
    FETCHING = auto()
    IMPORTING = auto()
    DONE = auto()


@dataclass(slots=True)
class Incoming:
    """One fragment's state, as far as it is here."""

    fragment: Fragment
    layout: Layout  # what a donor's state of it has to look like
    total: int | None = None
    pieces: dict[int, bytes] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    held: bool = False  # by somebody, when we looked
    looks: int = 0  # in which nobody held it any more

    def wanted(self) -> int | None:
        """An offset that is neither here nor asked for. The first piece tells how many there are."""
        offsets = [0] if self.total is None else range(0, self.total, PIECE_BYTES)
        return next((at for at in offsets if at not in self.pieces and at not in self.asked), None)

    def complete(self) -> bool:
        return self.total is not None and sum(map(len, self.pieces.values())) == self.total

    def take(self, chunk: StateChunk, blob: bytes) -> None:
        """Raises ProtocolError for a piece that does not fit what is here."""
        if blobs.digest(blob) != chunk.digest:
            raise ProtocolError("digest", "a piece of state")
        if chunk.layout != self.layout or chunk.total != sum(section.size for section in self.layout):
            raise ProtocolError("shape", "its sections are not this fragment's")
        if len(blob) != min(PIECE_BYTES, chunk.total - chunk.offset):
            raise ProtocolError("shape", "a piece of another length")
        self.total = chunk.total
        self.pieces[chunk.offset] = blob

    def blob(self) -> bytes:
        return joined(self.pieces[at] for at in sorted(self.pieces))


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
    state: State = State.WAITING
    donors: list[PeerId] = field(default_factory=list)
    used: set[PeerId] = field(default_factory=set)
    wake_at: Seconds | None = 0.0
    began: Seconds = 0.0
    _incoming: dict[int, Incoming] = field(default_factory=dict)
    _failures: Counter[PeerId] = field(default_factory=Counter)
    _in_flight: Counter[PeerId] = field(default_factory=Counter)
    _busy: int = 0  # times that a donor had no time for us
    _last_piece: Seconds = 0.0
    _step: int = 0

    def begin(self, now: Seconds) -> None:
        self.began = self._last_piece = now
        self.wake_at = now + ROSTER_S if self.contacts else now
        self._incoming = self._nothing_yet()

    def handle(self, event: object, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._look(now, live)
            case Answered(tag=("join", int() as index, int() as offset)) if self._fetches(index):
                return self._answered(event, self._incoming[index], offset, now)
            case AskFailed(tag=("join", int() as index, int() as offset)) if self._fetches(index):
                self._incoming[index].asked.discard(offset)
                return self._donor_failed(event.peer, event.reason, now)
            case StateImported(accepted, reason) if self.state is State.IMPORTING:
                return self._done("swarm", now) if accepted else self._start_over(reason, now)
        return []

    def _fetches(self, index: int) -> bool:
        return self.state is State.FETCHING and index in self._incoming

    def roster_known(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """The first look into the DHT is done: no need to wait longer."""
        if self.state is not State.WAITING or (self.contacts and not live):
            return []
        return self._look(now, live)

    def _look(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """Finds donors, or starts from what we have where there are none."""
        known = sorted({*live, *self.contacts})
        willing = [peer for peer in known if self._failures[peer] < FAILURES]
        kept = [peer for peer in self.donors if peer in willing]
        others = [peer for peer in willing if peer not in kept]
        self.donors = kept + self.chance.sample(others, max(0, min(len(others), DONORS - len(kept))))
        self.donors += self._holders_of_the_rest(willing)
        if not self.donors and (not known or now > self._last_piece + GIVE_UP_S):
            return self._done("checkpoint" if self.restored else "alone", now)
        if not self.donors:
            self._failures.clear()
        if not live and self._only_strangers(known) and now < self.began + GIVE_UP_S:
            self.wake_at = now + RETRY_S  # they answered our Hello; what they hold their records will tell
            return []
        if not self._leave_out_what_nobody_holds(known):
            return self._done("checkpoint" if self.restored else "alone", now)
        if self._all_here():
            return self._import()  # of what was missing the last holder has gone
        self.state, self.wake_at = State.FETCHING, now + RETRY_S * (1 + min(self._busy, MOST_PATIENT))
        return self._ask_more(now)

    def _all_here(self) -> bool:
        return all(one.complete() for one in self._incoming.values())

    def _import(self) -> list[Effect]:
        self.state, self.wake_at = State.IMPORTING, None
        parts = [(index, one.layout, one.blob()) for index, one in sorted(self._incoming.items())]
        return [ImportState(tuple(parts), self._step)]

    def _holders_of_the_rest(self, willing: Sequence[PeerId]) -> list[PeerId]:
        """One more donor for each fragment that is not here yet, and that none of the donors holds."""
        found: list[PeerId] = []
        for one in self._incoming.values():
            holders = [peer for peer in willing if self.holds(peer, one.fragment)]
            if holders and not one.complete() and not {*holders} & {*self.donors, *found}:
                found.append(self.chance.choice(holders))
        return found

    def _only_strangers(self, known: Sequence[PeerId]) -> bool:
        incoming = self._incoming.values()
        return bool(known) and not any(self.holds(peer, one.fragment) for peer in known for one in incoming)

    def _leave_out_what_nobody_holds(self, known: Sequence[PeerId]) -> bool:
        """Layers without another holder keep our checkpoint's, or the initial weights. Whether any is left to fetch."""
        for index, one in list(self._incoming.items()):
            if any(self.holds(peer, one.fragment) for peer in known):
                one.held, one.looks = True, 0
                continue
            one.looks += one.held
            if not one.complete() and (not one.held or one.looks > LOOKS):
                del self._incoming[index]
        return bool(self._incoming)

    def _ask_more(self, now: Seconds) -> list[Effect]:
        """Gives each donor, in turn, pieces to send."""
        effects: list[Effect] = []
        for _ in range(IN_FLIGHT):
            for position, donor in enumerate(self.donors):
                if self._in_flight[donor] < IN_FLIGHT:
                    effects += self._ask_one(donor, position)
        return effects

    def _ask_one(self, donor: PeerId, position: int) -> list[Effect]:
        """Different donors start at different fragments."""
        held = [one for _, one in sorted(self._incoming.items()) if self.holds(donor, one.fragment)]
        count = len(held)
        order = [held[(position + shift) % count] for shift in range(count)]
        for incoming in order:
            offset = incoming.wanted()
            if offset is not None:
                incoming.asked.add(offset)
                self._in_flight[donor] += 1
                index = incoming.fragment.index
                question = Envelope(PullState(self.run, index, offset, PIECE_BYTES))
                return [Ask(("join", index, offset), donor, question, PIECE_DEADLINE_S, MAX_CHUNK_BYTES)]
        return []

    def _answered(self, event: Answered, incoming: Incoming, offset: int, now: Seconds) -> list[Effect]:
        incoming.asked.discard(offset)
        message = event.envelope.message
        if not isinstance(message, StateChunk) or message.offset != offset:
            reason = message.reason if isinstance(message, Refused) else "unexpected"
            return self._donor_failed(event.peer, reason, now)
        if self.restored and message.step < self.own_step:
            return self._done("checkpoint", now)  # the swarm is behind us: gossip will reconcile
        try:
            incoming.take(message, event.envelope.blob)
        except ProtocolError as error:
            return self._donor_failed(event.peer, error.reason, now)
        self._in_flight[event.peer] -= 1
        self._last_piece, self._step = now, max(self._step, message.step)
        self.used.add(event.peer)
        return self._import() if self._all_here() else self._ask_more(now)

    def _donor_failed(self, donor: PeerId, reason: str, now: Seconds) -> list[Effect]:
        self._in_flight[donor] -= 1
        if reason == "busy":  # it has enough newcomers: others are asked, and it perhaps later
            self.donors = [peer for peer in self.donors if peer != donor]
            self._busy += 1
            return self._ask_more(now)
        self._failures[donor] += 1
        lines: list[Effect] = []
        if self._failures[donor] == FAILURES:
            self.donors = [peer for peer in self.donors if peer != donor]
            lines.append(log("donor_failed", peer=donor, reason=reason))
        return lines + self._ask_more(now)

    def _start_over(self, reason: str, now: Seconds) -> list[Effect]:
        """What the donors sent is not a state of this model: ask again, after a pause."""
        self.state, self.wake_at = State.WAITING, now + RETRY_S
        self._failures.update(dict.fromkeys(self.used, 1))
        self._incoming = self._nothing_yet()
        return [log("error", reason=f"the donated state was refused: {reason}")]

    def _nothing_yet(self) -> dict[int, Incoming]:
        pairs = zip(self.fragments, self.layouts, strict=True)
        return {fragment.index: Incoming(fragment, layout) for fragment, layout in pairs}

    def _done(self, source: str, now: Seconds) -> list[Effect]:
        self.state, self.wake_at = State.DONE, None
        return [Start(newcomer=source == "swarm" and not self.restored)]


@dataclass(slots=True)
class Export:
    layout: Layout
    blob: bytes
    kept_until: Seconds


@dataclass(slots=True)
class Donor:
    """Serves PullState. Encoding is the compute thread's; a fragment's export is reused for some seconds."""

    run: RunId
    fragments: Sequence[Fragment]  # that we hold
    exports: dict[int, Export] = field(default_factory=dict)
    _waiting: dict[int, list[tuple[int, PullState]]] = field(default_factory=dict)

    def asked(self, request: int, pull: PullState, step: int, now: Seconds) -> list[Effect]:
        if pull.fragment not in {fragment.index for fragment in self.fragments}:
            return [Reply(request, Envelope(Refused("fragment")))]
        export = self.exports.get(pull.fragment)
        if export is not None and now < export.kept_until:
            return [self._piece(request, pull, export, step)]
        self._waiting.setdefault(pull.fragment, []).append((request, pull))
        return [ExportState(pull.fragment)] if len(self._waiting[pull.fragment]) == 1 else []

    def exported(self, done: StateExported, step: int, now: Seconds) -> list[Effect]:
        export = Export(done.layout, done.blob, now + EXPORT_KEPT_S)
        self.exports[done.fragment] = export
        waiting = self._waiting.pop(done.fragment, [])
        return [self._piece(request, pull, export, step) for request, pull in waiting]

    def forget_old(self, now: Seconds) -> None:
        self.exports = {index: one for index, one in self.exports.items() if now < one.kept_until}

    def _piece(self, request: int, pull: PullState, export: Export, step: int) -> Reply:
        piece = export.blob[pull.offset : pull.offset + pull.length]
        if not piece:
            return Reply(request, Envelope(Refused("offset")))
        digest, total = blobs.digest(piece), len(export.blob)
        chunk = StateChunk(self.run, pull.fragment, pull.offset, total, step, export.layout, digest)
        return Reply(request, Envelope(chunk, piece))

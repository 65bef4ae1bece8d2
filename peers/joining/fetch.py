"""Fragments' state from several peers at once, piece by piece: for a newcomer, and for a peer that takes over layers.

Each piece carries its digest. A donor that fails twice is left out; its pieces go to the others, and what is already
here stays. Pieces of one fragment may come from several donors: replicas differ by little, and the numbers of a piece
stand for themselves (no block of a codec crosses a piece).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_CHUNK_BYTES, Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Tag
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Donated, Fragment, Layout
from decentral.core.machine import Effect, log
from decentral.core.reasons import Reason
from decentral.core.synthetic import joined
from decentral.core.units import MiB, Seconds

PIECE_BYTES = 1 * MiB
DONORS = 4  # asked at a time; the others are spared
IN_FLIGHT = 2  # pieces asked of one donor at a time
FAILURES = 2  # then a donor is left out
PIECE_DEADLINE_S = 30.0


@dataclass(slots=True)
class Incoming:
    """One fragment's state, as far as it is here. `kept`: from a checkpoint that somebody keeps, not from a holder."""

    fragment: Fragment
    layout: Layout  # what a donor's state of it has to look like
    kept: bool = False
    total: int | None = None
    pieces: dict[int, bytes] = field(default_factory=dict)
    here: int = 0  # bytes of them
    asked: set[int] = field(default_factory=set)
    held: bool = False  # by somebody, when we looked
    looks: int = 0  # in which nobody held it any more
    step: int = 0  # of the newest piece
    version: bytes = b""
    outdone: int = 0  # the step of another fragment for which this one was fetched again
    _from: int = 0  # all before it is here or asked for

    def wanted(self) -> int | None:
        """An offset that is neither here nor asked for. The first piece tells how many there are."""
        end = 1 if self.total is None else self.total
        while self._from < end and (self._from in self.pieces or self._from in self.asked):
            self._from += PIECE_BYTES
        return self._from if self._from < end else None

    def let_go(self, offset: int) -> None:
        """It is no longer asked for: here now, or to be asked for again."""
        self.asked.discard(offset)
        self._from = min(self._from, offset)

    def complete(self) -> bool:
        return self.here == self.total

    def forget(self) -> None:
        """All that is here."""
        self.pieces.clear()
        self.here = self._from = 0

    def take(self, chunk: StateChunk, blob: bytes) -> None:
        """Raises ProtocolError for a piece that does not fit what is here."""
        if blobs.digest(blob) != chunk.digest:
            raise ProtocolError(Reason.DIGEST, "a piece of state")
        if chunk.layout != self.layout or chunk.total != sum(section.size for section in self.layout):
            raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")
        if len(blob) != min(PIECE_BYTES, chunk.total - chunk.offset):
            raise ProtocolError(Reason.SHAPE, "a piece of another length")
        self.total = chunk.total
        self.here += len(blob) - len(self.pieces.get(chunk.offset, b""))
        self.pieces[chunk.offset] = blob
        self.step, self.version = max(self.step, chunk.step), chunk.version

    def blob(self) -> bytes:
        return joined(self.pieces[at] for at in sorted(self.pieces))


@dataclass(frozen=True, slots=True)
class FetchTag(Tag):
    """StateRequest: the piece of a fragment's state from `offset` on."""

    fragment: int
    offset: int


@dataclass(slots=True)
class Fetch:
    """`holds(peer, fragment)`: whom to ask for what. `tag`: the kind of the questions' tags."""

    run: RunId
    tag: type[FetchTag]
    chance: Random
    holds: Callable[[PeerId, Fragment], bool]
    exact: bool = False  # a fragment's pieces have to be of one version
    incoming: dict[int, Incoming] = field(default_factory=dict)
    donors: list[PeerId] = field(default_factory=list)
    used: set[PeerId] = field(default_factory=set)
    step: int = 0  # the newest learning-rate step of those who gave
    last_piece: Seconds = 0.0
    busy: int = 0  # times that a donor had no time for us
    failures: Counter[PeerId] = field(default_factory=Counter)
    _in_flight: Counter[PeerId] = field(default_factory=Counter)

    def begin(self, incoming: Iterable[Incoming], now: Seconds) -> None:
        self.incoming, self.last_piece = {one.fragment.index: one for one in incoming}, now

    @property
    def complete(self) -> bool:
        return all(one.complete() for one in self.incoming.values())

    def donated(self) -> tuple[Donated, ...]:
        return tuple((index, one.layout, one.blob()) for index, one in sorted(self.incoming.items()))

    def choose(self, known: Sequence[PeerId]) -> None:
        """Some of these become donors; those that are, stay."""
        willing = [peer for peer in known if self.failures[peer] < FAILURES]
        if willing and self._only_failed_ones_hold_some(known):
            self.failures.clear()
            willing = list(known)
        kept = [peer for peer in self.donors if peer in willing]
        others = [peer for peer in willing if peer not in kept]
        self.donors = kept + self.chance.sample(others, max(0, min(len(others), DONORS - len(kept))))
        self.donors += self._holders_of_the_rest(willing)

    def _holders_of_the_rest(self, willing: Sequence[PeerId]) -> list[PeerId]:
        """One more donor for each fragment that is not here yet, and that none of the donors holds."""
        found: list[PeerId] = []
        for one in self.incoming.values():
            holders = [peer for peer in willing if self.holds(peer, one.fragment)]
            if holders and not one.complete() and not {*holders} & {*self.donors, *found}:
                found.append(self.chance.choice(holders))
        return found

    def fetch_again(self) -> bool:
        """Fragments of an earlier step than others, once: those who hold them may have taken that step by now."""
        newest = max((one.step for one in self.incoming.values()), default=0)
        old = [one for one in self.incoming.values() if one.step < newest and one.outdone < newest]
        for one in old:
            one.outdone = newest
            one.forget()
        return bool(old)

    def _only_failed_ones_hold_some(self, known: Sequence[PeerId]) -> bool:
        """Whether all that hold some fragment have been left out: then they are asked again."""
        return any(
            all(self.failures[peer] >= FAILURES for peer in known if self.holds(peer, one.fragment))
            for one in self._missing()
            if any(self.holds(peer, one.fragment) for peer in known)
        )

    def _missing(self) -> list[Incoming]:
        return [one for one in self.incoming.values() if not one.complete()]

    def ask(self) -> list[Effect]:
        """Gives each donor, in turn, pieces to send."""
        effects: list[Effect] = []
        if all(one.wanted() is None for one in self.incoming.values()):
            return effects  # all is here, or on its way
        for _ in range(IN_FLIGHT):
            for position, donor in enumerate(self.donors):
                if self._in_flight[donor] < IN_FLIGHT:
                    effects += self._ask_one(donor, position)
        return effects

    def handle(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """What came of a question of ours; more questions."""
        assert isinstance(event.tag, FetchTag)
        index, offset = event.tag.fragment, event.tag.offset
        incoming = self.incoming.get(index)
        if incoming is None:
            return []  # given up meanwhile
        incoming.let_go(offset)
        if isinstance(event, AskFailed):
            return self._failed(event.peer, event.reason)
        message = event.envelope.message
        if not isinstance(message, StateChunk) or message.offset != offset:
            return self._failed(event.peer, message.reason if isinstance(message, Refused) else "unexpected")
        if self.exact and message.step > incoming.step:
            incoming.forget()
        if self.exact and (message.step < incoming.step or (incoming.pieces and message.version != incoming.version)):
            self._in_flight[event.peer] -= 1
            return self._not_now(event.peer)  # it will soon have the step that others have already
        try:
            incoming.take(message, event.envelope.blob)
        except ProtocolError as error:
            return self._failed(event.peer, error.reason)
        self._in_flight[event.peer] -= 1
        self.last_piece, self.step = now, max(self.step, message.step)
        self.used.add(event.peer)
        return [] if self.complete else self.ask()

    def _ask_one(self, donor: PeerId, position: int) -> list[Effect]:
        """Different donors start at different fragments."""
        held = [one for _, one in sorted(self.incoming.items()) if self.holds(donor, one.fragment)]
        count = len(held)
        order = [held[(position + shift) % count] for shift in range(count)]
        for incoming in order:
            offset = incoming.wanted()
            if offset is not None:
                incoming.asked.add(offset)
                self._in_flight[donor] += 1
                index = incoming.fragment.index
                question = Envelope(StateRequest(self.run, index, offset, PIECE_BYTES, incoming.kept))
                return [Ask(self.tag(index, offset), donor, question, PIECE_DEADLINE_S, MAX_CHUNK_BYTES)]
        return []

    def _failed(self, donor: PeerId, reason: str) -> list[Effect]:
        self._in_flight[donor] -= 1
        if reason == Reason.BUSY:  # it has enough newcomers: others are asked, and it perhaps later
            self.busy += 1
            return self._not_now(donor)
        self.failures[donor] += 1
        lines: list[Effect] = []
        if self.failures[donor] == FAILURES:
            self.donors = [peer for peer in self.donors if peer != donor]
            lines.append(log("donor_failed", peer=donor, reason=reason))
        return lines + self.ask()

    def _not_now(self, donor: PeerId) -> list[Effect]:
        self.donors = [peer for peer in self.donors if peer != donor]
        return self.ask()


__all__ = ["Fetch", "FetchTag", "Incoming"]

"""Fetches fragments' state from several peers at once, piece by piece, for a newcomer or for a peer that moves.

A piece's bytes travel with their digests, as all blobs do (comm/wire/blobs.py). A donor that fails twice is left out;
its pieces are asked of the others, and those that are here already stay. Pieces of one fragment may come from several
donors, since replicas differ by little and a piece can be decoded by itself (no block of a codec crosses a piece).
When a fragment is here, samples of what each donor sent are compared with other peers' (peers/joining/cross_check.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_CHUNK_BYTES, MOST_FOLLOWED, Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect, Tag
from decentral.core.errors import ProtocolError
from decentral.core.fragments import Fragment, Layout, layout_bytes
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import Donated
from decentral.core.journal.events import DonorFailedLine
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.synthetic import Blob, gathered
from decentral.core.units import MiB, Seconds
from decentral.peers.joining import cross_check
from decentral.peers.joining.cross_check import MOST_WITNESSES, SAMPLE_BYTES, SAMPLE_DEADLINE_S, WITNESSES, DonorSample

PIECE_BYTES = 1 * MiB
DONORS = 4  # number of donors at a time
IN_FLIGHT = 2  # pieces asked of one donor at a time
FRAGMENTS_AHEAD = 12  # first pieces requested ahead, because encoding waits for a step edge
FAILURES = 2  # failed requests until a donor is left out
PIECE_DEADLINE_S = 30.0
MOST_HOLDERS = 16  # whose weights a command averages: more would change the mean by little


@dataclass(slots=True)
class Incoming:
    """One fragment's state, as far as it is here. `retained`: fetched from a peer's disk instead of from a holder."""

    fragment: Fragment
    layout: Layout  # the sections that a donor's state must have
    retained: bool = False
    total: int | None = None  # bytes; None until the first piece is here
    pieces: dict[int, Blob] = field(default_factory=dict)  # by offset
    here: int = 0  # bytes of the pieces
    requested: set[int] = field(default_factory=set)  # offsets
    had_holder: bool = False  # when donors were last chosen
    holder_misses: int = 0  # times in a row that it had no holder any more
    step: int = 0  # learning-rate step of the newest piece
    version: bytes = b""
    sources: dict[int, PeerId] = field(default_factory=dict)  # which donor each piece came from, by offset
    largest: dict[PeerId, tuple[float, int]] = field(default_factory=dict)  # number of each donor, and its sample
    refetched_for: int = 0  # the step of another fragment, for which this one was fetched again
    _from: int = 0  # all pieces before this offset are here or requested

    def fetch_retained(self, retained: bool) -> None:
        """Fetch a state that peers have retained on their disks; else that of the fragment's holders."""
        self.retained = retained

    def looked_for_holder(self, found: bool) -> None:
        """Note whether the fragment has a holder, as donors are chosen now."""
        self.had_holder = self.had_holder or found
        self.holder_misses = 0 if found else self.holder_misses + self.had_holder

    def next_offset(self) -> int | None:
        """An offset that is neither here nor requested. Before the first piece is here, 0 is the only one known."""
        if self.complete():
            return None
        end = 1 if self.total is None else self.total
        while self._from < end and (self._from in self.pieces or self._from in self.requested):
            self._from += PIECE_BYTES
        return self._from if self._from < end else None

    def request_over(self, offset: int) -> None:
        """The request for this offset is over: the piece is here, or has to be requested again."""
        self.requested.discard(offset)
        self._from = min(self._from, offset)

    def complete(self) -> bool:
        return self.here == self.total

    def fetch_again_for(self, step: int) -> None:
        """Forgets all pieces: another fragment is at this step already."""
        self.refetched_for = step
        self.forget()

    def forget(self) -> None:
        self.pieces.clear()
        self.sources.clear()
        self.largest.clear()
        self.here = self._from = 0

    def take(self, donor: PeerId, chunk: StateChunk, blob: bytes) -> None:
        """Adds a piece. Raises ProtocolError if it does not fit the fragment.

        The last one puts all together, so that their memory serves the next fragment's pieces.
        """
        if chunk.layout != self.layout or chunk.total != layout_bytes(self.layout):
            raise ProtocolError(Reason.SHAPE, "its sections are not this fragment's")
        if chunk.step >= MOST_FOLLOWED:
            raise ProtocolError(Reason.NUMBER, f"step {chunk.step}")
        if len(blob) != min(PIECE_BYTES, chunk.total - chunk.offset):
            raise ProtocolError(Reason.SHAPE, "a piece of another length")
        if self.complete():
            return
        size, at = cross_check.largest(blob)
        self.largest[donor] = max(self.largest.get(donor, (-1.0, 0)), (size, chunk.offset + at))
        self.sources[chunk.offset] = donor
        self.total = chunk.total
        self.here += len(blob) - len(self.pieces.get(chunk.offset, b""))
        self.pieces[chunk.offset] = blob
        self.step, self.version = max(self.step, chunk.step), chunk.version
        if self.complete():
            self.pieces = {0: gathered([self.pieces[at] for at in sorted(self.pieces)])}

    def sample(self, donor: PeerId, offset: int, witnesses: list[PeerId]) -> DonorSample:
        """What the donor said from that offset on. All pieces are here."""
        return DonorSample(donor, self.pieces[0][offset : offset + SAMPLE_BYTES], (self.step, self.version), witnesses)

    def hand_over(self) -> Blob:
        """The whole state, which is not kept here: whoever gets it may change it."""
        assert self.complete(), "all pieces are here"
        return self.pieces.pop(0)


@dataclass(frozen=True, slots=True)
class FetchTag(Tag):
    """StateRequest: the piece of a fragment's state from `offset` on, or the sample there of what a donor has sent."""

    fragment: int
    offset: int
    sample_of: PeerId | None = None


class StateHolders(Protocol):
    """Knows which peers have the state of a fragment."""

    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        """Whether this peer can be asked for the fragment."""


@dataclass(slots=True)
class Fetch:
    """Requests the pieces of all incoming fragments from a few donors, until everything is here."""

    run: RunId
    tag: type[FetchTag]  # class of the requests' tags
    chance: Random
    holders: StateHolders = field(repr=False, compare=False)
    exact: bool = False  # whether all pieces of a fragment have to be of one version
    incoming: dict[int, Incoming] = field(default_factory=dict)
    donors: list[PeerId] = field(default_factory=list)
    used: set[PeerId] = field(default_factory=set)  # donors that gave a piece
    steps: dict[PeerId, int] = field(default_factory=dict)  # the newest learning-rate step of each of those donors
    last_piece_at: Seconds = 0.0
    busy: int = 0  # times that a donor served others and refused us
    failures: Counter[PeerId] = field(default_factory=Counter)
    unready: dict[PeerId, bool] = field(default_factory=dict)  # by peer asked: whether its last answer was NOT_READY
    accused: set[PeerId] = field(default_factory=set)  # donors whose samples differed from others'
    known: Sequence[PeerId] = ()  # peers that may be asked
    samples: dict[tuple[int, int, PeerId], DonorSample] = field(default_factory=dict)  # by fragment, offset and donor
    _in_flight: Counter[PeerId] = field(default_factory=Counter)
    _ahead: dict[int, PeerId] = field(default_factory=dict)  # by fragment: who was asked ahead for its first piece

    def begin(self, incoming: Iterable[Incoming], now: Seconds) -> None:
        self.incoming, self.last_piece_at = {one.fragment.index: one for one in incoming}, now
        self.samples.clear()

    @property
    def step(self) -> int:
        """The learning-rate step to begin with: the lower median of the donors', as one of them may name any. The
        swarm's clock (peers/runtime/step_clock.py) catches up. Where all pieces must be of one version, the newest."""
        steps = sorted(self.steps.values())
        return (steps[-1] if self.exact else steps[(len(steps) - 1) // 2]) if steps else 0

    def keep_complete(self) -> None:
        """Gives up the fragments of which some pieces are missing."""
        self.incoming = {index: one for index, one in self.incoming.items() if one.complete()}

    @property
    def complete(self) -> bool:
        return not self.missing() and not self.samples

    def donated(self) -> tuple[Donated, ...]:
        """The states of all fragments, which are not kept here."""
        return tuple((index, one.layout, one.hand_over()) for index, one in sorted(self.incoming.items()))

    def choose(self, known: Sequence[PeerId]) -> None:
        """Makes some of these peers donors. Those that are donors already stay."""
        self.known = known
        known = [peer for peer in known if peer not in self.accused]
        willing = [peer for peer in known if self.failures.get(peer, 0) < FAILURES]
        if willing and self._some_have_failed_holders_only(known):
            self.failures.clear()
            willing = list(known)
        kept = [peer for peer in self.donors if peer in willing]
        others = [peer for peer in willing if peer not in kept]
        self.donors = kept + self.chance.sample(others, max(0, min(len(others), DONORS - len(kept))))
        for one in self.missing():  # one more donor for each of them that none of the donors holds
            holders = [peer for peer in willing if self.holders.can_donate(peer, one.fragment)]
            if holders and not {*holders} & {*self.donors}:
                self.donors.append(self.chance.choice(holders))

    def fetch_again(self) -> bool:
        """Discards fragments of an earlier step than others, once for each step: their holders may have caught up."""
        newest = max((one.step for one in self.incoming.values()), default=0)
        old = [one for one in self.incoming.values() if one.step < newest and one.refetched_for < newest]
        for one in old:
            one.fetch_again_for(newest)
        return bool(old)

    def _some_have_failed_holders_only(self, known: Sequence[PeerId]) -> bool:
        """Whether all holders of some missing fragment have been left out: then they are asked again."""
        if max(self.failures.values(), default=0) < FAILURES:
            return False
        held_by = ([peer for peer in known if self.holders.can_donate(peer, one.fragment)] for one in self.missing())
        return any(holders and all(self.failures[peer] >= FAILURES for peer in holders) for holders in held_by)

    def missing(self) -> list[Incoming]:
        """The fragments of which some pieces are not here yet."""
        return [one for one in self.incoming.values() if not one.complete()]

    def ask(self) -> list[Effect]:
        """Requests pieces of each donor in turn."""
        effects: list[Effect] = []
        if all(one.next_offset() is None for one in self.incoming.values()):
            return effects  # everything is here or requested
        for position, donor in [*enumerate(self.donors)] * IN_FLIGHT:
            if self._in_flight[donor] < IN_FLIGHT:
                effects += self._ask_one(donor, position)
        return effects + [ask for position, donor in enumerate(self.donors) for ask in self._ask_ahead(donor, position)]

    def handle(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """Takes the answer to a request, and gives the next requests."""
        assert isinstance(event.tag, FetchTag)
        if event.tag.sample_of is not None:
            self.last_piece_at = now if isinstance(event, Answered) else self.last_piece_at
            return self._compare(event, event.tag)
        offset, incoming = event.tag.offset, self.incoming.get(event.tag.fragment)
        if offset or self._ahead.pop(event.tag.fragment, None) is None:
            self._in_flight[event.peer] -= 1
        if incoming is None:
            return []  # this fragment is not fetched any more
        incoming.request_over(offset)
        if event.peer in self.accused:
            return self.ask()  # what it sent before it was left out
        if isinstance(event, AskFailed):
            return self._failed(event.peer, event.reason)
        message = event.envelope.message
        if not isinstance(message, StateChunk) or message.offset != offset:
            return self._failed(event.peer, message.reason if isinstance(message, Refused) else "unexpected")
        if self.exact and message.step > incoming.step:
            incoming.forget()
        if self.exact and (message.step < incoming.step or (incoming.pieces and message.version != incoming.version)):
            return self._not_now(event.peer)  # it will soon take the step that others have taken
        try:
            incoming.take(event.peer, message, event.envelope.blob)
        except ProtocolError as error:
            return self._failed(event.peer, error.reason)
        self.last_piece_at = now
        self.steps[event.peer] = max(self.steps.get(event.peer, 0), message.step)
        self.used.add(event.peer)
        self.unready[event.peer] = False
        if incoming.complete():
            self._draw_samples(incoming)
        return [] if self.complete else self.ask() + self._ask_witnesses()

    def _draw_samples(self, incoming: Incoming) -> None:
        """A fragment is here: two samples of each donor's pieces, if there are enough others to compare them with."""
        index = incoming.fragment.index
        for donor, (_, peak) in sorted(incoming.largest.items()):
            others = [peer for peer in self.known if peer != donor and peer not in self.accused]
            others = [peer for peer in others if self.holders.can_donate(peer, incoming.fragment)]
            if len(others) < WITNESSES or len(self.accused) >= cross_check.most_accused(self.known):
                continue
            self.chance.shuffle(others)
            others.sort(key=lambda peer: peer not in self.donors)  # those have encoded the fragment already, perhaps
            piece = self.chance.choice([offset for offset, source in incoming.sources.items() if source == donor])
            length = min(PIECE_BYTES, layout_bytes(incoming.layout) - piece)
            anywhere = piece + self.chance.randrange(0, length, SAMPLE_BYTES)
            for offset in sorted({peak, anywhere}):
                self.samples[index, offset, donor] = incoming.sample(donor, offset, others[:MOST_WITNESSES])

    def _ask_witnesses(self) -> list[Effect]:
        effects: list[Effect] = []
        for (index, offset, donor), sample in self.samples.items():
            for _ in range(sample.wanted):
                question = StateRequest(self.run, index, offset, SAMPLE_BYTES, self.incoming[index].retained)
                tag = self.tag(index, offset, donor)
                effects.append(Ask(tag, sample.ask(), Envelope(question), SAMPLE_DEADLINE_S, SAMPLE_BYTES))
        return effects

    def _compare(self, event: Answered | AskFailed, tag: FetchTag) -> list[Effect]:
        """A witness says what it holds, or does not. Once two have, the sample is judged."""
        name = (tag.fragment, tag.offset, tag.sample_of or PeerId(""))
        sample = self.samples.get(name)
        if sample is None:
            return []  # the fragment is fetched again
        held = None
        if isinstance(event, Answered) and isinstance(chunk := event.envelope.message, StateChunk):
            comparable = not self.exact or (chunk.step, chunk.version) == sample.version
            if len(event.envelope.blob) == len(sample.said) and comparable:
                held = event.envelope.blob
        sample.answered(held)
        if not sample.over:
            return self._ask_witnesses()
        del self.samples[name]
        if sample.donor not in self.accused and cross_check.differs(sample, self.exact):
            return self._leave_out(sample.donor)
        return []

    def _leave_out(self, donor: PeerId) -> list[Effect]:
        """What this donor sent is not what others hold: all fragments with pieces of it are fetched again."""
        self.accused.add(donor)
        self.used.discard(donor)
        self.steps.pop(donor, None)
        self.failures[donor] = FAILURES
        for index, incoming in self.incoming.items():
            if donor in incoming.sources.values():
                incoming.forget()
                self.samples = {name: one for name, one in self.samples.items() if name[0] != index}
        return [Log(DonorFailedLine(peer=donor, reason=Reason.DIFFERS)), *self._not_now(donor)]

    def _ask_one(self, donor: PeerId, position: int) -> list[Effect]:
        """The next request for this donor."""
        for incoming in self._in_turn(donor, position):
            offset = incoming.next_offset()
            if offset is not None:
                self._in_flight[donor] += 1
                return [self._request(donor, incoming, offset)]
        return []

    def _ask_ahead(self, donor: PeerId, position: int) -> list[Effect]:
        """Requests for the first pieces of fragments of which nothing is here, while others are on their way."""
        room = FRAGMENTS_AHEAD - sum(asked == donor for asked in self._ahead.values())
        untouched = [one for one in self._in_turn(donor, position) if one.total is None and not one.requested]
        self._ahead |= {one.fragment.index: donor for one in untouched[:room]}
        return [self._request(donor, one, 0) for one in untouched[:room]]

    def _in_turn(self, donor: PeerId, position: int) -> list[Incoming]:
        """The fragments that this donor holds. Donors in different positions begin with different ones."""
        held = [one for _, one in sorted(self.incoming.items()) if self.holders.can_donate(donor, one.fragment)]
        turn = position % len(held) if held else 0
        return held[turn:] + held[:turn]

    def _request(self, donor: PeerId, incoming: Incoming, offset: int) -> Ask:
        incoming.requested.add(offset)
        self.unready.setdefault(donor, False)
        question = Envelope(StateRequest(self.run, incoming.fragment.index, offset, PIECE_BYTES, incoming.retained))
        tag = self.tag(incoming.fragment.index, offset)
        return Ask(tag, donor, question, PIECE_DEADLINE_S, MAX_CHUNK_BYTES)

    def _failed(self, donor: PeerId, reason: str) -> list[Effect]:
        if reason == Reason.NOT_READY:
            self.unready[donor] = True
        if reason == Reason.BUSY:  # it serves enough newcomers: others are asked instead
            self.busy += 1
            return self._not_now(donor)
        self.failures[donor] += 1
        if self.failures[donor] == FAILURES:
            return [Log(DonorFailedLine(peer=donor, reason=reason)), *self._not_now(donor)]
        return self.ask()

    def _not_now(self, donor: PeerId) -> list[Effect]:
        self.donors = [peer for peer in self.donors if peer != donor]
        return self.ask()

"""Fetch fragments' state from several peers at once, piece by piece, for a newcomer or a peer that changes its layers.

`Fetch` is the machine, `Incoming` the state of one fragment as far as it has arrived.

Pieces of one fragment may come from several donors, since their replicas differ only a little and each piece can be
decoded by itself. Digests protect each piece in transit (comm/wire/blobs.py). A donor is not asked again after two
failed requests, but its pieces are kept. Once a fragment is complete, samples of each donor's pieces are compared with
the same bytes of other peers (peers/joining/cross_check.py).

A donor's uplink may be slow, and other newcomers may share it. So a donor is asked for one piece at first, and for one
more at a time after each piece that arrives within SOON_S, as TCP's slow start does. With all pieces requested at once,
three newcomers of a donor at 75 kB/s got every piece after its deadline, and so none at all.
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
from decentral.core.units import KiB, MiB, Seconds
from decentral.peers.joining import cross_check
from decentral.peers.joining.cross_check import MOST_WITNESSES, SAMPLE_BYTES, SAMPLE_DEADLINE_S, WITNESSES, DonorSample

PIECE_BYTES = 256 * KiB
DONORS = 4  # pieces come from at most this many peers at a time, and one more for each fragment that none of them holds
MOST_IN_FLIGHT = 8  # at most this many requests for pieces are open at a donor: 2 MiB
SOON_S = 2.0  # after a piece that arrived within this time, one more piece is requested from its donor at a time
FRAGMENTS_AHEAD = 12  # a donor is asked to encode up to this many fragments early, since it encodes only between steps
# A donor is asked for one more fragment only if it then keeps at most this many bytes encoded for this newcomer, or if
# that fragment is the only one.
ENCODED_BYTES = 128 * MiB
AHEAD_BYTES = 1  # such a request is for this many bytes, so that it takes nothing from a slow uplink
FAILURES = 2
PIECE_DEADLINE_S = 30.0  # a request for a piece fails after this time, so a newcomer must get at least 9 kB/s


@dataclass(slots=True)
class Incoming:
    """One fragment's state while it is being fetched: the pieces that have arrived, and the open requests."""

    fragment: Fragment
    layout: Layout  # the sections that a valid state must have
    retained: bool = False  # True: fetch from the disks of peers that do not hold the fragment; False: from its holders
    total: int | None = None  # bytes of the whole state; None until the first piece arrives
    pieces: dict[int, Blob] = field(default_factory=dict)
    here: int = 0  # number of bytes that have arrived
    requested: set[int] = field(default_factory=set)  # byte offsets of requested pieces that have not arrived
    had_holder: bool = False
    holder_misses: int = 0  # number of searches in a row that found no holder, after an earlier one had found a holder
    step: int = 0
    version: bytes = b""  # version of the piece that arrived last, in a synchronous run
    sources: dict[int, PeerId] = field(default_factory=dict)  # byte offset -> donor of the piece at this offset
    # Donor -> the largest absolute value in its pieces, and the byte offset of the sample that contains this value.
    largest: dict[PeerId, tuple[float, int]] = field(default_factory=dict)
    refetched_for: int = 0  # all pieces were last discarded because another fragment had this learning-rate step
    _from: int = 0  # every piece before this byte offset has arrived or is requested

    def fetch_retained(self, retained: bool) -> None:
        """Set whether to fetch the state from disks of peers that do not hold the fragment, or (False) from holders."""
        self.retained = retained

    def looked_for_holder(self, found: bool) -> None:
        """Record whether a search for donors has found a holder of this fragment."""
        self.had_holder = self.had_holder or found
        self.holder_misses = 0 if found else self.holder_misses + self.had_holder

    def next_offset(self) -> int | None:
        """Return the byte offset of the next piece to request; None if all pieces have arrived or are requested.

        Until the first piece has arrived, the size of the state is unknown, and only offset 0 is returned.
        """
        if self.complete():
            return None
        end = 1 if self.total is None else self.total
        while self._from < end and (self._from in self.pieces or self._from in self.requested):
            self._from += PIECE_BYTES
        return self._from if self._from < end else None

    def request_over(self, offset: int) -> None:
        """Record that the request for this offset was answered or failed; a missing piece is then requested again."""
        self.requested.discard(offset)
        self._from = min(self._from, offset)

    def complete(self) -> bool:
        """Return whether all pieces have arrived."""
        return self.here == self.total

    def fetch_again_for(self, step: int) -> None:
        """Discard all pieces, because the state of another fragment has the newer learning-rate step `step`."""
        self.refetched_for = step
        self.forget()

    def forget(self) -> None:
        """Discard all pieces that have arrived, so that they are requested again."""
        self.pieces.clear()
        self.sources.clear()
        self.largest.clear()
        self.here = self._from = 0

    def take(self, donor: PeerId, chunk: StateChunk, blob: bytes) -> None:
        """Store a donor's piece. When the last piece has arrived, join all pieces into one blob.

        Raises:
            ProtocolError: If the sections of the state or the length of the piece are wrong, the learning-rate step is
                MOST_FOLLOWED or more, or a number is not finite.
        """
        if chunk.layout != self.layout or chunk.total != layout_bytes(self.layout):
            raise ProtocolError(Reason.SHAPE, "the donor's state does not have the sections of this fragment")
        if chunk.step >= MOST_FOLLOWED:
            raise ProtocolError(Reason.NUMBER, f"learning-rate step {chunk.step} must be below {MOST_FOLLOWED}")
        if len(blob) != (length := min(PIECE_BYTES, chunk.total - chunk.offset)):
            raise ProtocolError(Reason.SHAPE, f"the piece has {len(blob)} bytes, but must have {length}")
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
        """Return SAMPLE_BYTES of the donor's state from byte `offset` on, to compare with these witnesses.

        All pieces must have arrived.
        """
        return DonorSample(donor, self.pieces[0][offset : offset + SAMPLE_BYTES], (self.step, self.version), witnesses)

    def hand_over(self) -> Blob:
        """Return the complete state without keeping it here, so that the caller may change it in place.

        Raises:
            AssertionError: If a piece is missing.
        """
        assert self.complete(), "all pieces have arrived"
        return self.pieces.pop(0)


@dataclass(frozen=True, slots=True)
class FetchTag(Tag):
    """The tag of a StateRequest, which tells whether the answer is a donor's piece or a witness's sample."""

    fragment: int
    offset: int  # byte offset in the fragment's state
    sample_of: PeerId | None = None  # the donor whose bytes a witness checks; None: the request is for a piece
    ahead: bool = False  # True: the request is only there so that the donor encodes the fragment early


class StateHolders(Protocol):
    """Interface that tells a fetch which peers have which states; `Join` and `SpanMove` implement it."""

    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        """Return whether this peer has the fragment's state and may be asked for it."""


@dataclass(slots=True)
class Fetch:
    """The state machine that fetches the states of several fragments, piece by piece, from a few donors."""

    run: RunId
    tag: type[FetchTag]  # marks the requests, so that their answers reach their sender: `Join` or `SpanMove`
    chance: Random
    holders: StateHolders = field(repr=False, compare=False)
    synchronous: bool = False  # if True, all pieces of a fragment must have one version
    incoming: dict[int, Incoming] = field(default_factory=dict)  # fragment index -> its state as far as it has arrived
    donors: list[PeerId] = field(default_factory=list)
    used: set[PeerId] = field(default_factory=set)
    steps: dict[PeerId, int] = field(default_factory=dict)
    last_piece_at: Seconds = 0.0
    busy: int = 0  # number of requests that donors refused because they served other newcomers
    failures: Counter[PeerId] = field(default_factory=Counter)
    unready: dict[PeerId, bool] = field(default_factory=dict)  # peer -> whether its last answer was NOT_READY
    accused: set[PeerId] = field(default_factory=set)
    known: Sequence[PeerId] = ()  # peers that may be asked to check donors' samples
    samples: dict[tuple[int, int, PeerId], DonorSample] = field(default_factory=dict)  # keys: (fragment, offset, donor)
    _in_flight: Counter[PeerId] = field(default_factory=Counter)  # donor -> number of unanswered requests for pieces
    _soon: Counter[PeerId] = field(default_factory=Counter)  # donor -> its pieces within SOON_S since its last failure
    _encoders: set[tuple[int, PeerId]] = field(default_factory=set)  # (fragment index, donor asked for this fragment)

    def begin(self, incoming: Iterable[Incoming], now: Seconds) -> None:
        """Set the fragments to fetch; the caller then calls `choose`, which chooses donors, and `ask`."""
        self.incoming, self.last_piece_at = {one.fragment.index: one for one in incoming}, now
        self.samples.clear()
        self._encoders.clear()

    @property
    def step(self) -> int:
        """Return the learning-rate step at which to begin training; 0 if no donor has answered.

        The result is the lower median of the donors' steps, since one donor may lie; the step clock corrects a step
        that is too low (peers/runtime/progress.py). In a synchronous run the highest step is the result.
        """
        steps = sorted(self.steps.values())
        return (steps[-1] if self.synchronous else steps[(len(steps) - 1) // 2]) if steps else 0

    def keep_complete(self) -> None:
        """Stop fetching the fragments that are not complete, and discard their pieces."""
        self.incoming = {index: one for index, one in self.incoming.items() if one.complete()}

    @property
    def complete(self) -> bool:
        """Return whether all pieces have arrived and all samples were compared."""
        return not self.missing() and not self.samples

    def donated(self) -> tuple[Donated, ...]:
        """Return the states of all fragments in order of index, without keeping them; all pieces must have arrived."""
        return tuple((index, one.layout, one.hand_over()) for index, one in sorted(self.incoming.items()))

    def choose(self, known: Sequence[PeerId]) -> None:
        """Choose up to DONORS donors among these peers, and one more for each missing fragment that they do not hold.

        Donors that were chosen before stay. Peers that failed FAILURES times are not chosen, unless a missing fragment
        has no other holder.
        """
        self.known = known
        known = [peer for peer in known if peer not in self.accused]
        willing = [peer for peer in known if self.failures.get(peer, 0) < FAILURES]
        if willing and self._some_have_failed_holders_only(known):
            self.failures.clear()
            willing = list(known)
        kept = [peer for peer in self.donors if peer in willing]
        others = [peer for peer in willing if peer not in kept]
        self.donors = kept + self.chance.sample(others, max(0, min(len(others), DONORS - len(kept))))
        for one in self.missing():
            holders = [peer for peer in willing if self.holders.can_donate(peer, one.fragment)]
            if holders and not {*holders} & {*self.donors}:
                self.donors.append(self.chance.choice(holders))

    def fetch_again(self) -> bool:
        """Discard each fragment whose learning-rate step is lower than another fragment's, so that it is fetched again.

        Donors of the fragment may have reached the higher step by now. A fragment is discarded only once per step.

        Returns:
            Whether at least one fragment was discarded.
        """
        newest = max((one.step for one in self.incoming.values()), default=0)
        old = [one for one in self.incoming.values() if one.step < newest and one.refetched_for < newest]
        for one in old:
            one.fetch_again_for(newest)
        return bool(old)

    def _some_have_failed_holders_only(self, known: Sequence[PeerId]) -> bool:
        """Return whether a missing fragment has holders, but each of them has failed FAILURES times."""
        if max(self.failures.values(), default=0) < FAILURES:
            return False
        held_by = ([peer for peer in known if self.holders.can_donate(peer, one.fragment)] for one in self.missing())
        return any(holders and all(self.failures[peer] >= FAILURES for peer in holders) for holders in held_by)

    def missing(self) -> list[Incoming]:
        """Return the fragments that are not complete."""
        return [one for one in self.incoming.values() if not one.complete()]

    def ask(self) -> list[Effect]:
        """Return requests for the next pieces, a few per donor, and requests in advance (`_ask_ahead`)."""
        effects: list[Effect] = []
        if all(one.next_offset() is None for one in self.incoming.values()):
            return effects  # every piece has arrived or is requested
        for position, donor in [*enumerate(self.donors)] * MOST_IN_FLIGHT:
            if self._in_flight[donor] < min(MOST_IN_FLIGHT, 1 + self._soon[donor]):
                effects += self._ask_one(donor, position)
        return effects + [ask for position, donor in enumerate(self.donors) for ask in self._ask_ahead(donor, position)]

    def handle(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """Handle the answer of a donor or witness, or a failed request, and return the next requests."""
        assert isinstance(event.tag, FetchTag)
        if event.tag.sample_of is not None:
            self.last_piece_at = now if isinstance(event, Answered) else self.last_piece_at
            return self._compare(event, event.tag)
        offset, incoming = event.tag.offset, self.incoming.get(event.tag.fragment)
        if event.tag.ahead:
            return []
        self._in_flight[event.peer] -= 1
        if incoming is None:
            return []  # this fragment is no longer fetched
        incoming.request_over(offset)
        if event.peer in self.accused:
            return self.ask()  # the donor was accused while the request was open: ignore its answer
        if isinstance(event, AskFailed):
            return self._failed(event.peer, event.reason)
        message = event.envelope.message
        if not isinstance(message, StateChunk) or message.offset != offset:
            return self._failed(event.peer, message.reason if isinstance(message, Refused) else "unexpected")
        if self.synchronous:
            if message.step > incoming.step:
                incoming.forget()
            if message.step < incoming.step or (incoming.pieces and message.version != incoming.version):
                return self._not_now(event.peer)  # this donor's state does not match the pieces of other donors
        try:
            incoming.take(event.peer, message, event.envelope.blob)
        except ProtocolError as error:
            return self._failed(event.peer, error.reason)
        self.last_piece_at = now
        self._soon[event.peer] += event.seconds <= SOON_S
        self.steps[event.peer] = max(self.steps.get(event.peer, 0), message.step)
        self.used.add(event.peer)
        self.unready[event.peer] = False
        if incoming.complete():
            self._draw_samples(incoming)
        return [] if self.complete else self.ask() + self._ask_witnesses()

    def _draw_samples(self, incoming: Incoming) -> None:
        """Choose two samples of each donor's pieces of a complete fragment, and the witnesses for each sample.

        A donor is not checked if fewer than WITNESSES other peers hold the fragment, or if as many donors as
        `most_accused` allows were accused before.
        """
        index = incoming.fragment.index
        for donor, (_, peak) in sorted(incoming.largest.items()):
            others = [peer for peer in self.known if peer != donor and peer not in self.accused]
            others = [peer for peer in others if self.holders.can_donate(peer, incoming.fragment)]
            if len(others) < WITNESSES or len(self.accused) >= cross_check.most_accused(self.known):
                continue
            self.chance.shuffle(others)
            others.sort(key=lambda peer: peer not in self.donors)  # donors first: they may have encoded the fragment
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
        """Record a witness's answer. When enough witnesses have answered, accuse the donor if its sample differs."""
        name = (tag.fragment, tag.offset, tag.sample_of or PeerId(""))
        sample = self.samples.get(name)
        if sample is None:
            return []  # the sample is judged already, or its fragment is fetched again
        held = None
        if isinstance(event, Answered) and isinstance(chunk := event.envelope.message, StateChunk):
            comparable = not self.synchronous or (chunk.step, chunk.version) == sample.version
            if len(event.envelope.blob) == len(sample.said) and comparable:
                held = event.envelope.blob
        sample.answered(held)
        if not sample.over:
            return self._ask_witnesses()
        del self.samples[name]
        if sample.donor not in self.accused and cross_check.differs(sample, self.synchronous):
            return self._leave_out(sample.donor)
        return []

    def _leave_out(self, donor: PeerId) -> list[Effect]:
        """Never ask this donor again, because its sample differed, and refetch each fragment with a piece from it."""
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
        """Return a request for the next missing piece that this donor can send; [] if there is no such piece."""
        for incoming in self._in_turn(donor, position):
            offset = incoming.next_offset()
            if offset is not None and self._may_encode(donor, incoming):
                self._encoders.add((incoming.fragment.index, donor))
                self._in_flight[donor] += 1
                return [self._request(donor, incoming, offset)]
        return []

    def _ask_ahead(self, donor: PeerId, position: int) -> list[Effect]:
        """Request a byte of further fragments, so that this donor encodes them in advance; ignore the answers."""
        untouched = [one for one in self._in_turn(donor, position) if one.total is None and not one.requested]
        room = FRAGMENTS_AHEAD - sum((one.fragment.index, donor) in self._encoders for one in untouched)
        asked = {index for index, _ in self._encoders}
        effects: list[Effect] = []
        for one in [one for one in untouched if one.fragment.index not in asked][: max(0, room)]:
            if self._may_encode(donor, one):
                self._encoders.add((one.fragment.index, donor))
                effects.append(self._question(donor, one, 0, ahead=True))
        return effects

    def _may_encode(self, donor: PeerId, wanted: Incoming) -> bool:
        """Return whether this donor may be asked for this fragment, which it then keeps encoded until it has arrived.

        In a synchronous run it always may, since the states of all fragments must be of one step.
        """
        if self.synchronous or (wanted.fragment.index, donor) in self._encoders:
            return True
        encoded = [one for one in self.missing() if (one.fragment.index, donor) in self._encoders]
        if not encoded:
            return True
        return sum(layout_bytes(one.layout) for one in (*encoded, wanted)) <= ENCODED_BYTES

    def _in_turn(self, donor: PeerId, position: int) -> list[Incoming]:
        """Return this donor's fragments, rotated by `position`, so that donors start with different fragments."""
        held = [one for _, one in sorted(self.incoming.items()) if self.holders.can_donate(donor, one.fragment)]
        turn = position % len(held) if held else 0
        return held[turn:] + held[:turn]

    def _request(self, donor: PeerId, incoming: Incoming, offset: int) -> Ask:
        incoming.requested.add(offset)
        self.unready.setdefault(donor, False)
        return self._question(donor, incoming, offset, ahead=False)

    def _question(self, donor: PeerId, incoming: Incoming, offset: int, ahead: bool) -> Ask:
        length = AHEAD_BYTES if ahead else PIECE_BYTES
        question = Envelope(StateRequest(self.run, incoming.fragment.index, offset, length, incoming.retained))
        tag = self.tag(incoming.fragment.index, offset, ahead=ahead)
        return Ask(tag, donor, question, PIECE_DEADLINE_S, MAX_CHUNK_BYTES)

    def _failed(self, donor: PeerId, reason: str) -> list[Effect]:
        if reason == Reason.NOT_READY:
            self.unready[donor] = True
        if reason == Reason.BUSY:  # the donor serves other newcomers, which is not a failure
            self.busy += 1
            return self._not_now(donor)
        self.failures[donor] += 1
        self._soon[donor] = 0
        if self.failures[donor] == FAILURES:
            return [Log(DonorFailedLine(peer=donor, reason=reason)), *self._not_now(donor)]
        return self.ask()

    def _not_now(self, donor: PeerId) -> list[Effect]:
        self.donors = [peer for peer in self.donors if peer != donor]
        return self.ask()

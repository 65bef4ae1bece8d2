"""The donor's side of a join: send a peer's fragments to newcomers, piece by piece. Start at `Donor`.

When a newcomer requests a fragment, the worker thread encodes the fragment's state. The encoded state is called an
export. It is reused for EXPORT_KEPT_S, and for FINISHED_S longer by newcomers that have begun to fetch it, so that a
newcomer with a slow link does not cause the same state to be encoded again and again.

For strangers (peers whose record is not known), at most STRANGER_EXPORTS fragments are encoded at a time, so that
strangers cannot keep the worker busy. A stranger's request for another fragment waits until one of these exports was
fetched completely or has expired.

At most MOST_SERVED newcomers are served at a time, since no piece would arrive before its deadline if many newcomers
shared a slow uplink. While many pieces wait for the uplink (MOST_OWED_S), only one newcomer is admitted in every
PIECE_DEADLINE_S; so a newcomer that never stops requesting pieces cannot keep all others out. If all places are taken,
the newcomer that was admitted first loses its place, and is not admitted again for PLACELESS_S: so newcomers that take
nothing, or never finish, do not keep the places. A newcomer that is not admitted is refused as BUSY.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Effect, Reply
from decentral.core import jobs
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import RetainedExported, RetainedStates
from decentral.core.reasons import Reason
from decentral.core.units import MiB, Seconds
from decentral.peers.joining.fetch import PIECE_DEADLINE_S

MOST_SERVED = 8  # at most this many newcomers are served at a time, since fewer finish sooner and can then serve others
STRANGERS_SERVED = 4  # at most this many newcomers without a known record are served: an attacker may have many ids
STRANGER_EXPORTS = 2  # at most this many fragments are encoded or kept only for peers without a known record
MOST_WAITING = 32  # at most this many requests wait until a fragment is encoded: a quarter of all streams (MAX_STREAMS)
PLACELESS_S = 2 * PIECE_DEADLINE_S  # a newcomer that has lost its place is refused for this long, so that others get it
SERVED_S = 5.0  # a newcomer stays admitted at least this long after its last request or piece
MOST_OWED_S = 2.0  # no newcomer is admitted while the uplink needs longer than this to send all waiting pieces
FP32_BYTES = 4
MOST_OWED = 4 * MiB  # if the uplink's rate is unknown, no newcomer is admitted while more bytes than this wait
EXPORT_KEPT_S = 5.0  # after this time, an encoded state is too old for a newcomer that has not begun to fetch it
FINISHED_BYTES = (
    32 * MiB
)  # up to this many bytes of exports are kept though no newcomer is in the middle of one of them
FINISHED_S = 25.0  # a newcomer that began in time gets this much longer to fetch the rest of an encoded state

ExportName = tuple[int, bool]
"""A fragment's index, and whether the export is the state retained on disk (True) or the state in training (False)."""


@dataclass(slots=True)
class Export:
    """One fragment's encoded state, kept so that several newcomers can fetch it piece by piece."""

    step: int
    layout: Layout
    blob: bytes
    expires_at: Seconds
    version: bytes = bytes(16)  # the fragment's version in a synchronous run; else zeros
    begun: Counter[PeerId] = field(default_factory=Counter)

    def serves(self, newcomer: PeerId, now: Seconds) -> bool:
        """Return whether this newcomer may fetch the export; if it has a part already, it gets FINISHED_S more time."""
        return now < self.expires_at + (FINISHED_S if 0 < self.begun[newcomer] < len(self.blob) else 0.0)

    @property
    def is_finished(self) -> bool:
        """Whether a newcomer has fetched the export completely, and no newcomer has fetched only a part."""
        return bool(self.begun) and all(sent >= len(self.blob) for sent in self.begun.values())

    def is_wanted(self, now: Seconds) -> bool:
        """Return whether any newcomer may still fetch the export; 4 bytes per parameter are freed once none may."""
        return now < self.expires_at or any(self.serves(newcomer, now) for newcomer in self.begun)


class MeasuredUplink(Protocol):
    """Interface that measures the rate of our uplink; `Meter` (comm/wire/meter.py) implements it."""

    def typical_up(self) -> float | None:
        """Return the mean rate at which we send to a peer, in bytes/s; None before the first upload."""


@dataclass(slots=True)
class Donor:
    """The state machine that answers newcomers' StateRequests with pieces of this peer's fragments, or refuses them."""

    run: RunId
    fragments: Sequence[Fragment]
    retained: RetainedStates = ()  # states on disk of fragments that this peer does not hold
    uplink: MeasuredUplink | None = None
    synchronous: bool = False  # if the run is synchronous, only states of the present step may be sent
    exports: dict[ExportName, Export] = field(default_factory=dict)
    # requests that wait until a state is encoded: (number of the request, newcomer, request)
    _waiting: dict[ExportName, list[tuple[int, PeerId, StateRequest]]] = field(default_factory=dict)
    _served: dict[PeerId, Seconds] = field(default_factory=dict)  # until when each newcomer stays admitted
    _owed: float = 0.0  # bytes queued for the uplink at time `_owed_at`
    _owed_at: Seconds = 0.0
    _admitted_at: Seconds = 0.0
    _resting: dict[PeerId, Seconds] = field(default_factory=dict)  # until when newcomers that lost their places wait
    _strangers: set[PeerId] = field(default_factory=set)  # the newcomers in `_served` whose records are not known
    _unknown: set[PeerId] = field(default_factory=set)  # peers without a known record whose requests wait
    _encoding: set[ExportName] = field(default_factory=set)
    _for_strangers: set[ExportName] = field(default_factory=set)

    def asked(
        self, request: int, sender: PeerId, pull: StateRequest, step: int, now: Seconds, known: bool = True
    ) -> list[Effect]:
        """Answer a StateRequest, or keep it until the worker has encoded the fragment.

        Args:
            request: Number of the request, for the reply.
            sender: The newcomer.
            pull: The request: fragment, offset and length in bytes, and whether to send a state retained on disk.
            step: Learning-rate step of the weights in training.
            now: Unix time in seconds.
            known: Whether the newcomer's record is known; if not, the limits for strangers apply.
        """
        if not self._admits(sender, now, known):
            return [_refuse(request, Reason.BUSY)]
        held = (index for index, _ in self.retained) if pull.kept else (fragment.index for fragment in self.fragments)
        if pull.fragment not in held:
            return [_refuse(request, Reason.FRAGMENT)]
        name = (pull.fragment, pull.kept)
        export = self.exports.get(name)
        outdated = self.synchronous and export is not None and not pull.kept and export.step != step
        if export is not None and export.serves(sender, now) and not outdated:
            return [self._piece(request, sender, pull, export, now), *self._encode()]
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            return [_refuse(request, Reason.BUSY)]
        self._waiting.setdefault(name, []).append((request, sender, pull))
        if not known:
            self._unknown.add(sender)
        return self._encode()

    def exported(
        self, done: jobs.StateExported | RetainedExported, step: int, now: Seconds, version: bytes = bytes(16)
    ) -> list[Effect]:
        """Keep a state that the worker has encoded, and answer the requests that wait for it.

        Args:
            done: The worker's result. If its layout is empty, the state does not exist, and the requests are refused.
            step: Learning-rate step of the weights in training.
            now: Unix time in seconds.
            version: The fragment's version in a synchronous run.
        """
        name = (done.fragment, isinstance(done, RetainedExported))
        waiting = self._waiting.pop(name, [])
        self._encoding.discard(name)
        if not done.layout:
            self._for_strangers.discard(name)
            return [_refuse(request, Reason.FRAGMENT) for request, _, _ in waiting]
        own_step = done.step if isinstance(done, RetainedExported) else step
        export = self.exports[name] = Export(own_step, done.layout, done.blob, now + EXPORT_KEPT_S, version)
        self._forget_finished()
        return [self._piece(request, sender, pull, export, now) for request, sender, pull in waiting] + self._encode()

    def serve_only(self, fragments: Sequence[Fragment]) -> None:
        """Serve only these fragments from now on, because this peer now holds other layers."""
        self.fragments = fragments

    def retain(self, states: RetainedStates) -> None:
        """From now on, send these states, which are retained on disk, to newcomers that request them."""
        self.retained = states

    def forget_old(self, now: Seconds) -> list[Effect]:
        """Drop the encoded states that have expired, and return jobs to encode states that newcomers wait for.

        A state for strangers counts for FINISHED_S after its time even if nobody fetches it. States that only strangers
        wait for are encoded while fewer than STRANGER_EXPORTS states are kept for strangers.
        """
        self.exports = {
            name: one
            for name, one in self.exports.items()
            if (now < one.expires_at + FINISHED_S if name in self._for_strangers else one.is_wanted(now))
        }
        self._for_strangers &= self.exports.keys() | self._encoding
        return self._encode() if self._waiting else []

    def _forget_finished(self) -> None:
        """Drop the oldest exports that were fetched completely, while exports take more than FINISHED_BYTES."""
        size = sum(len(one.blob) for one in self.exports.values())
        for name, one in list(self.exports.items()):
            if size > FINISHED_BYTES and one.is_finished:
                size -= len(self.exports.pop(name).blob)

    def recognise(self, knows: Callable[[PeerId], bool]) -> list[Effect]:
        """End the limits for strangers that we know by now, and return jobs to encode the fragments they requested.

        `knows` returns whether a peer's record is known.
        """
        self._unknown = {peer for peer in self._unknown if not knows(peer)}
        return self._encode()

    def _encode(self) -> list[Effect]:
        """Return jobs to encode the requested fragments that are not being encoded yet.

        At most STRANGER_EXPORTS fragments that only strangers have requested are encoded or kept at a time.
        """
        effects: list[Effect] = []
        for name, waiting in self._waiting.items():
            by_strangers = all(sender in self._unknown for _, sender, _ in waiting)
            if name in self._encoding or (by_strangers and len(self._for_strangers - {name}) >= STRANGER_EXPORTS):
                continue
            self._encoding.add(name)
            self._for_strangers = self._for_strangers | {name} if by_strangers else self._for_strangers - {name}
            fragment, kept = name
            effects.append(jobs.ExportRetained(fragment) if kept else jobs.ExportState(fragment))
        self._unknown &= {sender for waiting in self._waiting.values() for _, sender, _ in waiting}
        return effects

    def _admits(self, newcomer: PeerId, now: Seconds, known: bool) -> bool:
        """Admit this newcomer unless a limit is reached, and return whether it may be served."""
        if known:
            self._strangers.discard(newcomer)
            self._unknown.discard(newcomer)
        if newcomer not in self._served:
            if len(self._served) >= MOST_SERVED or not known:
                waiting = {sender for questions in self._waiting.values() for _, sender, _ in questions}
                self._served = {peer: until for peer, until in self._served.items() if now < until or peer in waiting}
                self._strangers &= self._served.keys()
            turn_over = now >= self._admitted_at + PIECE_DEADLINE_S
            if now < self._resting.get(newcomer, now) or (not turn_over and self._owes_much(now)):
                return False
            full = len(self._served) >= MOST_SERVED or (not known and len(self._strangers) >= STRANGERS_SERVED)
            if full and not (turn_over and self._end_turn(now, known)):
                return False
            if not known:
                self._strangers.add(newcomer)
            self._admitted_at = now
        self._served[newcomer] = max(self._served.get(newcomer, 0.0), now + SERVED_S)
        return True

    def _end_turn(self, now: Seconds, known: bool) -> bool:
        """Take the place of the newcomer that was admitted first, and return whether there is a place now.

        A stranger (`known` is False) gets a stranger's place only.
        """
        first = next((peer for peer in self._served if known or peer in self._strangers), None)
        if first is None:
            return False
        del self._served[first]
        self._strangers.discard(first)
        self._resting = {peer: until for peer, until in self._resting.items() if now < until} | {
            first: now + PLACELESS_S
        }
        return True

    def _owes_much(self, now: Seconds) -> bool:
        """Return whether our uplink must still send so many pieces that no further newcomer may be admitted."""
        sizes = {(one.index, False): FP32_BYTES * one.parameters for one in self.fragments}
        asked = ((pull.length, sizes.get(name)) for name, some in self._waiting.items() for _, _, pull in some)
        owed = self._still_owed(now) + sum(min(length, size or length) for length, size in asked)
        measured = self._measured()
        return owed > (MOST_OWED if measured is None else MOST_OWED_S * measured)

    def _still_owed(self, now: Seconds) -> float:
        """Return an estimate of the bytes of pieces that our uplink has not sent yet."""
        return max(0.0, self._owed - (now - self._owed_at) * self._rate())

    def _rate(self) -> float:
        """Return the rate of our uplink in bytes/s; 140 kB/s if it was not measured."""
        return self._measured() or MOST_OWED / PIECE_DEADLINE_S

    def _measured(self) -> float | None:
        return self.uplink.typical_up() if self.uplink else None

    def _piece(self, request: int, newcomer: PeerId, pull: StateRequest, export: Export, now: Seconds) -> Reply:
        piece = export.blob[pull.offset : pull.offset + pull.length]
        export.begun[newcomer] += len(piece)
        self._owed, self._owed_at = self._still_owed(now) + len(piece), now
        if newcomer in self._served:
            self._served[newcomer] = now + SERVED_S + self._owed / self._rate()
        if export.begun[newcomer] >= len(export.blob):  # an export that was sent completely is not kept for strangers
            self._for_strangers.discard((pull.fragment, pull.kept))
        if not piece:
            return _refuse(request, Reason.OFFSET)
        size, step, layout = len(export.blob), export.step, export.layout
        chunk = StateChunk(self.run, pull.fragment, pull.offset, size, step, layout, export.version)
        return Reply(request, Envelope(chunk, piece))


def _refuse(request: int, reason: Reason) -> Reply:
    return Reply(request, Envelope(Refused(reason)))

"""The other side of a join: a donor's fragments, given to newcomers piece by piece.

The worker encodes a fragment's state when a newcomer asks for it. The export is reused for EXPORT_KEPT_S; one
who has begun to fetch it may take FINISHED_S more, so that a large state on a slow link is not encoded again and again.
For peers without a record STRANGER_EXPORTS fragments at a time are encoded; further questions wait until one of these
was taken whole, or is forgotten. So strangers do not keep the worker encoding, and there is never more than one copy of
the fragments that this peer holds.
MOST_SERVED newcomers at a time are served; the others are told that the donor is busy, and ask elsewhere or later.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Refused, StateChunk, StateRequest
from decentral.comm.wire.transport import Effect, Reply
from decentral.core import jobs
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import RetainedExported, RetainedStates
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MOST_SERVED = 8  # newcomers at a time: eight that are done soon are donors themselves
STRANGERS_SERVED = 4  # of them, those whose record we do not know: they may have any number of names
STRANGER_EXPORTS = 2  # fragments that are encoded, or kept, because of strangers alone
MOST_WAITING = 32  # questions that wait for an export: a quarter of those answered at once (comm/net/fair_shares.py)
SERVED_S = 5.0  # time after its last request until a newcomer's place goes to another one
EXPORT_KEPT_S = 5.0  # any longer, and newcomers would start too far behind the swarm
FINISHED_S = 25.0

ExportName = tuple[int, bool]
"""A fragment, and whether the export is its retained state on the disk (else it is its live state)."""


@dataclass(slots=True)
class Export:
    step: int  # learning-rate step of this state
    layout: Layout
    blob: bytes
    expires_at: Seconds
    version: bytes = bytes(16)
    begun: Counter[PeerId] = field(default_factory=Counter)  # bytes that newcomers have of it

    def serves(self, newcomer: PeerId, now: Seconds) -> bool:
        return now < self.expires_at + (FINISHED_S if newcomer in self.begun else 0.0)


@dataclass(slots=True)
class Donor:
    """Answers every StateRequest with a piece, at once or when the worker has encoded it, or with a refusal."""

    run: RunId
    fragments: Sequence[Fragment]  # fragments that this peer holds
    retained: RetainedStates = ()  # states on the disk of fragments that this peer has given up
    exact: bool = False  # whether an export of an earlier step than the present one is useless (synchronous runs)
    exports: dict[ExportName, Export] = field(default_factory=dict)
    _waiting: dict[ExportName, list[tuple[int, PeerId, StateRequest]]] = field(default_factory=dict)
    _served: dict[PeerId, Seconds] = field(default_factory=dict)  # when each newcomer has last asked
    _strangers: set[PeerId] = field(default_factory=set)  # of those that are served
    _unknown: set[PeerId] = field(default_factory=set)  # those that wait for an export, and have no record yet
    _encoding: set[ExportName] = field(default_factory=set)
    _for_strangers: set[ExportName] = field(default_factory=set)  # what is encoded or kept because of strangers alone

    def asked(
        self, request: int, sender: PeerId, pull: StateRequest, step: int, now: Seconds, known: bool = True
    ) -> list[Effect]:
        """`step`: the learning-rate step of the live weights now. `known`: whether we know the newcomer's record."""
        if not self._admits(sender, now, known):
            return [_refuse(request, Reason.BUSY)]
        held = (index for index, _ in self.retained) if pull.kept else (fragment.index for fragment in self.fragments)
        if pull.fragment not in held:
            return [_refuse(request, Reason.FRAGMENT)]
        name = (pull.fragment, pull.kept)
        export = self.exports.get(name)
        outdated = self.exact and export is not None and not pull.kept and export.step != step
        if export is not None and export.serves(sender, now) and not outdated:
            return [self._piece(request, sender, pull, export), *self._encode()]
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            return [_refuse(request, Reason.BUSY)]
        self._waiting.setdefault(name, []).append((request, sender, pull))
        if not known:
            self._unknown.add(sender)
        return self._encode()

    def exported(
        self, done: jobs.StateExported | RetainedExported, step: int, now: Seconds, version: bytes = bytes(16)
    ) -> list[Effect]:
        """The worker has encoded a state, or has none: then its layout is empty."""
        name = (done.fragment, isinstance(done, RetainedExported))
        waiting = self._waiting.pop(name, [])
        self._encoding.discard(name)
        if not done.layout:
            self._for_strangers.discard(name)
            return [_refuse(request, Reason.FRAGMENT) for request, _, _ in waiting]
        own_step = done.step if isinstance(done, RetainedExported) else step
        export = self.exports[name] = Export(own_step, done.layout, done.blob, now + EXPORT_KEPT_S, version)
        return [self._piece(request, sender, pull, export) for request, sender, pull in waiting] + self._encode()

    def hold(self, fragments: Sequence[Fragment]) -> None:
        """From now on this peer holds these fragments."""
        self.fragments = fragments

    def changed(self, event: jobs.SpanChanged) -> None:
        """The training thread has changed the layers, or could not: the disk may retain other states."""
        if event.accepted:
            self.retained = event.kept

    def forget_old(self, now: Seconds) -> list[Effect]:
        """Forgets the exports that nobody may want any more, and has those encoded that have waited for it."""
        self.exports = {name: one for name, one in self.exports.items() if now < one.expires_at + FINISHED_S}
        self._for_strangers &= self.exports.keys() | self._encoding
        return self._encode() if self._waiting else []

    def recognise(self, knows: Callable[[PeerId], bool]) -> list[Effect]:
        """Records have come: some of those that wait are no strangers any more."""
        self._unknown = {peer for peer in self._unknown if not knows(peer)}
        return self._encode()

    def _encode(self) -> list[Effect]:
        """What the worker encodes now of the fragments that newcomers wait for."""
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
        """Whether this newcomer is one of those that are served."""
        if known:
            self._strangers.discard(newcomer)
            self._unknown.discard(newcomer)
        if newcomer not in self._served:
            if len(self._served) >= MOST_SERVED or not known:
                self._served = {peer: at for peer, at in self._served.items() if now < at + SERVED_S}
                self._strangers &= self._served.keys()
            if len(self._served) >= MOST_SERVED or (not known and len(self._strangers) >= STRANGERS_SERVED):
                return False
            if not known:
                self._strangers.add(newcomer)
        self._served[newcomer] = now
        return True

    def _piece(self, request: int, newcomer: PeerId, pull: StateRequest, export: Export) -> Reply:
        piece = export.blob[pull.offset : pull.offset + pull.length]
        export.begun[newcomer] += len(piece)
        if export.begun[newcomer] >= len(export.blob):  # a stranger that takes all of it may have the next one
            self._for_strangers.discard((pull.fragment, pull.kept))
        if not piece:
            return _refuse(request, Reason.OFFSET)
        size, step, layout = len(export.blob), export.step, export.layout
        chunk = StateChunk(self.run, pull.fragment, pull.offset, size, step, layout, export.version)
        return Reply(request, Envelope(chunk, piece))


def _refuse(request: int, reason: Reason) -> Reply:
    return Reply(request, Envelope(Refused(reason)))

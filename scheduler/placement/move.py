"""A peer changes its layers while it trains, and no layer loses its last holder by that.

    IDLE --begin--> FETCHING --state here--> LEASING --granted--> DRAINING --nothing under way--> SWITCHING --> IDLE

The state of the new layers is fetched while the old ones serve on. For each layer that is given up, `replicas` other
holders have to grant a replica lease (`GrantedLeases`). Of two peers that want to give up the same layer the lower id
yields: it stays, and grants its lease. Then no new stage executions are taken until those under way are done, and the
training thread changes the layers between two optimizer steps.

Whatever fails before that leaves the old span serving. The state of what was given up is retained on the disk
(engine/checkpoint.py), in case its last holder is lost.

A replica lease is a holder's promise to another holder that it goes on holding a fragment, for LEASE_S. A peer gives a
fragment up only with the leases of enough other holders, since a record in the DHT may be old and a lease is not. A
peer that has granted a lease keeps the fragment until the lease ends, or is given back.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, LeaseRequest, Message, Refused
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply, Tag
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import ChangeSpan, SpanChanged
from decentral.core.journal.events import MoveLine
from decentral.core.journal.field_kinds import Outcome
from decentral.core.machine import Log, Woke
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.fetch import Fetch, FetchTag, Incoming

MOVE_RETRY_S = 2.0
FETCH_STALLED_S = 20.0  # time without a new piece after which the move fails
LEASE_REQUEST_S = 5.0  # deadline of a lease request
DRAIN_MOST_S = 30.0  # longest wait for the stage executions under way
SPARE_REQUESTS = 4  # lease requests for a layer beyond the leases that it needs
LEASE_S = 90.0  # more than a move takes after it was granted a lease
MOST_LEASES = 64  # of one fragment at a time; there are not so many moves


class MovePhase(Enum):
    """A move goes from each phase to the next one, or back to IDLE."""

    IDLE = auto()
    FETCHING = auto()
    LEASING = auto()
    DRAINING = auto()
    SWITCHING = auto()


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What fits into this peer's device. `layouts`: the sections of each fragment's state, for the whole model."""

    needs: MemoryNeeds
    memory_bytes: int
    layouts: tuple[Layout, ...]

    def fits(self, begin: int, end: int) -> bool:
        """A peer with a part of the model never moves to the whole model, which would train without routes."""
        return 0 < end - begin < len(self.needs.fragments) and self.needs.span_bytes(begin, end) <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class HoldSpan:
    """Effect for the node: from now on this peer holds these fragments, and takes stage executions for them."""

    fragments: range


@dataclass(frozen=True, slots=True)
class Drained:
    """Event: no stage execution is under way at this peer any more."""


MoveEffect = Effect | HoldSpan


class SpanView(Protocol):
    """What a move needs to know of the swarm; peers/runtime/span_manager.py has it from the roster.

    The other peers that hold a fragment and train, those of them with a part of the model, those that retain its newest
    state if that is newer than the one that we retain, and whether we retain one ourselves.
    """

    def holders(self, fragment: int) -> Sequence[PeerId]: ...
    def part_holders(self, fragment: int) -> Sequence[PeerId]: ...
    def retainers(self, fragment: int) -> Sequence[PeerId]: ...
    def retains(self, fragment: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class MoveTag(FetchTag):
    """StateRequest for a fragment of the new span."""


@dataclass(frozen=True, slots=True)
class LeaseTag(Tag):
    """LeaseRequest for a fragment that we want to give up. Answers to an earlier round `number` count for nothing."""

    fragment: int
    number: int


@dataclass(frozen=True, slots=True)
class LeaseOverTag(Tag):
    """LeaseRequest that gives a lease back. Nobody waits for the answer."""


@dataclass(slots=True)
class GrantedLeases:
    """The leases that this peer has granted to others."""

    until: dict[int, dict[PeerId, Seconds]] = field(
        default_factory=dict
    )  # by fragment, then by the peer with the lease

    rests: dict[tuple[int, PeerId], Seconds] = field(default_factory=dict)  # until then the peer gets no other lease

    def grant(self, fragment: int, peer: PeerId, now: Seconds) -> bool:
        """Whether the peer has a lease now. It binds us for LEASE_S, or until it is given back, and then the same peer
        gets no other one for as long as it had this: so no peer binds us for more than half of the time."""
        self._forget(now)
        leases = self.until.setdefault(fragment, {})
        if peer in leases:
            return True
        if now < self.rests.get((fragment, peer), 0.0) or len(leases) >= MOST_LEASES:
            return False
        leases[peer], self.rests[fragment, peer] = now + LEASE_S, now + 2 * LEASE_S
        return True

    def end(self, fragment: int, peer: PeerId, now: Seconds) -> None:
        until = self.until.get(fragment, {}).pop(peer, None)
        if until is not None and now < until:
            self.rests[fragment, peer] = 2 * now - (until - LEASE_S)

    def _forget(self, now: Seconds) -> None:
        """Forgets what is over."""
        self.rests = {name: until for name, until in self.rests.items() if now < until}
        unexpired = {index: {peer: at for peer, at in of.items() if now < at} for index, of in self.until.items()}
        self.until = {index: of for index, of in unexpired.items() if of}

    def bind(self, fragment: int, holders: Collection[PeerId], now: Seconds) -> bool:
        """Whether one of the present holders has an unexpired lease. Expired ones are forgotten."""
        unexpired = {peer: until for peer, until in self.until.pop(fragment, {}).items() if now < until}
        if unexpired:
            self.until[fragment] = unexpired
        return any(peer in holders for peer in unexpired)


@dataclass(slots=True)
class LeaseRequests:
    """The leases that this peer has asked for, for the move under way."""

    number: int = 0  # number of the present round of requests
    unanswered: int = 0
    granted: dict[int, list[PeerId]] = field(default_factory=dict)  # by fragment

    def begin(self, fragments: Iterable[int]) -> None:
        self.number += 1
        self.granted = {index: [] for index in fragments}

    def answered(self, fragment: int, granted_by: PeerId | None) -> None:
        self.unanswered -= 1
        if granted_by is not None:
            self.granted[fragment].append(granted_by)


@dataclass(slots=True)
class SpanMove:
    run: RunId
    own: PeerId
    budget: MemoryBudget
    view: SpanView
    chance: Random
    replicas: int  # other holders that a layer must keep when we give it up
    held: range  # fragments
    phase: MovePhase = MovePhase.IDLE
    target: range = range(0)
    why: str = ""
    wake_at: Seconds | None = None
    fetch: Fetch = field(init=False)
    granted: GrantedLeases = field(default_factory=GrantedLeases)
    requests: LeaseRequests = field(default_factory=LeaseRequests)
    rest_until: Seconds = 0.0  # end of the pause after a move that failed
    _began_at: Seconds = 0.0
    _drain_until: Seconds = 0.0

    def __post_init__(self) -> None:
        self.fetch = self._new_fetch()

    @property
    def drains(self) -> bool:
        """Whether no new stage executions should be taken."""
        return self.phase in (MovePhase.DRAINING, MovePhase.SWITCHING)

    @property
    def needed(self) -> int:
        """Other holders that each given-up layer must keep. To recover a lost layer, which stops all, one is enough."""
        return 1 if self.why == "lost" else self.replicas

    @property
    def lost(self) -> list[int]:
        """Fragments that the move under way gives up."""
        return [] if self.phase is MovePhase.IDLE else [index for index in self.held if index not in self.target]

    def begin(self, target: range, why: str, now: Seconds, may_initialise: bool = False) -> list[MoveEffect]:
        """Begins a move to these fragments, unless one is under way or this peer holds them already.

        `may_initialise`: a fragment that nobody holds or retains starts from its initial weights; else the move fails.
        """
        if self.phase is not MovePhase.IDLE or target == self.held:
            return []
        self._enter(MovePhase.FETCHING)
        self.target, self.why, self._began_at = target, why, now
        if not self.budget.fits(target.start, target.stop):
            return self._fail(Reason.MEMORY, now)
        if any(self.granted.bind(index, set(self.view.holders(index)), now) for index in self.lost):
            return self._fail(Reason.PROMISED, now)
        if any(len(self._keepers(index)) < self.needed for index in self.lost):
            return self._fail(Reason.NEEDED, now)  # before anything is fetched in vain
        self.fetch = self._new_fetch()
        incoming = {index: self._incoming(index) for index in target if index not in self.held}
        if not may_initialise and any(one is None and not self.view.retains(index) for index, one in incoming.items()):
            return self._fail(Reason.DONORS, now)
        self.fetch.begin((one for one in incoming.values() if one is not None), now)
        return self._review(now)

    def redirect(self, target: range, now: Seconds) -> list[MoveEffect]:
        """Gives up a move to another target, unless the training thread changes the layers already."""
        if self.phase in (MovePhase.IDLE, MovePhase.SWITCHING) or self.target == target:
            return []
        return self._fail(Reason.REPLANNED, now)

    def handle(self, event: Event | Drained, now: Seconds) -> list[MoveEffect]:
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._review(now)
            case Answered(tag=MoveTag()) | AskFailed(tag=MoveTag()) if self.phase is MovePhase.FETCHING:
                effects = self.fetch.handle(event, now)
                return [*effects, *(self._review(now) if self.fetch.complete else ())]
            case Answered(tag=LeaseTag() as tag) | AskFailed(tag=LeaseTag() as tag) if self._awaits(tag):
                granted = isinstance(event, Answered) and isinstance(event.envelope.message, Done)
                self.requests.answered(tag.fragment, event.peer if granted else None)
                return [] if self.requests.unanswered else self._drain(now)
            case Asked(request, sender, Envelope(LeaseRequest(fragment=index, over=True))):
                self.granted.end(index, sender, now)
                return [_reply(request, Done())]
            case Asked(request, sender, Envelope(LeaseRequest(fragment=index))):
                return self._grant(request, sender, index, now)
            case Drained() if self.phase is MovePhase.DRAINING and self._lessors_are_gone():
                return self._fail(Reason.NEEDED, now)
            case Drained() if self.phase is MovePhase.DRAINING:
                self._enter(MovePhase.SWITCHING)
                self.wake_at = None
                first, last = self.budget.needs.span(self.target.start, self.target.stop)
                return [ChangeSpan(first, last, self.fetch.donated(), self.fetch.step)]
            case SpanChanged(accepted, reason) if self.phase is MovePhase.SWITCHING:
                if not accepted:
                    return self._fail(reason, now)
                line, self.held = self._line("done", "", now), self.target
                return self._end(line)
        return []

    # The move under way

    def _enter(self, phase: MovePhase) -> None:
        ends = phase is MovePhase.IDLE and self.phase is not MovePhase.IDLE
        assert ends or phase.value == self.phase.value + 1, (
            f"a span move cannot go from {self.phase.name} to {phase.name}"
        )
        self.phase = phase

    def _review(self, now: Seconds) -> list[MoveEffect]:
        self.wake_at = now + MOVE_RETRY_S
        if self.phase is MovePhase.DRAINING and now >= self._drain_until:
            return self._fail(Reason.LEGS, now)
        if self.phase is MovePhase.DRAINING and self._lessors_are_gone():
            return self._fail(Reason.NEEDED, now)  # while we drain, nobody else serves these layers
        if self.phase is not MovePhase.FETCHING:
            return []
        if self.fetch.complete:
            return self._request_leases(now)
        if now > self.fetch.last_piece_at + FETCH_STALLED_S:
            return self._fail(Reason.DONORS, now)
        self.fetch.choose(sorted({peer for index in self.fetch.incoming for peer in self._donors(index)}))
        if not self.fetch.donors:
            self.fetch.failures.clear()
        return [*self.fetch.ask()]

    def _request_leases(self, now: Seconds) -> list[MoveEffect]:
        self._enter(MovePhase.LEASING)
        self.requests.begin(self.lost)
        asks: list[MoveEffect] = []
        for index in self.lost:
            holders = list(self._keepers(index))
            tag, question = LeaseTag(index, self.requests.number), Envelope(LeaseRequest(self.run, index))
            asked = self.chance.sample(holders, min(SPARE_REQUESTS + self.needed, len(holders)))
            asks += [Ask(tag, peer, question, LEASE_REQUEST_S) for peer in asked]
        self.requests.unanswered = len(asks)
        return asks or self._drain(now)

    def _awaits(self, tag: LeaseTag) -> bool:
        return self.phase is MovePhase.LEASING and tag.number == self.requests.number

    def _drain(self, now: Seconds) -> list[MoveEffect]:
        """Begins to drain, if enough leases were granted."""
        if any(len(self.requests.granted[index]) < self.needed for index in self.lost):
            return self._fail(Reason.NEEDED, now)
        self._enter(MovePhase.DRAINING)
        self._drain_until = now + DRAIN_MOST_S
        self.wake_at = now + MOVE_RETRY_S
        return []

    def _keepers(self, index: int) -> Sequence[PeerId]:
        """The other holders whose leases count. Who takes layers from whole-model peers must not leave them others."""
        return self.view.part_holders(index) if self.why == "relief" else self.view.holders(index)

    def _lessors_are_gone(self) -> bool:
        """Whether too few of the peers that granted a lease still hold what we give up."""
        held = {index: set(self._keepers(index)) for index in self.lost}
        return any(len(held[index].intersection(self.requests.granted[index])) < self.needed for index in self.lost)

    def _fail(self, reason: str, now: Seconds) -> list[MoveEffect]:
        self.rest_until = now + MOVE_RETRY_S * (1 + self.chance.random())
        return self._end(self._line("failed", reason, now))

    def _end(self, line: Log) -> list[MoveEffect]:
        """Gives the leases back, and forgets what was fetched."""
        granted, self.requests.granted = self.requests.granted, {}
        self._enter(MovePhase.IDLE)
        self.target, self.wake_at, self.fetch = range(0), None, self._new_fetch()
        over = [
            Ask(LeaseOverTag(), peer, Envelope(LeaseRequest(self.run, index, over=True)), LEASE_REQUEST_S)
            for index, peers in granted.items()
            for peer in peers
        ]
        return [line, HoldSpan(self.held), *over]

    def _line(self, outcome: Outcome, reason: str, now: Seconds) -> Log:
        first, last = self.budget.needs.span(self.target.start, self.target.stop)
        donors, seconds = tuple(sorted(self.fetch.used)), round(now - self._began_at, 3)
        line = MoveLine(
            outcome=outcome, reason=reason, why=self.why, first=first, last=last, donors=donors, seconds=seconds
        )
        return Log(line)

    def _grant(self, request: int, sender: PeerId, index: int, now: Seconds) -> list[MoveEffect]:
        """Answers a lease request. If we are about to give up the same fragment, the lower of the two ids yields.

        Only a holder of the fragment, by its record, gives it up, and only a lease that is granted ends our own move.
        """
        if index not in self.held:
            return [_reply(request, Refused(Reason.FRAGMENT))]
        if sender not in self.view.holders(index):
            return [_reply(request, Refused(Reason.SPAN))]
        gives_it_up = index in self.lost
        if gives_it_up and (self.phase is MovePhase.SWITCHING or self.own > sender):
            return [_reply(request, Refused(Reason.MOVING))]
        if not self.granted.grant(index, sender, now):
            return [_reply(request, Refused(Reason.BUSY))]
        effects = self._fail(Reason.YIELDED, now) if gives_it_up else []
        return [*effects, _reply(request, Done())]

    def _new_fetch(self) -> Fetch:
        return Fetch(self.run, MoveTag, self.chance, self)

    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        return peer in self._donors(fragment.index)

    def _incoming(self, index: int) -> Incoming | None:
        """An empty Incoming for a fragment; None if no other peer has it, or none has a newer state than our disk."""
        fragment, layout = self.budget.needs.fragments[index], self.budget.layouts[index]
        held = bool(self.view.holders(index))
        return Incoming(fragment, layout, not held) if held or self.view.retainers(index) else None

    def _donors(self, index: int) -> Sequence[PeerId]:
        """The holders of a fragment, or the peers that retain its newest state if we fetch a retained one."""
        incoming = self.fetch.incoming.get(index)
        return self.view.retainers(index) if incoming is not None and incoming.retained else self.view.holders(index)


def _reply(request: int, message: Message) -> Reply:
    return Reply(request, Envelope(message))

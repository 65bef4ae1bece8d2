"""Change a peer's layers while it trains, so that no layer loses its last holder. Start at `SpanMove`.

    IDLE --begin--> FETCHING --state here--> LEASING --granted--> DRAINING --nothing under way--> SWITCHING --> IDLE

The peer fetches the state of the new layers while it still serves the old layers. Then it needs a replica lease from
other holders of each layer that it gives up: from one, or from `replicas` in a move for relief. With its leases, the
peer takes no new stage executions and waits until the running ones have finished. Then the training thread changes the
layers between two optimizer steps. If an earlier part of the move fails, the peer keeps serving its old layers. The
state of given-up layers stays on the disk (engine/checkpoint.py), in case their last holder is lost.

A **replica lease** is a holder's promise to keep a fragment for LEASE_S, or until the lease is given back. A move needs
leases because a record in the DHT may be out of date. If two peers want to give up the same layer, the peer with the
lower id yields: it abandons its move and grants the lease.

In a move by a plan, a peer waits up to LEASE_WAIT_S for the peers to which the plan gives its layers (takers). Most
grant a lease as soon as they hold the layer. If two single holders exchange layers, each would wait for the other. So a
taker that has fetched the layer, and waits for leases itself, grants a lease, too. It moves after the other peer.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
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

MOVE_RETRY_S = 2.0  # a running move is reviewed at this interval, and a failed move is not repeated sooner
FETCH_STALLED_S = 20.0  # a move fails if no piece of state arrives for this long
LEASE_REQUEST_S = 5.0
# After this, a move by a plan, or on which others rely, or to an unheld layer gives micro-batches up; any other fails.
DRAIN_MOST_S = 30.0
LEASE_WAIT_S = 50.0  # a move by a plan waits this long for leases; longer while another peer relies on the move
SPARE_REQUESTS = 4  # for each layer, this many more leases are requested than needed, as some peers may refuse
LEASE_S = 90.0  # a lease ends by itself after this time, which is longer than the rest of a move takes
MOST_LEASES = 64  # a peer grants at most this many leases of a fragment at a time; fewer moves overlap in practice


class MovePhase(Enum):
    """The phases of a move. Each phase leads to the next phase, or back to IDLE."""

    IDLE = auto()
    FETCHING = auto()
    LEASING = auto()
    DRAINING = auto()
    SWITCHING = auto()


class MoveCause(StrEnum):
    """The reason why a peer changes its layers; the journal records the value as `why`."""

    RECOVERY = "lost"  # some layers have lost their last holder (recover.py)
    RELIEF = "relief"  # only peers with the whole model hold some layers (recover.py)
    PLAN = "plan"  # the adopted plan gives this peer other layers (plans.py)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of this peer's device, and the memory that each fragment of the model needs."""

    needs: MemoryNeeds
    memory_bytes: int
    layouts: tuple[Layout, ...]  # for each fragment of the model: the arrays of its state

    def fits(self, begin: int, end: int) -> bool:
        """Return whether fragments [begin, end) fit into memory and are not the whole model, to which no peer moves."""
        return 0 < end - begin < len(self.needs.fragments) and self.needs.span_bytes(begin, end) <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class UseSpan:
    """Effect: serve stage executions for these fragments: the new span after a move, the old span if it failed."""

    fragments: range


@dataclass(frozen=True, slots=True)
class Drained:
    """Event: no stage execution is under way at this peer."""


MoveEffect = Effect | UseSpan


class SpanView(Protocol):
    """Interface that tells a move which peers have a fragment; peers/runtime/span_manager.py implements it."""

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """Return the other peers that train and hold a fragment."""

    def takers(self, fragment: int) -> Sequence[PeerId]:
        """Return the other peers that train and should hold a fragment by the adopted plan."""

    def servers(self, fragment: int, parts_only: bool = False) -> Sequence[PeerId]:
        """Return the `holders` that compute for others; with `parts_only`, those without the whole model."""

    def retainers(self, fragment: int) -> Sequence[PeerId]:
        """Return the peers whose disks have a fragment's newest state; [] if the state on our own disk is as new."""

    def retains(self, fragment: int) -> bool:
        """Return whether our own disk has a state of a fragment that we do not hold."""


@dataclass(frozen=True, slots=True)
class MoveTag(FetchTag):
    """The tag of a StateRequest that fetches the state of a fragment of the new span."""


@dataclass(frozen=True, slots=True)
class LeaseTag(Tag):
    """The tag of a LeaseRequest for a fragment that we want to give up."""

    fragment: int
    number: int  # round of requests; answers to earlier rounds are ignored


@dataclass(frozen=True, slots=True)
class LeaseOverTag(Tag):
    """The tag of a LeaseRequest that gives a lease back; its answer is ignored."""


@dataclass(slots=True)
class GrantedLeases:
    """The leases that this peer has granted: its promises to other peers to keep a fragment for a while."""

    # Fragment -> {peer with the lease: time at which the lease expires}.
    until: dict[int, dict[PeerId, Seconds]] = field(default_factory=dict)
    # (fragment, peer) -> time before which the peer gets no new lease of the fragment.
    rests: dict[tuple[int, PeerId], Seconds] = field(default_factory=dict)

    def grant(self, fragment: int, peer: PeerId, now: Seconds) -> bool:
        """Grant a peer a lease of a fragment for LEASE_S if possible, and return whether the peer has a lease now.

        After a lease, the peer gets no further lease of the fragment for as long as the lease has lasted. So no peer
        can force us to keep a fragment for more than half of the time.
        """
        self._forget(now)
        leases = self.until.setdefault(fragment, {})
        if peer in leases:
            return True
        if now < self.rests.get((fragment, peer), 0.0) or len(leases) >= MOST_LEASES:
            return False
        leases[peer], self.rests[fragment, peer] = now + LEASE_S, now + 2 * LEASE_S
        return True

    def end(self, fragment: int, peer: PeerId, now: Seconds) -> None:
        """Delete the lease of a fragment that a peer gives back before the lease expires."""
        until = self.until.get(fragment, {}).pop(peer, None)
        if until is not None and now < until:
            self.rests[fragment, peer] = 2 * now - (until - LEASE_S)

    def _forget(self, now: Seconds) -> None:
        """Delete the leases and the waiting times that have ended."""
        self.rests = {name: until for name, until in self.rests.items() if now < until}
        unexpired = {index: {peer: at for peer, at in of.items() if now < at} for index, of in self.until.items()}
        self.until = {index: of for index, of in unexpired.items() if of}

    def bind(self, fragment: int, holders: Collection[PeerId], now: Seconds) -> bool:
        """Return whether at least one of these holders has an unexpired lease, so this peer must keep the fragment."""
        self._forget(now)
        return any(peer in holders for peer in self.until.get(fragment, {}))


@dataclass(slots=True)
class LeaseRequests:
    """The leases (promises of other holders to keep a fragment) that this peer has requested for its present move."""

    number: int = 0
    unanswered: int = 0
    granted: dict[int, list[PeerId]] = field(default_factory=dict)  # fragment -> peers that have granted a lease

    def begin(self, fragments: Iterable[int]) -> None:
        """Forget the leases of earlier moves; leases for these fragments are needed now."""
        self.granted = {index: [] for index in fragments}

    def asked(self, count: int) -> None:
        """Begin a new round of `count` requests; answers to earlier rounds do not count."""
        self.number, self.unanswered = self.number + 1, count

    def answered(self, fragment: int, granted_by: PeerId | None) -> None:
        """Count an answer; `granted_by` is the peer that granted the lease, None if it was refused or failed."""
        self.unanswered -= 1
        if granted_by is not None:
            self.granted[fragment].append(granted_by)


@dataclass(slots=True)
class SpanMove:
    """The state machine that carries out one move at a time, and grants leases for the moves of other peers."""

    run: RunId
    own: PeerId
    budget: MemoryBudget
    view: SpanView
    chance: Random
    replicas: int  # in a move for relief, a layer may be given up only if this many other peers hold it
    held: range
    phase: MovePhase = MovePhase.IDLE
    target: range = range(0)
    cause: MoveCause | None = None  # of the last move
    wake_at: Seconds | None = None
    fetch: Fetch = field(init=False)
    granted: GrantedLeases = field(default_factory=GrantedLeases)
    requests: LeaseRequests = field(default_factory=LeaseRequests)
    rest_until: Seconds = 0.0
    _began_at: Seconds = 0.0
    _lease_until: Seconds = 0.0
    _drain_until: Seconds = 0.0

    def __post_init__(self) -> None:
        """Create `self.fetch`, the machine that fetches state."""
        self.fetch = self._new_fetch()

    @property
    def drains(self) -> bool:
        """Return whether this peer must refuse new stage executions, because it is about to change its layers."""
        return self.phase in (MovePhase.DRAINING, MovePhase.SWITCHING)

    def gives_up(self, now: Seconds) -> bool:
        """Return whether executions that have not finished in time must be given up, as others wait for the move."""
        if self.phase is not MovePhase.DRAINING or now < self._drain_until:
            return False
        lacks_holder = not all(map(self.view.holders, {*self.target} - {*self.held}))
        return self.cause is MoveCause.PLAN or self._others_rely_on_it(now) or lacks_holder

    @property
    def leases_needed(self) -> int:
        """Return how many other holders each given-up layer must keep."""
        return self.replicas if self.cause is MoveCause.RELIEF else 1

    @property
    def given_up(self) -> list[int]:
        """Return the fragments that this peer gives up by the move under way; [] without a move."""
        return [] if self.phase is MovePhase.IDLE else [index for index in self.held if index not in self.target]

    def begin(self, target: range, cause: MoveCause, now: Seconds, may_initialise: bool = False) -> list[MoveEffect]:
        """Begin a move; do nothing if a move is under way or this peer holds the target already.

        Args:
            target: The fragments to hold afterwards.
            cause: Why this peer moves.
            now: Unix time in seconds.
            may_initialise: Whether fragments that no peer holds or retains may start from initial weights. Otherwise
                a move to such fragments fails.
        """
        if self.phase is not MovePhase.IDLE or target == self.held:
            return []
        self._enter(MovePhase.FETCHING)
        self.target, self.cause, self._began_at = target, cause, now
        if not self.budget.fits(target.start, target.stop):
            return self._fail(Reason.MEMORY, now)
        if any(self.granted.bind(index, set(self.view.holders(index)), now) for index in self.given_up):
            return self._fail(Reason.PROMISED, now)
        if any(len(self._keepers(index)) < self.leases_needed for index in self.given_up):
            return self._fail(Reason.NEEDED, now)  # too few other holders: fail before the fetch
        incoming = {index: self._incoming(index) for index in target if index not in self.held}
        if not may_initialise and any(one is None and not self.view.retains(index) for index, one in incoming.items()):
            return self._fail(Reason.DONORS, now)
        self.fetch.begin((one for one in incoming.values() if one is not None), now)
        return self._proceed(now)

    def abandon_unless_to(self, target: range, now: Seconds) -> list[MoveEffect]:
        """Abandon the move under way if it has another target, unless layers are changing or others rely on it."""
        if self.phase in (MovePhase.IDLE, MovePhase.SWITCHING) or self.target == target or self._others_rely_on_it(now):
            return []
        return self._fail(Reason.REPLANNED, now)

    def handle(self, event: Event | Drained, now: Seconds) -> list[MoveEffect]:
        """Handle an event of the move under way, or answer a lease request, and return the effects."""
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._proceed(now)
            case Answered(tag=MoveTag()) | AskFailed(tag=MoveTag()) if self.phase is MovePhase.FETCHING:
                return [*self.fetch.handle(event, now), *(self._proceed(now) if self.fetch.complete else ())]
            case Answered(tag=LeaseTag() as tag) | AskFailed(tag=LeaseTag() as tag) if self._awaits(tag):
                granted = isinstance(event, Answered) and isinstance(event.envelope.message, Done)
                self.requests.answered(tag.fragment, event.peer if granted else None)
                return [] if self.requests.unanswered else self._leases_heard(now)
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

    def _enter(self, phase: MovePhase) -> None:
        ends = phase is MovePhase.IDLE and self.phase is not MovePhase.IDLE
        assert ends or phase.value == self.phase.value + 1, f"cannot go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def _proceed(self, now: Seconds) -> list[MoveEffect]:
        self.wake_at = now + MOVE_RETRY_S
        if self.phase is MovePhase.DRAINING and now >= self._drain_until and not self.gives_up(now):
            return self._fail(Reason.NOT_DRAINED, now)
        if self.phase is MovePhase.DRAINING and self._lessors_are_gone():
            return self._fail(Reason.NEEDED, now)  # keep the old layers: too few other peers hold them now
        if self.phase is MovePhase.LEASING and not self.requests.unanswered:
            return self._request_leases(now)
        if self.phase is not MovePhase.FETCHING:
            return []
        if self.fetch.complete:
            self._enter(MovePhase.LEASING)
            self.requests.begin(self.given_up)
            self._lease_until = now + LEASE_WAIT_S
            return self._request_leases(now)
        if now > self.fetch.last_piece_at + FETCH_STALLED_S:
            return self._fail(Reason.DONORS, now)
        self.fetch.choose(sorted({peer for index in self.fetch.incoming for peer in self._donors(index)}))
        if not self.fetch.donors:
            self.fetch.failures.clear()
        return [*self.fetch.ask()]

    def _request_leases(self, now: Seconds) -> list[MoveEffect]:
        asked, most = list[tuple[int, PeerId]](), SPARE_REQUESTS + self.leases_needed
        for index in self._unleased:
            others = [peer for peer in self._keepers(index) if peer not in self.requests.granted[index]]
            asked += [(index, peer) for peer in self.chance.sample(others, min(most, len(others)))]
        self.requests.asked(len(asked))
        if not asked:
            return self._leases_heard(now)
        number, run = self.requests.number, self.run
        return [
            Ask(LeaseTag(index, number), peer, Envelope(LeaseRequest(run, index)), LEASE_REQUEST_S)
            for index, peer in asked
        ]

    def _awaits(self, tag: LeaseTag) -> bool:
        return self.phase is MovePhase.LEASING and tag.number == self.requests.number

    def _leases_heard(self, now: Seconds) -> list[MoveEffect]:
        """Begin to drain if enough leases were granted; otherwise fail the move, or let a move by a plan wait."""
        if self._unleased:
            waits = self.cause is MoveCause.PLAN and (now < self._lease_until or self._others_rely_on_it(now))
            return [] if waits else self._fail(Reason.NEEDED, now)
        self._enter(MovePhase.DRAINING)
        self._drain_until, self.wake_at = now + DRAIN_MOST_S, now + MOVE_RETRY_S
        return []

    @property
    def _unleased(self) -> list[int]:
        """Return the given-up fragments for which too few leases are granted."""
        return [index for index in self.given_up if len(self.requests.granted[index]) < self.leases_needed]

    def _keepers(self, index: int) -> Sequence[PeerId]:
        """Return the other peers whose leases count: holders and, in a move by a plan, takers.

        In a move for relief, peers with the whole model do not count.
        """
        if self.cause is MoveCause.RELIEF:
            return self.view.servers(index, parts_only=True)
        takers = self.view.takers(index) if self.cause is MoveCause.PLAN else ()
        return sorted({*self.view.servers(index), *takers})

    def _lessors_are_gone(self) -> bool:
        """Return whether, for some given-up layer, too few of the peers that granted a lease still hold the layer."""
        granted = self.requests.granted
        return any(len({*self._keepers(index)} & {*granted[index]}) < self.leases_needed for index in self.given_up)

    def _fail(self, reason: str, now: Seconds) -> list[MoveEffect]:
        self.rest_until = now + MOVE_RETRY_S * (1 + self.chance.random())
        return self._end(self._line("failed", reason, now))

    def _end(self, line: Log) -> list[MoveEffect]:
        """End the move, give the leases back, and discard the fetched state."""
        granted, self.requests.granted = self.requests.granted, {}
        self._enter(MovePhase.IDLE)
        self.target, self.wake_at, self.fetch = range(0), None, self._new_fetch()
        over = [
            Ask(LeaseOverTag(), peer, Envelope(LeaseRequest(self.run, index, over=True)), LEASE_REQUEST_S)
            for index, peers in granted.items()
            for peer in peers
        ]
        return [line, UseSpan(self.held), *over]

    def _line(self, outcome: Outcome, reason: str, now: Seconds) -> Log:
        first, last = self.budget.needs.span(self.target.start, self.target.stop)
        donors, seconds = tuple(sorted(self.fetch.used)), round(now - self._began_at, 3)
        assert self.cause is not None, "a move has a cause"
        line = MoveLine(
            outcome=outcome, reason=reason, why=self.cause, first=first, last=last, donors=donors, seconds=seconds
        )
        return Log(line)

    def _grant(self, request: int, sender: PeerId, index: int, now: Seconds) -> list[MoveEffect]:
        """Answer another peer's lease request for a fragment.

        If both peers are giving up the fragment, the lower id yields: its move fails, and it grants the lease.
        """
        if index not in self.held and not (index in self.target and self.phase is MovePhase.LEASING):
            return [_reply(request, Refused(Reason.FRAGMENT))]
        if sender not in self.view.holders(index):
            return [_reply(request, Refused(Reason.SPAN))]
        gives_it_up = index in self.given_up
        if gives_it_up and (self.phase is MovePhase.SWITCHING or self.own > sender or self._others_rely_on_it(now)):
            return [_reply(request, Refused(Reason.MOVING))]
        if not self.granted.grant(index, sender, now):
            return [_reply(request, Refused(Reason.BUSY))]
        effects = self._fail(Reason.YIELDED, now) if gives_it_up else []
        return [*effects, _reply(request, Done())]

    def _others_rely_on_it(self, now: Seconds) -> bool:
        """Return whether we have granted an unexpired lease of a fragment that we hold only after this move."""
        new = [self.granted.until.get(index, {}) for index in self.target if index not in self.held]
        return any(now < until for leases in new for until in leases.values())

    def _new_fetch(self) -> Fetch:
        return Fetch(self.run, MoveTag, self.chance, self)

    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        """Return whether `peer` can send us a fragment's state, as a holder or from its disk."""
        return peer in self._donors(fragment.index)

    def _incoming(self, index: int) -> Incoming | None:
        """Return an empty Incoming for a fragment; None if no peer holds it, and no other disk has a newer state."""
        fragment, layout = self.budget.needs.fragments[index], self.budget.layouts[index]
        held = bool(self.view.holders(index))
        return Incoming(fragment, layout, not held) if held or self.view.retainers(index) else None

    def _donors(self, index: int) -> Sequence[PeerId]:
        """Return the peers that can send a fragment: its holders, or, if it had none at first, its retainers."""
        incoming = self.fetch.incoming.get(index)
        return self.view.retainers(index) if incoming is not None and incoming.retained else self.view.holders(index)


def _reply(request: int, message: Message) -> Reply:
    return Reply(request, Envelope(message))

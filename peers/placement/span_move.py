"""A peer changes its layers while it trains, and no layer loses its last holder by that.

    SETTLED --begin--> FETCHING --state here--> ASKING --promises--> DRAINING --no execution here--> SWITCHING --Moved-->

The state of the layers to come is fetched while the old ones serve on. Layers that are given up have to stay with
`holders` others, who promise it: a record may be old, a promise is not. Who has promised a layer does not give it up
for PROMISE_S, or until the other one needs it no more. Of two that want to give up the same layer the lower id yields:
it stays, and promises. Then no new executions are taken until those under way are done, and between two optimizer steps the
compute thread changes the layers.

Whatever fails before that leaves the old span serving. The state of what was given up is kept on the disk
(train/retained_state.py), for the case that its last holder is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, LeaseRequest, Refused
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Reply, Tag
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import ChangeSpan, Layout, SpanChanged
from decentral.core.machine import Effect, Woke, log
from decentral.core.memory_needs import MemoryNeeds
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.joining.fetch import Fetch, FetchTag, Incoming

MOVE_RETRY_S = 2.0
FETCH_STALLED_S = 20.0  # without a piece, after which the fetching is given up
LEASE_REQUEST_S = 5.0  # deadline of the question
DRAIN_MOST_S = 30.0  # for the executions under way
LEASE_S = 90.0  # more than all that a move does after it was promised something
ASKED = 4  # holders that are asked to stay, where so many are there


class MovePhase(Enum):
    SETTLED = auto()
    FETCHING = auto()
    ASKING = auto()
    DRAINING = auto()
    SWITCHING = auto()


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What this peer's device takes. `layouts`: of each fragment's state, of the whole model."""

    needs: MemoryNeeds
    memory_bytes: int
    layouts: tuple[Layout, ...]

    def fits(self, begin: int, end: int) -> bool:
        """Whoever has a part of the model never changes to the whole: it would have to train in another way."""
        return 0 < end - begin < len(self.needs.fragments) and self.needs.span_bytes(begin, end) <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class HoldSpan:
    """Effect for the node: from now on this peer holds these fragments, and takes executions for them."""

    fragments: range


@dataclass(frozen=True, slots=True)
class Drained:
    """Event: no execution is here any more."""


class SpanView(Protocol):
    """What a move needs to know of the swarm; peers/node/span_manager.py has it from the roster."""

    def holders(self, fragment: int) -> Sequence[PeerId]:
        """Who else holds this fragment, and trains."""
        ...

    def keepers(self, fragment: int) -> Sequence[PeerId]:
        """Who else keeps the newest state of it, if that is newer than what we keep."""
        ...

    def keeps(self, fragment: int) -> bool:
        """Whether we keep a state of it ourselves."""
        ...


@dataclass(frozen=True, slots=True)
class MoveTag(FetchTag):
    """A question for the state of a layer to come."""


@dataclass(frozen=True, slots=True)
class LeaseTag(Tag):
    """LeaseRequest for a fragment that we want to give up. Answers to an earlier number `asked` tell nothing."""

    fragment: int
    asked: int


@dataclass(frozen=True, slots=True)
class LeaseOverTag(Tag):
    """LeaseRequest that sets a peer free again. Nobody waits for the answer."""


@dataclass(slots=True)
class SpanMove:
    run: RunId
    own: PeerId
    room: MemoryBudget
    view: SpanView
    chance: Random
    wanted: int  # other holders that a layer must keep when we give it up
    held: range  # fragments
    state: MovePhase = MovePhase.SETTLED
    goal: range = range(0)
    why: str = ""
    wake_at: Seconds | None = None
    fetch: Fetch = field(init=False)
    promised: dict[int, dict[PeerId, Seconds]] = field(default_factory=dict)  # by fragment: who relies on us, how long
    rest_until: Seconds = 0.0  # after a move that failed
    _began: Seconds = 0.0
    _until: Seconds = 0.0  # then executions under way have kept us too long
    _promises: dict[int, list[PeerId]] = field(default_factory=dict)  # by fragment: others that promised to stay
    _waiting: int = 0  # questions whose answers are not here
    _asked: int = 0  # the number of the present questions; answers to older ones say nothing

    def __post_init__(self) -> None:
        self.fetch = self._new_fetch()

    @property
    def drains(self) -> bool:
        """Whether no new executions should be taken."""
        return self.state in (MovePhase.DRAINING, MovePhase.SWITCHING)

    @property
    def needed(self) -> int:
        """Other holders of what we give up. A layer that nobody holds stops everything: for it one has to do."""
        return 1 if self.why == "lost" else self.wanted

    @property
    def lost(self) -> list[int]:
        """Fragments that the move under way gives up."""
        return [] if self.state is MovePhase.SETTLED else [index for index in self.held if index not in self.goal]

    @property
    def gained(self) -> list[int]:
        return [] if self.state is MovePhase.SETTLED else [index for index in self.goal if index not in self.held]

    def begin(self, goal: range, why: str, now: Seconds, alone: bool = False) -> list[Effect]:
        """Sets out for these fragments, unless we are on our way or have arrived.

        `alone`: what nobody holds and nobody keeps is begun with its initial weights; else it ends the move.
        """
        if self.state is not MovePhase.SETTLED or goal == self.held:
            return []
        self.state, self.goal, self.why, self._began = MovePhase.FETCHING, goal, why, now
        if not self.room.fits(goal.start, goal.stop):
            return self._fail(Reason.MEMORY, now)
        if any(self._is_relied_on(index, now) for index in self.lost):
            return self._fail(Reason.PROMISED, now)
        if any(len(self.view.holders(index)) < self.needed for index in self.lost):
            return self._fail(Reason.NEEDED, now)  # nothing need be fetched to know it
        self.fetch = self._new_fetch()
        incoming = {index: self._incoming(index) for index in self.gained}
        if not alone and any(one is None and not self.view.keeps(index) for index, one in incoming.items()):
            return self._fail(Reason.DONORS, now)
        self.fetch.begin((one for one in incoming.values() if one is not None), now)
        return self._look(now)

    def follow(self, goal: range, now: Seconds) -> list[Effect]:
        """Gives up a move to elsewhere, if there still is time for it."""
        if self.state in (MovePhase.SETTLED, MovePhase.SWITCHING) or self.goal == goal:
            return []
        return self._fail(Reason.REPLANNED, now)

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._look(now)
            case Answered(tag=MoveTag()) | AskFailed(tag=MoveTag()) if self.state is MovePhase.FETCHING:
                effects = self.fetch.handle(event, now)
                return effects + self._look(now) if self.fetch.complete else effects
            case Answered(tag=LeaseTag(index, asked), peer=peer, envelope=Envelope(message)):
                return self._heard(index, asked, peer if isinstance(message, Done) else None, now)
            case AskFailed(tag=LeaseTag(index, asked)):
                return self._heard(index, asked, None, now)
            case Asked(request, sender, Envelope(LeaseRequest(fragment=index, over=True))):
                self.promised.get(index, {}).pop(sender, None)
                return [Reply(request, Envelope(Done()))]
            case Asked(request, sender, Envelope(LeaseRequest(fragment=index))):
                return self._asked_to_stay(request, sender, index, now)
            case Drained() if self.state is MovePhase.DRAINING and self._left_alone():
                return self._fail(Reason.NEEDED, now)
            case Drained() if self.state is MovePhase.DRAINING:
                self.state, self.wake_at = MovePhase.SWITCHING, None
                cuts = self.room.needs.fragments[self.goal.start : self.goal.stop]
                return [ChangeSpan(cuts[0].first, cuts[-1].last, self.fetch.donated(), self.fetch.step)]
            case SpanChanged(accepted, reason) if self.state is MovePhase.SWITCHING:
                return self._arrive(now) if accepted else self._fail(reason, now)
        return []

    # On the way

    def _look(self, now: Seconds) -> list[Effect]:
        self.wake_at = now + MOVE_RETRY_S
        if self.state is MovePhase.DRAINING and now >= self._until:
            return self._fail(Reason.LEGS, now)
        if self.state is MovePhase.DRAINING and self._left_alone():
            return self._fail(Reason.NEEDED, now)  # we take no executions, and nobody else does
        if self.state is not MovePhase.FETCHING:
            return []
        if self.fetch.complete:
            return self._ask_others_to_stay(now)
        if now > self.fetch.last_piece + FETCH_STALLED_S:
            return self._fail(Reason.DONORS, now)
        self.fetch.choose(sorted({peer for index in self.fetch.incoming for peer in self._donors(index)}))
        if not self.fetch.donors:
            self.fetch.failures.clear()
        return self.fetch.ask()

    def _ask_others_to_stay(self, now: Seconds) -> list[Effect]:
        self.state, self._promises = MovePhase.ASKING, {index: [] for index in self.lost}
        self._asked += 1
        asks: list[Effect] = []
        for index in self.lost:
            holders = list(self.view.holders(index))
            for peer in self.chance.sample(holders, min(ASKED + self.needed, len(holders))):
                asks.append(
                    Ask(LeaseTag(index, self._asked), peer, Envelope(LeaseRequest(self.run, index)), LEASE_REQUEST_S)
                )
        self._waiting = len(asks)
        return asks or self._have_they_promised(now)

    def _heard(self, index: int, asked: int, promised: PeerId | None, now: Seconds) -> list[Effect]:
        if self.state is not MovePhase.ASKING or asked != self._asked:
            return []
        self._waiting -= 1
        if promised is not None:
            self._promises[index].append(promised)
        return [] if self._waiting else self._have_they_promised(now)

    def _have_they_promised(self, now: Seconds) -> list[Effect]:
        if any(len(self._promises[index]) < self.needed for index in self.lost):
            return self._fail(Reason.NEEDED, now)
        self.state, self._until = MovePhase.DRAINING, now + DRAIN_MOST_S
        self.wake_at = now + MOVE_RETRY_S
        return []

    def _left_alone(self) -> bool:
        """Whether of those who promised to stay so many are gone that what we give up has too few holders."""
        held = {index: set(self.view.holders(index)) for index in self.lost}
        return any(len(held[index].intersection(self._promises[index])) < self.needed for index in self.lost)

    def _arrive(self, now: Seconds) -> list[Effect]:
        line = self._line("done", "", now)
        self.held = self.goal
        return [line, *self._settle()]

    def _fail(self, reason: str, now: Seconds) -> list[Effect]:
        line = self._line("failed", reason, now)
        self.rest_until = now + MOVE_RETRY_S * (1 + self.chance.random())
        return [line, *self._settle()]

    def _settle(self) -> list[Effect]:
        """Those who promised something are free again; what was fetched is let go of."""
        promises, self._promises = self._promises, {}
        self.state, self.goal, self.wake_at = MovePhase.SETTLED, range(0), None
        self.fetch = self._new_fetch()
        free = [
            Ask(LeaseOverTag(), peer, Envelope(LeaseRequest(self.run, index, over=True)), LEASE_REQUEST_S)
            for index, peers in promises.items()
            for peer in peers
        ]
        return [HoldSpan(self.held), *free]

    def _line(self, outcome: str, reason: str, now: Seconds) -> Effect:
        cuts, goal = self.room.needs.fragments, self.goal
        return log(
            "move",
            outcome=outcome,
            reason=reason,
            why=self.why,
            first=cuts[goal.start].first,
            last=cuts[goal.stop - 1].last,
            donors=sorted(self.fetch.used),
            seconds=round(now - self._began, 3),
        )

    # What others want

    def _asked_to_stay(self, request: int, sender: PeerId, index: int, now: Seconds) -> list[Effect]:
        """Promises, or says why not."""
        if index not in self.held:
            return [Reply(request, Envelope(Refused(Reason.FRAGMENT)))]
        effects: list[Effect] = []
        if index in self.lost:
            if self.state is MovePhase.SWITCHING or self.own > sender:
                return [Reply(request, Envelope(Refused(Reason.MOVING)))]
            effects = self._fail(Reason.YIELDED, now)
        self.promised.setdefault(index, {})[sender] = now + LEASE_S
        return [*effects, Reply(request, Envelope(Done()))]

    def _is_relied_on(self, index: int, now: Seconds) -> bool:
        """Whether somebody who still holds it was promised that we stay."""
        holders = set(self.view.holders(index))
        relying = {peer: until for peer, until in self.promised.pop(index, {}).items() if now < until}
        if relying:
            self.promised[index] = relying
        return any(peer in holders for peer in relying)

    # Helpers

    def _new_fetch(self) -> Fetch:
        return Fetch(self.run, MoveTag, self.chance, lambda peer, fragment: peer in self._donors(fragment.index))

    def _incoming(self, index: int) -> Incoming | None:
        """What to fetch; None if nobody else has it, or nothing newer than our disk."""
        fragment, layout = self.room.needs.fragments[index], self.room.layouts[index]
        held = bool(self.view.holders(index))
        return Incoming(fragment, layout, not held) if held or self.view.keepers(index) else None

    def _donors(self, index: int) -> Sequence[PeerId]:
        """Of a fragment: who trains it, or, where we asked for what was kept, who keeps the newest."""
        incoming = self.fetch.incoming.get(index)
        return self.view.keepers(index) if incoming is not None and incoming.kept else self.view.holders(index)


__all__ = ["Drained", "HoldSpan", "SpanMove", "MemoryBudget", "MovePhase", "SpanView"]

"""Collects what the members of a synchronous round have to say: from the members, or from those that heard them.

    wanted        its origin is asked, again and again while it answers that it is not done
    origin lost   nothing is taken from the origin any more; all others that want the same are asked instead
    over          it is here; or all others that live have lost its origin too, and none has it, so nobody will use it

So all that live come to the same result. One case remains: a peer that hands its sum to some, and dies before it does
to the others. The versions of comm/rounds/contributions.py find that out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.rounds.tags import CollectTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CollectRequest, Refused
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.machine import earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

Key = tuple[PeerId, int | None]
"""The origin, and the fragment whose sum is wanted; None: its report."""

PATIENCE_S = 3.0  # how long a member may keep a question until it has the answer
GONE_S = 5.0  # a member that has not answered any question for so long is gone
COLLECT_RETRY_S = 0.5
MAX_QUESTIONS = 32  # questions under way
LATER_REASONS = (
    Reason.NOTHING_NEWER,
    Reason.NOT_READY,
    Reason.BUSY,
    Reason.STRANGER,
)  # it lives
BEHIND_REASONS = (Reason.LATE, Reason.EXPELLED)  # refusals that tell us that the others have gone on without us


@dataclass(frozen=True, slots=True)
class Source:
    """A peer that may have it. `since`: when the first of the questions was asked that have no answer yet."""

    retry_at: Seconds
    since: Seconds | None = None
    asked: bool = False


@dataclass(slots=True)
class Wanted:
    """A report or a sum of gradients."""

    origin: PeerId
    fragment: int | None
    size: int  # bytes of its blob
    others: tuple[PeerId, ...]  # peers that want it, too
    sources: dict[PeerId, Source]
    found: Envelope | None = None
    origin_lost: bool = False
    reason: str = ""  # why the origin was given up

    @property
    def over(self) -> bool:
        return not self.sources

    def lose_origin(self, reason: str, now: Seconds) -> None:
        """Gives the origin up: from now on the others are asked."""
        self.origin_lost, self.reason = True, reason
        self.sources = {peer: Source(now) for peer in self.others}

    def lose_source(self, peer: PeerId, reason: str, now: Seconds) -> None:
        """Nothing will come from this peer."""
        if self.origin_lost:
            del self.sources[peer]
        else:
            self.lose_origin(reason, now)

    def idle_sources(self) -> list[tuple[PeerId, Source]]:
        """Which peers may be asked now or later. For a large blob only one peer is asked at a time."""
        if self.over or (self.size and any(source.asked for source in self.sources.values())):
            return []
        idle = [(peer, source) for peer, source in self.sources.items() if not source.asked]
        idle.sort(key=lambda one: one[1].retry_at)
        return idle[:1] if self.size else idle


class Collector(Protocol):
    """The round for which things are collected."""

    def accept(self, wanted: Wanted, envelope: Envelope) -> None:
        """Raise ProtocolError for what cannot be the thing wanted."""

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return how long `size` bytes from that peer may take."""


@dataclass(slots=True)
class Collection:
    """All that is wanted in one round."""

    run: str
    round: int
    member: bool  # whether we are one of the round's members
    collector: Collector = field(repr=False, compare=False)
    wanted: dict[Key, Wanted] = field(default_factory=dict)
    behind: str = ""  # why the others have gone on without us, if they have
    _under_way: set[tuple[PeerId, Key]] = field(default_factory=set)  # questions, by the peer that was asked

    @property
    def complete(self) -> bool:
        return all(one.over for one in self.wanted.values())

    @property
    def wake_at(self) -> Seconds | None:
        if len(self._under_way) >= MAX_QUESTIONS:
            return None
        return earliest(source.retry_at for one in self.wanted.values() for _, source in one.idle_sources())

    def want(self, origin: PeerId, fragment: int | None, size: int, others: Sequence[PeerId], now: Seconds) -> Wanted:
        one = Wanted(origin, fragment, size, tuple(others), {origin: Source(now)})
        self.wanted[origin, fragment] = one
        return one

    def ask(self, now: Seconds) -> list[Effect]:
        """The questions that are due."""
        effects: list[Effect] = []
        for one in self.wanted.values():
            for peer, source in one.idle_sources():
                if len(self._under_way) < MAX_QUESTIONS and now >= source.retry_at:
                    effects.append(self._ask(one, peer, source, now))
        return effects

    def handle(self, event: Answered | AskFailed, now: Seconds) -> None:
        """Takes the answer to one of our questions, or that none came."""
        assert isinstance(event.tag, CollectTag)
        key = event.tag.origin, event.tag.fragment
        if (event.peer, key) not in self._under_way:
            return  # asked before we fell behind and followed this round again
        self._under_way.discard((event.peer, key))
        one = self.wanted[key]
        source = one.sources.get(event.peer)
        if source is None:
            return  # this source was given up meanwhile
        match event:
            case AskFailed(reason=reason):
                one.sources[event.peer] = Source(now + COLLECT_RETRY_S, source.since)
                if source.since is not None and now - source.since >= GONE_S:
                    one.lose_source(event.peer, reason, now)
            case Answered(envelope=Envelope(Refused(reason))) if reason in LATER_REASONS:
                one.sources[event.peer] = Source(now + (0.0 if event.seconds >= COLLECT_RETRY_S else COLLECT_RETRY_S))
            case Answered(envelope=Envelope(Refused(reason))):
                self.behind = reason if reason in BEHIND_REASONS else self.behind
                one.lose_source(event.peer, reason, now)
            case Answered(envelope=envelope):
                try:
                    self.collector.accept(one, envelope)
                    one.found, one.sources = envelope, {}
                except ProtocolError as error:
                    one.lose_source(event.peer, error.reason, now)

    def answer_for(self, origin: PeerId, fragment: int | None) -> Envelope | None:
        """The answer to another member that wants the same; None: we do not know yet whether we will have it."""
        one = self.wanted.get((origin, fragment))
        if one is None or not (one.over or one.origin_lost):
            return None
        return one.found or Envelope(Refused(Reason.WITHOUT))

    def _ask(self, one: Wanted, to: PeerId, source: Source, now: Seconds) -> Ask:
        one.sources[to] = Source(source.retry_at, now if source.since is None else source.since, asked=True)
        self._under_way.add((to, (one.origin, one.fragment)))
        request = CollectRequest(self.run, self.round, one.origin, one.fragment, PATIENCE_S, self.member)
        tag = CollectTag(self.round, one.origin, one.fragment)
        return Ask(tag, to, Envelope(request), PATIENCE_S + self.collector.deadline_s(to, one.size), one.size)

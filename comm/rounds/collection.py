"""Fetch the members' reports and sums of gradients in a synchronous round, so that all members use the same data.

Start at `Collection`. Each report or sum that this peer wants passes through these states:

    wanted        this peer asks the origin (the member that makes the report or sum) until the report or sum is ready
    origin lost   this peer accepts nothing more from the origin, and asks the other members for a copy
    over          this peer has the report or sum; or no reachable member has it or waits for the origin, so that no
                  member uses it

So all reachable members use the same reports and sums, with one exception: a member may fail after it has sent its sum
to some members and not to others. The fragments' versions (comm/rounds/contributions.py) reveal this difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CollectRequest, Refused
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect, Tag
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.machine import earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

Key = tuple[PeerId, int | None]
"""The origin, and the fragment whose sum is wanted; None stands for the origin's report."""

PATIENCE_S = 3.0  # a peer that does not have the wanted report or sum yet may delay its answer by up to this long
GONE_S = 5.0  # a peer whose answers have all failed for this many seconds is not asked any more
COLLECT_RETRY_S = 0.5  # after a failed answer, or a refusal in LATER_REASONS, the peer is asked again this much later
MAX_QUESTIONS = 32  # in one round, at most this many of our questions for reports and sums are unanswered at a time
LATER_REASONS = (  # temporary refusals: the same peer is asked again after COLLECT_RETRY_S
    Reason.NOTHING_NEWER,
    Reason.NOT_READY,
    Reason.BUSY,
    Reason.STRANGER,
)
BEHIND_REASONS = (Reason.LATE, Reason.EXPELLED)  # a peer that answers with one of these has continued without us


@dataclass(frozen=True, slots=True)
class RoundTag(Tag):
    """Base class of the tags of questions in synchronous rounds."""


@dataclass(frozen=True, slots=True)
class CollectTag(RoundTag):
    """The tag of a CollectRequest for the report of `origin` or, if `fragment` is given, for its sum of gradients.

    The answer may wait until the report or sum is ready, so its delay does not measure the link.
    """

    round: int
    origin: PeerId
    fragment: int | None

    measures_link: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Source:
    """When one peer was asked for a report or sum, and when it may be asked for it again."""

    retry_at: Seconds  # from this time on the peer may be asked
    since: Seconds | None = None  # when we sent the first question since the peer last answered; None: none was sent
    asked: bool = False  # True while our question to the peer is unanswered


@dataclass(slots=True)
class Wanted:
    """A report or a sum of gradients that this peer wants, and the peers to ask for it."""

    origin: PeerId
    fragment: int | None  # the fragment whose sum of gradients is wanted; None: the origin's report is wanted
    size: int  # bytes of the wanted sum of gradients; 0: a report is wanted
    others: tuple[PeerId, ...]  # members that may have a copy, and are asked for it if the origin does not deliver
    sources: dict[PeerId, Source]  # the peers that are asked now; empty once the search is over
    found: Envelope | None = None  # the report or sum; None: not found yet, or not found at all
    origin_lost: bool = False  # True: the origin was given up, and `others` are asked
    reason: str = ""  # why the origin was given up

    @property
    def over(self) -> bool:
        """Return whether the search for this report or sum has ended, with or without success."""
        return not self.sources

    def lose_origin(self, reason: str, now: Seconds) -> None:
        """Give the origin up because of `reason`: accept nothing more from it, and ask `self.others` from `now` on."""
        self.origin_lost, self.reason = True, reason
        self.sources = {peer: Source(now) for peer in self.others}

    def lose_source(self, peer: PeerId, reason: str, now: Seconds) -> None:
        """Stop asking this peer, because of `reason`. If the peer is the origin, ask `self.others` instead."""
        if self.origin_lost:
            del self.sources[peer]
        else:
            self.lose_origin(reason, now)

    def idle_sources(self) -> list[tuple[PeerId, Source]]:
        """Return the peers that have no question of ours to answer, sorted by when they may be asked again.

        A sum is large, so only one peer at a time is asked for it: if a sum is wanted, return at most one peer, and no
        peer while a question for the sum is unanswered.
        """
        if self.over or (self.size and any(source.asked for source in self.sources.values())):
            return []
        idle = [(peer, source) for peer, source in self.sources.items() if not source.asked]
        idle.sort(key=lambda one: one[1].retry_at)
        return idle[:1] if self.size else idle


class Collector(Protocol):
    """Interface through which a Collection checks answers and sets deadlines; implemented by `Round`."""

    def accept(self, wanted: Wanted, envelope: Envelope) -> None:
        """Check that an answer is the wanted report or sum; raise ProtocolError if not."""

    def deadline_s(self, peer: PeerId, size: int) -> Seconds:
        """Return the longest time in seconds that an answer of `size` bytes from a peer may take."""


@dataclass(slots=True)
class Collection:
    """State of one round's collection: the reports and sums that this peer wants, and its questions to members."""

    run: str
    round: int
    member: bool  # whether this peer is a member of the round; a follower is not
    collector: Collector = field(repr=False, compare=False)
    wanted: dict[Key, Wanted] = field(default_factory=dict)
    behind: str = ""  # why other members have continued without this peer (one of BEHIND_REASONS); "": they have not
    _under_way: set[tuple[PeerId, Key]] = field(default_factory=set)  # unanswered questions: (peer, key in `wanted`)

    @property
    def complete(self) -> bool:
        """Return whether the search for every report and sum has ended, with or without success."""
        return all(one.over for one in self.wanted.values())

    @property
    def wake_at(self) -> Seconds | None:
        """Return when to ask the next question; None if there is none to ask, or MAX_QUESTIONS are unanswered."""
        if len(self._under_way) >= MAX_QUESTIONS:
            return None
        return earliest(source.retry_at for one in self.wanted.values() for _, source in one.idle_sources())

    def want(self, origin: PeerId, fragment: int | None, size: int, others: Sequence[PeerId], now: Seconds) -> Wanted:
        """Start collecting a sum of `size` bytes or, with `fragment` None and `size` 0, a report.

        The method `ask` asks the member `origin`, which makes the report or sum; it asks `others` once `origin` is
        given up.
        """
        one = Wanted(origin, fragment, size, tuple(others), {origin: Source(now)})
        self.wanted[origin, fragment] = one
        return one

    def ask(self, now: Seconds) -> list[Effect]:
        """Return the effects that send the questions due now; at most MAX_QUESTIONS are unanswered at a time."""
        effects: list[Effect] = []
        for one in self.wanted.values():
            for peer, source in one.idle_sources():
                if len(self._under_way) < MAX_QUESTIONS and now >= source.retry_at:
                    effects.append(self._ask(one, peer, source, now))
        return effects

    def handle(self, event: Answered | AskFailed, now: Seconds) -> None:
        """Record the answer to one of our questions, or its failure."""
        assert isinstance(event.tag, CollectTag)
        key = event.tag.origin, event.tag.fragment
        if (event.peer, key) not in self._under_way:
            return  # ignore the answer: this peer has left the round and joined it again since the question
        self._under_way.discard((event.peer, key))
        one = self.wanted[key]
        source = one.sources.get(event.peer)
        if source is None:
            return  # ignore the answer: the answering peer was given up as a source since the question
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
        """Return our answer to a member that asks us for the report or sum of a third member, `origin`.

        The answer is our copy, or Refused if we have given `origin` up and have no copy. Return None while we still ask
        `origin`, or if we do not collect this report or sum.
        """
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

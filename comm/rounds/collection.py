"""What the members of a synchronous round have to say, collected: from whoever says it, else from whoever heard it.

    wanted   its origin is asked, again and again while it answers that it is not done
    bound    its origin is gone: nothing is taken from there any more, all others that want it are asked
    over     it is here; or all others that live are bound, too, and do not have it: then nobody will ever use it

So those who live come to the same result. What can still part them is a peer that hands on what it has to some, and
dies before it does to others; comm/rounds/contributions.py's versions find that out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentral.comm.rounds.tags import CollectTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CollectRequest, Refused
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.machine import Effect, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

Key = tuple[PeerId, int | None]  # whose; of which fragment, or its report

PATIENCE_S = 3.0  # how long a member may keep a question until it is done
GONE_S = 5.0  # a member that has not answered for so long, the last question included, is gone
COLLECT_RETRY_S = 0.5
MOST_ASKED = 32  # questions under way
LATER = (Reason.NOTHING_NEWER, Reason.NOT_READY, Reason.BUSY)  # refusals of one that lives
BEHIND_REASONS = (Reason.LATE, Reason.EXPELLED)  # it is we who are gone


@dataclass(slots=True)
class Source:
    """Somebody who may have it. `since`: when the first of the questions was asked that have no answer."""

    retry_at: Seconds
    since: Seconds | None = None
    asked: bool = False


@dataclass(slots=True)
class Wanted:
    origin: PeerId
    fragment: int | None
    size: int  # of its blob
    others: tuple[PeerId, ...]  # who want it, too
    sources: dict[PeerId, Source]
    found: Envelope | None = None
    over: bool = False
    bound: bool = False
    reason: str = ""  # why its origin is gone


@dataclass(slots=True)
class Collection:
    """Of one round. `accept` raises ProtocolError for what cannot be the thing wanted."""

    run: str
    round: int
    member: bool  # whether we are one of the round's
    accept: Callable[[Wanted, Envelope], None]
    deadline_s: Callable[[PeerId, int], Seconds]
    wanted: dict[Key, Wanted] = field(default_factory=dict)
    behind: str = ""  # what told us that the others have gone on without us
    _asked: int = 0

    @property
    def complete(self) -> bool:
        return all(one.over for one in self.wanted.values())

    @property
    def wake_at(self) -> Seconds | None:
        if self._asked >= MOST_ASKED:
            return None
        return earliest(source.retry_at for one in self.wanted.values() for source in _next(one))

    def want(self, origin: PeerId, fragment: int | None, size: int, others: Sequence[PeerId], now: Seconds) -> Wanted:
        one = Wanted(origin, fragment, size, tuple(others), {origin: Source(now)})
        self.wanted[origin, fragment] = one
        return one

    def bind(self, one: Wanted, reason: str, now: Seconds) -> None:
        """Its origin is gone."""
        one.bound, one.reason = True, reason
        one.sources = {peer: Source(now) for peer in one.others}
        one.over = not one.sources

    def ask(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        for one in self.wanted.values():
            for source in _next(one):
                if self._asked < MOST_ASKED and now >= source.retry_at:
                    effects.append(self._question(one, source, now))
        return effects

    def heard(self, event: Answered | AskFailed, now: Seconds) -> None:
        """An answer, or none, to one of our questions."""
        self._asked -= 1
        assert isinstance(event.tag, CollectTag)
        one = self.wanted[event.tag.origin, event.tag.fragment]
        source = one.sources.get(event.peer)
        if source is None or one.over:
            return  # we have given it up meanwhile
        source.asked = False
        if isinstance(event, AskFailed):
            source.retry_at = now + COLLECT_RETRY_S
            if source.since is not None and now - source.since >= GONE_S:
                self._lose(one, event.peer, event.reason, now)
            return
        source.since = None
        message = event.envelope.message
        if isinstance(message, Refused) and message.reason in LATER:
            source.retry_at = now if event.seconds >= COLLECT_RETRY_S else now + COLLECT_RETRY_S
        elif isinstance(message, Refused):
            self.behind = message.reason if message.reason in BEHIND_REASONS else self.behind
            self._lose(one, event.peer, message.reason, now)
        else:
            self._take(one, event, now)

    def has(self, origin: PeerId, fragment: int | None) -> Envelope | None:
        """For others that ask for it: it, or that we will never have it from its origin; None: perhaps later."""
        one = self.wanted.get((origin, fragment))
        if one is None or not (one.over or one.bound):
            return None
        return one.found or Envelope(Refused(Reason.WITHOUT))

    def _question(self, one: Wanted, source: Source, now: Seconds) -> Ask:
        source.asked, source.since = True, now if source.since is None else source.since
        self._asked += 1
        to = next(peer for peer, known in one.sources.items() if known is source)
        collect = CollectRequest(self.run, self.round, one.origin, one.fragment, PATIENCE_S, self.member)
        tag = CollectTag(self.round, one.origin, one.fragment)
        return Ask(tag, to, Envelope(collect), PATIENCE_S + self.deadline_s(to, one.size), one.size)

    def _take(self, one: Wanted, event: Answered, now: Seconds) -> None:
        try:
            self.accept(one, event.envelope)
        except ProtocolError as error:
            self._lose(one, event.peer, error.reason, now)
            return
        one.found, one.over, one.sources = event.envelope, True, {}

    def _lose(self, one: Wanted, peer: PeerId, reason: str, now: Seconds) -> None:
        """Nothing will come from there."""
        if not one.bound:
            self.bind(one, reason, now)
            return
        del one.sources[peer]
        one.over = not one.sources


def _next(one: Wanted) -> list[Source]:
    """Whom to ask: of what is large, one at a time."""
    if one.over or (one.size and any(source.asked for source in one.sources.values())):
        return []
    free = sorted((source for source in one.sources.values() if not source.asked), key=lambda source: source.retry_at)
    return free[:1] if one.size else free

"""Push-sum exchanges of one fragment: at a window's end half of the mass leaves, and what comes is added.

    OPEN --window over--> CLOSING --WindowClosed--> ASKING --Done--> OPEN

A push has a number, and one that comes twice is added once, so a push whose acknowledgement was lost is sent again. It
keeps the time of its first try: a partner that has started again since knows no numbers, and refuses what is older.
One that was refused is refused from then on: its sender takes the mass back, while a copy may still be on its way.
Mass that was refused, or never left, is taken back. It is not taken back after a try that nobody answered, because it
may have arrived. So only a partner that dies, or refuses to the end, costs mass; x and w are lost together, which
leaves every ratio x/w as it was, and the journal says `mass-lost`.
"""

from dataclasses import dataclass, field

from decentral.comm.gossip import snapshots
from decentral.comm.gossip.snapshots import Exchange, ExchangePhase, contribution
from decentral.comm.gossip.tags import PushTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Done, Push, Refused, Snapshot
from decentral.comm.wire.transport import Answered, Ask, Asked, AskFailed, Effect, Event, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import Absorb, Absorbed, WindowClosed
from decentral.core.latest import keep_latest
from decentral.core.machine import Woke
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

PUSH_TRIES = 3
PUSHES_REMEMBERED = 1024  # pushes whose numbers we keep, to add none twice, and as many that were refused


PushName = tuple[PeerId, int]
"""Who sent a push, and its number."""


@dataclass(slots=True)
class PushExchange(Exchange):
    _closed: WindowClosed | None = None
    _offered: Snapshot | None = None
    _arrived: dict[PushName, None] = field(default_factory=dict)
    _refused: dict[PushName, str] = field(default_factory=dict)  # and why
    _absorbing: dict[PushName, list[int]] = field(default_factory=dict)  # jobs in order: the requests that wait

    @property
    def undecided(self) -> list[int]:
        return [request for requests in self._absorbing.values() for request in requests]

    @property
    def wake_at(self) -> Seconds | None:
        return self.close_at if self.state is ExchangePhase.OPEN else None

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Woke() if self.state is ExchangePhase.OPEN and now >= self.close_at:
                return self._close_unless_alone(now)
            case WindowClosed(seq=seq) if self.state is ExchangePhase.CLOSING and seq == self.seq:
                return self._push(event, now)
            case Asked(request, sender, Envelope(Push() as push, blob)):
                return self._pushed(request, sender, push, blob, now)
            case Absorbed() if self._absorbing:  # else it is of before the fragment was given up and taken up again
                return self._absorbed(event)
            case Answered(tag=PushTag(seq=seq, tries=tries)) | AskFailed(tag=PushTag(seq=seq, tries=tries)):
                if self.state is ExchangePhase.ASKING and seq == self.seq:
                    return self._answered(event, tries, now)
        return []  # it speaks of an exchange that is over

    def _push(self, closed: WindowClosed, now: Seconds) -> list[Effect]:
        self._closed, self.size = closed, len(closed.blob)
        partners = self.context.partners(now)
        if not partners:  # the last one has just gone
            return [self._take_back(), *self._end(None, "solo", Reason.ALONE, now)]
        self.state = ExchangePhase.ASKING
        self._offered = snapshots.describe(self.context, closed, now)
        return [self._ask(partners[0], 1)]

    def _ask(self, partner: PeerId, tries: int) -> Ask:
        assert self._closed is not None
        assert self._offered is not None
        tag = PushTag(self.context.fragment, self.seq, tries)
        push = Envelope(Push(self._offered), self._closed.blob)
        return Ask(tag, partner, push, self.context.view.deadline_s(partner, self.size))

    def _answered(self, event: Answered | AskFailed, tries: int, now: Seconds) -> list[Effect]:
        """Takes the mass back, asks again, or gives the mass up: it is better lost than in two places."""
        back: str | None = None  # why this try cannot have brought the mass there; a partner may give an empty reason
        match event:
            case Answered(envelope=Envelope(Done())):
                return self._end(event.peer, "done", "", now, (event.sent_bytes, event.received_bytes))
            case Answered(envelope=Envelope(Refused(reason))) | AskFailed(reason=Reason.UNREACHABLE as reason):
                back = reason
            case Answered():
                back = Reason.UNEXPECTED
        if back is not None and tries == 1:  # a try before this one might have arrived
            return [self._take_back(), *self._end(event.peer, "failed", back, now)]
        if tries < PUSH_TRIES:
            return [self._ask(event.peer, tries + 1)]
        return self._end(event.peer, "failed", Reason.MASS_LOST, now)

    def _take_back(self) -> Absorb:
        assert self._closed is not None
        self._absorbing[self.context.peer, self.seq] = []
        return Absorb(self.context.fragment, contribution(self.context.peer, self._closed, self._closed.blob))

    def _end(
        self, partner: PeerId | None, outcome: str, reason: str, now: Seconds, moved: tuple[int, int] = (0, 0)
    ) -> list[Effect]:
        self.state = ExchangePhase.OPEN
        self.close_at = self.context.next_close(now, self.size)
        return [self.context.exchange_ended(partner, outcome, reason, now - self._began, moved)]

    def _pushed(self, request: int, sender: PeerId, push: Push, blob: bytes, now: Seconds) -> list[Effect]:
        name = (sender, push.offered.seq)
        if name in self._absorbing:
            self._absorbing[name].append(request)
            return []
        if name in self._arrived:
            return [Reply(request, Envelope(Done()))]
        refused = self._refused.get(name) or self._refusal(push.offered, blob, now)
        if refused:
            keep_latest(self._refused, name, refused, PUSHES_REMEMBERED)
            return [Reply(request, Envelope(Refused(refused)))]
        keep_latest(self._arrived, name, None, PUSHES_REMEMBERED)
        self._absorbing[name] = [request]
        return [Absorb(self.context.fragment, contribution(sender, push.offered, blob))]

    def _refusal(self, offered: Snapshot, blob: bytes, now: Seconds) -> str:
        """Why this push is not added; "": it is."""
        if self._closed is None:
            return Reason.NOT_READY
        return snapshots.check(self.context, offered, blob, self._closed.layout, 0, now, self.size)

    def _absorbed(self, event: Absorbed) -> list[Effect]:
        """Answers those who wait for the oldest job: jobs are done in order."""
        name = next(iter(self._absorbing))
        if not event.accepted:
            self._arrived.pop(name, None)
            keep_latest(self._refused, name, event.reason or Reason.UNEXPECTED, PUSHES_REMEMBERED)
        answer = Done() if event.accepted else Refused(event.reason)
        return [Reply(request, Envelope(answer)) for request in self._absorbing.pop(name)]

"""Which newcomers a member's report lets into the next round: those that ask, the first ones first.

Whoever is let in draws micro-batches and is waited for, so one that never reports costs the others a round's deadline.
A newcomer therefore needs a record, and whoever was let in and did not report rests, each time twice as long. Names
cost little: so after such a round none that has never reported is let in for COMMON_REST_TIMES as long as that round
took, and all names together have no more than a part of the time.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from decentral.comm.wire.messages import RoundMember
from decentral.comm.wire.transport import Knows, knows_all
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

LET_IN_EACH = 4  # newcomers in one report
MAX_WAITING_NEWCOMERS = 64
WAITING_STRANGERS = 16  # of them, those whose record is not here yet
STILL_ASKS_S = 15.0  # a newcomer asks every few seconds; after so long without a question it is gone
FIRST_REST_S, LONGEST_REST_S = 10.0, 600.0  # of a newcomer that was let in and did not report
COMMON_REST_TIMES = 4  # the rest of all that have never reported, in durations of the round that waited for one of them
LONGEST_COMMON_REST_S = 120.0
MOST_REMEMBERED = 1024  # newcomers that rest; peers that have reported; beyond them, the first ones are forgotten


@dataclass(slots=True)
class JoinRequests:
    knows: Knows = knows_all  # whether a peer has a record
    waiting: dict[PeerId, RoundMember] = field(default_factory=dict)  # those that ask, the first one first
    round_began: Seconds = 0.0
    _asked_at: dict[PeerId, Seconds] = field(default_factory=dict)  # when each of them has last asked
    _rests: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # until when each rests, and how long
    _reported: dict[PeerId, bool] = field(default_factory=dict)  # peers that have once reported
    _common_rest_until: Seconds = 0.0

    @property
    def next_at(self) -> Seconds | None:
        """When one of those that wait may be let in."""
        return min(map(self._ready_at, filter(self.knows, self.waiting)), default=None)

    def round_begins(self, peers: Container[PeerId], now: Seconds) -> None:
        """These peers are members by now."""
        self._keep(peer for peer in self.waiting if peer not in peers)
        self.round_began = now

    def ask(self, member: RoundMember, now: Seconds) -> None:
        """A newcomer asks to be let in. It keeps its place while it goes on asking; its record may come later."""
        peer = PeerId(member.peer)
        self._forget_silent(now)
        strangers = sum(not self.knows(one) for one in self.waiting)
        room = len(self.waiting) < MAX_WAITING_NEWCOMERS and (self.knows(peer) or strangers < WAITING_STRANGERS)
        if room or peer in self.waiting:
            self.waiting[peer], self._asked_at[peer] = member, now

    def to_let_in(self, now: Seconds) -> tuple[RoundMember, ...]:
        """The newcomers that a report names now."""
        self._forget_silent(now)
        ready = [one for peer, one in self.waiting.items() if self.knows(peer) and self._ready_at(peer) <= now]
        return tuple(ready[:LET_IN_EACH])

    def round_over(self, let_in: Iterable[PeerId], reported: Collection[PeerId], now: Seconds) -> None:
        """A round is over, at whose start others had let these peers in."""
        for peer in reported:
            keep_latest(self._reported, peer, True, MOST_REMEMBERED)
            self._rests.pop(peer, None)
        for peer in (one for one in let_in if one not in reported):
            _, before_s = self._rests.get(peer, (0.0, FIRST_REST_S / 2))
            rest_s = min(2 * before_s, LONGEST_REST_S)
            keep_latest(self._rests, peer, (now + rest_s, rest_s), MOST_REMEMBERED)
            if peer not in self._reported:
                common_s = min(COMMON_REST_TIMES * (now - self.round_began), LONGEST_COMMON_REST_S)
                self._common_rest_until = max(self._common_rest_until, now + common_s)

    def _ready_at(self, peer: PeerId) -> Seconds:
        until, _ = self._rests.get(peer, (0.0, 0.0))
        return until if peer in self._reported else max(until, self._common_rest_until)

    def _forget_silent(self, now: Seconds) -> None:
        self._keep(peer for peer in self.waiting if now <= self._asked_at[peer] + STILL_ASKS_S)

    def _keep(self, peers: Iterable[PeerId]) -> None:
        self.waiting = {peer: self.waiting[peer] for peer in peers}
        self._asked_at = {peer: self._asked_at[peer] for peer in self.waiting}

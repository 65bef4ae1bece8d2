"""Peers that want to become members of a synchronous round, and how long a donor's round waits for them.

A newcomer fetches the weights of one round, so every donor holds its report back until the newcomer follows that round.
A donor hold ends when the newcomer asks to be let in, HOLD_S after its last question for state, and in any case
MAX_HOLD_S after its first one.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from decentral.comm.wire.messages import MAX_NEWCOMERS, RoundMember
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

HOLD_S = 3.0
MAX_HOLD_S = 60.0
MAX_WAITING_NEWCOMERS = 64


@dataclass(slots=True)
class DonorHold:
    """A newcomer that fetches state: when it asked for some first, and last."""

    began: Seconds
    last: Seconds

    @property
    def ends(self) -> Seconds:
        return min(self.last + HOLD_S, self.began + MAX_HOLD_S)


@dataclass(slots=True)
class Newcomers:
    waiting: dict[PeerId, RoundMember] = field(default_factory=dict)  # they ask to be let in, the latest last
    holds: dict[PeerId, DonorHold] = field(default_factory=dict)

    def hold_for(self, peer: PeerId, now: Seconds) -> None:
        """A newcomer has asked us for state."""
        self.expire(now)
        self.holds.setdefault(peer, DonorHold(now, now)).last = now

    def expire(self, now: Seconds) -> None:
        self.holds = {peer: hold for peer, hold in self.holds.items() if now < hold.ends}

    def ask_to_join(self, member: RoundMember, complete: bool) -> None:
        """`complete` tells that the newcomer has all the state that it needs from us."""
        peer = PeerId(member.peer)
        if complete:
            self.holds.pop(peer, None)
        self.waiting.pop(peer, None)
        self.waiting[peer] = member
        while len(self.waiting) > MAX_WAITING_NEWCOMERS:
            del self.waiting[next(iter(self.waiting))]

    def drop(self, members: Container[PeerId]) -> None:
        """These peers are members by now."""
        self.waiting = {peer: one for peer, one in self.waiting.items() if peer not in members}

    def to_let_in(self) -> tuple[RoundMember, ...]:
        """The newcomers that a report can name, the lowest peers first."""
        return tuple(one for _, one in sorted(self.waiting.items()))[:MAX_NEWCOMERS]

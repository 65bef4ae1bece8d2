"""Replica leases: a holder of a fragment grants another holder that it goes on holding it, for LEASE_S.

A peer gives a fragment up only with the leases of enough other holders, since a record in the DHT may be old and a
lease is not. A peer that has granted a lease keeps the fragment until the lease ends, or is given back.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from decentral.comm.wire.transport import Tag
from decentral.core.ids import PeerId
from decentral.core.units import Seconds

LEASE_S = 90.0  # more than a move takes after it was granted a lease
MOST_LEASES = 64  # of one fragment at a time; there are not so many moves


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

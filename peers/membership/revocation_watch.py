"""A member of a private swarm looks for what its founder has revoked, and for the end of its own invitation.

The founder's lists are in the DHT under one key, each sealed by a member that passes it on: the one with the highest
number counts. Every member looks each LOOK_S, so a revocation has reached all of them within a minute. A list whose
copies are about to expire is announced again by a few of those who read it, drawn at random, so it does not get lost
while the founder is away. Whom it names is out of the roster at once, and its streams end (Exclude).
"""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from decentral.comm.wire.identity import MAX_LIFETIME_S, Signer
from decentral.comm.wire.private_swarm import PrivateSwarm, revoked_key
from decentral.comm.wire.transport import Announce, Event, Found, Lookup
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.journal.events import ErrorLine, RevokedLine
from decentral.core.machine import Log, Woke
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

LOOK_S = 15.0  # between two looks for revocations
COPIES = 3  # of the latest list that are to be in the DHT
COPY_S = MAX_LIFETIME_S / 2  # how long an announced list lasts; there is room for clocks that differ
FRESH_S = COPY_S / 4  # a copy that expires sooner is not counted
NO_MEMBER = "no member"  # begins the reason with which a peer stops whose invitation counts no longer
WARN_S = 3600.0  # before its invitation expires the user is told
ENDINGS = {
    Reason.REVOKED: "the swarm's founder has revoked this peer's invitation",
    Reason.EXPIRED: "this peer's invitation has expired: ask the founder for a new one, and give it with --invite FILE",
}


@dataclass(frozen=True, slots=True)
class Exclude:
    """Effect: end the connections to these peers, and keep the founder's list, so that no restart forgets it."""

    peers: tuple[PeerId, ...]
    revocations: bytes


@dataclass(frozen=True, slots=True)
class MembershipOver:
    """Effect: this peer is no member any more; it saves and stops with this reason, which begins with NO_MEMBER."""

    reason: str


WatchEffect = Announce | Lookup | Exclude | MembershipOver | Log


class MemberRoster(Protocol):
    """The peers of which we know; about as many look for revocations."""

    @property
    def live(self) -> Sized: ...

    def exclude(self, peer: PeerId, now: Seconds) -> list[Log]:
        """Drop a peer that is no member any more."""


@dataclass(slots=True)
class RevocationWatch:
    own: Signer
    private: PrivateSwarm
    chance: Random
    roster: MemberRoster = field(repr=False, compare=False)
    _look_at: Seconds = 0.0
    _told: bool = False  # whether the end of our membership was told
    _warned: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = revoked_key(self.private.run)

    @property
    def wake_at(self) -> Seconds | None:
        """The next look, or what is to be told before."""
        if self._told:
            return None
        return min(self._look_at, self.private.until if self._warned else self.private.until - WARN_S)

    def handle(self, event: Event, now: Seconds) -> list[WatchEffect]:
        match event:
            case Woke() if not self._told:
                return self._over() + self._expiring(now) + self._look(now)
            case Found(key, values) if key == self.key:
                return self._found(values, now)
        return []

    def _look(self, now: Seconds) -> list[WatchEffect]:
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        return [Lookup(self.key)]

    def _found(self, values: Mapping[str, bytes], now: Seconds) -> list[WatchEffect]:
        """Takes the latest list, and announces it again where too few copies of it last for long enough."""
        effects, copies = list[WatchEffect](), 0
        for subkey, value in sorted(values.items()):
            try:
                packed, expires = self.own.open(self.key, PeerId(subkey), value, now)
            except ProtocolError:
                continue
            effects += self._learn(packed, now)
            copies += packed == self.private.revocations.packed and expires > now + FRESH_S
        missing = COPIES - copies if self.private.revocations.number else 0
        if self.chance.random() * (1 + len(self.roster.live)) < missing and self.private.over() is None:
            effects.append(self._announce(now))
        return effects + self._over()

    def _learn(self, packed: bytes, now: Seconds) -> list[WatchEffect]:
        excluded = self.private.learn(packed)
        if excluded is None:
            return []
        line = Log(RevokedLine(number=self.private.revocations.number, peers=tuple(sorted(excluded))))
        dropped = [effect for peer in excluded for effect in self.roster.exclude(peer, now)]
        return [Exclude(tuple(excluded), packed), line, *dropped]

    def _announce(self, now: Seconds) -> Announce:
        expires = now + COPY_S
        value = self.own.seal(self.key, self.private.revocations.packed, expires)
        return Announce(self.key, self.own.peer, value, expires)

    def _expiring(self, now: Seconds) -> list[WatchEffect]:
        if self._warned or now < self.private.until - WARN_S or self._told:
            return []
        self._warned = True
        left = f"{max(0.0, self.private.until - now) / 60:.0f} minutes"
        reason = f"this peer's invitation expires in {left}, and then it stops: ask for a new one"
        return [Log(ErrorLine(reason=reason))]

    def _over(self) -> list[WatchEffect]:
        over = self.private.over()
        if over is None or self._told:
            return []
        self._told = True
        return [MembershipOver(f"{NO_MEMBER}: {ENDINGS[over]}")]

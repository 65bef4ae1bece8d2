"""In a private swarm, watch for peers whose invitation the founder has revoked, and for the end of our own invitation.

The founder's revocation lists are in the DHT under one key, each sealed by the member that announced the list; the list
with the highest number counts. Every member reads the lists every LOOK_S, so a revocation reaches all members within a
minute. When copies of the latest list are about to expire, a few randomly chosen readers announce the list again, so
that it survives while the founder is offline. When a member learns that a peer is revoked, it drops the peer from its
roster at once, and closes the connections to that peer (`Exclude`).
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

LOOK_S = 15.0  # members of a private swarm read the founder's list of revoked invitations in the DHT this often
COPIES = 3  # if the DHT holds fewer copies of the revocation list than this, members store new copies
COPY_S = MAX_LIFETIME_S / 2  # a stored copy expires after this time: half of the longest allowed, as clocks may differ
FRESH_S = COPY_S / 4  # a copy of the revocation list that expires within this time is replaced, so it counts as missing
NO_MEMBER = "no member"  # an invalid invitation stops the peer, with a reason that begins with this text
WARN_S = 3600.0  # the user is warned this long before the invitation expires
ENDINGS = {
    Reason.REVOKED: "the swarm's founder has revoked this peer's invitation",
    Reason.EXPIRED: "this peer's invitation has expired: ask the founder for a new one, and give it with --invite FILE",
}


@dataclass(frozen=True, slots=True)
class Exclude:
    """Effect: close the connections to these revoked peers, and save the list of revocations for the next start."""

    peers: tuple[PeerId, ...]
    revocations: bytes  # the list of revocations, signed by the founder


@dataclass(frozen=True, slots=True)
class MembershipOver:
    """Effect: save a checkpoint and stop, because this peer's invitation was revoked or has expired."""

    reason: str  # the text NO_MEMBER, followed by the cause and what the user can do


WatchEffect = Announce | Lookup | Exclude | MembershipOver | Log


class MemberRoster(Protocol):
    """The part of the roster's interface that the watch uses; `Roster` implements it."""

    @property
    def live(self) -> Sized:
        """Return the reachable peers; the watch uses only their number."""

    def exclude(self, peer: PeerId, now: Seconds) -> list[Log]:
        """Drop a peer whose invitation was revoked, and return journal lines about it."""


@dataclass(slots=True)
class RevocationWatch:
    """The state machine that reads the founder's revocation lists, excludes revoked peers, and ends our membership."""

    own: Signer
    private: PrivateSwarm
    chance: Random
    roster: MemberRoster = field(repr=False, compare=False)
    _look_at: Seconds = 0.0
    _told: bool = False
    _warned: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        """Set `self.key`, the DHT key of the run's revocation lists."""
        self.key = revoked_key(self.private.run)

    @property
    def wake_at(self) -> Seconds | None:
        """Return when to look up the lists, warn that our invitation expires, or stop; None after MembershipOver."""
        if self._told:
            return None
        return min(self._look_at, self.private.until if self._warned else self.private.until - WARN_S)

    def handle(self, event: Event, now: Seconds) -> list[WatchEffect]:
        """Handle a wake-up, or the lists that a lookup has found, and return the effects."""
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
        """Apply the latest list, and perhaps announce it again if fewer than COPIES copies stay valid for FRESH_S.

        Each member announces the list with a probability of missing copies / members, so that all members together
        announce about as many copies as are missing.
        """
        effects, copies = list[WatchEffect](), 0
        for subkey, value in sorted(values.items()):
            try:
                packed, expires = self.own.open(self.key, PeerId(subkey), value, now)
            except ProtocolError:
                continue
            effects += self.learn(packed, now)
            copies += packed == self.private.revocations.packed and expires > now + FRESH_S
        missing = COPIES - copies if self.private.revocations.number else 0
        if self.chance.random() * (1 + len(self.roster.live)) < missing and self.private.over() is None:
            effects.append(self._announce(now))
        return effects + self._over()

    def learn(self, packed: bytes, now: Seconds) -> list[WatchEffect]:
        """Adopt a packed list of revocations if it is newer, and return the effects; [] if it is old or not valid."""
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
        reason = f"this peer's invitation expires in {left}, and then the peer stops: ask the founder for a new one"
        return [Log(ErrorLine(reason=reason))]

    def _over(self) -> list[WatchEffect]:
        over = self.private.over()
        if over is None or self._told:
            return []
        self._told = True
        return [MembershipOver(f"{NO_MEMBER}: {ENDINGS[over]}")]

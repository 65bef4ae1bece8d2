"""Decide which addresses that other peers have published are dialled, and when. Start at `Dialling`.

Anybody can publish the addresses of a third machine as its own. libp2p proves the peer id at the other end, but only
after the dial. So an address is *proven* once its owner was reached there, and all dials of unproven addresses share
limits for each owner, port and IP address. Addresses that the user gives are dialled without this module.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol

from decentral.core.ids import PeerId
from decentral.core.ip_networks import IP, network_of
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

TRIED_AT_ONCE = 4  # at most this many unproven addresses are handed to libp2p for one dial
MOST_PROVEN = 8  # for each peer we remember at most this many proven addresses, at which the peer was reached
PROVEN_S = 24 * 3600.0  # an address stays proven for this long after the peer was last reached there
PROVEN_AGAIN_S = 5.0  # proven addresses are not dialled again for this long after a dial of them has failed
TOLD_S = 120.0  # for this long after a failed dial, libp2p adds the same addresses to each further dial of the peer
IDENTIFIED_S = 1800.0  # after a connection, libp2p keeps the addresses that the peer has sent (Identify) for this long
MOST_LINGERING = 64  # we track at most this many addresses of one peer that libp2p still keeps
DIALS_REMEMBERED = 4096  # we remember the failed dials of at most this many owners, as many ports, and as many networks
# Private address ranges, which many sites use at once: dialled only if this machine has an address in the same range.
NEAR = tuple(
    map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"))
) + tuple(map(ip_network, ("198.18.0.0/15", "fc00::/7", "fe80::/10", "fec0::/10")))
# IPv6 ranges whose addresses lead to an IPv4 address that they contain; such addresses are never dialled.
TUNNELS = tuple(map(ip_network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")))
TAIL = r"(?:/(?:quic|quic-v1|ws|tls|noise))*(?:/p2p/[A-Za-z0-9]+/p2p-circuit)?"
DIALLED_ADDRESS = re.compile(rf"/ip[46]/([0-9a-fA-F.:]+)/(?:tcp|udp)/([0-9]{{1,5}}){TAIL}/p2p/([A-Za-z0-9]+)")


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limit of failed dials: how many may fail within any window of time, and how long no dial may begin after that.

    The first pause is as long as one window. Each further pause is twice as long, up to `longest_s`, and each window
    without a failed dial halves the next pause.
    """

    most: int
    window_s: Seconds
    longest_s: Seconds


# Limits failed dials of one peer, each of up to TRIED_AT_ONCE new addresses; its failed searches have as many again.
OF_OWNER = Allowance(1, 5.0, 120.0)
OF_PORT = Allowance(4, 60.0, 600.0)  # limits failed dials of one TCP or UDP port at one IP address, for all peers
OF_IP = Allowance(16, 60.0, 600.0)  # limits failed dials of one IPv4 address or IPv6 /64, for all peers and ports


@dataclass(slots=True)
class Failures:
    """The dials of one owner, port or IP address that have failed in the last window, or have not ended."""

    calm_since: Seconds  # from this time on, windows without a failure are counted: each halves the next pause
    until: Seconds = -math.inf  # end of the last pause
    failed_at: list[Seconds] = field(default_factory=list)
    flying: int = 0  # number of dials that have begun and not ended
    doubled: int = 0  # the next pause lasts 2 ** doubled windows

    def begin(self) -> None:
        """Count a dial that begins."""
        self.flying += 1

    def end(self) -> None:
        """Count a dial that has ended."""
        self.flying = max(0, self.flying - 1)

    def room(self, allowance: Allowance, now: Seconds) -> int:
        """Return how many dials may begin now: 0 if a dial in flight must end first, -1 during a pause."""
        if now < self.until:
            return -1
        self.failed_at = [at for at in self.failed_at if now < at + allowance.window_s]
        windows = max(0, math.floor((now - self.calm_since) / allowance.window_s))
        self.doubled, self.calm_since = max(0, self.doubled - windows), self.calm_since + windows * allowance.window_s
        return max(0, allowance.most - len(self.failed_at) - self.flying)

    def fail(self, allowance: Allowance, now: Seconds) -> None:
        """Count a failed dial, and begin a pause if it was the last that the allowance permits."""
        self.room(allowance, now)
        self.failed_at.append(now)
        self.calm_since = now
        if len(self.failed_at) >= allowance.most:
            self.until = now + min(allowance.longest_s, allowance.window_s * 2.0 ** min(self.doubled, 20))
            self.calm_since, self.doubled = self.until, self.doubled + 1
            self.failed_at.clear()


Limited = PeerId | str | tuple[IP, int]
"""What has an allowance for failed dials: the owner of a record, a network, or a port of an IP address."""


@dataclass(slots=True)
class FailureLog:
    """The failed dials of all owners, of all ports or of all networks, which have the same allowance."""

    allowance: Allowance
    entries: dict[Limited, Failures] = field(default_factory=dict)

    def room(self, key: Limited, now: Seconds) -> int:
        """Return how many dials may begin now: 0 if a dial in flight must end first, -1 during a pause."""
        entry = self.entries.get(key)
        return self.allowance.most if entry is None else entry.room(self.allowance, now)

    def begin(self, key: Limited, now: Seconds) -> None:
        """Count a dial that begins."""
        if key not in self.entries and len(self.entries) >= DIALS_REMEMBERED:
            self._forget_some(now)
        entry = self.entries.get(key) or Failures(now)
        entry.begin()
        keep_latest(self.entries, key, entry, DIALS_REMEMBERED)

    def _forget_some(self, now: Seconds) -> None:
        """Forget the eighth of the entries that may begin the most dials now, so that paused entries are remembered."""
        for key in sorted(self.entries, key=lambda key: self.room(key, now), reverse=True)[: DIALS_REMEMBERED // 8]:
            del self.entries[key]

    def end(self, key: Limited, failed: bool, now: Seconds) -> None:
        """Count a dial that has ended."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.end()
            if failed:
                entry.fail(self.allowance, now)


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the dial of an address reaches first: the address's owner, or the owner's relay."""

    address: str
    ip: IP = field(compare=False)
    port: tuple[IP, int] = field(compare=False)
    network: str = field(compare=False)

    @classmethod
    def of(cls, owner: PeerId, address: str) -> "Target | None":
        """Return the target of an address that ends in the owner's id; None if we do not dial such an address."""
        found = DIALLED_ADDRESS.fullmatch(address)
        if found is None or found[3] != owner:
            return None
        try:
            ip = ip_address(found[1])
        except ValueError:
            return None
        if isinstance(ip, IPv6Address):
            ip = ip.ipv4_mapped or ip
        return cls(address, ip, (ip, int(found[2])), network_of(ip))


class OwnAddress(Protocol):
    """Interface of a function that tells from which address this machine would send to an IP address."""

    def __call__(self, ip: IP) -> IP | None:
        """Return the address of this machine, or None if there is no route."""


@dataclass(slots=True)
class Ranges:
    """Rule that says which IP addresses from other peers may be dialled: global ones, and those in our own networks."""

    source: OwnAddress
    loopback: bool = False

    def allow_loopback(self) -> None:
        """Allow loopback addresses: this peer has no other address, or its user has given a loopback address."""
        self.loopback = True

    def allow(self, ip: IP) -> bool:
        """Return whether an IP address may be dialled: it is global, or in a network in which this machine is too."""
        if ip.is_loopback:
            return self.loopback
        if ip.is_multicast or any(ip in tunnel for tunnel in TUNNELS):
            return False
        network = next((one for one in NEAR if ip in one), None)
        if network is None:
            return ip.is_global
        source = self.source(ip)
        return source is not None and source in network

    def permit(self, owner: PeerId, address: str) -> bool:
        """Return whether an owner's address begins with an IP address that may be dialled, or with a DNS name."""
        target = Target.of(owner, address)
        return address.startswith("/dns") if target is None else self.allow(target.ip)


@dataclass(frozen=True, slots=True)
class Dial:
    """A dial of one owner. If it is `allowed`, it has begun, and the caller must end it with `Dialling.end`."""

    owner: PeerId
    addresses: tuple[str, ...]  # addresses to dial at once; if empty, libp2p searches for the peer
    counted: tuple[Target, ...]  # unproven targets of the dial, with those that libp2p adds by itself
    proven: bool = False  # True: the peer was reached at these addresses before
    allowed: bool = True


Lingering = dict[PeerId, dict[Target, Seconds]]
"""By owner: until when libp2p dials a target with each dial of the owner."""


@dataclass(slots=True)
class Dialling:
    """The rule that decides which addresses from other peers are dialled, and when.

    - Proven addresses are dialled first, without a limit other than a pause of PROVEN_AGAIN_S after a failed dial.
    - To each dial libp2p adds the addresses that it already has of the owner, from earlier dials or from the owner
      itself. They count as dialled. If their IP addresses have no allowance left, their owner is not dialled.
    - Unproven addresses are dialled up to TRIED_AT_ONCE at a time, in allowed ranges, and if the allowances of their
      owner, port and IP address permit it. A new record of the owner does not renew these allowances.
    - A search in which libp2p finds no address of the owner delays further searches, but no dial of its addresses.
    """

    ranges: Ranges
    _owners: FailureLog = field(default_factory=lambda: FailureLog(OF_OWNER))
    _searches: FailureLog = field(default_factory=lambda: FailureLog(OF_OWNER))
    _ports: FailureLog = field(default_factory=lambda: FailureLog(OF_PORT))
    _networks: FailureLog = field(default_factory=lambda: FailureLog(OF_IP))
    # For each peer: the addresses at which it was reached, and when each was last reached.
    _proven: dict[PeerId, dict[str, Seconds]] = field(default_factory=dict)
    _proven_failed: dict[PeerId, Seconds] = field(default_factory=dict)  # when a dial of proven addresses last failed
    _busy: set[PeerId] = field(default_factory=set)  # owners that are being dialled
    _told: Lingering = field(default_factory=dict)  # addresses that libp2p has from failed dials, and until when
    _identified: Lingering = field(default_factory=dict)  # addresses that libp2p has from the peers, and until when

    def begin(self, owner: PeerId, addresses: Sequence[str] | None, now: Seconds) -> Dial | None:
        """Begin a dial of an owner.

        Args:
            owner: The peer that has published the addresses, or is said to have them.
            addresses: Its addresses, each ending in `/p2p/` and its id; others are passed over. None: nobody has told
                us any, and libp2p searches for the owner.
            now: Seconds of a clock that does not jump.

        Returns:
            The dial, which is not `allowed` if it must not begin now; None if that depends on a dial in flight.
        """
        if owner in self._busy:
            return None
        proven = self._proven_of(owner, addresses or (), now)
        lingering = self._told.get(owner, {}) | self._identified.get(owner, {})
        known = [one for one, until in lingering.items() if now < until and one.address not in proven]
        if proven and now >= self._proven_failed.get(owner, -math.inf) + PROVEN_AGAIN_S:
            rooms = [self._room(one, known[:place], now, ports=False) for place, one in enumerate(known)]
            return self._begun(Dial(owner, proven, tuple(known), proven=True), min(rooms, default=1), now)
        rooms = [self._owners.room(owner, now)]
        rooms += [self._room(one, known[:place], now) for place, one in enumerate(known)]
        if addresses is None:
            rooms.append(self._searches.room(owner, now))
            return self._begun(Dial(owner, (), tuple(known)), min(rooms), now)
        chosen = list[Target]()
        if min(rooms) > 0:
            for target in self._fresh(owner, [one for one in addresses if one not in proven], known):
                rooms.append(self._room(target, [*known, *chosen], now))
                chosen += [target] if rooms[-1] > 0 and len(chosen) < TRIED_AT_ONCE else []
        dial = Dial(owner, tuple(one.address for one in chosen), tuple(dict.fromkeys([*known, *chosen])))
        return self._begun(dial, 1 if chosen else 0 if 0 in rooms else -1, now)

    def is_paused(self, owner: PeerId, now: Seconds) -> bool:
        """Return whether `begin` would refuse every dial of this owner now, at whatever addresses."""
        may_try_proven = owner in self._proven and now >= self._proven_failed.get(owner, -math.inf) + PROVEN_AGAIN_S
        return not may_try_proven and self._owners.room(owner, now) < 0

    def _begun(self, dial: Dial, room: int, now: Seconds) -> Dial | None:
        """Count and return a dial if it may begin now (`room` > 0).

        Otherwise, return the dial with `allowed` False, or None if a dial in flight must end before that is decided.
        """
        if room <= 0:
            return None if room == 0 and self._busy else replace(dial, allowed=False)
        self._busy.add(dial.owner)
        if not dial.proven:
            self._owners.begin(dial.owner, now)
        if not dial.addresses:
            self._searches.begin(dial.owner, now)
        for target in dial.counted:
            self._networks.begin(target.network, now)
            if not dial.proven:
                self._ports.begin(target.port, now)
        _linger(self._told, dial.owner, (one for one in dial.counted if one.address in dial.addresses), now, TOLD_S)
        return dial

    def end(
        self, dial: Dial, reached_at: Iterable[str], failed_at: Iterable[str], now: Seconds, dialled: bool = True
    ) -> None:
        """End a dial.

        Args:
            dial: The allowed dial that `begin` has returned.
            reached_at: Addresses of connections to the owner; empty if the dial has failed.
            failed_at: Addresses that libp2p has dialled in vain. Addresses that are not in the dial are those that the
                owner itself told libp2p in an earlier connection.
            now: As in `begin`.
            dialled: False if libp2p has searched for the owner, found no address, and so dialled nobody.
        """
        at = set(reached_at)
        self._busy.discard(dial.owner)
        if not dial.addresses:
            self._searches.end(dial.owner, not at, now)
        if not dial.proven:
            self._owners.end(dial.owner, not at and dialled, now)
        elif not at:
            keep_latest(self._proven_failed, dial.owner, now, DIALS_REMEMBERED)
        for target in dial.counted:
            failed = target.address not in at
            self._networks.end(target.network, failed, now)
            if not dial.proven:
                self._ports.end(target.port, failed, now)
        counted = {*dial.addresses, *(target.address for target in dial.counted)}
        found = (Target.of(dial.owner, address) for address in failed_at if address not in counted)
        uncounted = [target for target in found if target is not None]
        for target in uncounted:
            self._networks.begin(target.network, now)
            self._networks.end(target.network, True, now)
        _linger(self._identified, dial.owner, uncounted, now, IDENTIFIED_S)
        self.met(dial.owner, at, now)

    def met(self, owner: PeerId, at: Iterable[str], now: Seconds) -> None:
        """Take the addresses of connections to an owner, whichever side has dialled, as proven."""
        for address in at:
            if Target.of(owner, address) is not None:
                known = self._proven.get(owner, {})
                keep_latest(known, address, now, MOST_PROVEN)
                keep_latest(self._proven, owner, known, DIALS_REMEMBERED)
                self._owners.entries.pop(owner, None)
                self._searches.entries.pop(owner, None)
                self._told.pop(owner, None)  # a connection makes libp2p forget the addresses of failed dials
                self._proven_failed.pop(owner, None)

    def _proven_of(self, owner: PeerId, addresses: Sequence[str], now: Seconds) -> tuple[str, ...]:
        known = self._proven.get(owner, {})
        return tuple(one for one, at in reversed(known.items()) if one in addresses and now < at + PROVEN_S)

    def _fresh(self, owner: PeerId, addresses: Sequence[str], known: Sequence[Target]) -> list[Target]:
        """Return the targets of these addresses that are in allowed ranges; those that libp2p already has come last."""
        found = [target for one in dict.fromkeys(addresses) if (target := Target.of(owner, one)) is not None]
        allowed = [target for target in found if self.ranges.allow(target.ip)]
        return sorted(allowed, key=lambda target: target in known)

    def _room(self, target: Target, before: Sequence[Target], now: Seconds, ports: bool = True) -> int:
        """Return how many dials of a target may begin if the dial already has the targets `before`; -1 in a pause."""
        if target in before:
            return 1  # the target is in the dial already, so it counts no further
        left = [(self._networks.room(target.network, now), sum(one.network == target.network for one in before))]
        if ports:
            left.append((self._ports.room(target.port, now), sum(one.port == target.port for one in before)))
        return -1 if min(left)[0] < 0 else max(0, min(room - others for room, others in left))


def _linger(among: Lingering, owner: PeerId, targets: Iterable[Target], now: Seconds, for_s: Seconds) -> None:
    """Remember that libp2p has these addresses of the owner for the next `for_s` seconds."""
    kept = {target: until for target, until in among.get(owner, {}).items() if now < until}
    for target in targets:
        keep_latest(kept, target, now + for_s, MOST_LINGERING)
    if kept:
        keep_latest(among, owner, kept, DIALS_REMEMBERED)

"""A home router's network address translation (RFC 4787, RFC 5382), one for each peer that is behind one. Compiled.

Peer n has the private address inside_N[n]; packets that it sends get its outside address and a port of the router.
    home        endpoint-independent mapping: one outside port for each inside port, whatever the destination
    symmetric   address-and-port-dependent mapping: another outside port for each destination
Both filter by address and port: only what the peer has sent to comes back in, and a SYN that nobody asked for is
dropped without an answer. TCP and UDP; all else is dropped, also packets from a peer to its own outside address.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decentral.core.compiled import compiled, inlined
from decentral.scheduler.topology.arrays import Flags, Ints

KINDS = ("home", "symmetric")
SESSIONS = 1024  # of a router; the one that expires first is given up for another
FIRST_PORT, PORTS = 32768, 28000
SECOND_NS = 1_000_000_000
UDP_NS = 120 * SECOND_NS  # RFC 4787, REQ-5
TCP_OPENING_NS = 240 * SECOND_NS  # RFC 5382, REQ-5: until it is established, and from the first FIN or RST
TCP_NS = 7440 * SECOND_NS
TCP, UDP = 6, 17


class Nat(NamedTuple):
    """The tables of all routers: R sessions for each of N peers. A session with expiry 0 is free."""

    inside_N: Ints  # 0: this peer is behind no router
    symmetric_N: Flags
    next_port_N: Ints
    used_N: Ints  # sessions before this one may be in use
    protocol_NR: Ints
    inside_port_NR: Ints
    outside_port_NR: Ints
    remote_NR: Ints  # address and port of the other side, address << 16 | port
    expires_NR: Ints
    ending_NR: Ints  # 1 from the first FIN or RST of a TCP connection


def no_nat(peers: int, seed: int) -> Nat:
    """Tables for so many peers, none of which is behind a router yet. `seed`: of the first port of each."""
    ports = np.random.default_rng(seed).integers(0, PORTS, peers)
    tables = (np.zeros((peers, SESSIONS), np.int64) for _ in range(6))
    return Nat(np.zeros(peers, np.int64), np.zeros(peers, np.bool_), ports, np.zeros(peers, np.int64), *tables)


def forget(nat: Nat, peer: int) -> None:
    """Clears a router's table, as a restart or a new address does."""
    nat.expires_NR[peer] = 0
    nat.used_N[peer] = 0


@compiled
def outbound(nat: Nat, peer: int, packet: NDArray[np.uint8], outside: int, now: int) -> bool:
    """Rewrites the sender of a packet that leaves. False for one that its router does not carry."""
    header = 4 * (packet[0] & 15)
    if not _translatable(packet, header) or address_at(packet, 12) != nat.inside_N[peer]:
        return False
    protocol, inside_port = int(packet[9]), word_at(packet, header)
    remote = address_at(packet, 16) << 16 | word_at(packet, header + 2)
    session, mapped = -1, -1
    for one in range(nat.used_N[peer]):
        if nat.expires_NR[peer, one] <= now or nat.protocol_NR[peer, one] != protocol:
            continue
        if nat.inside_port_NR[peer, one] == inside_port:
            mapped = nat.outside_port_NR[peer, one]
            if nat.remote_NR[peer, one] == remote:
                session = one
                break
    if session < 0:
        session = _free_session(nat, peer, now)
        nat.protocol_NR[peer, session] = protocol
        nat.inside_port_NR[peer, session], nat.remote_NR[peer, session] = inside_port, remote
        if mapped < 0 or nat.symmetric_N[peer]:
            mapped = _free_port(nat, peer, protocol, now)
        nat.outside_port_NR[peer, session] = mapped
        nat.ending_NR[peer, session] = 0
    _prolong(nat, peer, session, packet, header, now)
    _rewrite(packet, header, 12, outside, header, nat.outside_port_NR[peer, session])
    return True


@compiled
def inbound(nat: Nat, peer: int, packet: NDArray[np.uint8], now: int) -> bool:
    """Rewrites the receiver of a packet that comes in. False for one that nobody behind the router has asked for."""
    header = 4 * (packet[0] & 15)
    if not _translatable(packet, header):
        return False
    protocol, port = int(packet[9]), word_at(packet, header + 2)
    remote = address_at(packet, 12) << 16 | word_at(packet, header)
    for session in range(nat.used_N[peer]):
        if (
            nat.expires_NR[peer, session] > now
            and nat.outside_port_NR[peer, session] == port
            and nat.remote_NR[peer, session] == remote
            and nat.protocol_NR[peer, session] == protocol
        ):
            _prolong(nat, peer, session, packet, header, now)
            _rewrite(packet, header, 16, nat.inside_N[peer], header + 2, nat.inside_port_NR[peer, session])
            return True
    return False


@inlined
def _translatable(packet: NDArray[np.uint8], header: int) -> bool:
    """A whole TCP or UDP packet: of a fragment only the first has the ports, and kernels find the path's MTU anyway."""
    room = 20 if packet[9] == TCP else 8
    whole = (word_at(packet, 6) & 0x3FFF) == 0
    return bool(whole and (packet[9] == TCP or packet[9] == UDP) and len(packet) >= header + room)


@inlined
def _prolong(nat: Nat, peer: int, session: int, packet: NDArray[np.uint8], header: int, now: int) -> None:
    """A session lasts from its last packet on: long for an established TCP connection, short for one that ends."""
    if packet[9] == UDP:
        nat.expires_NR[peer, session] = now + UDP_NS
        return
    flags = packet[header + 13]
    opening = flags & 2  # SYN
    if flags & 5:  # FIN or RST
        nat.ending_NR[peer, session] = 1
    short = opening or nat.ending_NR[peer, session]
    nat.expires_NR[peer, session] = now + (TCP_OPENING_NS if short else TCP_NS)


@inlined
def _free_session(nat: Nat, peer: int, now: int) -> int:
    """A session that is not in use, or else the one that expires first."""
    first = 0
    for one in range(nat.used_N[peer]):
        if nat.expires_NR[peer, one] <= now:
            return one
        if nat.expires_NR[peer, one] < nat.expires_NR[peer, first]:
            first = one
    if nat.used_N[peer] < SESSIONS:
        nat.used_N[peer] += 1
        return int(nat.used_N[peer] - 1)
    return first


@inlined
def _free_port(nat: Nat, peer: int, protocol: int, now: int) -> int:
    """The next port that no session has. There are more ports than sessions."""
    while True:
        port = FIRST_PORT + nat.next_port_N[peer] % PORTS
        nat.next_port_N[peer] += 1
        taken = False
        for one in range(nat.used_N[peer]):
            same = nat.outside_port_NR[peer, one] == port and nat.protocol_NR[peer, one] == protocol
            taken = taken or (same and nat.expires_NR[peer, one] > now)
        if not taken:
            return int(port)


@inlined
def _rewrite(packet: NDArray[np.uint8], header: int, at: int, address: int, port_at: int, port: int) -> None:
    """Puts an address and a port into a packet, and adjusts both checksums for the difference (RFC 1624)."""
    old = word_at(packet, at) + word_at(packet, at + 2)
    new = (address >> 16) + (address & 0xFFFF)
    _adjust(packet, 10, old, new)
    checksum_at = header + (16 if packet[9] == TCP else 6)
    if packet[9] == TCP or word_at(packet, checksum_at) != 0:  # a UDP packet may have none
        _adjust(packet, checksum_at, old + word_at(packet, port_at), new + port)
        if packet[9] == UDP and word_at(packet, checksum_at) == 0:
            _put(packet, checksum_at, 0xFFFF)
    _put(packet, at, address >> 16)
    _put(packet, at + 2, address & 0xFFFF)
    _put(packet, port_at, port)


@inlined
def _adjust(packet: NDArray[np.uint8], at: int, old: int, new: int) -> None:
    """HC' = ~(~HC + ~m + m'), equation 3 of RFC 1624, for sums of up to three words."""
    total = (~word_at(packet, at) & 0xFFFF) + 3 * 0xFFFF - old + new
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    _put(packet, at, ~total & 0xFFFF)


@inlined
def word_at(packet: NDArray[np.uint8], at: int) -> int:
    """Two bytes of a packet as a number."""
    return int(np.int64(packet[at]) << 8 | packet[at + 1])


@inlined
def address_at(packet: NDArray[np.uint8], at: int) -> int:
    """Four bytes of a packet as a number."""
    return int(word_at(packet, at) << 16 | word_at(packet, at + 2))


@inlined
def _put(packet: NDArray[np.uint8], at: int, value: int) -> None:
    packet[at], packet[at + 1] = value >> 8, value & 0xFF

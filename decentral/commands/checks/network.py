"""Checks of this machine's network: its ports, the routers before it, whether others reach it, how fast links are.

Whether others reach it is said by them: they dial back (`PeerNetwork.dial_back`).
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mode

from decentral.comm.net import ports
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_CHUNK_BYTES, Ping, Pong, Refused, StateChunk, StateRequest
from decentral.comm.wire.network import DialBack, DialStatus, Identified, PeerNetwork
from decentral.comm.wire.transport import Answer, AskError, Transport
from decentral.commands.checks.finding import Finding, ok, unknown, warn, wrong
from decentral.core.at_once import at_once
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.reasons import Reason
from decentral.core.units import KiB, Seconds, readable_bytes
from decentral.peers.membership.records import Profile

ASKED = 3  # peers that are asked to dial back; each is asked once
PINGS = 3
PING_S = 10.0
DOWNLOAD_S = 60.0
FIRST_PIECE_BYTES = 256 * KiB  # of a newcomer's state; the next piece is larger if this one came within
QUICK_S = 1.0
SLOW_LINK_PER_S = 625e3  # bytes/s: over 5 Mb/s a swarm of four recovers 0.74 of what it could (docs/results/wan.md)
BIT = 8

FORWARD = "forward TCP port {port} on the router to this machine, and start the peer with --listen "
FORWARD += "{everywhere}/tcp/{port} --announce {outside}/tcp/{port}"
OPEN = "open TCP port {port} in this machine's firewall (and the cloud's security group), and start the peer with "
OPEN += "--listen {everywhere}/tcp/{port}"
SMALLER_PACKETS = "make this machine's packets smaller: ip link set dev INTERFACE mtu 1280; if that helps, mend the "
SMALLER_PACKETS += "tunnel, VPN or router on the way (its MTU, or the ICMP messages that it drops)"
ALL_OF_THEM = "--listen takes this machine's addresses; /ip4/0.0.0.0/tcp/PORT is all of IPv4, /ip6/::/tcp/PORT of IPv6"
UNTIL_THEN = "until then it exchanges with peers that can be reached, and with others through their relays"


@dataclass(frozen=True, slots=True)
class Seen:
    """How one other peer sees this machine."""

    peer: PeerId
    said: Identified


async def seen_by(network: PeerNetwork, peers: Sequence[PeerId]) -> list[Seen]:
    """What these peers say of us; those that say nothing are left out."""

    async def one(peer: PeerId) -> Seen | None:
        try:
            return Seen(peer, await network.identify(peer))
        except (AskError, ProtocolError):
            return None

    return [seen for seen in await at_once(map(one, peers)) if seen]


def address_translation(own: Sequence[str], seen: Sequence[Seen]) -> Finding:
    """Whether this machine is behind a router that translates addresses, and of which kind (RFC 4787).

    `own`: the addresses of this machine's interfaces, with the port that it listens at.
    """
    observed = sorted({place for one in seen if (place := _ip_and_port(one.said.observed))})
    inside = {place[0] for address in own if (place := _ip_and_port(address))}
    if not observed:
        return unknown("NAT", "no peer says how it sees this machine")
    if all(address in inside for address, _ in observed):
        return ok(
            "NAT", f"none: others see {' and '.join(sorted({address for address, _ in observed}))}, as it is here"
        )
    outside = [place for place in observed if place[0] not in inside]
    address = mode(place[0] for place in outside)
    kind = "two peers tell of which kind, and one did"
    if len(seen) > 1:
        same = len({port for _, port in outside}) == 1
        kind = "one port for all others" if same else "another port for each other peer (symmetric)"
    inner = next((place for place in sorted(inside) if place != "127.0.0.1"), "127.0.0.1")
    return ok("NAT", f"behind a router: this machine is {inner}, others see {address}; {kind}")


async def dialled_back(network: PeerNetwork, seen: Sequence[Seen], announced: Sequence[str]) -> list[DialBack]:
    """Asks some of these peers to begin a connection to us. `announced`: where the user says that we are reached."""
    own = [*announced, *await network.addresses()]

    async def one(peer: PeerId) -> DialBack | None:
        try:
            return await network.dial_back(peer, own)
        except (AskError, ProtocolError):
            return None

    asked = [each.peer for each in seen if each.said.dials_back][:ASKED]
    return [came for came in await at_once(map(one, asked)) if came]


def reachability(own: Sequence[str], seen: Sequence[Seen], came: Sequence[DialBack]) -> Finding:
    """Whether others can begin a connection to this machine. `came`: what those that were asked to have said."""
    inside = {place[0] for address in own if (place := _ip_and_port(address))}
    observed = [place[0] for one in seen if (place := _ip_and_port(one.said.observed))]
    if _all_loopback(inside) and observed and not _all_loopback(observed):
        said = f"this machine listens at {' and '.join(sorted(inside))}, which only itself reaches"
        everywhere = _everywhere(observed[0])
        return warn("reachability", said, f"start the peer with --listen {everywhere}/tcp/PORT, or without --listen")
    reached = [answer.address for answer in came if answer.status == DialStatus.OK]
    if reached:
        return ok("reachability", f"{len(reached)} of {len(came)} peers dialled back: {reached[0]}")
    failed = [answer for answer in came if answer.status == DialStatus.ERROR]
    if not failed:
        return _nobody_dials(observed, came)
    outside, port = mode(observed) if observed else "ADDRESS", port_of(own)
    advice, everywhere = OPEN if outside in inside else FORWARD, _everywhere(outside)
    remedy = advice.format(port=port, outside=f"/ip{_version(outside)}/{outside}", everywhere=everywhere)
    said = f"{len(failed)} of {len(came)} peers could not dial back to {outside}, port {port}"
    return warn("reachability", f"{said}: no route to this machine from outside", f"{remedy}; {UNTIL_THEN}")


def _nobody_dials(observed: Sequence[str], came: Sequence[DialBack]) -> Finding:
    """Where the question has no answer: peers dial no private addresses, and not often."""
    if observed and not any(ipaddress.ip_address(address).is_global for address in observed):
        where = "on this machine" if _all_loopback(observed) else "in this private network"
        there = "while a peer runs here, try from another machine: python -m decentral.doctor --join, with its address"
        return unknown("reachability", f"the other peers are {where}, where AutoNAT does not dial back", there)
    text = next((answer.text for answer in came if answer.text), "no answer")
    return unknown("reachability", f"no peer dialled back ({text})", "try again in a minute: peers dial rarely")


def _version(address: str) -> int:
    """Return the IP version of an address, 4 or 6; 4 for a placeholder that is no address."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 4


def _everywhere(address: str) -> str:
    """Return the multiaddress of all interfaces, in the IP version of this address."""
    return "/ip6/::" if _version(address) == 6 else "/ip4/0.0.0.0"


def _all_loopback(addresses: Iterable[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


async def latency(transport: Transport, peers: Sequence[PeerId]) -> Finding:
    """Round trips of small questions to these peers, the best of a few each."""
    found = await at_once(_round_trip_s(transport, peer) for peer in peers)
    times_ms = sorted(1e3 * one for one in found if one is not None)
    if not times_ms:
        return unknown("latency", "no answer to a ping")
    return ok(
        "latency", f"{times_ms[0]:.0f} ms to the nearest of {len(times_ms)} peers, {times_ms[-1]:.0f} to the farthest"
    )


async def _round_trip_s(transport: Transport, peer: PeerId) -> Seconds | None:
    times = []
    for number in range(PINGS):
        try:
            answer = await transport.ask(peer, Envelope(Ping(number)), PING_S, 0)
        except AskError:
            return None
        if isinstance(answer.envelope.message, Pong):
            times.append(answer.seconds)
    return min(times, default=None)


async def download(transport: Transport, peers: Sequence[PeerId], run: RunId) -> Finding:
    """Bytes/s of a piece of state, which is what a newcomer fetches first. Strangers may not upload to measure."""
    refusals: list[str] = []
    for peer in peers[:ASKED]:
        try:
            answer = await _piece(transport, peer, run, FIRST_PIECE_BYTES)
            if isinstance(answer.envelope.message, StateChunk) and answer.seconds < QUICK_S:
                answer = await _piece(transport, peer, run, MAX_CHUNK_BYTES)
        except AskError as error:
            refusals.append(str(error.reason))
            continue
        message = answer.envelope.message
        if isinstance(message, Refused):
            refusals.append(message.reason)
        elif answer.received_bytes < FIRST_PIECE_BYTES:
            size = readable_bytes(answer.received_bytes)
            return unknown("download", f"the model's fragments have {size}: too little to measure a link with")
        else:
            return rate("download", answer.received_bytes / max(1e-6, answer.seconds - answer.first_byte_s))
    if refusals and set(refusals) <= {Reason.DEADLINE, Reason.CUT} and await _answers_small(transport, peers[:ASKED]):
        size = readable_bytes(FIRST_PIECE_BYTES)
        seen = f"small answers come, and none of {size}: the path drops large packets (MTU)"
        return wrong("download", seen, SMALLER_PACKETS)
    return unknown("download", f"no peer gives state now ({', '.join(refusals) or 'nobody asked'})", "try again later")


async def _answers_small(transport: Transport, peers: Sequence[PeerId]) -> bool:
    """Return whether one of these peers answers a ping, which fits one small packet."""
    return any(await at_once(_round_trip_s(transport, peer) for peer in peers))


async def _piece(transport: Transport, peer: PeerId, run: RunId, length: int) -> Answer:
    return await transport.ask(peer, Envelope(StateRequest(run, 0, 0, length)), DOWNLOAD_S, MAX_CHUNK_BYTES)


def rate(check: str, bytes_per_s: float) -> Finding:
    """A link's rate, and what follows where it is low."""
    seen = f"{BIT * bytes_per_s / 1e6:.1f} Mb/s"
    if bytes_per_s < SLOW_LINK_PER_S:
        remedy = "use a wire in the place of Wi-Fi, end other transfers, or train a smaller model: windows stretch"
        return warn(check, seen, remedy)
    return ok(check, seen)


def measured(profile: Profile) -> list[Finding]:
    """The rates that a running peer has measured by its exchanges; none while it has not."""
    rates: Mapping[str, float] = {"download": profile.down, "upload": profile.up}
    return [rate(check, bytes_per_s) for check, bytes_per_s in rates.items() if bytes_per_s]


def listens(addresses: Sequence[str], running: bool) -> Finding:
    """Where libp2p has started for the checks: at the peer's own port, or at another one while the peer has that."""
    places = ", ".join(address.partition("/p2p/")[0] for address in addresses)
    return ok("port", f"{places}{' (for this check; the peer has its own)' if running else ''}")


def cannot_listen(error: str, listen: Sequence[str]) -> Finding:
    """Where libp2p does not start at the addresses of --listen."""
    if "address already in use" in error:
        return wrong("port", f"{', '.join(listen)}: address already in use", ports.TAKEN)
    if "cannot assign" in error:
        return wrong("port", error, ALL_OF_THEM)
    if "permission denied" in error:
        return wrong("port", error, "ports below 1024 are for root: --listen at a higher one")
    return wrong("port", error, "choose other addresses with --listen")


def port_of(addresses: Sequence[str]) -> int:
    """The TCP port of the first address that has one; 0: none has."""
    return next((place[1] for address in addresses if (place := _ip_and_port(address))), 0)


def _ip_and_port(address: str) -> tuple[str, int] | None:
    """Of `/ip4/1.2.3.4/tcp/4001...`; None for an address of another kind, such as one through a relay."""
    found = re.match(r"/ip[46]/([0-9a-fA-F.:]+)/tcp/(\d+)", address)
    return (found[1], int(found[2])) if found and "/p2p-circuit" not in address else None

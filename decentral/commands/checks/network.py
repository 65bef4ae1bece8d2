"""Check this machine's network: ports, address translation, whether peers reach it, links' speed, and peers' clocks.

To find out whether other peers reach this machine, a check asks some peers to dial back (`PeerNetwork.dial_back`).
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, mode

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
from decentral.core.units import KiB, Seconds, plural, readable_bytes
from decentral.peers.membership.records import Profile
from decentral.peers.runtime.clock import CLOCKS_AGREE_S, MOST_AHEAD_S, difference

ASKED = 3  # at most this many peers are asked to dial back, and at most this many for a download
PINGS = 3
PING_S = 10.0
DOWNLOAD_S = 60.0  # a download of a part of the model's state fails after this time
FIRST_PIECE_BYTES = 256 * KiB
QUICK_S = 1.0  # if the first download takes less, a larger download follows, to measure a fast link better
SLOW_LINK_PER_S = 625e3  # bytes/s (5 Mb/s); a slower link is reported, as gossip gains less there (docs/results/wan.md)
BIT = 8

FORWARD = "forward TCP port {port} on the router to this machine, and start the peer with --listen "
FORWARD += "{everywhere}/tcp/{port} --announce {outside}/tcp/{port}"
OPEN = "open TCP port {port} in this machine's firewall (and the cloud's security group), and start the peer with "
OPEN += "--listen {everywhere}/tcp/{port}"
SMALLER_PACKETS = "make this machine's packets smaller: ip link set dev INTERFACE mtu 1280; if that helps, correct the "
SMALLER_PACKETS += "tunnel, VPN or router on the way (its MTU, or the ICMP messages that it drops)"
ALL_OF_THEM = "--listen expects this machine's addresses, such as /ip4/0.0.0.0/tcp/PORT (all IPv4) or /ip6/::/tcp/PORT"
UNTIL_THEN = "until then it exchanges with peers that can be reached, and with others through their relays"
RECORD_S = 60.0  # a record in the DHT expires after this; if clocks differ by more, peers ignore new records
SET_CLOCK = "set this machine's clock: timedatectl set-ntp true (Linux), or start chronyd or ntpd"


@dataclass(frozen=True, slots=True)
class Seen:
    """Another peer's answer to libp2p's identify request: it says at which address the peer sees this machine."""

    peer: PeerId
    said: Identified


async def seen_by(network: PeerNetwork, peers: Sequence[PeerId]) -> list[Seen]:
    """Ask these peers how they see this machine, and return the answers; peers that do not answer are left out."""

    async def one(peer: PeerId) -> Seen | None:
        try:
            return Seen(peer, await network.identify(peer))
        except (AskError, ProtocolError):
            return None

    return [seen for seen in await at_once(map(one, peers)) if seen]


def address_translation(own: Sequence[str], seen: Sequence[Seen]) -> Finding:
    """Return the finding on whether a router translates this machine's addresses (NAT), and its kind (RFC 4787).

    Args:
        own: Multiaddresses of this machine's interfaces, with the port that it listens at.
        seen: How other peers see this machine.
    """
    observed = sorted({place for one in seen if (place := _ip_and_port(one.said.observed))})
    inside = {place[0] for address in own if (place := _ip_and_port(address))}
    if not observed:
        return unknown("NAT", "no peer says how it sees this machine")
    if all(address in inside for address, _ in observed):
        return ok(
            "NAT", f"none: others see {' and '.join(sorted({address for address, _ in observed}))}, this machine's own"
        )
    outside = [place for place in observed if place[0] not in inside]
    address = mode(place[0] for place in outside)
    kind = "its kind is unknown, since only one peer answered"
    if len(seen) > 1:
        same = len({port for _, port in outside}) == 1
        kind = "one port for all others" if same else "another port for each other peer (symmetric)"
    inner = next((place for place in sorted(inside) if place != "127.0.0.1"), "127.0.0.1")
    return ok("NAT", f"behind a router: this machine is {inner}, others see {address}; {kind}")


async def dialled_back(network: PeerNetwork, seen: Sequence[Seen], announced: Sequence[str]) -> list[DialBack]:
    """Ask up to ASKED of these peers to connect back to this machine; return the answers that arrive.

    Args:
        network: This machine's network.
        seen: How other peers see this machine; only these peers are asked.
        announced: Addresses of --announce, which the peers dial; if there are none, they dial the machine's own.
    """
    own = announced or await network.addresses()

    async def one(peer: PeerId) -> DialBack | None:
        try:
            return await network.dial_back(peer, own)
        except (AskError, ProtocolError):
            return None

    asked = [each.peer for each in seen if each.said.dials_back][:ASKED]
    return [came for came in await at_once(map(one, asked)) if came]


def reachability(own: Sequence[str], seen: Sequence[Seen], came: Sequence[DialBack]) -> Finding:
    """Return the finding on whether other peers can connect to this machine.

    Args:
        own: Multiaddresses of this machine's interfaces.
        seen: How other peers see this machine.
        came: Answers of peers that were asked to dial back.
    """
    inside = {place[0] for address in own if (place := _ip_and_port(address))}
    observed = [place[0] for one in seen if (place := _ip_and_port(one.said.observed))]
    if _all_loopback(inside) and observed and not _all_loopback(observed):
        said = f"this machine listens at {' and '.join(sorted(inside))}, which only itself can reach"
        everywhere = _everywhere(observed[0])
        return warn("reachability", said, f"start the peer with --listen {everywhere}/tcp/PORT, or without --listen")
    reached = [answer.address for answer in came if answer.status == DialStatus.OK]
    if reached:
        return ok("reachability", f"{len(reached)} of {plural(len(came), 'peer')} dialled back: {reached[0]}")
    failed = [answer for answer in came if answer.status == DialStatus.ERROR]
    if not failed:
        return _nobody_dials(observed, came)
    outside, port = mode(observed) if observed else "ADDRESS", port_of(own)
    advice, everywhere = OPEN if outside in inside else FORWARD, _everywhere(outside)
    remedy = advice.format(port=port, outside=f"/ip{_version(outside)}/{outside}", everywhere=everywhere)
    said = f"{len(failed)} of {plural(len(came), 'peer')} could not dial back to {outside}, port {port}"
    return warn("reachability", f"{said}: no route to this machine from outside", f"{remedy}; {UNTIL_THEN}")


def announced(addresses: Sequence[str], came: Sequence[DialBack], running: PeerId | None = None) -> Finding:
    """Return the finding on whether other peers can connect to the addresses of --announce.

    Args:
        addresses: The addresses of --announce, at least one.
        came: Answers of peers that were asked to dial these addresses; [] if no peer was asked.
        running: The id of the peer, if it runs now. The addresses then lead to it, and not to this check.
    """
    said = f"announced is {', '.join(addresses)}"
    if running:
        there = f"run this on another machine: python -m decentral.doctor --join {addresses[0]}/p2p/{running}"
        return unknown("reachability", f"{said}, used by the running peer, so not tried here", there)
    if reached := sum(answer.status == DialStatus.OK for answer in came):
        return ok("reachability", f"{said}: good, {reached} of {plural(len(came), 'peer')} connected to it")
    if any(answer.status == DialStatus.ERROR for answer in came):
        seen = f"{said}: not good, none of {plural(len(came), 'peer')} could connect to it"
        remedy = "forward the announced port on the router to the port of --listen, and open it in firewalls"
        return warn("reachability", seen, f"{remedy}; {UNTIL_THEN}")
    if any((place := _ip_and_port(one)) and not ipaddress.ip_address(place[0]).is_global for one in addresses):
        public = "if peers elsewhere are to connect, announce the router's public address with a forwarded port"
        return unknown("reachability", f"{said}: a private address, good only inside this network", public)
    return unknown("reachability", f"{said}: no peer has tried it", "give --join ADDR of a peer in another network")


def _nobody_dials(observed: Sequence[str], came: Sequence[DialBack]) -> Finding:
    """Return the finding that no peer has tried to dial back: our address is not public, or peers dial rarely."""
    if observed and not any(ipaddress.ip_address(address).is_global for address in observed):
        where = "on this machine" if _all_loopback(observed) else "in this private network"
        there = "while a peer runs here, run on another machine: python -m decentral.doctor --join ITS-ADDRESS"
        return unknown("reachability", f"the other peers are {where}, where AutoNAT does not dial back", there)
    text = next((answer.text for answer in came if answer.text), "no answer")
    return unknown("reachability", f"no peer dialled back ({text})", "try again in a minute: peers dial rarely")


def _version(address: str) -> int:
    """Return the IP version of an address, 4 or 6; a text that is not an IP address counts as version 4."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 4


def _everywhere(address: str) -> str:
    """Return the multiaddress for listening at all interfaces, in the IP version of `address`."""
    return "/ip6/::" if _version(address) == 6 else "/ip4/0.0.0.0"


def _all_loopback(addresses: Iterable[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


async def latency(transport: Transport, peers: Sequence[PeerId]) -> Finding:
    """Ping each peer PINGS times; return the finding with the round trips to the nearest and to the farthest peer."""
    found = await at_once(_round_trip_s(transport, peer) for peer in peers)
    times_ms = sorted(1e3 * one for one in found if one is not None)
    if not times_ms:
        return unknown("latency", "no answer to a ping")
    nearest = f"{times_ms[0]:.0f} ms to the nearest of {plural(len(times_ms), 'peer')}"
    return ok("latency", f"{nearest}, {times_ms[-1]:.0f} to the farthest")


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
    """Download part of the model's state from one of these peers; return the finding about the download rate.

    The upload rate is not measured, because peers refuse a Probe from a peer that has no record in the DHT.
    """
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
        seen = f"small answers arrive, but none of {size}: the path drops large packets (MTU)"
        return wrong("download", seen, SMALLER_PACKETS)
    return unknown("download", f"no peer sends state now ({', '.join(refusals) or 'none asked'})", "try again later")


async def _answers_small(transport: Transport, peers: Sequence[PeerId]) -> bool:
    """Return whether one of these peers answers a ping. Question and answer fit into small packets."""
    return any(await at_once(_round_trip_s(transport, peer) for peer in peers))


async def _piece(transport: Transport, peer: PeerId, run: RunId, length: int) -> Answer:
    return await transport.ask(peer, Envelope(StateRequest(run, 0, 0, length)), DOWNLOAD_S, MAX_CHUNK_BYTES)


def rate(check: str, bytes_per_s: float) -> Finding:
    """Return the finding `check` about a link's rate; it is a warning if the rate is below SLOW_LINK_PER_S."""
    seen = f"{BIT * bytes_per_s / 1e6:.1f} Mb/s"
    if bytes_per_s < SLOW_LINK_PER_S:
        remedy = "use a cable instead of Wi-Fi, end other transfers, or train a smaller model: exchanges become rarer"
        return warn(check, seen, remedy)
    return ok(check, seen)


def measured(profile: Profile) -> list[Finding]:
    """Return findings about the download and upload rates that a running peer's exchanges measured."""
    rates: Mapping[str, float] = {"download": profile.down, "upload": profile.up}
    return [rate(check, bytes_per_s) for check, bytes_per_s in rates.items() if bytes_per_s]


def listens(addresses: Sequence[str], running: bool) -> Finding:
    """Return the finding with the addresses at which libp2p listens for the checks.

    If the peer is `running`, the text adds that the peer itself listens at another port.
    """
    places = ", ".join(address.partition("/p2p/")[0] for address in addresses)
    return ok("port", f"{places}{' (for this check; the peer has its own)' if running else ''}")


def cannot_listen(error: str, listen: Sequence[str]) -> Finding:
    """Return the finding that libp2p could not start at the addresses of --listen, because of this error."""
    if "address already in use" in error:
        return wrong("port", f"{', '.join(listen)}: address already in use", ports.TAKEN)
    if "cannot assign" in error:
        return wrong("port", error, ALL_OF_THEM)
    if "permission denied" in error:
        return wrong("port", error, "ports below 1024 are for root: choose a higher one with --listen")
    return wrong("port", error, "choose other addresses with --listen")


def port_of(addresses: Sequence[str]) -> int:
    """Return the TCP port of the first address with a TCP port; 0 if no address has a TCP port."""
    return next((place[1] for address in addresses if (place := _ip_and_port(address))), 0)


def _ip_and_port(address: str) -> tuple[str, int] | None:
    """Return (IP address, TCP port) of `/ip4/1.2.3.4/tcp/4001...`; None for relayed and other addresses."""
    found = re.match(r"/ip[46]/([0-9a-fA-F.:]+)/tcp/(\d+)", address)
    return (found[1], int(found[2])) if found and "/p2p-circuit" not in address else None


def clock(ahead_s: Sequence[Seconds]) -> Finding:
    """Return the finding about this machine's clock, compared with the median of other peers' clocks.

    Args:
        ahead_s: Seconds by which each other peer's clock is ahead of this machine's.
    """
    ahead_s = [ahead for ahead in ahead_s if abs(ahead) <= MOST_AHEAD_S]
    if not ahead_s:
        return unknown("clock", "no other peer's clock to compare with")
    ahead = median(ahead_s)
    theirs = f"{len(ahead_s)} peers'" if len(ahead_s) > 1 else "one peer's"
    if abs(ahead) <= CLOCKS_AGREE_S:
        return ok("clock", f"{abs(ahead):.1f} s from {theirs}")
    spread_s = max(ahead_s) - min(ahead_s)
    apart = f" (their clocks differ by up to {spread_s:.0f} s)" if spread_s > CLOCKS_AGREE_S else ""
    seen = f"this machine's clock is {difference(-ahead)} {theirs}{apart}"
    if abs(ahead) <= RECORD_S:
        return warn("clock", seen, SET_CLOCK)
    consequence = "a peer that starts here while no other peer answers will not see their records later"
    return wrong("clock", f"{seen}; {consequence}", SET_CLOCK)

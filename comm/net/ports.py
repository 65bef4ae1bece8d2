"""Choose where a peer listens: its default addresses (`anywhere`), and ports that no other program uses (`held`).

libp2p binds with SO_REUSEPORT, since it dials from the port that it listens at. A second program with SO_REUSEPORT can
bind the same port without an error, and would get some of our connections. So we first bind each port without
SO_REUSEPORT, which fails if another program has the port.
"""

import errno
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address

from decentral.core.errors import UserError
from decentral.core.plain_text import printable

ALL_IPV4, ALL_IPV6 = "/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
OF_LOOPBACK = ("/ip4/127.", "/ip6/::1/")  # addresses with these prefixes reach this machine only
TRIES = 20  # after this many tries, the search for a port that is free at every address ends
MOST_PORT = 65535
MOST_QUOTED_CHARS = 200  # an error quotes at most this much of an address
TAKEN = "another program, or another peer, has that port (ss -ltnp shows which): end it, or --listen at another port"
TCP_ADDRESS = re.compile(r"/ip([46])/([0-9a-fA-F.:]+)/tcp/([0-9]+)")


class PortTaken(UserError):
    """Raised if another program, perhaps another peer, listens at the port."""


def anywhere() -> list[str]:
    """Return multiaddrs to listen on all interfaces at a free port: for IPv4, and for IPv6 if this machine has it."""
    try:
        with _bound(6, "::", 0):
            return [ALL_IPV4, ALL_IPV6]
    except OSError:
        return [ALL_IPV4]


@contextmanager
def held(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Reserve the TCP ports of these addresses inside the context: libp2p can bind them, other programs cannot.

    Args:
        addresses: Multiaddrs to listen at.

    Yields:
        The addresses, with one port in place of every `tcp/0`: the first port that the addresses name or, if they name
        no port or it is taken at a `tcp/0` address, any free port. Addresses that are not TCP over IP are unchanged.

    Raises:
        PortTaken: If another program has a port that an address names.
        UserError: If this machine does not have an address, the user may not bind a port, or none of TRIES ports is
            free at every `tcp/0` address.
    """
    named = _named_port(addresses)
    for attempt in range(TRIES):
        with ExitStack() as ports:
            chosen, free = [], 0 if attempt else named
            for address in addresses:
                try:
                    family, host, port = _parts(address)
                except ValueError:  # libp2p itself accepts or refuses an address without IP or TCP
                    chosen.append(address)
                    continue
                try:
                    got = ports.enter_context(_bound(family, host, port or free))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE and not port and free:
                        break  # the port is taken at this address, although it is free at an earlier one: try another
                    said = f"cannot listen on {address}: {os.strerror(error.errno or 0).lower()}"
                    if error.errno == errno.EADDRINUSE:
                        raise PortTaken(f"{said}; {TAKEN}") from None
                    raise UserError(said) from None
                free = free or (0 if port else got)
                chosen.append(f"/ip{family}/{host}/tcp/{got}")
            else:
                yield chosen
                return
    raise UserError(f"cannot listen on {', '.join(addresses)}: no common port is free; name a port in each address")


def chosen(addresses: Sequence[str], wanted: Sequence[str] = ()) -> dict[str, str]:
    """Return, for each `tcp/0` address, the same address with the port that the system chose, if it chose one port.

    Args:
        addresses: The addresses at which this process listens, with their ports.
        wanted: The addresses of --listen; the result has those with `tcp/0`, and the default ones.
    """
    by_protocol: dict[str, set[str]] = {}  # "ip4" or "ip6" -> ports in use
    for address in addresses:
        if "/tcp/" in address:
            by_protocol.setdefault(address.split("/")[1], set()).add(address.split("/tcp/")[1].split("/")[0])
    every, found = {port for used in by_protocol.values() for port in used}, {}
    for place in (ALL_IPV4, ALL_IPV6, LOOPBACK, *(one for one in wanted if one.endswith("/tcp/0"))):
        numbers = by_protocol.get(place.split("/")[1], every)
        if len(numbers) == 1:
            found[place] = place.removesuffix("0") + min(numbers)
    return found


def require_multiaddr(address: str, flag: str) -> None:
    """Raise UserError, which names the flag, unless the text has the form of a multiaddr.

    `daemon.require_address` checks the address further, but loads libp2p.
    """
    with suppress(ValueError):
        if TCP_ADDRESS.fullmatch(address):
            _parts(address)
        if re.fullmatch(r"(/[^/\s]+)+/?", address):
            return
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    meant = f"/ip{6 if ':' in bare else 4}/{bare or '0.0.0.0'}/tcp/{port}"
    hint = f"; did you mean {meant}?" if TCP_ADDRESS.fullmatch(meant) else ""
    expected = f"{flag} expects an address such as /ip4/0.0.0.0/tcp/4001"
    raise UserError(f"{expected}; got {printable(address, MOST_QUOTED_CHARS)!r}{hint}")


def _named_port(addresses: Sequence[str]) -> int:
    """Return the first TCP port other than 0 in these addresses; 0 if there is none."""
    for address in addresses:
        with suppress(ValueError):
            if port := _parts(address)[2]:
                return port
    return 0


def _parts(address: str) -> tuple[int, str, int]:
    """Return the IP version, IP address and port of a multiaddr. Raises ValueError unless it is TCP over IP."""
    found = TCP_ADDRESS.fullmatch(address)
    if found is None or int(found[3]) > MOST_PORT:
        raise ValueError(address)
    return ip_address(found[2]).version, found[2], int(found[3])


@contextmanager
def _bound(version: int, host: str, port: int) -> Iterator[int]:
    """Bind a TCP port that no other program has (0: any free port), and yield its number.

    Inside the context libp2p can bind the port as well, since it runs as the same user.

    Raises:
        OSError: If the port is taken, or the address cannot be used.
    """
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections must not block the port
        if version == 6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        got = int(bound.getsockname()[1])
        if sys.platform == "linux":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            bound.close()  # until libp2p binds the port, another program can take it
        yield got

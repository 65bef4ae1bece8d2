"""Where a peer listens: its default addresses, and ports that no other program has.

libp2p binds with SO_REUSEPORT, as it dials from the port that it listens at. A second program that does so gets the
same port without an error, and connections reach either of the two. So a port is first bound without that option.
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

ALL_IPV4, ALL_IPV6 = "/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"  # all interfaces, at a free port
LOOPBACK = "/ip4/127.0.0.1/tcp/0"  # only for this machine
TRIES = 20  # free ports that are tried until one is free with all addresses
MOST_PORT = 65535
TAKEN = "another program, or another peer, has that port (ss -ltnp shows which): end it, or --listen at another"
TCP_ADDRESS = re.compile(r"/ip([46])/([0-9a-fA-F.:]+)/tcp/([0-9]+)")


class PortTaken(UserError):
    """Another program listens there."""


def anywhere() -> list[str]:
    """Return the addresses of all interfaces, at a free port; IPv6 where this machine has it."""
    try:
        with _bound(6, "::", 0):
            return [ALL_IPV4, ALL_IPV6]
    except OSError:
        return [ALL_IPV4]


@contextmanager
def held(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Hold the TCP ports of these addresses, so that libp2p gets them and no other program does.

    Yields:
        The addresses, each `tcp/0` with one free port, which is the same for all of them: the first that is named,
        where it is free there too.

    Raises:
        PortTaken: If another program has a port.
        UserError: If an address is not this machine's, or not for this user.
    """
    named = _named_port(addresses)
    for attempt in range(TRIES):
        with ExitStack() as ports:
            chosen, free = [], 0 if attempt else named
            for address in addresses:
                try:
                    family, host, port = _parts(address)
                except ValueError:  # of another kind, or none: libp2p says what it thinks of it
                    chosen.append(address)
                    continue
                try:
                    got = ports.enter_context(_bound(family, host, port or free))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE and not port and free:
                        break  # free with the address before, and not with this one
                    said = f"cannot listen on {address}: {os.strerror(error.errno or 0).lower()}"
                    if error.errno == errno.EADDRINUSE:
                        raise PortTaken(f"{said}; {TAKEN}") from None
                    raise UserError(said) from None
                free = free or (0 if port else got)
                chosen.append(f"/ip{family}/{host}/tcp/{got}")
            else:
                yield chosen
                return
    raise UserError(f"cannot listen on {', '.join(addresses)}: no port is free with all of them")


def _named_port(addresses: Sequence[str]) -> int:
    """Return the first port of these addresses that is not 0; 0 if there is none."""
    for address in addresses:
        with suppress(ValueError):
            if port := _parts(address)[2]:
                return port
    return 0


def _parts(address: str) -> tuple[int, str, int]:
    """Return IP version, address and port. Raises ValueError if it is no TCP address."""
    found = TCP_ADDRESS.fullmatch(address)
    if found is None or int(found[3]) > MOST_PORT:
        raise ValueError(address)
    return ip_address(found[2]).version, found[2], int(found[3])


@contextmanager
def _bound(version: int, host: str, port: int) -> Iterator[int]:
    """Hold a port that this process has alone; only libp2p, as the same user's program, can bind to it as well.

    Raises OSError.
    """
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended peer do not count
        if version == 6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        got = int(bound.getsockname()[1])
        if sys.platform == "linux":  # elsewhere the port is free from here until libp2p binds
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            bound.close()
        yield got

"""Ask the operating system about IP addresses: where a name leads, and from which address this machine would send."""

import asyncio
import re
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address

from decentral.core.ip_networks import IP
from decentral.core.units import Seconds

MOST_NAMES = 2  # at most this many DNS names of one peer are looked up at a time
MOST_OF_NAME = 4  # at most this many IP addresses of a DNS name are used
NAME_S: Seconds = 5.0  # a DNS lookup is given up after this time
# Lookups of other peers' names have threads of their own: a slow name server must not keep the event loop's own threads
# busy, in which plans are evaluated. A lookup that has no thread within NAME_S is given up.
NAME_THREADS = ThreadPoolExecutor(2, "names")
NAMED = re.compile(r"/(dns|dns4|dns6)/([A-Za-z0-9._-]{1,253})(/.*)")
NAME_KINDS = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


async def resolved(addresses: Iterable[str]) -> list[str]:
    """Return multiaddrs with IP addresses in place of DNS names.

    Only the first MOST_NAMES names are looked up. A multiaddr is left out if its name is not looked up, or is not found
    within NAME_S.
    """
    found, names = list[str](), 0
    for address in addresses:
        named = NAMED.fullmatch(address)
        if named is None:
            found.append(address)
        elif names < MOST_NAMES:
            names += 1
            found += [f"/ip{ip.version}/{ip}{named[3]}" for ip in await _of_name(named[2], NAME_KINDS[named[1]])]
    return found


async def _of_name(name: str, family: socket.AddressFamily) -> list[IP]:
    with suppress(OSError, UnicodeError, TimeoutError):
        async with asyncio.timeout(NAME_S):
            loop = asyncio.get_running_loop()
            answers = await loop.run_in_executor(NAME_THREADS, _answers, name, family)
            return [ip_address(place.partition("%")[0]) for place in answers[:MOST_OF_NAME]]
    return []


def _answers(name: str, family: socket.AddressFamily) -> list[str]:
    found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]


def source(ip: IP) -> IP | None:
    """Return the address from which this machine would send to an IP address, without sending; None without a route."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((str(ip), 9))  # sends nothing: for UDP, `connect` only chooses a route
        return ip_address(str(unsent.getsockname()[0]).partition("%")[0])
    return None

"""Decide which requests and connections a port of this machine accepts: by host name, and by the caller's network.

The live page and the metrics share these rules.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

# The value of a `Host` header: a name or an address, and an optional port.
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[^\[\]:]+))(?::[0-9]*)?")


def own_names(host: str) -> frozenset[str]:
    """Return the host names that requests may use, besides IP addresses: `host` and this machine's own names.

    Args:
        host: Host name or IP address to which the user has bound the port.
    """
    return frozenset({host.lower(), "localhost", socket.gethostname().lower()})


def is_ours(host: str, names: frozenset[str]) -> bool:
    """Return whether a request's `Host` header has an IP address or one of these names; its port does not matter.

    The check stops DNS rebinding, in which a foreign site makes its name resolve to this machine.
    """
    found = HOST.fullmatch(host)
    if found is None:
        return False
    try:
        ipaddress.ip_address(found["ipv6"] or found["name"])
        return True
    except ValueError:
        return found["ipv6"] is None and found["name"].lower() in names


def has_room(caller: str, callers: Iterable[str], most: int) -> bool:
    """Return whether a new connection of `caller` may stay open.

    A caller must not have more connections than are still free (`most` less all open connections), so that one caller
    gets at most half of all connections. `FairShare` has the same rule.

    Args:
        caller: The network of the new connection.
        callers: The network of each open connection, including the new one.
        most: Largest number of open connections.
    """
    open_now = list(callers)
    return open_now.count(caller) <= most - len(open_now)

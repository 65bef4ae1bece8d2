"""Group the IP addresses that one user may have at once, so that nobody escapes a limit by using many addresses."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

IP = IPv4Address | IPv6Address
# Prefix lengths in bits, of IPv4 and of IPv6: addresses with the same prefix belong to one group.
MACHINE = 32, 64  # one machine: with IPv6, it can usually choose the other 64 bits for each connection
SITE = 24, 48  # one site: an Internet provider usually gives a customer no larger network
# One client of our ports: as SITE for IPv6, but each IPv4 address alone, because a /24 of IPv4 has many customers.
CALLER = 32, 48


def network_of(address: str | IP, bits: tuple[int, int] = MACHINE) -> str:
    """Return the group of an IP address as text: the network of its first `bits` bits, or the address itself.

    Text that is no IP address is its own group.

    Args:
        address: An IPv4 or IPv6 address. An IPv4 address mapped to IPv6 counts as IPv4.
        bits: Leading bits that the IPv4 and the IPv6 addresses of a group have in common.
    """
    try:
        ip = ip_address(address) if isinstance(address, str) else address
    except ValueError:
        return str(address)
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip
    common = bits[ip.version == 6]
    return str(ip) if common == ip.max_prefixlen else str(ip_network((ip, common), strict=False))

"""Addresses that one machine, or one site, may have are one group."""

import pytest

from decentral.core.ip_networks import CALLER, SITE, network_of


@pytest.mark.parametrize(
    ("address", "machine", "site"),
    [
        ("192.0.2.77", "192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("2001:db8:1:3::", "2001:db8:1:3::/64", "2001:db8:1::/48"),
        ("::1", "::/64", "::/48"),
        ("fe80::1%eth0", "fe80::/64", "fe80::/48"),
        ("", "", ""),
        ("a name", "a name", "a name"),
    ],
)
def test_addresses_are_grouped_by_machine_or_by_site(address: str, machine: str, site: str) -> None:
    assert network_of(address) == machine
    assert network_of(address, SITE) == site
    assert network_of(address, CALLER) == (machine if "." in machine else site)

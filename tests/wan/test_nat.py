"""Home routers of the lab, packet by packet: mappings, filters, expiry, checksums."""

import ipaddress
import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.wan.nat import SECOND_NS, SESSIONS, TCP, TCP_NS, UDP, UDP_NS, Nat, forget, inbound, no_nat, outbound

INSIDE, OUTSIDE = "192.168.0.2", "11.0.0.7"
SERVER, OTHER = ("11.0.0.1", 4001), ("11.0.0.2", 4001)
SYN, ACK, FIN = 2, 16, 1
Endpoint = tuple[str, int]


def number(address: str) -> int:
    return int(ipaddress.ip_address(address))


def router(kind: str = "home") -> Nat:
    nat = no_nat(1, seed=0)
    nat.inside_N[0], nat.symmetric_N[0] = number(INSIDE), kind == "symmetric"
    return nat


def checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: Endpoint, target: Endpoint, protocol: int = UDP, flags: int = ACK) -> NDArray[np.uint8]:
    """A packet with eight bytes of payload and right checksums."""
    payload, ports = b"\x12\x34\xff\xff\x00\x01ab", struct.pack("!HH", source[1], target[1])
    if protocol == UDP:
        before, after = ports + struct.pack("!H", 16), payload
    else:
        before, after = ports + struct.pack("!IIBBH", 7, 9, 5 << 4, flags, 1000), b"\0\0" + payload
    ends = number(source[0]).to_bytes(4, "big") + number(target[0]).to_bytes(4, "big")
    length = len(before) + 2 + len(after)
    pseudo = ends + struct.pack("!BBH", 0, protocol, length)
    body = before + struct.pack("!H", checksum(pseudo + before + b"\0\0" + after)) + after
    head = struct.pack("!BBHHHBB", 0x45, 0, 20 + length, 1, 0, 64, protocol)
    return np.frombuffer(head + struct.pack("!H", checksum(head + b"\0\0" + ends)) + ends + body, np.uint8).copy()


def ends_of(one: NDArray[np.uint8]) -> tuple[Endpoint, Endpoint]:
    """Sender and receiver of a packet whose checksums must be right."""
    data = one.tobytes()
    pseudo = data[12:20] + struct.pack("!BBH", 0, data[9], len(data) - 20)
    assert checksum(data[:20]) == 0, "the header's checksum"
    assert checksum(pseudo + data[20:]) in (0, 0xFFFF), "the checksum of TCP or UDP"
    source, target = (str(ipaddress.ip_address(data[at : at + 4])) for at in (12, 16))
    return (source, int.from_bytes(data[20:22], "big")), (target, int.from_bytes(data[22:24], "big"))


def leave(
    nat: Nat, target: Endpoint, port: int = 5000, now: int = 0, protocol: int = UDP, flags: int = ACK
) -> Endpoint:
    """Sends a packet from inside; gives the sender that the world sees."""
    one = packet((INSIDE, port), target, protocol, flags)
    assert outbound(nat, 0, one, number(OUTSIDE), now)
    source, seen = ends_of(one)
    assert seen == target
    return source


def comes_in(nat: Nat, source: Endpoint, target: Endpoint, now: int = 0, protocol: int = UDP, flags: int = ACK) -> bool:
    return inbound(nat, 0, packet(source, target, protocol, flags), now)


@pytest.mark.parametrize("protocol", [UDP, TCP])
def test_an_answer_comes_back_to_the_port_inside_and_all_checksums_are_right(protocol: int) -> None:
    nat = router()
    outside = leave(nat, SERVER, protocol=protocol)
    assert outside[0] == OUTSIDE
    answer = packet(SERVER, outside, protocol)
    assert inbound(nat, 0, answer, 1)
    assert ends_of(answer) == (SERVER, (INSIDE, 5000))


def test_a_home_router_maps_a_port_to_one_port_for_all_destinations() -> None:
    nat = router()
    assert leave(nat, SERVER) == leave(nat, OTHER)
    assert leave(nat, SERVER) != leave(nat, SERVER, port=5001)


def test_a_symmetric_router_maps_each_destination_to_a_port_of_its_own() -> None:
    nat = router("symmetric")
    assert leave(nat, SERVER) != leave(nat, OTHER)
    assert leave(nat, SERVER) == leave(nat, SERVER)


@pytest.mark.parametrize("kind", ["home", "symmetric"])
def test_only_those_who_were_asked_can_answer(kind: str) -> None:
    nat = router(kind)
    outside = leave(nat, SERVER)
    assert comes_in(nat, SERVER, outside)
    assert not comes_in(nat, OTHER, outside)
    assert not comes_in(nat, (SERVER[0], 4002), outside), "the filter looks at the port, too"
    assert not comes_in(nat, SERVER, outside, protocol=TCP, flags=SYN)


def test_a_syn_that_nobody_asked_for_is_dropped() -> None:
    assert not comes_in(router(), SERVER, (OUTSIDE, 4001), protocol=TCP, flags=SYN)


def test_two_home_routers_are_punched_through_from_both_sides() -> None:
    nat = router()
    outside = leave(nat, SERVER)  # from which the other side learns where we are
    assert not comes_in(nat, OTHER, outside)
    leave(nat, OTHER)
    assert comes_in(nat, OTHER, outside)


def test_a_udp_mapping_expires_after_two_minutes_of_silence() -> None:
    nat = router()
    outside = leave(nat, SERVER)
    assert comes_in(nat, SERVER, outside, now=UDP_NS - 1)
    assert not comes_in(nat, SERVER, outside, now=2 * UDP_NS)


def test_an_established_connection_is_kept_for_hours_and_an_ended_one_for_minutes() -> None:
    nat = router()
    outside = leave(nat, SERVER, protocol=TCP, flags=SYN)
    leave(nat, SERVER, protocol=TCP)
    assert comes_in(nat, SERVER, outside, now=TCP_NS - 1, protocol=TCP)
    leave(nat, SERVER, now=TCP_NS, protocol=TCP, flags=FIN | ACK)
    leave(nat, SERVER, now=TCP_NS, protocol=TCP)
    assert not comes_in(nat, SERVER, outside, now=TCP_NS + 300 * SECOND_NS, protocol=TCP)


def test_what_is_neither_tcp_nor_udp_and_fragments_do_not_pass() -> None:
    icmp, fragment = (packet((INSIDE, 5000), SERVER) for _ in range(2))
    icmp[9], fragment[6] = 1, 0x20
    assert not outbound(router(), 0, icmp, number(OUTSIDE), 0)
    assert not outbound(router(), 0, fragment, number(OUTSIDE), 0)


def test_a_full_table_gives_up_the_session_that_expires_first() -> None:
    nat = router()
    first = leave(nat, SERVER, port=1, now=0)
    second = leave(nat, SERVER, port=2, now=1)
    for port in range(3, SESSIONS + 2):
        leave(nat, SERVER, port=port, now=2)
    assert not comes_in(nat, SERVER, first, now=3)
    assert comes_in(nat, SERVER, second, now=3)


def test_a_new_address_forgets_all_mappings() -> None:
    nat = router()
    outside = leave(nat, SERVER)
    forget(nat, 0)
    assert not comes_in(nat, SERVER, outside)

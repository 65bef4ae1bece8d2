"""Which addresses from other peers are dialled, and how often: the rule alone, and two real peers that follow it."""

import asyncio
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from itertools import count, pairwise
from pathlib import Path

import pytest

from decentral.comm.net.dialler import Dialler
from decentral.comm.net.dialling import (
    DIALS_REMEMBERED,
    OF_IP,
    OF_OWNER,
    OF_PORT,
    PROVEN_AGAIN_S,
    PROVEN_S,
    TOLD_S,
    TRIED_AT_ONCE,
    Dial,
    Dialling,
    Ranges,
)
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Ping
from decentral.comm.wire.transport import AskError
from decentral.core.at_once import at_once
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from tests.patient_time import PatientLoop

OWNER, TARGET = PeerId("QmA"), "203.0.114.7"


def rule(own: str = "192.168.1.5", loopback: bool = False) -> Dialling:
    """Return the rule of a machine with this address in every network."""
    return Dialling(Ranges(lambda _: ip_address(own), loopback))


def places(owner: str, *ports: int, ip: str = TARGET) -> list[str]:
    return [f"/ip4/{ip}/tcp/{port}/p2p/{owner}" for port in ports]


def dialled(dialling: Dialling, owner: str, addresses: Sequence[str], now: float, reached: str = "") -> list[str]:
    """Begin a dial and end it at once, without success unless the owner is reached at an address."""
    dial = dialling.begin(PeerId(owner), addresses, now)
    assert dial is not None
    if dial.allowed:
        dialling.end(dial, [reached] if reached else [], dial.addresses, now)
    return list(dial.addresses) if dial.allowed else []


def seconds(until: float) -> Iterator[float]:
    return map(float, range(int(until)))


def test_a_few_addresses_of_one_record_are_dialled_at_a_time_and_the_others_later() -> None:
    dialling, addresses = rule(), places(OWNER, *range(1, 9))
    assert dialled(dialling, OWNER, addresses, 0.0) == addresses[:TRIED_AT_ONCE]
    assert dialled(dialling, OWNER, addresses, 0.1) == []
    assert dialled(dialling, OWNER, addresses, OF_OWNER.window_s) == addresses[TRIED_AT_ONCE:]


def test_many_names_together_have_one_machine_dialled_no_more_often_than_its_allowance() -> None:
    """Each second new names with new ports appear, and the attacker never pauses."""
    dialling, ports, dials = rule(), count(1), list[float]()
    for now in seconds(1800):
        for owner in (f"Qm{now:.0f}x{number}" for number in range(2)):
            dials += [now for _ in dialled(dialling, owner, places(owner, *(next(ports) for _ in range(4))), now)]
    assert max(sum(begun <= now < begun + 60.0 for now in dials) for begun in dials) == OF_IP.most
    assert len(dials) == 6 * OF_IP.most  # after 0, 1, 3, 7, 15 and 25 minutes


def test_a_port_is_dialled_a_few_times_for_all_names_and_pauses_double() -> None:
    dialling, dials = rule(), list[float]()
    for now in seconds(1000):
        dials += [now for _ in dialled(dialling, f"Qm{now:.0f}x", places(f"Qm{now:.0f}x", 1), now)]
    begun = dials[:: OF_PORT.most]
    assert dials[: OF_PORT.most] == [0.0, 1.0, 2.0, 3.0]
    pauses = [round(later - earlier) // 60 for earlier, later in pairwise(begun)]
    assert pauses == [1, 2, 4, 8]


def test_a_new_record_does_not_end_the_pause_of_its_owner() -> None:
    dialling = rule()
    dials = [now for now in seconds(60) if dialled(dialling, OWNER, places(OWNER, 100 + int(now), ip="8.8.8.8"), now)]
    assert dials == [0.0, 5.0, 15.0, 35.0]


def test_addresses_that_libp2p_still_has_from_an_earlier_dial_are_counted_again() -> None:
    dialling = rule()
    for at, port in ((0.0, 1), (5.0, 2)):
        dialled(dialling, OWNER, places(OWNER, port), at)
    for other in ("QmB", "QmC"):
        dialled(dialling, other, places(other, 1), 6.0)
    assert dialled(dialling, "QmD", places("QmD", 1), 7.0) == []  # port 1 has had four: two of them for QmA
    assert dialled(dialling, "QmE", places("QmE", 2), 7.0) != []
    assert dialled(dialling, OWNER, places(OWNER, 3), 20.0) == []  # libp2p would dial port 1, too
    assert dialled(dialling, OWNER, places(OWNER, 3), TOLD_S + 10.0) != []


def test_an_address_where_its_owner_was_reached_comes_first_and_has_no_allowance() -> None:
    dialling, addresses = rule(), places(OWNER, *range(1, 9))
    dialled(dialling, OWNER, addresses, 0.0, reached=addresses[2])
    for now in seconds(600):
        owner = f"Qm{now:.0f}x"
        dialled(dialling, owner, places(owner, 3), now)  # others use up the allowance of port and address
        if now % PROVEN_AGAIN_S == 0:
            assert dialled(dialling, OWNER, addresses, now) == [addresses[2]]
    after = 2 * PROVEN_S
    for number in range(OF_PORT.most):
        dialled(dialling, f"QmB{number}", places(f"QmB{number}", 3), after)
    assert dialled(dialling, OWNER, addresses[2:3], after) == []


def test_the_other_addresses_of_an_owner_that_was_reached_count_as_failed() -> None:
    """Else each name that answers at one of its addresses has three others dialled without a limit."""
    dialling, dials = rule(), 0
    for owner in (f"Qm{number}" for number in range(100)):
        own = f"/ip4/8.8.8.8/tcp/{1 + int(owner[2:])}/p2p/{owner}"
        dials += len(dialled(dialling, owner, [own, *places(owner, 1, 2, 3)], 0.0, reached=own)) - 1
    assert dials <= OF_IP.most


def test_what_libp2p_dials_beside_a_proven_address_is_counted_and_ends_the_dials() -> None:
    """A peer that was reached may tell libp2p itself addresses of others, and then go away."""
    dialling, own, others = rule(), f"/ip4/8.8.8.8/tcp/1/p2p/{OWNER}", places(OWNER, *range(16))
    dialling.met(OWNER, [own], 0.0)
    dials = 0
    for now in seconds(600):
        dial = dialling.begin(OWNER, [own], now)
        assert dial is not None
        if dial.allowed:
            dialling.end(dial, [], others, now)
            dials += 1
    assert dials == 4  # after 0, 1, 3 and 7 minutes


def test_a_peer_for_which_libp2p_searches_is_limited_by_what_libp2p_has_dialled_for_it() -> None:
    dialling, found = rule(), places(OWNER, *range(16))
    begun = list[float]()
    for now in seconds(600):
        dial = dialling.begin(OWNER, None, now)
        assert dial is not None
        if dial.allowed:
            assert dial.addresses == ()
            dialling.end(dial, [], found, now)
            begun.append(now)
    assert begun == [0.0, 60.0, 180.0, 420.0]


def test_a_search_that_finds_no_address_delays_only_further_searches() -> None:
    """The doctor's node of the DHT searched for a living peer in vain; then its published address was not dialled."""
    dialling, begun = rule(), list[float]()
    for now in seconds(120):
        dial = dialling.begin(OWNER, None, now)
        assert dial is not None
        if dial.allowed:
            dialling.end(dial, [], [], now, dialled=False)
            begun.append(now)
    assert begun == [0.0, 5.0, 15.0, 35.0, 75.0]
    addresses = places(OWNER, 1)
    assert dialled(dialling, OWNER, addresses, 120.0, reached=addresses[0]) == addresses
    again = dialling.begin(OWNER, None, 121.0)
    assert again is not None
    assert again.allowed


class Swarm:
    """A network in which some peers answer at their addresses, and a search finds nobody."""

    def __init__(self, *living: PeerId) -> None:
        self.living, self.connected = living, dict[PeerId, tuple[str, ...]]()

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> str:
        await asyncio.sleep(0)
        if not addresses:
            return "Connect failed. msg=routing: not found"
        if peer not in self.living:
            return "".join(f"\n  * [{at.partition('/p2p/')[0]}] dial tcp4: connection refused" for at in addresses)
        self.connected[peer] = tuple(addresses[:1])
        return ""

    async def places_of(self, peer: PeerId) -> tuple[str, ...]:
        return self.connected.get(peer, ())


def test_living_peers_beside_a_dead_one_are_reached_after_searches_in_vain() -> None:
    dead, living = PeerId("QmDead"), (PeerId("QmOne"), PeerId("QmTwo"))
    published = {peer: places(peer, at) for at, peer in enumerate((dead, *living), 1)}

    async def story() -> list[bool]:
        dialler = Dialler(Swarm(*living))
        assert await at_once(dialler.reach(peer, None) for peer in published) == [False] * 3
        return await at_once(dialler.reach(peer, at) for peer, at in published.items())

    assert asyncio.run(story()) == [False, True, True]


def test_where_a_peer_that_has_connected_to_us_came_from_is_proven() -> None:
    dialling, addresses = rule(), places(OWNER, 1, 2)
    dialling.met(OWNER, addresses[1:], 0.0)
    assert dialled(dialling, OWNER, addresses, 1.0) == addresses[1:]


def test_a_peer_that_moves_is_dialled_at_its_new_address_within_the_pause_of_one_failure() -> None:
    dialling, before, after = rule(), places(OWNER, 1), places(OWNER, 1, ip="8.8.8.8")
    dialled(dialling, OWNER, before, 0.0, reached=before[0])
    assert dialled(dialling, OWNER, before, 10.0) == before
    assert dialled(dialling, OWNER, [*after, *before], 11.0, reached=after[0]) == after
    assert dialled(dialling, OWNER, [*before, *after], 30.0) == [*after, *before]  # the latest first


def test_a_machine_with_many_peers_is_dialled_by_a_newcomer_without_a_pause() -> None:
    """Dials wait for those in flight, but peers that are reached leave the allowance as it was."""
    dialling, flying, waiting = rule(), list[Dial](), [f"Qm{number}x" for number in range(64)]
    while waiting:
        owner = PeerId(waiting[0])
        dial = dialling.begin(owner, places(owner, 1 + len(waiting)), 0.0)
        if dial is None:
            assert len(flying) == OF_IP.most
            first = flying.pop(0)
            dialling.end(first, first.addresses, [], 0.0)
            continue
        assert len(dial.addresses) == 1
        flying.append(dial)
        waiting.pop(0)


def test_a_second_dial_of_one_peer_waits_for_the_first() -> None:
    dialling, addresses = rule(), places(OWNER, 1)
    dial = dialling.begin(OWNER, addresses, 0.0)
    assert dial is not None
    assert dialling.begin(OWNER, addresses, 0.0) is None
    dialling.end(dial, addresses, [], 0.0)
    again = dialling.begin(OWNER, addresses, 0.0)
    assert again is not None
    assert dialling.begin(OWNER, addresses, 0.0) is None


@pytest.mark.parametrize(
    ("own", "ip", "allowed"),
    [
        ("192.168.1.5", "203.0.114.7", True),
        ("192.168.1.5", "192.168.7.7", True),
        ("192.168.1.5", "10.0.0.7", False),
        ("10.9.0.5", "10.0.0.7", True),
        ("10.0.0.5", "169.254.169.254", False),
        ("10.0.0.5", "127.0.0.1", False),
        ("10.0.0.5", "0.0.0.0", False),
        ("10.0.0.5", "224.0.0.1", False),
        ("10.0.0.5", "255.255.255.255", False),
        ("100.70.0.1", "100.90.0.1", True),
        ("fd00::5", "fd7a::7", True),
        ("2a01::5", "fd7a::7", False),
        ("10.0.0.5", "::ffff:127.0.0.1", False),
        ("10.0.0.5", "64:ff9b::7f00:1", False),
        ("10.0.0.5", "2002:7f00:1::1", False),
        ("10.0.0.5", "::8.8.8.8", False),
        ("10.0.0.5", "fec0::1", False),
        ("fec0::5", "fec0::1", True),
        ("10.0.0.5", "2a01:4f8::1", True),
    ],
)
def test_a_network_is_entered_only_from_inside(own: str, ip: str, allowed: bool) -> None:
    address = f"/ip{6 if ':' in ip else 4}/{ip}/tcp/1/p2p/{OWNER}"
    assert bool(dialled(rule(own), OWNER, [address], 0.0)) == allowed


def test_loopback_addresses_are_dialled_only_where_the_swarm_is_on_loopback() -> None:
    address = places(OWNER, 1, ip="127.0.0.1")
    dialling = rule()
    assert dialled(dialling, OWNER, address, 0.0) == []
    dialling.ranges.allow_loopback()
    assert dialled(dialling, OWNER, address, 0.0) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/ip4/203.0.114.7/tcp/1",
        "/ip4/203.0.114.7/tcp/1/p2p/QmB",
        "/ip4/203.0.114.7/tcp/1/p2p/QmB/p2p/QmA",
        "/ip4/203.0.114.777/tcp/1/p2p/QmA",
        "/dns4/example.org/tcp/1/p2p/QmA",  # it is dialled by the IP address to which it leads
        "/unix/tmp/socket/p2p/QmA",
    ],
)
def test_what_is_no_ip_address_of_the_owner_is_not_dialled(address: str) -> None:
    assert dialled(rule(), OWNER, [address], 0.0) == []


def test_a_relay_is_counted_as_what_is_dialled() -> None:
    relayed = [f"/ip4/{TARGET}/tcp/{port}/p2p/QmR/p2p-circuit/p2p/{OWNER}" for port in range(1, 4)]
    dialling = rule()
    assert dialled(dialling, OWNER, relayed, 0.0) == relayed
    for number in range(OF_IP.most):
        dialled(dialling, f"Qm{number}", places(f"Qm{number}", 100 + number), 0.0)
    assert dialled(dialling, "QmLast", places("QmLast", 999), 0.0) == []


def test_what_the_rule_remembers_is_bounded() -> None:
    dialling = rule()
    for number in range(DIALS_REMEMBERED + 50):
        owner, ip = f"Qm{number}", f"11.0.{number // 250}.{number % 250}"
        dialled(dialling, owner, places(owner, 1, ip=ip), 0.0, reached="" if number % 2 else places(owner, 1, ip=ip)[0])
        dialling.met(PeerId(owner), places(owner, *range(50), ip=ip), 0.0)
        dialled(dialling, owner, places(owner, 49, ip=ip), 1.0)
    for kept in (dialling._owners.entries, dialling._ports.entries, dialling._networks.entries):
        assert len(kept) <= DIALS_REMEMBERED
    assert len(dialling._proven) == len(dialling._proven_failed) == DIALS_REMEMBERED
    assert len(dialling._told) <= DIALS_REMEMBERED
    assert not dialling._busy


def test_dials_of_other_addresses_do_not_end_the_pause_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand names with addresses of their own had a third machine dialled again within the same minute."""
    monkeypatch.setattr("decentral.comm.net.dialling.DIALS_REMEMBERED", 64)
    dialling = rule()
    for number in range(OF_IP.most):
        assert dialled(dialling, f"Qm{number}", places(f"Qm{number}", number, ip="11.1.1.1"), 0.0)
    for number in range(200):
        assert dialled(dialling, f"Qx{number}", places(f"Qx{number}", 1, ip=f"11.2.{number}.1"), 1.0)
    assert not dialled(dialling, "Qlate", places("Qlate", 99, ip="11.1.1.1"), 2.0)
    assert len(dialling._networks.entries) <= 64


@pytest.mark.swarm
def test_two_real_peers_dial_a_third_machine_no_more_often_than_stated(tmp_path: Path) -> None:
    """Four names announce 16 ports each of a machine that is nobody's; it was dialled 448 times in 45 s."""

    async def story() -> None:
        accepted = 0

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            writer.close()

        third = [await asyncio.start_server(accept, "127.0.0.1", 0) for _ in range(64)]
        ports = [server.sockets[0].getsockname()[1] for server in third]
        names = [Identity.load_or_create(tmp_path / f"name {number}").peer for number in range(4)]
        peers = await asyncio.gather(*(Libp2p.start(tmp_path / name, ["/ip4/127.0.0.1/tcp/0"], ()) for name in "ab"))
        try:
            for peer in peers:
                for number, name in enumerate(names):
                    peer.learn(name, tuple(places(name, *ports[16 * number : 16 * number + 16], ip="127.0.0.1")))
            for _ in range(3):
                refused = await at_once(refusal(peer, name) for peer in peers for name in names)
                assert set(refused) == {Reason.UNREACHABLE}
            assert 0 < accepted <= len(peers) * OF_IP.most
        finally:
            await asyncio.gather(*(peer.close() for peer in peers))
            for server in third:
                server.close()

    PatientLoop().play(story())


async def refusal(peer: Libp2p, name: PeerId) -> str:
    try:
        await peer.ask(name, Envelope(Ping(1)), 30.0, 0)
    except AskError as error:
        return error.reason
    return "answered"

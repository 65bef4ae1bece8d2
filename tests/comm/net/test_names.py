"""Addresses with DNS names are dialled by the IP addresses to which the names lead, so that the rule can judge them."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

import pytest

from decentral.comm.net import names
from decentral.comm.net.dialler import Dialler
from decentral.comm.net.dialling import OF_OWNER
from decentral.core.ids import PeerId

TAIL = "/tcp/4001/p2p/QmA"
ANSWERS = {"home.example.org": ["203.0.114.7", "2a01::7"], "many.example.org": [f"203.0.114.{n}" for n in range(40)]}


@pytest.fixture(autouse=True)
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer lookups from ANSWERS, and return the names that were looked up."""
    asked = list[str]()

    def getaddrinfo(name: str, _port: None, family: int, *_: Any) -> list[Any]:
        asked.append(name)
        if name not in ANSWERS:
            raise socket.gaierror("unknown name")
        wanted = {socket.AF_INET: (4,), socket.AF_INET6: (6,)}.get(socket.AddressFamily(family), (4, 6))
        return [(0, 0, 0, "", (ip, 0)) for ip in ANSWERS[name] if ip_address(ip).version in wanted]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def resolved(*addresses: str) -> list[str]:
    return asyncio.run(names.resolved(addresses))


def test_a_name_becomes_the_addresses_of_its_kind() -> None:
    assert resolved(f"/dns/home.example.org{TAIL}") == [f"/ip4/203.0.114.7{TAIL}", f"/ip6/2a01::7{TAIL}"]
    assert resolved(f"/dns4/home.example.org{TAIL}") == [f"/ip4/203.0.114.7{TAIL}"]
    assert resolved(f"/dns6/home.example.org{TAIL}") == [f"/ip6/2a01::7{TAIL}"]


def test_other_addresses_keep_their_places_and_unknown_names_are_left_out() -> None:
    one, other = f"/ip4/8.8.8.8{TAIL}", f"/ip4/8.8.4.4{TAIL}"
    assert resolved(one, f"/dns4/nowhere.example.org{TAIL}", other) == [one, other]


def test_a_peer_has_few_names_looked_up_and_few_addresses_of_each(lookups: list[str]) -> None:
    found = resolved(*(f"/dns4/many.example.org{TAIL}/{number}" for number in range(9)))
    assert len(lookups) == names.MOST_NAMES
    assert len(found) == names.MOST_NAMES * names.MOST_OF_NAME


class Busy(ThreadPoolExecutor):
    """An event loop's own threads, all of which are busy."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a lookup would wait for the event loop's own threads")


def test_a_lookup_takes_none_of_the_threads_of_the_event_loop() -> None:
    """Sixteen slow names of eight peers kept the evaluation of plans waiting for 12 s."""

    async def found() -> list[str]:
        asyncio.get_running_loop().set_default_executor(Busy(1))
        return await names.resolved([f"/dns4/home.example.org{TAIL}"])

    assert asyncio.run(found()) == [f"/ip4/203.0.114.7{TAIL}"]


class Deaf:
    """A network in which nobody answers a dial."""

    def __init__(self) -> None:
        self.dialled = list[Sequence[str]]()

    async def dial(self, _: PeerId, addresses: Sequence[str]) -> str:
        self.dialled.append(addresses)
        return "no answer"

    async def places_of(self, _: PeerId) -> tuple[str, ...]:
        return ()


def test_no_name_of_a_peer_is_looked_up_while_its_dials_are_paused(
    lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, network = [100.0], Deaf()
    monkeypatch.setattr("decentral.comm.net.dialler._loop_s", lambda: now[0])

    async def story() -> None:
        dialler = Dialler(network)
        for pause_s in (0.0, OF_OWNER.window_s - 0.1, 0.2):
            now[0] += pause_s
            assert not await dialler.reach(PeerId("QmA"), [f"/dns4/home.example.org{TAIL}"])

    asyncio.run(story())
    assert len(lookups) == len(network.dialled) == 2


def test_a_machine_sends_to_its_loopback_address_from_there() -> None:
    assert names.source(ip_address("127.0.0.1")) == ip_address("127.0.0.1")
    assert names.source(ip_address("255.255.255.255")) is None

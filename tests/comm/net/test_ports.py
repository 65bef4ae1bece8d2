"""No two programs of a machine listen at one port, and a peer's port is the same for IPv4 and IPv6."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from decentral.comm.net import libp2p, ports
from decentral.comm.net.libp2p import Libp2p
from decentral.core.errors import UserError
from tests.patient_time import PatientLoop

HERE = "/ip4/127.0.0.1/tcp"


def as_libp2p(port: int) -> socket.socket:
    """A socket that is bound as libp2p's are."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


@pytest.fixture
def taken() -> Iterator[int]:
    """The port at which another peer listens."""
    with as_libp2p(0) as other:
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1", "/ip4/0.0.0.0"])
def test_a_port_at_which_another_peer_listens_is_refused(taken: int, address: str) -> None:
    refused = pytest.raises(ports.PortTaken, match="address already in use; another program, or another peer")
    with refused, ports.held([f"{address}/tcp/{taken}"]):
        pass


def test_while_a_peer_starts_its_port_is_its_own() -> None:
    with ports.held([f"{HERE}/0"]) as (address,):
        with pytest.raises(ports.PortTaken), ports.held([address]):
            pass
        with as_libp2p(int(address.rpartition("/")[2])) as daemon:
            daemon.listen()  # what it was held for


def test_connections_of_a_peer_that_has_ended_do_not_keep_its_port() -> None:
    with as_libp2p(0) as daemon:
        daemon.listen()
        port = daemon.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as partner:
            daemon.accept()[0].close()  # this side waits for the last packets (TIME_WAIT)
            assert partner.recv(1) == b""
    with ports.held([f"{HERE}/{port}"]) as held:
        assert held == [f"{HERE}/{port}"]


def test_a_free_port_is_the_same_for_all_addresses() -> None:
    with ports.held([f"{HERE}/0", "/ip4/127.0.0.2/tcp/0"]) as held:
        assert len({address.rpartition("/")[2] for address in held}) == 1
        assert not held[0].endswith("/0")


def test_a_port_that_is_taken_at_one_address_only_is_free_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    free, bound = iter([4001, 4002]), []

    class Bound:
        def __init__(self, version: int, host: str, port: int) -> None:
            bound.append((host, port))
            if (host, port) == ("127.0.0.2", 4001):
                raise OSError(98, "Address already in use")
            self.port = port or next(free)

        def __enter__(self) -> int:
            return self.port

        def __exit__(self, *_: object) -> None:
            """It is free again."""

    monkeypatch.setattr(ports, "_bound", Bound)
    with ports.held([f"{HERE}/0", "/ip4/127.0.0.2/tcp/0"]) as held:
        assert held == [f"{HERE}/4002", "/ip4/127.0.0.2/tcp/4002"]


def test_a_free_port_is_the_one_that_another_address_names_where_it_is_free_too(taken: int) -> None:
    with ports.held([f"/ip4/127.0.0.2/tcp/{taken}", "/ip4/127.0.0.3/tcp/0"]) as held:
        assert held == [f"/ip4/127.0.0.2/tcp/{taken}", f"/ip4/127.0.0.3/tcp/{taken}"]
    with ports.held([f"/ip4/127.0.0.2/tcp/{taken}", f"{HERE}/0"]) as held:
        assert held[0] == f"/ip4/127.0.0.2/tcp/{taken}"
        assert held[1] not in (f"{HERE}/{taken}", f"{HERE}/0")


def test_an_address_of_another_machine_is_a_user_error() -> None:
    refused = pytest.raises(UserError, match=r"cannot listen on /ip4/203\.0\.113\.7/tcp/4001: cannot assign")
    with refused, ports.held(["/ip4/203.0.113.7/tcp/4001"]):
        pass


@pytest.mark.parametrize(
    "address", ["/ip4/127.0.0.1/udp/1", "/ip4/127.0.0.1/tcp/70000", "nowhere", "/ip4/999.1.1.1/tcp/1"]
)
def test_what_is_no_tcp_address_is_left_to_libp2p(address: str) -> None:
    with ports.held([address]) as held:
        assert held == [address]


def test_where_there_is_no_ipv6_a_peer_listens_at_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(version: int, host: str, port: int) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(ports, "_bound", without)
    assert ports.anywhere() == ["/ip4/0.0.0.0/tcp/0"]


@pytest.mark.swarm
def test_a_second_peer_at_one_port_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p, "OLD_DAEMON_S", 0.0)

    async def story() -> None:
        first = await Libp2p.start(tmp_path / "a", [f"{HERE}/0"], [])
        try:
            place = (await first.addresses())[0].partition("/p2p/")[0]
            with pytest.raises(UserError, match="address already in use"):
                await Libp2p.start(tmp_path / "b", [place], [])
        finally:
            await first.close()

    PatientLoop().play(story())


def test_the_daemon_of_a_peer_that_was_killed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    still_there = iter([True, True, False])

    @contextmanager
    def held(addresses: Sequence[str]) -> Iterator[Sequence[str]]:
        if next(still_there):
            raise ports.PortTaken("address already in use")
        yield addresses

    async def started(self: libp2p.DaemonPlace, listen: Sequence[str]) -> Sequence[str]:
        return listen

    monkeypatch.setattr(ports, "held", held)
    monkeypatch.setattr(libp2p, "PORT_AGAIN_S", 0.0)
    monkeypatch.setattr(libp2p.DaemonPlace, "_start_at", started)
    place, said = libp2p.DaemonPlace(Path("key"), (f"{HERE}/4001",), ()), list[str]()
    assert asyncio.run(place.start(said.append)) == (f"{HERE}/4001",)
    assert said == ["address already in use; waiting 5 s for the port"]


@pytest.mark.parametrize(
    ("announced", "said"),
    [
        ("/ip4/203.0.113.7/tcp/0", "^--announce expects the port at which others reach this peer, not 0; got /ip4/203"),
        ("here", "^--announce expects an address such as .*; got 'here'$"),
    ],
)
def test_an_announced_address_that_others_cannot_dial_is_named(tmp_path: Path, announced: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        asyncio.run(Libp2p.start(tmp_path / "identity.key", [f"{HERE}/0"], [announced]))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4001", "; did you mean /ip4/0.0.0.0/tcp/4001?"),
        ("10.0.0.7:4001", "; did you mean /ip4/10.0.0.7/tcp/4001?"),
        ("::1:4001", "; did you mean /ip6/::1/tcp/4001?"),
        ("[::1]:4001", "; did you mean /ip6/::1/tcp/4001?"),
        ("here", ""),
        ("/ip4/300.0.0.1/tcp/4001", ""),
        ("", ""),
    ],
)
def test_a_text_that_is_no_multiaddr_is_refused_without_libp2p(text: str, meant: str) -> None:
    with pytest.raises(UserError) as refused:
        ports.require_multiaddr(text, "--listen")
    assert str(refused.value) == f"--listen expects an address such as /ip4/0.0.0.0/tcp/4001; got {text!r}{meant}"
    for address in ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/0", "/dns4/lab.example/udp/4001/quic"):
        ports.require_multiaddr(address, "--listen")

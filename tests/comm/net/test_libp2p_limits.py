"""What a transport over libp2p remembers of others has limits: connections and addresses. The daemon is a fake."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from decentral.comm.net.libp2p import MOST_CONNECTED, MOST_LEARNED, DaemonPlace, Libp2p
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.comm.wire.transport import AskError
from decentral.core.ids import PeerId
from tests.comm.wire.invited import member

IDS = [PeerId(f"Qm{number}") for number in range(MOST_CONNECTED + 60)]
ID = PeerId("QmS7C9GZQReZVoQPms5BfCVRa3VnMed1S9Cko2Hyqdh1fE")


class Id(str):
    def to_base58(self) -> str:
        return str(self)


class Stream:
    def close(self) -> None: ...

    async def readexactly(self, count: int) -> bytes:
        raise EOFError


class Daemon:
    """Connects to everybody, and gives its stream handler to the test."""

    peer_id = Id(IDS[0])

    def __init__(self) -> None:
        self._client = SimpleNamespace(connect=self.connect)

    async def connect(self, peer: Any, places: Any) -> None: ...

    async def list_peers(self) -> list[Any]:
        return []

    async def add_binary_stream_handler(self, name: str, handler: Any) -> None:
        self.handler = handler

    async def opened_by(self, peer: str) -> None:
        await self.handler(SimpleNamespace(peer_id=Id(peer), addr="/ip4/192.0.2.1/tcp/1"), Stream(), Stream())


def transport() -> tuple[Libp2p, Daemon]:
    daemon = Daemon()
    place = DaemonPlace(None, (), ())  # type: ignore[arg-type]
    return Libp2p(daemon, place, lambda: 0.0), daemon


async def served(private: PrivateSwarm | None) -> tuple[Libp2p, Daemon]:
    ours, daemon = transport()
    await ours.enclose(private)
    return ours, daemon


def test_connections_that_others_open_are_remembered_up_to_a_limit_and_leave_room_for_ours() -> None:
    async def story() -> None:
        ours, daemon = await served(None)
        for peer in IDS:
            await daemon.opened_by(peer)
        assert len(ours._connected) == MOST_CONNECTED
        ours._connected.update(IDS)
        assert await ours.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{ID}") == ID
        assert len(ours._connected) == MOST_CONNECTED
        assert ID in ours._connected

    asyncio.run(story())


def test_addresses_of_others_are_remembered_up_to_a_limit() -> None:
    ours, _ = transport()
    for number in range(MOST_LEARNED + 10):
        ours.learn(PeerId(f"peer {number}"), ("/ip4/127.0.0.1/tcp/1",))
    assert len(ours._addresses) == MOST_LEARNED
    assert f"peer {MOST_LEARNED + 9}" in ours._addresses


def test_who_has_not_proved_to_be_a_member_is_not_among_the_peers_that_we_come_back_to() -> None:
    """Strangers took all places there, and a peer that was alone looked for members among them only."""

    async def story() -> None:
        own, theirs = member("QmOwn"), member("QmB")
        ours, daemon = await served(own)
        await daemon.opened_by("QmStranger")
        own.verify(theirs.own, theirs.proof)
        await daemon.opened_by("QmB")
        assert ours._connected == {"QmB"}

    asyncio.run(story())


def test_a_long_text_in_the_place_of_a_peer_id_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read 40,000 characters of base58 took 2.2 s of the event loop, and grows with the square of the length."""

    async def story() -> None:
        network, _ = await served(None)
        monkeypatch.setattr("decentral.comm.net.libp2p.PeerID", None)
        with pytest.raises(AskError, match="not a libp2p peer id"):
            await network.open_stream(PeerId("x" * 1000))

    asyncio.run(story())

"""In a private swarm the DHT's nodes answer members only: over libp2p on 127.0.0.1."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm
from tests.comm.wire.invited import HOUR_S, founder, member
from tests.patient_time import PatientLoop

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
KEY = f"{founder().run}/peers"
pytestmark = pytest.mark.swarm


class Dht:
    """Member `b` with its directory, in which its record is; member `a`; and a stranger that is connected to `b`."""

    async def start(self, folder: Path) -> None:
        for name in ("a", "b", "stranger"):
            Identity.load_or_create(folder / name)
        self.a, self.b, self.stranger = await asyncio.gather(*(Libp2p.start(folder / n, LISTEN, ()) for n in ALL))
        self.own = Identity.load_or_create(folder / "b")
        for transport in (self.a, self.b):
            await transport.enclose(private(transport))
        address = (await self.b.addresses())[0]
        for transport in (self.a, self.stranger):
            await transport.connect(address)
        self.directory = await self.b.directory([KEY], [])
        expires = time.time() + 600
        sealed = MemberSigner(self.own, self.members_of(self.b)).seal(KEY, b"record of b", expires)
        assert await self.directory.store(KEY, self.b.peer, sealed, expires)
        self.sealed, self.expires = sealed, expires
        self.a_directory = await self.a.directory([KEY], [self.b.peer])
        await self.stranger.directory([KEY], [self.b.peer])

    def members_of(self, transport: Libp2p) -> PrivateSwarm:
        assert transport._private is not None
        return transport._private

    async def stop(self) -> None:
        await asyncio.gather(*(one.close() for one in (self.a, self.b, self.stranger)))


ALL = ("a", "b", "stranger")


def private(transport: Libp2p) -> PrivateSwarm:
    return member(transport.peer, until=time.time() + HOUR_S, now=time.time)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dht, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    dht, runner = Dht(), asyncio.Runner(loop_factory=PatientLoop)
    runner.run(dht.start(tmp_path_factory.mktemp("dht")))
    yield dht, runner.run
    runner.run(dht.stop())
    runner.close()


def test_a_member_reads_what_a_member_stores(played: Any) -> None:
    dht, run = played
    assert run(dht.a_directory.fetch(KEY)) == {dht.b.peer: dht.sealed}


def test_a_member_that_was_forgotten_proves_itself_and_goes_on(played: Any) -> None:
    dht, run = played
    dht.members_of(dht.b).members.clear()  # as after a restart
    assert run(dht.a_directory.fetch(KEY)) == {dht.b.peer: dht.sealed}


def test_a_stranger_finds_nothing_and_stores_nothing_even_under_the_right_key(played: Any) -> None:
    dht, run = played
    protocol, to = dht.stranger._directory._dht.protocol, PeerID.from_base58(dht.b.peer)
    key = DHTID.generate(source=dht.members_of(dht.b).hidden(KEY))
    assert run(protocol.call_find(to, [key])) is None
    assert run(protocol.call_store(to, [key], [dht.sealed], dht.expires, subkeys=["QmX"])) is None
    assert run(protocol.call_ping(to)) is None
    assert not dht.directory._dht.protocol.routing_table.get(peer_id=PeerID.from_base58(dht.stranger.peer))


def test_our_node_stores_a_record_of_no_stranger_and_none_in_the_clear(played: Any) -> None:
    dht, _ = played
    valid = dht.directory._valid
    other = member(dht.b.peer, by=founder("other"))
    for value in (dht.own.seal(KEY, b"x", dht.expires), MemberSigner(dht.own, other).seal(KEY, b"x", dht.expires)):
        assert not valid.validate(record(dht, value))
    assert valid.validate(record(dht, dht.sealed))


def record(dht: Dht, value: bytes) -> Any:
    pack = DHTProtocol.serializer.dumps
    key = DHTID.generate(source=dht.members_of(dht.b).hidden(KEY)).to_bytes()
    return DHTRecord(key, pack(dht.b.peer), pack(value), dht.expires)

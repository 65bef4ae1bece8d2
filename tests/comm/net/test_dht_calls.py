"""What the DHT's nodes answer to whom, over libp2p on 127.0.0.1."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto.dht_pb2 import FindRequest, FindResponse, FindResult, NodeInfo, PingRequest, StoreRequest

from decentral.comm.net import dht_calls
from decentral.comm.net.dht_calls import (
    ANSWER_BYTES,
    MOST_CALLS,
    MOST_NEAREST,
    MOST_OF_SITE,
    MOST_PEER_ID_BYTES,
    CallShares,
    GuardedTable,
    keep_honest,
    node_id,
    sites_of,
)
from decentral.comm.net.dht_values import MOST_ANSWERED_BYTES
from decentral.comm.net.fair_shares import SHARE_RENEWS_S
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.private_swarm import MemberSigner, PrivateSwarm
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from tests.comm.wire.invited import HOUR_S, founder, member
from tests.patient_time import PatientLoop

BUCKET, REPLICAS = 20, 5  # hivemind's sizes of a bucket, and of the set of nodes that store a record
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


# In every swarm


class Public:
    """Node `b` of a public swarm with a record, and `a`, which calls it as no node of ours would."""

    async def start(self, folder: Path) -> None:
        for name in ("a", "b"):
            Identity.load_or_create(folder / name)
        self.a, self.b = await asyncio.gather(*(Libp2p.start(folder / n, LISTEN, ()) for n in ("a", "b")))
        await self.a.connect((await self.b.addresses())[0])
        self.directory = await self.b.directory([KEY], [])
        expires = time.time() + 600
        record = Identity.load_or_create(folder / "b").seal(KEY, b"record of b", expires)
        assert await self.directory.store(KEY, self.b.peer, record, expires)
        await self.a.directory([KEY], [self.b.peer])
        self.stub = self.a._directory._dht.protocol.get_stub(PeerID.from_base58(self.b.peer))  # type: ignore[union-attr]

    @property
    def table(self) -> RoutingTable:
        return self.directory._dht.protocol.routing_table

    async def stop(self) -> None:
        await asyncio.gather(self.a.close(), self.b.close())


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Public, Run]]:
    dht, runner = Public(), asyncio.Runner(loop_factory=PatientLoop)
    runner.run(dht.start(tmp_path_factory.mktemp("public")))
    yield dht, runner.run
    runner.run(dht.stop())
    runner.close()


def next_to(key: bytes, number: int) -> bytes:
    return bytes([*key[:-1], key[-1] ^ number])


RUN_KEY = DHTID.generate(source=KEY).to_bytes()


def stored(times: int = 1, **changes: Any) -> StoreRequest:
    """A call that stores a record so many times, but for what is changed."""
    fields = {"keys": RUN_KEY, "subkeys": b"\xa1x", "values": b"", "expiration_time": 1e9, "in_cache": False}
    return StoreRequest(**({name: [value] * times for name, value in fields.items()} | changes))


@pytest.mark.parametrize(
    "call",
    [
        *(("rpc_ping", PingRequest(peer=NodeInfo(node_id=next_to(RUN_KEY, one)))) for one in (1, 2)),
        ("rpc_ping", PingRequest(validate=True)),
        ("rpc_find", FindRequest(keys=[RUN_KEY] * 20_000)),
        ("rpc_find", FindRequest(keys=[RUN_KEY], peer=NodeInfo(node_id=next_to(RUN_KEY, 1)))),
        ("rpc_store", stored(2)),
        ("rpc_store", stored(in_cache=[True])),
        ("rpc_store", stored(subkeys=[b""])),
        ("rpc_store", stored(subkeys=[])),
        ("rpc_store", stored(keys=[RUN_KEY[1:]])),
        ("rpc_find", FindRequest(keys=[RUN_KEY * 1000])),
    ],
    ids=lambda call: call[0],
)
def test_a_call_that_our_node_would_not_make_is_refused(public: Any, call: tuple[str, Any]) -> None:
    dht, run = public
    name, request = call
    with pytest.raises(P2PHandlerError, match="must"):
        run(getattr(dht.stub, name)(request, timeout=30))
    assert set(dht.table.peer_id_to_uid.values()) == {node_id(PeerID.from_base58(dht.a.peer))}


def test_a_node_is_found_under_the_hash_of_its_peer_id_only(public: Any) -> None:
    dht, run = public
    answer = run(dht.stub.rpc_find(FindRequest(keys=[RUN_KEY]), timeout=30))
    assert answer.peer.node_id == node_id(PeerID.from_base58(dht.b.peer)).to_bytes()
    (result,) = answer.results
    assert [PeerID(one).to_base58() for one in result.nearest_peer_ids] == [dht.a.peer]


def test_no_node_is_sent_the_records_that_others_store(public: Any) -> None:
    dht, run = public
    protocol, sent = dht.directory._dht.protocol, []

    async def call_store(*arguments: Any, **_: Any) -> None:
        sent.append(arguments)

    async def forget_and_meet() -> None:
        del protocol.routing_table[node_id(PeerID.from_base58(dht.a.peer))]
        await dht.stub.rpc_ping(PingRequest(peer=dht.a._directory._dht.protocol.node_info), timeout=30)

    protocol.call_store = call_store
    run(forget_and_meet())
    assert (len(protocol.storage), sent, len(dht.table.uid_to_peer_id)) == (1, [], 1)


@pytest.mark.parametrize(("names", "most"), [(1, MOST_CALLS // 3 + 1), (300, MOST_CALLS // 2)])
def test_a_flood_of_calls_of_one_site_leaves_half_for_the_others(names: int, most: int) -> None:
    now = [0.0]
    shares = CallShares(lambda: now[0])
    answered = [answers(shares, f"greedy{number % names}") for number in range(1000)]
    assert sum(answered) == most
    assert answers(shares, "honest", site=OTHER_SITE)
    now[0] += SHARE_RENEWS_S
    assert answers(shares, "greedy0")


def test_a_flood_of_calls_of_one_peer_leaves_calls_for_the_others_of_its_site() -> None:
    shares = CallShares(lambda: 0.0)
    for _ in range(1000):
        answers(shares, "greedy")
    assert sum(answers(shares, "honest") for _ in range(100)) == (MOST_CALLS // 3 + 1) // 3


def test_many_bytes_for_one_peer_leave_calls_for_the_others_of_its_site() -> None:
    shares = CallShares(lambda: 0.0)
    while answers(shares, "greedy", ANSWER_BYTES // 32):
        pass
    assert answers(shares, "honest", ANSWER_BYTES // 32)


def test_a_flood_of_calls_of_one_peer_from_many_sites_leaves_half_for_the_others() -> None:
    shares = CallShares(lambda: 0.0)
    assert sum(answers(shares, "greedy", site=f"192.0.{number}.0/24") for number in range(250)) == MOST_CALLS / 2
    assert answers(shares, "honest", site=OTHER_SITE)


def test_a_site_that_was_sent_many_bytes_waits_and_others_do_not() -> None:
    now = [0.0]
    shares = CallShares(lambda: now[0])
    assert answers(shares, "greedy", ANSWER_BYTES * 2 // 3)
    assert not answers(shares, "greedy")
    assert not answers(shares, "greedy under another name")
    assert answers(shares, "honest", site=OTHER_SITE)
    now[0] += SHARE_RENEWS_S
    assert answers(shares, "greedy")


def test_the_largest_answer_leaves_room_for_the_answers_to_others() -> None:
    shares = CallShares(lambda: 0.0)
    assert answers(shares, "greedy", MOST_ANSWERED_BYTES)
    assert answers(shares, "honest", site=OTHER_SITE)


def test_a_caller_belongs_to_the_site_of_its_connection() -> None:
    peer = PeerId("QmA")
    assert sites_of(peer, [f"/ip4/192.0.2.{n}/tcp/1/p2p/QmA" for n in (7, 9)]) == {"192.0.2.0/24"}
    assert sites_of(peer, []) == set()


OTHER_SITE = "198.51.100.0/24"


def answers(shares: CallShares, caller: str, size: int = 100, site: str = "203.0.113.0/24") -> bool:
    try:
        shares.begin(PeerId(caller), site)
    except ProtocolError:
        return False
    shares.answered(PeerId(caller), site, size)
    return True


def test_an_answer_keeps_no_node_under_a_chosen_id() -> None:
    honest, liar = (PeerID(DHTID.generate(source=name).to_bytes()) for name in ("honest", "liar"))
    ids = [node_id(honest).to_bytes(), next_to(RUN_KEY, 1)]
    result = FindResult(nearest_node_ids=ids, nearest_peer_ids=[honest.to_bytes(), liar.to_bytes()])
    answer = FindResponse(peer=NodeInfo(node_id=next_to(RUN_KEY, 2)), results=[result])
    keep_honest(answer, liar)
    assert answer.peer.node_id == b""
    assert list(answer.results[0].nearest_peer_ids) == [honest.to_bytes()]
    assert list(answer.results[0].nearest_node_ids) == ids[:1]


class Unread:
    """A stand-in for the class of peer ids, of which none may be made."""

    def __init__(self, raw: bytes) -> None:
        raise AssertionError(f"a peer id of {len(raw)} bytes was read")


LARGE = {
    "results": [FindResult()] * (MOST_NEAREST + 1),
    "no result": [],
    "node ids": [FindResult(nearest_node_ids=[b""] * (MOST_NEAREST + 1))],
    "peer ids": [FindResult(nearest_peer_ids=[b"x"] * (MOST_NEAREST + 1), nearest_node_ids=[b"x"])],
    "a long peer id": [FindResult(nearest_peer_ids=[bytes(MOST_PEER_ID_BYTES + 1)], nearest_node_ids=[b""])],
}


@pytest.mark.parametrize("results", LARGE.values(), ids=LARGE)
def test_an_answer_larger_than_an_honest_one_is_cleared_unread(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million empty results took 8.6 s of the event loop, and one peer id of 40 kB 1.9 s."""
    answer = FindResponse(results=results)
    monkeypatch.setattr(dht_calls, "PeerID", Unread)
    monkeypatch.setattr(dht_calls, "_is_readable", Unread)
    keep_honest(answer, peer_of(1))
    assert not answer.results


class MetTable:
    """The guarded routing table of the node of a peer, whose other peers connect from the given sites."""

    def __init__(self, number: int = 0) -> None:
        self.node_id = node_id(peer_of(number))
        self.routing_table = RoutingTable(self.node_id, BUCKET, 5)
        self.rule = GuardedTable(self, self.places)
        self.connected: tuple[str, ...] = ()
        self.gone, self.pinged = set[PeerID](), list[PeerID]()

    async def call_ping(self, peer: PeerID) -> DHTID | None:
        self.pinged.append(peer)
        if peer in self.gone:
            return None
        await self.rule.update(node_id(peer), peer)
        return node_id(peer)

    async def places(self, peer: PeerId) -> list[str]:
        return [f"{address}/p2p/{peer}" for address in self.connected]

    async def meet(self, numbers: Iterable[int], *addresses: str) -> None:
        self.connected = addresses
        for number in numbers:
            await self.rule.update(node_id(peer_of(number)), peer_of(number))

    def nearest(self, key: DHTID) -> set[PeerID]:
        return {peer for _, peer in self.routing_table.get_nearest_neighbors(key, BUCKET, exclude=self.node_id)}


def peer_of(number: int) -> PeerID:
    return PeerID(number.to_bytes(34, "big"))


def test_the_routing_table_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def many() -> None:
        for number in range(150):
            await table.meet([number], f"/ip4/192.0.{number}.1/tcp/1")
        await table.rule.update(None, peer_of(number), responded=False)

    table = MetTable()
    monkeypatch.setattr(dht_calls, "MOST_NODES", 100)
    asyncio.run(many())
    assert len(table.routing_table.uid_to_peer_id) == 100


def test_one_site_does_not_fill_the_routing_table() -> None:
    table = MetTable()
    asyncio.run(table.meet(range(1, 300), "/ip4/192.0.2.7/tcp/1", "/ip6/2001:db8:1:2::3/tcp/1"))
    asyncio.run(table.meet(range(300, 600), "/ip4/192.0.2.9/tcp/1", "/ip6/2001:db8:1:5::9/tcp/1"))
    assert len(table.routing_table.uid_to_peer_id) <= MOST_OF_SITE * 10


@pytest.mark.parametrize("places", [("/ip4/192.0.2.7/tcp/1/p2p/QmRelay/p2p-circuit",), ("/ip4/192.0.2.9/udp/1/quic",)])
def test_half_of_the_nodes_next_to_a_key_are_not_of_one_site_that_came_first(places: tuple[str, ...]) -> None:
    key = DHTID.generate(source="key")
    near = sorted(range(1, 2000), key=lambda number: node_id(peer_of(number)) ^ key)[:50]
    table = MetTable()
    asyncio.run(table.meet(near, *places))
    for number in range(2000, 2000 + BUCKET * 4):
        asyncio.run(table.meet([number], f"/ip4/198.51.{number % 250}.1/tcp/1"))
    assert len(table.nearest(key) & {peer_of(number) for number in near}) <= MOST_OF_SITE
    assert len(table.nearest(key)) == BUCKET


def test_a_node_that_has_gone_leaves_its_place_to_another_of_its_site() -> None:
    table = MetTable()
    asyncio.run(table.meet(range(1, 100), "/ip4/192.0.2.7/tcp/1"))
    gone = next(iter(table.routing_table.peer_id_to_uid))
    asyncio.run(table.rule.update(None, gone, responded=False))
    assert gone not in table.routing_table
    before = len(table.routing_table.uid_to_peer_id)
    asyncio.run(table.meet(range(100, 300), "/ip4/192.0.2.8/tcp/1"))
    assert len(table.routing_table.uid_to_peer_id) >= before + 1


def test_nodes_that_do_not_answer_leave_their_places_to_the_next_of_their_site() -> None:
    """One machine took all places of its site for ever with the ids of peers that were gone."""
    table = MetTable()
    asyncio.run(table.meet(range(1, 300), "/ip4/192.0.2.7/tcp/1"))
    table.gone = set(table.routing_table.peer_id_to_uid)
    asyncio.run(table.meet(range(300, 900), "/ip4/192.0.2.8/tcp/1"))
    far = [peer for node, peer in table.routing_table.uid_to_peer_id.items() if (node ^ table.node_id) >> 159]
    assert len(far) == MOST_OF_SITE
    assert not table.gone & set(far)


def test_a_node_that_answers_keeps_its_place_and_the_next_is_asked() -> None:
    table = MetTable()
    asyncio.run(table.meet(range(1, 300), "/ip4/192.0.2.7/tcp/1"))
    before, table.pinged = set(table.routing_table.peer_id_to_uid), []
    asyncio.run(table.meet(range(300, 310), "/ip4/192.0.2.8/tcp/1"))
    kept = {peer for peer in before if peer in table.routing_table}
    assert kept == before
    assert len(set(table.pinged)) == len(table.pinged)


def test_a_full_table_takes_a_node_in_the_place_of_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that waited to replace others counted for ever, since nobody pinged them."""
    table = MetTable()
    monkeypatch.setattr(dht_calls, "MOST_NODES", 100)
    for number in range(100):
        asyncio.run(table.meet([number], f"/ip4/192.0.{number}.1/tcp/1"))
    table.gone = set(table.routing_table.peer_id_to_uid)
    for number in range(100, 200):
        asyncio.run(table.meet([number], f"/ip4/192.1.{number}.1/tcp/1"))
    assert set(table.routing_table.peer_id_to_uid) == {peer_of(number) for number in range(100, 200)}


def test_a_peer_that_has_also_a_connection_from_a_full_site_enters_the_table() -> None:
    table = MetTable()
    asyncio.run(table.meet(range(1, 300), "/ip4/192.0.2.7/tcp/1"))
    for number in range(300, 400):
        asyncio.run(table.meet([number], f"/ip4/198.51.{number % 256}.1/tcp/1", "/ip4/192.0.2.7/tcp/1"))
        assert peer_of(number) in table.routing_table


def test_a_peer_without_a_connection_is_no_node() -> None:
    table = MetTable()
    asyncio.run(table.meet([1]))
    assert not table.routing_table.uid_to_peer_id


def test_a_hundred_peers_behind_one_router_find_the_nodes_next_to_each_key() -> None:
    peers = range(100)
    tables = {peer_of(number): MetTable(number) for number in peers}

    async def all_meet() -> None:
        for own, table in enumerate(tables.values()):
            others = [number for number in peers if number != own]
            Random(own).shuffle(others)
            await table.meet(others, "/ip4/192.0.2.7/tcp/1")

    def found(begin: PeerID, key: DHTID) -> list[PeerID]:
        """Return what a lookup finds that asks the BUCKET nearest peers it knows of until it has asked all."""
        known, asked = {begin}, set[PeerID]()
        while left := [peer for peer in nearest(known, key) if peer not in asked]:
            asked.add(left[0])
            known |= tables[left[0]].nearest(key)
        return nearest(known, key)

    def nearest(known: Iterable[PeerID], key: DHTID) -> list[PeerID]:
        return sorted(known, key=lambda peer: node_id(peer) ^ key)[:BUCKET]

    asyncio.run(all_meet())
    for number in range(20):
        key = DHTID.generate(source=number)
        assert found(peer_of(number), key)[:REPLICAS] == nearest(tables, key)[:REPLICAS]

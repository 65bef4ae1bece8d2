"""One suite holds every transport and directory to the same behaviour: loopback, virtual time, libp2p on 127.0.0.1."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from decentral.comm.net.fair_shares import MAX_STREAMS
from decentral.comm.net.libp2p import PROTOCOL, Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory, SignedRecords
from decentral.comm.wire import blobs, codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import MAX_PEER_RECORD_BYTES, Identity
from decentral.comm.wire.messages import VERSION, Message, Ping, Pong, Probe, Probed, Refused
from decentral.comm.wire.transport import Answer, AskError, Directory, Handler, Transport
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.network_faults import NetworkFaults
from decentral.sim.network.shared_links import SiteLink
from decentral.sim.network.virtual_directory import Records, VirtualDirectory
from decentral.sim.network.virtual_network import Network
from tests.comm.net.loopback import Loopback, LoopbackDirectory, LoopbackTransport, pipe
from tests.comm.net.virtual_transport import VirtualTransport
from tests.patient_time import PatientLoop
from tests.sim.network.next_action import next_at

T = TypeVar("T")
RUN = "gpt-3fa2c1"
KEYS = (f"{RUN}/peers", f"{RUN}/plan")
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
LONG_S = 30.0  # a deadline that is not what a test is about
SHORT_S = 0.05
TURNS = 20  # of the loop, in which everybody who is ready gets on, before virtual time does

BothEnds = tuple[blobs.Reader, blobs.Writer]


class World(Protocol):
    """Two peers, `a` who asks and `b` who answers, and what differs between the drivers."""

    @property
    def a(self) -> Transport: ...

    @property
    def b(self) -> Transport: ...

    async def start(self, folder: Path, handler: Handler) -> None: ...

    async def raw(self, use: Callable[[blobs.Reader, blobs.Writer], Awaitable[T]]) -> T:
        """A bare stream from `a` to `b`."""
        ...

    async def gone(self, folder: Path) -> PeerId:
        """A peer that was there and has left."""
        ...

    async def directories(self) -> tuple[Directory, Directory]: ...


class InMemory:
    a: LoopbackTransport
    b: LoopbackTransport

    async def start(self, folder: Path, handler: Handler) -> None:
        self.network = Loopback()
        self.a = self.network.transport(Identity.load_or_create(folder / "a").peer)
        self.b = self.network.transport(Identity.load_or_create(folder / "b").peer)
        await self.b.serve(handler, bound)

    async def raw(self, use: Callable[[blobs.Reader, blobs.Writer], Awaitable[T]]) -> T:
        ours, theirs = pipe()
        answering = asyncio.create_task(self.b.answer(self.a.peer, *theirs))
        result = await use(*ours)
        ours[1].close()
        await answering
        return result

    async def gone(self, folder: Path) -> PeerId:
        third = self.network.transport(PeerId("QmThird"))
        await third.serve(pong, bound)
        await self.a.ask(third.peer, Envelope(Ping(1)), LONG_S, 0)
        await third.close()
        return third.peer

    async def directories(self) -> tuple[Directory, Directory]:
        return LoopbackDirectory(self.network), LoopbackDirectory(self.network)

    async def stop(self) -> None:
        await self.a.close()
        await self.b.close()


class OverLibp2p:
    a: Libp2p
    b: Libp2p

    async def start(self, folder: Path, handler: Handler) -> None:
        for name in ("a", "b"):
            Identity.load_or_create(folder / name)
        self.a, self.b = await asyncio.gather(*(Libp2p.start(folder / name, LISTEN, ()) for name in ("a", "b")))
        await self.b.serve(handler, bound)
        self.a.learn(self.b.peer, await self.b.addresses())
        self._directories: tuple[Directory, Directory] | None = None

    async def raw(self, use: Callable[[blobs.Reader, blobs.Writer], Awaitable[T]]) -> T:
        await self.a.connect((await self.b.addresses())[0])
        opened = await self.a._p2p.call_binary_stream_handler(PeerID.from_base58(self.b.peer), PROTOCOL)
        with closing(opened[2]):
            return await use(opened[1], opened[2])

    async def gone(self, folder: Path) -> PeerId:
        Identity.load_or_create(folder / "third")
        third = await Libp2p.start(folder / "third", LISTEN, ())
        await third.serve(pong, bound)
        self.a.learn(third.peer, await third.addresses())
        await self.a.ask(third.peer, Envelope(Ping(1)), LONG_S, 0)
        await third.close()
        return third.peer

    async def directories(self) -> tuple[Directory, Directory]:
        if self._directories is None:
            await self.a.connect((await self.b.addresses())[0])
            ours = await self.a.directory(KEYS, [])
            self._directories = ours, await self.b.directory(KEYS, [self.a.peer])
        return self._directories

    async def stop(self) -> None:
        await asyncio.gather(self.a.close(), self.b.close())


class InVirtualTime:
    """Time passes when nobody is ready: a task runs the agenda while the others wait."""

    a: VirtualTransport
    b: VirtualTransport

    async def start(self, folder: Path, handler: Handler) -> None:
        self.agenda = Agenda()
        faults = NetworkFaults(self.agenda, Random(0), jitter=0.0)
        self.network = Network(self.agenda, Near(), faults)
        self.records = Records(self.agenda, Random(0), faults)
        self.a = VirtualTransport(self.network, Identity.load_or_create(folder / "a").peer)
        self.b = VirtualTransport(self.network, Identity.load_or_create(folder / "b").peer)
        await self.b.serve(handler, bound)
        self._pumping = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if (due := next_at(self.agenda)) is not None:
                self.agenda.run(due)

    async def raw(self, use: Callable[[blobs.Reader, blobs.Writer], Awaitable[T]]) -> T:
        pytest.skip("envelopes travel here, not bytes; tests/sim/network/test_virtual_network.py has damage")

    async def gone(self, folder: Path) -> PeerId:
        third = VirtualTransport(self.network, PeerId("QmThird"))
        await third.serve(pong, bound)
        await self.a.ask(third.peer, Envelope(Ping(1)), LONG_S, 0)
        await third.close()
        return third.peer

    async def directories(self) -> tuple[Directory, Directory]:
        self.records.epoch = time.time() - self.agenda.now
        return VirtualDirectory(self.records, self.a.peer), VirtualDirectory(self.records, self.b.peer)

    async def stop(self) -> None:
        self._pumping.cancel()
        await self.a.close()
        await self.b.close()


class Near:
    """10 ms and 10 MB/s between everybody."""

    def up(self, peer: PeerId) -> float:
        return 1e7

    def down(self, peer: PeerId) -> float:
        return 1e7

    def delay_s(self, source: PeerId, target: PeerId) -> float:
        return 0.01

    def round_trip_s(self, source: PeerId, target: PeerId) -> float:
        return 0.02

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        return float("inf")

    def site_links(self, source: PeerId, target: PeerId) -> list[SiteLink]:
        return []


class Pair:
    """A world with its event loop, and the answer that `b` gives at the moment."""

    def __init__(self, world: InMemory | InVirtualTime | OverLibp2p, folder: Path) -> None:
        self.world: World = world
        self.folder = folder
        self.stop = world.stop
        self.answers: Handler = pong
        self._runner = asyncio.Runner(loop_factory=PatientLoop)
        self.do(world.start(folder, lambda sender, question: self.answers(sender, question)))
        self.ours = Identity.load_or_create(folder / "a")
        self.theirs = Identity.load_or_create(folder / "b")

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def ask(self, envelope: Envelope, deadline_s: float = LONG_S, max_blob_bytes: int = 0) -> Answer:
        return self.do(self.world.a.ask(self.world.b.peer, envelope, deadline_s, max_blob_bytes))

    def failure(self, envelope: Envelope, deadline_s: float = LONG_S, max_blob_bytes: int = 0) -> str:
        with pytest.raises(AskError) as caught:
            self.ask(envelope, deadline_s, max_blob_bytes)
        return caught.value.reason

    def close(self) -> None:
        self.do(self.stop())
        self._runner.close()


def bound(message: Message) -> int:
    return 1 << 20 if isinstance(message, Probe) else 0


async def pong(sender: PeerId, question: Envelope) -> Envelope:
    assert isinstance(question.message, Ping)
    return Envelope(Pong(question.message.nonce))


WORLDS: dict[str, Callable[[], InMemory | InVirtualTime | OverLibp2p]] = {
    **{"loopback": InMemory, "virtual": InVirtualTime},
    "libp2p": OverLibp2p,
}
EVERY_WORLD = [pytest.param(name, marks=[pytest.mark.swarm] * (name == "libp2p")) for name in WORLDS]


@pytest.fixture(scope="module", params=EVERY_WORLD)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(WORLDS[request.param](), tmp_path_factory.mktemp(request.param))
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.answers = pong
    return shared


only_libp2p = pytest.mark.parametrize(
    "shared", [pytest.param("libp2p", marks=pytest.mark.swarm)], indirect=True, scope="module"
)


# Questions and answers


def test_a_question_gets_its_answer(pair: Pair) -> None:
    assert pair.ask(Envelope(Ping(7))).envelope == Envelope(Pong(7))


def test_blobs_travel_both_ways(pair: Pair) -> None:
    async def probed(sender: PeerId, question: Envelope) -> Envelope:
        return Envelope(Probed(len(question.blob)), question.blob[::-1])

    pair.answers = probed
    blob = bytes(range(256)) * 2500
    answer = pair.ask(Envelope(Probe(0), blob), max_blob_bytes=len(blob))
    assert answer.envelope == Envelope(Probed(len(blob)), blob[::-1])


def test_an_answer_says_how_much_went_over_the_wire(pair: Pair) -> None:
    async def probed(sender: PeerId, question: Envelope) -> Envelope:
        return Envelope(Probed(0), bytes(50_000))

    pair.answers = probed
    answer = pair.ask(Envelope(Probe(0), bytes(1000)), max_blob_bytes=50_000)
    assert 1000 < answer.sent_bytes < 1200
    assert 50_000 < answer.received_bytes < 50_200
    assert answer.seconds >= 0


def test_the_handler_knows_who_asks(pair: Pair) -> None:
    senders = []

    async def note(sender: PeerId, question: Envelope) -> Envelope:
        senders.append(sender)
        return Envelope(Pong(0))

    pair.answers = note
    pair.ask(Envelope(Ping(0)))
    assert senders == [pair.ours.peer]


def test_many_questions_at_once_get_each_its_own_answer(pair: Pair) -> None:
    async def all_at_once() -> list[Answer]:
        a, b = pair.world.a, pair.world.b
        return await asyncio.gather(*(a.ask(b.peer, Envelope(Ping(n)), LONG_S, 0) for n in range(20)))

    assert [answer.envelope.message for answer in pair.do(all_at_once())] == [Pong(n) for n in range(20)]


def test_a_refusal_arrives_as_an_answer(pair: Pair) -> None:
    async def refuse(sender: PeerId, question: Envelope) -> Envelope:
        return Envelope(Refused("run", "this peer is in another run"))

    pair.answers = refuse
    assert pair.ask(Envelope(Ping(0))).envelope.message == Refused("run", "this peer is in another run")


def test_a_protocol_error_of_the_handler_arrives_as_a_refusal_and_is_counted(pair: Pair) -> None:
    async def refuse(sender: PeerId, question: Envelope) -> Envelope:
        raise ProtocolError("replay", "seen before")

    pair.answers = refuse
    before = pair.world.b.refused.get("replay", 0)
    assert pair.ask(Envelope(Ping(0))).envelope.message == Refused("replay", "replay: seen before")
    assert pair.world.b.refused["replay"] == before + 1


def test_an_answer_that_is_too_large_is_oversize(pair: Pair) -> None:
    async def large(sender: PeerId, question: Envelope) -> Envelope:
        return Envelope(Probed(0), bytes(1001))

    pair.answers = large
    assert pair.failure(Envelope(Probe(0)), max_blob_bytes=1000) == "oversize"


def test_a_handler_that_never_answers_is_a_deadline(pair: Pair) -> None:
    async def never(sender: PeerId, question: Envelope) -> Envelope:
        await asyncio.Event().wait()
        raise AssertionError

    pair.ask(Envelope(Ping(0)))  # connected from here on
    pair.answers = never
    assert pair.failure(Envelope(Ping(0)), deadline_s=SHORT_S) == "deadline"
    pair.answers = pong
    assert pair.ask(Envelope(Ping(1))).envelope.message == Pong(1)


def test_a_handler_that_breaks_is_a_cut_and_the_peer_goes_on(pair: Pair) -> None:
    async def broken(sender: PeerId, question: Envelope) -> Envelope:
        raise ConnectionError("something of our own")

    pair.answers = broken
    assert pair.failure(Envelope(Ping(0))) == "cut"
    pair.answers = pong
    assert pair.ask(Envelope(Ping(1))).envelope.message == Pong(1)


def test_a_peer_answers_so_many_questions_at_a_time_and_says_that_it_is_busy_to_the_others(pair: Pair) -> None:
    async def crowd() -> list[Message]:
        release, arrived = asyncio.Event(), asyncio.Queue[None]()

        async def wait(sender: PeerId, question: Envelope) -> Envelope:
            arrived.put_nowait(None)
            await release.wait()
            return await pong(sender, question)

        pair.answers = wait
        a, b = pair.world.a, pair.world.b
        asked = list[asyncio.Task[Answer]]()
        for _ in range(MAX_STREAMS):
            asked.append(asyncio.ensure_future(a.ask(b.peer, Envelope(Ping(7)), LONG_S, 0)))
            arrival = asyncio.ensure_future(arrived.get())
            await asyncio.wait((asked[-1], arrival), return_when=asyncio.FIRST_COMPLETED)
            arrival.cancel()
        release.set()
        return [answer.envelope.message for answer in await asyncio.gather(*asked)]

    messages = pair.do(crowd())
    busy = [message for message in messages if message != Pong(7)]
    assert {message.reason for message in busy if isinstance(message, Refused)} == {"busy"}
    assert MAX_STREAMS // 4 < len(messages) - len(busy) <= MAX_STREAMS // 2  # one sender's share


def test_a_peer_that_is_gone_is_unreachable(pair: Pair) -> None:
    async def ask_the_gone() -> None:
        await pair.world.a.ask(await pair.world.gone(pair.folder), Envelope(Ping(0)), LONG_S, 0)

    with pytest.raises(AskError) as caught:
        pair.do(ask_the_gone())
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize("name", ["", "nobody", "Qm0OIl", "x" * 64])
def test_whoever_has_no_peers_name_is_unreachable(pair: Pair, name: str) -> None:
    with pytest.raises(AskError) as caught:
        pair.do(pair.world.a.ask(PeerId(name), Envelope(Ping(0)), LONG_S, 0))
    assert caught.value.reason == "unreachable"


# What breaks the format


@pytest.mark.parametrize(
    ("bytes_sent", "reason"),
    [
        pytest.param(b"\xff" * 100, "oversize", id="an impossible length"),
        pytest.param((5).to_bytes(4, "big") + b"\xc1" * 5, "garbage", id="no msgpack"),
        pytest.param((4).to_bytes(4, "big") + b"\x94\x01\xa0\x80", "garbage", id="cut msgpack"),
    ],
)
def test_garbage_is_counted_and_the_peer_goes_on_answering(pair: Pair, bytes_sent: bytes, reason: str) -> None:
    before = pair.world.b.refused.get(reason, 0)
    assert refusal_of(pair, bytes_sent) == reason
    assert pair.world.b.refused[reason] == before + 1
    assert pair.ask(Envelope(Ping(2))).envelope.message == Pong(2)


def test_another_version_is_told_so(pair: Pair) -> None:
    header = bytearray(codec.encode(Ping(0)))
    header[1] = VERSION + 1
    assert refusal_of(pair, len(header).to_bytes(4, "big") + bytes(header)) == "version"


def test_a_question_with_a_blob_over_its_bound_is_refused(pair: Pair) -> None:
    assert pair.ask(Envelope(Ping(0), b"one byte too many")).envelope.message == Refused(
        "oversize", "oversize: the blob of this Ping must have at most 0 bytes; got 17"
    )


def refusal_of(pair: Pair, bytes_sent: bytes) -> str:
    """The reason that comes back for raw bytes."""

    async def send(reader: blobs.Reader, writer: blobs.Writer) -> str:
        writer.write(bytes_sent)
        await writer.drain()
        async with asyncio.timeout(LONG_S):
            answer, _ = await blobs.read(reader, lambda _: 0)
        assert isinstance(answer.message, Refused)
        return answer.message.reason

    return pair.do(pair.world.raw(send))


# The directory


def test_what_one_peer_stores_the_other_fetches(pair: Pair) -> None:
    async def store_and_fetch() -> None:
        ours, theirs = await pair.world.directories()
        expires = time.time() + 100
        record = pair.ours.seal(KEYS[0], b"profile", expires)
        assert await ours.store(KEYS[0], pair.ours.peer, record, expires)
        assert (await theirs.fetch(KEYS[0]))[pair.ours.peer] == record
        assert (await ours.fetch(KEYS[0]))[pair.ours.peer] == record

    pair.do(store_and_fetch())


def test_the_records_of_several_peers_come_together(pair: Pair) -> None:
    async def two() -> None:
        directories = await pair.world.directories()
        expires = time.time() + 200
        for directory, identity in zip(directories, (pair.ours, pair.theirs), strict=True):
            record = identity.seal(KEYS[0], identity.peer.encode(), expires)
            assert await directory.store(KEYS[0], identity.peer, record, expires)
        for directory in directories:
            assert {pair.ours.peer, pair.theirs.peer} <= set(await directory.fetch(KEYS[0]))

    pair.do(two())


def test_a_record_that_expires_later_replaces_the_earlier_one(pair: Pair) -> None:
    async def replace() -> None:
        ours, theirs = await pair.world.directories()
        now = time.time()
        records = [pair.ours.seal(KEYS[1], body, now + s) for body, s in ((b"old", 300), (b"new", 400))]
        assert await ours.store(KEYS[1], pair.ours.peer, records[0], now + 300)
        assert await ours.store(KEYS[1], pair.ours.peer, records[1], now + 400)
        await ours.store(KEYS[1], pair.ours.peer, records[0], now + 300)
        assert (await theirs.fetch(KEYS[1]))[pair.ours.peer] == records[1]

    pair.do(replace())


def test_a_key_that_nobody_stored_is_empty(pair: Pair) -> None:
    async def fetch() -> None:
        ours, _ = await pair.world.directories()
        assert await ours.fetch(f"{RUN}/nothing") == {}

    pair.do(fetch())


@only_libp2p
@pytest.mark.parametrize("forgery", ["unsigned", "signed by another", "signed for another key", "another key"])
def test_a_forged_record_is_not_stored(pair: Pair, forgery: str) -> None:
    async def forge() -> None:
        ours, theirs = await pair.world.directories()
        victim, expires = PeerId(pair.theirs.peer), time.time() + 900
        key = f"{RUN}/config" if forgery == "another key" else KEYS[0]
        value = {
            "unsigned": b"profile",
            "signed by another": pair.ours.seal(KEYS[0], b"profile", expires),
            "signed for another key": pair.theirs.seal(KEYS[1], b"profile", expires),
            "another key": pair.theirs.seal(key, b"profile", expires),
        }[forgery]
        await ours.store(key, victim, value, expires)
        for directory in (ours, theirs):
            assert (await directory.fetch(key)).get(victim) != value

    pair.do(forge())


@only_libp2p
def test_a_record_that_another_node_has_already_is_stored_there(pair: Pair) -> None:
    """Nodes pass on what they store: who brings it last is to hear that it is there."""

    async def twice() -> None:
        ours, _ = await pair.world.directories()
        assert isinstance(ours, HivemindDirectory)
        expires = time.time() + 500
        record = pair.ours.seal(KEYS[0], b"twice", expires)
        assert await ours.store_at_others(KEYS[0], pair.ours.peer, record, expires)
        assert await ours.store_at_others(KEYS[0], pair.ours.peer, record, expires)
        earlier = pair.ours.seal(KEYS[0], b"earlier", expires - 1)
        assert not await ours.store_at_others(KEYS[0], pair.ours.peer, earlier, expires - 1)

    pair.do(twice())


def test_what_no_other_node_takes_is_stored_here_only(tmp_path: Path, signer: Identity) -> None:
    async def alone() -> None:
        transport = await Libp2p.start(tmp_path / "identity.key", LISTEN, [])
        try:
            ours = await transport.directory(KEYS, [])
            expires = time.time() + 100
            record = signer.seal(KEYS[0], b"alone", expires)
            assert not await ours.store_at_others(KEYS[0], signer.peer, record, expires)
            assert await ours.store(KEYS[0], signer.peer, record, expires)
        finally:
            await transport.close()

    PatientLoop().play(alone())


@only_libp2p
def test_a_directory_whose_routing_table_was_emptied_finds_the_others_again(pair: Pair) -> None:
    """One call that is not answered in time empties the table of a swarm of two."""

    async def store_and_fetch() -> None:
        ours, theirs = await pair.world.directories()
        for directory in (ours, theirs):
            assert isinstance(directory, HivemindDirectory)
            table = directory._dht.protocol.routing_table
            for node in list(table.uid_to_peer_id):
                del table[node]
        expires = time.time() + 500
        record = pair.ours.seal(KEYS[0], b"after", expires)
        assert await ours.store(KEYS[0], pair.ours.peer, record, expires)
        assert (await theirs.fetch(KEYS[0]))[pair.ours.peer] == record

    pair.do(store_and_fetch())


# What a node of the DHT agrees to keep


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load_or_create(tmp_path_factory.mktemp("signer") / "identity.key")


def dht_record(key: str, peer: str, value: object, expires: float) -> DHTRecord:
    pack = DHTProtocol.serializer.dumps
    return DHTRecord(DHTID.generate(source=key).to_bytes(), pack(peer), pack(value), expires)


def test_a_record_signed_by_its_peer_is_kept(signer: Identity) -> None:
    expires = time.time() + 60
    record = dht_record(KEYS[0], signer.peer, signer.seal(KEYS[0], b"profile", expires), expires)
    assert SignedRecords(KEYS, time.time).validate(record)


@pytest.mark.parametrize(
    "forgery",
    [
        "another peer's",
        "of a key that is not ours",
        "for another key",
        "expires later",
        "unsigned",
        "no bytes",
        "old",
        "too large",
        "of a long name",
    ],
)
def test_any_other_record_is_not_kept(signer: Identity, forgery: str) -> None:
    key, expires = KEYS[0], time.time() + 60
    sealed = signer.seal(key, b"profile", expires)
    old, large = time.time() - 1, bytes(MAX_PEER_RECORD_BYTES)
    record = {
        "another peer's": dht_record(key, "QmSomebodyElse", sealed, expires),
        "of a key that is not ours": dht_record("other", signer.peer, signer.seal("other", b"x", expires), expires),
        "for another key": dht_record(KEYS[1], signer.peer, sealed, expires),
        "expires later": dht_record(key, signer.peer, sealed, expires + 1000),
        "unsigned": dht_record(key, signer.peer, b"profile", expires),
        "no bytes": dht_record(key, signer.peer, {"profile": 1}, expires),
        "old": dht_record(key, signer.peer, signer.seal(key, b"profile", old), old),
        "too large": dht_record(key, signer.peer, signer.seal(key, large, expires), expires),
        "of a long name": dht_record(key, signer.peer * 10, sealed, expires),
    }[forgery]
    assert not SignedRecords(KEYS, time.time).validate(record)


def test_a_record_that_does_not_unpack_is_not_kept() -> None:
    record = DHTRecord(DHTID.generate(source=KEYS[0]).to_bytes(), b"\xc1", b"\xc1", time.time() + 60)
    assert not SignedRecords(KEYS, time.time).validate(record)

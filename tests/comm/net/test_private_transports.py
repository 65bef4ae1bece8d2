"""A peer of a private swarm answers members and asks members, over loopback, in virtual time and over libp2p alike."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from decentral.comm.net.fair_shares import UNPROVEN_STREAMS
from decentral.comm.wire import blobs, codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.invitations import FounderKeys
from decentral.comm.wire.messages import Hello, MembershipProof, Ping, Pong, Refused, Welcome
from decentral.comm.wire.private_swarm import MAX_UNPROVEN_BYTES, PrivateSwarm
from decentral.comm.wire.transport import AskError
from decentral.core.ids import PeerId
from decentral.core.units import MiB
from tests.comm.net.loopback import Loopback
from tests.comm.net.test_transport_suite import EVERY_WORLD, LONG_S, WORLDS, Pair, pong
from tests.comm.wire.invited import NOW, founder, member

CONFIG = "the config of a private swarm"


class PrivatePair(Pair):
    """`b` is a member; `a` is what a test makes of it. What `b` was asked by a handler is in `asked`."""

    def reset(self, a: PrivateSwarm | None, b: PrivateSwarm | None = None) -> None:
        self.asked: list[Envelope] = []
        self.answers = self.welcome
        self.theirs_private = b or member(self.world.b.peer)
        self.do(self.world.b.enclose(self.theirs_private))  # type: ignore[attr-defined]
        self.do(self.world.a.enclose(a))  # type: ignore[attr-defined]

    async def welcome(self, sender: PeerId, question: Envelope) -> Envelope:
        self.asked.append(question)
        return Envelope(Welcome(founder().run, CONFIG))

    def a_member(self, **invitation: object) -> PrivateSwarm:
        return member(self.world.a.peer, **invitation)  # type: ignore[arg-type]

    def hello(self) -> object:
        return self.ask(Envelope(Hello())).envelope.message


@pytest.fixture(scope="module", params=EVERY_WORLD)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivatePair]:
    pair = PrivatePair(WORLDS[request.param](), tmp_path_factory.mktemp(request.param))
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: PrivatePair) -> PrivatePair:
    return shared


def test_members_prove_themselves_once_and_are_answered(pair: PrivatePair) -> None:
    pair.reset(pair.a_member())
    assert [pair.hello(), pair.hello()] == 2 * [Welcome(founder().run, CONFIG)]
    assert [type(question.message) for question in pair.asked] == [Hello, Hello]


def test_an_uninvited_peer_is_refused_and_no_handler_hears_of_it(pair: PrivatePair) -> None:
    pair.reset(None)
    before = pair.world.b.refused.get("uninvited", 0)
    refused = pair.hello()
    assert isinstance(refused, Refused)
    assert refused.reason == "uninvited"
    assert pair.world.b.refused["uninvited"] == before + 1
    assert not pair.asked


@pytest.mark.parametrize("whose", ["expired", "revoked", "another run's", "another peer's", "a forged founder's"])
def test_any_other_invitation_is_refused_and_no_handler_hears_of_it(pair: PrivatePair, whose: str) -> None:
    makers: dict[str, Callable[[], PrivateSwarm]] = {
        "expired": lambda: pair.a_member(until=NOW),
        "revoked": pair.a_member,
        "another run's": lambda: pair.a_member(by=founder("other")),
        "another peer's": pair.a_member,
        "a forged founder's": lambda: pair.a_member(by=forger()),
    }
    ours = makers[whose]()
    if whose == "another peer's":
        ours.proof = member("QmVictim").proof
    pair.reset(ours)
    if whose == "revoked":
        pair.theirs_private.learn(founder().revoke(1, frozenset({ours.holding.invitation.id})).packed)
    expected = whose if whose in ("expired", "revoked") else "uninvited"
    assert pair.failure(Envelope(Hello())) == expected
    assert not pair.asked
    assert ours.revoked_us == (whose == "revoked")


def test_an_impostor_gets_no_question(pair: PrivatePair) -> None:
    """Whoever listens where a member should, and cannot prove to be one, hears nothing but a proof that is bound to
    its asker."""
    pair.reset(pair.a_member(), b=member(pair.world.b.peer, by=founder("other")))
    assert pair.failure(Envelope(Ping(1))) == "uninvited"
    assert not pair.asked


def test_a_peer_that_has_forgotten_us_is_shown_our_proof_again(pair: PrivatePair) -> None:
    pair.reset(pair.a_member())
    pair.hello()
    pair.theirs_private.members.clear()  # as after its restart
    assert pair.hello() == Welcome(founder().run, CONFIG)
    assert len(pair.asked) == 2


def test_a_revoked_peer_s_streams_end_with_what_they_wait_for(pair: PrivatePair) -> None:
    ours = pair.a_member()
    pair.reset(ours)
    pair.hello()
    waiting = asyncio.Event()

    async def never(sender: PeerId, question: Envelope) -> Envelope:
        waiting.set()
        await asyncio.Event().wait()
        return Envelope(Pong(1))

    async def story() -> str:
        asking = asyncio.create_task(pair.world.a.ask(pair.world.b.peer, Envelope(Ping(1)), LONG_S, 0))
        await waiting.wait()
        pair.theirs_private.learn(founder().revoke(1, frozenset({ours.holding.invitation.id})).packed)
        await pair.world.b.drop(pair.world.a.peer)
        with pytest.raises(AskError) as caught:
            await asking
        return caught.value.reason

    pair.answers = never
    assert pair.do(story()) in ("cut", "unreachable", "revoked")  # it may have asked again
    pair.answers = pong


# All that an uninvited peer gets, byte by byte


async def everything(reader: blobs.Reader) -> bytes:
    read = bytearray()
    try:
        while True:
            read += await reader.readexactly(1)
    except (EOFError, ConnectionError, OSError):
        return bytes(read)


@pytest.mark.parametrize("asked", ["hello", "garbage", "a long header", "a proof of another run"])
def test_on_the_wire_an_uninvited_peer_gets_one_refusal_and_nothing_else(pair: PrivatePair, asked: str) -> None:
    pair.reset(None)
    stranger = member(pair.world.a.peer, by=founder("other"))
    sent = {
        "hello": framed(codec.encode(Hello())),
        "garbage": framed(b"\xc1" * 16),
        "a long header": (MAX_UNPROVEN_BYTES + 1).to_bytes(4, "big"),
        "a proof of another run": framed(codec.encode(MembershipProof(stranger.proof))),
    }[asked]

    async def use(reader: blobs.Reader, writer: blobs.Writer) -> bytes:
        writer.write(sent)
        await writer.drain()
        return await asyncio.wait_for(everything(reader), LONG_S)

    got = pair.do(pair.world.raw(use))
    length = int.from_bytes(got[:4], "big")
    message, blob_bytes = codec.decode(got[4:])
    assert (len(got), blob_bytes) == (4 + length, 0)
    assert isinstance(message, Refused)
    assert message.reason == ("garbage" if asked == "garbage" else "uninvited")
    assert CONFIG.encode() not in got
    assert founder().run.encode() not in got
    assert not pair.asked


# Shares


def test_a_crowd_of_uninvited_peers_takes_no_share_of_the_members() -> None:
    async def story() -> None:
        network = Loopback()
        transport = network.transport(PeerId("QmB"))
        await transport.enclose(member("QmB"))
        await transport.serve(pong, lambda _: MiB)
        server = transport._server
        assert server is not None
        silent = [server.shares.begin(PeerId(f"QmStranger{number}")) for number in range(UNPROVEN_STREAMS)]
        with pytest.raises(Exception, match="busy"):
            server.shares.begin(PeerId("QmOneMore"))
        assert (server.shares.streams.used, server.shares.strangers.used) == (0, 0)
        a = network.transport(PeerId("QmA"))
        await a.enclose(member("QmA"))
        silent.pop().end()  # a place on which a proof may come
        answer = await a.ask(PeerId("QmB"), Envelope(Ping(7)), LONG_S, 0)
        assert answer.envelope.message == Pong(7)

    asyncio.run(story())


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(blobs.LENGTH_BYTES, "big") + header


def forger() -> FounderKeys:
    """It names the run of the founder, and signs with another key."""
    return replace(founder("forger"), run=founder().run)

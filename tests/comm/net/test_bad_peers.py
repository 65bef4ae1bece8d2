"""Bad input over real libp2p, to a whole Node: it is counted, and the peer goes on answering."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from decentral.comm.net.libp2p import PROTOCOL, Libp2p
from decentral.comm.wire import codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import MAX_PROBE_BYTES, VERSION, Ping, Pong, Probe
from decentral.comm.wire.transport import Asked, Reply
from decentral.core.config import Config
from decentral.core.fragments import Fragment
from decentral.core.ids import PeerId, RunId
from decentral.peers.membership.records import Profile
from decentral.peers.node.node import Node
from decentral.peers.node.setup import NodeSetup
from tests.patient_time import PatientLoop

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
PING = codec.encode(Ping(1))


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(4, "big") + header


BAD = {
    "garbage": (framed(b"\xc1" * 40), "garbage"),
    "an impossible length": (b"\xff" * 100, "oversize"),
    "a cut stream": (framed(PING)[:-3], "cut"),
    "another version": (framed(PING[:1] + bytes([VERSION + 1]) + PING[2:]), "version"),
    "a blob over its bound": (framed(codec.encode(Probe(0), MAX_PROBE_BYTES + 1)), "oversize"),
}


@pytest.mark.swarm
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_counted_and_a_good_question_is_still_answered(kind: str, tmp_path: Path) -> None:
    sent, reason = BAD[kind]

    async def story() -> None:
        own, _ = (Identity.load_or_create(tmp_path / name) for name in "ab")
        a, b = await asyncio.gather(*(Libp2p.start(tmp_path / name, LISTEN, ()) for name in "ab"))
        try:
            node = Node(
                NodeSetup(Config(), RunId("run"), own, [Fragment(0, 0, 1, 9)], [()], 1, Profile("cpu", 1, 1.0, 1.0), ())
            )
            await a.serve(handler_of(node), node.answers.blob_bound)
            await b.connect((await a.addresses())[0])
            _, _, writer = await b._p2p.call_binary_stream_handler(PeerID.from_base58(a.peer), PROTOCOL)
            with closing(writer):
                writer.write(sent)
                await writer.drain()
            while not a.refused.get(reason):
                await asyncio.sleep(0.01)
            answer = await b.ask(a.peer, Envelope(Ping(7)), 20.0, 0)
            assert answer.envelope.message == Pong(7)
        finally:
            await asyncio.gather(a.close(), b.close())

    PatientLoop().play(story())


def handler_of(node: Node) -> Callable[[PeerId, Envelope], Awaitable[Envelope]]:
    async def handle(sender: PeerId, question: Envelope) -> Envelope:
        (reply,) = node.handle(Asked(1, sender, question), 1.7e9)
        assert isinstance(reply, Reply)
        return reply.envelope

    return handle

"""Streams are kept: the next question to the same peer goes on the stream of the last one, while it lasts."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from decentral.comm.net.streams import KEPT_PER_PEER, KEPT_STREAMS, Asker, NoAnswer, Server, Stream
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Ping, Pong, Probe, Refused
from decentral.comm.wire.transport import AskError
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from tests.comm.net.loopback import PipeWriter, pipe
from tests.patient_time import LIMIT_S

A, B = PeerId("A"), PeerId("B")


class ClosingWriter(PipeWriter):
    """As a socket's: it says whether it was closed."""

    def is_closing(self) -> bool:
        return self._closed


@dataclass
class Peers:
    """An asker, and a server at the other end of each stream that it opens."""

    server: Server
    opened: list[Stream] = field(default_factory=list)
    answering: list["asyncio.Task[None]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asker = Asker(self)

    async def open_stream(self, to: PeerId) -> Stream:
        (reader, writer), (their_reader, their_writer) = pipe()
        stream = Stream(reader, ClosingWriter(writer._reader))
        self.opened.append(stream)
        self.answering.append(asyncio.create_task(self.answer(their_reader, their_writer)))
        return stream

    async def answer(self, reader: asyncio.StreamReader, writer: PipeWriter) -> None:
        await self.server.answer_on(A, reader, writer)
        writer.close()

    async def ask(self, nonce: int = 0, to: PeerId = B) -> object:
        return (await self.asker.ask(to, Envelope(Ping(nonce)), LIMIT_S, 0)).envelope.message


async def pong(sender: PeerId, question: Envelope) -> Envelope:
    assert isinstance(question.message, Ping)
    return Envelope(Pong(question.message.nonce))


def play(story: Callable[[Peers], Awaitable[None]]) -> Peers:
    async def whole() -> Peers:
        peers = Peers(Server(pong, lambda _: 0))
        await story(peers)
        peers.asker.close()
        await asyncio.gather(*peers.answering)
        return peers

    return asyncio.run(whole())


def test_questions_one_after_another_share_a_stream() -> None:
    async def story(peers: Peers) -> None:
        assert [await peers.ask(number) for number in range(3)] == [Pong(0), Pong(1), Pong(2)]

    peers = play(story)
    assert len(peers.opened) == 1
    assert (peers.server.shares.streams.used, peers.server.idle.used, sum(peers.server.refused.values())) == (0, 0, 0)


def test_questions_at_once_have_streams_of_their_own_and_few_are_kept() -> None:
    async def story(peers: Peers) -> None:
        answers = await asyncio.gather(*(peers.ask(number) for number in range(5)))
        assert list(answers) == [Pong(number) for number in range(5)]
        assert len(peers.asker.kept[B]) == KEPT_PER_PEER

    assert len(play(story).opened) == 5


def test_streams_to_many_peers_are_kept_up_to_a_limit() -> None:
    async def story(peers: Peers) -> None:
        for number in range(KEPT_STREAMS + 3):
            await peers.ask(to=PeerId(f"peer {number}"))
        assert len(peers.asker.kept) == KEPT_STREAMS
        assert "peer 2" not in peers.asker.kept
        assert "peer 3" in peers.asker.kept

    play(story)


def test_a_stream_that_has_ended_is_not_asked_on() -> None:
    async def story(peers: Peers) -> None:
        await peers.ask()
        peers.opened[0].reader.feed_eof()
        assert await peers.ask(7) == Pong(7)

    assert len(play(story).opened) == 2


def test_a_kept_stream_that_ends_before_the_answer_is_replaced_by_a_new_one() -> None:
    async def story(peers: Peers) -> None:
        await peers.ask()
        peers.answering[0].cancel()  # the question that comes now finds nobody there
        asking = asyncio.create_task(peers.ask(7))
        await asyncio.sleep(0)
        peers.opened[0].reader.feed_eof()
        assert await asking == Pong(7)
        peers.answering.pop(0)

    assert len(play(story).opened) == 2


def test_a_new_stream_that_ends_before_the_answer_is_a_cut() -> None:
    async def story(peers: Peers) -> None:
        async def broken(sender: PeerId, question: Envelope) -> Envelope:
            raise ConnectionError("something of our own")

        peers.server.handler = broken
        with pytest.raises(NoAnswer):
            await peers.ask()

    assert len(play(story).opened) == 1


def test_no_stream_is_kept_on_which_something_was_refused() -> None:
    async def story(peers: Peers) -> None:
        async def refuse(sender: PeerId, question: Envelope) -> Envelope:
            raise ProtocolError("replay", "seen before")

        peers.server.handler = refuse
        assert isinstance(await peers.ask(), Refused)
        assert peers.asker.kept == {}

    assert play(story).server.refused == {"replay": 1}


def test_bad_input_on_a_kept_stream_is_refused_as_on_a_new_one() -> None:
    async def story(peers: Peers) -> None:
        await peers.ask()
        answer = await peers.asker.ask(B, Envelope(Probe(0), b"one byte too many"), LIMIT_S, 0)
        assert answer.envelope.message == Refused(
            "oversize", "oversize: the blob of this Probe must have at most 0 bytes; got 17"
        )

    assert len(play(story).opened) == 1


def test_a_deadline_that_passes_closes_the_stream() -> None:
    async def story(peers: Peers) -> None:
        async def never(sender: PeerId, question: Envelope) -> Envelope:
            await asyncio.Event().wait()
            raise AssertionError

        peers.server.handler = never
        with pytest.raises(AskError, match=r"^deadline: no answer within 0\.0 s$"):
            await peers.asker.ask(B, Envelope(Ping(0)), 0.0, 0)
        assert peers.asker.kept == {}
        assert peers.opened[0].ended
        await asyncio.sleep(0)
        peers.answering.pop().cancel()

    play(story)

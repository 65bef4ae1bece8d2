"""One sender never takes all that a peer has for questions, and strangers together have a small part of it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from decentral.comm.net.fair_shares import (
    IDLE_STREAMS,
    MAX_STREAMS,
    STRANGER_STREAMS,
    UNDER_WAY_BYTES,
    FairShare,
    QuestionShares,
)
from decentral.comm.net.streams import STREAM_ANSWER_S, Server, ask_on
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_PROBE_BYTES, Message, Ping, Pong, Probe, Refused
from decentral.comm.wire.transport import Answer, Ask, Tag
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.sim.network.agenda import Agenda
from decentral.sim.network.virtual_network import Network, Outcome
from tests.comm.net.invited import INVITED
from tests.comm.net.loopback import pipe
from tests.comm.net.virtual_transport import plugged
from tests.sim.network.test_virtual_network import Bad, Wires

GREEDY, HONEST = PeerId("greedy"), PeerId("honest")
MANY = MAX_STREAMS + 20


def test_one_sender_alone_gets_half_and_leaves_as_much() -> None:
    share = FairShare(100)
    assert sum(share.take(GREEDY) for _ in range(200)) == 50
    assert sum(share.take(HONEST) for _ in range(200)) == 25


def test_greedy_senders_get_equal_parts_and_as_much_is_left_for_one_that_asks_little() -> None:
    share = FairShare(128)
    for _ in range(128):
        for number in range(7):
            share.take(PeerId(f"greedy {number}"))
    assert set(share.by_sender.values()) == {16}
    assert share.take(HONEST)


def test_what_was_given_back_leaves_no_entry() -> None:
    share = FairShare(4)
    share.take(GREEDY, 2)
    share.give_back(GREEDY, 2)
    assert (share.used, share.by_sender) == (0, {})


def test_the_first_blob_of_a_sender_may_be_larger_than_what_is_free_and_a_second_one_waits() -> None:
    share = FairShare(100)
    assert share.take(GREEDY, 60)
    assert share.take(HONEST, 60)
    assert not share.take(HONEST, 1)
    assert not share.take(PeerId("third"), 1)


def test_strangers_share_a_small_part_and_leave_the_rest_to_those_with_a_record() -> None:
    shares = QuestionShares(knows=lambda peer: peer == HONEST)
    taken = 0
    for number in range(10_000):
        with suppress(ProtocolError):
            shares.begin(PeerId(f"name {number}"))
            taken += 1
    assert taken == STRANGER_STREAMS
    assert shares.begin(HONEST).pool.used == 1


def test_no_byte_of_a_stranger_s_blob_is_read_or_reserved() -> None:
    """Nine strangers with 200 bytes each had all of the memory for blobs under way."""
    shares = QuestionShares(knows=lambda peer: peer == HONEST)
    for number in range(9):
        with pytest.raises(ProtocolError) as caught:
            shares.begin(PeerId(f"name {number}")).reserve(120 << 20)
        assert caught.value.reason == "stranger"
    assert shares.under_way.used == 0
    shares.begin(PeerId("name")).reserve(0)
    shares.begin(HONEST).reserve(120 << 20)


class Crowd:
    """A server whose answers wait until a test lets them go, and askers on streams of their own."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.server = Server(self.wait, lambda message: MAX_PROBE_BYTES)
        self.tasks: list[asyncio.Task[object]] = []

    async def wait(self, sender: PeerId, question: Envelope) -> Envelope:
        await self.release.wait()
        return Envelope(Pong(1))

    async def ask(self, sender: PeerId, question: Envelope) -> Message:
        ours, theirs = pipe()
        answering = asyncio.create_task(self.server.answer_on(sender, *theirs))
        try:
            return (await ask_on(*ours, question, 0)).envelope.message
        finally:
            ours[1].close()
            answering.cancel()

    def begin(self, sender: PeerId, question: Envelope) -> "asyncio.Task[Message]":
        task = asyncio.create_task(self.ask(sender, question))
        self.tasks.append(task)
        return task


def play(story: Callable[[Crowd], Awaitable[None]]) -> Crowd:
    async def whole() -> Crowd:
        crowd = Crowd()
        await story(crowd)
        crowd.release.set()
        await asyncio.gather(*crowd.tasks)
        return crowd

    return asyncio.run(whole())


async def settle(crowd: Crowd, ended: int) -> None:
    while sum(task.done() for task in crowd.tasks) < ended:
        await asyncio.sleep(0)


def test_one_sender_cannot_take_all_streams() -> None:
    async def story(crowd: Crowd) -> None:
        for _ in range(MANY):
            crowd.begin(GREEDY, Envelope(Ping(1)))
        await settle(crowd, MANY - MAX_STREAMS // 2)
        asked = crowd.begin(HONEST, Envelope(Ping(2)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked.done()  # it was not refused
        crowd.release.set()
        assert await asked == Pong(1)

    crowd = play(story)
    assert crowd.server.shares.streams.used == crowd.server.refusing.used == 0


def test_one_sender_cannot_fill_the_memory_with_blobs_under_way() -> None:
    async def story(crowd: Crowd) -> None:
        crowd.server.shares.under_way.most = 4 * 1000
        for _ in range(20):
            crowd.begin(GREEDY, Envelope(Probe(0), bytes(1000)))
        await settle(crowd, 18)
        assert crowd.server.shares.under_way.used == 2000
        asked = crowd.begin(HONEST, Envelope(Probe(0), bytes(1000)))
        crowd.release.set()
        assert await asked == Pong(1)

    assert play(story).server.shares.under_way.by_sender == {}


def test_the_virtual_network_shares_in_the_same_way() -> None:
    agenda = Agenda()
    network = Network(agenda, Wires(), Bad())
    answering, came = plugged(network, PeerId("B")), list[Outcome]()
    answering.serve = lambda sender, envelope, respond: None  # it never answers
    for sender in (GREEDY, HONEST):
        port = plugged(network, sender)
        for _ in range(MANY if sender == GREEDY else 1):
            network.ask(port, Ask(Tag(), PeerId("B"), Envelope(Ping(1)), 1000.0), came.append)
        agenda.run(agenda.now + 5.0)
    busy = [one for one in came if isinstance(one, Answer) and isinstance(one.envelope.message, Refused)]
    assert len(busy) == len(came) == MANY - MAX_STREAMS // 2
    assert set(answering.shares.streams.by_sender) == {GREEDY, HONEST}
    agenda.run(agenda.now + STREAM_ANSWER_S)
    assert answering.shares.streams.by_sender == {}


@pytest.mark.parametrize("most", [IDLE_STREAMS, UNDER_WAY_BYTES, STRANGER_STREAMS])
def test_a_share_has_a_limit_whatever_is_taken(most: int) -> None:
    share = FairShare(most)
    for number in range(3000):
        share.take(PeerId(str(number % 700)), 1 + most // 500)
    assert share.used <= most + 1 + most // 500


def test_a_thousand_names_of_one_invitation_share_what_one_of_them_may_have() -> None:
    shares = QuestionShares(private=INVITED)
    begun = 0
    for number in range(MANY):
        with suppress(ProtocolError):
            begun += bool(shares.begin(PeerId(f"ann {number}")))
    assert begun == MAX_STREAMS // 2
    question = shares.begin(HONEST)
    question.end()
    assert shares.streams.by_sender == {"ann": begun}


def test_what_anybody_may_ask_for_nothing_keeps_its_share_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """So strangers' pings have a rate: so many shares, each kept for so long, on old streams and on new ones."""
    monkeypatch.setattr("decentral.comm.net.streams.STRANGER_PAUSE_S", STREAM_ANSWER_S)

    async def pong(sender: PeerId, question: Envelope) -> Envelope:
        return Envelope(Pong(1))

    async def story() -> int:
        server = Server(pong, lambda message: 0, shares=QuestionShares(knows=lambda peer: peer == HONEST))
        tasks = []
        for sender in (*[PeerId(f"stranger {number}") for number in range(2 * STRANGER_STREAMS)], HONEST):
            theirs, ours = pipe()
            tasks.append(asyncio.ensure_future(server.answer_on(sender, *ours)))
            answer = await ask_on(*theirs, Envelope(Ping(1)), 0)
        assert answer.envelope.message == Pong(1)
        await asyncio.sleep(0)  # the server hears that its answer has left
        kept, known = server.shares.strangers.used, server.shares.streams.used
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert known == 0
        return kept

    assert asyncio.run(story()) == STRANGER_STREAMS

"""What leaves next, and at which pace: in the event loop's own time, which stands still while nothing waits."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from decentral.comm.net.uplink import PacedWriter, Uplink
from decentral.comm.net.uplink_queue import (
    BURST_S,
    PROBE_HOLD_S,
    PROBED_EVERY_S,
    TURN_BYTES,
    UNPACED_BYTES,
    Kind,
    Turn,
    traffic_kind,
)
from decentral.comm.wire import messages
from decentral.comm.wire.codec import Envelope
from decentral.core.ids import PeerId
from tests.patient_time import TimelessLoop

PEER = PeerId("A")
RATE = float(TURN_BYTES)  # a piece a second


class Wire:
    """What has left, and when."""

    def __init__(self) -> None:
        self.left: list[tuple[float, int]] = []

    def write(self, data: bytes) -> None:
        self.left.append((asyncio.get_running_loop().time(), len(data)))

    async def drain(self) -> None:
        pass


def play(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        runner.run(story)


def paced() -> Uplink:
    uplink = Uplink()
    uplink.queue.rate = lambda: RATE
    return uplink


async def send(uplink: Uplink, wire: Wire, kind: Kind, pieces: int) -> None:
    writer = PacedWriter(uplink, wire, PEER, kind, Turn(0.0, 0))
    writer.write(bytes(pieces * TURN_BYTES))
    await writer.drain()


def test_bytes_leave_at_the_uplink_s_rate() -> None:
    async def story() -> None:
        wire = Wire()
        await send(paced(), wire, Kind.SNAPSHOTS, 5)
        assert [when for when, _ in wire.left] == pytest.approx([0, 1, 2, 3, 4], abs=BURST_S)

    play(story())


def test_bytes_count_as_sent_to_a_peer_once_they_have_left() -> None:
    async def story() -> None:
        uplink = paced()
        sending = asyncio.create_task(send(uplink, Wire(), Kind.SNAPSHOTS, 5))
        await asyncio.sleep(2.5)
        assert uplink.take_sent() == {PEER: 3 * TURN_BYTES}
        assert uplink.take_sent() == {}
        await sending
        assert uplink.take_sent() == {PEER: 2 * TURN_BYTES}

    play(story())


def test_several_messages_share_the_rate() -> None:
    async def story() -> None:
        uplink, wires = paced(), [Wire(), Wire()]
        await asyncio.gather(*(send(uplink, wire, Kind.SNAPSHOTS, 3) for wire in wires))
        assert sorted(when for wire in wires for when, _ in wire.left) == pytest.approx([*range(6)], abs=BURST_S)
        assert abs(wires[0].left[-1][0] - wires[1].left[-1][0]) < 2.1

    play(story())


def test_a_small_message_does_not_wait_for_a_large_one_but_no_message_waits_for_ever() -> None:
    async def story() -> None:
        uplink, large, small, later = paced(), Wire(), [Wire(), Wire()], Wire()
        sending = [asyncio.create_task(answer(uplink, large, 12))]
        await asyncio.sleep(2.5)
        sending += [asyncio.create_task(answer(uplink, wire, 2)) for wire in small]
        await asyncio.sleep(8)
        sending.append(asyncio.create_task(answer(uplink, later, 2)))  # due after the large one
        await asyncio.gather(*sending)
        assert [wire.left[-1][0] for wire in small] == pytest.approx([4, 6], abs=0.1)
        assert large.left[-1][0] == pytest.approx(15, abs=0.1)
        assert later.left[-1][0] == pytest.approx(17, abs=0.1)

    play(story())


async def answer(uplink: Uplink, wire: Wire, pieces: int) -> None:
    """As a server answers: `paced` says when the message is due."""
    envelope = Envelope(messages.Refused("", ""), bytes(pieces * TURN_BYTES))
    writer = uplink.paced(wire, envelope, PEER)
    writer.write(envelope.blob)
    await writer.drain()


def test_where_no_rate_is_known_a_message_leaves_whole_and_at_once() -> None:
    async def story() -> None:
        uplink, wire = Uplink(), Wire()
        await send(uplink, wire, Kind.DOWNLOAD, 50)
        assert wire.left == [(0.0, 50 * TURN_BYTES)]
        assert uplink.take_sent() == {PEER: 50 * TURN_BYTES}

    play(story())


def test_each_kind_has_its_share_while_all_have_bytes_to_send() -> None:
    async def story() -> None:
        uplink, wires = paced(), {kind: Wire() for kind in Kind}
        sending = [asyncio.create_task(send(uplink, wires[kind], kind, 500)) for kind in Kind]
        await asyncio.sleep(210)
        seen = Counter({kind: len(wire.left) for kind, wire in wires.items()})
        for kind in Kind:
            assert seen[kind] == pytest.approx(210 * kind / sum(Kind), abs=3)
        for one in sending:
            one.cancel()

    play(story())


def test_a_kind_that_was_idle_has_saved_nothing_up() -> None:
    async def story() -> None:
        uplink, download, snapshots = paced(), Wire(), Wire()
        sending = asyncio.create_task(send(uplink, download, Kind.DOWNLOAD, 500))
        await asyncio.sleep(100)
        before = len(download.left)
        await send(uplink, snapshots, Kind.SNAPSHOTS, 40)
        assert len(download.left) - before == pytest.approx(10, abs=2)
        sending.cancel()

    play(story())


def test_a_probe_has_the_uplink_for_itself_but_not_for_ever() -> None:
    async def story() -> None:
        uplink, wire = Uplink(), Wire()
        async with uplink.alone():
            sending = asyncio.create_task(send(uplink, wire, Kind.SNAPSHOTS, 1))
            await asyncio.sleep(PROBE_HOLD_S - 0.1)
            assert not wire.left
            await asyncio.sleep(1.0)
            assert wire.left[0][0] == pytest.approx(PROBE_HOLD_S)
        async with uplink.alone():
            sending = asyncio.create_task(send(uplink, wire, Kind.SNAPSHOTS, 1))
            await asyncio.sleep(1.0)
        await sending
        assert wire.left[1][0] == pytest.approx(PROBE_HOLD_S + 1.9)

    play(story())


def test_a_probe_waits_until_what_has_left_is_through() -> None:
    async def story() -> None:
        uplink = paced()
        await send(uplink, Wire(), Kind.SNAPSHOTS, 1)
        async with uplink.alone():
            assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=BURST_S)

    play(story())


def test_a_message_that_was_given_up_takes_no_time_of_the_uplink() -> None:
    async def story() -> None:
        uplink, wire = paced(), Wire()
        await send(uplink, Wire(), Kind.SNAPSHOTS, 1)
        given_up = asyncio.create_task(send(uplink, Wire(), Kind.SNAPSHOTS, 9))
        await asyncio.sleep(0)
        given_up.cancel()
        await send(uplink, wire, Kind.SNAPSHOTS, 1)
        assert wire.left[0][0] == pytest.approx(1.0, abs=BURST_S)

    play(story())


def test_small_messages_and_probes_wait_for_nothing() -> None:
    async def story() -> None:
        uplink, wire = paced(), Wire()
        assert uplink.paced(wire, Envelope(messages.Ping(0)), PEER) is wire
        assert uplink.paced(wire, Envelope(messages.Probe(0), bytes(1 << 20)), PEER) is wire
        assert uplink.paced(wire, Envelope(messages.Refused("busy", ""), bytes(UNPACED_BYTES)), PEER) is not wire

    play(story())


def test_activations_come_before_snapshots_and_these_before_downloads() -> None:
    state = messages.StateChunk.__new__(messages.StateChunk)
    activations = messages.ForwardRequest.__new__(messages.ForwardRequest)
    snapshot = messages.Snapshot.__new__(messages.Snapshot)
    assert traffic_kind(activations) > traffic_kind(snapshot) > traffic_kind(state)


def test_answers_to_probes_have_the_uplink_for_themselves_once_in_a_while_only() -> None:
    """Whoever asked for them, with however many names, got all of it past everything that waits."""
    queue, probed = paced().queue, Envelope(messages.Probed(0), bytes(messages.MAX_PROBE_BYTES))
    unpaced = [now for now in range(100) if not queue.paces(probed, float(now))]
    assert unpaced == list(range(0, 100, int(PROBED_EVERY_S)))
    assert traffic_kind(probed.message) is Kind.DOWNLOAD
    assert not queue.paces(Envelope(messages.Probe(0), bytes(messages.MAX_PROBE_BYTES)), 1.0)

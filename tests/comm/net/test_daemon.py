"""A libp2p daemon that dies comes back, under the same name, at the same place, with the records of the DHT."""

import asyncio
import errno
import gc
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.proto import p2pd_pb2
from hivemind.proto.p2pd_pb2 import (
    CallUnaryRequest,
    CallUnaryResponse,
    Cancel,
    DaemonError,
    PersistentConnectionResponse,
)
from hivemind.utils import MSGPackSerializer

from decentral.comm.net import causes, libp2p, libp2p_directory
from decentral.comm.net.daemon import CALLS_KEPT, OwnControl, OwnDaemon
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory, leave_lookups_unreported
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Ping, Pong
from decentral.comm.wire.transport import AskError
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from tests.patient_time import LIMIT_S, PatientLoop
from tests.processes import piped

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
KEY = "run/peers"
HOUR_S = 3600.0


async def pong(sender: PeerId, envelope: Envelope) -> Envelope:
    assert isinstance(envelope.message, Ping)
    return Envelope(Pong(envelope.message.nonce))


async def answered(asker: Libp2p, to: PeerId) -> bool:
    answer = await asker.ask(to, Envelope(Ping(7)), 20.0, 0)
    return answer.envelope.message == Pong(7)


async def announce(directory: HivemindDirectory, own: Identity, body: bytes) -> None:
    """The first calls after a daemon's death may still go to the dead one; a peer announces its record again anyway."""
    expires = time.time() + HOUR_S
    while not await directory.store(KEY, own.peer, own.seal(KEY, body, expires), expires):
        await asyncio.sleep(0.05)
        expires = time.time() + HOUR_S


@pytest.mark.swarm
def test_after_its_daemon_was_killed_a_peer_asks_and_answers_again(tmp_path: Path) -> None:
    async def story() -> None:
        owns = [Identity.load_or_create(tmp_path / name) for name in "ab"]
        a, b = await asyncio.gather(*(Libp2p.start(tmp_path / name, LISTEN, ()) for name in "ab"))
        try:
            for one in (a, b):
                await one.serve(pong, lambda message: 0)
            places = await a.addresses()
            a.learn(b.peer, await b.addresses())
            b.learn(a.peer, places)
            own, other = await a.directory([KEY], []), await b.directory([KEY], [await b.connect(places[0])])
            assert await answered(a, b.peer)
            a._p2p._child.kill()
            assert await a.ended() == "the libp2p daemon has ended (signal 9)"
            with pytest.raises(AskError):
                await answered(a, b.peer)
            await a.revive()
            assert await a.addresses() == places
            assert await answered(a, b.peer)
            b._connected.clear()
            assert await answered(b, a.peer)
            await announce(own, owns[0], b"here again")
            await announce(other, owns[1], b"there")
            while not set(await own.fetch(KEY)) == set(await other.fetch(KEY)) == {a.peer, b.peer}:
                await asyncio.sleep(0.05)
        finally:
            await asyncio.gather(a.close(), b.close())

    PatientLoop().play(story())


@asynccontextmanager
async def started(key: Path) -> AsyncIterator[tuple[Libp2p, list[str]]]:
    """A transport, and what asyncio would have printed of tasks that failed."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
    transport = await Libp2p.start(key, LISTEN, ())
    try:
        yield transport, said
    finally:
        await transport.close()


@pytest.mark.swarm
def test_a_daemon_that_dies_with_calls_unread_is_no_traceback(tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path / "a") as (a, said):
            a._p2p._child.send_signal(signal.SIGSTOP)
            os.waitpid(a._p2p._child.pid, os.WUNTRACED)  # returns when it has stopped, so that it cannot read the call
            calls = a._p2p._client.control
            unread = asyncio.create_task(a._p2p._client.call_unary_handler(a._p2p.peer_id, "any", b""))
            await asyncio.sleep(0)
            while not calls._pending_messages.empty():
                await asyncio.sleep(0)
            a._p2p._child.kill()
            assert await a.ended() == "the libp2p daemon has ended (signal 9)"
            assert isinstance(calls._read_task.exception(), ConnectionResetError)
            unread.cancel()
            while not calls._write_task.done():  # the call is taken back, over a connection that is lost
                await asyncio.sleep(0)
            await a.revive()
            assert await a.addresses()
            del calls, unread
            gc.collect()
            assert said == []

    PatientLoop().play(story())


class Unsettable(asyncio.Future[bytes]):
    """A call whose answer ends the task that reads the daemon's answers, as any fault of hivemind does."""

    def set_exception(self, exception: type | BaseException) -> None:
        raise asyncio.InvalidStateError("invalid state")


@pytest.mark.swarm
def test_a_daemon_whose_answers_nobody_reads_any_more_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p, "DAEMON_END_S", 0.0)  # it does not end by itself

    async def story() -> None:
        async with started(tmp_path / "a") as (a, said):
            control, call = a._p2p._client.control, uuid4()
            control._pending_calls[call] = Unsettable()
            unary = p2pd_pb2.CallUnaryRequest(peer=a._p2p.peer_id.to_bytes(), proto="any", data=b"")
            await control._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call.bytes, callUnary=unary)
            )
            how = "hivemind stopped reading: InvalidStateError('invalid state')"
            assert await a.ended() == f"the libp2p daemon has ended ({how})"
            await a.revive()
            assert await a.addresses()
            assert said == []

    PatientLoop().play(story())


# The daemon's life is the process's


@pytest.mark.swarm
def test_a_signal_to_our_process_group_does_not_reach_the_daemon(tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path / "a") as (a, _):
            assert os.getsid(a._p2p._child.pid) == a._p2p._child.pid

    PatientLoop().play(story())


@pytest.mark.swarm
def test_a_start_that_is_given_up_leaves_neither_a_daemon_nor_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[OwnDaemon] = []

    async def give_up(own: OwnDaemon) -> None:
        begun.append(own)
        raise asyncio.CancelledError  # as Ctrl-C does

    monkeypatch.setattr(OwnDaemon, "_until_ready", give_up)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(OwnDaemon.begin(tmp_path / "a", LISTEN, ()))
    (own,) = begun
    assert own._child.returncode is not None
    assert not own._folder.path.exists()


KILLED_WHILE_IT_STARTS = """
import asyncio, sys
from pathlib import Path
from decentral.comm.net.daemon import OwnDaemon

async def wait_for_ever(own):
    print(own._child.pid, flush=True)
    await asyncio.Event().wait()

OwnDaemon._until_ready = wait_for_ever
asyncio.run(OwnDaemon.begin(Path(sys.argv[1]), ["/ip4/127.0.0.1/tcp/0"], []))
"""


@pytest.mark.swarm
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent has ended")
def test_a_daemon_ends_with_a_process_that_is_killed_before_they_have_met(tmp_path: Path) -> None:
    with piped(sys.executable, "-c", KILLED_WHILE_IT_STARTS, str(tmp_path / "key")) as process:
        assert process.stdout is not None
        daemon = os.pidfd_open(int(process.stdout.readline()))
    ended, _, _ = select.select([daemon], [], [], LIMIT_S)
    os.close(daemon)
    assert ended


def test_a_machine_without_a_temporary_folder_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"no temporary folder is writable .* set TMPDIR to another folder"):
        asyncio.run(Libp2p.start(tmp_path / "a", LISTEN, ()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    Path(tempfile.gettempdir()).mkdir()
    with pytest.raises(UserError, match="is too long a path for a socket; set TMPDIR to a shorter path"):
        asyncio.run(Libp2p.start(tmp_path / "a", LISTEN, ()))


def test_a_machine_without_open_files_blames_no_other_peer() -> None:
    error = causes.failure(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert error.reason == Reason.RESOURCES
    assert str(error) == "resources: Too many open files; raise the limit (ulimit -n)"
    assert causes.failure(ConnectionRefusedError()).reason == Reason.UNREACHABLE


@pytest.mark.swarm
def test_a_newcomer_sees_how_far_another_peers_clock_is_ahead_of_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        right = time.time()
        late = right - HOUR_S
        b = await Libp2p.start(tmp_path / "b", LISTEN, (), lambda: late)
        a = await Libp2p.start(tmp_path / "a", LISTEN, (), lambda: right)  # hivemind has one clock for both
        try:
            await a.directory([KEY], [])
            own = await b.directory([KEY], [await b.connect((await a.addresses())[0])])
            (ahead_s,) = await own.clocks_ahead_s([a.peer, PeerId("Qm nobody")])
            assert ahead_s == pytest.approx(HOUR_S, abs=0.01)
        finally:
            await asyncio.gather(a.close(), b.close())

    PatientLoop().play(story())


def test_a_wall_clock_that_jumps_makes_no_record_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, now = Identity.load_or_create(tmp_path / "key"), time.time()
    valid = libp2p_directory.SignedRecords([KEY], lambda: now)
    sealed = own.seal(KEY, b"body", now + 60.0)
    record = DHTRecord(
        DHTID.generate(source=KEY).to_bytes(),
        MSGPackSerializer.dumps(own.peer),
        DHTProtocol.serializer.dumps(sealed),
        now + 60.0,
    )
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    assert valid.validate(record)


def test_calls_that_are_cancelled_before_they_begin_are_forgotten() -> None:
    """A caller that cancelled each call at once made a peer remember each of them until the peer ended."""
    ended = list[bytes]()

    async def handler(data: bytes, _: PeerID) -> bytes:
        ended.append(data)
        return data

    async def story() -> None:
        control = OwnControl(DaemonConnector(), _initialized_with_create=True)
        control.unary_handlers["call"] = handler
        reader = asyncio.StreamReader()
        reading = asyncio.create_task(control._read_from_persistent_conn(reader))
        for number in range(10 * CALLS_KEPT):
            call = CallUnaryRequest(
                proto="call", peer=b"\x12\x20" + bytes(32), data=b"cancelled" if number else b"kept"
            )
            told = [PersistentConnectionResponse(requestHandling=call), PersistentConnectionResponse(cancel=Cancel())]
            for one in told if number else told[:1]:
                one.callId = number.to_bytes(16, "big")
                packed = one.SerializeToString()
                reader.feed_data(varint(len(packed)) + packed)
            await asyncio.sleep(0)
        reader.feed_eof()
        await reading
        assert len(control._handler_tasks) <= 2 * CALLS_KEPT

    asyncio.run(story())
    assert ended == [b"kept"]


@pytest.mark.parametrize(
    "late",
    [
        {"callUnaryResponse": CallUnaryResponse(response=b"late")},
        {"callUnaryResponse": CallUnaryResponse(error=b"late")},
        {"daemonError": DaemonError(message="late")},
    ],
    ids=str,
)
def test_an_answer_to_a_call_that_has_just_been_cancelled_does_not_end_the_connection(late: dict[str, Any]) -> None:
    """The daemon's answer came in the turn of the event loop in which the deadline of the call passed."""

    async def story() -> None:
        control, reader = OwnControl(DaemonConnector(), _initialized_with_create=True), asyncio.StreamReader()
        reading = asyncio.create_task(control._read_from_persistent_conn(reader))
        await asyncio.sleep(0)
        calls = [asyncio.create_task(control.call_unary_handler(PeerID(bytes(34)), "call", b"")) for _ in range(2)]
        await asyncio.sleep(0)
        (cancelled, future), (kept, _) = control._pending_calls.items()
        answers = (cancelled, late), (kept, {"callUnaryResponse": CallUnaryResponse(response=b"in time")})
        for call, answer in answers:
            packed = PersistentConnectionResponse(callId=call.bytes, **answer).SerializeToString()
            reader.feed_data(varint(len(packed)) + packed)
        reader.feed_eof()
        future.cancel()
        await reading
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        assert await calls[1] == b"in time"

    asyncio.run(story())


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def test_asyncio_does_not_report_what_a_cancelled_lookup_leaves_behind_and_reports_all_else() -> None:
    said: list[str] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: said.append(context["message"]))
        leave_lookups_unreported(loop)
        asyncio.create_task(asyncio.Event().wait())  # noqa: RUF006
        await asyncio.sleep(0)
        gc.collect()
        assert said == []
        asyncio.create_task(_waits(asyncio.Event()))  # noqa: RUF006
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(story())
    assert said == ["Task was destroyed but it is pending!"]


async def _waits(event: asyncio.Event) -> None:
    await event.wait()

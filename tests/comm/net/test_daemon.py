"""A libp2p daemon that dies comes back, under the same name, at the same place, with the records of the DHT."""

import asyncio
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.proto import p2pd_pb2
from hivemind.utils import MSGPackSerializer

from decentral.comm.net import libp2p, libp2p_directory
from decentral.comm.net.daemon import OwnDaemon
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.net.libp2p_directory import HivemindDirectory
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.identity import Identity
from decentral.comm.wire.messages import Ping, Pong
from decentral.comm.wire.transport import AskError
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from tests.patient_time import LIMIT_S, PatientLoop

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


@pytest.mark.swarm
def test_a_daemon_whose_answers_nobody_reads_any_more_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p, "DAEMON_END_S", 0.0)  # it does not end by itself

    async def story() -> None:
        async with started(tmp_path / "a") as (a, said):
            control, call = a._p2p._client.control, uuid4()
            control._pending_calls[call] = given_up = asyncio.get_running_loop().create_future()
            given_up.cancel()  # as a call is that ends in the very moment in which its answer is read
            unary = p2pd_pb2.CallUnaryRequest(peer=a._p2p.peer_id.to_bytes(), proto="any", data=b"")
            await control._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call.bytes, callUnary=unary)
            )
            how = "hivemind reads it no more: InvalidStateError('invalid state')"
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
    assert not own._folder.exists()


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
    command = [sys.executable, "-c", KILLED_WHILE_IT_STARTS, str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        daemon = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    ended, _, _ = select.select([daemon], [], [], LIMIT_S)
    os.close(daemon)
    assert ended


def test_a_machine_without_a_temporary_folder_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"no temporary folder can be written .* set TMPDIR to one that can"):
        asyncio.run(Libp2p.start(tmp_path / "a", LISTEN, ()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    Path(tempfile.gettempdir()).mkdir()
    with pytest.raises(UserError, match="is too long a path for a socket; set TMPDIR to a shorter one"):
        asyncio.run(Libp2p.start(tmp_path / "a", LISTEN, ()))


def test_a_machine_without_open_files_blames_no_other_peer() -> None:
    error = libp2p._failure(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert error.reason == Reason.RESOURCES
    assert str(error) == "resources: Too many open files; raise the limit (ulimit -n)"
    assert libp2p._failure(ConnectionRefusedError()).reason == Reason.UNREACHABLE


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

"""Run a libp2p daemon beside this process: `OwnDaemon.begin` starts the daemon, `OwnDaemon.shutdown` stops it.

hivemind's own start of a daemon has three faults. The daemon is in our process group, so Ctrl-C ends the daemon before
we have left the swarm. The daemon goes on running if our process ends during the start. The daemon's sockets are in
/tmp even if TMPDIR is set. So we start the daemon ourselves, and use hivemind only as its client.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from uuid import UUID

import hivemind.hivemind_cli
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.control import (
    DEFAULT_MAX_MSG_SIZE,
    ControlClient,
    DaemonConnector,
    P2PDaemonError,
)
from hivemind.proto.p2pd_pb2 import CallUnaryRequest
from hivemind.utils.logging import loglevel, python_level_to_golog
from hivemind.utils.multiaddr import Multiaddr

from decentral.core import end_with_parent
from decentral.core.errors import UserError
from decentral.core.plain_text import printable
from decentral.core.temporary import TemporaryFolder

LIBP2P_START_S = 60.0  # we wait at most this long for the daemon to start; hivemind's 15 s are too short under load
CALLS_KEPT = 64  # calls that have ended are forgotten only when at least this many calls are remembered
LEAVE_S = 5.0  # after SIGTERM the daemon may close its connections for this long, before it is killed
SOCKET_PATH_BYTES = 100  # a longer path of the daemon's Unix socket is refused; operating systems allow 104 or 108
DAEMON_FLAGS = {  # command-line flags of every daemon; `_spawn` adds the key file and the addresses
    "autoRelay": 1,
    "autonat": 1,
    "b": 0,
    "connManager": 1,
    "dhtServer": 1,
    "idleTimeout": f"{LIBP2P_START_S:g}s",  # a daemon without a client ends by itself after this time
    "natPortMap": 1,
    "persistentConnMaxMsgSize": DEFAULT_MAX_MSG_SIZE,
    "relay": 1,
    "relayHopLimit": 0,
    "tls": 1,
}
ROUTER_FLAGS = ("autoRelay", "autonat", "natPortMap")  # flags that let other peers reach a daemon behind a router


class OwnDaemon(P2P):  # type: ignore[misc]  # hivemind has no types
    """A hivemind P2P with its own libp2p daemon, which ends when this process ends.

    The daemon runs in its own Unix session, so a signal to our process group, such as Ctrl-C, does not reach it.
    """

    @classmethod
    async def begin(
        cls, key: Path, listen: Sequence[str], announce: Sequence[str], only_dials: bool = False
    ) -> "OwnDaemon":
        """Start a daemon, and return its client once it answers.

        Args:
            key: File with the identity; created if it is missing.
            listen: Multiaddrs to listen at.
            announce: Multiaddrs to publish to other peers; if empty, the daemon publishes its `listen` addresses.
            only_dials: If True, no other peer needs to connect to the daemon, and the daemon asks no router for a port.

        Raises:
            P2PDaemonError: If the daemon ends before it answers, or does not answer within LIBP2P_START_S.
            UserError: If no temporary folder can be written for the daemon's sockets, or its path is too long.
        """
        if not key.exists():
            cls.generate_identity(str(key))
        folder = _socket_folder()
        self = cls()
        self._folder = folder
        self._daemon_listen_maddr, self._client_listen_maddr = (
            Multiaddr(f"/unix{folder.path}/{name}") for name in ("daemon", "client")
        )
        try:
            self._child = await self._spawn(key, listen, announce, only_dials)
            self._alive = True
            await self._until_ready()
            self._client = OwnClient(
                await OwnControl.create(
                    DaemonConnector(self._daemon_listen_maddr),
                    self._client_listen_maddr,
                    persistent_conn_max_msg_size=DEFAULT_MAX_MSG_SIZE,
                )
            )
            await self._ping_daemon()
        except BaseException:  # BaseException, because a cancelled start must stop the daemon, too
            await asyncio.shield(self.shutdown())
            raise
        return self

    async def _spawn(self, key: Path, listen: Sequence[str], announce: Sequence[str], only_dials: bool) -> Process:
        places = {"hostAddrs": listen, "announceAddrs": announce}
        common = {name: on for name, on in DAEMON_FLAGS.items() if not (only_dials and name in ROUTER_FLAGS)}
        flags = {**common, "listen": self._daemon_listen_maddr, "id": key}
        flags |= {name: ",".join(addresses) for name, addresses in places.items() if addresses}
        tied = [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())]
        environment = {"GOLOG_LOG_LEVEL": python_level_to_golog(loglevel), **os.environ, "GOLOG_LOG_FMT": "json"}
        with as_file(files(hivemind.hivemind_cli) / "p2pd") as program:
            command = [*tied, str(program), *(f"-{name}={value}" for name, value in flags.items())]
            return await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=environment, start_new_session=True
            )

    async def _until_ready(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader_task = asyncio.create_task(self._read_outputs(ready))
        try:
            async with asyncio.timeout(LIBP2P_START_S):
                await ready
        except TimeoutError:
            raise P2PDaemonError(f"the libp2p daemon did not start in {LIBP2P_START_S:g} s; try again") from None

    async def shutdown(self) -> None:
        """Stop the daemon and delete its sockets. A daemon that still runs LEAVE_S after SIGTERM is killed."""
        self._terminate()
        if self._child is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._child.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._child.kill()
                await self._child.wait()
        self._folder.remove()


class OwnClient(p2pclient.Client):  # type: ignore[misc]
    """hivemind's client of a daemon, over a connection that is open already."""

    def __init__(self, control: "OwnControl") -> None:
        """Use `control`, an open connection to the daemon."""
        self.control = control


class PendingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """Our calls to the daemon by id. `in` is False for a cancelled call, so that hivemind sets no answer on it."""

    def __contains__(self, call_id: object) -> bool:
        """Return whether a call waits for its answer."""
        future = self.get(call_id)  # type: ignore[call-overload]
        return future is not None and not future.done()


class OwnControl(ControlClient):  # type: ignore[misc]
    """hivemind's connection to a daemon, without two of its faults: a memory leak, and a crash.

    hivemind forgets a call to us when its handler ends. A caller can cancel a call before the handler begins, as often
    as it likes, and hivemind would remember each such call for ever. hivemind also sets the answer of a call of ours
    that has just been cancelled, which would raise an error and end the connection.
    """

    _pending_calls: dict[UUID, "asyncio.Future[bytes]"]
    _most_tasks = CALLS_KEPT  # number of remembered calls at which those that have ended are forgotten

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        """Read the daemon's messages until the connection ends."""
        self._pending_calls = PendingCalls(self._pending_calls)
        await super()._read_from_persistent_conn(reader)

    def _handle_persistent_request(self, call_id: UUID, request: CallUnaryRequest) -> Coroutine[object, object, None]:
        """Return the coroutine that answers a new call; first forget calls that have ended, if many are remembered."""
        tasks = self._handler_tasks
        if len(tasks) >= self._most_tasks:
            for ended in [one for one, task in tasks.items() if task.done()]:
                del tasks[ended]
            self._most_tasks = 2 * len(tasks) + CALLS_KEPT
        return super()._handle_persistent_request(call_id, request)  # type: ignore[no-any-return]


def _socket_folder() -> TemporaryFolder:
    """Return a new folder for the daemon's sockets.

    Raises:
        UserError: If the folder cannot be made, or its path is too long.
    """
    folder = TemporaryFolder.make()
    if len(os.fsencode(folder.path / "daemon")) > SOCKET_PATH_BYTES:
        folder.remove()
        raise UserError(f"{folder.path.parent} is too long a path for a socket; set TMPDIR to a shorter path")
    return folder


def without_traceback(task: "asyncio.Task[None]") -> None:
    """Retrieve the error of a finished task, so that asyncio does not print it as never retrieved."""
    if not task.cancelled():
        task.exception()


def require_dialled(announced: Iterable[str]) -> None:
    """Raise UserError unless every address of --announce is a multiaddr with a port other than 0."""
    for address in announced:
        require_address(address, "--announce")
        if address.endswith("/tcp/0"):
            raise UserError(f"--announce expects the port at which others reach this peer, not 0; got {address}")


def require_address(address: str, flag: str) -> None:
    """Raise UserError, which names the flag, unless the address is a multiaddr."""
    try:
        Multiaddr(address)
    except ValueError:
        example = "/ip4/0.0.0.0/tcp/4001"
        raise UserError(f"{flag} expects an address such as {example}; got {printable(address, 200)!r}") from None

"""The libp2p daemon of one process: started, read, and ended with it.

hivemind's own start leaves the daemon in our process group, so that Ctrl-C ends it before we have said goodbye; leaves
it running if we end while it starts; and has its sockets in /tmp, wherever temporary files belong. So the start is
ours; the client, and all that goes over it, is hivemind's.
"""

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path

import hivemind.hivemind_cli
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE, P2PDaemonError
from hivemind.utils.logging import loglevel, python_level_to_golog
from hivemind.utils.multiaddr import Multiaddr

from decentral.core import end_with_parent
from decentral.core.errors import UserError
from decentral.core.temporary import new_temporary_folder

LIBP2P_START_S = 60.0  # the daemon's start on a loaded machine; hivemind's default of 15 s is too short
LEAVE_S = 5.0  # for the daemon to close its connections
SOCKET_PATH_BYTES = 100  # of the 104 that every system allows, 108 on Linux
DAEMON_FLAGS = {  # of the daemon, beside its place
    "autoRelay": 1,
    "autonat": 1,
    "b": 0,
    "connManager": 1,
    "dhtServer": 1,
    "idleTimeout": f"{LIBP2P_START_S:g}s",  # it ends itself where our process has died before it has connected
    "natPortMap": 1,
    "persistentConnMaxMsgSize": DEFAULT_MAX_MSG_SIZE,
    "relay": 1,
    "relayHopLimit": 0,
    "tls": 1,
}
ROUTER_FLAGS = ("autoRelay", "autonat", "natPortMap")  # by which others reach a daemon behind a router


class OwnDaemon(P2P):  # type: ignore[misc]  # hivemind has no types
    """hivemind's P2P over a daemon in a session of its own, which ends with this process and no sooner.

    A signal to our process group, such as a terminal's Ctrl-C, does not reach the daemon.
    """

    @classmethod
    async def begin(
        cls, key: Path, listen: Sequence[str], announce: Sequence[str], only_dials: bool = False
    ) -> "OwnDaemon":
        """Start a daemon, and return once it answers.

        Args:
            key: File with the identity; made if it is not there.
            listen: Addresses to listen at.
            announce: Addresses to tell others instead, if any.
            only_dials: Whether nobody needs to reach it, so that it asks no router for a port.

        Raises:
            P2PDaemonError: If the daemon ends instead, or takes longer than LIBP2P_START_S.
            UserError: If there is no folder for its sockets.
        """
        if not key.exists():
            cls.generate_identity(str(key))
        folder = _socket_folder()
        self = cls()
        self._folder = folder
        self._daemon_listen_maddr, self._client_listen_maddr = (
            Multiaddr(f"/unix{folder}/{name}") for name in ("daemon", "client")
        )
        try:
            self._child = await self._spawn(key, listen, announce, only_dials)
            self._alive = True
            await self._until_ready()
            self._client = await p2pclient.Client.create(self._daemon_listen_maddr, self._client_listen_maddr)
            await self._ping_daemon()
        except BaseException:  # also if we are told to stop meanwhile
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
            await asyncio.wait_for(ready, LIBP2P_START_S)
        except TimeoutError:
            raise P2PDaemonError(f"the libp2p daemon did not start in {LIBP2P_START_S:g} s") from None

    async def shutdown(self) -> None:
        """End the daemon, and wait until it has ended. A daemon that does not heed SIGTERM is killed."""
        self._terminate()
        if self._child is not None:
            try:
                await asyncio.wait_for(self._child.wait(), LEAVE_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._child.kill()
                await self._child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _socket_folder() -> Path:
    """Return a new folder for the daemon's sockets. Raises UserError."""
    folder = new_temporary_folder()
    if len(os.fsencode(folder / "daemon")) > SOCKET_PATH_BYTES:
        folder.rmdir()
        raise UserError(f"{folder.parent} is too long a path for a socket; set TMPDIR to a shorter one")
    return folder

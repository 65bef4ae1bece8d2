"""Find the peers that run on this machine, whoever started them, and end those of this user; only on Linux.

A peer holds the lock of its state folder for as long as its process lives (`StateFolder.claim`). /proc/locks names the
process of each lock, and /proc/PID/fd shows whether that process has this very file open. So a process is not taken for
a peer merely because the system has given it the id of a peer that has ended. Start reading at `running_peers`.
"""

import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from decentral.core.peer_folders import KEY, lock_holders
from decentral.core.rank_place import ATTEMPT
from decentral.core.units import Seconds

PROC = Path("/proc")
COMMAND_BYTES = 4096  # at most this much of a command line is read, as prctl PR_SET_MM_MAP can make it gigabytes long
DELETED = " (deleted)"  # Linux adds this to the name of an open file that was deleted
STARTED_FIELD = 19  # index of the start time (ticks since boot) in /proc/PID/stat, where the state of the process is 0


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A process on this machine that runs a peer."""

    pid: int
    user: int  # id (uid) of the user who runs the process
    since: Seconds  # Unix time at which the process started
    folder: Path | None  # the peer's state folder; None: the folder of another user's peer, which this user may not see
    name: str = ""  # what --name says in the command of this user's peer, unchecked; "" without it
    is_deleted: bool = False  # whether the folder was deleted while the peer ran, so that nothing more is saved


def running_peers(proc: Path = PROC) -> list[RunningPeer]:
    """Return the peers that run on this machine, the oldest first.

    Args:
        proc: The folder of all processes, in the format of /proc on Linux.
    """
    found = [peer for entry in proc.glob("[0-9]*") if (peer := _peer(entry)) is not None]
    own = [peer for peer in found if peer.user == os.geteuid() and peer.folder is not None]
    return sorted([*own, *(peer for peer in found if peer.user != os.geteuid())], key=lambda peer: peer.since)


def _peer(process: Path) -> RunningPeer | None:
    """Return the peer with this folder in /proc; None if the process is no peer, or has ended."""
    try:
        with (process / "cmdline").open("rb") as command:
            words = [word.decode(errors="replace") for word in command.read(COMMAND_BYTES).split(b"\0")]
        if not _is_called_peer(words):
            return None
        user, pid, since = process.stat().st_uid, int(process.name), _started(process)
        if user != os.geteuid():
            return RunningPeer(pid, user, since, None)
        folder, is_deleted = _claimed(process)
        return RunningPeer(pid, user, since, folder, _named(words), is_deleted)
    except (OSError, ValueError, IndexError):
        return None


def _is_called_peer(words: Sequence[str]) -> bool:
    """Return whether a command line is `python -m decentral.peer ...` or `decentral peer ...`."""
    pairs = [(Path(first).name, second) for first, second in pairwise(words)]
    return ("-m", "decentral.peer") in pairs or ("decentral", "peer") in pairs


def _named(words: Sequence[str]) -> str:
    """Return the last value of --name in a command line; "" without one."""
    apart = [second for first, second in pairwise(words) if first == "--name"]
    joined = [word.removeprefix("--name=") for word in words if word.startswith("--name=")]
    return next(reversed([*apart, *joined]), "")


def _claimed(process: Path) -> tuple[Path | None, bool]:
    """Return the state folder whose lock this process holds, and whether it was deleted; (None, False) without one."""
    holders = lock_holders(process.parent / "locks")
    locked = {inode for inode, pids in holders.items() if int(process.name) in pids}
    for descriptor in (process / "fd").iterdir() if locked else ():
        with suppress(OSError):
            name, opened = os.readlink(descriptor), descriptor.stat()
            file = Path(name.removesuffix(DELETED))
            if file.name != "lock" or opened.st_ino not in locked:
                continue
            if name.endswith(DELETED) and not opened.st_nlink:
                return file.parent, True
            if os.path.samestat(file.stat(), opened) and (file.parent / KEY).exists():
                return file.parent, False
    return None, False


def _started(process: Path) -> Seconds:
    """Return the Unix time at which a process started."""
    after_name = (process / "stat").read_text().rpartition(")")[2].split()  # the name may have spaces and brackets
    lines = (process.parent / "stat").read_text().splitlines()
    booted = [int(line.split()[1]) for line in lines if line.startswith("btime ")]
    return booted[0] + int(after_name[STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class StopRequests:
    """The peers that were asked to save and leave, each with a handle of its process (a pidfd of Linux)."""

    _handles: dict[RunningPeer, int]

    @classmethod
    @contextmanager
    def ask(cls, peers: Sequence[RunningPeer]) -> Iterator["StopRequests"]:
        """Ask these peers of this user to save and leave, as `kill PID` does.

        A process is asked only if it still holds the lock of the peer's folder. So a process that has got the id of an
        ended peer is not asked.
        """
        handles: dict[RunningPeer, int] = {}
        try:
            for peer in peers:
                with suppress(OSError):  # the process has ended
                    handles[peer] = os.pidfd_open(peer.pid)
                    if _peer(PROC / str(peer.pid)) == peer:
                        signal.pidfd_send_signal(handles[peer], _notice(peer))
                    else:
                        os.close(handles.pop(peer))
            yield cls(handles)
        finally:
            for handle in handles.values():
                os.close(handle)

    def has_ended(self, peer: RunningPeer, wait_s: Seconds) -> bool:
        """Wait until a peer has ended, for at most `wait_s`, and return whether it has."""
        return peer not in self._handles or bool(select.select([self._handles[peer]], [], [], max(0.0, wait_s))[0])


def _notice(peer: RunningPeer) -> signal.Signals:
    """Return the signal at which a peer saves and leaves: SIGTERM, but SIGINT where the peer has several devices.

    The launcher of a peer with several devices sends SIGTERM to end a rank at once (engine/launch.py).
    """
    environment = (PROC / str(peer.pid) / "environ").read_bytes().split(b"\0")
    is_rank = any(entry.startswith(f"{ATTEMPT}=".encode()) for entry in environment)
    return signal.SIGINT if is_rank else signal.SIGTERM

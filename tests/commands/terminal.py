"""Commands in terminals of their own, for tests of how they end, and the processes that they have started."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.patient_time import LIMIT_S

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # where ranks meet that torchrun starts


class Terminal:
    """A terminal window, which is a process that shows what the command in it writes."""

    def __init__(self, output: Path, temporary: Path, *command: str) -> None:
        """`temporary`: the folder in which the command makes its temporary ones."""
        self._keys, other = os.openpty()
        with output.open("ab") as shown:
            self._window = subprocess.Popen(["cat"], stdin=self._keys, stdout=shown, stderr=subprocess.DEVNULL)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200", **LOOPBACK}
        environment["TMPDIR"] = str(temporary)

        def log_in() -> None:
            os.login_tty(other)
            for each in (signal.SIGHUP, signal.SIGINT):  # which are ignored where the tests run in the background
                signal.signal(each, signal.SIG_DFL)

        self.process = subprocess.Popen(command, preexec_fn=log_in, env=environment)
        os.close(other)

    def ctrl_c(self) -> None:
        """Types Ctrl-C, which goes to all processes in the terminal's foreground."""
        os.write(self._keys, b"\x03")

    def close(self) -> None:
        """Closes the window, as a dropped ssh does. Safe to repeat."""
        if self._keys >= 0:
            os.close(self._keys)
            self._keys = -1
            self._window.kill()
            self._window.wait()


def python(module: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", module, *flags]


class Processes:
    """A process and all that it has started, as they are when this is made; they may end in any order later."""

    def __init__(self, pid: int) -> None:
        self.pids = [pid]
        for one in self.pids:
            self.pids += children(one)
        self._handles = [os.pidfd_open(one) for one in self.pids]

    def have_ended(self) -> bool:
        """Waits until all have ended; False if that takes longer than LIMIT_S."""
        deadline = time.monotonic() + LIMIT_S
        ended = [select.select([one], [], [], max(0.0, deadline - time.monotonic()))[0] for one in self._handles]
        for handle in self._handles:
            os.close(handle)
        return all(ended)


def children(pid: int) -> list[int]:
    """The processes that this one has started, and that are its own still."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command_line(pid: int) -> str:
    """The command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""

"""Run the live page in a child process of a command that trains or simulates, and send it lines through a pipe.

Start reading at `dashboard`. The parent process opens the socket, so that a taken port ends the command with an error
of one line. The child process has a lower priority than training. It has its own session, so that Ctrl-C does not
reach it. It ends when the pipe closes, which also happens when the parent process ends.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from decentral.core import strict_json
from decentral.core.units import MiB, Seconds
from decentral.view.page.address import PageAddress, link
from decentral.view.page.source_lines import PAGE_LINES, PageEvent

MOST_UNREAD_BYTES = 1 * MiB  # while more bytes than this wait for the page to read them, new lines are dropped
LEAVE_S = 5.0  # the page has this time to tell browsers that the run is over; then its process is killed


@dataclass(slots=True)
class DashboardProcess:
    """The parent's handle of the child process that serves the page, and of the pipe to that process."""

    url: str
    process: "subprocess.Popen[bytes]"
    waits: bool = False  # True: `tell` blocks while the pipe is full; False: `tell` drops lines if the page is slow
    left_out: int = 0
    _pipe: int = -1
    _waiting: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(
        cls,
        address: PageAddress,
        folder: Path | None = None,
        waits: bool = False,
        listening: socket.socket | None = None,
    ) -> "DashboardProcess":
        """Start the page's process.

        Args:
            address: Where the page is served.
            folder: A folder of journals that the page reads itself.
            waits: Whether `tell` blocks while the pipe is full. If False, `tell` drops lines if the page is slow.
            listening: A socket that listens at the address, if it is open already; `start` closes it in this process.

        Raises:
            UserError: If the address cannot be used, or the page's packages are not installed.
        """
        with listening or address.bind() as listening:
            theirs, ours = os.pipe()
            try:
                process = _spawn(address, folder, listening, theirs)
            finally:
                os.close(theirs)
            os.set_blocking(ours, waits)
            return cls(link(listening), process, waits, _pipe=ours)

    def tell(self, peer: str, t: Seconds, event: PageEvent) -> None:
        """Send the page an event of a peer.

        The event is dropped if the page's process has ended, or if more than MOST_UNREAD_BYTES wait to be sent.

        Args:
            peer: The peer's id; "" if the event is not from the journal of a peer.
            t: Unix time of the event.
            event: What happened.
        """
        if len(self._waiting) > MOST_UNREAD_BYTES:
            self.left_out += 1
        else:
            self._waiting += strict_json.dumps([peer, PAGE_LINES.line(t, event)]).encode() + b"\n"
        self._write()

    def close(self) -> None:
        """Close the pipe, which ends the page's process. Kill the process if it still runs after LEAVE_S seconds."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _write(self) -> None:
        """Write waiting bytes to the pipe until none is left or, if the pipe does not block, until the pipe is full."""
        if self._pipe < 0:
            self._waiting.clear()
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._pipe, self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            os.close(self._pipe)
            self._pipe = -1


@contextmanager
def dashboard(
    address: PageAddress | None,
    folder: Path | None = None,
    waits: bool = False,
    listening: socket.socket | None = None,
) -> Iterator[DashboardProcess | None]:
    """Run the page's process until the block ends, and yield its handle; yield None if `address` is None.

    The arguments have the same meaning as in `DashboardProcess.start`, and the same errors may be raised.
    """
    page = DashboardProcess.start(address, folder, waits, listening) if address else None
    try:
        yield page
    finally:
        if page:
            page.close()


def _spawn(address: PageAddress, folder: Path | None, listening: socket.socket, feed: int) -> "subprocess.Popen[bytes]":
    where = f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
    arguments = [sys.executable, "-m", "decentral.dashboard", "--at", where]
    arguments += ["--socket", str(listening.fileno()), "--feed", str(feed), *([str(folder)] if folder else [])]
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, pass_fds=(listening.fileno(), feed), start_new_session=True
    )

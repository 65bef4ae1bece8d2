"""The page of a command that trains or simulates: a process of its own, which gets lines through a pipe.

The socket is opened here, so that a port that is taken ends the command with one line. The process serves at a lower
priority than what trains, in a session of its own (Ctrl-C is not for it), and ends when the pipe does: when this
process ends, however that happens.
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

MOST_UNREAD_BYTES = 1 * MiB  # bytes that the page has not read; beyond them lines are left out
LEAVE_S = 5.0  # in which the page tells browsers that this is the end


@dataclass(slots=True)
class DashboardProcess:
    """`waits`: every line counts, so that whoever tells lines waits until the page has read them."""

    url: str
    process: "subprocess.Popen[bytes]"
    waits: bool = False
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
            address: Where it is served.
            folder: Of journals that the page reads itself.
            waits: Whether `tell` waits until the page has read.
            listening: The address's socket, if it was `reserved`; it is closed here.

        Raises:
            UserError: If the address cannot be had.
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
        """A line of this peer, at that Unix time. A page that has gone, or does not keep up, misses it."""
        if len(self._waiting) > MOST_UNREAD_BYTES:
            self.left_out += 1
        else:
            self._waiting += strict_json.dumps([peer, PAGE_LINES.line(t, event)]).encode() + b"\n"
        self._write()

    def close(self) -> None:
        """Ends the page. It has a moment to tell browsers so."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _write(self) -> None:
        if self._pipe < 0:
            self._waiting.clear()
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._pipe, self._waiting)]
        except BlockingIOError:
            pass
        except OSError:  # the page has ended
            os.close(self._pipe)
            self._pipe = -1


@contextmanager
def dashboard(
    address: PageAddress | None,
    folder: Path | None = None,
    waits: bool = False,
    listening: socket.socket | None = None,
) -> Iterator[DashboardProcess | None]:
    """Yield the page of a command, until the block ends; None if the user has asked for none.

    The arguments and the errors are those of `DashboardProcess.start`.
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

"""Upload a peer's checkpoints in the background: `decentral push` runs as a child process beside training.

It is a child process because a store's library may hang, fail or hold the interpreter's lock. The child has a lower
priority, and ends with the peer. A store that hangs or fails does not stop training: it causes a warning, an `upload`
line in the journal, and another try UPLOAD_EVERY_S later. Start reading at `uploads_running`.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from decentral.core import end_with_parent, strict_json
from decentral.core.journal.events import UploadLine
from decentral.core.journal.file import Journal
from decentral.core.peer_folders import CHECKPOINT, changed_at
from decentral.core.plain_text import printable
from decentral.core.strict_json import JsonObject
from decentral.core.units import Seconds

# An upload begins at least this long after the previous upload began, since its process takes a second of a core to
# start.
UPLOAD_EVERY_S = 300.0
CHECKPOINT_LOOK_S = 2.0  # the uploader looks for a new checkpoint at this interval
STALLED_S = 300.0  # a child that prints no line for this long is killed
LAST_UPLOAD_S = 30.0  # a peer that ends waits at most this long for the upload of its last checkpoint
UPLOAD_NICENESS = 10
ENDED_LOOK_S = 0.02
UPLOADER_LINE_BYTES = 64 * 1024
LAST_LINES = 32  # this many last lines of a child's output are kept; the result is one of them


@dataclass(frozen=True, slots=True)
class UploadSettings:
    """Where and how a peer uploads its checkpoints."""

    place: str  # the place, in the form that `checked_place` returns
    keep: int  # number of this peer's newest checkpoints that stay at the destination; older ones are removed
    bytes_per_s: float | None  # None: no limit

    def command(self, folder: Path) -> list[str]:
        """Return the command line that uploads the newest checkpoint of a state folder."""
        nice = shutil.which("nice")
        first = [nice, "-n", str(UPLOAD_NICENESS), sys.executable] if nice else [sys.executable]
        flags = ["--keep", str(self.keep), "--json"]
        flags += ["--rate", f"{self.bytes_per_s * 8e-6:.9g}"] if self.bytes_per_s else []
        return [*first, "-m", "decentral.push", str(folder), self.place, *flags]


@asynccontextmanager
async def uploads_running(
    folder: Path, settings: UploadSettings, journal: Journal, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Upload each new checkpoint until the block ends; then upload the last checkpoint, for at most LAST_UPLOAD_S.

    Args:
        folder: The peer's state folder.
        settings: Where and how to upload.
        journal: Gets an `upload` line for each upload.
        say: Prints a line for the user: each upload, the first failure, and at the end whether the last checkpoint is
            uploaded.
    """
    uploads = CheckpointUploads(folder, settings, journal, say)
    running = asyncio.create_task(uploads.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await uploads.last()


class CheckpointUploads:
    """The uploads of one peer, one at a time."""

    def __init__(self, folder: Path, settings: UploadSettings, journal: Journal, say: Callable[[str], None]) -> None:
        """Prepare uploads; `run` begins them."""
        self._folder, self._settings, self._journal, self._say = folder, settings, journal, say
        self._uploaded_at: Seconds = 0.0  # Unix time of the last change of the checkpoint that was uploaded
        self._failed = False

    async def run(self) -> None:
        """Upload each new checkpoint, but at most one in UPLOAD_EVERY_S, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            if self._is_new():
                await self.upload()
                await asyncio.sleep(began + UPLOAD_EVERY_S - loop.time())
            await asyncio.sleep(CHECKPOINT_LOOK_S)

    async def last(self) -> None:
        """Upload the last checkpoint, unless the last upload failed; give up after LAST_UPLOAD_S.

        Tell the user whether the last checkpoint is whole at the destination.
        """
        if not self._failed and self._is_new():
            self._say(f"uploading the last checkpoint, for {LAST_UPLOAD_S:g} s at most")
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_UPLOAD_S):
                    await self.upload()
        if self._is_new():
            again = f"decentral push {self._folder} {self._settings.place}"
            self._say(f"warning: the last checkpoint is not uploaded yet; go on with: {again}")
        elif self._uploaded_at:
            self._say(f"the last checkpoint is whole in {self._settings.place}")

    async def upload(self) -> None:
        """Upload the newest checkpoint in a child process, and write an `upload` line to the journal.

        Tell the user about each success, and about the first failure after a success.
        """
        loop = asyncio.get_running_loop()
        at, began = changed_at(self._folder / CHECKPOINT), loop.time()
        result, reason = await _run_child(self._settings.command(self._folder))
        seconds = round(loop.time() - began, 3)
        if reason:
            failed = UploadLine(outcome="failed", step=0, bytes=0, sent_bytes=0, seconds=seconds, reason=reason)
            self._journal.write(failed)
            if not self._failed:
                self._say(f"warning: the checkpoint is not uploaded: {reason}; training goes on")
        else:
            step, size, sent = int(result["step"]), int(result["size"]), int(result["sent"])
            name = str(result["name"])
            line = UploadLine(outcome="done", name=name, step=step, bytes=size, sent_bytes=sent, seconds=seconds)
            self._journal.write(line)
            self._uploaded_at = at
            self._say(f"uploaded step {step:,} to {self._settings.place}")
        self._failed = bool(reason)

    def _is_new(self) -> bool:
        return changed_at(self._folder / CHECKPOINT) > self._uploaded_at


async def _run_child(command: list[str]) -> tuple[JsonObject, str]:
    """Run the command of an upload.

    Returns:
        The last JSON object that the command printed, {} after a failure; and the reason of the failure, else "".
    """
    tied = [sys.executable, end_with_parent.__file__, str(os.getpid()), shutil.which(command[0]) or command[0]]
    nowhere, pipe, both, line = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT, [*tied, *command[1:]]
    try:
        process = subprocess.Popen(line, stdin=nowhere, stdout=pipe, stderr=both, start_new_session=True)
    except OSError as error:  # too many processes, or too little memory
        return {}, f"no process could be started ({error.strerror})"
    output = asyncio.StreamReader(UPLOADER_LINE_BYTES)
    reading, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), process.stdout
    )
    last = deque[bytes](maxlen=LAST_LINES)
    try:
        while said := await _said(output):
            last.append(said)
        async with asyncio.timeout(STALLED_S):
            code = await _exit_code(process)
    except TimeoutError:
        return {}, f"nothing was sent for {STALLED_S:g} s"
    except ValueError:
        return {}, "a line of its output is too long"
    finally:
        reading.close()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # do not wait for its end, which a disk that hangs would delay
    for said in reversed(last) if code == 0 else ():  # libraries may print warnings after the result
        with suppress(ValueError, TypeError):
            found = strict_json.loads(said)
            if isinstance(found, dict) and "name" in found:
                return found, ""
    why = (last[-1] if last else b"").decode(errors="replace").removeprefix("error:")
    words = printable(" ".join(why.split()), UPLOADER_LINE_BYTES)
    return {}, words or f"exit code {code}"


async def _said(output: asyncio.StreamReader) -> bytes:
    """Return the next line, b"" at the end. Raise TimeoutError if none comes for STALLED_S seconds."""
    async with asyncio.timeout(STALLED_S):  # `wait_for` of Python 3.11 loses a cancellation that comes with the line
        return await output.readline()


async def _exit_code(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a process that has closed its output."""
    while (code := process.poll()) is None:
        await asyncio.sleep(ENDED_LOOK_S)
    return code

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

UPLOAD_EVERY_S = 300.0  # uploads begin at this interval at most; a child takes about a second of a core to start
CHECKPOINT_LOOK_S = 2.0  # the checkpoint's time is looked at this often
STALLED_S = 300.0  # a child that prints nothing for so long is killed
LAST_UPLOAD_S = 30.0  # a peer that ends waits this long at most for the upload of its last checkpoint
UPLOAD_NICENESS = 10
ENDED_LOOK_S = 0.02
UPLOADER_LINE_BYTES = 64 * 1024
LAST_LINES = 32  # of a child; the result is among them


@dataclass(frozen=True, slots=True)
class UploadSettings:
    """Where and how a peer uploads its checkpoints."""

    place: str  # as `checked_place` returns it
    keep: int  # number of checkpoints that stay there
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
    """Upload each new checkpoint until the block ends, and then the last one, for LAST_UPLOAD_S at most.

    Args:
        folder: The peer's state folder.
        settings: Where and how.
        journal: Gets an `upload` line for each upload.
        say: Prints a line for the user: the first failure, and an upload after failures.
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
        """Upload each new checkpoint, at the earliest UPLOAD_EVERY_S after the last upload began. Never return."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            if self._is_new():
                await self.upload()
                await asyncio.sleep(began + UPLOAD_EVERY_S - loop.time())
            await asyncio.sleep(CHECKPOINT_LOOK_S)

    async def last(self) -> None:
        """Upload the last checkpoint, unless the last upload failed; give up after LAST_UPLOAD_S."""
        if self._failed or not self._is_new():
            return
        self._say(f"uploading the last checkpoint, for {LAST_UPLOAD_S:g} s at most")
        try:
            async with asyncio.timeout(LAST_UPLOAD_S):
                await self.upload()
        except TimeoutError:
            again = f"decentral push {self._folder} {self._settings.place}"
            self._say(f"warning: the last checkpoint is not uploaded yet; go on with: {again}")

    async def upload(self) -> None:
        """Upload by one child; write the result to the journal, and tell the user of a change to or from failure."""
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
            if self._failed:
                self._say(f"uploads work again: {name}")
        self._failed = bool(reason)

    def _is_new(self) -> bool:
        return changed_at(self._folder / CHECKPOINT) > self._uploaded_at


async def _run_child(command: list[str]) -> tuple[JsonObject, str]:
    """Run an upload, and return the last JSON object that it printed, and the reason of a failure or ""."""
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
        while said := await asyncio.wait_for(output.readline(), STALLED_S):
            last.append(said)
        code = await asyncio.wait_for(_exit_code(process), STALLED_S)
    except TimeoutError:
        return {}, f"nothing was sent for {STALLED_S:g} s"
    except ValueError:
        return {}, "a line of its output is too long"
    finally:
        reading.close()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # nobody waits for its end: a disk that hangs would delay it
    for said in reversed(last) if code == 0 else ():  # libraries warn when the process ends
        with suppress(ValueError, TypeError):
            found = strict_json.loads(said)
            if isinstance(found, dict) and "name" in found:
                return found, ""
    why = (last[-1] if last else b"").decode(errors="replace").removeprefix("error:")
    words = printable(" ".join(why.split()), UPLOADER_LINE_BYTES)
    return {}, words or f"exit code {code}"


async def _exit_code(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a process that has closed its output."""
    while (code := process.poll()) is None:
        await asyncio.sleep(ENDED_LOOK_S)
    return code

"""Uploads in the background: a store that hangs or fails is a warning, a line in the journal, and nothing else."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from decentral.core.journal.events import UploadLine
from decentral.core.journal.file import Journal, read
from decentral.core.journal.lines import recorded
from decentral.core.own_inputs import OwnInputs
from decentral.core.peer_folders import changed_at
from decentral.store import uploader
from decentral.store.uploader import CheckpointUploads, UploadSettings, uploads_running
from tests.commands.terminal import Processes, children, command_line
from tests.patient_time import LIMIT_S, PatientLoop, TimelessLoop

DONE = 'print(\'{"sent": 1, "size": 9}\\n{"name": "a-step-1", "step": 1, "size": 9, "sent": 5}\')'
HANGS = "import time; print('begun', flush=True); time.sleep(1e6)"
OF_A_PEER = """
import asyncio
from decentral.store import uploader
asyncio.run(uploader._run_child(["sleep", "1000000"]))
"""
FAILS = "import sys; print('error: no such bucket', file=sys.stderr); sys.exit(2)"


class Upload:
    """A state folder with a checkpoint, a journal, and what the user is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        (folder / "checkpoint.safetensors").write_bytes(b"x")
        self.journal = Journal(folder / "journal.jsonl", lambda: 1.0)
        self.settings = UploadSettings("s3://bucket/runs", 3, None)
        self.said: list[str] = []
        self.uploads = CheckpointUploads(folder, self.settings, self.journal, self.said.append)

    def runs(self, code: str) -> None:
        """Let the child process be one that runs this code."""
        self.patch.setattr(UploadSettings, "command", lambda *_: [sys.executable, "-c", code])

    def lines(self) -> list[UploadLine]:
        return [line.event for line in recorded(read(self.journal.path)) if isinstance(line.event, UploadLine)]


@pytest.fixture
def upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upload]:
    made = Upload(tmp_path, monkeypatch)
    yield made
    made.journal.close()


def test_an_upload_is_told_to_the_journal_and_to_the_user(upload: Upload) -> None:
    upload.runs(DONE)
    asyncio.run(upload.uploads.upload())
    (line,) = upload.lines()
    assert (line.outcome, line.name, line.step, line.bytes, line.sent_bytes) == ("done", "a-step-1", 1, 9, 5)
    assert upload.said == ["uploaded step 1 to s3://bucket/runs"]


def test_a_failure_is_told_once_and_each_upload_after_it(upload: Upload) -> None:
    for code in (FAILS, FAILS, DONE, DONE):
        upload.runs(code)
        asyncio.run(upload.uploads.upload())
    assert upload.said == [
        "warning: the checkpoint is not uploaded: no such bucket; training goes on",
        "uploaded step 1 to s3://bucket/runs",
        "uploaded step 1 to s3://bucket/runs",
    ]
    assert [line.outcome for line in upload.lines()] == ["failed", "failed", "done", "done"]
    assert upload.lines()[0].reason == "no such bucket"


def test_a_warning_of_a_library_after_the_result_is_no_failure(upload: Upload) -> None:
    upload.runs(f"{DONE}; print('Unclosed client session')")
    asyncio.run(upload.uploads.upload())
    assert [line.outcome for line in upload.lines()] == ["done"]


def test_a_machine_without_room_for_a_process_is_a_failure_like_others(upload: Upload) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    upload.patch.setattr(subprocess, "Popen", refused)
    asyncio.run(upload.uploads.upload())
    assert upload.lines()[0].reason == "no process could be started (Resource temporarily unavailable)"


@pytest.mark.parametrize("code", ["pass", "print('[]')", "print('{}')", "import os; os.kill(os.getpid(), 9)"])
def test_a_child_that_says_nothing_useful_has_failed(upload: Upload, code: str) -> None:
    upload.runs(code)
    asyncio.run(upload.uploads.upload())
    assert [line.outcome for line in upload.lines()] == ["failed"]


def test_a_child_that_hangs_is_killed(upload: Upload) -> None:
    upload.patch.setattr(uploader, "STALLED_S", 0.5)
    hangs = ["sh", "-c", f"echo $$ > {upload.folder / 'pid'}; exec sleep 1000000"]
    upload.patch.setattr(UploadSettings, "command", lambda *_: hangs)
    while not (upload.folder / "pid").exists():
        asyncio.run(upload.uploads.upload())
    assert upload.lines()[-1].reason == "nothing was sent for 0.5 s"
    with contextlib.suppress(ChildProcessError):  # the event loop has collected the child's exit status already
        os.waitpid(int((upload.folder / "pid").read_text()), 0)  # which would never return if the child went on


def test_an_upload_ends_with_a_peer_that_is_killed() -> None:
    peer = subprocess.Popen([sys.executable, "-c", OF_A_PEER])
    while not (uploads := children(peer.pid)) or "sleep" not in command_line(uploads[0]).partition(" ")[0]:
        assert peer.poll() is None
        time.sleep(0.01)
    both = Processes(peer.pid)
    assert len(both.pids) == 2
    peer.kill()
    peer.wait()
    assert both.have_ended()


def test_a_peer_that_ends_does_not_wait_for_a_store_that_hangs(upload: Upload) -> None:
    upload.patch.setattr(uploader, "LAST_UPLOAD_S", 0.05)
    upload.runs(HANGS)

    async def story() -> None:
        async with uploads_running(upload.folder, upload.settings, upload.journal, upload.said.append):
            pass

    PatientLoop().play(story(), LIMIT_S)
    assert upload.said[-1].startswith("warning: the last checkpoint is not uploaded yet; go on with: decentral push")


@pytest.mark.parametrize("turns", range(6))
def test_an_upload_that_is_cancelled_while_a_line_comes_ends(upload: Upload, turns: int) -> None:
    """A cancellation that came with a line was lost, and a peer that ended waited for its store for five minutes."""
    upload.runs(HANGS)

    async def story() -> None:
        loop, waits = asyncio.get_running_loop(), asyncio.Event()
        coming: list[asyncio.Future[bytes]] = [loop.create_future(), loop.create_future()]  # the second never comes
        first = coming[0]

        async def readline(_: asyncio.StreamReader) -> bytes:
            waits.set()
            return await coming.pop(0)

        upload.patch.setattr(asyncio.StreamReader, "readline", readline)
        task = asyncio.create_task(upload.uploads.upload())
        await waits.wait()
        first.set_result(b"begun\n")
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(story())


def test_a_peer_that_ends_does_not_try_a_store_that_has_failed(upload: Upload) -> None:
    upload.runs(FAILS)

    async def story() -> None:
        await upload.uploads.upload()
        await upload.uploads.last()

    asyncio.run(story())
    assert len(upload.lines()) == 1
    assert upload.said[-1].startswith("warning: the last checkpoint is not uploaded yet; go on with: decentral push")


def test_a_peer_that_ends_says_that_its_last_checkpoint_is_whole(upload: Upload) -> None:
    upload.runs(DONE)

    async def story() -> None:
        await upload.uploads.last()
        await upload.uploads.last()

    asyncio.run(story())
    whole = "the last checkpoint is whole in s3://bucket/runs"
    assert upload.said[1:] == ["uploaded step 1 to s3://bucket/runs", whole, whole]


def test_a_peer_without_a_checkpoint_says_nothing_of_uploads(upload: Upload) -> None:
    (upload.folder / "checkpoint.safetensors").unlink()
    asyncio.run(upload.uploads.last())
    assert upload.said == []


def test_only_a_new_checkpoint_is_uploaded_and_not_more_often_than_said(upload: Upload) -> None:
    begun: list[float] = []

    async def upload_once(self: CheckpointUploads) -> None:
        begun.append(asyncio.get_running_loop().time())
        self._uploaded_at = changed_at(upload.folder / "checkpoint.safetensors")

    upload.patch.setattr(CheckpointUploads, "upload", upload_once)

    async def story() -> None:
        async with uploads_running(upload.folder, upload.settings, upload.journal, upload.said.append):
            for later in range(1, 100):
                await asyncio.sleep(30.0)
                os.utime(upload.folder / "checkpoint.safetensors", (1e9 + later, 2e9 + later))
            await asyncio.sleep(1000.0)

    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        runner.run(story())
    gaps = [after - before for before, after in pairwise(begun)]
    assert len(begun) in (10, 11)
    assert min(gaps) >= uploader.UPLOAD_EVERY_S


def test_the_command_names_the_folder_the_place_and_the_limits(upload: Upload) -> None:
    command = UploadSettings("s3://bucket/runs", 2, 2.5e6).command(Path("peer-1"))
    assert command[-8:] == ["decentral.push", "peer-1", "s3://bucket/runs", "--keep", "2", "--json", "--rate", "20"]


def test_a_place_is_a_peer_s_own_and_no_part_of_the_run() -> None:
    from decentral.core.config import load

    own = load(None, ["train.upload=s3://bucket/runs"])
    assert own.own_inputs == OwnInputs(upload="s3://bucket/runs")
    assert own.digest() == load(None).digest()
    assert "bucket" not in own.canonical()

"""Disks that a soak fills: nothing can be written there until they are freed, and no mount is left behind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak.disks import FILLING, LimitedFiles, used_bytes
from tests.processes import piped
from tests.wan.test_lab import ROOT, needs_root

# It writes to a file at each word that comes, and says how that went.
WRITER = """
import signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for word in sys.stdin:
    try:
        with open(sys.argv[1], "ab", buffering=0) as file:
            print(file.write(bytes(100)), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""

# A disk at the folder of its argument, which is filled and freed. It prints what came of writing there each time.
MOUNTS = """
import sys
from pathlib import Path
from benchmarks.soak.disks import MountedDisks

def write():
    try:
        with (place / "file").open("ab") as file:
            file.write(bytes(100_000))
        return "written"
    except OSError as error:
        return error.strerror

place = Path(sys.argv[1])
disks = MountedDisks([place])
print(write(), flush=True)
disks.fill(0, 0)
print(write(), flush=True)
disks.free(0, 0)
print(write(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with piped(sys.executable, "-I", "-S", "-c", WRITER, str(tmp_path / "file")) as process:
        yield process


def writes(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("write\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_process_may_not_let_a_file_grow_until_it_is_freed(writer: "subprocess.Popen[str]", tmp_path: Path) -> None:
    disks = LimitedFiles([tmp_path / "place"])
    assert writes(writer) == "100"
    disks.fill(0, writer.pid)
    assert writes(writer) == "File too large"
    disks.free(0, writer.pid)
    assert writes(writer) == "100"


@needs_root
def test_a_mounted_disk_is_full_then_free_and_gone_with_its_process(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with piped(sys.executable, "-c", MOUNTS, str(place), cwd=ROOT) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(3)]
        assert str(place) not in Path("/proc/self/mounts").read_text()
    assert said == ["written", "No space left on device", "written"]
    assert list(place.iterdir()) == []


def test_what_fills_a_disk_is_not_what_its_peers_use(tmp_path: Path) -> None:
    (tmp_path / "peer-1").mkdir()
    (tmp_path / "peer-1" / "journal.jsonl").write_bytes(bytes(50))
    (tmp_path / FILLING).write_bytes(bytes(1000))
    assert used_bytes(tmp_path) == 50

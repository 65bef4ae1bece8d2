"""The checks of a disk, on disks that are full, cannot be written, or are slow."""

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.wan import namespaces
from decentral.commands import doctor
from decentral.commands.checks import disk, examine
from decentral.commands.checks.finding import FindingState, wrong
from decentral.core import config
from decentral.core.ids import RunId
from decentral.core.units import MiB
from decentral.peers.startup.state import StateFolder

needs_root = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    namespaces.mount_memory(folder, 4 * MiB)
    yield folder
    namespaces.unmount(folder)


def test_a_mistyped_state_folder_is_wrong_as_the_peer_says(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        StateFolder(tmp_path / name).write_run(RunId("gpt-3fa2c1"), config.Config())
    flags = doctor.parse(["--state-dir", str(tmp_path / "zz"), "--device", "cpu"])
    found = {one.check: one for one in examine._computer_and_disk(flags, examine.PeerPlace.of(flags))}
    assert found["state folder"] == wrong(
        "state folder",
        f"--state-dir {tmp_path / 'zz'} does not exist (peers beside it: a, b)",
        "to resume a peer, correct the path; to start one there, add a CONFIG, such as default, or --join ADDR",
    )
    assert not list(disk.meant(str(tmp_path / "zz"), says_run=True, says_peer=False))  # a new peer would start there
    assert not list(disk.meant(str(tmp_path / "a"), says_run=False, says_peer=False))


def test_a_disk_with_room_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = disk.write_speed(tmp_path)
    assert found.seen.startswith("writes ")
    assert "B/s" in found.seen
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("written_per_s", "state", "seen"),
    [
        (32e6, FindingState.OK, "writes 32.0 MB/s"),
        (31e6, FindingState.WARN, "writes 31.0 MB/s: checkpoints will be rare"),
    ],
)
def test_a_slow_disk_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_per_s: float, state: FindingState, seen: str
) -> None:
    monkeypatch.setattr(disk, "_written_per_s", lambda _: written_per_s)
    found = disk.write_speed(tmp_path)
    assert (found.state, found.seen) == (state, seen)


@needs_root
def test_a_full_disk(mounted: Path) -> None:
    found = {one.check: one for one in disk.checks(mounted, of_a_peer=True)}
    assert "No space left on device" in found["disk"].seen
    assert "make room there" in found["disk"].remedy
    assert found["disk space"].state == FindingState.WRONG
    assert not list(mounted.iterdir())


@needs_root
def test_a_disk_that_is_mounted_read_only(mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    found = disk.write_speed(mounted / "peer")  # a folder that is to be made there
    assert "Read-only file system" in found.seen
    assert "choose a --state-dir that this user can write" in found.remedy


def test_a_limit_of_a_file_s_size(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, hard))
    try:
        found = disk.write_speed(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in found.seen
    assert "ulimit -f unlimited" in found.remedy


@pytest.mark.parametrize(
    ("file", "said"), [("run.json", "run.json is damaged"), ("identity.key", "is not a libp2p key file")]
)
def test_a_damaged_file_of_the_folder(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{")
    found = disk.belongs_to(tmp_path)
    assert said in found.seen
    assert "another --state-dir" in found.remedy


def test_a_folder_where_there_is_no_disk_cannot_be_made() -> None:
    (one,) = disk.checks(Path("/proc/nope/x"), False)
    assert (one.check, one.state) == ("disk", FindingState.WRONG)
    assert one.seen.startswith("/proc/nope/x cannot be made: /proc cannot be written: ")
    assert one.remedy == "use a --state-dir on a disk"

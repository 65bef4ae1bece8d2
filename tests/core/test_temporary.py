"""Temporary folders of processes that were killed are removed, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decentral.core.temporary import LOCK, TemporaryFolder, remove_abandoned, temporary_folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def abandoned(place: Path, name: str = "decentral-old") -> Path:
    """Return a folder as a killed process has left it."""
    folder = place / name
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "identity.key").write_text("secret")
    (folder / LOCK).touch()
    return folder


def test_a_folder_is_there_within_its_block_only(place: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o077 == 0
    assert list(place.iterdir()) == []


def test_the_folder_of_a_process_that_has_ended_is_removed_with_all_that_is_in_it(place: Path) -> None:
    old = abandoned(place)
    with temporary_folder() as folder:
        assert list(place.iterdir()) == [folder]
    assert not old.exists()


def test_the_folder_of_a_process_that_runs_stays(place: Path) -> None:
    with temporary_folder() as first, temporary_folder() as second:
        assert {first, second} == set(place.iterdir())
        remove_abandoned(place)
        assert {first, second} == set(place.iterdir())


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(place: Path) -> None:
    make = "from decentral.core.temporary import TemporaryFolder as T; import os; f = T.make(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", make], env=os.environ | {"TMPDIR": str(place)}, check=False)
    (left,) = place.iterdir()
    assert (left / LOCK).exists()
    remove_abandoned(place)
    assert not left.exists()


def test_a_folder_without_our_lock_stays_whatever_its_name_is(place: Path) -> None:
    state = place / "decentral-state"
    state.mkdir()
    (state / "lock").touch()  # as a state folder has it
    abandoned(place, "other-program")
    remove_abandoned(place)
    assert len(list(place.iterdir())) == 2


def test_links_are_not_followed(place: Path) -> None:
    theirs = abandoned(place, "theirs")
    (place / "decentral-link").symlink_to(theirs)
    linked = place / "decentral-lock"
    linked.mkdir()
    (linked / LOCK).symlink_to(theirs / LOCK)
    inside = abandoned(place, "decentral-inside")
    (inside / "away").symlink_to(theirs)
    remove_abandoned(place)
    assert not inside.exists()
    assert linked.exists()
    assert (theirs / "inner" / "identity.key").exists()


def test_another_user_s_folder_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = abandoned(place)
    monkeypatch.setattr("os.geteuid", lambda: os.stat(old).st_uid + 1)
    remove_abandoned(place)
    assert (old / "inner" / "identity.key").exists()


def test_a_folder_that_was_removed_already_is_no_error() -> None:
    folder = TemporaryFolder.make()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()

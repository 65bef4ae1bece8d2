"""Test that files are replaced together: all of them, or none if the disk refuses one."""

import errno
import os
from pathlib import Path

import pytest

from decentral.core.atomic_file import write_together

OLD, NEW = {"config.json": b"old", "weights": b"old"}, {"config.json": b"new", "weights": b"new" * 9}


def test_a_disk_that_is_full_at_the_second_file_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out" / "model"
    write_together(folder, OLD)
    room, sync = [1], os.fsync

    def synced(descriptor: int) -> None:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room.pop()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(OSError, match="No space left"):
        write_together(folder, NEW)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == OLD
    room.append(1)
    with pytest.raises(OSError, match="No space left"):
        write_together(tmp_path / "other" / "model", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    write_together(folder, NEW)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEW

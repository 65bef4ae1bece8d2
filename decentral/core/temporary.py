"""Temporary folders, which only this user can enter, and which are removed even if their process was killed.

Each folder has a file LOCK, which is locked as long as the process that made the folder runs. A process that makes a
new folder also removes this user's folders whose lock is free.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO

from decentral.core.errors import UserError

TEMPORARY_PREFIX = "decentral-"
LOCK = ".temporary-lock"  # only temporary folders of this module have a file of this name
FOLDER_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class TemporaryFolder:
    """A temporary folder, which exists until `remove`.

    If the process that made the folder ends without `remove`, a later process of this user removes the folder.
    """

    path: Path
    _lock: BinaryIO

    @classmethod
    def make(cls) -> "TemporaryFolder":
        """Make a folder in the system's temporary folder, and remove the folders there whose processes have ended.

        Raises:
            UserError: If no temporary folder can be written.
        """
        try:
            path = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
            remove_abandoned(path.parent)
            lock = (path / f"{LOCK}-new").open("xb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (path / f"{LOCK}-new").rename(path / LOCK)  # no process ever sees LOCK unlocked
        except OSError as error:
            said = f"no temporary folder is writable ({error.strerror}); set TMPDIR to another folder"
            raise UserError(said) from None
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        rmtree(self.path, ignore_errors=True)
        self._lock.close()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new temporary folder, and remove it at the end of the block.

    Raises:
        UserError: If no temporary folder can be written.
    """
    folder = TemporaryFolder.make()
    try:
        yield folder.path
    finally:
        folder.remove()


def is_temporary(folder: Path) -> bool:
    """Return whether this folder, or the folder that it is in, is temporary: its process removes it at its end."""
    return any((one / LOCK).exists() for one in (folder, folder.parent))


def remove_abandoned(place: Path) -> None:
    """Remove the temporary folders in `place` that belong to this user and whose lock is free; links are not followed.

    Folders without a lock are left: their process may be making them.
    """
    with suppress(OSError):
        parent = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in os.listdir(parent):
                if name.startswith(TEMPORARY_PREFIX):
                    _remove_if_abandoned(parent, name)
        finally:
            os.close(parent)


def _remove_if_abandoned(parent: int, name: str) -> None:
    with suppress(OSError):  # the name may be no folder, or a folder that another user owns, is in use, or is gone
        folder = os.open(name, FOLDER_OPENED, dir_fd=parent)
        try:
            lock = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            try:
                if os.fstat(folder).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Remove by descriptor, because the name may mean another folder by now.
                    rmtree(".", ignore_errors=True, dir_fd=folder)
                    os.rmdir(name, dir_fd=parent)
            finally:
                os.close(lock)
        finally:
            os.close(folder)

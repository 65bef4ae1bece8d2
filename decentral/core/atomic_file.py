"""Files that have the old content or the new one at any moment, whatever happens while they are written."""

import os
from contextlib import suppress
from pathlib import Path

SECRET = 0o600  # who may read a file with a key in it: its owner


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file that has the old content or the new one at any moment, also after a power cut. Raises OSError.

    A write that fails leaves no temporary file. `mode`: who may read and write a new file, before the umask.
    """
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # one that a power cut has left may be open to others
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """After this a renamed file has its new name also after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

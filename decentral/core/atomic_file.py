"""Files that have the old content or the new one at any moment, whatever happens while they are written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SECRET = 0o600  # who may read a file with a key in it: its owner


@contextmanager
def replacing(path: Path, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield an empty file that replaces the one at `path` when the block ends.

    Where the block or the disk fails, the old file stays, and no temporary file does.

    Args:
        path: The file to write.
        mode: Who may read and write a new file, before the umask.
        durable: Whether to wait for the disk, so that a power cut leaves the old content or the new one; else the file
            may be empty after it.

    Raises:
        OSError: If the disk refuses.
    """
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # one that a power cut has left may be open to others
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def write_atomically(path: Path, data: bytes, mode: int = 0o666, durable: bool = True) -> None:
    """Replace the content of a file at once; the arguments and the errors are those of `replacing`."""
    with replacing(path, mode, durable) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """After this a renamed file has its new name also after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Replace files atomically: at any moment a file has its complete old or new content, even after a crash."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SECRET = 0o600  # permission bits of a file that holds a key: only its owner may read it


@contextmanager
def replacing(path: Path, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield an empty file, open for writing, that replaces the file at `path` when the block ends.

    If the block raises or the disk refuses the data, the old file stays and the temporary file is deleted.

    Args:
        path: The file to write.
        mode: Permission bits of the new file, before the umask.
        durable: Whether to wait until the disk has stored the file. If not, a power cut may leave an empty file.

    Raises:
        OSError: If the file cannot be written; the old file is then unchanged.
    """
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # an old temporary file, left by a power cut, may have wider permissions
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
    """Replace a file's content with `data` atomically, with the permission bits `mode` (before the umask).

    Unless `durable`, the function does not wait for the disk, and a power cut may leave an empty file. Raises OSError,
    with the old file unchanged, if the file cannot be written.
    """
    with replacing(path, mode, durable) as file:
        file.write(data)


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace several files of a folder: all, or none if the disk cannot take one. The folder is made if missing.

    Args:
        folder: The folder.
        files: The new content of each file, by its name.

    Raises:
        OSError: If a file cannot be written: the old files are unchanged, and folders made here are removed. If a
            written file cannot be renamed, such as over a folder: others may be replaced.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as written:  # the files are renamed at its end, only after all of them are on the disk
            for name, data in files.items():
                file = written.enter_context(replacing(folder / name, durable=False))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            for one in made:
                one.rmdir()
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that files renamed in it keep their new names after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that have the old content or the new one at any moment, whatever happens while they are written."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that has the old content or the new one at any moment, also after a power cut. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """After this a renamed file has its new name also after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

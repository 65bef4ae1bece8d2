"""Temporary folders, which only this user can enter."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from decentral.core.errors import UserError


def new_temporary_folder() -> Path:
    """Return a new folder in the system's temporary folder.

    Raises:
        UserError: If no temporary folder can be written.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="decentral-"))
    except OSError as error:
        raise UserError(f"no temporary folder is writable ({error.strerror}); set TMPDIR to another folder") from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new temporary folder, and remove it at the end of the block.

    Raises:
        UserError: If no temporary folder can be written.
    """
    folder = new_temporary_folder()
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)

"""Temporary folders, which only this user can enter."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from decentral.core.errors import UserError


def new_temporary_folder() -> Path:
    """Return a new folder among the system's temporary ones. Raises UserError if none of those can be written."""
    try:
        return Path(tempfile.mkdtemp(prefix="decentral-"))
    except OSError as error:
        raise UserError(f"no temporary folder can be written ({error.strerror}); set TMPDIR to one that can") from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed in the end. Raises UserError if it cannot be made."""
    folder = new_temporary_folder()
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)

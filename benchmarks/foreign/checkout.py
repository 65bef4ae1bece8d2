"""Read the files of another project's checkout, and refuse a folder that is none."""

import json
from pathlib import Path
from typing import Any

from decentral.core import foreign_file
from decentral.core.errors import UserError

MAX_FILE_BYTES = 64 * 1024 * 1024


def text(folder: Path, name: str, project: str) -> str:
    """Return the text of the file `name` of a checkout. Raises UserError if the folder lacks it or it is unreadable."""
    try:
        return foreign_file.read_text(folder / name, MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder} is no checkout of {project}: {name} cannot be read ({reason})") from None


def tree(folder: Path, name: str, project: str) -> Any:
    """Return the JSON value in the file `name` of a checkout. Raises UserError as `text` does, and for bad JSON."""
    try:
        return json.loads(text(folder, name, project))
    except (ValueError, RecursionError):
        raise UserError(f"{folder} is no checkout of {project}: {name} is not valid JSON") from None

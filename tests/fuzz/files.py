"""Files with any bytes in them, for the decoders that read files."""

import os
import tempfile
from functools import cache
from pathlib import Path

_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # they go when the process ends


@cache
def folder() -> Path:
    """A folder in memory, where there is one."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    made = tempfile.TemporaryDirectory(dir=place, prefix="fuzz-")
    _KEPT.append(made)
    return Path(made.name)


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path

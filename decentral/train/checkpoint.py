"""Checkpoints: one safetensors file, written beside the old one, fsynced, then renamed over it.

So `kill -9` or a full disk at any moment leaves the old checkpoint or the new one, never half of one.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from decentral.core.errors import UserError

FILE = "checkpoint.safetensors"
Read = TypeVar("Read")


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> int:
    """Replaces the folder's checkpoint; `facts` are JSON. Gives its bytes. Raises OSError and leaves the old one."""
    data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"facts": json.dumps(facts)})
    write_atomically(folder / FILE, data)
    return len(data)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and facts of the folder's checkpoint; None where there is none. Raises UserError if it is damaged."""
    return _read(folder, lambda file, facts: ({name: file.get_tensor(name) for name in file.keys()}, facts))  # noqa: SIM118


def span(folder: Path) -> tuple[int, int] | None:
    """Layers [first, last) of the folder's checkpoint; None where there is none. Raises UserError, as `read` does."""
    return _read(folder, lambda _, facts: (int(facts["fragments"][0]["first"]), int(facts["fragments"][-1]["last"])))


def _read(folder: Path, what: Callable[[Any, dict[str, Any]], Read]) -> Read | None:
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return what(file, json.loads(file.metadata()["facts"]))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is damaged ({error}); move it away to start from the swarm") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that has the old content or the new one at any moment, also after a power cut. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""A disk for each place, which can be filled: of its own where root mounts it in memory, else limits of the process.

Without root every file of the peer's process may not grow (RLIMIT_FSIZE): each write fails, with another error than
that of a full disk, and its libp2p daemon goes on.
"""

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from benchmarks.wan import namespaces

DISK_BYTES = 64 << 20
FILLING = "filling"


class Disks(Protocol):
    """One for each place."""

    places: Sequence[Path]

    def close(self) -> None: ...

    def fill(self, place: int, pid: int) -> None:
        """No file there grows from now on. `pid`: of the peer."""

    def free(self, place: int, pid: int) -> None:
        """Undoes `fill`, if it was called."""


class MountedDisks:
    """A file system in memory at each place. They are gone with the processes that see them, however those end."""

    def __init__(self, places: Sequence[Path]) -> None:
        """Raises UserError where the kernel refuses."""
        self.places = places
        namespaces.own_mounts()
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            namespaces.mount_memory(place, DISK_BYTES)

    def close(self) -> None:
        for place in self.places:
            namespaces.unmount(place)

    def fill(self, place: int, pid: int) -> None:
        with (self.places[place] / FILLING).open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def free(self, place: int, pid: int) -> None:
        (self.places[place] / FILLING).unlink(missing_ok=True)


class LimitedFiles:
    """No disks: a process may not let files grow. `free` finds a process that has ended free already."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        for place in places:
            place.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        pass

    def fill(self, place: int, pid: int) -> None:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))

    def free(self, place: int, pid: int) -> None:
        with suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def used_bytes(place: Path) -> int:
    """What the files of a place take, what fills it aside."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(FileNotFoundError):  # it was renamed or deleted meanwhile
                total += 0 if name == FILLING else (Path(folder) / name).stat().st_size
    return total

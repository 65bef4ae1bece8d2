"""The memory limits of the control groups around this process: of a container, a batch system or systemd, on Linux.

A group of version 1 or 2 has limits of its own, and so has each group around it; the smallest one holds. What the
kernel says of the machine's memory knows nothing of them, and a process that takes more is killed without a word.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

LIMITS = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}  # by type of file system
SELF = Path("/proc/self")
ESCAPED = re.compile(r"\\([0-7]{3})")  # how the kernel writes spaces and backslashes in paths of mountinfo


def limit_bytes(process: Path = SELF) -> int | None:
    """Return the smallest memory limit around this process, in bytes; None where none is below the host's memory."""
    try:
        groups, mounts = ((process / name).read_text(errors="surrogateescape") for name in ("cgroup", "mountinfo"))
    except OSError:
        return None
    found = [number for file in _files(groups, mounts) if (number := _number(file)) is not None]
    return min((number for number in found if number < host_bytes()), default=None)


def host_bytes() -> int:
    """Return the memory of the whole machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes(process: Path = SELF) -> int:
    """Return the memory that this process has taken already, in bytes; 0 where the system does not say."""
    try:
        lines = (process / "status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


def _files(groups: str, mounts: str) -> Iterator[Path]:
    """Yield the limit files of this process's control groups and of all groups around them."""
    own = {}
    for line in groups.splitlines():
        if line.count(":") < 2:
            continue
        number, controllers, path = line.split(":", 2)
        if number == "0":
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    for line in mounts.splitlines():
        place, _, mounted = line.partition(" - ")
        paths = [ESCAPED.sub(lambda code: chr(int(code[1], 8)), path) for path in place.split(" ")[3:5]]
        if len(paths) < 2 or mounted.count(" ") < 2:
            continue
        kind, _, options = mounted.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, top = paths
        inner = PurePosixPath(own[kind])  # a container sees its own group, or groups inside it, as the root
        below = inner.relative_to(root) if inner.is_relative_to(root) else PurePosixPath()
        for folder in (below, *below.parents):
            yield from (Path(top) / folder / name for name in LIMITS[kind])


def _number(file: Path) -> int | None:
    """Return the limit in this file, in bytes; None if it says `max` or does not exist."""
    try:
        text = file.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None

"""Read the memory limit that a container, a batch system or systemd sets for this process (Linux control groups).

Start reading at `limit_bytes`. A control group (version 1 or 2) and each of its parent groups may have a limit; the
smallest limit applies. The kernel's sizes of the machine's memory ignore these limits, and a process that exceeds
its limit is killed without a message.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Files with a control group's memory limit, for cgroup versions 1 and 2.
LIMITS = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}
SELF = Path("/proc/self")
ESCAPED = re.compile(r"\\([0-7]{3})")  # mountinfo writes a space or a backslash as an octal code


def limit_bytes(process: Path = SELF) -> int | None:
    """Return the smallest memory limit of a process, in bytes; None if no limit is below the host's memory.

    Args:
        process: The folder of the process in /proc.
    """
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
    """Return the resident memory of the process with the folder `process` in /proc, in bytes; 0 if unknown."""
    try:
        lines = (process / "status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


def _files(groups: str, mounts: str) -> Iterator[Path]:
    """Yield the files with the memory limits of a process's control groups and of all their parent groups.

    `groups` and `mounts` are the texts of the files cgroup and mountinfo in the process's folder in /proc.
    """
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
        inner = PurePosixPath(own[kind])  # the process's group; in a container, `root` may be this group or below it
        below = inner.relative_to(root) if inner.is_relative_to(root) else PurePosixPath()
        for folder in (below, *below.parents):
            yield from (Path(top) / folder / name for name in LIMITS[kind])


def _number(file: Path) -> int | None:
    """Return the limit in this file, in bytes; None if the file says `max` or does not exist."""
    try:
        text = file.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None

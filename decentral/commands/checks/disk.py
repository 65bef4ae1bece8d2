"""Check the state folder and its disk: write access, speed, free space, and whether the folder's files are intact."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from errno import EACCES, EDQUOT, EFBIG, ENOSPC, EPERM, EROFS
from pathlib import Path

from decentral.comm.wire.identity import Identity
from decentral.commands.checks.finding import Finding, ok, unknown, warn, wrong
from decentral.core import foreign_file
from decentral.core.errors import UserError
from decentral.core.journal.file import JOURNAL_FILE_BYTES, JOURNAL_FILES_KEPT
from decentral.core.units import MiB, readable_bytes
from decentral.engine import checkpoint
from decentral.peers.startup.state import DISK_REMEDY, StateFolder, require_meant

PROBE_FILE_BYTES = 16 * MiB  # the check writes and syncs this many bytes to measure the disk's speed
SLOW_DISK_PER_S = 32e6  # on a disk that writes fewer bytes/s, checkpoints are saved less often, and the user is warned
JOURNALS_BYTES = (JOURNAL_FILES_KEPT + 1) * JOURNAL_FILE_BYTES
LEAST_FREE_BYTES = 64 * MiB  # must be free in addition to the next checkpoint's size; a journal grows by this in a day
CHECKED_BYTES = 4096 * MiB  # if a checkpoint is larger, only its head is checked: reading all of it would take minutes


def checks(folder: Path, of_a_peer: bool) -> Iterator[Finding]:
    """Yield the findings about the disk at `folder`, and, if it is a peer's state folder, about the files in it."""
    yield write_speed(folder)
    if shutil.disk_usage(_nearest(folder)).total:  # not a file system without a disk, such as /proc
        yield room(folder)
    if of_a_peer:
        yield belongs_to(folder)
        yield saved(folder)


def room(folder: Path) -> Finding:
    """Return the finding on whether the disk has room for another checkpoint and the journals."""
    free = shutil.disk_usage(_nearest(folder)).free
    file = folder / checkpoint.FILE
    needed = (file.stat().st_size if file.exists() else 0) + LEAST_FREE_BYTES
    seen = f"{readable_bytes(free)} free at {folder}"
    if free < needed:
        return wrong("disk space", f"{seen}; the next checkpoint and the journal need {readable_bytes(needed)}", ROOM)
    if free < needed + JOURNALS_BYTES:
        return warn("disk space", f"{seen}; journals may grow to {readable_bytes(JOURNALS_BYTES)}", ROOM)
    return ok("disk space", seen)


ROOM = f"{DISK_REMEDY} on a disk with more"


def write_speed(folder: Path) -> Finding:
    """Write and remove a test file; return the finding on whether the folder can be written, and how fast."""
    place = _nearest(folder)
    path = place / f".doctor-{os.getpid()}"
    try:
        rate = _written_per_s(path)
    except OSError as error:
        seen = f"{place} cannot be written: {error.strerror}"
        seen = seen if place == folder.absolute() else f"{folder} cannot be made: {seen}"
        remedy = _disk_remedy(error) if shutil.disk_usage(place).total else "use a --state-dir on a disk"
        return wrong("disk", seen, remedy)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    seen = f"writes {readable_bytes(rate)}/s"
    if rate < SLOW_DISK_PER_S:
        return warn("disk", f"{seen}: checkpoints will be rare", "use a --state-dir on a local disk")
    return ok("disk", seen)


def meant(wanted: str, says_run: bool, says_peer: bool) -> Iterator[Finding]:
    """Yield what is wrong if a peer would refuse this --state-dir; the arguments are those of `require_meant`."""
    try:
        require_meant(wanted, says_run, says_peer)
    except UserError as error:
        seen, _, remedy = str(error).partition("; ")
        yield wrong("state folder", seen, remedy)


def belongs_to(folder: Path) -> Finding:
    """Return the finding on which run the state folder belongs to, and whether a peer uses it now."""
    try:
        kept, key = StateFolder(folder).look_at_run(), folder / "identity.key"
        StateFolder(folder).read_flags()
        if key.exists():
            Identity.load_or_create(key)
    except UserError as error:
        return wrong("state folder", str(error), "move that file away, or use another --state-dir")
    used = "in use by a peer" if in_use(folder) else "no peer uses it now"
    return ok("state folder", f"{f'run {kept[0]}' if kept else 'new'}, {used}")


def in_use(folder: Path) -> bool:
    """Return whether a running peer has locked the folder."""
    try:
        with foreign_file.opened(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def saved(folder: Path) -> Finding:
    """Return the finding on whether the checkpoint is intact, by its checksums."""
    file = folder / checkpoint.FILE
    if not file.exists():
        return ok("checkpoint", "none yet")
    size = file.stat().st_size
    try:
        checkpoint.span(folder) if size > CHECKED_BYTES else checkpoint.verify(folder)
    except UserError as error:
        remedy = f"move {file} away, so that the peer fetches its state from the swarm; or restore it from a backup"
        return wrong("checkpoint", str(error), remedy)
    if size > CHECKED_BYTES:
        return unknown("checkpoint", f"{readable_bytes(size)}; its head is intact, the rest is too large to read here")
    return ok("checkpoint", f"{readable_bytes(size)}, intact")


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest existing folder above it."""
    path = folder.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _written_per_s(path: Path) -> float:
    """Write and sync a file, and return the rate in bytes/s. Raise OSError if that fails."""
    block = os.urandom(MiB)  # random, since some disks and file systems compress zeros
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(PROBE_FILE_BYTES // MiB):
            if file.write(block) < len(block):
                file.write(block)  # after a short write, the next write raises the OSError with the cause
        os.fsync(file.fileno())
    return PROBE_FILE_BYTES / (time.perf_counter() - began)


def _disk_remedy(error: OSError) -> str:
    match error.errno:
        case e if e in (ENOSPC, EDQUOT):
            return ROOM
        case e if e == EFBIG:
            return "raise the limit on file sizes: ulimit -f unlimited"
        case e if e in (EROFS, EACCES, EPERM):
            return "choose a --state-dir that this user can write, on a file system that is not mounted read-only"
    return "check the disk (dmesg), or use another --state-dir"

"""Checks of the state folder and its disk: can it be written, has it room, how fast is it, is what is there whole."""

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
from decentral.core.errors import UserError
from decentral.core.journal.file import JOURNAL_FILE_BYTES, JOURNAL_FILES_KEPT
from decentral.core.units import MiB, readable_bytes
from decentral.engine import checkpoint
from decentral.peers.startup.state import DISK_REMEDY, StateFolder

PROBE_FILE_BYTES = 16 * MiB  # written and synced to measure the disk; a second on a slow one
SLOW_DISK_PER_S = 32e6  # bytes/s: as fast as checkpoints may be written (swarm.checkpoint_every_s)
JOURNALS_BYTES = (JOURNAL_FILES_KEPT + 1) * JOURNAL_FILE_BYTES
LEAST_FREE_BYTES = 64 * MiB  # beside a checkpoint: the journal of a day
CHECKED_BYTES = 4096 * MiB  # a larger checkpoint is not read whole: that would take minutes


def checks(folder: Path, of_a_peer: bool) -> Iterator[Finding]:
    """Checks of the place where a state folder is or would be; if it is `of_a_peer`, of what is in it as well."""
    yield write_speed(folder)
    yield room(folder)
    if of_a_peer:
        yield belongs_to(folder)
        yield saved(folder)


def room(folder: Path) -> Finding:
    """Whether the disk takes another checkpoint beside the present one, and the journals."""
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
    """Writes a file, and removes it: whether the folder can be written, and how fast."""
    place = _nearest(folder)
    path = place / f".doctor-{os.getpid()}"
    try:
        rate = _written_per_s(path)
    except OSError as error:
        return wrong("disk", f"{place} cannot be written: {error.strerror}", _disk_remedy(error))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    seen = f"writes {readable_bytes(rate)}/s"
    if rate < SLOW_DISK_PER_S:
        return warn("disk", f"{seen}: checkpoints will be rare", "use --state-dir on a local disk, not a network's")
    return ok("disk", seen)


def belongs_to(folder: Path) -> Finding:
    """Which run the folder belongs to, and whether a peer uses it now."""
    try:
        kept, key = StateFolder(folder).read_run(), folder / "identity.key"
        StateFolder(folder).read_flags()
        if key.exists():
            Identity.load_or_create(key)
    except UserError as error:
        return wrong("state folder", str(error), "move that file away, or use another --state-dir")
    used = "in use by a peer" if in_use(folder) else "no peer uses it now"
    return ok("state folder", f"{f'run {kept[0]}' if kept else 'new'}, {used}")


def in_use(folder: Path) -> bool:
    """Whether a peer holds the folder's lock."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def saved(folder: Path) -> Finding:
    """Whether the checkpoint is what was written, by its checksums."""
    file = folder / checkpoint.FILE
    if not file.exists():
        return ok("checkpoint", "none yet")
    size = file.stat().st_size
    try:
        checkpoint.span(folder) if size > CHECKED_BYTES else checkpoint.verify(folder)
    except UserError as error:
        remedy = f"move {file} away, and the peer starts from the swarm; or get it back from a copy"
        return wrong("checkpoint", str(error), remedy)
    if size > CHECKED_BYTES:
        return unknown("checkpoint", f"{readable_bytes(size)}; too large to read it whole here; its head is well")
    return ok("checkpoint", f"{readable_bytes(size)}, as it was written")


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = folder.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _written_per_s(path: Path) -> float:
    """Bytes/s of a file, synced. Raises OSError."""
    block = os.urandom(MiB)  # disks and file systems that compress would not write zeros
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(PROBE_FILE_BYTES // MiB):
            if file.write(block) < len(block):
                file.write(block)  # it raises what kept the first write short
        os.fsync(file.fileno())
    return PROBE_FILE_BYTES / (time.perf_counter() - began)


def _disk_remedy(error: OSError) -> str:
    match error.errno:
        case e if e in (ENOSPC, EDQUOT):
            return ROOM
        case e if e == EFBIG:
            return "raise the limit of a file's size: ulimit -f unlimited"
        case e if e in (EROFS, EACCES, EPERM):
            return "choose a --state-dir that this user can write, on a file system that is not mounted read-only"
    return "look at the disk (dmesg), or use another --state-dir"

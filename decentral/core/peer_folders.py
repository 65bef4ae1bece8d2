"""Find peers' state folders and their journals, and the newest of several copies of the same peer's folder.

Folders with the same `identity.key` belong to the same peer: one is a backup of the other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from decentral.core import foreign_file
from decentral.core.errors import UserError

KEY = "identity.key"
JOURNAL = "journal.jsonl"
CHECKPOINT = "checkpoint.safetensors"
MOST_KEY_BYTES = 64 * 1024  # a larger key file is refused; a key of 4,096 bits has 2.4 kB


def journals_in(folder: Path) -> list[Path]:
    """Return the journal in `folder` if it is a peer's state folder, else the journals of the state folders in it."""
    own = folder / JOURNAL
    try:
        return [own] if own.exists() else sorted(folder.glob(f"*/{JOURNAL}"))
    except OSError:  # such as a name that is too long
        return []


def state_folders(paths: Sequence[str]) -> list[Path]:
    """Return the peers' state folders among these paths and in these folders.

    Raises:
        UserError: If a path neither is nor has a state folder; the error names the flag --state-dir.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        here = [path] if (path / "run.json").exists() else sorted(run.parent for run in path.glob("*/run.json"))
        if not here:
            give = "give a state folder, or a folder of state folders"
            raise UserError(f"--state-dir {path} has no peer's state; {give}")
        found += here
    return found


def lock_holders(locks: Path = Path("/proc/locks")) -> dict[int, list[int]]:
    """Map the inode of each locked file of this machine to the process ids that hold a lock; {} except on Linux.

    The inode does not identify a file for certain: files in different file systems may have the same inode, and another
    user may make such a file on purpose. The function reads the locks from the file `locks` and takes none itself,
    because a peer that starts at the same time would believe that another peer uses its folder.
    """
    found: dict[int, list[int]] = {}
    try:
        for row in map(str.split, locks.read_text().splitlines()):
            if row[1:2] == ["FLOCK"]:
                found.setdefault(int(row[5].rsplit(":", 1)[1]), []).append(int(row[4]))
    except (OSError, ValueError, IndexError):
        return {}
    return found


def newest_of_each_peer(progress: Mapping[Path, float]) -> dict[Path, Path]:
    """Map each folder to the newest folder with the same identity key; the newest maps to itself.

    Args:
        progress: For each folder, a number that is larger for newer folders: steps, or Unix time of the last change.
    """
    newest: dict[bytes, Path] = {}
    for folder in sorted(progress, key=lambda folder: -progress[folder]):
        newest.setdefault(identity(folder), folder)
    return {folder: newest[identity(folder)] for folder in progress}


def changed_at(file: Path) -> float:
    """Return the Unix time of a file's last change; 0.0 if the file cannot be found."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def identity(folder: Path) -> bytes:
    """Return bytes that are the same in all copies of a peer's folder: its key, or the path if there is no key."""
    try:
        return foreign_file.read_bytes(folder / KEY, MOST_KEY_BYTES)
    except OSError:
        return str(folder.absolute()).encode()

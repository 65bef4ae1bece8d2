"""Peers' state folders beside each other, among which there may be a backup of one of them.

A folder is a peer's by its `identity.key`: a copy has the same one.
"""

from collections.abc import Mapping
from pathlib import Path

KEY = "identity.key"
JOURNAL = "journal.jsonl"


def journals_in(folder: Path) -> list[Path]:
    """Return the journal of a peer's state folder, or those of all state folders in a folder."""
    own = folder / JOURNAL
    return [own] if own.exists() else sorted(folder.glob(f"*/{JOURNAL}"))


def lock_holders() -> dict[int, int]:
    """Return the processes that have locked files, by the files' inodes, where the system tells (Linux).

    Nothing is locked to find out: a peer that starts at that moment would find its folder in use.
    """
    try:
        rows = [row.split() for row in Path("/proc/locks").read_text().splitlines()]
        return {int(row[5].rsplit(":", 1)[1]): int(row[4]) for row in rows if row[1:2] == ["FLOCK"]}
    except (OSError, ValueError, IndexError):
        return {}


def newest_of_each_peer(progress: Mapping[Path, float]) -> dict[Path, Path]:
    """Map each folder to the newest folder with the same identity key; the newest maps to itself.

    Args:
        progress: How far each folder has got, all in steps or all in times of the last change.
    """
    newest: dict[bytes, Path] = {}
    for folder in sorted(progress, key=lambda folder: -progress[folder]):
        newest.setdefault(identity(folder), folder)
    return {folder: newest[identity(folder)] for folder in progress}


def changed_at(file: Path) -> float:
    """Return when the file was changed last, Unix time; 0.0 if it is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def identity(folder: Path) -> bytes:
    """Return what a peer's folder and its copies have in common: the key; without a key that can be read, the path."""
    try:
        return (folder / KEY).read_bytes()
    except OSError:
        return str(folder.absolute()).encode()

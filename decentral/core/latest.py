"""Limit the size of dictionaries whose keys come from other peers, by deleting the oldest entries."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def keep_latest(entries: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Set `entries[key]` as the latest entry, and delete the oldest entries so that at most `most` entries remain."""
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > most:
        del entries[next(iter(entries))]

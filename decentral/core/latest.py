"""Dictionaries that others make grow, and that hold the latest entries only."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def keep_latest(entries: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Sets `entries[key]`, as the latest entry; of the entries, the latest `most` stay."""
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > most:
        del entries[next(iter(entries))]

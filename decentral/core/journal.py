"""`journal.jsonl`: the events of one peer, a line each, for people and for tools.

Every line is `{"t": unix seconds, "event": ..., ...}`; docs/PROTOCOL.md lists the events. A line is written
whole and flushed at once, so that after `kill -9` at most the last line is cut; readers skip a cut line.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from decentral.core import strict_json


class Journal:
    """Appends to one file. Not for use from several threads."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if cut:
            self._file.write("\n")  # a kill cut the last line: the next one starts on its own

    def write(self, event: str, **fields: Any) -> None:
        line = {"t": round(self._clock(), 3), "event": event, **fields}
        self._file.write(strict_json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Tail:
    """Follows a journal that somebody else writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0  # bytes that were read

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines written since the last call, oldest first. A line that is not at its end yet comes next time."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if (entry := _entry(line.decode(errors="replace"))) is not None:
                    yield entry


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal, oldest first; cut or garbled lines are skipped."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if (entry := _entry(line)) is not None:
                yield entry


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = strict_json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None

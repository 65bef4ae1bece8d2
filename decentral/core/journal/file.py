"""`journal.jsonl`: the events of one peer, a line each, for people and for tools.

Every line is `{"t": unix seconds, "event": ..., ...}`; docs/PROTOCOL.md lists the events. A line is written whole and
at once, so that after `kill -9` at most the last line is cut; readers skip a cut line.

A disk that refuses a line never stops the peer: the line is lost and counted, and the next one that the disk takes
comes after a `lost` line, which says how many there were and why. A file that is full becomes `journal-N.jsonl`, with N
one more than the last such file's, and the oldest of these files is deleted. The new file begins with a `continued`
line, which repeats what `started` said.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EDQUOT, EMFILE, ENFILE, ENOSPC
from pathlib import Path
from typing import IO

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.journal.events import ContinuedLine, JournalEvent, LostLine, StartedLine
from decentral.core.journal.lines import JOURNAL_LINES, name_of
from decentral.core.strict_json import JsonObject
from decentral.core.units import MiB

JOURNAL_FILE_BYTES = 32 * MiB  # of one file; some days of a peer with few partners
LONGEST_LINE_BYTES = 4 * MiB  # that is read; no event of a peer is nearly as long
JOURNAL_FILES_KEPT = 8  # besides the one that is written
PASSING = (ENOSPC, EDQUOT, EMFILE, ENFILE)  # the errors at the start after which a journal may be written later


class Journal:
    """Appends to one file, and rotates it. No error of the disk is raised. Not for use from several threads."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        file_bytes: int = JOURNAL_FILE_BYTES,
        files_kept: int = JOURNAL_FILES_KEPT,
    ) -> None:
        """Raises UserError where the file cannot be written at all; a full disk may have room later."""
        self.path, self.lost, self.reason = path, 0, ""
        self._clock, self._file_bytes, self._files_kept = clock, file_bytes, files_kept
        self._started: StartedLine | None = None
        self._lost_since = 0.0
        self._file: int | None = None
        self._size = 0  # bytes of the file that are whole lines
        self._begins = False  # whether the file still wants its first line
        self._cut = False  # whether a part of a line stands at its end
        try:
            self._open()
        except OSError as error:
            if error.errno not in PASSING:
                remedy = "move it away, or use another --state-dir"
                raise UserError(f"{path} cannot be written ({error.strerror}); {remedy}") from None

    @property
    def trouble(self) -> str:
        """Why lines are being lost at present, and how many were; "": none is."""
        return f"the journal cannot be written ({self.reason}): {self.lost} lines lost so far" if self.lost else ""

    def write(self, event: JournalEvent) -> None:
        """Append a line. One that the disk refuses is lost, and counted."""
        if isinstance(event, StartedLine):
            self._started = event
        try:
            line = self._line(event)
            self._make_room(len(line))
            self._append((self._note() if self.lost else b"") + line)
            self.lost, self.reason = 0, ""
        except OSError as error:
            self._lost_since = self._lost_since if self.lost else round(self._clock(), 3)
            self.lost, self.reason = self.lost + 1, error.strerror or type(error).__name__

    def close(self) -> None:
        """Closes the file. Lines that were lost since the last one are noted, if the disk has room."""
        if self.lost:
            with suppress(OSError):
                self._append(self._note())
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _note(self) -> bytes:
        """The line about lost ones."""
        return self._line(LostLine(lines=self.lost, since=self._lost_since, reason=self.reason))

    def _line(self, event: JournalEvent, name: str = "") -> bytes:
        """The line of an event, or one of another name that repeats its fields."""
        line = JOURNAL_LINES.line(round(self._clock(), 3), event)
        return strict_json.dumps(line | ({"event": name} if name else {})).encode() + b"\n"

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size
        self._cut = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"  # as a kill leaves it

    def _make_room(self, size: int) -> None:
        """Opens the file if it could not be opened before, and begins a new one if `size` more bytes are too many."""
        if self._file is None:
            self._open()
            self._begins = not self._size
        if self._size and self._size + size > self._file_bytes:
            self._rotate()
            self._begins = True
        if self._begins and self._started:
            self._append(self._line(self._started, name_of(ContinuedLine)))
            self._begins = False

    def _rotate(self) -> None:
        assert self._file is not None
        older = rotated(self.path)
        self.path.rename(_numbered(self.path, _number(self.path, older[-1]) + 1 if older else 1))
        os.close(self._file)
        self._file, self._begins = None, True
        for file in rotated(self.path)[: -self._files_kept]:
            file.unlink(missing_ok=True)
        self._open()

    def _append(self, data: bytes) -> None:
        """Writes all of it, or nothing and raises OSError."""
        assert self._file is not None
        left = data = b"\n" + data if self._cut else data
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            if len(left) < len(data):
                self._take_back()
            raise
        self._size, self._cut = self._size + len(data), False

    def _take_back(self) -> None:
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self._size, self._cut = os.fstat(self._file).st_size, True


def rotated(path: Path) -> list[Path]:
    """The files that this journal has filled and that are still kept, oldest first."""
    found = (file for file in path.parent.glob(f"{path.stem}-*{path.suffix}") if _number(path, file))
    return sorted(found, key=lambda file: _number(path, file))


def deleted(path: Path) -> int:
    """How many of the files that this journal has filled are no more there."""
    there = rotated(path)
    return _number(path, there[-1]) - len(there) if there else 0


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _number(path: Path, file: Path) -> int:
    """The number of a file that the journal has filled; 0 for any other."""
    found = re.fullmatch(rf"{re.escape(path.stem)}-([1-9][0-9]{{0,17}}){re.escape(path.suffix)}", file.name)
    return int(found[1]) if found else 0


class Tail:
    """Follows a journal that somebody else writes, from one file to the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0  # that the file which is being read has, or will have when it is full
        self._offset = 0  # bytes of it that were read

    def skip(self) -> None:
        """Passes over the lines that are there now."""
        older = rotated(self.path)
        self._number = _number(self.path, older[-1]) + 1 if older else 1
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def new(self) -> Iterator[JsonObject]:
        """The lines written since the last call, oldest first. A line that is not at its end yet comes next time."""
        for number, file in _opened(self.path):
            with file:
                if number < self._number:
                    continue
                if number > self._number:
                    self._number, self._offset = number, 0
                yield from self._rest(file)

    def _rest(self, file: IO[bytes]) -> Iterator[JsonObject]:
        file.seek(self._offset)
        for line, size in _lines(file):
            if not line.endswith(b"\n"):
                break
            self._offset += size
            if (entry := _entry(line)) is not None:
                yield entry


def read(path: Path) -> Iterator[JsonObject]:
    """The lines of a journal, oldest first, of all its files; cut or garbled lines are skipped."""
    for _, file in _opened(path):
        with file:
            yield from _entries(file)


def recent(path: Path, most_bytes: int) -> Iterator[JsonObject]:
    """The lines in the last bytes of the file that is being written, oldest first; none where it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END) > most_bytes:
            file.seek(-most_bytes, os.SEEK_END)
            next(_lines(file), None)  # a part of a line
        else:
            file.seek(0)
        yield from _entries(file)


def first(path: Path) -> Iterator[JsonObject]:
    """The first line of the file that is being written: of a full file's successor, it repeats `started`."""
    with suppress(OSError), path.open("rb") as file:
        if (entry := _entry(file.readline(LONGEST_LINE_BYTES))) is not None:
            yield entry


def _opened(path: Path) -> Iterator[tuple[int, IO[bytes]]]:
    """The journal's files that are there, oldest first, each with its number; the last one will have one more.

    The last one is opened first: were it to become full meanwhile, it would stand among the others as well.
    """
    while True:
        older = rotated(path)
        number = _number(path, older[-1]) + 1 if older else 1
        last = path.open("rb") if path.exists() else None
        if rotated(path)[-1:] == older[-1:]:
            break
        if last is not None:
            last.close()
    try:
        for one in older:
            with suppress(FileNotFoundError):  # it was the oldest, and is gone by now
                yield _number(path, one), one.open("rb")
        if last is not None:
            yield number, last
    finally:
        if last is not None:
            last.close()


def _entries(file: IO[bytes]) -> Iterator[JsonObject]:
    return (entry for line, _ in _lines(file) if (entry := _entry(line)) is not None)


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """The lines from here on, and the bytes that each takes in the file. Of too long a line only its end is given."""
    while line := file.readline(LONGEST_LINE_BYTES):
        size, part = len(line), line
        while not part.endswith(b"\n") and (part := file.readline(LONGEST_LINE_BYTES)):
            size, line = size + len(part), part[-1:]
        yield line, size


def _entry(line: bytes) -> JsonObject | None:
    try:
        entry = strict_json.loads(line.decode(errors="replace"))
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None

"""Write, read and follow a peer's journal, `journal.jsonl`, which has one line for each event.

Every line is `{"t": unix seconds, "event": ..., ...}`; docs/PROTOCOL.md lists the events. A line is written in one
piece, so that after `kill -9` at most the last line is cut; readers skip a cut line.

If the disk refuses a line, the line is lost and the peer keeps running. A `lost` line before the next line that the
disk stores says how many lines were lost and why. A full file is renamed to `journal-N.jsonl`, where N counts up from
1, and only the newest `JOURNAL_FILES_KEPT` full files are kept. The new file begins with a `continued` line, which
repeats the `started` line.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from errno import EDQUOT, EINVAL, EMFILE, ENFILE, ENOSPC
from pathlib import Path
from typing import IO

from decentral.core import foreign_file, strict_json
from decentral.core.errors import UserError
from decentral.core.journal.events import ContinuedLine, JournalEvent, LostLine, StartedLine
from decentral.core.journal.lines import JOURNAL_LINES, name_of
from decentral.core.strict_json import JsonObject
from decentral.core.units import MiB

JOURNAL_FILE_BYTES = 32 * MiB  # a file of this size is full; a peer with few partners fills one in a few days
MOST_READ_BYTES = 4 * JOURNAL_FILE_BYTES  # readers refuse a larger file, which no peer has written
LONGEST_LINE_BYTES = 4 * MiB  # readers skip longer lines; the longest lines that peers write are much shorter
JOURNAL_FILES_KEPT = 8  # beside the current file, this many full files are kept; older files are deleted
PASSING = (ENOSPC, EDQUOT, EMFILE, ENFILE)  # errors that may pass: a full disk or quota, too many open files


class Journal:
    """A peer's journal, opened for appending. It rotates its files. Once it is open, disk errors raise no exception.

    Not thread-safe. `lost` is the number of lines that the disk has refused since it last stored a line.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        file_bytes: int = JOURNAL_FILE_BYTES,
        files_kept: int = JOURNAL_FILES_KEPT,
    ) -> None:
        """Open the journal at `path`.

        Args:
            path: The journal's file; it need not exist.
            clock: Returns Unix time, seconds.
            file_bytes: Size at which a file is full.
            files_kept: Number of full files to keep.

        Raises:
            UserError: If the file cannot be opened, unless the disk is full or too many files are open.
        """
        self.path, self.lost, self.reason = path, 0, ""
        self._clock, self._file_bytes, self._files_kept = clock, file_bytes, files_kept
        self._started: StartedLine | None = None
        self._lost_since = 0.0
        self._file: int | None = None
        self._size = 0
        self._begins = False  # whether the file still needs a `continued` line as its first line
        self._cut = False  # whether the file ends with an incomplete line
        try:
            self._open()
        except OSError as error:
            if error.errno not in PASSING:
                remedy = "move it away, or use another --state-dir"
                raise UserError(f"{path} cannot be written ({error.strerror}); {remedy}") from None

    @property
    def trouble(self) -> str:
        """A sentence with the disk's error and the number of lines lost so far; "" if the disk stored the last line."""
        return f"the journal cannot be written ({self.reason}); lines lost so far: {self.lost}" if self.lost else ""

    def write(self, event: JournalEvent) -> None:
        """Append the line of an event. If the disk refuses the line, count the line as lost."""
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
        """Close the file. If lines were lost and the disk has room, write a `lost` line first."""
        if self.lost:
            with suppress(OSError):
                self._append(self._note())
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _note(self) -> bytes:
        """Return the `lost` line."""
        return self._line(LostLine(lines=self.lost, since=self._lost_since, reason=self.reason))

    def _line(self, event: JournalEvent, name: str = "") -> bytes:
        """Return the line of an event. If `name` is given, the line has `name` in place of the event's name."""
        line = JOURNAL_LINES.line(round(self._clock(), 3), event)
        return strict_json.dumps(line | ({"event": name} if name else {})).encode() + b"\n"

    def _open(self) -> None:
        if self.path.is_fifo():  # a write to a named pipe would wait for a reader
            raise OSError(EINVAL, "expected a file; it is a pipe", str(self.path))
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size
        self._cut = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def _make_room(self, size: int) -> None:
        """Open the file if it is not open, and begin a new file if `size` more bytes would make this file too large."""
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
        """Append all of the data, or raise OSError and append nothing."""
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
    """Return the journal's full files that still exist, oldest first."""
    found = (file for file in path.parent.glob(f"{path.stem}-*{path.suffix}") if _number(path, file))
    return sorted(found, key=lambda file: _number(path, file))


def deleted(path: Path) -> int:
    """Return how many of the journal's full files have been deleted."""
    there = rotated(path)
    return _number(path, there[-1]) - len(there) if there else 0


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _number(path: Path, file: Path) -> int:
    """Return the number N of a full file `journal-N.jsonl`; 0 for any other file."""
    found = re.fullmatch(rf"{re.escape(path.stem)}-([1-9][0-9]{{0,17}}){re.escape(path.suffix)}", file.name)
    return int(found[1]) if found else 0


class Tail:
    """A reader of a journal that another process is still writing. After a full file, it reads the next file."""

    def __init__(self, path: Path) -> None:
        """Start at the journal's oldest line. The journal need not exist yet."""
        self.path = path
        self._number = 0  # N of the file being read, journal-N.jsonl; for journal.jsonl, the N of its later name
        self._offset = 0

    def skip(self) -> None:
        """Skip all lines that the journal has now, so that only later lines are read."""
        older = rotated(self.path)
        self._number = _number(self.path, older[-1]) + 1 if older else 1
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def new(self) -> Iterator[JsonObject]:
        """Yield the lines written since the previous call, oldest first, without an unfinished last line.

        Raises:
            UserError: If a file of the journal cannot be read.
        """
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
    """Yield the lines of all files of a journal, oldest first, without lines that are cut or not valid JSON.

    Raises:
        UserError: If a file of the journal cannot be read.
    """
    for _, file in _opened(path):
        with file:
            yield from _entries(file)


def recent(path: Path, most_bytes: int) -> Iterator[JsonObject]:
    """Yield the whole lines in the last `most_bytes` bytes of a journal, oldest first, also of its full files.

    A file that cannot be read is left out, and so are older ones.
    """
    left, begins = most_bytes, list[tuple[IO[bytes], int]]()
    with ExitStack() as stack, suppress(OSError):
        with suppress(OSError, UserError):
            older, last = _listed(path)
            for file in itertools.chain([last] if last else [], (_readable(one) for one in reversed(older))):
                stack.enter_context(file)
                size = file.seek(0, os.SEEK_END)
                begins.append((file, max(0, size - left)))
                if (left := left - size) <= 0:
                    break
        for file, begin in reversed(begins):
            file.seek(begin)
            if begin:
                next(_lines(file), None)  # skip the rest of a line whose beginning was not read
            yield from _entries(file)


def first(path: Path) -> Iterator[JsonObject]:
    """Yield the first line of the journal's current file, if it can be read: a `started` or `continued` line."""
    with suppress(OSError), foreign_file.opened(path, MOST_READ_BYTES) as file:
        if (entry := _entry(file.readline(LONGEST_LINE_BYTES))) is not None:
            yield entry


def _opened(path: Path) -> Iterator[tuple[int, IO[bytes]]]:
    """Open all files of a journal, and yield each file's number and the file, oldest first.

    The current file gets the number that it will have when it is full.
    """
    older, last = _listed(path)
    try:
        for one in older:
            with suppress(FileNotFoundError):  # the writer may have deleted the oldest file meanwhile
                yield _number(path, one), _readable(one)
        if last is not None:
            yield _number(path, older[-1]) + 1 if older else 1, last
    finally:
        if last is not None:
            last.close()


def _listed(path: Path) -> tuple[list[Path], IO[bytes] | None]:
    """Return the paths of a journal's full files, oldest first, and the current file, open; None if there is none.

    The current file is opened first, because a writer may rename it while the older files are listed.
    """
    while True:
        older = rotated(path)
        last = _readable(path) if path.exists() else None
        if rotated(path)[-1:] == older[-1:]:
            return older, last
        if last is not None:
            last.close()


def _readable(path: Path) -> IO[bytes]:
    """Open a file of a journal. Raises FileNotFoundError if the file is missing, UserError if it cannot be read."""
    try:
        return foreign_file.opened(path, MOST_READ_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); omit its folder") from None


def _entries(file: IO[bytes]) -> Iterator[JsonObject]:
    return (entry for line, _ in _lines(file) if (entry := _entry(line)) is not None)


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield (line, size of the line in bytes) for each line from the current position on.

    For a line longer than LONGEST_LINE_BYTES, only the line's last byte is yielded, with the size of the whole line.
    """
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

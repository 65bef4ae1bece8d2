"""Read the page's lines from journals on this machine and from a parent process.

The first call of a source's `lines()` yields all lines of the journals, so that the page shows what happened before it
was opened. Later calls yield new lines. Lines that cannot be parsed are left out. Start reading at `LineSource`.
"""

import heapq
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from decentral.core import foreign_file, received, strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.journal.events import PeerFacts
from decentral.core.journal.file import Tail
from decentral.core.journal.lines import Recorded, recorded
from decentral.core.peer_folders import changed_at, journals_in, lock_holders, newest_of_each_peer
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import JsonObject
from decentral.core.units import KiB, MiB
from decentral.view.page.source_lines import PAGE_LINES, MissedLine, Told

MOST_JOURNALS = 4096  # at most this many journals are read; others are ignored
MOST_LINE_BYTES = 256 * KiB  # a longer line from the parent process is dropped
MOST_RUN_BYTES = 64 * KiB  # a larger run.json is not read; a peer writes at most 10 KiB
READ_BYTES = 1 * MiB


class LineSource(Protocol):
    """Interface of a source of the page's lines; implemented by JournalFolder, ParentFeed and Visitor."""

    def lines(self) -> Iterator[Told]:
        """Yield (peer, line) for each line written since the last call, in the order of the lines' times."""

    @property
    def over(self) -> bool:
        """Whether the source has ended, so that no more lines can come."""


class FollowedJournal:
    """A journal that the page reads, the id of the peer that writes it, and whether the peer's process still runs."""

    def __init__(self, path: Path) -> None:
        """Prepare to read the journal at this path from its beginning."""
        self._tail, self._peer, self._t = Tail(path), PeerId(""), 0.0
        self._lock = path.parent / "lock"
        self._unlocked: int | None = None  # number of reads since a process last held the lock; None: none ever held it

    def lines(self, locks: Collection[int]) -> Iterator[Told]:
        """Yield the new lines, and a MissedLine when the process that writes the journal has ended.

        The process counts as ended at the second call in a row that finds no process with the journal's lock. By then,
        all its lines have been read, and also lines of other peers that say why the peer left.

        Args:
            locks: Inodes of the files that processes hold locked now.
        """
        if self._inode() in locks:
            self._unlocked = 0
        elif self._unlocked is not None:
            self._unlocked += 1
        with suppress(OSError, UserError):  # unreadable journal, or no free file descriptor: try again later
            for line in recorded(self._tail.new()):
                self._t = line.t
                if isinstance(line.event, PeerFacts):
                    self._peer = line.event.peer
                if self._peer:
                    yield self._peer, line
        if self._unlocked == 2 and self._peer:
            gone = MissedLine(peer=self._peer, reason="its process is gone", certain=True)
            yield self._peer, Recorded(self._t, gone)

    def _inode(self) -> int:
        try:
            return self._lock.stat().st_ino
        except OSError:
            return 0


class JournalFolder:
    """Source of the lines of all journals in a state folder, or in a folder of state folders; it finds new journals."""

    over = False  # never ends, because a stopped peer may start again at any time

    def __init__(self, path: Path) -> None:
        """Prepare to read the journals in this folder."""
        self.path = path
        self._followed: dict[Path, FollowedJournal] = {}
        self._seen: set[Path] = set()  # journals found so far, even older copies that are not read

    def lines(self) -> Iterator[Told]:
        """Return the new lines of all journals, in the order of their times."""
        locks = lock_holders().keys()
        with suppress(OSError):  # too many open files; the next call finds the journals
            self._follow_new([journal for journal in journals_in(self.path) if journal not in self._seen])
        each = (followed.lines(locks) for followed in self._followed.values())
        return heapq.merge(*each, key=lambda told: told[1].t)

    def facts(self) -> JsonObject:
        """Return the run's name and settings from the first readable `run.json`; {} if no `run.json` can be read."""
        with suppress(OSError):
            for journal in journals_in(self.path):
                with suppress(OSError, ValueError, KeyError, TypeError, UserError):
                    kept = strict_json.loads(foreign_file.read_text(journal.parent / "run.json", MOST_RUN_BYTES))
                    return {"run": plain_text(str(kept["run"])), **received.received(kept["config"]).facts()}
        return {}

    def _follow_new(self, found: Sequence[Path]) -> None:
        """Start to read these journals. If several folders are copies of one peer's folder, only the newest is read."""
        if not found:
            return
        known = {journal.parent: math.inf for journal in self._followed}
        newest = newest_of_each_peer(known | {journal.parent: changed_at(journal) for journal in found})
        self._seen.update(found)
        for journal in found:
            if newest[journal.parent] == journal.parent and len(self._followed) < MOST_JOURNALS:
                self._followed[journal] = FollowedJournal(journal)


class ParentFeed:
    """Source of the lines that the parent process writes to a pipe, as one JSON array [peer, line] per line of text."""

    def __init__(self, descriptor: int) -> None:
        """Prepare to read from this file descriptor without blocking."""
        self._descriptor, self._rest, self.over = descriptor, b"", False
        os.set_blocking(descriptor, False)

    def lines(self) -> Iterator[Told]:
        """Read up to READ_BYTES and yield the complete lines. Set `over` if the parent has closed the pipe."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        self.over = not data
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest = b""
        for told in whole:
            with suppress(ValueError):
                match strict_json.loads(told):
                    case [str(peer), dict(line)] if (found := PAGE_LINES.parse(line)) is not None:
                        yield peer, found

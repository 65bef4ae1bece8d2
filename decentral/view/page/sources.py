"""Where the page's lines come from: journals on this machine, a parent process, or both.

A source has `lines()`: what is new since the last call, as (peer, line) in the order of the lines' times. All that a
journal has is taken once, so the page shows history from before it was opened. Lines that cannot be read are left out.
"""

import heapq
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from decentral.core import received, strict_json
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

MOST_JOURNALS = 4096
MOST_LINE_BYTES = 256 * KiB  # from a parent process; a longer line is skipped
READ_BYTES = 1 * MiB  # from a parent process at once


class LineSource(Protocol):
    """Lines about the swarm, and whether there can be more."""

    def lines(self) -> Iterator[Told]: ...

    @property
    def over(self) -> bool: ...


class FollowedJournal:
    """One journal: whose it is, as its first line says, and whether the process that writes it has ended."""

    def __init__(self, path: Path) -> None:
        self._tail, self._peer, self._t = Tail(path), PeerId(""), 0.0
        self._lock = path.parent / "lock"
        self._unlocked: int | None = None  # for so many looks nobody has had the lock; None: nobody ever had

    def lines(self, locks: Collection[int]) -> Iterator[Told]:
        """`locks`: those that processes had when the look began. A process is said to have ended at the second look
        without its lock, when all that it wrote was read, and those who know more have said it."""
        if self._inode() in locks:
            self._unlocked = 0
        elif self._unlocked is not None:
            self._unlocked += 1
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
    """The journals of a peer's state folder, or of all state folders in a folder; new ones are found as they come."""

    over = False  # a peer may go on at any time

    def __init__(self, path: Path) -> None:
        self.path = path
        self._followed: dict[Path, FollowedJournal] = {}
        self._seen: set[Path] = set()  # journals that are followed, or are copies of one that is

    def lines(self) -> Iterator[Told]:
        locks = lock_holders().keys()
        self._follow_new([journal for journal in journals_in(self.path) if journal not in self._seen])
        each = (followed.lines(locks) for followed in self._followed.values())
        return heapq.merge(*each, key=lambda told: told[1].t)

    def facts(self) -> JsonObject:
        """What is known of the run, from the first state folder that has its config; {} if none has."""
        for journal in journals_in(self.path):
            with suppress(OSError, ValueError, KeyError, TypeError, UserError):
                kept = strict_json.loads((journal.parent / "run.json").read_text())
                return {"run": plain_text(str(kept["run"])), **received.received(kept["config"]).facts()}
        return {}

    def _follow_new(self, found: Sequence[Path]) -> None:
        """Follow these journals, except those in copies of a peer's folder that are older than its own."""
        if not found:
            return
        known = {journal.parent: math.inf for journal in self._followed}
        newest = newest_of_each_peer(known | {journal.parent: changed_at(journal) for journal in found})
        self._seen.update(found)
        for journal in found:
            if newest[journal.parent] == journal.parent and len(self._followed) < MOST_JOURNALS:
                self._followed[journal] = FollowedJournal(journal)


class ParentFeed:
    """What the process that has started this one writes: a JSON array [peer, line] in each line of text."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest, self.over = descriptor, b"", False
        os.set_blocking(descriptor, False)

    def lines(self) -> Iterator[Told]:
        """At most READ_BYTES of them; `over` once the parent has closed its end."""
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

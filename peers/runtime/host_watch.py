"""Collect the troubles of this machine (such as a full disk), to show them live and, less often, in the journal.

The journal gets a line when a trouble begins. Repetitions are counted, and their number is written at most once in
REPEAT_S. A trouble that has not occurred for REPEAT_S is over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core.journal.events import REPEAT_S, ErrorLine
from decentral.core.journal.file import Journal
from decentral.core.units import Seconds


@dataclass(slots=True)
class Trouble:
    """The latest occurrence of one kind of trouble, and when the journal last got a line about this kind (`said_at`).

    `unsaid` is the number of occurrences since that line.
    """

    text: str
    last_at: Seconds
    said_at: Seconds
    unsaid: int = 0


@dataclass(slots=True)
class HostWatch:
    """The table of one machine's troubles, with one entry per kind."""

    journal: Journal
    now: Callable[[], Seconds]
    _noted: dict[str, Trouble] = field(default_factory=dict)

    def note(self, kind: str, text: str) -> None:
        """Record that a trouble occurs now; write it to the journal if its last line there is at least REPEAT_S old.

        Args:
            kind: Names the trouble; calls with the same `kind` count as repetitions of one trouble.
            text: Describes the trouble for the user.
        """
        now, known = self.now(), self._noted.get(kind)
        if known is None or now > known.last_at + REPEAT_S:
            self._noted[kind] = Trouble(text, now, now)
            self.journal.write(ErrorLine(reason=text))
            return
        known.text, known.last_at, known.unsaid = text, now, known.unsaid + 1
        if now >= known.said_at + REPEAT_S:
            self.journal.write(ErrorLine(reason=text, times=known.unsaid))
            known.said_at, known.unsaid = now, 0

    def present(self) -> list[str]:
        """Return the latest text of each trouble that has occurred within REPEAT_S."""
        now = self.now()
        return [trouble.text for trouble in self._noted.values() if now <= trouble.last_at + REPEAT_S]

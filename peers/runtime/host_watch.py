"""What is wrong with this machine at present: for the journal, a line now and then, and for the view.

The journal has a line when a trouble begins, and with each repetition that comes REPEAT_S or more after the last line,
with the number of times that it happened meanwhile. What has not happened for as long is over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core.journal.events import ErrorLine
from decentral.core.journal.file import Journal
from decentral.core.units import Seconds

REPEAT_S = 60.0


@dataclass(slots=True)
class Trouble:
    """Something that goes wrong again and again."""

    text: str
    last_at: Seconds
    said_at: Seconds
    unsaid: int = 0  # times that it happened since the last line


@dataclass(slots=True)
class HostWatch:
    """Notes troubles by their kind. The kinds are few: each is a word of the code that notes it."""

    journal: Journal
    now: Callable[[], Seconds]
    _noted: dict[str, Trouble] = field(default_factory=dict)

    def note(self, kind: str, text: str) -> None:
        """It happened now."""
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
        """The troubles that are not over."""
        now = self.now()
        return [trouble.text for trouble in self._noted.values() if now <= trouble.last_at + REPEAT_S]

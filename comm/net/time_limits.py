"""A time limit that many questions have, with one timer for the oldest of them instead of one for each."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from decentral.core.agenda import Agenda
from decentral.core.units import Seconds


class Limited(Protocol):
    @property
    def done(self) -> bool:
        """Whether the limit no longer matters."""
        ...

    def late(self) -> None: ...


@dataclass(slots=True)
class TimeLimit:
    """Calls `late` of each watched thing that is not done `lasts_s` after `watch`."""

    agenda: Agenda
    lasts_s: Seconds
    _due: deque[tuple[Seconds, Limited]] = field(default_factory=deque)
    _armed: bool = False

    def watch(self, limited: Limited) -> None:
        self._due.append((self.agenda.now + self.lasts_s, limited))
        self._drop_done()
        self._arm()

    def _look(self) -> None:
        self._armed = False
        self._drop_done()
        while self._due and self._due[0][0] <= self.agenda.now:
            self._due.popleft()[1].late()
            self._drop_done()
        self._arm()

    def _drop_done(self) -> None:
        while self._due and self._due[0][1].done:
            self._due.popleft()

    def _arm(self) -> None:
        if self._due and not self._armed:
            self._armed = True
            self.agenda.at(self._due[0][0], self._look)

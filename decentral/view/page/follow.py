"""Update the page's view of the swarm: read all old lines of the page's sources, then new lines once a second."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentral.core.units import Seconds
from decentral.view.page.source_lines import NowLine, PageLine
from decentral.view.page.sources import JournalFolder, LineSource
from decentral.view.page.swarm_hooks import SwarmHooks
from decentral.view.page.swarm_view import SwarmView

UPDATE_S = 1.0
FRESH_LINE_S = 60.0  # a line counts as new if its time differs from this machine's clock by less than this
LINES_AT_ONCE = 2000  # after this many lines, reading pauses, so that the event loop can answer browsers


@dataclass(slots=True)
class SwarmTime:
    """The clock of the swarm, computed from the times in the journal lines that the page reads.

    The swarm's clock may differ from this machine's clock. The newest line that is written while the page runs shows
    the difference. In a simulation, and in a run that is over, the clock stands at the time of the newest line.
    """

    wall: Callable[[], Seconds]  # returns this machine's Unix time
    virtual: bool = False
    _ahead_s: Seconds | None = None  # the swarm's clock minus this machine's clock; None before the first new line
    _newest: Seconds = 0.0

    def saw(self, line: PageLine, live: bool) -> None:
        """Update the clock from the time of a line.

        Args:
            line: The line.
            live: Whether the line was written since the last update. If True, its time is taken as the present time.
        """
        self.virtual = self.virtual or isinstance(line.event, NowLine)
        if line.t > self._newest:
            self._newest = line.t
            if live or abs(line.t - self.wall()) < FRESH_LINE_S:
                self._ahead_s = line.t - self.wall()

    @property
    def past(self) -> bool:
        """Whether all lines so far are old, so that the run is probably over; always False in a simulation."""
        return self._ahead_s is None and not self.virtual

    def now(self) -> Seconds:
        """Return the swarm's present time, in Unix seconds."""
        if self.virtual or self._ahead_s is None:
            return self._newest
        return self.wall() + self._ahead_s


@dataclass(slots=True)
class PageFollower:
    """The loop that reads all sources into a view of the swarm, and tells hooks what is new."""

    sources: Sequence[LineSource]
    time: SwarmTime
    view: SwarmView = field(default_factory=SwarmView)
    hooks: SwarmHooks | None = None

    async def run(self, publish: Callable[[], None]) -> None:
        """Update the view once a second, and call `publish` after each update, until one of the sources has ended."""
        live = False
        while True:
            self._name_run()
            for source in self.sources:
                await self.take(source, live)
            self.view.tick(self.time.now())
            self.view.facts["past"] = self.time.past
            over = any(source.over for source in self.sources)
            self.view.facts["over"] = over
            publish()
            if over:
                return
            live = True
            await asyncio.sleep(UPDATE_S)

    async def take(self, source: LineSource, live: bool) -> None:
        """Read all new lines of one source into the view.

        Args:
            source: The source.
            live: Whether the lines were written since the last update. If False, the lines tell the past, and the
                swarm's totals are computed once for each time bucket of the charts.
        """
        ticked = 0.0
        for count, (peer, line) in enumerate(source.lines()):
            self.time.saw(line, live)
            self.view.take(peer, line)
            if self.hooks is not None:
                self.hooks.take(peer, line, live and line.t > self.time.now() - FRESH_LINE_S)
            if not live and self.view.now >= ticked + self.view.timeline.width_s:
                self.view.tick(self.view.now)
                ticked = self.view.now
            if count % LINES_AT_ONCE == LINES_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _name_run(self) -> None:
        """If the view has no name and settings of the run yet, read them from a source's folder of journals."""
        for source in self.sources:
            if isinstance(source, JournalFolder) and "run" not in self.view.facts:
                self.view.learn(source.facts())

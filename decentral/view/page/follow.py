"""Follows the sources of the page: history as fast as it can be read, then what is new, once a second."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentral.core.units import Seconds
from decentral.view.page.source_lines import NowLine, PageLine
from decentral.view.page.sources import JournalFolder, LineSource
from decentral.view.page.swarm_view import SwarmView

UPDATE_S = 1.0
FRESH_LINE_S = 60.0  # a line that is older says nothing of what time it is now
LINES_AT_ONCE = 2000  # between two chances for the server to answer


@dataclass(slots=True)
class SwarmTime:
    """The time that the swarm's lines are written by.

    The swarm's clock may be another than this machine's: from a fresh line on, that line's time counts, and goes on as
    this machine's does. The simulator's is virtual. Of a run that is over, time has stopped with its last line.
    """

    wall: Callable[[], Seconds]
    virtual: bool = False
    _ahead_s: Seconds | None = None  # None: there was no fresh line
    _newest: Seconds = 0.0

    def saw(self, line: PageLine, live: bool) -> None:
        """`live`: it was written since the last look."""
        self.virtual = self.virtual or isinstance(line.event, NowLine)
        if line.t > self._newest:
            self._newest = line.t
            if live or abs(line.t - self.wall()) < FRESH_LINE_S:
                self._ahead_s = line.t - self.wall()

    @property
    def past(self) -> bool:
        """Whether all lines so far are history."""
        return self._ahead_s is None and not self.virtual

    def now(self) -> Seconds:
        if self.virtual or self._ahead_s is None:
            return self._newest
        return self.wall() + self._ahead_s


@dataclass(slots=True)
class PageFollower:
    sources: Sequence[LineSource]
    time: SwarmTime
    view: SwarmView = field(default_factory=SwarmView)

    async def run(self, publish: Callable[[], None]) -> None:
        """Calls `publish` after each update. Returns when a source is over."""
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
        """Of history, the totals are taken as often as the grid of the timeline has buckets."""
        ticked = 0.0
        for count, (peer, line) in enumerate(source.lines()):
            self.time.saw(line, live)
            self.view.take(peer, line)
            if not live and self.view.now >= ticked + self.view.timeline.width_s:
                self.view.tick(self.view.now)
                ticked = self.view.now
            if count % LINES_AT_ONCE == LINES_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _name_run(self) -> None:
        for source in self.sources:
            if isinstance(source, JournalFolder) and "run" not in self.view.facts:
                self.view.learn(source.facts())

"""What a run's journals tell: each peer's steps, exchanges, lives and events, as columns over time.

Whoever sends us their journals may write anything into them. A line that no peer writes is counted as `bad`; texts are
escaped where they are shown.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from decentral.core.ids import short
from decentral.core.journal import events as journal
from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.journal.file import read
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.journal.peer_totals import Life, PeerTotals
from decentral.core.strict_json import JsonFields
from decentral.core.units import Seconds
from decentral.scheduler.topology.arrays import Floats

MOST_EVENTS = 2000  # of one peer, the latest


@dataclass(slots=True)
class Column:
    """Numbers over time: `t` in Unix seconds, never falling."""

    t: "array[float]" = field(default_factory=lambda: array("d"))
    value: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, t: Seconds, value: float) -> None:
        self.t.append(max(t, self.t[-1]) if self.t else t)
        self.value.append(value)

    def at(self, times: Floats) -> Floats:
        """The value at these times, on straight lines between those that are known; 0 before the first."""
        if not self.t:
            return np.zeros(len(times))
        return np.asarray(np.interp(times, np.asarray(self.t), np.asarray(self.value), left=0.0))


@dataclass(slots=True)
class PeerHistory:
    """All that one peer's journal tells. The columns of tokens and bytes are totals over its lives."""

    folder: str
    totals: PeerTotals = field(default_factory=PeerTotals)
    tokens: Column = field(default_factory=Column)
    losses: Column = field(default_factory=Column)  # of the steps since the line before
    held_out: Column = field(default_factory=Column)
    sent: Column = field(default_factory=Column)
    received: Column = field(default_factory=Column)
    exchanges: "dict[str, array[float]]" = field(default_factory=lambda: {one: array("d") for one in OUTCOMES})  # when
    events: list[tuple[Seconds, str, str]] = field(default_factory=list)  # when, what, and what people are told
    bad: int = 0  # lines that could not be read

    @property
    def facts(self) -> journal.PeerFacts:
        return self.totals.facts

    @property
    def name(self) -> str:
        return short(self.facts.peer) if self.facts.peer else self.folder

    @property
    def lives(self) -> list[Life]:
        return self.totals.lives

    @property
    def began(self) -> Seconds:
        return self.lives[0].began if self.lives else 0.0

    @property
    def last(self) -> Seconds:
        return max((life.last for life in self.lives), default=0.0)

    @property
    def lived_s(self) -> Seconds:
        return sum(life.last - life.began for life in self.lives)

    def take(self, line: JsonFields) -> None:
        """Take a line of the journal, in their order."""
        found = JOURNAL_LINES.parse(line)
        if found is None:
            self.bad += 1
            return
        starts = self.totals.starts
        self.totals.take(found.t, found.event)
        if self.totals.starts > starts:
            self._add_totals(found.t)
        if found.event is not None:
            self._draw(found.t, found.event)

    def _draw(self, t: Seconds, event: journal.JournalEvent) -> None:
        match event:
            case journal.StepLine():
                self.tokens.add(t, self.totals.tokens)
                if event.loss is not None:
                    self.losses.add(t, event.loss)
            case journal.EvalLine():
                self.held_out.add(t, event.loss)
            case journal.ExchangeLine():
                self.exchanges[event.outcome].append(t)
            case journal.TrafficLine():
                self._add_totals(t)
        level, words = journal.told(event) or ("", "")
        if level in (journal.WARNING, journal.BAD) or isinstance(event, journal.PlanLine | journal.MoveLine):
            self.events.append((t, JOURNAL_LINES.name(event), words))
            del self.events[:-MOST_EVENTS]

    def _add_totals(self, t: Seconds) -> None:
        earlier, work = self.totals.earlier, self.totals.work
        self.tokens.add(t, self.totals.tokens)
        self.sent.add(t, earlier.sent_bytes + work.sent_bytes)
        self.received.add(t, earlier.received_bytes + work.received_bytes)


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The histories of a run's peers, oldest first."""

    peers: Sequence[PeerHistory]

    @property
    def began(self) -> Seconds:
        return min((peer.began for peer in self.peers if peer.lives), default=0.0)

    @property
    def last(self) -> Seconds:
        return max((peer.last for peer in self.peers), default=0.0)

    @property
    def tokens(self) -> int:
        return sum(peer.totals.tokens for peer in self.peers)

    def tokens_at(self, times: Floats) -> Floats:
        """The tokens that all peers together had trained at these times."""
        return np.asarray(np.sum([peer.tokens.at(times) for peer in self.peers], axis=0))


def history_of(journals: Iterable[tuple[str, Path]]) -> RunHistory:
    """Reads journals; each has a name, for a peer whose journal does not tell its id."""
    peers = []
    for name, path in journals:
        peer = PeerHistory(name)
        for line in read(path):
            peer.take(line)
        if peer.lives:
            peers.append(peer)
    return RunHistory(sorted(peers, key=lambda peer: (peer.began, peer.folder)))

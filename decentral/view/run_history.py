"""Read the journals of a run into time series of each peer: tokens, losses, traffic, exchanges and events.

Start reading at `history_of`. A journal may come from an untrusted peer. Malformed lines are counted in `bad` and
otherwise ignored. The code that shows texts escapes them.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from decentral.core.journal import events as journal
from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.journal.file import read
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.journal.peer_totals import Life, PeerTotals
from decentral.core.peer_names import titled
from decentral.core.strict_json import JsonFields
from decentral.core.units import Seconds
from decentral.scheduler.topology.arrays import Floats

MOST_EVENTS = 2000  # at most this many events of a peer are kept; older ones are dropped to save memory


@dataclass(slots=True)
class Column:
    """A time series; `t` is in Unix seconds and never decreases."""

    t: "array[float]" = field(default_factory=lambda: array("d"))
    value: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, t: Seconds, value: float) -> None:
        """Append a value. If `t` is before the time of the last value, the time of the last value is used."""
        self.t.append(max(t, self.t[-1]) if self.t else t)
        self.value.append(value)

    def at(self, times: Floats) -> Floats:
        """Return interpolated values at these times; 0 before the first value, constant after the last value."""
        if not self.t:
            return np.zeros(len(times))
        return np.asarray(np.interp(times, np.asarray(self.t), np.asarray(self.value), left=0.0))


@dataclass(slots=True)
class PeerHistory:
    """The history of one peer, from its journal. Tokens and bytes are totals since the peer's first start."""

    folder: str  # name of the journal's folder, shown if the peer's id is unknown
    totals: PeerTotals = field(default_factory=PeerTotals)
    tokens: Column = field(default_factory=Column)
    losses: Column = field(default_factory=Column)  # one mean training loss for each journal line about steps
    held_out: Column = field(default_factory=Column)
    sent: Column = field(default_factory=Column)
    received: Column = field(default_factory=Column)
    # Outcome -> the Unix time at which each exchange with this outcome ended.
    exchanges: "dict[str, array[float]]" = field(default_factory=lambda: {one: array("d") for one in OUTCOMES})
    events: list[tuple[Seconds, str, str]] = field(default_factory=list)  # (Unix time, name, text) of the main events
    bad: int = 0  # number of malformed lines

    @property
    def facts(self) -> journal.PeerFacts:
        """The peer's id, device, layers and other properties, as at its last start."""
        return self.totals.facts

    @property
    def name(self) -> str:
        """End of the id and name of the peer, or the name of its folder if the id is not known."""
        return titled(self.facts.peer, self.facts.name) if self.facts.peer else self.folder

    @property
    def lives(self) -> list[Life]:
        """Lives of the peer, oldest first. A life lasts from a start to the last journal line before the next start."""
        return self.totals.lives

    @property
    def began(self) -> Seconds:
        """Unix time of the first start; 0.0 if the peer has never started."""
        return self.lives[0].began if self.lives else 0.0

    @property
    def last(self) -> Seconds:
        """Unix time of the last journal line; 0.0 if the peer has never started."""
        return max((life.last for life in self.lives), default=0.0)

    @property
    def lived_s(self) -> Seconds:
        """Seconds that the peer ran, over all its lives."""
        return sum(life.last - life.began for life in self.lives)

    def take(self, line: JsonFields) -> None:
        """Add the next line of the journal; count a malformed line in `bad`."""
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
    """The histories of a run's peers, in the order of their first starts."""

    peers: Sequence[PeerHistory]

    @property
    def began(self) -> Seconds:
        """Unix time of the first start of any peer; 0.0 if no peer has started."""
        return min((peer.began for peer in self.peers if peer.lives), default=0.0)

    @property
    def last(self) -> Seconds:
        """Unix time of the last journal line of any peer; 0.0 if no peer has started."""
        return max((peer.last for peer in self.peers), default=0.0)

    @property
    def tokens(self) -> int:
        """Tokens that all peers together trained."""
        return sum(peer.totals.tokens for peer in self.peers)

    def ran_s(self, times: Floats) -> Floats:
        """Return for how many seconds at least one peer ran before each of these Unix times."""
        edges, ran = [0.0], [0.0]
        for begin, end in sorted((life.began, life.last) for peer in self.peers for life in peer.lives):
            if end > edges[-1]:
                edges += [max(begin, edges[-1]), end]
                ran += [ran[-1], ran[-1] + end - max(begin, edges[-3])]
        return np.asarray(np.interp(times, edges, ran))

    def tokens_at(self, times: Floats) -> Floats:
        """Return the number of tokens on which all peers together had trained by each of these Unix times."""
        return np.asarray(np.sum([peer.tokens.at(times) for peer in self.peers], axis=0))


def history_of(journals: Iterable[tuple[str, Path]]) -> RunHistory:
    """Return the history of a run from its journals, without peers that never started.

    Args:
        journals: (name, path of the journal) of each peer. The name is shown if the peer's id is not known.
    """
    peers = []
    for name, path in journals:
        peer = PeerHistory(name)
        for line in read(path):
            peer.take(line)
        if peer.lives:
            peers.append(peer)
    return RunHistory(sorted(peers, key=lambda peer: (peer.began, peer.folder)))

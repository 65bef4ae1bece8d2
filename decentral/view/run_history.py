"""What a run's journals tell: each peer's steps, exchanges, lives and events, as columns over time.

Whoever sends us their journals may write anything into them. A line is taken if what we need of it has the right type,
and counted as `bad` if not; texts are escaped where they are shown.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from decentral.core.ids import PeerId, short
from decentral.core.journal.file import OUTCOMES, read
from decentral.core.line_fields import Line, finite, time_of
from decentral.core.time_spent import KINDS
from decentral.core.units import Seconds
from decentral.scheduler.topology.arrays import Floats

MOST_EVENTS = 2000  # of one peer, the latest
MOST_LIVES = 200  # of one peer: of more, the oldest ones count as one
SAID_CHARS = 1000  # of an event
TOLD = ("error", "unheld", "behind", "revoked", "suspended", "clock", "lost", "plan", "move")  # events for people


@dataclass(slots=True)
class Life:
    """From a start of the peer's process to its end. `ended`: why; "": it was killed, or trains still."""

    began: Seconds  # Unix time
    last: Seconds
    joined: Seconds | None = None
    ended: str = ""

    def hear(self, t: Seconds) -> None:
        self.last = max(self.last, t)

    def join(self, t: Seconds) -> None:
        self.joined = self.joined or t

    def end(self, reason: str) -> None:
        self.ended = reason or "stopped"


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
    """All that one peer's journal tells. Tokens and bytes are totals over its lives."""

    folder: str
    peer: str = ""
    run: str = ""
    device: str = ""
    throttle: float = 1.0
    lives: list[Life] = field(default_factory=list)
    starts: int = 0  # how many lives it had
    tokens: Column = field(default_factory=Column)
    losses: Column = field(default_factory=Column)  # of the steps since the line before
    held_out: Column = field(default_factory=Column)
    sent: Column = field(default_factory=Column)
    received: Column = field(default_factory=Column)
    spent: dict[str, float] = field(default_factory=dict)  # seconds of the training thread, by kind
    exchanges: "dict[str, array[float]]" = field(default_factory=lambda: {one: array("d") for one in OUTCOMES})  # when
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)  # of exchanges, by outcome and reason
    events: list[tuple[Seconds, str, str]] = field(default_factory=list)  # when, what, and what it says
    bad: int = 0
    _traffic: tuple[float, float] = (0.0, 0.0)  # totals of the present life

    @property
    def name(self) -> str:
        return short(PeerId(self.peer)) if self.peer else self.folder

    @property
    def began(self) -> Seconds:
        return self.lives[0].began if self.lives else 0.0

    @property
    def last(self) -> Seconds:
        return max((life.last for life in self.lives), default=0.0)

    @property
    def lived_s(self) -> Seconds:
        return sum(life.last - life.began for life in self.lives)

    def total(self, column: Column) -> float:
        return column.value[-1] if column.value else 0.0

    def shares(self) -> dict[str, float]:
        """What the training thread's time went to; they add up to one, unless no time is known."""
        total = sum(self.spent.values())
        return {kind: self.spent.get(kind, 0.0) / total if total else 0.0 for kind in KINDS}

    def take(self, line: Line) -> None:
        """Takes a line of the journal, in their order."""
        try:
            self._take(line, _time(line), _text(line["event"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            self.bad += 1

    def _take(self, line: Line, t: Seconds, event: str) -> None:
        if event == "started" or not self.lives:
            self._begin(line, t)
        life = self.lives[-1]
        life.hear(t)
        match event:
            case "joined":
                life.join(t)
            case "stopped":
                life.end(str(line["reason"]))
            case "step":
                self._step(line, t)
            case "eval":
                self.held_out.add(t, _number(line, "loss"))
            case "exchange":
                self.exchanges[line["outcome"]].append(t)
                self.reasons[line["outcome"], str(line["reason"])] += 1
            case "traffic":
                self._moved(t, _number(line, "sent_bytes"), _number(line, "received_bytes"))
            case told if told in TOLD:
                said = {name: value for name, value in line.items() if name not in ("t", "event")}
                self.events.append((t, told, ", ".join(f"{name} {value}" for name, value in said.items())[:SAID_CHARS]))
                del self.events[:-MOST_EVENTS]

    def _begin(self, line: Line, t: Seconds) -> None:
        if line["event"] in ("started", "continued"):
            self.peer, self.run, self.device = str(line["peer"]), str(line["run"]), str(line["device"])
            self.throttle = _number(line, "throttle")
        self.lives.append(Life(t, t))
        self.starts += 1
        if len(self.lives) > MOST_LIVES:
            oldest, next_one = self.lives[:2]
            self.lives[:2] = [replace(next_one, began=oldest.began, joined=oldest.joined or next_one.joined)]
        self._traffic = (0.0, 0.0)
        for column in (self.tokens, self.sent, self.received):
            column.add(t, self.total(column))

    def _step(self, line: Line, t: Seconds) -> None:
        aside = {kind: line["aside"].get(kind, 0.0) for kind in KINDS}
        spent = {kind: _number(aside, kind) for kind in KINDS} | {"training": _number(line, "seconds")}
        tokens, loss = _number(line, "tokens"), None if line["loss"] is None else _number(line, "loss")
        self.tokens.add(t, self.total(self.tokens) + tokens)
        for kind, seconds in spent.items():
            self.spent[kind] = self.spent.get(kind, 0.0) + seconds
        if loss is not None:
            self.losses.add(t, loss)

    def _moved(self, t: Seconds, sent: float, received: float) -> None:
        self.sent.add(t, self.total(self.sent) + max(0.0, sent - self._traffic[0]))
        self.received.add(t, self.total(self.received) + max(0.0, received - self._traffic[1]))
        self._traffic = (sent, received)


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
    def tokens(self) -> float:
        return sum(peer.total(peer.tokens) for peer in self.peers)

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


def _text(value: Any) -> str:
    """The value, if it is a text. Raises TypeError if not."""
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _time(line: Line) -> Seconds:
    """When the line was written. Raises ValueError if it does not say."""
    t = time_of(line)
    if t is None:
        raise ValueError(line.get("t"))
    return t


def _number(line: Line, name: str) -> float:
    """The number of that name. Raises ValueError if it is none that a peer can mean."""
    found = finite(line, name)
    if found is None:
        raise ValueError(line.get(name))
    return found

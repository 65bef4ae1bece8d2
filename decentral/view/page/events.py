"""What happened in the swarm, in words for people; the oldest events are forgotten."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from decentral.core.line_fields import Line, finite, layers, text
from decentral.core.units import Seconds

EVENTS_SHOWN = 300
EVENTS_AT_ONCE = 100  # in one update
TEXT_CHARS = 300

GOOD, PLAIN, WARNING, BAD = "good", "plain", "warning", "bad"  # how serious an event is


def told(line: Line) -> tuple[str, str] | None:
    """How serious a line of a journal is, and its words; None: it is not for people, or swarm_view.py tells it."""
    match line.get("event"):
        case "started":
            return PLAIN, f"starts on {text(line, 'device')}"
        case "joined":
            donors, where = line.get("donors"), f"joined in {_amount(line, 'seconds')} s"
            return GOOD, where + (f", state from {len(donors)}" if isinstance(donors, list) and donors else "")
        case "stopped":
            return PLAIN, f"stopped: {_said(line)}"
        case "plan":
            return PLAIN, f"follows a plan for {_amount(line, 'cost')} tokens/s: {_said(line)}"
        case "move" if line.get("outcome") == "done":
            return GOOD, f"moved to {_layers(line)} in {_amount(line, 'seconds')} s"
        case "move":
            return WARNING, f"could not move to {_layers(line)}: {_said(line)}"
        case "error" | "unheld" | "behind":
            return BAD, _said(line)
        case "held":
            return GOOD, "all layers have a holder again"
        case "donor_failed":
            return WARNING, f"a donor failed: {_said(line)}"
        case "revoked":
            return WARNING, "took over a list of revoked invitations"
        case "clock":
            return WARNING, f"its machine's clock jumped by {_amount(line, 'jumped_s')} s"
        case "suspended":
            return WARNING, f"was stopped for {_amount(line, 'seconds')} s"
        case "lost":
            return WARNING, f"lost {_amount(line, 'lines')} lines of its journal: {_said(line)}"
        case "audit" if line.get("verdict") == "wrong":
            return BAD, "found a wrong gradient by an audit"
    return None


@dataclass(slots=True)
class EventLog:
    """Rows of [number of the event, time, number of the peer, how serious, words]."""

    rows: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    count: int = 0
    _settled: int = 0

    def add(self, t: Seconds, peer: int, level: str, words: str) -> None:
        """An event that follows the same one of the same peer is left out."""
        if self.rows and self.rows[-1][2:] == [peer, level, words]:
            return
        self.count += 1
        self.rows.append([self.count, round(t, 1), peer, level, words])

    def changed(self) -> list[list[Any]]:
        return [row for row in self.rows if row[0] > self._settled][-EVENTS_AT_ONCE:]

    def settle(self) -> None:
        self._settled = self.count


def _said(line: Line) -> str:
    return text(line, "reason", TEXT_CHARS)


def _layers(line: Line) -> str:
    first, last = layers(line)
    return f"layers {first} to {last - 1}" if last else "other layers"


def _amount(line: Line, name: str) -> str:
    value = finite(line, name)
    return "?" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"

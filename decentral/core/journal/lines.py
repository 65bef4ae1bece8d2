"""Events to lines of a journal, and lines that somebody else may have written to events.

A line is JSON: `{"t": Unix seconds, "event": name, ...}`. Its fields are checked here, once, so that whoever reads
events needs no checks of his own. What a newer version added is passed over: fields, and events, of which only the time
is known.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeGuard, TypeVar

from pydantic import TypeAdapter, ValidationError

from decentral.core.journal.events import JournalEvent
from decentral.core.strict_json import JsonFields, JsonObject
from decentral.core.units import Seconds

MOST_TIME_S = 1e11  # Unix time in the year 5138; as in messages

EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)


def name_of(kind: type) -> str:
    """Return the name of this kind of event in a line: `peer_joined` for `PeerJoinedLine`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Line")).lower()


@dataclass(frozen=True, slots=True)
class Recorded(Generic[EventT_co]):
    """A line that was read. `event` is None where it is one that this version does not know."""

    t: Seconds
    event: EventT_co | None


class LineForms(Generic[EventT]):
    """The lines of some kinds of events."""

    def __init__(self, kinds: Sequence[type[EventT]]) -> None:
        self._kinds = {name_of(kind): kind for kind in kinds}
        self._names: dict[type, str] = {kind: name for name, kind in self._kinds.items()}
        self._defaults: dict[type, list[tuple[str, object]]] = {kind: _defaults(kind) for kind in kinds}
        self._checks: dict[str, TypeAdapter[EventT]] = {}  # made when the first such line is read, as it takes long

    def name(self, event: EventT) -> str:
        """Return the event's name."""
        return self._names[type(event)]

    def fields(self, event: EventT) -> JsonObject:
        """Return the fields of an event as its line has them, in their order; what has its default is left out."""
        written = self._defaults[type(event)]
        return {name: value for name, default in written if (value := getattr(event, name)) != default}

    def line(self, t: Seconds, event: EventT) -> JsonObject:
        """Return the line of an event that was written at that Unix time."""
        return {"t": t, "event": self.name(event), **self.fields(event)}

    def parse(self, line: JsonFields) -> Recorded[EventT] | None:
        """Return what the line says; None if its time or a field is not of the kind and size that a peer writes."""
        t, name = line.get("t"), line.get("event")
        if not isinstance(name, str) or not _is_time(t):
            return None
        if name not in self._kinds:
            return Recorded(float(t), None)
        check = self._checks.get(name) or self._checks.setdefault(name, TypeAdapter(self._kinds[name]))
        try:
            return Recorded(float(t), check.validate_python(line))
        except ValidationError:
            return None


def _defaults(kind: Any) -> list[tuple[str, object]]:
    """Return the names of the fields, each with its default; MISSING, which no value is, if it has none."""
    return [(one.name, one.default) for one in fields(kind)]


def _is_time(t: object) -> TypeGuard[float]:
    return isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t < MOST_TIME_S


JOURNAL_LINES = LineForms[JournalEvent](JournalEvent.__args__)


def recorded(lines: Iterable[JsonFields]) -> Iterator[Recorded[JournalEvent]]:
    """The lines of a journal that can be read."""
    return (found for line in lines if (found := JOURNAL_LINES.parse(line)) is not None)

"""Convert events into journal lines, and journal lines into checked events.

A line is JSON: `{"t": Unix seconds, "event": name, ...}`. Another program may have written the line, so all fields are
checked. Fields that a newer version added are ignored; of an event that a newer version added, only the time is read.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeGuard, TypeVar

from pydantic import TypeAdapter, ValidationError

from decentral.core.journal.events import JournalEvent
from decentral.core.strict_json import JsonFields, JsonObject
from decentral.core.units import Seconds

MOST_TIME_S = 1e11  # a line with a later Unix time (after the year 5138) is malformed, as in messages between peers

EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)


def name_of(kind: type) -> str:
    """Return the event name that lines use for an event class: `peer_joined` for `PeerJoinedLine`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Line")).lower()


@dataclass(frozen=True, slots=True)
class Recorded(Generic[EventT_co]):
    """A line that was read from a journal."""

    t: Seconds  # Unix time
    event: EventT_co | None  # None if this version does not know the event


class LineForms(Generic[EventT]):
    """A converter between events and journal lines, for a given set of event classes."""

    def __init__(self, kinds: Sequence[type[EventT]]) -> None:
        """Make a converter for these event classes."""
        self._kinds = {name_of(kind): kind for kind in kinds}
        self._names: dict[type, str] = {kind: name for name, kind in self._kinds.items()}
        self._defaults: dict[type, list[tuple[str, object]]] = {kind: _defaults(kind) for kind in kinds}
        self._checks: dict[str, TypeAdapter[EventT]] = {}  # event name -> validator, made at first use

    def name(self, event: EventT) -> str:
        """Return the event's name."""
        return self._names[type(event)]

    def fields(self, event: EventT) -> JsonObject:
        """Return an event's fields in the order of their declaration, without fields that have their default values."""
        written = self._defaults[type(event)]
        return {name: value for name, default in written if (value := getattr(event, name)) != default}

    def line(self, t: Seconds, event: EventT) -> JsonObject:
        """Return the line of an event at Unix time `t`."""
        return {"t": t, "event": self.name(event), **self.fields(event)}

    def parse(self, line: JsonFields) -> Recorded[EventT] | None:
        """Return the time and event of a line; None if the time or a field has a wrong type or is out of bounds."""
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
    """Return (name, default) of each field; a field without a default has MISSING, which is equal to no value."""
    return [(one.name, one.default) for one in fields(kind)]


def _is_time(t: object) -> TypeGuard[float]:
    return isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t < MOST_TIME_S


JOURNAL_LINES = LineForms[JournalEvent](JournalEvent.__args__)


def recorded(lines: Iterable[JsonFields]) -> Iterator[Recorded[JournalEvent]]:
    """Yield the lines of a journal that are valid, as events with their times."""
    return (found for line in lines if (found := JOURNAL_LINES.parse(line)) is not None)

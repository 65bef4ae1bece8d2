"""Events of a journal, in short: what a test leaves out is what a line that lacks it has."""

from collections.abc import Iterable
from typing import Any

from decentral.core.journal.events import JournalEvent
from decentral.core.journal.lines import JOURNAL_LINES, recorded
from decentral.core.journal.micro_batch_counts import CountAudit, audit
from decentral.core.strict_json import JsonObject


def event_of(name: str, /, **fields: Any) -> JournalEvent:
    """The event that a line of this name with these fields tells."""
    found = JOURNAL_LINES.parse({"t": 0.0, "event": name, **fields})
    assert found is not None, (name, fields)
    assert found.event is not None, name
    return found.event


def audited(journals: Iterable[Iterable[JsonObject]], layers: int) -> CountAudit:
    """The audit of peers' journals, whose lines are given."""
    return audit(map(recorded, journals), layers)

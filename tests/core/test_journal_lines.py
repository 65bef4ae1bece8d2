"""Events to lines and back, whoever wrote the line: what it says is of the right kind and size, or it is no line."""

import json
import math
from typing import Any

import pytest

from decentral.core import strict_json
from decentral.core.ids import PeerId
from decentral.core.journal.events import (
    CountedLine,
    ErrorLine,
    ExchangeLine,
    HeldLine,
    JournalEvent,
    LostLine,
    PeerJoinedLine,
    StatusLine,
    StepLine,
    told,
)
from decentral.core.journal.field_kinds import MOST_LAYERS, TEXT_CHARS, WORD_CHARS, CountedExecution, MeasuredLink
from decentral.core.journal.lines import JOURNAL_LINES, Recorded, name_of, recorded

STEP: dict[str, Any] = {"t": 5.0, "event": "step", "step": 3, "tokens": 64, "loss": 2.5, "seconds": 0.5, "aside": {}}
NEEDED: dict[str, dict[str, Any]] = {  # what a line must have: without it nobody has written one
    "eval": {"loss": 2.5},
    "exchange": {"outcome": "done"},
    "counted": {"of": [["A", 7, 0, 2, 10]]},
    "uncounted": {"of": [["A", 7, 0, 2, 10]]},
    "applied": {"of": [[0, 2, 10]]},
    "audit": {"verdict": "agreed", "of": ["A", 7, 0]},
    "move": {"outcome": "done"},
    "copy": {"outcome": "done"},
    "upload": {"outcome": "done"},
    "lost": {"lines": 1},
}


@pytest.mark.parametrize("kind", JournalEvent.__args__)
def test_an_event_is_the_same_after_it_was_a_line(kind: type[JournalEvent]) -> None:
    name = name_of(kind)
    found = JOURNAL_LINES.parse({"t": 5.0, "event": name, **NEEDED.get(name, {})})
    assert found is not None, f"NEEDED of tests/core/test_journal_lines.py lacks the fields without defaults of {name}"
    assert type(found.event) is kind
    line = json.loads(strict_json.dumps(JOURNAL_LINES.line(5.0, found.event)))
    assert JOURNAL_LINES.parse(line) == found


def test_a_line_has_the_fields_in_their_order_and_none_that_has_its_default() -> None:
    held = (CountedExecution("A", 7, 0, 2, 10),)
    assert list(JOURNAL_LINES.line(5.0, CountedLine(of=held)).items()) == [
        ("t", 5.0),
        ("event", "counted"),
        ("of", held),
    ]
    assert list(JOURNAL_LINES.fields(CountedLine(of=held, round=0))) == ["of", "round"]
    assert JOURNAL_LINES.fields(LostLine(lines=3)) == {"lines": 3}
    assert JOURNAL_LINES.fields(HeldLine()) == {}
    step = StepLine(step=1, lr_step=1, tokens=8, micro_batches=1, loss=None, lost=1, seconds=0.5, aside={})
    assert list(JOURNAL_LINES.fields(step)) == [
        "step",
        "lr_step",
        "tokens",
        "micro_batches",
        "loss",
        "lost",
        "seconds",
        "aside",
    ]


def test_an_event_is_named_after_its_class() -> None:
    assert name_of(PeerJoinedLine) == "peer_joined"


def test_what_a_newer_version_added_is_passed_over() -> None:
    assert JOURNAL_LINES.parse({"t": 5.0, "event": "paused", "seconds": 3}) == Recorded(5.0, None)
    assert JOURNAL_LINES.parse({"t": 5.0, "event": "held", "by": ["A"]}) == Recorded(5.0, HeldLine())


def test_a_line_of_an_earlier_version_lacks_what_it_did_not_know() -> None:
    found = JOURNAL_LINES.parse({"t": 5.0, "event": "exchange", "fragment": 1, "partner": "A", "outcome": "done"})
    assert found is not None
    assert found.event == ExchangeLine(
        fragment=1, partner=PeerId("A"), outcome="done", reason="", seconds=0.0, sent_bytes=0, received_bytes=0
    )


def test_lists_in_a_line_are_values_with_names() -> None:
    found = JOURNAL_LINES.parse({"t": 5.0, "event": "status", "links": [["end", 1000, 0.05]]})
    assert found is not None
    assert isinstance(found.event, StatusLine)
    assert found.event.links == (MeasuredLink("end", 1000.0, 0.05),)


@pytest.mark.parametrize("value", ["7", True, [], {}, math.inf, -math.inf, math.nan, 10**400, 10**18, -(10**18)])
@pytest.mark.parametrize("name", ["tokens", "seconds", "loss"])
def test_a_number_that_no_peer_can_mean_spoils_its_line(name: str, value: object) -> None:
    assert JOURNAL_LINES.parse(STEP | {name: value}) is None


@pytest.mark.parametrize("t", [None, "5", True, -1, 1e11, math.inf, math.nan, 10**400])
def test_a_time_that_no_calendar_has_spoils_its_line(t: object) -> None:
    assert JOURNAL_LINES.parse(STEP | {"t": t}) is None


@pytest.mark.parametrize("event", [None, 7, ["step"], {}])
def test_an_event_without_a_name_is_no_line(event: object) -> None:
    assert JOURNAL_LINES.parse(STEP | {"event": event}) is None


@pytest.mark.parametrize(
    "line",
    [
        {"event": "exchange", "outcome": "stolen"},
        {"event": "exchange", "outcome": "done", "partner": "x" * (WORD_CHARS + 1)},
        {"event": "error", "reason": "x" * (TEXT_CHARS + 1)},
        {"event": "error", "reason": 7},
        {"event": "unheld", "first": -1, "last": 3},
        {"event": "unheld", "first": 0, "last": MOST_LAYERS + 1},
        {"event": "status", "links": [["end", 1000]]},
        {"event": "status", "links": "end"},
        {"event": "status", "links": [["end", -1.0, 0.1]]},
        {"event": "counted"},
        {"event": "counted", "of": [["A", 7, 0, 2]]},
        {"event": "counted", "of": [["A", 7, 0, MOST_LAYERS + 1, 10]]},
        {"event": "refused", "by_reason": {"garbage": "x"}},
        STEP | {"aside": {"gossip": None}},
    ],
)
def test_a_field_of_another_kind_or_size_spoils_its_line(line: dict[str, Any]) -> None:
    assert JOURNAL_LINES.parse({"t": 5.0} | line) is None
    assert list(recorded([{"t": 5.0} | line, {"t": 6.0, "event": "held"}])) == [Recorded(6.0, HeldLine())]


def test_people_are_told_plain_text_of_a_length_that_can_be_read() -> None:
    _, words = told(ErrorLine(reason="[red]\x1b" + "y" * 1000)) or ("", "")
    assert words.startswith("(red)?yy")
    assert len(words) == 300


def test_one_lost_line_is_told_in_the_singular() -> None:
    assert told(LostLine(lines=1, reason="no room")) == ("warning", "lost 1 line of its journal: no room")

"""The journal: whole lines, whatever happened to the one before."""

import json
from pathlib import Path

import pytest

from decentral.core.journal import Journal, Tail, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, *events: str) -> None:
    journal = Journal(path, clock=lambda: 12.34567)
    for event in events:
        journal.write(event, step=1)
    journal.close()


def events(path: Path) -> list[str]:
    return [entry["event"] for entry in read(path)]


def test_a_line_has_the_time_the_event_and_its_fields(path: Path) -> None:
    write(path, "step")
    assert list(read(path)) == [{"t": 12.346, "event": "step", "step": 1}]


def test_a_second_journal_goes_on_after_the_first(path: Path) -> None:
    write(path, "started")
    write(path, "joined")
    assert events(path) == ["started", "joined"]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(path: Path) -> None:
    journal = Journal(path, clock=lambda: 0.0)
    journal.write("started")
    assert events(path) == ["started"]
    journal.close()


def test_a_cut_last_line_is_skipped_and_the_next_line_starts_on_its_own(path: Path) -> None:
    write(path, "started", "step")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # as kill -9 leaves it
    write(path, "joined")
    assert events(path) == ["started", "joined"]


def test_a_journal_that_ends_in_a_whole_line_gets_no_empty_one(path: Path) -> None:
    write(path, "started")
    write(path, "joined")
    assert "\n\n" not in path.read_text()


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[]\n", b"7\n", b'{"t": 1}\n', b"\n", b'{"t":\n'])
def test_a_line_that_is_no_event_is_skipped(path: Path, line: bytes) -> None:
    path.write_bytes(line)
    write(path, "joined")
    assert events(path) == ["joined"]


def test_a_journal_that_is_not_there_is_empty(path: Path) -> None:
    assert events(path) == []


def test_a_value_that_json_does_not_know_is_written_as_text(path: Path) -> None:
    journal = Journal(path, clock=lambda: 0.0)
    journal.write("started", folder=Path("/state"))
    journal.close()
    assert [entry["folder"] for entry in read(path)] == ["/state"]


def test_a_tail_gives_each_line_once(path: Path) -> None:
    tail = Tail(path)
    assert list(tail.new()) == []
    write(path, "started", "joined")
    assert [line["event"] for line in tail.new()] == ["started", "joined"]
    write(path, "step")
    assert [line["event"] for line in tail.new()] == ["step"]
    assert list(tail.new()) == []


def test_a_tail_gives_a_line_when_it_is_at_its_end(path: Path) -> None:
    tail = Tail(path)
    write(path, "started", "step")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [line["event"] for line in tail.new()] == ["started"]
    path.write_bytes(whole)
    assert [line["event"] for line in tail.new()] == ["step"]


def test_every_line_is_strict_json_also_when_a_loss_is_none(path: Path) -> None:
    journal = Journal(path, clock=lambda: 1.0)
    journal.write("step", loss=float("nan"), aside={"gossip": float("inf")})
    journal.close()
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line == {"t": 1.0, "event": "step", "loss": None, "aside": {"gossip": None}}
    assert list(read(path)) == [line]

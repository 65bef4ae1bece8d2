"""The journal: whole lines, whatever happened to the one before."""

import errno
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from decentral.core.errors import UserError
from decentral.core.journal.events import StepLine
from decentral.core.journal.file import LONGEST_LINE_BYTES, Journal, Tail, first, read, recent, rotated
from tests.journal_lines import event_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, *events: str) -> None:
    journal = Journal(path, clock=lambda: 12.34567)
    for event in events:
        journal.write(event_of(event))
    journal.close()


def events(path: Path) -> list[str]:
    return [entry["event"] for entry in read(path)]


def test_a_line_has_the_time_the_event_and_its_fields(path: Path) -> None:
    write(path, "traffic")
    assert list(read(path)) == [{"t": 12.346, "event": "traffic", "sent_bytes": 0, "received_bytes": 0}]


def test_a_second_journal_goes_on_after_the_first(path: Path) -> None:
    write(path, "started")
    write(path, "joined")
    assert events(path) == ["started", "joined"]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(path: Path) -> None:
    journal = Journal(path, clock=lambda: 0.0)
    journal.write(event_of("started"))
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


def test_a_line_that_is_longer_than_any_of_a_peer_s_is_skipped_and_not_kept_in_memory(path: Path) -> None:
    write(path, "started")
    with path.open("ab") as file:
        for _ in range(7):
            file.write(b"x" * LONGEST_LINE_BYTES)
        file.write(b"\n")
    write(path, "joined")
    tail = Tail(path)
    tracemalloc.start()
    try:
        assert [entry["event"] for entry in tail.new()] == events(path) == ["started", "joined"]
        assert [entry["event"] for entry in recent(path, 1 << 40)] == ["started", "joined"]
        assert [entry["event"] for entry in first(path)] == ["started"]
        assert tracemalloc.get_traced_memory()[1] < 4 * LONGEST_LINE_BYTES
    finally:
        tracemalloc.stop()
    write(path, "step")
    assert [entry["event"] for entry in tail.new()] == ["step"]


def test_a_journal_that_is_not_there_is_empty(path: Path) -> None:
    assert events(path) == []


def test_a_tail_that_skips_gives_only_what_comes_later(path: Path) -> None:
    write(path, "started", "joined")
    tail = Tail(path)
    tail.skip()
    assert list(tail.new()) == []
    write(path, "step")
    assert [line["event"] for line in tail.new()] == ["step"]


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


# A disk that refuses


class Disk:
    """What os.write and os.open do on a disk with so many bytes left; None: it has room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write, self._open = os.write, os.open
        patch.setattr(os, "write", self.write)
        patch.setattr(os, "open", self.open)

    def write(self, file: int, data: bytes) -> int:
        if self.room is None:
            return self._write(file, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.room])
        self.room -= written
        return written

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        try:
            if self.room is not None:
                os.stat(path, dir_fd=dir_fd)
        except FileNotFoundError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        return self._open(path, flags, mode, dir_fd=dir_fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_full_disk_loses_lines_and_raises_nothing(path: Path, disk: Disk) -> None:
    journal = Journal(path, clock=lambda: 5.0)
    journal.write(event_of("started"))
    disk.room = 0
    for _ in range(3):
        journal.write(event_of("step"))
    assert journal.lost == 3
    assert "No space left on device" in journal.trouble
    disk.room = None
    journal.write(event_of("held"))
    assert [line["event"] for line in read(path)] == ["started", "lost", "held"]
    (line,) = [line for line in read(path) if line["event"] == "lost"]
    assert (line["lines"], line["since"], line["reason"]) == (3, 5.0, "No space left on device")
    assert (journal.lost, journal.trouble) == (0, "")


@pytest.mark.parametrize("room", [1, 10, 20])
def test_half_a_line_that_a_full_disk_took_is_taken_back(path: Path, disk: Disk, room: int) -> None:
    journal = Journal(path, clock=lambda: 5.0)
    journal.write(event_of("started"))
    whole = path.read_bytes()
    disk.room = room
    journal.write(event_of("step"))
    assert path.read_bytes() == whole
    disk.room = None
    journal.write(event_of("held"))
    assert events(path) == ["started", "lost", "held"]


def test_half_a_line_that_cannot_be_taken_back_ends_before_the_next_one(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "ftruncate", refused)
    journal = Journal(path, clock=lambda: 5.0)
    journal.write(event_of("started"))
    disk.room = 10
    journal.write(event_of("step"))
    disk.room = None
    journal.write(event_of("held"))
    assert events(path) == ["started", "lost", "held"]


def test_a_journal_that_a_full_disk_cannot_even_begin_begins_later(path: Path, disk: Disk) -> None:
    disk.room = 0
    journal = Journal(path, clock=lambda: 5.0)
    journal.write(event_of("started", peer="A"))
    disk.room = None
    journal.write(event_of("joined"))
    assert events(path) == ["continued", "lost", "joined"]
    assert next(read(path))["peer"] == "A"


def test_a_journal_that_may_not_be_written_is_a_user_error(path: Path) -> None:
    path.mkdir()
    with pytest.raises(UserError, match=r"journal.jsonl cannot be written"):
        Journal(path, clock=lambda: 5.0)


# Rotation


def rotating(path: Path) -> Journal:
    return Journal(path, clock=lambda: 0.0, file_bytes=400, files_kept=3)


def test_a_journal_that_is_large_goes_on_in_a_new_file_and_keeps_so_many_old_ones(path: Path) -> None:
    journal = rotating(path)
    journal.write(event_of("started", peer="A"))
    for number in range(100):
        journal.write(event_of("step", step=number))
    assert len(rotated(path)) == 3
    assert max(file.stat().st_size for file in [path, *rotated(path)]) <= 400
    steps = [line["step"] for line in read(path) if line["event"] == "step"]
    assert steps == list(range(100 - len(steps), 100))
    first = next(read(path))
    assert (first["event"], first["peer"]) == ("continued", "A")


@pytest.mark.parametrize("most_bytes", [1, 150, 390, 800, 1 << 20])
def test_the_last_lines_are_those_of_full_files_too(path: Path, most_bytes: int) -> None:
    journal = rotating(path)
    journal.write(event_of("started", peer="A"))
    for number in range(40):
        journal.write(event_of("step", step=number))
    files = [*rotated(path), path]
    joined = b"".join(file.read_bytes() for file in files)
    lines = joined[-most_bytes:].split(b"\n")[1 if most_bytes < len(joined) else 0 : -1]
    assert list(recent(path, most_bytes)) == [json.loads(line) for line in lines]


def test_the_last_lines_do_not_need_the_files_before_one_that_cannot_be_read(path: Path) -> None:
    journal = rotating(path)
    for number in range(40):
        journal.write(event_of("step", step=number))
    *_, newest = rotated(path)
    newest.unlink()
    newest.mkdir()
    steps = [line["step"] for line in recent(path, 1 << 20)]
    assert steps == [line["step"] for line in map(json.loads, path.read_text().splitlines())]


def test_after_a_restart_rotation_goes_on(path: Path) -> None:
    for life in range(6):
        journal = rotating(path)
        journal.write(event_of("started", peer="A"))
        for number in range(10):
            journal.write(event_of("step", step=10 * life + number))
        journal.close()
    steps = [line["step"] for line in read(path) if line["event"] == "step"]
    assert steps == list(range(60 - len(steps), 60))
    assert len(rotated(path)) == 3


def test_a_tail_follows_over_rotations(path: Path) -> None:
    journal, tail = rotating(path), Tail(path)
    seen = []
    for number in range(50):
        journal.write(event_of("step", step=number))
        if number % 4 == 0:
            seen += [line["step"] for line in tail.new() if line["event"] == "step"]
    seen += [line["step"] for line in tail.new() if line["event"] == "step"]
    assert seen == list(range(50))


def test_a_tail_that_comes_too_late_goes_on_with_what_is_kept(path: Path) -> None:
    journal, tail = rotating(path), Tail(path)
    journal.write(event_of("step", step=0))
    assert [line["step"] for line in tail.new()] == [0]
    for number in range(1, 100):
        journal.write(event_of("step", step=number))
    seen = [line["step"] for line in tail.new() if line["event"] == "step"]
    assert seen == list(range(100 - len(seen), 100))


def test_a_full_disk_at_a_rotation_loses_lines_only_until_there_is_room(path: Path, disk: Disk) -> None:
    journal = rotating(path)
    journal.write(event_of("started", peer="A"))
    while not rotated(path):
        journal.write(event_of("step"))
    kept = len(list(read(path)))
    disk.room = 0
    for _ in range(30):
        journal.write(event_of("step"))
    disk.room = None
    journal.write(event_of("joined"))
    after = [line for line in read(path) if line["event"] != "continued"]
    assert [line["event"] for line in after[-2:]] == ["lost", "joined"]
    assert after[-2]["lines"] == 30
    assert len(after) >= kept - 1


def test_every_line_is_strict_json_also_when_a_loss_is_none(path: Path) -> None:
    journal = Journal(path, clock=lambda: 1.0)
    step = event_of("step")
    assert isinstance(step, StepLine)
    journal.write(replace(step, loss=float("nan"), aside={"gossip": float("inf")}))
    journal.close()
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (line["loss"], line["aside"]) == (None, {"gossip": None})
    assert list(read(path)) == [line]


def test_a_file_that_began_on_a_full_disk_still_says_whose_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `continued` line was refused, and never came."""
    journal, real, full = Journal(path, clock=lambda: 1.0, file_bytes=200), os.write, [False]
    journal.write(event_of("started", peer="Qm"))

    def write_unless_full(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    while not rotated(path):
        size = path.stat().st_size
        full[0] = size > 100
        journal.write(event_of("step"))
    assert path.stat().st_size == 0
    full[0] = False
    journal.write(event_of("step"))
    journal.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["continued", "lost", "step"]

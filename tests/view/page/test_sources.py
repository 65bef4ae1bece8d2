"""Where lines come from: journals as they grow, and a parent process through a pipe."""

import asyncio
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from decentral.commands import audit
from decentral.core import config, strict_json
from decentral.core.ids import PeerId
from decentral.core.journal.events import HeldLine, StartedLine, StepLine
from decentral.core.journal.file import Journal
from decentral.core.journal.lines import Recorded, name_of
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.view.page.follow import PageFollower, SwarmTime
from decentral.view.page.record_lines import RECORDS_AT_ONCE, ToldRecords
from decentral.view.page.source_lines import MissedLine, NowLine, RecordLine, SourceEvent
from decentral.view.page.sources import MOST_LINE_BYTES, JournalFolder, ParentFeed
from tests.journal_lines import event_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def journal(folder: Path, peer: str, clock: Clock) -> Journal:
    (folder / peer).mkdir()
    written = Journal(folder / peer / "journal.jsonl", clock)
    written.write(event_of("started", peer=peer, device="cpu"))
    return written


def test_lines_of_several_journals_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    clock = Clock()
    one, other = journal(tmp_path, "A", clock), journal(tmp_path, "B", clock)
    for now, written in ((1.0, other), (2.0, one), (3.0, other)):
        clock.now = now
        written.write(event_of("step", step=int(now)))
    source = JournalFolder(tmp_path)
    told = [(peer, line.t) for peer, line in source.lines() if isinstance(line.event, StepLine)]
    assert told == [("B", 1.0), ("A", 2.0), ("B", 3.0)]
    clock.now = 4.0
    one.write(event_of("step", step=4))
    journal(tmp_path, "C", clock)
    assert [(peer, type(line.event)) for peer, line in source.lines()] == [("A", StepLine), ("C", StartedLine)]
    assert list(source.lines()) == []


def test_the_backup_of_a_peer_s_folder_is_not_another_peer(tmp_path: Path) -> None:
    clock = Clock()
    own = journal(tmp_path, "A", clock)
    (tmp_path / "A" / "identity.key").write_bytes(b"of A")
    shutil.copytree(tmp_path / "A", tmp_path / "A-before")
    os.utime(tmp_path / "A-before" / "journal.jsonl", (1.0, 1.0))
    source = JournalFolder(tmp_path)
    assert [path.parent.name for path in audit.journals(tmp_path)] == ["A"]
    assert [(peer, type(line.event)) for peer, line in source.lines()] == [("A", StartedLine)]
    shutil.copytree(tmp_path / "A", tmp_path / "A-later")
    own.write(event_of("step", step=1))
    assert [(peer, type(line.event)) for peer, line in source.lines()] == [("A", StepLine)]


def test_a_state_folder_is_one_journal_and_names_its_run(tmp_path: Path) -> None:
    journal(tmp_path, "A", Clock())
    kept = {"run": "gpt-000000", "config": config.load("default").canonical()}
    (tmp_path / "A" / "run.json").write_text(strict_json.dumps(kept))
    source = JournalFolder(tmp_path / "A")
    assert [peer for peer, _ in source.lines()] == ["A"]
    facts = source.facts()
    assert (facts["run"], facts["data"], facts["layers"]) == ("gpt-000000", "python-stdlib", 4)
    assert facts["parameters"] == 467_584


def test_a_run_that_is_garbage_or_code_is_not_run(tmp_path: Path) -> None:
    journal(tmp_path, "A", Clock())
    (tmp_path / "A" / "run.json").write_text('{"run": 5}')
    assert JournalFolder(tmp_path).facts() == {}
    code = config.load("default", ["model.layers=no_such_module:function"])
    (tmp_path / "A" / "run.json").write_text(strict_json.dumps({"run": "r", "config": code.canonical()}))
    facts = JournalFolder(tmp_path).facts()
    assert (facts["code"], facts["parameters"]) == ("no_such_module:function", 0)


def test_a_process_that_ends_without_a_farewell_is_missed_after_its_last_line(tmp_path: Path) -> None:
    clock = Clock()
    written = journal(tmp_path, "A", clock)
    source = JournalFolder(tmp_path)
    with (tmp_path / "A" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [type(line.event) for _, line in source.lines()] == [StartedLine]
        written.write(event_of("step", step=1))
    assert [type(line.event) for _, line in source.lines()] == [StepLine]
    ((_, missed),) = source.lines()
    assert missed.event == MissedLine(peer=PeerId("A"), reason="its process is gone", certain=True)
    assert list(source.lines()) == []


def test_a_process_without_a_free_file_shows_the_lines_when_it_has_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    source, known = JournalFolder(tmp_path), JournalFolder(tmp_path)
    written = journal(tmp_path, "A", Clock())
    assert len(list(known.lines())) == 1
    written.write(event_of("step", step=1))
    with monkeypatch.context() as files:
        files.setattr(Path, "open", full)
        files.setattr(os, "scandir", full)
        assert list(source.lines()) == list(known.lines()) == []
        assert source.facts() == {}
    assert [len(list(one.lines())) for one in (source, known)] == [2, 1]


@pytest.fixture
def pipe() -> Iterator[tuple[ParentFeed, int]]:
    theirs, ours = os.pipe()
    yield ParentFeed(theirs), ours
    os.close(theirs)


def test_a_parent_s_lines_come_whole_and_its_end_is_the_end(pipe: tuple[ParentFeed, int]) -> None:
    feed, ours = pipe
    assert list(feed.lines()) == []
    os.write(ours, b'["A", {"t": 1, "event": "held"}]\n["B", {"t": 2, "eve')
    assert list(feed.lines()) == [("A", Recorded(1.0, HeldLine()))]
    os.write(ours, b'nt": "now"}]\n["C", 5]\n["C", {"t": -1, "event": "held"}]\nnonsense\n')
    assert list(feed.lines()) == [("B", Recorded(2.0, NowLine()))]
    assert not feed.over
    os.close(ours)
    assert list(feed.lines()) == []
    assert feed.over


def test_a_line_that_never_ends_does_not_fill_the_memory(pipe: tuple[ParentFeed, int]) -> None:
    feed, ours = pipe
    for _ in range(2 * MOST_LINE_BYTES // 4096):
        os.write(ours, b"x" * 4096)
        assert list(feed.lines()) == []
    os.write(ours, b'\n["A", {"t": 1, "event": "held"}]\n')
    assert list(feed.lines()) == [("A", Recorded(1.0, HeldLine()))]
    os.close(ours)


def test_of_a_run_that_is_over_time_has_stopped() -> None:
    clock = Clock()
    clock.now = 1e9
    time = SwarmTime(clock)
    time.saw(Recorded(5.0, None), live=False)
    assert (time.past, time.now()) == (True, 5.0)


def test_a_swarm_s_clock_that_is_another_than_ours_goes_on_as_ours_does() -> None:
    clock = Clock()
    clock.now = 1000.0
    time = SwarmTime(clock)
    time.saw(Recorded(700.0, None), live=False)
    time.saw(Recorded(701.0, None), live=True)
    clock.now = 1004.0
    assert (time.past, time.now()) == (False, 705.0)


def test_virtual_time_is_the_simulator_s() -> None:
    clock = Clock()
    time = SwarmTime(clock)
    time.saw(Recorded(7.0, NowLine()), live=True)
    clock.now = 50.0
    assert time.now() == 7.0


def written_by_another(folder: Path, *lines: str) -> JournalFolder:
    """The journal of somebody else, with these lines after one of a peer that joins."""
    (folder / "A").mkdir()
    begin = '{"t":1e9,"event":"started","peer":"A","device":"cpu"}'
    (folder / "A" / "journal.jsonl").write_text("\n".join([begin, *lines, ""]))
    return JournalFolder(folder)


@pytest.mark.parametrize("t", ["1e999", "1e300", "1" + "0" * 400, "-1", '"now"', "null"])
def test_a_line_of_no_time_moves_no_clock(tmp_path: Path, t: str) -> None:
    source = written_by_another(tmp_path, f'{{"t":{t},"event":"eval","loss":1.0}}')
    follower = PageFollower([source], SwarmTime(Clock()))
    asyncio.run(follower.take(source, live=True))
    assert follower.time.now() == 1e9
    follower.view.tick(follower.time.now())
    assert follower.view.peers["A"].progress.held_out is None


def test_what_only_sources_say_is_not_taken_from_a_journal(tmp_path: Path) -> None:
    said = '{"t":1e9,"event":"%s","peer":"B","facts":{"run":"not-this"},"phase":"training","certain":true}'
    names = [name_of(kind) for kind in SourceEvent.__args__]
    source = written_by_another(tmp_path, *(said % name for name in names))
    assert [type(line.event) for _, line in source.lines()] == [StartedLine] + [type(None)] * len(names)


def test_history_is_taken_with_its_totals(tmp_path: Path) -> None:
    clock = Clock()
    written = journal(tmp_path, "A", clock)
    written.write(event_of("joined", seconds=0.0))
    for step in range(1, 50):
        clock.now = float(step)
        written.write(event_of("step", step=step, tokens=10, loss=1.0, seconds=1.0, aside={}))
    follower = PageFollower([JournalFolder(tmp_path)], SwarmTime(clock))
    asyncio.run(follower.take(follower.sources[0], live=False))
    tokens = follower.view.timeline.since(0, ["tokens"])["series"]["tokens"]
    assert tokens[10] < tokens[30] < tokens[-1] <= 490
    assert len([one for one in tokens if one is not None]) > 20


def told_record(time: float) -> PeerRecord:
    return PeerRecord("run", time, (), Profile("cpu", 1, 1.0, 1.0), 0, 3, 0, 0, 0, phase=PeerPhase.TRAINING)


def test_each_record_is_told_once_and_not_too_many_at_once() -> None:
    told = ToldRecords()
    live = {PeerId(f"peer{number}"): told_record(1.0) for number in range(RECORDS_AT_ONCE + 20)}
    assert len(list(told.news(live))) == RECORDS_AT_ONCE
    assert len(list(told.news(live))) == 20
    assert list(told.news(live)) == []
    (line,) = told.news({PeerId("peer0"): told_record(5.0)})
    assert line == RecordLine(peer=PeerId("peer0"), record=told_record(5.0))


def test_records_that_change_all_the_time_keep_no_other_from_being_told() -> None:
    told, peers = ToldRecords(), [PeerId(f"peer{number}") for number in range(3 * RECORDS_AT_ONCE)]
    seen = {line.peer for look in range(3) for line in told.news(dict.fromkeys(peers, told_record(look)))}
    assert seen == {*peers}

"""What is wrong with a machine is said when it begins, and then now and then with how often it happened."""

from pathlib import Path

from decentral.core.journal.events import REPEAT_S
from decentral.core.journal.file import Journal, read
from decentral.peers.runtime.host import HostWatch


def test_a_trouble_that_repeats_has_few_lines_which_count_it(tmp_path: Path) -> None:
    now = [0.0]
    watch = HostWatch(Journal(tmp_path / "journal.jsonl", lambda: now[0]), lambda: now[0])
    for second in range(130):
        now[0] = float(second)
        watch.note("files", "Too many open files")
    lines = list(read(tmp_path / "journal.jsonl"))
    assert [line.get("times") for line in lines] == [None, 60, 60]
    assert watch.present() == ["Too many open files"]


def test_a_trouble_is_over_when_it_has_not_come_for_a_while_and_begins_anew_after_that(tmp_path: Path) -> None:
    now = [0.0]
    watch = HostWatch(Journal(tmp_path / "journal.jsonl", lambda: now[0]), lambda: now[0])
    watch.note("files", "Too many open files")
    now[0] = REPEAT_S + 1
    assert watch.present() == []
    watch.note("files", "Too many open files")
    assert len(list(read(tmp_path / "journal.jsonl"))) == 2
    assert len(watch.present()) == 1

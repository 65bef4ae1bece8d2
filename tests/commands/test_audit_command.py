"""python -m decentral.audit: whether micro-batches counted once, in part, or twice."""

import json
from pathlib import Path

import pytest

from decentral.commands import audit
from decentral.core.journal.micro_batch_counts import NOT_TAKEN_YET
from tests.journal_lines import audited


def line(*executions: tuple[str, int, int, int], event: str = "counted") -> dict[str, object]:
    return {"t": 1.0, "event": event, "of": [[*execution, 10] for execution in executions]}


def test_a_micro_batch_counts_once_where_its_executions_meet() -> None:
    found = audited([[line(("A", 1, 0, 2))], [line(("A", 1, 2, 3), ("A", 2, 2, 3))]], 3)
    assert (found.everywhere, found.in_part, found.twice, found.tokens) == (1, 1, (), 10)


def test_executions_that_overlap_have_counted_twice() -> None:
    found = audited([[line(("A", 1, 0, 2))], [line(("A", 1, 1, 3))]], 3)
    assert not found.sound
    assert found.twice == (("A", 1),)


def test_the_same_number_of_two_origin_peers_is_two_micro_batches() -> None:
    assert audited([[line(("A", 1, 0, 3)), line(("B", 1, 0, 3))]], 3).everywhere == 2


def test_what_was_thrown_away_is_not_counted() -> None:
    found = audited([[line(("A", 1, 0, 3), event="uncounted")]], 3)
    assert (found.everywhere, found.dropped) == (0, 1)


def write(folder: Path, *lines: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def applied(tokens: int, first: int = 0, last: int = 3) -> dict[str, object]:
    return {"t": 1.0, "event": "applied", "of": [[first, last, tokens]]}


def a_life(counted: int, taken: int) -> list[dict[str, object]]:
    """So many micro-batches were counted, one by one, and the optimizer took a step with so many of them."""
    lines = [line(("A", number, 0, 3)) for number in range(counted)]
    return [{"t": 0.0, "event": "started"}, *lines, *[applied(10)] * taken]


def test_who_counts_what_its_steps_took_passes() -> None:
    assert audited([a_life(100, 100)], 3).sound


def test_who_counts_more_than_its_steps_took_is_found_out() -> None:
    found = audited([a_life(100, 60)], 3)
    assert not found.sound
    assert found.unapplied == (40 - NOT_TAKEN_YET) * 10


def test_a_full_disk_that_took_the_lines_of_steps_is_no_false_count() -> None:
    lost = {"t": 1.0, "event": "lost", "lines": 60}
    assert audited([[*a_life(100, 60), lost, *a_life(100, 100)[1:]]], 3).unapplied == 0
    assert audited([[*a_life(100, 60), lost, *a_life(100, 60)[1:]]], 3).unapplied > 0


def test_a_layer_whose_steps_were_skipped_is_found_out() -> None:
    """The optimizer's step was taken in two of three layers."""
    lines = [one | {"of": [[0, 2, 10]]} if one["event"] == "applied" else one for one in a_life(100, 100)]
    assert not audited([lines], 3).sound


def test_what_one_life_took_does_not_pay_for_another() -> None:
    own = [line(("A", 1000 + number, 0, 3)) for number in range(50)]
    lines = [*a_life(0, 100), {"t": 2.0, "event": "started"}, *own, applied(10)]
    assert not audited([lines], 3).sound


def test_a_process_may_die_between_a_count_and_its_step() -> None:
    assert audited([a_life(100, 100 - NOT_TAKEN_YET)], 3).sound


def test_a_journal_that_says_nothing_of_steps_is_only_counted() -> None:
    assert audited([a_life(100, 0)], 3).sound


def test_the_command_prints_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "peer-0", line(("A", 1, 0, 2)))
    write(tmp_path / "peer-1", line(("A", 1, 2, 3)))
    assert audit.main([str(tmp_path)]) == 0
    assert (
        "1 micro-batch counted once in all 3 layers (10 tokens), 0 in some of them, 0 twice" in capfd.readouterr().out
    )


def test_a_swarm_of_whole_models_has_nothing_to_audit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "peer-0", {"t": 1.0, "event": "started"})
    assert audit.main([str(tmp_path)]) == 0
    assert capfd.readouterr().out.startswith("1 journal: no micro-batch went through several peers")


def test_a_micro_batch_that_counted_twice_is_exit_1(tmp_path: Path) -> None:
    write(tmp_path / "peer-0", line(("A", 1, 0, 3)), line(("A", 1, 0, 3)))
    with pytest.raises(SystemExit):
        audit.main([str(tmp_path)])


def test_a_folder_without_journals_is_exit_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(tmp_path)]) == 2
    assert "has no journal.jsonl" in capfd.readouterr().err


def test_what_the_journals_lost_is_said_and_is_exit_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A peer whose disk was full, or that has deleted old files, may have counted more than its journal says."""
    write(tmp_path / "a", line(("A", 1, 0, 3)), {"t": 2.0, "event": "lost", "lines": 7, "since": 1.0, "reason": "full"})
    with pytest.raises(SystemExit):
        audit.main([str(tmp_path)])
    assert "lost lines: 7" in capfd.readouterr().out
    write(tmp_path / "b" / "peer", line(("A", 1, 0, 3)))
    (tmp_path / "b" / "peer" / "journal-3.jsonl").write_text("")
    with pytest.raises(SystemExit):
        audit.main([str(tmp_path / "b")])
    assert "deleted full files: 2" in capfd.readouterr().out


@pytest.mark.parametrize(
    "hostile",
    [
        line(("A", 1, 0, 30_000_000)),  # it took 76 s and 6 GB
        line(("A", 1, -1, 3)),
        {"t": 1.0, "event": "counted"},
        {"t": 1.0, "event": "counted", "of": [1]},
        {"t": 1.0, "event": "applied", "of": [["0", 1, 2]]},
        {"t": 1.0, "event": "lost", "lines": "many"},
    ],
)
def test_a_journal_that_no_peer_has_written_is_one_line(
    hostile: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "peer", line(("A", 1, 0, 3)), hostile)
    assert audit.main([str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "is not valid; omit this folder" in said

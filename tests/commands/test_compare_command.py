"""python -m decentral.compare: losses at equal tokens and time, settings that differ, shares, in 80 columns or JSON."""

from pathlib import Path

import pytest

from decentral.commands import compare
from decentral.core import strict_json
from decentral.core.config import load
from decentral.core.ids import RunId
from decentral.core.journal.file import Journal
from decentral.peers.startup.state import StateFolder
from tests.journal_lines import event_of


def run_in(
    folder: Path, name: str, pace: int, loss: float, peers: int = 1, settings: tuple[str, ...] = (), pause_s: float = 0
) -> Path:
    """A run of peers that train `pace` tokens a second for 100 s, and whose loss falls from 5 to `loss`.

    With `pause_s`, all peers stop after 50 s and start again so much later.
    """
    for number in range(peers):
        own = folder / f"peer-{number}"
        own.mkdir(parents=True)
        now = [1000.0]
        journal = Journal(own / "journal.jsonl", lambda now=now: now[0])  # type: ignore[misc]
        facts = {"peer": f"Qm{name}-peer-{number}", "run": name, "device": "a processor [red]", "last": 4}
        journal.write(event_of("started", **facts, name=f"ann|{number}", addresses=[]))
        for second in range(1, 101):
            now[0] = 1000.0 + second + (pause_s if second > 50 else 0)
            if pause_s and second == 51:
                now[0] -= 1
                journal.write(event_of("started", **facts, name=f"ann|{number}", addresses=[]))
                now[0] += 1
            journal.write(event_of("step", step=second, tokens=pace, loss=5.0, seconds=1.0))
            if second % 10 == 0:
                journal.write(event_of("eval", loss=5.0 + (loss - 5.0) * second / 100, tokens=1, seconds=0.1))
        journal.close()
        StateFolder(own).write_run(RunId(name), load(None, settings))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """A slow run that learns well by token, and one of two peers that has twice as many tokens."""
    first = run_in(tmp_path / "muon", "one-aaaaaa", 1000, 2.0)
    second = run_in(tmp_path / "adamw", "two-bbbbbb", 1000, 3.0, peers=2, settings=("train.optimizer=adamw",))
    return [str(first), str(second)]


def test_losses_are_compared_at_equal_tokens_and_at_equal_time(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([*runs, "--json"]) == 0
    found = strict_json.loads(capsys.readouterr().out)
    tokens, ours, theirs = found["at_tokens"][-1]
    assert (tokens, ours, theirs) == (pytest.approx(100_000), pytest.approx(2.0), pytest.approx(4.0))
    seconds, ours, theirs = found["at_seconds"][-1]
    assert (seconds, ours, theirs) == (pytest.approx(100.0), pytest.approx(2.0), pytest.approx(3.0))
    assert found["settings"] == {"train.optimizer": ["muon", "adamw"]}
    assert [run["tokens"] for run in found["runs"]] == [100_000, 200_000]
    assert [one["share"] for one in found["runs"][1]["peers"]] == [0.5, 0.5]
    assert found["runs"][0]["loss_kind"] == "held-out"


def test_time_in_which_no_peer_ran_is_no_training_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    through = run_in(tmp_path / "through", "one-aaaaaa", 1000, 2.0, peers=2)
    paused = run_in(tmp_path / "paused", "two-bbbbbb", 1000, 2.0, peers=2, pause_s=3600.0)
    assert compare.main([str(through), str(paused), "--json"]) == 0
    found = strict_json.loads(capsys.readouterr().out)
    assert [run["seconds"] for run in found["runs"]] == [100.0, 100.0]
    assert all(ours == pytest.approx(theirs, abs=0.05) for _, ours, theirs in found["at_seconds"])
    assert found["at_seconds"][-1][0] == pytest.approx(100.0)


def test_the_table_fits_80_columns_and_names_what_differs(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(runs) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "train.optimizer" in said
    assert "held-out loss at tokens" in said
    assert "▁" in said
    assert "100.0%" in said
    assert "`decentral ledger` has what other peers measured" in said
    assert "of one run" not in said
    assert "[red]" not in said


def test_the_shares_of_two_folders_of_one_run_are_said_to_be_apart(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([f"{runs[1]}/peer-0", f"{runs[1]}/peer-1", runs[0]]) == 0
    assert "A, B are of one run; each share is of the peers of one folder." in capsys.readouterr().out


def test_a_single_peer_s_folder_is_a_run(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([f"{runs[0]}/peer-0", f"{runs[1]}/peer-1"]) == 0
    assert "one-aaaaaa" in capsys.readouterr().out


def test_runs_without_a_config_or_a_loss_are_compared_as_far_as_they_go(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "muon" / "peer-0" / "run.json").unlink()
    bare = tmp_path / "bare"
    bare.mkdir()
    journal = Journal(bare / "journal.jsonl", lambda: 5.0)
    journal.write(event_of("started", peer="QmBare", run="bare-cccccc"))
    journal.close()
    assert compare.main([runs[0], str(bare)]) == 0
    said = capsys.readouterr().out
    assert "settings of A, B are not known" in said
    assert "these runs have no range in common" in said


def test_training_losses_are_compared_where_a_run_was_hardly_evaluated(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "muon" / "peer-0" / "journal.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"eval"' not in line))
    assert compare.main([*runs, "--json"]) == 0
    found = strict_json.loads(capsys.readouterr().out)
    assert {run["loss_kind"] for run in found["runs"]} == {"training"}
    assert found["at_tokens"][-1][1:] == [5.0, 5.0]


@pytest.mark.parametrize("count", [1, 7])
def test_two_to_six_runs_are_compared(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert compare.main([f"run-{number}" for number in range(count)]) == 2
    assert f"expected the folders of 2 to 6 runs; got {count}" in capfd.readouterr().err


def test_a_folder_without_a_journal_is_named(
    runs: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    assert compare.main([runs[0], str(tmp_path / "none")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "has no journal.jsonl" in line

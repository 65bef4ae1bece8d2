"""`decentral ledger` adds up signed records of journals, in a table or as JSON, and refuses forged and mixed ones."""

import json
from pathlib import Path

import pytest

from decentral.commands import ledger
from decentral.core.ids import RunId
from decentral.core.journal.events import StatementLine
from decentral.core.journal.file import Journal
from tests.peers.membership.test_statements import RUN, identity, line


def write(folder: Path, *lines: StatementLine) -> None:
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.jsonl", lambda: 1.0)
    for one in lines:
        journal.write(one)
    journal.close()


def test_contributions_of_all_journals_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ann", line("ann"))
    write(tmp_path / "bob", line("bob"))
    assert ledger.main([str(tmp_path)]) == 0
    heading, columns, first, second, third, *legend = capsys.readouterr().out.splitlines()
    assert heading == f"run {RUN}: 2 peers with a signed record"
    assert columns.split() == list(ledger.LEDGER_COLUMNS)
    assert first.split()[:7] == ["cdefgh", "1,000", "100.0%", "1.0", "min", "0.0", "MB"]
    for line_of_one in (second, third):  # nobody has measured these two
        assert line_of_one.split()[-8:] == ["-", "-", "-", "-", "-", "0", "700", "(50.0%)"]
    *legend, unsigned = legend
    assert "\n".join(legend) == ledger.LEGEND
    assert first.split()[-1] == "-"
    assert unsigned == f"1 peer without {ledger.UNSIGNED}"


def test_as_json_there_are_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ann", line("ann"), line("bob"))
    assert ledger.main([str(tmp_path / "ann"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == RUN
    (first, *_) = told["contributions"]
    assert (first["tokens"], first["witnesses"], first["passed"], first["failed"]) == (1000, 2, 24, 2)


def test_a_forged_record_is_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = StatementLine(peer=identity("bob").peer, key=line().key, record=line("ann").record)
    write(tmp_path / "ann", line("ann"), forged)
    assert ledger.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "1 record refused: malformed, or not signed by the peer they name" in said.err
    assert "1 peer with a signed record" in said.out


def test_a_name_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ann", line("ann"))
    (tmp_path / "ann" / "journal.jsonl").open("a").write('{"t": 1, "event": "statement", "record": "\\u001b[2J"}\n' * 3)
    assert ledger.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


def test_journals_of_two_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunId("other-9999")
    write(tmp_path / "ann", line("ann"))
    write(tmp_path / "bob", line("bob", run=other, key=f"{other}/peers"))
    assert ledger.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: expected journals of one run, found other-9999, run-0123")


ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/QmbWKSU3CqtsYCbWKXMuJ81GeLRTxwYzfxj3UDSqzcK9U6"


@pytest.mark.parametrize("flags", [[], ["swarm", "--join", ADDRESS]])
def test_either_a_folder_or_an_address_is_expected(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(flags) == 2
    assert "expected --join ADDR of a running peer, or folders" in capsys.readouterr().err


def test_a_journal_without_records_says_when_there_will_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "ann")
    assert ledger.main([str(tmp_path)]) == 2
    assert "no signed record yet" in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_said_to_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "friends").mkdir()
    assert ledger.main([str(tmp_path / "friend")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    remedy = "give peers' state folders, or a folder of state folders; did you mean friends?"
    assert said == f"error: {tmp_path / 'friend'} does not exist; {remedy}"
    assert ledger.main([str(tmp_path / "friends")]) == 2
    assert "has no journal.jsonl" in capsys.readouterr().err

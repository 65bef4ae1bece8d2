"""python -m decentral.local: what it says if somebody ends it, or one of its peers, before all peers have joined."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from decentral.commands import local
from decentral.core.errors import ExitCode, UserError
from decentral.core.journal import file as journal
from decentral.core.journal.events import JoinedLine, StoppedLine
from decentral.peers.startup.state import StateFolder
from decentral.view import summary
from tests.commands.test_local_command import ended, refusal
from tests.journal_lines import event_of


class Scripted(local.LocalSwarm):
    """A swarm whose peers run code instead; `code` is of peer 0, the next one of peer 1."""

    codes: tuple[str, ...] = ()

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        lines = journal.Journal(self.folders()[number] / "journal.jsonl", self.now)
        lines.write(event_of("started", peer=f"P{number}", addresses=["/ip4/127.0.0.1/tcp/1/p2p/P0"]))
        if number == 0:
            lines.write(event_of("joined"))
        options["stdout"].write(b"starting: joining the DHT\nthis swarm is public: anybody may join\n")
        options["stdout"].flush()
        return ended(self.codes[number])


def scripted(tmp_path: Path, *codes: str) -> Scripted:
    swarm = Scripted(local.parse(["--peers", str(len(codes)), "--state-dir", str(tmp_path)]), tmp_path)
    swarm.codes = codes
    return swarm


@pytest.mark.parametrize("code", ["os._exit(0)", f"os._exit({ExitCode.INTERRUPTED})", "os.kill(os.getpid(), 2)"])
def test_no_peer_starts_after_one_that_somebody_has_stopped(tmp_path: Path, code: str) -> None:
    swarm = scripted(tmp_path, code, "os._exit(2)")
    with pytest.raises(local.StoppedWhileStarting, match=r"^peer 0 was stopped while starting$"):
        swarm.begin(2)
    assert len(swarm.members) == 1
    assert not swarm.has_started


def test_the_network_is_not_blamed_for_a_peer_that_joins_one_that_leaves(tmp_path: Path) -> None:
    swarm = scripted(tmp_path, "os._exit(0)", "os._exit(2)")
    for number in range(2):
        swarm.launch(number, None)
    swarm.members[0].process = cast("subprocess.Popen[bytes]", Saves())
    lines = journal.Journal(swarm.folders()[0] / "journal.jsonl", swarm.now)
    lines.write(event_of("stopped", reason="interrupted"))
    with pytest.raises(local.StoppedWhileStarting, match="peer 0 was stopped"):
        swarm.await_event(swarm.members[1], JoinedLine)


class Saves:
    """A process that is still running."""

    def poll(self) -> None:
        return None


@pytest.mark.parametrize(("code", "why"), [("os._exit(3)", "exit code 3"), ("os.abort()", "killed by signal 6")])
def test_what_a_peer_did_last_is_not_the_reason_of_its_end(tmp_path: Path, code: str, why: str) -> None:
    (tmp_path / "peer-0").mkdir()
    (tmp_path / "peer-0" / "output.txt").write_text("error: of an earlier life\n")
    swarm = scripted(tmp_path, "os._exit(0)")
    swarm.codes = (code,)
    swarm.launch(0, None)
    with pytest.raises(UserError) as refused:
        swarm.await_event(swarm.members[0], StoppedLine)
    assert str(refused.value) == f"peer 0 did not start: {why}; its output is in {tmp_path}/peer-0/output.txt"


def test_a_peer_that_was_stopped_before_it_began_has_a_name_and_no_empty_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "peer-0").mkdir()
    result = summary.summarise([tmp_path / "peer-0"], [1.0], 1.0)
    summary.report(Console(highlight=False), result)
    assert capsys.readouterr().out.startswith("peer vm-0  throttle 1  ")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_start_that_ctrl_c_ends_recommends_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local.LocalSwarm, "start", interrupt)
    with pytest.raises(SystemExit) as ended_by:
        local.main(["--peers", "2", "--state-dir", str(tmp_path / "swarm")])
    assert ended_by.value.code == ExitCode.INTERRUPTED
    assert capsys.readouterr().out.splitlines() == ["stopping", "stopped before any peer trained; nothing saved"]
    assert not (tmp_path / "swarm").exists()


def test_a_folder_of_a_swarm_that_still_starts_is_refused_at_once(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    swarm = tmp_path / "swarm"
    with StateFolder.claim(str(swarm)):  # as `local` does before it starts a peer
        said = refusal(capfd, "--state-dir", str(swarm))
    assert said.startswith(f"--state-dir {swarm} is in use by another peer")

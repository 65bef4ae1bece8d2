"""python -m decentral.local: its errors, a whole swarm's summary and journals, and a peer that is killed."""

import json
import math
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from decentral.commands import local, shared
from decentral.commands.local_peer import TRACEBACK, LocalPeer
from decentral.core import config
from decentral.core.ids import PeerId, RunId
from decentral.core.journal import file as journal
from decentral.core.peer_names import name_of_several
from decentral.peers.startup.invitation_files import FounderFile, read_holding
from decentral.peers.startup.state import StateFolder
from decentral.serving import replicas
from decentral.view import summary
from decentral.view.page.child import DashboardProcess
from decentral.view.page.source_lines import MissedLine, PageEvent
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.commands.refusals import refusal as peer_refusal
from tests.journal_lines import event_of
from tests.patient_time import LIMIT_S

PEER_KEYS = {
    "peer": str,
    "throttle": float,
    "micro_batches": int,
    "tokens": int,
    "busy_fraction": float,
    "time_shares": dict,
    "exchanges": dict,
    "sent_bytes": int,
    "received_bytes": int,
    "loss_last": float,
    "death": str,
}
SWARM_KEYS = {
    "seconds": float,
    "tokens": int,
    "tokens_per_s": float,
    "loss_first": float,
    "loss_last": float,
    "heldout_loss": float,
    "replica_spread": float,
}
LINES = {
    "started": {"peer", "run", "addresses", "device"},
    "joined": {"peers", "donors", "seconds"},
    "step": {"step", "tokens", "loss", "seconds"},
    "eval": {"tokens", "loss"},
    "checkpoint": {"step", "bytes", "seconds"},
    "stopped": {"reason"},
}
DONE = {"fragment", "partner", "outcome", "reason", "seconds", "sent_bytes", "received_bytes", "age_s"}


# Errors


def refusal(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    assert local.main(list(flags)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize("throttle", ["1,2", "1,x,3", "0,1,1", "1,1,1,1", "1,1,nan"])
def test_a_throttle_that_does_not_fit_the_peers(capfd: pytest.CaptureFixture[str], throttle: str) -> None:
    said = refusal(capfd, "--peers", "3", f"--throttle={throttle}")
    assert said == f"--throttle expects 3 factors of at least 1, such as 1,1,1,10; got {throttle!r}"


@pytest.mark.parametrize("peers", ["0", "65", "-1"])
def test_a_number_of_peers_out_of_bounds(capfd: pytest.CaptureFixture[str], peers: str) -> None:
    assert refusal(capfd, f"--peers={peers}") == f"--peers expects 1 to 64; got {peers}"


def test_metrics_ports_beyond_the_last_one(capfd: pytest.CaptureFixture[str]) -> None:
    said = refusal(capfd, "--peers", "4", "--metrics", "65533")
    assert said == "--metrics expects a port of at most 65532; got 65533"
    assert local.parse(["--peers", "4", "--metrics", "65532"]).metrics == ("127.0.0.1", 65532)


def test_a_folder_in_which_a_peer_runs(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with StateFolder.claim(str(tmp_path / "peer-0")):
        said = refusal(capfd, "--peers", "2", "--state-dir", str(tmp_path))
    assert said.startswith(f"--state-dir {tmp_path / 'peer-0'} is in use by another peer")
    assert not (tmp_path / "peer-0" / "output.txt").exists()


def test_a_stop_after_that_is_no_amount(capfd: pytest.CaptureFixture[str]) -> None:
    expected = "--stop-after expects 90s, 15m, 2h, 1d, 500steps or 2Mtokens; got 'soon'"
    assert refusal(capfd, "--stop-after", "soon") == expected


def test_peers_that_are_no_number(capfd: pytest.CaptureFixture[str]) -> None:
    assert "--peers" in refusal(capfd, "--peers", "many")


@pytest.mark.parametrize("summary_file", ["gone/summary.json", "a-file/summary.json", "."])
def test_a_summary_that_could_not_be_written_is_said_before_any_peer_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, summary_file: str
) -> None:
    (tmp_path / "a-file").touch()
    said = refusal(capfd, "--state-dir", str(tmp_path / "swarm"), "--summary", str(tmp_path / summary_file))
    reason = "cannot be written; choose a file in a folder that can be written"
    assert said == f"--summary {tmp_path / summary_file} {reason}"
    assert not (tmp_path / "swarm").exists()


def test_a_wrong_config_is_said_before_any_peer_starts(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refusal(capfd, "--state-dir", str(tmp_path / "swarm"), "--set", "gossip.windows_s=2")
    assert said == "config: unknown key gossip.windows_s; did you mean gossip.window_s?"
    assert not (tmp_path / "swarm").exists()


def test_a_folder_that_cannot_be_made(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    said = refusal(capfd, "--state-dir", str(tmp_path / "a-file" / "swarm"))
    assert said == f"--state-dir {tmp_path}/a-file/swarm: Not a directory; choose a folder that can be written"


def test_a_page_whose_port_is_taken_is_refused_before_there_is_a_folder(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(capfd, "--state-dir", str(tmp_path / "swarm"), "--dashboard", at)
    assert said == f"the page: {at} cannot be used (Address already in use); choose another port"
    assert not (tmp_path / "swarm").exists()


def test_a_model_s_folder_is_no_place_for_peers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    said = f"--state-dir {tmp_path} has a model (config.json); choose another folder for the peers' files"
    assert refusal(capfd, "--state-dir", str(tmp_path)) == said
    assert peer_refusal(tmp_path, "small") == said
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("flags", [["other.yaml"], ["--set", "model.depth=4"], ["--set", "seed=2"]])
def test_a_config_that_differs_from_the_folder_s_run_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], number: int
) -> None:
    """The swarm went on with the old model and did not say so."""
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("model:\n  depth: 4\n")
    (tmp_path / "friends" / f"peer-{number}").mkdir(parents=True)
    StateFolder(tmp_path / "friends" / f"peer-{number}").write_run(RunId("gpt-3fa2c1"), config.Config())
    said = refusal(capfd, *flags, "--peers", "2", "--state-dir", "friends")
    settled = "whose config cannot change, and differs from these CONFIG and --set; leave CONFIG and --set out"
    assert said == f"friends/peer-{number} belongs to run gpt-3fa2c1, {settled}"


def test_the_line_that_began_a_swarm_may_be_given_again(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"peer-{number}").mkdir()
        StateFolder(tmp_path / f"peer-{number}").write_run(RunId("gpt-3fa2c1"), config.load("small", ["seed=2"]))
    FounderFile.create(tmp_path / "peer-0", "gpt")
    local.check_run(local.parse(["small", "--set", "seed=2", "--peers", "2", "--private"]), tmp_path)


LARGE = ("model.depth=4", "model.width=128", "model.context=256", "train.micro_batch=16", "train.optimizer=adamw")


def test_layers_that_fit_none_of_the_peers_are_said_before_any_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Such a swarm ran to its end and counted nothing."""
    overrides = [part for one in LARGE for part in ("--set", one)]
    said = refusal(capfd, "--memory", "160MB", "--device", "cpu", "--state-dir", str(tmp_path / "swarm"), *overrides)
    assert said.startswith("--memory 160000000: layers 4 to 5 take ")
    assert said.endswith("so nothing can be trained; give more memory, or lower train.micro_batch")
    assert not (tmp_path / "swarm").exists()


def test_a_peers_trouble_is_shown_once_and_only_if_all_had_joined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    swarm = local.LocalSwarm(local.parse(["--peers", "2"]), tmp_path)
    times = iter((swarm.joined_at - 1, swarm.joined_at + 1) * 2)
    for number, folder in enumerate(swarm.folders()):
        folder.mkdir()
        lines = journal.Journal(folder / "journal.jsonl", lambda: next(times))
        lines.write(event_of("error", reason="layer 2 is lost"))
        lines.write(event_of("unheld", reason="layer 4 is lost"))
        swarm.members.append(LocalPeer(number, folder, cast("subprocess.Popen[bytes]", None)))
    console = Console(highlight=False)
    for _ in range(2):
        for member in swarm.members:
            member.follow()
        swarm.warn(console)
    assert capsys.readouterr().out.endswith("  warning: peer 0: layer 4 is lost\n")


# A peer that dies


def ended(code: str) -> "subprocess.Popen[bytes]":
    """A process that has ended with this code."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", f"import os; {code}"])
    process.wait()
    return process


@pytest.fixture
def mortal(tmp_path: Path) -> local.LocalSwarm:
    """Peers of which one has left, one was killed and one could not go on, each with a journal of a step."""
    swarm = local.LocalSwarm(local.parse(["--peers", "3"]), tmp_path)
    for number, code in enumerate(("os._exit(0)", "os.kill(os.getpid(), 9)", "os._exit(1)")):
        folder = swarm.folders()[number]
        folder.mkdir()
        said = ["starting: joining the DHT", TRACEBACK, "RuntimeError: the device is gone"]
        (folder / "output.txt").write_text("\n".join(said))
        lines = journal.Journal(folder / "journal.jsonl", swarm.now)
        lines.write(event_of("started", peer=f"P{number}"))
        step = {"step": 7, "micro_batches": 1, "tokens": 8, "seconds": 1.0, "aside": {}}
        lines.write(event_of("step", loss=float(number), **step))
        swarm.members.append(LocalPeer(number, folder, ended(code)))
    return swarm


def test_peers_that_have_died_are_said_once_and_a_peer_that_has_left_is_not(
    mortal: local.LocalSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    mortal.say = print
    mortal.wait(Console(highlight=False))
    mortal.tell_deaths()
    assert capsys.readouterr().out.splitlines() == [
        "warning: peer 1 has ended (killed by signal 9)",
        "warning: peer 2 has ended (exit code 1): RuntimeError: the device is gone",
    ]


class ToldPage:
    def __init__(self) -> None:
        self.told: list[PageEvent] = []

    def tell(self, peer: str, t: float, event: PageEvent) -> None:
        self.told.append(event)


def test_the_page_is_told_of_peers_that_have_died(mortal: local.LocalSwarm) -> None:
    page = ToldPage()
    mortal.page = cast(DashboardProcess, page)
    mortal.tell_deaths()
    assert page.told == [
        MissedLine(peer=PeerId("P1"), reason="killed by signal 9", certain=True),
        MissedLine(peer=PeerId("P2"), reason="exit code 1", certain=True),
    ]


def test_a_dead_peer_has_no_loss_any_more(mortal: local.LocalSwarm) -> None:
    shown = [member.progress(mortal.began - 1) for member in mortal.members]
    assert shown == ["0.000 at own step 7", "dead at own step 7", "dead at own step 7"]


def test_a_dead_peers_loss_and_replica_do_not_count(mortal: local.LocalSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(replicas, "read", asked.append)
    result = summary.summarise(mortal.folders(), mortal.throttles, 1.0, mortal.deaths())
    assert [peer["death"] for peer in result["peers"]] == ["", "killed by signal 9", "exit code 1"]
    assert (result["swarm"]["loss_last"], result["swarm"]["tokens"]) == (0.0, 24)
    assert asked == mortal.folders()[:1]


def test_a_summary_names_the_peers_and_the_next_step(
    mortal: local.LocalSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    result = summary.summarise(mortal.folders(), mortal.throttles, 1.0, {})
    summary.report(Console(highlight=False), result)
    shown = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown[:3] == [f"peer P{number} ({name_of_several(number)})" for number in range(3)]
    assert summary.next_step(None) == "nothing was kept; --state-dir DIR keeps the model"
    assert summary.next_step("my swarm").splitlines()[1:] == [
        "    python -m decentral.generate --state-dir 'my swarm' 'Once upon a time'",
        "    python -m decentral.export --state-dir 'my swarm' --out my-model",
    ]


def test_a_peer_that_came_back_has_not_died(mortal: local.LocalSwarm) -> None:
    mortal.members += [LocalPeer(number, mortal.folders()[number], ended("os._exit(0)")) for number in (1, 2)]
    assert mortal.deaths() == {}


@pytest.mark.swarm
def test_what_the_first_peer_says_is_what_the_user_reads(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gone = ["--set", "data.kind=text", "--set", f"data.path={tmp_path}/gone"]
    said = refusal(capfd, "--peers", "1", "--state-dir", str(tmp_path), *gone)
    assert said.startswith("peer 0 did not start: ")
    assert f"{tmp_path}/gone" in said


class Recorded(local.LocalSwarm):
    """Starts no process, and keeps the lines that it would have started."""

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        self.lines = [*getattr(self, "lines", []), list(arguments)]
        return cast("subprocess.Popen[bytes]", None)


def test_those_that_join_get_the_code_and_the_data_that_the_user_named(tmp_path: Path) -> None:
    named = ["--set", "data.kind=text", "--set", "data.path=text", "--set", "model.layers=mine:layers"]
    swarm = Recorded(local.parse(["--peers", "2", *named]), tmp_path)
    swarm.launch(0, None)
    overrides = [text for text in named if text != "--set"]
    StateFolder(tmp_path / "peer-0").write_run(RunId("gpt-3fa2c1"), config.load(None, overrides))
    swarm.launch(1, "/ip4/127.0.0.1/tcp/1/p2p/Qm")
    own = ["--trust-model-code", "mine:layers", "--data", str(Path("text").absolute())]
    assert swarm.lines[1][-6:] == ["--join", "/ip4/127.0.0.1/tcp/1/p2p/Qm", *own]


def test_each_peer_of_a_private_swarm_has_an_invitation_of_its_own(tmp_path: Path) -> None:
    swarm = Recorded(local.parse(["--peers", "3", "--private"]), tmp_path)
    swarm.launch(0, None)
    assert "--private" in swarm.lines[0]
    FounderFile.create(tmp_path / "peer-0", "gpt")
    for number in (1, 2, 2):
        swarm.launch(number, "/ip4/127.0.0.1/tcp/1/p2p/Qm")
    assert [line[-1] for line in swarm.lines[1:]] == [str(tmp_path / f"peer-{n}.invite") for n in (1, 2, 2)]
    assert not any("--private" in line for line in swarm.lines[1:])
    ids = {read_holding(tmp_path / f"peer-{number}.invite").invitation.id for number in (1, 2)}
    with FounderFile.open(tmp_path / "peer-0") as founder:
        assert ids == {bytes.fromhex(one["id"]) for one in founder.invited}


# A whole swarm


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the summary of two peers that trained 150 steps each, one of them four times slower."""
    folder = tmp_path_factory.mktemp("swarm")
    flags = [
        "--peers",
        "2",
        "--throttle",
        "1,4",
        "--stop-after",
        "150steps",
        "--summary",
        str(folder / "summary.json"),
        "--on-event",
        shlex.join(["tee", "-a", str(folder / "events.txt")]),
    ]
    line = [sys.executable, "-m", "decentral.local", *flags, *TINY, "--state-dir", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return folder, summary


@pytest.mark.swarm
def test_the_summary_has_the_contracts_keys_and_types(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    assert set(summary) == {"peers", "swarm"}
    assert {key: type(value) for key, value in summary["swarm"].items()} == SWARM_KEYS
    for peer in summary["peers"]:
        assert {key: type(value) for key, value in peer.items()} == PEER_KEYS
        assert {key: type(value) for key, value in peer["exchanges"].items()} == dict.fromkeys(
            ("done", "solo", "failed"), int
        )
    assert [peer["throttle"] for peer in summary["peers"]] == [1.0, 4.0]
    assert len({peer["peer"] for peer in summary["peers"]}) == 2


@pytest.mark.swarm
def test_all_peers_trained_and_those_that_met_exchanged(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    for peer in summary["peers"]:
        assert peer["micro_batches"] >= 60
        assert peer["exchanges"]["done"] > 0, summary
        assert 0 < peer["busy_fraction"] <= 1
        shares = {name: share for name, share in peer["time_shares"].items() if name != "beside"}
        assert shares["training"] == peer["busy_fraction"]
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert summary["swarm"]["tokens"] == sum(peer["tokens"] for peer in summary["peers"])
    assert 0 < summary["swarm"]["heldout_loss"] < math.log(256) - 1  # to guess costs log(256)


@pytest.mark.swarm
def test_the_journals_have_the_contracts_lines(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    for number in range(2):
        lines = list(journal.read(folder / f"peer-{number}" / "journal.jsonl"))
        evaluated = set() if number == 0 else {"eval"}  # a newcomer's donors have evaluated what it fetched
        assert {line["event"] for line in lines} >= set(LINES) - evaluated
        for line in lines:
            assert isinstance(line["t"], float)
            assert set(line) >= LINES.get(line["event"], set()), line
            if line["event"] == "exchange":
                assert line["outcome"] in ("done", "solo", "failed")
                assert set(line) >= (DONE if line["outcome"] == "done" else DONE - {"age_s"}), line
        assert lines[0]["event"] == "started"
        assert lines[-1]["event"] == "stopped"


@pytest.mark.swarm
def test_hooks_are_told_of_all_peers_and_each_event_once(finished: tuple[Path, dict[str, Any]]) -> None:
    told = [json.loads(line) for line in (finished[0] / "events.txt").read_text().splitlines()]
    for kind in ("started", "training", "stopped"):
        names = sorted(one["name"] for one in told if one["event"] == kind)
        assert names == [name_of_several(number) for number in range(2)], (kind, told)


@pytest.mark.swarm
def test_a_peer_says_what_it_does_before_it_trains(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    said = {
        number: [
            line.removeprefix(shared.STARTING)
            for line in (folder / f"peer-{number}" / "output.txt").read_text().splitlines()
            if line.startswith(shared.STARTING)
            and not any(words in line for words in ("joining;", "loading torch", "trying for"))  # as fast as it is
        ]
        for number in (0, 1)
    }
    begins = ["choosing which layers this peer holds", "loading the data (python-stdlib)", "building the model"]
    network, directory = "opening the network", "joining the DHT"
    first, second = f"beginning a new run in {folder / 'peer-0'}", f"joining a run in {folder / 'peer-1'}"
    assert said[0] == [first, network, directory, *begins, "measuring the device"]
    (asking,) = (line for line in said[1] if line.startswith("asking /ip4/"))
    assert said[1] == [second, network, asking, directory, *begins]


# A peer that is killed


@pytest.mark.swarm
def test_a_peer_that_is_killed_does_not_stop_another_and_comes_back_as_itself(peers: Peers) -> None:
    peers.start("a", *TINY, "--set", "swarm.checkpoint_every_s=2")
    peers.until("a trains", lambda: bool(peers.lines("a", "step")))
    address = peers.lines("a", "started")[0]["addresses"][0]
    peers.start("b", "--join", address)
    peers.until("both exchange", lambda: exchanged(peers, "a") and exchanged(peers, "b"))
    peers.until("b has saved", lambda: bool(peers.lines("b", "checkpoint")))

    peers.processes["b"].kill()
    peers.processes["b"].wait()
    before = len(peers.lines("a", "step"))
    peers.until("a goes on", lambda: len(peers.lines("a", "step")) > before + 2)

    peers.start("b")
    peers.until("b joins again", lambda: len(peers.lines("b", "joined")) == 2)
    first, again = peers.lines("b", "started")
    assert (again["peer"], again["run"]) == (first["peer"], first["run"])
    since = again["t"]
    peers.until("b exchanges again", lambda: exchanged(peers, "b", since))

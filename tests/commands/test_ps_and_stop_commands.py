"""`decentral ps` and `decentral stop`: which peers run here, and ending them so that nothing is lost."""

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from decentral.commands import ps, stop
from decentral.commands.ps import STATUS_COLUMNS, PeerStatus
from decentral.core.errors import UserError
from decentral.core.journal.file import Journal
from decentral.core.peer_folders import KEY
from decentral.core.temporary import TemporaryFolder
from decentral.peers.startup.running_peers import RunningPeer, StopRequests
from tests.commands.peer_processes import TINY, Peers
from tests.journal_lines import event_of
from tests.processes import piped

BEGAN = 1.7e9


@pytest.fixture(autouse=True)
def in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal limits tables, whatever the one is in which the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)


def of(folder: Path, pid: int = 5) -> RunningPeer:
    return RunningPeer(pid, os.geteuid(), BEGAN, folder)


def journal(folder: Path, *lines: tuple[float, str, dict[str, Any]]) -> None:
    """Write these lines: seconds after BEGAN, event, fields."""
    folder.mkdir(parents=True, exist_ok=True)
    at = BEGAN
    kept = Journal(folder / "journal.jsonl", lambda: at)
    for seconds, event, fields in lines:
        at = BEGAN + seconds
        kept.write(event_of(event, **fields))
    kept.close()


ADDRESS = "/ip4/127.0.0.1/tcp/7/p2p/Qmx3kPq2"
STARTED = {"peer": "Qmx3kPq2", "run": "gpt-3fa2c1", "name": "ann", "addresses": [ADDRESS, "/ip4/10.0.0.1"]}


def training(folder: Path) -> RunningPeer:
    step = {"step": 1234, "loss": 2.5, "tokens": 64, "seconds": 0.9, "aside": {}}
    journal(folder, (1, "started", STARTED), (2, "joined", {"seconds": 1.0}), (3, "step", step))
    (folder / "checkpoint.safetensors").write_bytes(b"")
    os.utime(folder / "checkpoint.safetensors", (BEGAN + 60, BEGAN + 60))
    return of(folder)


def test_a_peer_has_a_line_with_what_its_journal_says(tmp_path: Path) -> None:
    status = PeerStatus.of(training(tmp_path / "one"))
    assert status == replace(
        status, name="ann", peer="Qmx3kPq2", run="gpt-3fa2c1", phase="training", pid=5, since=BEGAN, step=1234,
        loss=2.5,        checkpoint_at=BEGAN + 60, folder=str(tmp_path / "one"), address=ADDRESS,
    )  # fmt: skip
    row = dict(zip(STATUS_COLUMNS, status.row(BEGAN + 400), strict=True))
    assert (row["step"], row["loss"], row["checkpoint"]) == ("1,234", "2.500", "5 min ago")
    assert (row["name"], row["id"]) == ("ann", "x3kPq2")
    assert row["since"].endswith("(6 min ago)")
    lines = ps.table(STATUS_COLUMNS, [status.row(BEGAN + 400)]).splitlines()
    assert lines[0].split() == list(STATUS_COLUMNS)
    assert lines[1].index(str(tmp_path)) == lines[0].index("folder")


def test_the_table_fits_into_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ps, "here", lambda: [training(tmp_path / ("a" * 60)), training(tmp_path / "two")])
    monkeypatch.setattr(time, "time", lambda: BEGAN + 100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    ps.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("gpt")]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["name", "id", "phase", "pid", "step", "loss", "checkpoint", "folder"]
    at = lines[0].index("folder")
    assert "".join(line[at:] for line in lines[1:]) == f"{tmp_path}/{'a' * 60}{tmp_path}/two"
    monkeypatch.delenv("COLUMNS")
    ps.main([])
    assert capsys.readouterr().out.splitlines()[0].split() == list(STATUS_COLUMNS)


def test_below_the_table_is_how_to_join_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [training(tmp_path / "one"), training(tmp_path / "two"), RunningPeer(7, os.geteuid() + 1, BEGAN, None)]
    monkeypatch.setattr(ps, "here", lambda: found)
    ps.main([])
    assert capsys.readouterr().out.splitlines()[4:] == [f"gpt-3fa2c1: --join {ADDRESS}"]


def test_a_peer_that_starts_is_not_shown_with_the_figures_of_its_last_life(tmp_path: Path) -> None:
    found = PeerStatus.of(replace(training(tmp_path / "one"), since=BEGAN + 1e9))
    assert (found.phase, found.step, found.loss, found.checkpoint_at) == ("starting", None, None, BEGAN + 60)
    assert (found.name, found.peer, found.run, found.address) == ("ann", "Qmx3kPq2", "gpt-3fa2c1", "")
    renamed = PeerStatus.of(replace(training(tmp_path / "one"), since=BEGAN + 1e9, name="bob"))
    assert renamed.name == "bob"
    journal(tmp_path / "two", (1, "started", STARTED))
    assert PeerStatus.of(of(tmp_path / "two")).phase == "joining"


def test_another_user_s_peer_is_shown_without_its_folder() -> None:
    found = PeerStatus.of(RunningPeer(7, os.geteuid() + 1, BEGAN, None))
    assert (found.folder, found.phase, found.pid) == (None, "", 7)
    assert found.row(BEGAN)[0] == "-"


def test_a_name_from_a_journal_of_somebody_else_cannot_control_the_terminal(tmp_path: Path) -> None:
    journal(tmp_path / "one", (1, "started", {**STARTED, "name": "\x1b[2J", "run": "\x1b]0;x\x07"}))
    row = PeerStatus.of(of(tmp_path / "one")).row(BEGAN)
    assert all(cell.isprintable() for cell in row)


@pytest.fixture
def running(tmp_path: Path) -> dict[RunningPeer, PeerStatus]:
    """Three peers of this user, of which two have one name, and one of another user."""
    found: dict[RunningPeer, PeerStatus] = {}
    for number, name in enumerate(("ann", "bob", "bob")):
        journal(tmp_path / "swarm" / f"peer-{number}", (1, "started", {**STARTED, "name": name}))
        peer = of(tmp_path / "swarm" / f"peer-{number}", number)
        found[peer] = PeerStatus.of(peer)
    stranger = RunningPeer(9, os.geteuid() + 1, BEGAN, None)
    return found | {stranger: replace(PeerStatus.of(stranger), name="eve")}


def test_peers_are_chosen_by_name_by_folder_or_all(
    running: dict[RunningPeer, PeerStatus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob, other, _ = running
    assert stop.chosen(running, ["ann"]) == ([ann], {})
    assert stop.chosen(running, [str(tmp_path / "swarm" / "peer-2")]) == ([other], {})
    assert stop.chosen(running, [str(tmp_path / "swarm")]) == ([ann, bob, other], {})
    monkeypatch.chdir(tmp_path)
    assert stop.chosen(running, ["swarm/peer-1", "ann", "swarm/peer-1"]) == ([bob, ann], {})
    assert stop.chosen(running, []) == ([ann, bob, other], {})


def test_a_name_that_is_not_clear_stops_nobody(running: dict[RunningPeer, PeerStatus], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"2 peers are called bob; name their folders: .*peer-1 .run gpt-3fa2c1., .*peer-2"
    ):
        stop.chosen(running, ["bob"])
    with pytest.raises(UserError, match=r"has the name, folder or run 'anne'; did you mean ann\? \(see decentral ps\)"):
        stop.chosen(running, ["anne"])
    with pytest.raises(UserError, match="has the name, folder or run 'eve'"):
        stop.chosen(running, ["eve"])  # of another user


def test_a_run_is_stopped_by_its_id(running: dict[RunningPeer, PeerStatus]) -> None:
    ann, bob, other, _ = running
    statuses = {**running, other: replace(running[other], run="other-1b2c3d")}
    assert stop.chosen(statuses, ["gpt-3fa2c1"]) == ([ann, bob], {})
    assert stop.chosen({**statuses, bob: replace(running[bob], name="x")}, ["other-1b2c3d"]) == ([other], {})
    with pytest.raises(UserError, match="bob is the id of a run, and also a name or a folder"):
        stop.chosen({**statuses, ann: replace(running[ann], run="bob")}, ["bob"])


def test_peers_that_have_ended_by_themselves_are_stopped_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        journal(tmp_path / "friends" / f"peer-{number}", (1, "started", STARTED), (2, "stopped", {"reason": "x"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stop, "here", lambda: [])
    assert stop.main(["friends"]) == 0
    assert stop.main(["friends/peer-1"]) == 0
    assert capsys.readouterr().out == "3 peers in friends: stopped already\nfriends/peer-1: stopped already\n"
    assert stop.main(["friend"]) == 2
    said = "error: no peer of this user here has the name, folder or run 'friend'; did you mean friends? (see"
    assert capsys.readouterr().err.startswith(said)
    with pytest.raises(UserError, match="no peer of this user"):
        stop.chosen({}, ["a" * 300])


def killed(folder: Path) -> None:
    """A peer that has saved BEGAN + 60, and whose last line is of BEGAN + 70, but none that it stopped."""
    training(folder)
    journal(folder, (70, "step", {"step": 1300, "loss": 2.4, "tokens": 64, "seconds": 0.9, "aside": {}}))


def test_a_peer_that_was_killed_is_not_said_to_have_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, because the peer's work since its last checkpoint is lost."""
    killed(tmp_path / "friends" / "one")
    journal(tmp_path / "friends" / "two", (1, "started", STARTED), (2, "stopped", {"reason": "x"}))
    journal(tmp_path / "friends" / "three", (1, "started", {**STARTED, "name": "bob"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stop, "here", lambda: [])
    monkeypatch.setattr(time, "time", lambda: BEGAN + 100)
    with pytest.raises(SystemExit, match="1"):
        stop.main(["friends"])
    folder = tmp_path / "friends"
    again = f"go on with: python -m decentral.peer --state-dir {folder}"
    assert capsys.readouterr().out.splitlines() == [
        f"ann: ended 30 s ago without stopping (killed or crashed), last saved 40 s ago; {again}/one",
        f"bob: ended 99 s ago without stopping (killed or crashed), never saved; {again}/three",
        "friends: stopped already",
    ]


def test_peers_that_have_ended_are_found_by_name_and_run_as_ps_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(tmp_path / "friends" / "one")
    journal(
        tmp_path / "friends" / "two", (1, "started", {**STARTED, "name": "bob"}), (2, "stopped", {"reason": "asked"})
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: BEGAN + 100)
    for name in ("one", "two"):
        os.utime(tmp_path / "friends" / name / "journal.jsonl", (BEGAN + 70, BEGAN + 70))
    monkeypatch.setattr(stop, "here", lambda: [])
    again = f"go on with: python -m decentral.peer --state-dir {tmp_path}/friends/one"
    dead = f"ann: ended 30 s ago without stopping (killed or crashed), last saved 40 s ago; {again}"
    with pytest.raises(SystemExit, match="1"):
        stop.main(["ann"])
    assert capsys.readouterr().out.splitlines() == [dead]
    assert stop.main(["bob"]) == 0
    assert capsys.readouterr().out == "bob: stopped already\n"
    with pytest.raises(SystemExit, match="1"):
        stop.main(["gpt-3fa2c1"])
    assert capsys.readouterr().out.splitlines() == [dead, "gpt-3fa2c1: stopped already"]
    assert stop.main(["anne"]) == 2
    assert "did you mean ann?" in capsys.readouterr().err
    journal(tmp_path / "others" / "living", (1, "started", {**STARTED, "name": "eve"}))
    living = of(tmp_path / "others" / "living")
    running = {living: PeerStatus.of(living)}
    near, one, two = stop.ended_here(running), tmp_path / "friends" / "one", tmp_path / "friends" / "two"
    assert stop.chosen(running, ["gpt-3fa2c1"], near) == ([living], {Path("gpt-3fa2c1"): [one, two]})
    assert stop.chosen(running, ["ann", "eve"], near) == ([living], {Path("ann"): [one]})
    assert stop.chosen(running, ["eve"], {one: ("eve", "gpt-1")}) == ([living], {})  # the running peer is meant


def test_killed_peers_are_listed_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(tmp_path / "friends" / "one")
    os.utime(tmp_path / "friends" / "one" / "journal.jsonl", (BEGAN + 70, BEGAN + 70))
    two = training(tmp_path / "others" / "two")
    journal(tmp_path / "others" / "gone", (1, "started", STARTED), (2, "stopped", {"reason": "x"}))
    journal(tmp_path / "others" / "lost", (1, "started", {**STARTED, "name": "bob"}))
    monkeypatch.setattr(ps, "here", lambda: [])
    monkeypatch.setattr(time, "time", lambda: BEGAN + 100)
    monkeypatch.chdir(tmp_path / "friends")
    ps.main([])
    told = "ended 30 s ago without stopping (killed or crashed), last saved 40 s ago"
    assert capsys.readouterr().out.splitlines() == [
        "no peer runs on this machine", f"ann in {tmp_path}/friends/one: {told}",
    ]  # fmt: skip
    assert two.folder is not None
    with (two.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        beside = ps.killed_lately([two], tmp_path / "friends", BEGAN + 100)
        assert [(one.name, one.checkpoint_at) for one in beside] == [("ann", BEGAN + 60), ("bob", None)]
    assert ps.killed_lately([], tmp_path / "friends", BEGAN + 2 * 86400) == []


def test_a_folder_whose_lock_is_held_is_not_said_to_be_stopped(tmp_path: Path) -> None:
    """The peer in it belongs to another user, or this user's list would have it."""
    journal(tmp_path / "peer-1", (1, "started", STARTED))
    with (tmp_path / "peer-1" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"a peer of another user runs in .*peer-1; only that user can stop it"):
            stop.chosen({}, [str(tmp_path)])
    assert stop.chosen({}, [str(tmp_path)]) == ([], {tmp_path: [tmp_path / "peer-1"]})


def test_an_empty_text_stops_nobody_though_peers_may_have_no_name(
    running: dict[RunningPeer, PeerStatus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's variable may be empty; the present folder would be the one that it names."""
    monkeypatch.chdir(tmp_path / "swarm")
    nameless = {peer: replace(status, name="") for peer, status in running.items()}
    with pytest.raises(UserError, match="got an empty string"):
        stop.chosen(nameless, [""])


def test_a_name_that_is_also_a_link_to_other_peers_folders_stops_nobody(
    running: dict[RunningPeer, PeerStatus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have made the link, in a folder such as /tmp."""
    ann, bob, other, _ = running
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ann").symlink_to(tmp_path / "swarm")
    with pytest.raises(UserError, match=r"ann is a peer.s name and a folder of other peers; .* or \./ann"):
        stop.chosen(running, ["ann"])
    assert stop.chosen(running, ["./ann"]) == ([ann, bob, other], {})


@pytest.mark.parametrize("flags", [[], ["ann", "--all"]])
def test_stop_needs_to_be_told_what(flags: list[str]) -> None:
    with pytest.raises(UserError, match="expected names or folders of peers, or --all"):
        stop.parse(flags)


class Answers(io.StringIO):
    """A terminal on which a user types these lines."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "flags", "stops"),
    [
        (Answers("y\n"), ["--all"], True),
        (Answers("\n"), ["--all"], False),
        (Answers(""), ["--all"], False),  # Ctrl-D
        (Answers(""), ["--all", "--yes"], True),
        (io.StringIO(""), ["--all"], True),  # a script
    ],
)
def test_stop_all_says_whom_it_stops_and_asks_on_a_terminal(
    running: dict[RunningPeer, PeerStatus],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: io.StringIO,
    flags: list[str],
    stops: bool,
) -> None:
    asked: list[list[RunningPeer]] = []

    def ask(peers: list[RunningPeer]) -> NoReturn:
        asked.append(peers)
        raise SystemExit(5)  # before anybody is stopped

    typed.seek(0)
    monkeypatch.setattr(sys, "stdin", typed)
    monkeypatch.setattr(stop, "here", lambda: list(running))
    monkeypatch.setattr(StopRequests, "ask", ask)
    with pytest.raises(SystemExit, match="5" if stops else "1"):
        stop.main(flags)
    assert bool(asked) == stops
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == list(STATUS_COLUMNS)
    assert [line[0] for line in shown[1:4]] == ["ann", "bob", "bob"]


def test_it_is_said_what_is_on_the_disk(tmp_path: Path) -> None:
    peer = training(tmp_path / "one")
    assert peer.folder is not None
    assert stop.what_was_saved(peer, BEGAN + 100, BEGAN + 200)[1].startswith("ended before it trained; ")
    journal(peer.folder, (70, "checkpoint", {"step": 1240}), (71, "stopped", {"reason": "interrupted"}))
    saved, said = stop.what_was_saved(peer, BEGAN + 30, BEGAN + 100)
    assert (saved, said) == (
        True,
        f"stopped, learning-rate step 1,240 saved in {peer.folder}; "
        f"go on with: python -m decentral.peer --state-dir {peer.folder}",
    )
    journal(peer.folder, (72, "stopped", {"reason": "interrupted", "unsaved": "No space left on device"}))
    saved, said = stop.what_was_saved(peer, BEGAN + 30, BEGAN + 100)
    assert (saved, said) == (
        False,
        f"stopped, NOT saved (No space left on device); {peer.folder} keeps the checkpoint of 40 s ago",
    )


def test_a_peer_of_a_temporary_swarm_is_not_said_to_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`decentral local` without --state-dir removes its folder once its peers have ended, perhaps sooner than this."""
    folder = TemporaryFolder.make()
    peer = training(folder.path / "peer-0")
    monkeypatch.setattr(stop, "here", lambda: [peer])

    class Ended:
        def has_ended(self, _peer: RunningPeer, _seconds: float) -> bool:
            folder.remove()
            return True

    monkeypatch.setattr(StopRequests, "ask", lambda _peers: nullcontext(Ended()))
    assert stop.main(["--all"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"ann (pid 5): stopped; {peer.folder} is temporary and not kept (--state-dir DIR keeps one)"


@pytest.mark.swarm
def test_a_real_peer_is_listed_and_stopped_by_its_folder(peers: Peers) -> None:
    """And a process that merely has the number of a peer is not: the peer's number comes from its lock."""
    peers.start("one", *TINY, "--name", "a name")
    peers.until("it trains", lambda: bool(peers.lines("one", "step")))
    folder = peers.folder / "one"
    said = subprocess.run([sys.executable, "-m", "decentral.ps", "--json"], capture_output=True, text=True, check=True)
    (found,) = [one for one in json.loads(said.stdout)["peers"] if one["folder"] == str(folder)]
    assert (found["name"], found["phase"], found["pid"]) == ("a name", "training", peers.processes["one"].pid)
    assert found["run"] == peers.lines("one", "started")[0]["run"]
    done = subprocess.run([sys.executable, "-m", "decentral.stop", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"saved in {folder}; go on with:" in done.stdout
    assert peers.processes["one"].wait(1) == 0
    (stopped,) = peers.lines("one", "stopped")
    assert (stopped["reason"], stopped.get("unsaved")) == ("interrupted", None)
    steps = [line["step"] for line in peers.lines("one", "step")]
    assert peers.lines("one", "checkpoint")[-1]["step"] >= max(steps)


def test_a_suspended_peer_is_shown_as_such_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path)
    (tmp_path / KEY).touch()
    monkeypatch.setattr(stop, "STOP_S", 0.2)
    with piped(sys.executable, "-I", "-S", "-c", HANGS, str(tmp_path / "lock"), "-m", "decentral.peer") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        (peer,) = (one for one in ps.here() if one.folder == tmp_path)
        assert PeerStatus.of(peer).phase == "suspended"
        with pytest.raises(SystemExit, match="1"):
            stop.main([str(tmp_path)])
        told = f"ann (pid {process.pid}): suspended; it saves and ends after: kill -CONT {process.pid}\n"
        assert capsys.readouterr().out == told
        process.send_signal(signal.SIGCONT)
        assert PeerStatus.of(peer).phase != "suspended"


def test_a_peer_whose_folder_was_deleted_is_shown_and_stopped_but_not_said_to_have_saved(tmp_path: Path) -> None:
    folder = training(tmp_path / "peer-0").folder
    assert folder is not None
    (folder / KEY).touch()
    with piped(sys.executable, "-I", "-S", "-c", HANGS, str(folder / "lock"), "-m", "decentral.peer") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        shutil.rmtree(folder)
        (peer,) = (one for one in ps.here() if one.pid == process.pid)
        status = PeerStatus.of(peer)
        assert (status.phase, status.folder, status.step) == ("folder deleted", str(folder), None)
        assert stop.chosen({peer: status}, [str(folder)]) == ([peer], {})
        told = f"stopped, NOT saved: its folder {folder} was deleted while it ran"
        assert stop.what_was_saved(peer, BEGAN, BEGAN + 1) == (False, told)


def test_a_peer_that_starts_is_known_by_the_name_in_its_command(running: dict[RunningPeer, PeerStatus]) -> None:
    ann, *_ = running
    starting = RunningPeer(11, os.geteuid(), BEGAN, Path("swarm/peer-7"), "carl")
    statuses = {ann: running[ann], starting: PeerStatus.of(starting)}
    assert statuses[starting].phase == "starting"
    assert stop.chosen(statuses, ["carl"]) == ([starting], {})
    nameless = replace(starting, name="")
    with pytest.raises(UserError, match=r"'anna'; peers that start have no name yet; name a folder: swarm/peer-7 "):
        stop.chosen({ann: running[ann], nameless: PeerStatus.of(nameless)}, ["anna"])


HANGS = """
import fcntl, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_peer_that_hangs_is_not_killed_and_not_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds its folder's lock, as a peer does, and does not leave when it is asked to."""
    (tmp_path / KEY).touch()
    monkeypatch.setattr(stop, "STOP_S", 0.2)
    with piped(sys.executable, "-I", "-S", "-c", HANGS, str(tmp_path / "lock"), "-m", "decentral.peer") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(SystemExit, match="1"):
            stop.main([str(tmp_path)])
        assert "still saving; not killed" in capsys.readouterr().out
        assert process.poll() is None

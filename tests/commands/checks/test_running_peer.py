"""What a peer's journal and process tell of why it does not average."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentral.comm.wire.identity import Identity
from decentral.commands import doctor
from decentral.commands.checks import examine, running_peer
from decentral.commands.checks.finding import Finding, FindingState, unknown, warn, wrong
from decentral.commands.checks.running_peer import REMEDIES
from decentral.commands.checks.swarm import Visit
from decentral.core import config, strict_json
from decentral.core.ids import PeerId, RunId
from decentral.engine import checkpoint
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.records import PeerPhase, PeerRecord, Profile
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.peers.startup.visit import known_addresses
from tests.processes import piped

NOW = 1e6
MOST_PID = 1 << 22  # no process has this id


def written(folder: Path, *lines: tuple[float, str, dict[str, Any]]) -> Path:
    """A journal with these lines: seconds before NOW, event, fields."""
    started: dict[str, Any] = {"peer": "QmA", "run": "gpt", "addresses": [], "device": "cpu"}
    with (folder / "journal.jsonl").open("a") as file:
        for ago_s, event, fields in ((3600.0, "started", started), *lines):
            file.write(strict_json.dumps({"t": NOW - ago_s, "event": event, **fields}) + "\n")
    return folder


def found(folder: Path) -> dict[str, Finding]:
    return {one.check: one for one in running_peer.checks(folder, NOW)}


def exchange(outcome: str, reason: str = "", ago_s: float = 30.0) -> tuple[float, str, dict[str, Any]]:
    return ago_s, "exchange", {"fragment": 0, "partner": "QmB", "outcome": outcome, "reason": reason, "seconds": 0.1}


STEP = (5.0, "step", {"step": 7, "loss": 2.5})


def test_exchanges_that_mostly_get_done_are_well(tmp_path: Path) -> None:
    lines = [exchange("done"), exchange("done"), exchange("solo", "nothing-newer"), exchange("failed", "deadline")]
    one = found(written(tmp_path, *lines))["exchanges"]
    assert one.state == FindingState.OK
    assert one.seen.startswith("2/1/1 (done/solo/failed)")


@pytest.mark.parametrize(("reason", "says"), [("unreachable", "--announce"), ("deadline", "slow or lossy link")])
def test_exchanges_that_all_fail_have_the_remedy_of_their_commonest_reason(
    tmp_path: Path, reason: str, says: str
) -> None:
    one = found(written(tmp_path, exchange("failed", "busy"), *[exchange("failed", reason)] * 3))["exchanges"]
    assert one.state == FindingState.WRONG
    assert f"{reason} 3, busy 1" in one.seen
    assert says in one.remedy


def test_a_journal_that_has_just_begun_a_new_file_is_checked_with_the_lines_before(tmp_path: Path) -> None:
    written(tmp_path, exchange("done"), exchange("done")).joinpath("journal.jsonl").rename(tmp_path / "journal-1.jsonl")
    line = strict_json.loads((tmp_path / "journal-1.jsonl").read_text().splitlines()[0])
    (tmp_path / "journal.jsonl").write_text(strict_json.dumps(line | {"t": NOW - 1, "event": "continued"}) + "\n")
    assert found(tmp_path)["exchanges"].seen.startswith("2/0/0 (done/solo/failed)")


def test_a_reason_that_is_not_known_here_leads_to_the_table(tmp_path: Path) -> None:
    one = found(written(tmp_path, exchange("failed", "new-reason")))["exchanges"]
    assert "table of reasons, docs/PROTOCOL.md" in one.remedy


def test_what_happened_an_hour_ago_is_left_out(tmp_path: Path) -> None:
    one = found(written(tmp_path, exchange("failed", "deadline", ago_s=3000.0), exchange("done")))["exchanges"]
    assert one.state == FindingState.OK


def test_lines_of_an_earlier_life_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, exchange("failed", "deadline"))
    assert "1/0/0" in found(written(tmp_path, exchange("done")))["exchanges"].seen


def test_what_the_peer_itself_says_is_wrong_is_told_once_each(tmp_path: Path) -> None:
    full = {"reason": "no checkpoint could be written: disk"}
    lines: list[tuple[float, str, dict[str, Any]]]
    more: list[tuple[float, str, dict[str, Any]]]
    lines = [(9.0, "error", full), (8.0, "error", full), (7.0, "unheld", {"reason": "no peer holds layers 1 to 2"})]
    more = [(6.0, "clock", {"jumped_s": 3600.0}), (5.0, "refused", {"by_reason": {"version": 4}})]
    seen = list(running_peer.checks(written(tmp_path, *lines, *more), NOW))
    assert [one.seen for one in seen if one.check == "error"] == [full["reason"]]
    by_check = {one.check: one for one in seen}
    assert by_check["layers"].state == FindingState.WRONG
    assert "60 min" in by_check["clock jump"].seen
    assert "version 4" in by_check["refused"].seen
    assert "--upgrade decentral" in by_check["refused"].remedy


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ({"reason": "interrupted"}, FindingState.OK),
        ({"reason": "interrupted", "unsaved": "No space left on device"}, FindingState.WRONG),
        ({"reason": "error: out of memory"}, FindingState.WRONG),
    ],
)
def test_a_peer_that_has_stopped_says_why(tmp_path: Path, line: dict[str, str], state: FindingState) -> None:
    one = found(written(tmp_path, (5.0, "stopped", line)))["journal"]
    assert one.state == state
    assert all(text in one.seen for text in line.values())


def test_a_peer_that_was_killed_has_no_last_line(tmp_path: Path) -> None:
    assert "it was killed" in found(written(tmp_path, STEP))["journal"].seen


def test_a_folder_without_a_journal_is_no_fault(tmp_path: Path) -> None:
    assert found(tmp_path)["journal"].state == FindingState.UNKNOWN


def test_garbage_in_a_journal_is_no_traceback(tmp_path: Path) -> None:
    written(
        tmp_path, (5.0, "refused", {"by_reason": 7}), (4.0, "exchange", {"outcome": []}), (3.0, "step", {"loss": ""})
    )
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "t": "soon"}\n\xff\xff\n{"event": 7}\n{"t": 1')
    assert found(tmp_path)["exchanges"].state == FindingState.WARN  # as if they were not there


def test_a_process_that_holds_the_folder_and_is_stopped(tmp_path: Path) -> None:
    holds = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
    holds += "print('held', flush=True); sys.stdin.read()"
    with piped(sys.executable, "-I", "-S", "-c", holds, str(tmp_path / "lock")) as peer:
        assert peer.stdout is not None
        peer.stdout.readline()
        assert running_peer.holder(tmp_path) == peer.pid
        assert running_peer.process(peer.pid).state == FindingState.OK
        peer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED)
        stopped = running_peer.process(peer.pid)
        assert f"kill -CONT {peer.pid}" in stopped.remedy


def test_layers_that_are_held_again_are_no_trouble(tmp_path: Path) -> None:
    unheld = (60.0, "unheld", {"reason": "no peer that trains holds layers 4 to 5", "first": 4, "last": 6})
    assert found(written(tmp_path, unheld, STEP))["layers"].state == FindingState.WRONG
    again = tmp_path / "again"
    again.mkdir()
    assert "layers" not in found(written(again, unheld, (40.0, "held", {}), STEP))


def test_peers_that_went_without_a_farewell_are_missed_until_they_are_back(tmp_path: Path) -> None:
    left = [(90.0, "peer_left", {"peer": f"QmPeer{n}", "reason": why}) for n, why in enumerate(("expired", "left"))]
    one = found(written(tmp_path, *left, STEP))["peers"]
    assert (one.state, one.seen) == (FindingState.WARN, "disappeared without a goodbye in the last 10 minutes: mPeer0")
    back = tmp_path / "back"
    back.mkdir()
    assert "peers" not in found(written(back, *left, (40.0, "peer_joined", {"peer": "QmPeer0"}), STEP))


def test_a_killed_peer_s_remedy_names_its_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "a b").mkdir()
    assert f"decentral.peer --state-dir '{folder}';" in found(written(folder, STEP))["journal"].remedy


def test_a_peer_that_was_stopped_without_exchanges_is_well(tmp_path: Path) -> None:
    one = found(written(tmp_path, STEP, (4.0, "stopped", {"reason": "interrupted"})))["exchanges"]
    assert (one.state, one.seen) == (FindingState.OK, "none in the last 10 minutes before the peer stopped")


def test_the_last_farewell_is_told(tmp_path: Path) -> None:
    left = [(90.0, "peer_left", {"peer": f"QmPeer{n}", "reason": why}) for n, why in enumerate(("left", "expired"))]
    assert running_peer.departure(written(tmp_path, *left, STEP), NOW) == "mPeer0 left 90 s ago"
    assert running_peer.departure(tmp_path / "none", NOW) == ""


def test_a_stopped_peer_is_not_told_to_dial_itself(tmp_path: Path) -> None:
    own = Identity.load_or_create(tmp_path / "identity.key").peer
    StateFolder(tmp_path).write_listen(["/ip4/127.0.0.1/tcp/4001"])
    assert [own] == [one.rpartition("/")[2] for one in known_addresses(tmp_path)]
    assert examine.PeerPlace.of(doctor.parse(["--state-dir", str(tmp_path)])).addresses == []


GONE = "/ip4/127.0.0.1/tcp/1/p2p/QmTKuPwewYncoYX4W3ZrgNKpHzRP7UqNF5NjQmN3LXEsr6"  # nobody listens there


@pytest.mark.parametrize(
    ("held", "starts"),
    [
        ((0, 4), "it would start alone, from its checkpoint"),
        (None, "it would start alone, with fresh weights"),
        ((0, 2), "it would start, and wait for peers with the layers that it lacks; it has 0 to 1"),
    ],
)
def test_a_stopped_peer_is_not_wrong_where_nobody_that_it_knows_answers(
    tmp_path: Path, held: tuple[int, int] | None, starts: str
) -> None:
    """It starts without them, unlike one that is to join by an address of --join."""
    folder = StateFolder(tmp_path)
    folder.write_flags(PeerFlags(listen=("/ip4/127.0.0.1/tcp/0",)))
    folder.write_run(RunId("gpt-3fa2c1"), config.load(None, ["model.depth=2"]))
    AddressBook.load(tmp_path / "peers.json").learn(PeerId(GONE.rpartition("/")[2]), (GONE,))
    if held is not None:
        checkpoint.write(tmp_path, {}, {"fragments": [{"first": held[0], "last": held[1]}]})
    refusal = wrong("join", f"{GONE}: connection refused", "start that peer")
    flags = ["--state-dir", str(tmp_path)]
    (one,) = examine._excused([refusal], False, examine.PeerPlace.of(doctor.parse(flags)))
    assert (one.check, one.state) == ("join", FindingState.WARN)
    assert one.seen.startswith(f"no peer that this one knows answers now, such as {GONE}: connection refused; {starts}")
    asked = examine.PeerPlace.of(doctor.parse([*flags, "--join", GONE]))
    assert examine._excused([refusal], False, asked) == [refusal]


def test_loopback_addresses_from_other_peers_are_dialled_only_if_the_peer_listens_there(tmp_path: Path) -> None:
    other, public = PeerId("QmOther"), "/ip4/8.8.8.8/tcp/4001/p2p/QmOther"
    AddressBook.load(tmp_path / "peers.json").learn(other, (inside := "/ip4/127.0.0.1/tcp/4001/p2p/QmOther", public))
    assert known_addresses(tmp_path) == [public]
    StateFolder(tmp_path).write_flags(PeerFlags(listen=("/ip4/127.0.0.1/tcp/0",)))
    assert known_addresses(tmp_path) == [inside]


def test_a_swarm_whose_other_peers_said_farewell_is_well() -> None:
    own = PeerId("QmOwn")
    visit: Any = SimpleNamespace(known={own: SimpleNamespace(phase="training")}, silent=set(), run="gpt-1")
    assert Visit._members(visit, own, "").state == FindingState.WRONG
    one = Visit._members(visit, own, "N5Cw9J left 20 s ago")
    assert (one.state, one.seen) == (FindingState.OK, "run gpt-1: no peer but this one; N5Cw9J left 20 s ago")


def test_a_killed_peer_whose_record_is_still_there_is_not_counted_as_another_peer() -> None:
    """Its record outlives it; layers that only it holds are not said to be held."""
    own, killed, third = PeerId("QmOwn"), PeerId("Qmxx3kPq2"), PeerId("QmThird")

    def training(first: int, last: int) -> PeerRecord:
        facts: dict[str, Any] = {"run": RunId("gpt-1"), "time": NOW, "addresses": (), "tokens": 0, "step": 9}
        profile = Profile("cpu", 1, 1.0, 1.0, name="ann")
        return PeerRecord(**facts, profile=profile, first=first, last=last, lr_step=7, phase=PeerPhase.TRAINING)

    visit: Any = SimpleNamespace(known={own: training(0, 2), killed: training(2, 4)}, silent={killed}, run="gpt-1")
    visit.config = config.load(None, ["model.depth=2", "gossip.fragment_parameters=1"])
    one = Visit._members(visit, own, "")
    said = "run gpt-1: no other peer answers now, but has a record: x3kPq2 (ann)"
    assert (one.state, one.seen) == (FindingState.WARN, said)
    assert Visit._layers(visit).state == FindingState.UNKNOWN
    visit.known[third] = training(2, 4)
    assert Visit._members(visit, own, "").seen == (
        "run gpt-1: 1 other peer (1 train, 0 join), learning-rate step 7; without an answer now: x3kPq2 (ann)"
    )
    assert Visit._layers(visit).state == FindingState.OK


def test_a_peer_of_synchronous_rounds_exchanges_nothing_else(tmp_path: Path) -> None:
    assert "exchanges" in found(written(tmp_path, STEP))
    StateFolder(tmp_path).write_run(RunId("gpt-3fa2c1"), config.load(None, ["gossip.algorithm=synchronous"]))
    assert "exchanges" not in found(written(tmp_path, STEP))


def test_nobody_holds_a_folder_that_was_let_go(tmp_path: Path) -> None:
    with StateFolder.claim(str(tmp_path)):
        assert running_peer.holder(tmp_path) == os.getpid()
    assert running_peer.holder(tmp_path) is None


@pytest.mark.parametrize("silent_s", [5.0, 500.0])
def test_a_running_peer_whose_journal_stands_still(tmp_path: Path, silent_s: float) -> None:
    folder = written(tmp_path, (silent_s, "step", {"step": 7, "loss": 2.5}))
    with StateFolder.claim(str(folder)):
        one = found(folder)["training"]
    assert one.state == (FindingState.OK if silent_s < 60 else FindingState.WRONG)


def test_a_running_peer_that_does_not_get_its_state(tmp_path: Path) -> None:
    folder = written(tmp_path, *[(5.0, "donor_failed", {"peer": "QmB", "reason": "unreachable"})] * 2)
    with StateFolder.claim(str(folder)):
        one = found(folder)["training"]
    assert one.state == FindingState.WRONG
    assert "unreachable 2" in one.seen
    assert one.remedy == REMEDIES["unreachable"]


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("step", {"t": 10**400, "step": 10**400, "loss": 10**400}),
        ("step", {"t": "now", "loss": "small"}),
        ("suspended", {"seconds": 10**400}),
        ("refused", {"by_reason": {"garbage": "x", "fields": None, "stale": [1], "shape": 10**400}}),
        ("exchange", {"outcome": ["done"], "reason": {"why": 1}}),
    ],
)
def test_a_journal_that_is_spoilt_is_looked_at_all_the_same(tmp_path: Path, event: str, fields: dict[str, Any]) -> None:
    assert found(written(tmp_path, (30.0, event, fields)))["journal"].state == FindingState.WARN


def test_the_sum_says_what_could_not_be_checked() -> None:
    assert doctor._remedies([unknown("latency", "no other peer is there")]).endswith(
        "1 check: 0 wrong, 0 warnings, 1 could not be made"
    )


def test_the_sum_counts_one_warning_in_the_singular() -> None:
    assert doctor._remedies([warn("disk", "slow", "use another disk")]).endswith("1 check: 0 wrong, 1 warning")


def test_a_lock_of_another_user_with_the_same_inode_is_not_taken_for_the_peer_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateFolder.claim(str(tmp_path)):
        inode = (tmp_path / "lock").stat().st_ino
        monkeypatch.setattr(running_peer, "lock_holders", lambda: {inode: [MOST_PID, os.getpid()]})
        assert running_peer.holder(tmp_path) == os.getpid()

"""The doctor in broken set-ups, made with real things: it names each, and its remedy.

One real peer serves all of them, the founder of a private swarm. Checks that need no peer are in tests/commands/checks.
"""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wan import description, namespaces
from benchmarks.wan.lab import Lab
from decentral.comm.wire import codec
from decentral.comm.wire.invitations import Permission
from decentral.comm.wire.messages import VERSION
from decentral.commands import doctor, invite
from decentral.commands.checks import swarm as swarm_checks
from decentral.core import config
from decentral.core.ids import PeerId, RunId
from decentral.engine import checkpoint
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.startup import invitation_files
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.scheduler.topology import topology
from tests.commands.peer_processes import TINY, Peers
from tests.commands.refusals import LOOPBACK
from tests.patient_time import LIMIT_S

MEASURED = ("disk", "latency", "download")  # checks of speeds, which a loaded machine does not have
HOUR_AHEAD = "import sys, time; wall = time.time; time.time = lambda: wall() + 3600.0; "
HOUR_AHEAD += "from decentral.commands import doctor; sys.exit(doctor.main(sys.argv[1:]))"

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """The founder of a private swarm, which trains."""
    running = Peers(tmp_path_factory.mktemp("doctor"))
    running.start("founder", "--private", "--throttle=40", *TINY, "--set", "swarm.checkpoint_every_s=1")
    running.until("it has saved", lambda: bool(running.lines("founder", "checkpoint")))
    shutil.copy(invited(running), running.folder / "revoked.invite")  # it hears of it while the first tests run
    assert invite.main(["--state-dir", str(running.folder / "founder"), "--revoke", revoked(running)]) == 0
    yield running
    running.end()


def address(peers: Peers) -> str:
    return str(peers.lines("founder", "started")[0]["addresses"][0])


def invited(peers: Peers, until: float = 9e9, may: Permission = Permission.TRAIN) -> str:
    """The file of an invitation by the founder."""
    with FounderFile.open(peers.folder / "founder") as ours:
        holding = ours.invite("ann", until, may)
    path = peers.folder / f"{holding.invitation.text()}.invite"
    invitation_files.write_holding(path, holding)
    return str(path)


def revoked(peers: Peers) -> str:
    """The file of an invitation that was revoked."""
    return str(peers.folder / "revoked.invite")


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str]) -> Any:
    """`examined(*flags)`: the exit code, and what was found by the name of the check (the last of each)."""

    def run(*flags: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = doctor.main(["--json", *flags])
        return code, by_check(capsys.readouterr().out)

    return run


def by_check(output: str) -> dict[str, dict[str, str]]:
    return {one["check"]: one for one in json.loads(output)["findings"]}


def test_a_peer_that_may_join_finds_nothing_wrong(peers: Peers, examined: Any, tmp_path: Path) -> None:
    code, found = examined(
        "--join", address(peers), "--invite", invited(peers), "--state-dir", str(tmp_path), *LOOPBACK
    )
    assert code == 0
    assert {"ok", "unknown"} >= {one["state"] for check, one in found.items() if check not in MEASURED}, found
    run = peers.lines("founder", "started")[0]["run"]
    assert run in found["join"]["seen"]
    assert "1 train" in found["swarm"]["seen"]
    assert found["clock"]["state"] == found["layers"]["state"] == "ok"
    assert "to the nearest" in found["latency"]["seen"]
    assert "on this machine" in found["reachability"]["seen"]
    assert not list(tmp_path.iterdir())


def test_a_running_peer_that_is_alone(peers: Peers, examined: Any) -> None:
    code, found = examined("--state-dir", str(peers.folder / "founder"))
    assert code == 1
    assert "no peer but this one" in found["swarm"]["seen"]
    assert "start others with the line" in found["swarm"]["remedy"]
    assert found["join"]["seen"].startswith("this peer itself, at /ip4/127.0.0.1/")
    assert found["clock"]["seen"] == "no other peer's clock to compare with"
    assert found["latency"]["seen"] == "the swarm has no other peer"
    assert found["exchanges"]["seen"] == "none in the last 10 minutes"
    assert found["training"]["state"] == found["process"]["state"] == found["checkpoint"]["state"] == "ok"
    assert "in use by a peer" in found["state folder"]["seen"]


def test_one_machine_with_a_wrong_clock_few_files_no_gpu_and_a_corrupt_checkpoint(peers: Peers, tmp_path: Path) -> None:
    shutil.copy(peers.folder / "founder" / checkpoint.FILE, tmp_path)
    content = bytearray((tmp_path / checkpoint.FILE).read_bytes())
    content[-8] ^= 1
    (tmp_path / checkpoint.FILE).write_bytes(content)
    flags = ["--json", "--join", address(peers), "--invite", invited(peers), "--state-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", HOUR_AHEAD, *flags, "--device", "cuda:7", *LOOPBACK],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1, done.stderr
    found = by_check(done.stdout)
    assert re.search(r"\b(59|60) min ahead of one peer's", found["clock"]["seen"])
    assert "timedatectl set-ntp true" in found["clock"]["remedy"]
    assert "limit 100" in found["open files"]["seen"]
    assert "ulimit -Hn" in found["open files"]["remedy"]
    assert "--device cuda:7: this machine has" in found["device"]["seen"]
    assert "--device cpu" in found["device"]["remedy"]
    assert "does not match" in found["checkpoint"]["seen"]
    assert f"move {tmp_path / checkpoint.FILE} away" in found["checkpoint"]["remedy"]


def test_an_address_where_nobody_listens(examined: Any) -> None:
    gone = "/ip4/127.0.0.1/tcp/1/p2p/QmTKuPwewYncoYX4W3ZrgNKpHzRP7UqNF5NjQmN3LXEsr6"
    code, found = examined("--join", gone, *LOOPBACK)
    assert code == 1
    assert "connection refused" in found["join"]["seen"]
    assert "start that peer" in found["join"]["remedy"]


def test_a_stopped_peer_whose_swarm_has_stopped_too(examined: Any, tmp_path: Path) -> None:
    """It starts again without the peers that it knew."""
    gone = "/ip4/127.0.0.1/tcp/1/p2p/QmTKuPwewYncoYX4W3ZrgNKpHzRP7UqNF5NjQmN3LXEsr6"
    StateFolder(tmp_path).write_flags(PeerFlags(listen=("/ip4/127.0.0.1/tcp/0",)))
    StateFolder(tmp_path).write_run(RunId("gpt-123456"), config.Config())
    AddressBook.load(tmp_path / "peers.json").learn(PeerId(gone.rpartition("/")[2]), (gone,))
    code, found = examined("--state-dir", str(tmp_path))
    assert (code, found["join"]["state"]) == (0, "warn")
    assert "connection refused" in found["join"]["seen"]


def test_the_address_of_a_peer_that_has_another_identity_now(peers: Peers, examined: Any) -> None:
    place = address(peers).partition("/p2p/")[0]
    code, found = examined("--join", f"{place}/p2p/QmTKuPwewYncoYX4W3ZrgNKpHzRP7UqNF5NjQmN3LXEsr6", *LOOPBACK)
    assert code == 1
    assert "another peer listens there" in found["join"]["seen"]
    assert "another identity" in found["join"]["remedy"]


def test_the_state_folder_of_another_run(peers: Peers, examined: Any, tmp_path: Path) -> None:
    StateFolder(tmp_path).write_run(RunId("other-123456"), config.Config())
    code, found = examined(
        "--join", address(peers), "--invite", invited(peers), "--state-dir", str(tmp_path), *LOOPBACK
    )
    assert code == 1
    assert "not in other-123456" in found["run"]["seen"]
    assert "another --state-dir" in found["run"]["remedy"]


@pytest.mark.parametrize(("ours", "who"), [(VERSION + 1, "the peer there"), (VERSION - 1, "this machine")])
def test_another_version_of_the_protocol(
    peers: Peers, examined: Any, ours: int, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer speaks one version, and this process another."""
    monkeypatch.setattr(codec, "VERSION", ours)
    monkeypatch.setattr(swarm_checks, "VERSION", ours)
    code, found = examined("--join", address(peers), "--invite", invited(peers), *LOOPBACK)
    assert code == 1
    assert found["version"]["remedy"].startswith(f"upgrade {who}: ")


def test_no_invitation(peers: Peers, examined: Any) -> None:
    code, found = examined("--join", address(peers), *LOOPBACK)
    assert code == 1
    assert "ask its founder for an invitation" in found["invitation"]["remedy"]


@pytest.mark.parametrize("whose", ["expired", "revoked"])
def test_an_invitation_that_counts_no_longer(peers: Peers, examined: Any, whose: str) -> None:
    path = revoked(peers) if whose == "revoked" else invited(peers, until=1e9)
    peers.until("the founder's peer knows", lambda: whose == "expired" or bool(peers.lines("founder", "revoked")))
    code, found = examined("--join", address(peers), "--invite", path, *LOOPBACK)
    assert code == 1
    assert whose in found["invitation"]["seen"]
    assert "ask the swarm's founder for a new invitation" in found["invitation"]["remedy"]


@pytest.mark.parametrize(("spoilt", "said"), [(True, "not a valid invitation"), (False, "to look only")])
def test_an_invitation_with_which_no_peer_may_join(peers: Peers, spoilt: bool, said: str) -> None:
    path = Path(invited(peers, may=Permission.LOOK))
    path.write_text(path.read_text().replace('"ann"', '"bob"') if spoilt else path.read_text())
    found = swarm_checks.invitation(path)
    assert said in found.seen
    assert "founder" in found.remedy


def test_a_port_that_another_program_has(examined: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, found = examined("--listen", f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
    assert code == 1
    assert "address already in use" in found["port"]["seen"]
    assert "--listen at another" in found["port"]["remedy"]


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flags in (["--join", "1.2.3.4"], ["--state-dir", str(tmp_path / "file")], ["--fix"]):
        assert doctor.main(flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
@pytest.mark.night
def test_behind_a_router_without_a_forwarded_port_and_with_a_partner_behind_another(tmp_path: Path) -> None:
    """Peer 0 has an open port, the doctor is behind a home's router, and so is an address that it is given."""
    tree = {"regions": {"x": {"count": 3}}, "inside": {"delay_ms": 5, "bandwidth_gbps": 0.1}}
    homes = replace(description.from_topology(topology.parse(tree)), nat={1: "home", 2: "home"})
    running = Peers(tmp_path)
    with Lab(homes, LIMIT_S) as lab:
        command = [sys.executable, "-m", "decentral.peer", "--plain", "--throttle=40", *TINY]
        command += ["--state-dir", str(tmp_path / "open")]
        with (tmp_path / "output.txt").open("wb") as output:
            lab.popen(0, command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        running.until("it trains", lambda: bool(running.lines("open", "joined")))
        there = running.lines("open", "started")[0]["addresses"][0]
        blocked = f"/ip4/{lab.address(2)}/tcp/4001/p2p/QmTKuPwewYncoYX4W3ZrgNKpHzRP7UqNF5NjQmN3LXEsr6"
        command = [sys.executable, "-m", "decentral.doctor", "--json", "--join", there, "--join", blocked]
        asked = lab.popen(1, command, stdout=subprocess.PIPE, text=True)
        output_text, _ = asked.communicate(timeout=LIMIT_S)
        found = json.loads(output_text)["findings"]
    seen = {one["check"]: one for one in found}
    assert "behind a router: this machine is 192.168." in seen["NAT"]["seen"]
    assert "could not dial back" in seen["reachability"]["seen"]
    assert "forward TCP port" in seen["reachability"]["remedy"]
    assert "--announce /ip4/11.0." in seen["reachability"]["remedy"]
    (no_answer,) = [one for one in found if one["check"] == "join" and one["state"] != "ok"]
    assert "packets are dropped" in no_answer["seen"]
    assert "open that TCP port in the firewalls" in no_answer["remedy"]

"""The lab itself: what it says without root, and with it that real packets travel and that nothing stays behind."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.wan import __main__ as command
from benchmarks.wan import namespaces
from decentral.core.errors import UserError

ROOT = Path(__file__).parent.parent.parent

# A lab of two peers, 40 ms apart. It prints its router, a process in it, and what the self-test measured of the pair.
STARTS = """
import time
from benchmarks.wan import description, selftest
from benchmarks.wan.lab import Lab
from decentral.scheduler.shared import topology

tree = {"regions": {"x": {"count": 2}}, "inside": {"delay_ms": 20, "bandwidth_gbps": 0.02}}
with Lab(description.from_topology(topology.parse(tree)), 60) as lab:
    sleeper = lab.popen(0, ["sleep", "60"])
    for peer in (0, 1):
        selftest.serve(lab, peer)
    found = selftest.measure(lab, (0, 1), warm_up_s=0.2, seconds=0.5)
    print(lab.router_pid, sleeper.pid, found.round_trip_s, min(found.rate), flush=True)
    time.sleep(60)
"""


def missing() -> str:
    """Why the lab cannot run here; empty where it can."""
    try:
        namespaces.require_root()
        with namespaces.children_in(None):
            return ""
    except UserError as error:
        return str(error)


def test_without_root_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main(["--self-test", "eight-cities", "--peers-per-region", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the lab needs")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ([], "one of the arguments --self-test --swarm is required"),
        (["--self-test", "eight-cities", "--peers-per-region", "0"], "--peers-per-region expects"),
        (["--self-test", "ten-cities", "--rates", "0"], "--rates expects"),
        (["--swarm", "four-homes", "--schedule", "cut 1"], "is no change of the network"),
        (["--swarm", "four-homes", "--nat", "9"], "--nat expects"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(
    flags: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces, "require_root", lambda: None)
    assert command.main(flags) == 2
    assert what in capsys.readouterr().err


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_packets_travel_and_a_killed_lab_leaves_nothing_behind() -> None:
    lab = subprocess.Popen([sys.executable, "-c", STARTS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    router, sleeper, round_trip_s, rate = lab.stdout.readline().split()
    assert float(round_trip_s) >= 0.04
    assert 0 < float(rate) < 2 * 2.5e6, "20 Mb/s were asked"
    inside = os.readlink(f"/proc/{sleeper}/ns/net")
    assert inside != os.readlink("/proc/self/ns/net")
    ends = [os.pidfd_open(int(pid)) for pid in (router, sleeper)]
    lab.send_signal(signal.SIGKILL)
    lab.wait()
    for end in ends:  # the kernel kills the router with the lab, and all others with the router
        assert select.select([end], [], [], 30)[0]
        os.close(end)
    assert inside not in networks()


def networks() -> set[str]:
    """The network namespaces that some process is in. A TUN device ends with the namespace that it is in."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or is a thread of the kernel
                found.add(os.readlink(process / "ns/net"))
    return found

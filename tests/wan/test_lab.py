"""The lab itself: what it says without root, and with it that real packets travel and that nothing stays behind."""

import os
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.wan import __main__ as command
from benchmarks.wan import description, namespaces, selftest
from benchmarks.wan.lab import Lab
from benchmarks.wan.links import Count
from decentral.core.errors import UserError
from decentral.scheduler.topology import topology
from tests.patient_time import LIMIT_S
from tests.processes import piped

ROOT = Path(__file__).parent.parent.parent
SILENT_S = 0.3  # after which no answer is taken to come: on a slow machine one that comes later is missed

# A lab of two peers, 40 ms apart. It prints its router, a process in it, and what the self-test measured of the pair.
STARTS = """
import time
from benchmarks.wan import description, selftest
from benchmarks.wan.lab import Lab
from decentral.scheduler.topology import topology

tree = {"regions": {"x": {"count": 2}}, "inside": {"delay_ms": 20, "bandwidth_gbps": 0.02}}
with Lab(description.from_topology(topology.parse(tree)), 3600) as lab:
    sleeper = lab.popen(0, ["sleep", "3600"])
    for peer in (0, 1):
        selftest.serve(lab, peer)
    found = selftest.measure(lab, (0, 1), warm_up_s=0.2, seconds=0.5)
    print(lab.router_pid, sleeper.pid, found.round_trip_s, min(found.rate), flush=True)
    time.sleep(3600)
"""


def test_without_root_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main(["--self-test", "eight-cities", "--peers-per-region", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the lab needs")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ([], "one of the arguments --self-test --swarm --newcomer --churn is required"),
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


needs_root = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())


@needs_root
def test_packets_travel_and_a_killed_lab_leaves_nothing_behind() -> None:
    with piped(sys.executable, "-c", STARTS, cwd=ROOT) as lab:
        assert lab.stdout is not None
        router, sleeper, round_trip_s, rate = lab.stdout.readline().split()
        inside = os.readlink(f"/proc/{sleeper}/ns/net")
        ends = [os.pidfd_open(int(pid)) for pid in (router, sleeper)]
    for end in ends:  # the kernel kills the router with the lab, and all others with the router
        assert select.select([end], [], [], LIMIT_S)[0]
        os.close(end)
    assert inside not in networks()
    assert float(round_trip_s) >= 0.04
    assert 0 < float(rate) < 20 * 2.5e6, "20 Mb/s were asked; late packets come in bursts"


@needs_root
def test_routers_and_changes_do_to_real_packets_what_they_say() -> None:
    tree = {"regions": {"x": {"count": 3}}, "inside": {"delay_ms": 5, "bandwidth_gbps": 0.1}}
    homes = replace(description.from_topology(topology.parse(tree)), nat={1: "home"})
    with Lab(homes, LIMIT_S) as lab:
        for peer in range(2):
            selftest.serve(lab, peer)
        assert answers(lab, 1, 0), "a peer behind a router reaches others"
        assert not answers(lab, 0, 1, SILENT_S), "and they cannot reach it"
        lab.change("part 1,2 | 0")
        assert not answers(lab, 1, 0, SILENT_S)
        assert lab.traffic().of(Count.CUT, 1, 0)
        lab.heal()
        assert answers(lab, 1, 0)
        before = lab.address(0)
        lab.change("move 0")
        assert lab.address(0) != before
        assert answers(lab, 1, 0)
        with pytest.raises(UserError, match="names peer 3"):
            lab.change("move 3")


def answers(lab: Lab, source: int, target: int, within_s: float = LIMIT_S) -> bool:
    """Whether a packet from one peer to another is answered."""
    asks = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(float(sys.argv[3]))"
    asks += "; s.sendto(b'?', (sys.argv[1], int(sys.argv[2]))); s.recv(9)"
    command = [sys.executable, "-I", "-S", "-c", asks, lab.address(target), str(selftest.PORT), str(within_s)]
    return lab.popen(source, command, stderr=subprocess.DEVNULL).wait() == 0


def networks() -> set[str]:
    """The network namespaces that some process is in. A TUN device ends with the namespace that it is in."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or is a thread of the kernel
                found.add(os.readlink(process / "ns/net"))
    return found

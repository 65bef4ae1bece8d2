"""Real peers on a machine that fails them: each says what is wrong, and trains and exchanges on.

test_endings.py kills their daemons and puts their machines to sleep.
"""

import resource
import signal
from pathlib import Path

import pytest

from decentral.engine import checkpoint
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.patient_time import LIMIT_S

QUICK = [*TINY, "--set", "swarm.checkpoint_every_s=1", "--set", "gossip.core_share=1"]
SMALL_FILES_BYTES = 48 * 1024  # less than a checkpoint, and than a journal of some seconds


def join(peers: Peers) -> list[str]:
    """The flags with which another peer joins A."""
    peers.until("A trains", lambda: bool(peers.lines("A", "joined")))
    return ["--join", peers.lines("A", "started")[0]["addresses"][0]]


def output(peers: Peers, name: str) -> str:
    return (peers.folder / name / "output.txt").read_text()


def goes_on(peers: Peers, name: str, after: str) -> None:
    """It exchanges after its last journal line by now."""
    last = max(line["t"] for line in peers.lines(name, "exchange"))
    peers.until(f"{name} exchanges {after}", lambda: exchanged(peers, name, since=last + 0.001))


@pytest.mark.night
@pytest.mark.swarm
def test_a_lack_of_files_and_a_damaged_checkpoint(peers: Peers) -> None:
    peers.start("A", *QUICK)
    peers.start("B", *join(peers))
    peers.until("B exchanges", lambda: exchanged(peers, "B"))
    process = peers.processes["B"]

    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    opened = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (max(8, opened - 8), limits[1]))
    peers.until("B says it", lambda: any("Too many open files" in line["reason"] for line in peers.lines("B", "error")))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
    goes_on(peers, "B", "with files")

    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    place = peers.folder / "B" / checkpoint.FILE
    place.write_bytes(place.read_bytes()[:-1000])
    peers.start("B")
    peers.until("B joined again", lambda: len(peers.lines("B", "joined")) == 2)
    goes_on(peers, "B", "with the swarm's state")
    assert "this peer starts with the swarm's weights" in output(peers, "B")
    assert peers.lines("B", "joined")[1]["donors"] == [peers.lines("A", "started")[0]["peer"]]


@pytest.mark.night
@pytest.mark.swarm
def test_a_disk_that_takes_no_more(peers: Peers) -> None:
    """No file of C may grow beyond its limit, as on a disk that is full."""
    peers.start("A", *QUICK)
    flags = join(peers)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILES_BYTES, hard))  # a child has it from its start
    try:
        peers.start("C", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    peers.until(
        "C's journal is full", lambda: "warning: the journal cannot be written (File too large)" in output(peers, "C")
    )
    last = max(line["t"] for line in peers.lines("A", "exchange"))
    peers.until("A exchanges with C", lambda: exchanged(peers, "A", since=last + 0.001))
    peers.processes["C"].send_signal(signal.SIGINT)
    assert peers.processes["C"].wait(LIMIT_S) == 1
    assert "NOT saved (OSError: [Errno 27] File too large)" in output(peers, "C")

"""The peers of a machine, by a folder of processes as Linux has it: who holds a lock is a peer, and nobody else."""

import os
import signal
from pathlib import Path

import pytest

from decentral.peers.startup.running_peers import COMMAND_BYTES, RunningPeer, StopRequests, running_peers

BOOTED = 1_700_000_000
TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Processes and state folders that a test makes up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.proc = folder, folder / "proc"
        self.proc.mkdir()
        (self.proc / "stat").write_text(f"cpu 1 2 3\nbtime {BOOTED}\n")
        self._locks: list[str] = []
        self._write_locks()

    def peer(self, name: str) -> Path:
        """A state folder."""
        path = self.folder / name
        path.mkdir()
        (path / "identity.key").write_bytes(b"key")
        (path / "lock").touch()
        return path

    def process(self, pid: int, *words: str, opens: Path | None = None, started: int = 7) -> None:
        """A process with this command line that has a file open."""
        process = self.proc / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")
        (process / "stat").write_text(f"{pid} (a (b) c) S " + " ".join(["0"] * 18) + f" {started * TICKS} 0\n")
        (process / "fd" / "0").symlink_to("/dev/null")
        if opens is not None:
            (process / "fd" / "5").symlink_to(opens / "lock")

    def locked(self, folder: Path, pid: int) -> None:
        """A row of /proc/locks."""
        inode = (folder / "lock").stat().st_ino
        self._locks.append(f"{len(self._locks)}: FLOCK  ADVISORY  WRITE {pid} fe:00:{inode} 0 EOF")
        self._write_locks()

    def _write_locks(self) -> None:
        (self.proc / "locks").write_text("".join(f"{row}\n" for row in self._locks))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


PEER = ("/usr/bin/python", "-m", "decentral.peer", "--plain")


def test_a_process_that_holds_the_lock_of_a_state_folder_is_a_peer(machine: Machine) -> None:
    one, other = machine.peer("one"), machine.peer("other")
    machine.process(71, *PEER, opens=one, started=9)
    machine.locked(one, 71)
    machine.process(70, "/home/me/.venv/bin/decentral", "peer", opens=other, started=5)
    machine.locked(other, 70)
    assert running_peers(machine.proc) == [
        RunningPeer(70, os.geteuid(), BOOTED + 5, other),
        RunningPeer(71, os.geteuid(), BOOTED + 9, one),
    ]


def test_a_process_that_got_the_number_of_a_peer_that_died_is_no_peer(machine: Machine) -> None:
    """Not even if its command line is that of a peer, or another file is open."""
    dead, elsewhere = machine.peer("dead"), machine.peer("elsewhere")
    machine.locked(dead, 80)
    machine.process(80, "sleep", "1000", opens=dead)
    machine.process(81, *PEER, opens=dead)  # it has opened the lock, and does not hold it
    machine.process(82, *PEER)
    machine.locked(elsewhere, 82)
    machine.process(83, "python", "-m", "decentral.peerless", opens=elsewhere)
    assert running_peers(machine.proc) == []


def test_a_lock_of_something_else_is_no_peer(machine: Machine) -> None:
    folder = machine.folder / "cache"
    folder.mkdir()
    (folder / "lock").touch()
    machine.process(90, *PEER, opens=folder)
    machine.locked(folder, 90)
    assert running_peers(machine.proc) == []


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(machine: Machine) -> None:
    (machine.proc / "95").mkdir()
    assert running_peers(machine.proc) == []


def test_a_process_that_is_no_longer_the_peer_is_asked_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of this test stands for one that got the number of a peer that has ended."""
    asked: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda handle, number: asked.append(number))
    gone = RunningPeer(os.getpid(), os.geteuid(), BOOTED, machine.peer("gone"))
    with StopRequests.ask([gone]) as requests:
        assert requests.has_ended(gone, 0.0)
    assert asked == []


def test_a_system_without_locks_has_no_peers_that_can_be_found(machine: Machine) -> None:
    (machine.proc / "locks").unlink()
    machine.process(71, *PEER, opens=machine.peer("one"))
    assert running_peers(machine.proc) == []


def test_a_command_line_of_another_user_may_be_gigabytes_long(machine: Machine) -> None:
    """Only its beginning is read: what follows makes nothing a peer."""
    folder = machine.peer("one")
    machine.process(71, "x" * COMMAND_BYTES, *PEER, opens=folder)
    machine.locked(folder, 71)
    assert running_peers(machine.proc) == []


def test_a_lock_with_the_same_inode_in_another_file_system_hides_no_peer(machine: Machine) -> None:
    one = machine.peer("one")
    machine.process(71, *PEER, opens=one, started=9)
    machine.locked(one, 71)
    machine.locked(one, 99)  # this row is of another user's process, with a file of the same number in /dev/shm
    assert running_peers(machine.proc) == [RunningPeer(71, os.geteuid(), BOOTED + 9, one)]


@pytest.mark.parametrize(
    ("words", "name"),
    [(["--name", "ann"], "ann"), (["--name=bob"], "bob"), (["--name", "ann", "--name", "carl"], "carl"), ([], "")],
)
def test_a_peer_s_name_is_in_its_command(machine: Machine, words: list[str], name: str) -> None:
    one = machine.peer("one")
    machine.process(71, *PEER, *words, opens=one)
    machine.locked(one, 71)
    (found,) = running_peers(machine.proc)
    assert found.name == name

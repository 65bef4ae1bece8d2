"""python -m decentral.ps: list the peers that run on this machine, whoever started them.

    python -m decentral.ps             a line for each peer
    python -m decentral.ps --json      the same as JSON

Steps, losses and speeds come from the peers' journals. A peer's name and the end of its id are shown as others see
them. Below the table stands, for each run, the address with which other commands and peers join it, and which peers
were killed or have crashed in the last day, if their state folders are beside a running peer's, or in the working
folder or a folder there. Of other users' peers only the process is shown. `decentral stop` ends peers.
"""

import argparse
import os
import pwd
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from decentral.commands import shared
from decentral.commands.checks.running_peer import JournalTail, KilledPeer
from decentral.core import foreign_file, strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, short
from decentral.core.journal.events import JoinedLine, StoppedLine
from decentral.core.peer_folders import CHECKPOINT, JOURNAL, changed_at, journals_in
from decentral.core.plain_text import plain_text
from decentral.core.temporary import is_temporary
from decentral.core.times import ago, clock_time
from decentral.core.units import Seconds
from decentral.peers.startup.running_peers import PROC, RunningPeer, running_peers

NO_FIGURE = "-"
FOLDER_DELETED = "folder deleted"  # phase of a peer whose state folder is gone: it trains, and saves nothing
SUSPENDED = "suspended"  # phase of a peer whose process is stopped by a signal, and hears no other one
STAT_BYTES = 4096  # more than /proc/PID/stat has
MOST_CELL_CHARS = 4096  # of a folder or an address
ENDED_SHOWN_S = 86400.0  # peers that ended longer ago are not shown, nor found by their names


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The status of one peer that runs on this machine. Figures are None until the peer's journal has them."""

    name: str
    peer: str
    run: str
    phase: str  # starting, joining, training, stopping, suspended or folder deleted; "" for another user's peer
    user: str
    pid: int
    since: Seconds  # Unix time at which the process started
    step: int | None
    loss: float | None  # nats per token
    checkpoint_at: Seconds | None  # Unix time of the newest checkpoint; None: there is none yet
    folder: str | None
    address: str  # the first address that the peer publishes; "" if not known

    @classmethod
    def of(cls, peer: RunningPeer) -> "PeerStatus":
        """Return the status of a running peer, as its state folder shows it."""
        tail = before = JournalTail.of(peer.folder) if peer.folder and not peer.is_deleted else None
        if peer.folder and changed_at(peer.folder / JOURNAL) < peer.since:
            tail = None  # the lines are of an earlier process of the same peer
        work, facts = (tail.work, tail.facts) if tail else (None, None)
        kept = before.facts if before else None
        stepped = work is not None and work.stepped_at > 0
        return cls(
            name=plain_text(facts.name if facts else peer.name or (kept.name if kept else "")),
            peer=plain_text(kept.peer) if kept else "",
            run=plain_text(kept.run) if kept else "",
            phase=_phase(peer, tail) if peer.folder else "",
            user=_user(peer.user),
            pid=peer.pid,
            since=round(peer.since, 1),
            step=work.step if work and stepped else None,
            loss=work.loss if work and stepped else None,
            checkpoint_at=(changed_at(peer.folder / CHECKPOINT) or None) if peer.folder else None,
            folder=str(peer.folder) if peer.folder else None,
            address=plain_text(next(iter(facts.addresses), ""), MOST_CELL_CHARS) if facts else "",
        )

    def row(self, now: Seconds) -> tuple[str, ...]:
        """Return the cells of this peer's line, in the order of STATUS_COLUMNS; `now` is Unix time."""
        return (
            self.name or NO_FIGURE,
            short(PeerId(self.peer)) or NO_FIGURE,
            self.run or NO_FIGURE,
            self.phase or NO_FIGURE,
            self.user,
            str(self.pid),
            f"{clock_time(self.since)} ({ago(self.since, now)})",
            NO_FIGURE if self.step is None else f"{self.step:,}",
            NO_FIGURE if self.loss is None else f"{self.loss:.3f}",
            NO_FIGURE if self.checkpoint_at is None else ago(self.checkpoint_at, now),
            plain_text(self.folder or NO_FIGURE, MOST_CELL_CHARS),
        )


OMITTED = ("user", "run", "since", "id", "checkpoint")  # left out in this order if the terminal is too narrow
CELL_GAP = 2  # columns between two cells
LEAST_LAST_CHARS = 24  # the last column has at least this many columns, if its cells need them
STATUS_COLUMNS = ("name", "id", "run", "phase", "user", "pid", "since", "step", "loss", "checkpoint", "folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    running, now = here(), time.time()
    found, killed = [PeerStatus.of(peer) for peer in running], killed_lately(running, Path.cwd(), now)
    if flags.json:
        lists = {"peers": [asdict(one) for one in found], "killed": [asdict(one) for one in killed]}
        print(strict_json.dumps(lists, indent=1))
        return
    if not found:
        print("no peer runs on this machine")
    else:
        print(table(STATUS_COLUMNS, [one.row(now) for one in found], shared.terminal_columns()))
        for run, address in {one.run: one.address for one in reversed(found) if one.address}.items():
            print(f"{run}: --join {address}")
    for peer in killed:
        print(f"{peer.name} in {plain_text(peer.folder, MOST_CELL_CHARS)}: {peer.told(now)}")


def killed_lately(running: Sequence[RunningPeer], folder: Path, now: Seconds) -> list[KilledPeer]:
    """Return those peers of `ended_lately` that were killed, or have crashed; the arguments are the same."""
    return [killed for killed in map(KilledPeer.of, ended_lately(running, folder, now)) if killed is not None]


def ended_lately(running: Sequence[RunningPeer], folder: Path, now: Seconds) -> list[Path]:
    """Return the state folders of this user's peers that have ended in the ENDED_SHOWN_S before `now` (Unix time).

    Only state folders beside a running peer's, in `folder`, and in the folders in it are looked at.
    """
    around = {peer.folder.parent for peer in running if peer.folder}
    with suppress(OSError):  # a folder that this user may not read
        around |= {folder, *(one for one in folder.iterdir() if one.is_dir())}
    journals = {journal for one in around for journal in (journals_in(one) if os.access(one, os.R_OK) else ())}
    lately = [journal.parent for journal in sorted(journals) if now - changed_at(journal) < ENDED_SHOWN_S]
    ended = [one for one in lately if one not in {peer.folder for peer in running} and not is_temporary(one)]
    return [one for one in ended if one.stat().st_uid == os.geteuid()]


def here() -> list[RunningPeer]:
    """Return the peers that run on this machine. Raise UserError if the system has no /proc, as only Linux has it."""
    if not (PROC / "locks").exists():
        raise UserError("this command finds peers by /proc/locks, which this system lacks; it works on Linux")
    return running_peers()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int | None = None) -> str:
    """Return a table as text, with columns as wide as their widest cell.

    Args:
        columns: The columns' names.
        rows: For each row its cells.
        most: Columns of the terminal; None: not limited. For a narrow one the columns of OMITTED are left out, one
            after the other, and long cells of the last column continue on further lines.
    """
    lines, shown = [columns, *rows], list(range(len(columns)))
    for omitted in ("", *OMITTED):
        shown = [at for at in shown if columns[at] != omitted]
        *widths, room = [max(len(line[at]) for line in lines) for at in shown]
        before = sum(widths) + CELL_GAP * len(widths)
        if most is None or before + min(room, LEAST_LAST_CHARS) <= most:
            break
    if most is not None:
        room = min(room, max(LEAST_LAST_CHARS, most - before))
    text: list[str] = []
    for line in lines:
        first = (" " * CELL_GAP).join(line[at].ljust(wide) for at, wide in zip(shown[:-1], widths, strict=False))
        last = line[shown[-1]]
        parts = [last[at : at + room] for at in range(0, max(1, len(last)), room)]
        text += [f"{first}{' ' * CELL_GAP}{parts[0]}".rstrip(), *(" " * before + part for part in parts[1:])]
    return "\n".join(text)


def _is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal, such as after Ctrl-Z; False if it has ended."""
    try:
        content = foreign_file.read_bytes(PROC / str(pid) / "stat", STAT_BYTES)
    except OSError:
        return False
    return content.rpartition(b")")[2].split()[:1] == [b"T"]  # the name before it may have brackets


def _phase(peer: RunningPeer, tail: JournalTail | None) -> str:
    if _is_suspended(peer.pid):
        return SUSPENDED
    if peer.is_deleted:
        return FOLDER_DELETED
    if tail is None:
        return "starting"
    if tail.of_event(StoppedLine):
        return "stopping"
    return "training" if tail.work.stepped_at or tail.of_event(JoinedLine) else "joining"


def _user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "List the peers that run on this machine, whoever started them, and those that were killed or have crashed "
    about += "in the last day, as far as their state folders are near."
    parser = shared.Parser(prog="python -m decentral.ps", description=about)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""python -m decentral.stop: make peers on this machine save a checkpoint, leave their swarms, and end.

    python -m decentral.stop ann             the peer with this name (`decentral ps` shows names)
    python -m decentral.stop swarm/peer-1    the peer with this state folder, or all peers in a folder
    python -m decentral.stop gpt-3fa2c1      this user's peers of the run with this id
    python -m decentral.stop --all           all peers that this user runs here, after a question on a terminal

The command only ends processes that hold the lock of a peer's state folder and belong to this user. It never kills: a
peer that does not end within STOP_S goes on saving. Exit codes: 0 if all have stopped and saved, 1 if not, also if a
named peer was killed or has crashed, so that its work since its last checkpoint is lost.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from decentral.commands import shared
from decentral.commands.checks.running_peer import JournalTail, KilledPeer, holder, resume_command
from decentral.commands.ps import STATUS_COLUMNS, SUSPENDED, PeerStatus, ended_lately, here, table
from decentral.core.errors import ExitCode, UserError
from decentral.core.journal.events import CheckpointLine, StoppedLine
from decentral.core.near_names import did_you_mean
from decentral.core.peer_folders import CHECKPOINT, JOURNAL, changed_at, journals_in
from decentral.core.plain_text import plain_text, printable
from decentral.core.temporary import is_temporary
from decentral.core.times import ago
from decentral.core.units import Seconds, plural
from decentral.peers.startup.running_peers import RunningPeer, StopRequests

STOP_S = 150.0  # a leaving peer takes 120 s at most for its last step and checkpoint, and a few for its goodbye
REASON_CHARS = 500
STARTING_NAMED = 3  # an error names the folders of at most this many peers that start

Running = Mapping[RunningPeer, PeerStatus]
Ended = Mapping[Path, tuple[str, str]]
"""For each peer that has ended, by its state folder: the peer's name and the id of its run."""
NONE_ENDED: Ended = MappingProxyType({})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a peer has not ended, or has not saved its last checkpoint."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    running = {peer: PeerStatus.of(peer) for peer in here()}
    found, stopped = chosen(running, flags.which, ended_here(running))
    all_well = not _tell_ended(stopped)
    if not found and not stopped:
        print("no peer of this user runs on this machine")
    if found:
        all_well = _stop(running, found, flags) and all_well
    if not all_well:
        raise SystemExit(ExitCode.FAILED)


def _tell_ended(ended: Mapping[Path, Sequence[Path]]) -> bool:
    """Print which of these peers have stopped already, or how they ended; return whether one was killed or has crashed.

    Args:
        ended: What the user named -> state folders of its ended peers.
    """
    now, some_killed = time.time(), False
    for named, folders in ended.items():
        killed = [one for one in map(KilledPeer.of, folders) if one is not None]
        some_killed = some_killed or bool(killed)
        for one in killed:
            print(f"{one.name or one.folder}: {one.told(now)}; {_again(one.folder)}")
        if count := len(folders) - len(killed):
            print(f"{plural(count, 'peer')} in {named}: stopped already" if count > 1 else f"{named}: stopped already")
    return some_killed


def _stop(running: Running, found: Sequence[RunningPeer], flags: argparse.Namespace) -> bool:
    """Stop these running peers, and return whether all have stopped and saved.

    Raises:
        SystemExit: With FAILED if the user does not agree.
    """
    if flags.all and not _agreed([running[peer] for peer in found], flags.yes):
        print("none was stopped")
        raise SystemExit(ExitCode.FAILED)
    asked_at = time.time()
    deadline = time.monotonic() + STOP_S
    temporary = {peer for peer in found if peer.folder and is_temporary(peer.folder)}
    with StopRequests.ask(found) as requests:
        suspended = [peer for peer in found if running[peer].phase == SUSPENDED]
        for peer in found:
            called = _called(peer, running[peer])
            away = f"{called}: suspended; it saves and ends after: kill -CONT {peer.pid}"
            print(away if peer in suspended else f"stopping {called}", flush=True)
        all_well = not suspended
        for peer in (one for one in found if one not in suspended):
            ended = requests.has_ended(peer, deadline - time.monotonic())
            is_saved, said = False, "still saving; not killed"
            if ended and peer in temporary:
                is_saved, said = True, f"stopped; {peer.folder} is temporary and not kept (--state-dir DIR keeps one)"
            elif ended:
                is_saved, said = what_was_saved(peer, asked_at, time.time())
            all_well = all_well and is_saved
            print(f"{_called(peer, running[peer])}: {said}", flush=True)
    return all_well


def _agreed(peers: Sequence[PeerStatus], yes: bool) -> bool:
    """Print the peers that are to be stopped, and return whether to stop them; ask only on a terminal.

    Args:
        peers: The peers.
        yes: Whether the user has agreed beforehand.
    """
    now = time.time()
    print(table(STATUS_COLUMNS, [peer.row(now) for peer in peers], shared.terminal_columns()), flush=True)
    if yes or sys.stdin is None or not sys.stdin.isatty():
        return True
    try:
        return input(f"stop {plural(len(peers), 'peer')}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def ended_here(running: Running) -> Ended:
    """Return name and run of this user's peers that have ended lately in folders that `decentral ps` looks at."""
    folders = ended_lately(list(running), Path.cwd(), time.time())
    tails = {folder: JournalTail.of(folder) for folder in folders if holder(folder) is None}
    return {folder: (plain_text(tail.facts.name), plain_text(tail.facts.run)) for folder, tail in tails.items() if tail}


def chosen(
    running: Running, which: Sequence[str], ended_near: Ended = NONE_ENDED
) -> tuple[list[RunningPeer], dict[Path, list[Path]]]:
    """Return which of this user's running peers to stop, and which of the named peers have ended.

    Args:
        running: The peers on this machine.
        which: Names and folders of peers, folders of peers' folders, and ids of runs; []: all peers of this user.
        ended_near: The peers that have ended and are found by their run, or by their name if no running peer has it.

    Returns:
        The peers, and one of `which` as a path -> state folders of its ended peers.

    Raises:
        UserError: If nothing of this user has one of these names, if another user's peer runs in the folder, if several
            peers have the same name, or if a peer's name is also a run's id, or the path of a folder with other peers
            (perhaps a link that somebody else made).
    """
    own = {peer: status for peer, status in running.items() if peer.folder is not None}
    if not which:
        return list(own), {}
    found: dict[RunningPeer, None] = {}
    ended: dict[Path, list[Path]] = {}
    for one in which:
        if not one:
            raise UserError("expected the name or folder of a peer; got an empty string (see decentral ps)")
        named = [peer for peer, status in own.items() if status.name == one]
        path = Path(one).resolve()
        inside = [peer for peer in own if peer.folder and path in (peer.folder, peer.folder.parent)]
        of_run = [peer for peer, status in own.items() if status.run == one]
        if named and inside and set(named) != set(inside):
            raise UserError(f"{one} is a peer's name and a folder of other peers; give the peer's folder, or ./{one}")
        if of_run and (named or inside) and set(of_run) != set(inside or named):
            raise UserError(f"{one} is the id of a run, and also a name or a folder; give the peers' folders")
        if len(named) > 1 and not inside and not of_run:
            folders = ", ".join(f"{peer.folder} (run {own[peer].run})" for peer in named)
            raise UserError(f"{len(named)} peers are called {one}; name their folders: {folders}")
        chosen_here = inside or named or of_run
        idle = [] if named or of_run else [journal.parent for journal in journals_in(path)]
        held = [folder for folder in idle if holder(folder) is not None]
        if held and not inside:
            raise UserError(f"a peer of another user runs in {held[0]}; only that user can stop it")
        idle = [folder for folder in idle if folder not in held and folder not in {peer.folder for peer in inside}]
        idle = idle or [at for at, (name, run) in ended_near.items() if one == run or (one == name and not chosen_here)]
        if idle:
            ended[Path(one)] = idle
        elif not chosen_here:
            raise UserError(f"{_unknown(one, list(own.values()), ended_near)} (see decentral ps)")
        found |= dict.fromkeys(chosen_here)
    return list(found), ended


def _unknown(one: str, own: Sequence[PeerStatus], ended: Ended) -> str:
    """Return an error's text for a word that names no peer of this user, with the nearest name, folder or run."""
    folders = {Path(status.folder) for status in own if status.folder}
    around = {folder.parent for folder in folders}
    if Path(one).parent.is_dir():
        around |= {path.parent.parent for path in Path(one).parent.glob(f"*/*/{JOURNAL}")}
    shown = [str(folder) for folder in (*folders, *around)] + [folder.name for folder in around]
    words = [(status.name, status.run) for status in own] + list(ended.values())
    near = did_you_mean(one, [*chain.from_iterable(words), *shown])
    nameless = [status.folder for status in own if status.folder and not status.name]
    if nameless and one not in shown:  # a starting peer's name is not known yet, so another one is not meant
        near = f"; peers that start have no name yet; name a folder: {', '.join(nameless[-STARTING_NAMED:])}"
    return f"no peer of this user here has the name, folder or run {one!r}{near}"


def what_was_saved(peer: RunningPeer, asked_at: Seconds, now: Seconds) -> tuple[bool, str]:
    """Return whether a peer that has ended saved a checkpoint at its end, and a line of text about what it saved.

    Args:
        peer: The peer.
        asked_at: Unix time at which the peer was asked to stop.
        now: Unix time.
    """
    assert peer.folder is not None, "only this user's peers are stopped"
    if peer.is_deleted:
        return False, f"stopped, NOT saved: its folder {peer.folder} was deleted while it ran"
    tail, at = JournalTail.of(peer.folder), changed_at(peer.folder / CHECKPOINT)
    stopped = tail.last_of(StoppedLine) if tail else []
    kept = f"{peer.folder} keeps the checkpoint of {ago(at, now)}" if at else f"{peer.folder} has no checkpoint"
    if not stopped:
        return bool(at), f"ended before it trained; {kept}"
    if stopped[0].unsaved:
        return False, f"stopped, NOT saved ({printable(stopped[0].unsaved, REASON_CHARS)}); {kept}"
    written = tail.last_of(CheckpointLine) if tail else []
    step = f"learning-rate step {written[0].step:,} " if written else ""
    return at >= asked_at - 1, f"stopped, {step}saved in {peer.folder}; {_again(peer.folder)}"


def _again(folder: Path | str) -> str:
    return f"go on with: {shared.as_called(resume_command(folder))}"


def _called(peer: RunningPeer, status: PeerStatus) -> str:
    return f"{status.name or status.folder} (pid {peer.pid})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Make peers on this machine save, leave their swarms, and end. The exit code is 0 if all have stopped and "
    about += "saved, 1 if not, also for a peer that was killed or has crashed: its work since its last save is lost."
    parser = shared.Parser(prog="python -m decentral.stop", description=about)
    which = "a peer's name or state folder, a folder of peers' folders, or a run's id"
    parser.add_argument("which", nargs="*", metavar="NAME|DIR|RUN", help=which)
    parser.add_argument("--all", action="store_true", help="all peers that this user runs on this machine")
    parser.add_argument("--yes", action="store_true", help="with --all: do not ask on a terminal")
    flags = parser.parse_args(argv)
    if bool(flags.which) == flags.all:
        raise UserError("expected names or folders of peers, or --all; decentral ps lists the peers")
    return flags


if __name__ == "__main__":
    sys.exit(main())

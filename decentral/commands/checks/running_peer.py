"""Check the peer of a state folder: its process, and the last 10 minutes of its journal.

A stopped peer is checked as well: the last line of its journal says why it stopped.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TypeVar

from decentral.commands.checks.finding import Finding, ok, unknown, warn, wrong
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.journal import events
from decentral.core.journal import file as journal
from decentral.core.journal.lines import Recorded, recorded
from decentral.core.journal.peer_totals import WorkDone
from decentral.core.peer_folders import CHECKPOINT, changed_at, lock_holders
from decentral.core.peer_names import titled
from decentral.core.plain_text import plain_text
from decentral.core.reasons import Reason
from decentral.core.times import ago, duration, precise
from decentral.core.units import MiB, Seconds
from decentral.peers.startup.state import StateFolder

RECENT_S = 600.0  # lines that are older than the journal's last line by more than 10 minutes are not checked
RECENT_BYTES = 8 * MiB  # at most this many bytes at the end of a journal are read, to bound the time
SILENT_S = 60.0  # a peer that writes no journal line for longer has a problem; a training peer writes every 10 s
GOOD_SHARE = 0.5  # a peer has a problem if a smaller share of its gossip exchanges ends as `done`
PEERS_NAMED = 8
FEW_FILES = 16  # a peer has a problem if its limit of open files lets it open fewer than this many more
UPGRADE_ALL = "let all peers run one version of decentral: python -m pip install --upgrade decentral"
DATA_DAMAGED = "a partner sends damaged data: it runs another version, its memory is faulty, or it is hostile"
TAKES_TIME = "wait a minute; if it lasts, check the load of both machines"

# What a user can do about the reasons of failed exchanges and joins (decentral/core/reasons.py) in a journal.
REMEDIES: dict[str, str] = {
    Reason.VERSION: UPGRADE_ALL,
    Reason.UNKNOWN: UPGRADE_ALL,
    Reason.FIELDS: UPGRADE_ALL,
    Reason.GARBAGE: f"{UPGRADE_ALL}; or a program that is not decentral has connected to the port",
    Reason.DEADLINE: "answers come too late: a slow or lossy link, or a loaded machine; see download and upload",
    Reason.UNREACHABLE: "no connection to partners: those behind routers need a forwarded port and --announce",
    Reason.CUT: "connections break: partners die, or a router drops them; check whether the link is stable",
    Reason.RESOURCES: "this machine has no file descriptor or memory left: raise ulimit -n, end other programs",
    Reason.SILENT: "a partner no longer answers: it was suspended, cut off, or killed; restart it",
    Reason.RUN: "a partner is in another run: compare the run's name on both, and the address of --join",
    Reason.ALGORITHM: "a partner runs another gossip.algorithm: let all peers of a run use the same config",
    Reason.FRAGMENT: f"partners have given up those layers; {TAKES_TIME}",
    Reason.SPAN: f"partners have given up those layers; {TAKES_TIME}",
    Reason.STALE: "partners' snapshots are older than two windows: their links or devices are too slow",
    Reason.NOTHING_NEWER: "nothing to do: partners are slower than this peer, and have closed no window since",
    Reason.OPPOSED: "a partner's progress points against this peer's: other data, another version, or a hostile peer",
    Reason.ALONE: "no other peer holds these layers: start more peers, or find out why others do not reach this one",
    Reason.FAILED: "every partner failed: see the other reasons, and the check reachability",
    Reason.BUSY: f"partners take no more requests now; {TAKES_TIME}",
    Reason.NOT_READY: f"partners are still joining; {TAKES_TIME}",
    Reason.STRANGER: "partners have no record of this peer: wait a minute; then see the checks clock and version",
    Reason.EXPIRED: "records or invitations have expired: see the checks clock and invitation",
    Reason.UNINVITED: "the swarm is private: ask its founder for an invitation, and give it with --invite FILE",
    Reason.REVOKED: "the founder has revoked an invitation: ask for a new one",
    Reason.PERMISSION: "an invitation does not allow this: ask the founder for one to train",
    Reason.SIGNATURE: DATA_DAMAGED,
    Reason.IDENTITY: DATA_DAMAGED,
    Reason.DIGEST: DATA_DAMAGED,
    Reason.SHAPE: f"the partner's fragments differ from this peer's: {UPGRADE_ALL}",
    Reason.NAN: "a partner's weights have diverged: lower train.learning_rate in the next run",
    Reason.MAGNITUDE: "a partner's weights have diverged: lower train.learning_rate in the next run",
    Reason.DONORS: "no peer sends its state: all are joining, or cannot be reached; wait a minute",
    Reason.MEMORY: "the device has too little memory: give less --memory, or end other programs",
    Reason.DISK: "the disk is full: make room in the state folder",
}

Line = Recorded[events.JournalEvent]
EventT = TypeVar("EventT", bound=events.JournalEvent)


@dataclass(frozen=True, slots=True)
class JournalTail:
    """The last lines of a journal since the latest start of its peer."""

    started_at: Seconds  # Unix time
    facts: events.PeerFacts
    lines: Sequence[Line]  # oldest first; only lines from the last RECENT_S before the latest line

    @classmethod
    def of(cls, folder: Path) -> "JournalTail | None":
        """Return the last lines of the journal in a state folder; None if no line says that the peer has started."""
        path = folder / "journal.jsonl"
        read = list(recorded(journal.recent(path, RECENT_BYTES)))
        begins = [place for place, line in enumerate(read) if isinstance(line.event, events.StartedLine)]
        life = read[begins[-1] :] if begins else read
        started = life[0] if begins else next(recorded(journal.first(path)), None)
        if started is None or not isinstance(started.event, events.PeerFacts) or not life:
            return None
        last = max(line.t for line in life)
        return cls(started.t, started.event, [line for line in life if line.t >= last - RECENT_S])

    def of_event(self, kind: type[EventT]) -> list[EventT]:
        """Return the events of class `kind` in these lines, oldest first."""
        return [line.event for line in self.lines if isinstance(line.event, kind)]

    def last_of(self, kind: type[EventT]) -> list[EventT]:
        """Return a list with the latest event of class `kind`; [] if there is no such event."""
        return self.of_event(kind)[-1:]

    @property
    def work(self) -> WorkDone:
        """Return sums over these lines: training, exchanges and traffic."""
        work = WorkDone()
        for line in self.lines:
            work.take(line.t, line.event)
        return work


@dataclass(frozen=True, slots=True)
class KilledPeer:
    """A peer that has ended without stopping: it was killed, or it crashed."""

    folder: str
    name: str
    run: str
    ended_at: Seconds  # Unix time of the journal's last line
    checkpoint_at: Seconds | None  # Unix time of the newest checkpoint; None: there is none

    @classmethod
    def of(cls, folder: Path) -> "KilledPeer | None":
        """Return the killed peer of a state folder; None if its peer runs, has stopped, or never began to train."""
        if holder(folder) is not None:  # before the journal is read, as the peer may stop meanwhile
            return None
        tail = JournalTail.of(folder)
        if tail is None or tail.of_event(events.StoppedLine):
            return None
        saved_at, ended_at = changed_at(folder / CHECKPOINT) or None, max(line.t for line in tail.lines)
        name, run = plain_text(tail.facts.name), plain_text(tail.facts.run)
        return cls(str(folder), name, run, round(ended_at, 1), saved_at)

    def told(self, now: Seconds) -> str:
        """Return as text how the peer has ended and when it was last saved; `now` is Unix time."""
        saved = "never saved" if self.checkpoint_at is None else f"last saved {ago(self.checkpoint_at, now)}"
        return f"ended {ago(self.ended_at, now)} without stopping (killed or crashed), {saved}"


def checks(folder: Path, swarm_now: Seconds) -> Iterator[Finding]:
    """Yield the findings about the peer in a state folder.

    Args:
        folder: The state folder.
        swarm_now: Unix time by the swarm's clock, which journals use.
    """
    pid = holder(folder)
    tail = JournalTail.of(folder)
    if pid is not None:
        yield process(pid)
    if tail is None:
        yield unknown("journal", "no peer has begun to train from this folder")
        return
    stopped = tail.last_of(events.StoppedLine)
    if stopped and pid is None:
        yield ended(stopped[0])
    elif pid is None:
        remedy = f"start it again: {resume_command(folder)}; dmesg shows if the system killed it (memory)"
        yield warn("journal", "the peer ended without a last line: it was killed", remedy)
    else:
        yield training(tail, swarm_now)
    if not _takes_rounds(folder):
        yield exchanges(tail, bool(stopped) and pid is None)
    yield from missed(tail)
    yield from troubles(tail)


def _takes_rounds(folder: Path) -> bool:
    """Return whether the folder's run is synchronous, so that its journal has no exchanges."""
    with suppress(UserError):  # the file is damaged; disk.belongs_to reports that to the user
        kept = StateFolder(folder).look_at_run()
        return kept is not None and kept[1].synchronous
    return False


def resume_command(folder: Path | str) -> str:
    """Return the command that starts the peer of a state folder again."""
    return f"python -m decentral.peer --state-dir {quote(str(folder))}"


def holder(folder: Path) -> int | None:
    """Return the id of the process that has locked the folder; None if it is not locked, or the system is not Linux.

    Files on other disks may have the same inode number, so several processes may be found. Then the result is one whose
    user owns the folder's lock file, if there is one.
    """
    try:
        lock = (folder / "lock").stat()
    except OSError:
        return None
    return min(lock_holders().get(lock.st_ino, []), key=lambda pid: _user(pid) != lock.st_uid, default=None)


def _user(pid: int) -> int:
    """Return the user id of the user who runs a process; -1 if the process has ended."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def process(pid: int) -> Finding:
    """Return the finding on whether a running peer's process is suspended, or close to its limit of open files."""
    status = dict(line.split(":\t", 1) for line in _text(f"/proc/{pid}/status").splitlines() if ":\t" in line)
    if status.get("State", "").startswith(("T", "t")):
        remedy = f"continue it: kill -CONT {pid}, or fg in its terminal"
        return wrong("process", f"process {pid} is stopped (Ctrl-Z, or a debugger)", remedy)
    limits = [line.split() for line in _text(f"/proc/{pid}/limits").splitlines() if line.startswith("Max open files")]
    try:
        opened, most = len(os.listdir(f"/proc/{pid}/fd")), int(limits[0][3])
    except (OSError, IndexError, ValueError):
        return ok("process", f"process {pid} runs")
    if opened > most - FEW_FILES:
        remedy = f"raise it: prlimit --pid {pid} --nofile=4096:4096, and ulimit -Hn 4096 before the next start"
        return wrong("process", f"process {pid} has {opened} files open, of {most} allowed", remedy)
    return ok("process", f"process {pid} runs, {opened} files open of {most}")


def ended(line: events.StoppedLine) -> Finding:
    """Return the finding that a peer has stopped, with the reason in its last journal line."""
    reason = line.reason
    unsaved = f"; not saved: {line.unsaved}" if line.unsaved else ""
    if reason.startswith(("error", "no member")) or unsaved:
        return wrong("journal", f"the peer has stopped: {reason}{unsaved}", "correct that, and start the peer again")
    return ok("journal", f"the peer has stopped: {reason}")


def training(tail: JournalTail, now: Seconds) -> Finding:
    """Return the finding on whether a running peer trains, by its latest steps; `now` is Unix time."""
    silent_s, steps = now - max(line.t for line in tail.lines), tail.work
    joined = bool(steps.stepped_at or tail.of_event(events.JoinedLine))
    if silent_s > SILENT_S:
        remedy = "its disk may be full (below), or its process hangs: read its output, and start it again"
        return wrong("training", f"no journal line for {duration(silent_s)}", remedy)
    if not joined:
        waits_s = now - tail.started_at
        if waits_s < SILENT_S:
            return unknown("training", f"it started {duration(waits_s)} ago and is joining", "check again in a minute")
        reasons = Counter(line.reason for line in tail.of_event(events.DonorFailedLine))
        said = f"; donors failed: {_counted(reasons)}" if reasons else ""
        remedy = remedy_of(reasons.most_common(1)[0][0]) if reasons else "see whether other peers answer, above"
        return wrong("training", f"it has not joined for {duration(waits_s)}{said}", remedy)
    if not steps.stepped_at:
        return warn("training", "it has joined, but took no step in the last 10 minutes", "see layers and errors below")
    loss = "unknown" if steps.loss is None else f"{steps.loss:.4g}"
    return ok("training", f"own step {steps.step}, loss {loss}, {now - steps.stepped_at:.0f} s ago")


def exchanges(tail: JournalTail, stopped: bool) -> Finding:
    """Return the finding on how the exchanges of the last 10 minutes ended, with a remedy for the commonest reason.

    Args:
        tail: The last lines of the journal.
        stopped: Whether the peer has stopped in an orderly way.
    """
    found = tail.work.exchanges
    outcomes, reasons = found.outcomes, found.reasons
    if not outcomes and stopped:
        return ok("exchanges", "none in the last 10 minutes before the peer stopped")
    if not outcomes:
        remedy = "a peer that is alone makes no exchanges: see whether the swarm has other peers, above"
        return warn("exchanges", "none in the last 10 minutes", remedy)
    seen = f"{outcomes['done']}/{outcomes['solo']}/{outcomes['failed']} (done/solo/failed) in the last 10 minutes"
    if not reasons:
        return ok("exchanges", seen)
    seen = f"{seen}: {_counted(reasons)}"
    if outcomes["done"] >= GOOD_SHARE * outcomes.total():
        return ok("exchanges", seen)
    remedy = remedy_of(reasons.most_common(1)[0][0])
    return warn("exchanges", seen, remedy) if outcomes["done"] else wrong("exchanges", seen, remedy)


def departure(folder: Path | None, now: Seconds) -> str:
    """Return which peer left the swarm last with a goodbye, such as "QmAbcdef left 40 s ago".

    Args:
        folder: The state folder of the peer whose journal is read; None if there is no folder.
        now: Unix time.

    Returns:
        The text; "" if the last RECENT_S of the journal have no such peer, or there is no journal.
    """
    tail = JournalTail.of(folder) if folder else None
    if tail is None:
        return ""
    for line in reversed(tail.lines):
        match line.event:
            case events.PeerLeftLine(peer=peer, reason="left"):
                return f"{titled(peer, _names(tail).get(peer, ''))} left {now - line.t:.0f} s ago"
    return ""


def _names(tail: JournalTail) -> dict[PeerId, str]:
    """Return the names of the peers whose joining is in these lines; other peers' names are not known here."""
    return {line.peer: line.name for line in tail.of_event(events.PeerJoinedLine)}


def missed(tail: JournalTail) -> Iterator[Finding]:
    """Yield a warning if peers disappeared without a goodbye and have not come back; the warning names the peers."""
    last = {
        line.event.peer: line.event
        for line in tail.lines
        if isinstance(line.event, events.PeerLeftLine | events.PeerJoinedLine)
    }
    names = _names(tail)
    gone = [peer for peer, line in last.items() if isinstance(line, events.PeerLeftLine) and line.reason != "left"]
    if gone:
        named = ", ".join(titled(peer, names.get(peer, "")) for peer in gone[:PEERS_NAMED])
        more = f" and {len(gone) - PEERS_NAMED} more" if gone[PEERS_NAMED:] else ""
        remedy = "read the last output of these peers, and start each again with --state-dir"
        lately = f"in the last {RECENT_S / 60:.0f} minutes"
        yield warn("peers", f"disappeared without a goodbye {lately}: {named}{more}", remedy)


def troubles(tail: JournalTail) -> Iterator[Finding]:
    """Yield the findings about errors that the peer wrote to its journal in the last 10 minutes.

    Errors with the same first 40 characters differ only in numbers such as durations, and are reported once.
    """
    errors = {line.reason[:40]: line.reason for line in tail.of_event(events.ErrorLine)}
    for reason in errors.values():
        yield warn("error", reason, "do what the error says; docs/results/host-faults.md explains each")
    layers = [line.event for line in tail.lines if isinstance(line.event, events.UnheldLine | events.HeldLine)]
    if layers and isinstance(unheld := layers[-1], events.UnheldLine):
        yield wrong("layers", unheld.reason, "start a peer with enough memory, or restart their former holders")
    for lost in tail.last_of(events.LostLine):
        seen = f"journal lines lost: {lost.lines} ({lost.reason})"
        yield warn("journal lines", seen, "make room on the disk of the state folder")
    for jump in tail.last_of(events.ClockLine):
        seen = f"this machine's clock has jumped by {precise(jump.jumped_s)}"
        yield warn("clock jump", seen, "keep the clock with ntp; a running peer is not affected")
    for pause in tail.last_of(events.SuspendedLine):
        seen = f"this machine, or the peer, was suspended for {precise(pause.seconds)}"
        yield warn("suspension", seen, "turn off sleep while the peer runs")
    for refusals in tail.last_of(events.RefusedLine):
        yield refused(refusals)


def refused(line: events.RefusedLine) -> Finding:
    """Return the finding about malformed messages and records from other peers."""
    found = Counter(line.by_reason)
    most = found.most_common(1)[0][0].removeprefix("record-") if found else ""
    return warn("refused", f"from other peers, since the start: {_counted(found)}", remedy_of(most))


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(4))


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def remedy_of(reason: str) -> str:
    """Return what a user can do about a reason; for a reason without a remedy, a reference to docs/PROTOCOL.md."""
    return REMEDIES.get(reason, f"see {reason!r} in the table of reasons, docs/PROTOCOL.md")

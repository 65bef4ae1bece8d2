"""How each command ends, whatever ends it: no process is left, the others learn of it rightly, and the page says so.

TABLE has a row for each thing that happens and a column for each kind of command; a cell is what is seen then. The
cells of BY_DAY play the endings of one peer, and other files those of a rank and of a local swarm; the other cells are
marked `night`. All are played on one swarm, whose first peer serves a page. The cells of SHARED ways are played in turn
on one process of each kind, which survives the first two.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from decentral.peers.membership.records import RENEWALS
from decentral.peers.membership.swarm_size import LEAST_TIMES
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.commands.terminal import Processes, Terminal, command_line, python
from tests.patient_time import LIMIT_S

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
QUICK = [*TINY, "--set", "gossip.core_share=1", "--set", "swarm.checkpoint_every_s=1"]
TORCHRUN = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
BEGIN_TOGETHER = 5  # commands: more would be slower to start than the tests wait
PAGE_LINE = re.compile(r"the page: (http://[\d.:]+)")

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found and watched as on Linux"),
]


@dataclass(frozen=True, slots=True)
class Member:
    """A peer of a swarm, as another one and a page see it."""

    peers: Peers  # the journals of the swarm
    name: str
    other: str  # the peer that sees it
    shown_by: Path  # the output of the command with the page

    @property
    def folder(self) -> Path:
        return self.peers.folder / self.name

    @property
    def identity(self) -> str:
        return str(self.peers.lines(self.name, "started")[0]["peer"])

    def goodbyes(self) -> list[str]:
        """Why the other peer has dropped it, each time; "left" after a goodbye."""
        own = self.identity
        said = [line for event in ("peer_left", "goodbye") for line in self.peers.lines(self.other, event)]
        return [line.get("reason", "left") for line in sorted(said, key=itemgetter("t")) if line["peer"] == own]

    def is_missed(self) -> bool:
        """Whether the other peer has dropped it without a goodbye."""
        return self.goodbyes()[-1:] not in ([], ["left"])

    def row(self) -> dict[str, Any]:
        return next((row for row in rows(self.shown_by) if row["peer"] == self.identity), {})

    def is_shown(self, state: str) -> None:
        """Waits until the page says so."""
        self.peers.until(f"the page says {state} of {self.name}", lambda: self.row().get("state") == state)

    def is_counted_as_lost(self) -> bool:
        """Whether the page counts it among the peers that are lost."""
        return self.row()["number"] in page(self.shown_by)["lost"]

    def problems(self) -> list[Any]:
        """What the page says is wrong with it."""
        return [problem for problem in page(self.shown_by)["problems"] if problem[1] == self.row()["number"]]

    def exchanges_again(self) -> None:
        last = max(line["t"] for line in self.peers.lines(self.name, "exchange"))
        again = f"{self.name} exchanges again"
        self.peers.until(again, lambda: exchanged(self.peers, self.name, since=last + 0.001))


@dataclass(slots=True)
class Running:
    """A command in its terminal."""

    kind: str
    terminal: Terminal
    folder: Path
    temporary: Path  # the folder of its temporary ones

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def processes(self) -> Processes:
        return Processes(self.terminal.process.pid)

    def send(self, which: signal.Signals) -> None:
        self.terminal.process.send_signal(which)

    def ends(self, happen: "Happen", code: int = 0) -> None:
        """Let something end it: all that it has started ends as well. torchrun's exit codes are its own."""
        everything = self.processes()
        happen(self)
        assert everything.have_ended()
        expected = -signal.SIGKILL if happen is KILL else code
        found = self.terminal.process.wait(LIMIT_S)
        assert self.kind == "torchrun" or found == expected, self.said()

    def leaves_nothing(self) -> None:
        """Assert that no temporary folder is left, except the caches that torch and torchrun leave by design."""
        theirs = ("torchinductor_", *(["torchelastic_"] if self.kind == "torchrun" else []))
        assert [one.name for one in self.temporary.iterdir() if not one.name.startswith(theirs)] == []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


Happen = Callable[[Running], None]


@dataclass(slots=True)
class World:
    """A swarm whose first peer, A, serves a page, and the commands that take part in it or look at it."""

    peers: Peers  # their journals, and A's process
    waiting: dict[str, str]  # by name, the kinds of commands that have not begun
    temporary: Path
    commands: dict[str, Running] = field(default_factory=dict)

    def running(self, name: str) -> Running:
        """The command of this name, once it is up; some others begin with it."""
        while name not in self.commands:
            for one in list(self.waiting)[:BEGIN_TOGETHER]:
                self.begin(one, self.waiting.pop(one))
        self.peers.until(f"{name} is up", lambda: self.is_up(name))
        return self.commands[name]

    def begin(self, name: str, kind: str) -> None:
        folder, temporary = self.peers.folder / name, self.temporary / str(len(self.commands))
        for one in (folder, temporary):
            one.mkdir()
        state = ["--state-dir", str(folder)]
        join = ["--join", self.peers.lines("A", "started")[0]["addresses"][0]]
        member = [*LISTEN, *state, *join, "--throttle=4"]
        local = ["--peers=2", "--stop-after=1000000s", "--device=cpu", "--dashboard=127.0.0.1:0", *state, *QUICK]
        command = {
            "peer": python("decentral.peer", *member, "--dashboard", "127.0.0.1:0"),
            "island": python("decentral.peer", *member, "--device", "cpu,cpu"),
            "torchrun": python("torch.distributed.run", *TORCHRUN, "-m", "decentral.peer", *member, "--device", "cpu"),
            "dashboard": python("decentral.dashboard", *join, "--at", "127.0.0.1:0"),
            "local": python("decentral.local", *local, "--summary", str(folder / "summary.json")),
        }[kind]  # fmt: skip
        terminal = Terminal(folder / "output.txt", temporary, *command)
        self.commands[name] = Running(kind, terminal, folder, temporary)

    def is_up(self, name: str) -> bool:
        """Return whether the command works: its peer has exchanged with another, or its page shows a peer."""
        running = self.commands[name]
        assert running.terminal.process.poll() is None, running.said()
        if running.kind == "dashboard":
            return bool(PAGE_LINE.search(running.said()) and rows(running.output))
        member = self.member(running)
        return exchanged(member.peers, member.name)

    def member(self, running: Running) -> Member:
        """The peer that a command is; of a local swarm, the second one."""
        if running.kind == "local":
            return Member(Peers(running.folder), "peer-1", "peer-0", running.output)
        return Member(self.peers, running.folder.name, "A", self.peers.folder / "A" / "output.txt")

    def until_a_record_expires(self, since: float) -> None:
        """Waits as long as records last that are as old as `since`, Unix time."""
        expires = since + RENEWALS * LEAST_TIMES.renew_s
        self.peers.until("a record has expired", lambda: self.peers.lines("A", "step")[-1]["t"] > expires)

    def end(self) -> None:
        for running in self.commands.values():
            with suppress(ProcessLookupError):  # it has ended
                wake_up(running)  # after a test that failed while the machine was asleep
            running.send(signal.SIGTERM)
        for running in self.commands.values():
            running.terminal.process.wait(LIMIT_S)
            running.terminal.close()
        self.peers.end()


def page(output: Path) -> dict[str, Any]:
    """What the page shows whose address stands in this output."""
    (url, *_) = PAGE_LINE.findall(output.read_text(errors="replace"))
    with urlopen(f"{url}/api/swarm", timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def rows(output: Path) -> list[dict[str, Any]]:
    """The page's table of peers."""
    found = page(output)
    return [dict(zip(found["row"], row, strict=True)) for row in found["peers"]]


def last_heard(running: Running) -> float:
    """When the command's page has last heard of a peer that trains, Unix time; 0.0 if it shows none."""
    return max((row["heard"] for row in rows(running.output) if row["state"] == "training"), default=0.0)


# What happens to a command


def ctrl_c(running: Running) -> None:
    running.terminal.ctrl_c()


def close_terminal(running: Running) -> None:
    running.terminal.close()


def kill_daemon(running: Running) -> None:
    """Kills a libp2p daemon that the command has started; of a local swarm, the second peer's."""
    daemons = [pid for pid in running.processes().pids if "p2pd -" in command_line(pid)]
    os.kill(next((pid for pid in daemons if "peer-1" in command_line(pid)), daemons[0]), signal.SIGKILL)


def fall_asleep(running: Running) -> None:
    for pid in running.processes().pids:
        os.kill(pid, signal.SIGSTOP)


def wake_up(running: Running) -> None:
    for pid in running.processes().pids:
        os.kill(pid, signal.SIGCONT)


def kill_a_peer(running: Running) -> None:
    second = str(running.folder / "peer-1")
    victim = next(pid for pid in running.processes().pids if second in command_line(pid))
    os.kill(victim, signal.SIGKILL)


def send(which: signal.Signals) -> Happen:
    """A signal to this process alone, as another one sends it."""
    return lambda running: running.send(which)


KILL = send(signal.SIGKILL)
WAYS: dict[str, Happen] = {
    "a daemon is killed": kill_daemon,
    "its machine is asleep": fall_asleep,
    "its terminal is closed": close_terminal,
    "Ctrl-C": ctrl_c,
    "SIGINT": send(signal.SIGINT),
    "SIGTERM": send(signal.SIGTERM),
    "SIGHUP": send(signal.SIGHUP),
    "SIGKILL": KILL,
    "a peer of it is killed": kill_a_peer,
}
SHARED = ("a daemon is killed", "its machine is asleep", "its terminal is closed")


# What is seen then


def leaves(world: World, running: Running, happen: Happen) -> None:
    """The peer saves and says goodbye, and nobody thinks that anything is wrong."""
    running.ends(happen)
    member = world.member(running)
    stopped = world.peers.lines(member.name, "stopped")[-1]
    assert (stopped["reason"], stopped.get("unsaved")) == ("interrupted", None)
    world.peers.until("A has heard it", lambda: member.goodbyes()[-1:] == ["left"])
    member.is_shown("left")
    assert member.problems() == []
    assert not member.is_counted_as_lost()
    running.leaves_nothing()


def is_lost(world: World, running: Running, happen: Happen) -> None:
    """All that the peer has started ends with it, the others miss it, and A's page says that something is wrong."""
    running.ends(happen)
    member = world.member(running)
    world.peers.until("A misses it", member.is_missed)
    member.is_shown("silent")
    assert member.is_counted_as_lost()


def gets_a_new_daemon(world: World, running: Running, happen: Happen) -> None:
    """The peer goes on with another libp2p daemon, and nobody hears of a goodbye."""
    member = world.member(running)
    happen(running)
    said = "the libp2p daemon has ended (signal 9); starting it again"
    world.peers.until(
        "it says so", lambda: said in [line["reason"] for line in member.peers.lines(member.name, "error")]
    )
    member.exchanges_again()
    member.is_shown("training")
    assert "left" not in member.goodbyes()


def is_missed_until_it_is_back(world: World, running: Running, happen: Happen) -> None:
    """As long as the peer's machine is asleep the others go on without it, and then with it again."""
    member = world.member(running)
    happen(running)
    world.peers.until("A misses it", member.is_missed)
    member.is_shown("silent")
    assert member.is_counted_as_lost()
    wake_up(running)
    member.exchanges_again()
    member.is_shown("training")


def trains_on(world: World, running: Running, happen: Happen) -> None:
    """A local swarm whose machine was asleep, while its records expired, goes on as if nothing had been."""
    member = world.member(running)
    happen(running)
    world.until_a_record_expires(since=max(line["t"] for line in member.peers.lines(member.name, "step")))
    wake_up(running)
    member.exchanges_again()
    member.is_shown("training")


def closes(world: World, running: Running, happen: Happen) -> None:
    """The page's process and its daemon end."""
    assert len(running.processes().pids) == 2
    running.ends(happen)
    if happen is not KILL:
        running.leaves_nothing()


def shows_on(world: World, running: Running, happen: Happen) -> None:
    """The page goes on with another libp2p daemon, and hears of the swarm again."""
    happen(running)
    world.peers.until("it says so", lambda: "(signal 9); starting it again" in running.said())
    before = last_heard(running)
    world.peers.until("it hears of the swarm again", lambda: last_heard(running) > before)


def shows_again(world: World, running: Running, happen: Happen) -> None:
    """The page of a machine that was asleep, while a record expired, hears of the swarm again."""
    before = last_heard(running)
    happen(running)
    world.until_a_record_expires(since=before)
    wake_up(running)
    world.peers.until("it hears of the swarm again", lambda: last_heard(running) > before)


def sums_up(world: World, running: Running, happen: Happen) -> None:
    """All peers leave, and the command writes its summary, with no dead peer."""
    running.ends(happen)
    assert [peer["death"] for peer in running.summary()["peers"]] == ["", ""]
    assert last_words(running) == [("interrupted", None)] * 2
    running.leaves_nothing()


def leaves_no_peers(world: World, running: Running, happen: Happen) -> None:
    """All peers leave in order, though the command cannot tell them to any more."""
    running.ends(happen)
    assert last_words(running) == [("interrupted", None)] * 2
    running.leaves_nothing()


def last_words(running: Running) -> list[tuple[str, str | None]]:
    """Why each peer of a local swarm has stopped, and why it could not save."""
    peers = Peers(running.folder)
    stopped = [peers.lines(name, "stopped")[-1] for name in ("peer-0", "peer-1")]
    return [(line["reason"], line.get("unsaved")) for line in stopped]


def counts_its_dead(world: World, running: Running, happen: Happen) -> None:
    """Output, page, summary and exit code say that a peer was killed, and its loss does not count."""
    member = world.member(running)
    happen(running)
    said = "warning: peer 1 has ended (killed by signal 9)"
    world.peers.until("the user reads it", lambda: said in running.said())
    member.is_shown("ended")
    running.ends(close_terminal, code=1)
    found = running.summary()
    (living, dead) = found["peers"]
    assert (living["death"], dead["death"]) == ("", "killed by signal 9")
    assert found["swarm"]["loss_last"] == living["loss_last"]
    assert found["swarm"]["replica_spread"] == 0.0


# The table

Seen = Callable[[World, Running, Happen], None]
KINDS = ("peer", "island", "torchrun", "dashboard", "local")
BACK = is_missed_until_it_is_back
TABLE: dict[str, tuple[Seen | None, ...]] = {
    "a daemon is killed": (gets_a_new_daemon, gets_a_new_daemon, gets_a_new_daemon, shows_on, gets_a_new_daemon),
    "its machine is asleep": (BACK, BACK, BACK, shows_again, trains_on),
    "its terminal is closed": (leaves, leaves, leaves, closes, sums_up),
    "Ctrl-C": (leaves, leaves, leaves, closes, sums_up),
    "SIGINT": (leaves, leaves, leaves, closes, sums_up),
    "SIGTERM": (leaves, leaves, leaves, closes, sums_up),
    "SIGHUP": (leaves, leaves, leaves, closes, sums_up),
    "SIGKILL": (is_lost, leaves, leaves, closes, leaves_no_peers),
    "a peer of it is killed": (None, None, None, None, counts_its_dead),
}
BY_DAY = {("peer", way) for way in SHARED}


@dataclass(frozen=True, slots=True)
class Cell:
    """What happens to a command of this kind, and what is seen then."""

    kind: str
    way: str
    seen: Seen

    def __str__(self) -> str:
        return f"{self.kind}: {self.way}"

    @property
    def name(self) -> str:
        """Of the process."""
        return self.kind if self.way in SHARED else f"{self.kind}-{list(WAYS).index(self.way)}"


CELLS = [Cell(kind, way, seen) for at, kind in enumerate(KINDS) for way in TABLE if (seen := TABLE[way][at])]
NIGHT = pytest.mark.night
PLAYED = [pytest.param(cell, marks=() if (cell.kind, cell.way) in BY_DAY else NIGHT, id=str(cell)) for cell in CELLS]


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A swarm for the cells that are played."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    own = [cell for item in items if isinstance(cell := item.callspec.params["cell"], Cell)]
    temporary = Path(tempfile.mkdtemp())  # those of pytest are too long for a socket
    found = World(Peers(tmp_path_factory.mktemp("endings")), {cell.name: cell.kind for cell in own}, temporary)
    try:
        found.peers.start("A", *QUICK, "--dashboard", "127.0.0.1:0")
        found.peers.until("A trains", lambda: bool(found.peers.lines("A", "step")))
        yield found
    finally:
        found.end()
        shutil.rmtree(temporary)


@pytest.mark.parametrize("cell", PLAYED)
def test_a_command_ends_in_order_whatever_ends_it(world: World, cell: Cell) -> None:
    cell.seen(world, world.running(cell.name), WAYS[cell.way])

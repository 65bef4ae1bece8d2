"""How each command ends, whatever ends it: no process is left, the others learn of it rightly, and the page says so.

The rows of ROWS are played on one swarm, whose first peer serves the page. The processes start together, and rows
that name the same one are played in turn: what a process survives comes before what ends it. Rows that play a mechanism
once more are marked `night`.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from decentral.core.config import SwarmConfig
from tests.commands.peer_processes import TINY, Peers, exchanged
from tests.commands.terminal import Processes, Terminal, daemon_of, python
from tests.patient_time import LIMIT_S

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
QUICK = [*TINY, "--set", "gossip.core_share=1", "--set", "swarm.checkpoint_every_s=1"]
TORCHRUN = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
BEGIN_TOGETHER = 7  # commands: more would be slower to start than the tests wait
PAGE_LINE = re.compile(r"the page: (http://[\d.:]+)")

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found and watched as on Linux"),
]


@dataclass(slots=True)
class Running:
    """A command in its terminal."""

    kind: str
    terminal: Terminal
    folder: Path

    @property
    def pid(self) -> int:
        return self.terminal.process.pid

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def peers(self) -> Peers:
        """The journals of a local swarm's peers."""
        return Peers(self.folder)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


@dataclass(slots=True)
class World:
    """A swarm whose first peer, A, serves a page, and the commands that take part in it or look at it."""

    peers: Peers  # their journals, and A's process
    waiting: dict[str, str]  # by name, the kinds of commands that have not begun
    commands: dict[str, Running] = field(default_factory=dict)

    def until_up(self, name: str) -> None:
        """Waits until this command is up; some others begin with it."""
        while name not in self.commands:
            for one in list(self.waiting)[:BEGIN_TOGETHER]:
                self.begin(one, self.waiting.pop(one))
        self.peers.until(f"{name} is up", lambda: self.is_up(name))

    def begin(self, name: str, kind: str) -> None:
        folder = self.peers.folder / name
        folder.mkdir()
        state = ["--state-dir", str(folder)]
        join = ["--join", self.peers.lines("A", "started")[0]["addresses"][0]]
        member = [*LISTEN, *state, *join, "--throttle=4"]
        local = [
            "--stop-after",
            "1000000s",
            "--device",
            "cpu",
            "--summary",
            str(folder / "summary.json"),
            *state,
            *QUICK,
        ]
        command = {
            "peer": python("decentral.peer", *member),
            "peer with a page": python("decentral.peer", *member, "--dashboard", "127.0.0.1:0"),
            "island": python("decentral.peer", *member, "--device", "cpu,cpu"),
            "torchrun": python("torch.distributed.run", *TORCHRUN, "-m", "decentral.peer", *member, "--device", "cpu"),
            "visitor": python("decentral.dashboard", *join, "--at", "127.0.0.1:0"),
            "local": python("decentral.local", "--peers", "1", *local),
            "local of two": python("decentral.local", "--peers", "2", "--dashboard", "127.0.0.1:0", *local),
        }[kind]  # fmt: skip
        self.commands[name] = Running(kind, Terminal(folder / "output.txt", *command), folder)

    def is_up(self, name: str) -> bool:
        """Whether it does what it is there for: peers exchange, local swarms train, pages show a peer."""
        running = self.commands[name]
        assert running.terminal.process.poll() is None, running.output()
        match running.kind:
            case "visitor":
                return "the page: " in running.output() and len(rows(running.output())) > 0
            case "local" | "local of two":
                return "a second terminal can join" in running.output()
        return exchanged(self.peers, name)

    def seen(self, name: str) -> str:
        """The state of this peer on A's page."""
        return next((row["state"] for row in rows(self.output()) if row["peer"] == self.id_of(name)), "")

    def problems(self, name: str) -> list[Any]:
        """What A's page says is wrong with this peer."""
        shown = page(self.output())
        (number,) = (row["number"] for row in rows(self.output()) if row["peer"] == self.id_of(name))
        return [problem for problem in shown["problems"] if problem[1] == number]

    def output(self) -> str:
        return (self.peers.folder / "A" / "output.txt").read_text()

    def id_of(self, name: str) -> str:
        return str(self.peers.lines(name, "started")[0]["peer"])

    def goodbyes(self, name: str) -> list[str]:
        """Why A has dropped this peer, each time."""
        own = self.id_of(name)
        said = [line for event in ("peer_left", "goodbye") for line in self.peers.lines("A", event)]
        return [line.get("reason", "left") for line in sorted(said, key=itemgetter("t")) if line["peer"] == own]

    def exchanges_again(self, name: str) -> None:
        last = max(line["t"] for line in self.peers.lines(name, "exchange"))
        self.peers.until(f"{name} exchanges again", lambda: exchanged(self.peers, name, since=last + 0.001))

    def end(self) -> None:
        for running in self.commands.values():
            running.terminal.process.send_signal(signal.SIGTERM)
        for running in self.commands.values():
            running.terminal.process.wait(LIMIT_S)
            running.terminal.close()
        self.peers.end()


def page(output: str) -> dict[str, Any]:
    """What the page shows whose address stands in this output."""
    (url, *_) = PAGE_LINE.findall(output)
    with urlopen(f"{url}/api/swarm", timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def rows(output: str) -> list[dict[str, Any]]:
    found = page(output)
    return [dict(zip(found["row"], row, strict=True)) for row in found["peers"]]


def last_heard(running: Running) -> float:
    """When the command's page has last heard of a peer that trains, Unix time; 0.0 if it shows none."""
    return max((row["heard"] for row in rows(running.output()) if row["state"] == "training"), default=0.0)


def states(output: str) -> set[tuple[str, str]]:
    return {(row["state"], row["peer"]) for row in rows(output)}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""


# What happens to a command


def ctrl_c(running: Running) -> None:
    running.terminal.ctrl_c()


def close_terminal(running: Running) -> None:
    running.terminal.close()


def kill_daemon(running: Running) -> None:
    os.kill(daemon_of(running.pid), signal.SIGKILL)


def send(which: signal.Signals) -> Callable[[Running], None]:
    """A signal to this process alone, as another one sends it."""
    return lambda running: running.terminal.process.send_signal(which)


# What is seen then


def leaves(world: World, name: str, end: Callable[[Running], None], code: int | None = 0) -> None:
    """The peer saves and says goodbye, and nobody thinks that anything is wrong. `code`: None if it is not ours."""
    running = world.commands[name]
    everything = Processes(running.pid)
    end(running)
    assert everything.have_ended()
    assert code in (None, running.terminal.process.wait(LIMIT_S)), running.output()
    stopped = world.peers.lines(name, "stopped")[-1]
    assert (stopped["reason"], stopped.get("unsaved")) == ("interrupted", None)
    world.peers.until("A has heard it", lambda: world.goodbyes(name)[-1:] == ["left"])
    world.peers.until("A's page says so", lambda: world.seen(name) == "left")
    assert world.problems(name) == []


def is_lost(world: World, name: str, end: Callable[[Running], None]) -> None:
    """All that the peer has started ends with it, the others miss it, and A's page says that something is wrong."""
    running = world.commands[name]
    everything = Processes(running.pid)
    end(running)
    assert everything.have_ended()
    running.terminal.process.wait(LIMIT_S)
    world.peers.until("A misses it", lambda: world.goodbyes(name)[-1:] not in ([], ["left"]))
    world.peers.until("A's page says so", lambda: world.seen(name) == "silent")
    assert world.problems(name) != []


def gets_a_new_daemon(world: World, name: str, end: Callable[[Running], None]) -> None:
    """The peer goes on with another libp2p daemon, and nobody hears of a goodbye."""
    end(world.commands[name])
    said = "the libp2p daemon has ended (signal 9); starting it again"
    world.peers.until("it says so", lambda: said in [line["reason"] for line in world.peers.lines(name, "error")])
    world.exchanges_again(name)
    world.peers.until("A's page shows it", lambda: world.seen(name) == "training")
    assert "left" not in world.goodbyes(name)


def is_missed_until_it_is_back(world: World, name: str, end: Callable[[Running], None]) -> None:
    """As long as the peer's machine is asleep the others go on without it, and then with it again."""
    running = world.commands[name]
    asleep = Processes(running.pid).pids
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    world.peers.until("A misses it", lambda: world.goodbyes(name)[-1:] not in ([], ["left"]))
    world.peers.until("A's page says so", lambda: world.seen(name) == "silent")
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    world.exchanges_again(name)
    world.peers.until("A's page shows it", lambda: world.seen(name) == "training")


def closes(world: World, name: str, end: Callable[[Running], None], code: int = 0) -> None:
    """The page's process and its daemon end."""
    running = world.commands[name]
    everything = Processes(running.pid)
    assert len(everything.pids) == 2
    end(running)
    assert everything.have_ended()
    assert running.terminal.process.wait(LIMIT_S) == code, running.output()


def shows_on(world: World, name: str, end: Callable[[Running], None]) -> None:
    """The page goes on with another libp2p daemon, and hears of the swarm again."""
    running = world.commands[name]
    end(running)
    world.peers.until("it says so", lambda: "(signal 9); starting it again" in running.output())
    before = last_heard(running)
    world.peers.until("it hears of the swarm again", lambda: last_heard(running) > before)


def shows_again(world: World, name: str, end: Callable[[Running], None]) -> None:
    """The page of a machine that was asleep, while a record expired, hears of the swarm again."""
    running = world.commands[name]
    asleep, before = Processes(running.pid).pids, last_heard(running)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    wakes_at = before + SwarmConfig().record_ttl_s
    world.peers.until("a record has expired", lambda: world.peers.lines("A", "step")[-1]["t"] > wakes_at)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    world.peers.until("it hears of the swarm again", lambda: last_heard(running) > before)
    assert "training" in {row["state"] for row in rows(running.output())}


def sums_up(world: World, name: str, end: Callable[[Running], None]) -> None:
    """All peers leave, and the command writes its summary."""
    running = world.commands[name]
    everything = Processes(running.pid)
    end(running)
    assert everything.have_ended()
    assert running.terminal.process.wait(LIMIT_S) == 0, running.output()
    assert [peer["death"] for peer in running.summary()["peers"]] == [""]
    assert running.peers().lines("peer-0", "stopped")[-1]["reason"] == "interrupted"


def leaves_no_peers(world: World, name: str, end: Callable[[Running], None]) -> None:
    """All peers leave in order, though the command cannot tell them to any more."""
    running = world.commands[name]
    everything = Processes(running.pid)
    end(running)
    assert everything.have_ended()
    running.terminal.process.wait(LIMIT_S)
    stopped = running.peers().lines("peer-0", "stopped")[-1]
    assert (stopped["reason"], stopped.get("unsaved")) == ("interrupted", None)


def counts_its_dead(world: World, name: str, end: Callable[[Running], None]) -> None:
    """A peer of two is killed: output, page, summary and exit code say so, and its loss does not count."""
    running = world.commands[name]
    everything = Processes(running.pid)
    second = running.peers().lines("peer-1", "started")[0]["peer"]
    victim = next(pid for pid in everything.pids if str(running.folder / "peer-1") in command_line(pid))
    os.kill(victim, signal.SIGKILL)
    said = "warning: peer 1 has ended (killed by signal 9)"
    world.peers.until("the user reads it", lambda: said in running.output())
    world.peers.until("its page says so", lambda: ("ended", second) in states(running.output()))
    end(running)
    assert everything.have_ended()
    assert running.terminal.process.wait(LIMIT_S) == 1, running.output()
    found = running.summary()
    (living, dead) = found["peers"]
    assert (living["death"], dead["death"]) == ("", "killed by signal 9")
    assert found["swarm"]["loss_last"] == living["loss_last"]
    assert found["swarm"]["replica_spread"] == 0.0


# The table


@dataclass(frozen=True, slots=True)
class Row:
    """What happens to a process, and what is seen then."""

    name: str  # of the process
    kind: str
    what: str
    end: Callable[[Running], None]
    seen: Callable[..., None]


def nothing(_running: Running) -> None:
    """What happens is a part of what is seen."""


INTERRUPT, TERMINATE, HANG_UP, KILL = map(send, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
ANY = None

ENDS = {"SIGINT": INTERRUPT, "SIGTERM": TERMINATE, "SIGHUP": HANG_UP, "Ctrl-C": ctrl_c, "closed": close_terminal}
BY_DAY = [
    Row(
        "steady",
        "peer",
        "its daemon is killed",
        kill_daemon,
        gets_a_new_daemon,
    ),
    Row("steady", "peer", "its machine is asleep", nothing, is_missed_until_it_is_back),
    Row("steady", "peer", "Ctrl-C in its terminal", ctrl_c, leaves),
    Row("window", "peer", "its terminal is closed", close_terminal, leaves),
    Row("killed", "peer with a page", "SIGKILL", KILL, is_lost),
    Row("ranks", "torchrun", "SIGKILL of the parent", KILL, partial(leaves, code=-signal.SIGKILL)),
    Row("page", "visitor", "its daemon is killed", kill_daemon, shows_on),
    Row("page", "visitor", "its terminal is closed", close_terminal, closes),
    Row("swarm", "local of two", "a peer is killed, then its terminal is closed", close_terminal, counts_its_dead),
    Row("orphans", "local", "SIGKILL of the parent", KILL, leaves_no_peers),
]
BY_NIGHT = [
    *(
        Row(f"{kind}-{number}", kind, what, end, seen)
        for kind, seen in {"peer": leaves, "island": leaves, "visitor": closes, "local": sums_up}.items()
        for number, (what, end) in enumerate(ENDS.items())
    ),
    Row("visitor-asleep", "visitor", "its machine is asleep", nothing, shows_again),
    Row("visitor-killed", "visitor", "SIGKILL", KILL, partial(closes, code=-signal.SIGKILL)),
    Row("island-killed", "island", "SIGKILL of the parent", KILL, partial(leaves, code=-signal.SIGKILL)),
    Row("torchrun-0", "torchrun", "SIGINT", INTERRUPT, partial(leaves, code=ANY)),
    Row("torchrun-1", "torchrun", "SIGHUP", HANG_UP, partial(leaves, code=ANY)),
    Row("torchrun-3", "torchrun", "SIGTERM", TERMINATE, is_lost),
    Row("torchrun-2", "torchrun", "its terminal is closed", close_terminal, partial(leaves, code=ANY)),
]
ROWS = [*BY_DAY, *(pytest.param(row, marks=pytest.mark.night) for row in BY_NIGHT)]


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A swarm for the rows that are played."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    own = [row for item in items if isinstance(row := item.callspec.params["row"], Row)]
    found = World(Peers(tmp_path_factory.mktemp("endings")), {row.name: row.kind for row in own})
    try:
        found.peers.start("A", *QUICK, "--dashboard", "127.0.0.1:0")
        found.peers.until("A trains", lambda: bool(found.peers.lines("A", "step")))
        yield found
    finally:
        found.end()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}: {row.what}")
def test_a_command_ends_in_order_whatever_ends_it(world: World, row: Row) -> None:
    world.until_up(row.name)
    row.seen(world, row.name, row.end)

"""python -m decentral.local: a whole swarm as processes on this machine, over libp2p on loopback.

    start the first peer -> the others join it -> wait -> Ctrl-C to each -> summarise journals and checkpoints

Only slowness is emulated (--throttle): the peers are `python -m decentral.peer`, as anyone runs it.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from decentral.comm.net import ports
from decentral.comm.wire.invitations import FOR_EVER, Permission
from decentral.commands import lifeline, shared
from decentral.commands.progress_bar import progress_bar
from decentral.core import config, strict_json
from decentral.core.errors import UserError, writing
from decentral.core.journal.events import ErrorLine, JoinedLine, JournalEvent, StartedLine, StepLine, UnheldLine
from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.journal.file import Tail, read
from decentral.core.journal.lines import recorded
from decentral.core.own_inputs import OwnInputs
from decentral.core.plain_text import printable
from decentral.core.temporary import temporary_folder
from decentral.core.units import Amount, Seconds, readable_bytes
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup.invitation_files import FounderFile, founded, write_holding
from decentral.peers.startup.state import StateFolder
from decentral.view import summary
from decentral.view.page.address import PageAddress, add_dashboard_flag, reserved
from decentral.view.page.child import DashboardProcess, dashboard
from decentral.view.page.source_lines import MissedLine

PEER_START_S = 180.0  # a peer imports torch, reads data and measures itself; four at once on two cores
PEER_LEAVE_S = 120.0
POLL_S = 0.25
REASON_CHARS = 500  # of a peer's trouble
LAST_OUTPUT_BYTES = 8192  # of a peer's output, in which its last line is looked for

EventT = TypeVar("EventT", bound=JournalEvent)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFlags:
    """The flags of `decentral.local`."""

    config: str | None
    overrides: tuple[str, ...]  # of --set
    throttles: tuple[float, ...]  # each peer's slowness
    memory: tuple[int, ...]  # each peer's bytes; (): the device's
    stop_after: Amount
    device: str
    private: bool
    state_dir: str | None
    dashboard: PageAddress | None
    summary: str | None
    metrics: tuple[str, int] | None
    log: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: LocalFlags) -> None:
    console = Console(highlight=False)
    with ExitStack() as stack:
        page_socket = stack.enter_context(reserved(flags.dashboard))
        if flags.state_dir is None:
            folder = stack.enter_context(temporary_folder())
        else:
            folder = Path(flags.state_dir)
        check_memory(flags, folder)
        with writing("--state-dir", folder):
            folder.mkdir(parents=True, exist_ok=True)
        page = stack.enter_context(dashboard(flags.dashboard, folder, listening=page_socket))
        if page:
            console.print(f"the page: {page.url}", style="bold")
        swarm = LocalSwarm(flags, folder, page)
        stack.callback(swarm.kill)
        try:
            swarm.start(console)
            swarm.wait(console)
        except KeyboardInterrupt:
            console.print("stopping")
        swarm.stop()
        deaths = swarm.deaths()
        result = summary.summarise(swarm.folders(), swarm.throttles, swarm.seconds, deaths)
    _report(console, result)
    if flags.summary:
        with writing("--summary", flags.summary):
            Path(flags.summary).write_text(strict_json.dumps(result, indent=1) + "\n")
    if deaths:
        raise SystemExit(1)


def check_memory(flags: LocalFlags, folder: Path) -> None:
    """Raises UserError if peers with this --memory cannot hold the whole model together, whatever layers they choose.

    Of a run that goes on, and of a user's own layers, the peers themselves say so when they see it.
    """
    if not flags.memory or (folder / "peer-0" / "run.json").exists():
        return
    run = config.load(flags.config, flags.overrides)
    if run.model.layers is None:
        from decentral.engine import measure, memory  # load torch

        needs = memory.needs_on(run, measure.choose(flags.device, run.train.dtype, 1.0, 0.0))
        memory.check_together(needs, len(flags.memory), max(flags.memory))


@dataclass(slots=True)
class LocalPeer:
    """One peer process. What it has done is read from its journal."""

    number: int
    folder: Path
    process: "subprocess.Popen[bytes]"
    steps: list[tuple[Seconds, StepLine]] = field(default_factory=list)  # in its journal, as far as it was followed
    troubles: dict[str, Seconds] = field(default_factory=dict)  # reasons that the user has to read, and when last
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / "journal.jsonl")

    def death(self) -> str:
        """Return how its process has died; "" if it runs, or has left as it was told to."""
        status = self.process.poll() or 0
        if status == -signal.SIGINT:  # Ctrl-C came before it could say what that means
            return ""
        return f"killed by signal {-status}" if status < 0 else f"exit code {status}" if status else ""

    def happened(self, kind: type[EventT], since: Seconds) -> EventT | None:
        """The first event of this kind at or after `since` (Unix time)."""
        lines = recorded(read(self.folder / "journal.jsonl"))
        return next((line.event for line in lines if isinstance(line.event, kind) and line.t >= since), None)

    def follow(self) -> None:
        """Takes up the new lines of the journal. It may be long, so it is not read again from its beginning."""
        for line in recorded(self._tail.new()):
            match line.event:
                case StepLine():
                    self.steps.append((line.t, line.event))
                case ErrorLine(reason=reason) | UnheldLine(reason=reason):
                    self.troubles[reason] = line.t

    def has_done(self, goal: Amount, since: float) -> bool:
        """Whether it has done so many steps or tokens since then. False for a goal in seconds: the swarm keeps it."""
        if goal.kind == "s":
            return False
        self.follow()
        steps = [line for t, line in self.steps if t >= since]
        if goal.kind == "steps":
            return bool(steps) and steps[-1].step - steps[0].step >= goal.value
        return sum(line.tokens for line in steps) >= goal.value

    def progress(self, since: float) -> str:
        """Return its last loss and step since `since` (Unix time), "-" if none; a dead peer has the loss "dead"."""
        self.follow()
        last = self.steps[-1][1] if self.steps and self.steps[-1][0] >= since else None
        loss = "dead" if self.death() else _number(last.loss) if last else "-"
        return f"{loss} at step {last.step}" if last else loss


class LocalSwarm:
    """The peer processes that this command started, and only those."""

    listen = ports.LOOPBACK

    def __init__(self, flags: LocalFlags, folder: Path, page: DashboardProcess | None = None) -> None:
        self.flags, self.folder, self.page = flags, folder, page
        self.throttles, self.memory = flags.throttles, flags.memory
        self.members: list[LocalPeer] = []
        self.now = SwarmClock()  # as the peers', it never jumps
        self.began = self.now()
        self.joined_at = self.began
        self.seconds = 0.0
        self.address = ""  # of the first peer, once it has started
        self.shown: set[str] = set()  # of the peers' troubles
        self.say: Callable[[str], None] = lambda text: None  # shows the user a line
        self.known_dead: set[int] = set()  # peers of which the user and the page have been told

    def folders(self) -> list[Path]:
        return [self.folder / f"peer-{number}" for number in range(len(self.throttles))]

    def start(self, console: Console) -> None:
        self.say = partial(console.print, soft_wrap=True, markup=False)
        console.print(f"starting {len(self.throttles)} peers (throttle {', '.join(f'{t:g}' for t in self.throttles)})")
        self.begin(len(self.throttles))
        console.print("training; a second terminal can join with:", style="bold")
        line = [str(Path(sys.executable)), "-m", "decentral.peer", "--join", self.address, *self.joining("guest")]
        console.print(f"    {shlex.join(line)}", soft_wrap=True, markup=False)

    def begin(self, count: int) -> None:
        """Starts the first `count` peers, and returns when all have joined. Raises UserError if one does not."""
        self.launch(0, None)
        self.await_event(self.members[0], JoinedLine)
        started = self.members[0].happened(StartedLine, self.began - 1)
        assert started is not None
        self.address = self.contact(started)
        for number in range(1, count):
            self.launch(number, self.address)
        for member in self.members[1:]:
            self.await_event(member, JoinedLine)
        self.joined_at = self.now()

    def wait(self, console: Console) -> None:
        """Waits for --stop-after, counted from the time at which the last peer has joined."""
        goal = self.flags.stop_after.value if self.flags.stop_after.kind == "s" else None
        with progress_bar(console, goal) as show:
            shown_at = self.joined_at
            while self._running() and (goal is None or self.now() < self.joined_at + goal):
                time.sleep(POLL_S)
                self.tell_deaths()
                for member in self._running():
                    if member.has_done(self.flags.stop_after, self.joined_at):
                        member.process.send_signal(signal.SIGINT)
                if self.now() >= shown_at + 5:
                    shown_at = self.now()
                    line = "loss " + ", ".join(member.progress(self.began) for member in self.members)
                    show(shown_at - self.joined_at, line)
                    if not console.is_terminal:
                        console.print(f"{shown_at - self.joined_at:4.0f} s  {line}", soft_wrap=True)
                    self.warn(console)
        self.tell_deaths()

    def tell_deaths(self) -> None:
        """Print a warning for each peer that died since the last call, and tell the page."""
        for member in self.members:
            death = member.death()
            if not death or member.number in self.known_dead:
                continue
            self.known_dead.add(member.number)
            last = f"; its last line: {_last_output(member.folder)}" if member.process.returncode > 0 else ""
            self.say(printable(f"warning: peer {member.number} has ended ({death}){last}", REASON_CHARS))
            started = member.happened(StartedLine, self.began - 1)
            if self.page and started:
                self.page.tell("", self.now(), MissedLine(peer=started.peer, reason=death, certain=True))

    def deaths(self) -> dict[int, str]:
        """Return how those peers have died that did not leave in order, by number; a peer that came back has not."""
        latest = {member.number: member.death() for member in self.members}
        return {number: death for number, death in latest.items() if death}

    def warn(self, console: Console) -> None:
        """Shows the troubles in the peers' journals since all had joined, each thing once, whichever peer
        says it first. Before that it is no wonder that layers have no holder."""
        for member in self.members:
            for reason, at in member.troubles.items():
                if at >= self.joined_at and reason not in self.shown:
                    self.shown.add(reason)
                    text = f"warning: peer {member.number}: {printable(reason, REASON_CHARS)}"
                    console.print(text, soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Sends Ctrl-C to every peer, and waits while they save. A peer that takes too long is killed."""
        self.seconds = self.now() - self.joined_at
        for member in self._running():
            member.process.send_signal(signal.SIGINT)
        deadline = self.now() + PEER_LEAVE_S
        for member in self.members:
            try:
                member.process.wait(max(0.1, deadline - self.now()))
            except subprocess.TimeoutExpired:
                member.process.kill()

    def kill(self) -> None:
        for member in self._running():
            member.process.kill()
            member.process.wait()

    def launch(self, number: int, join: str | None) -> None:
        """Starts a peer. It goes on from its folder if it has one, else it joins at the address, or begins the run."""
        folder = self.folders()[number]
        folder.mkdir(parents=True, exist_ok=True)
        restart = (folder / "run.json").exists()
        arguments = [sys.executable, "-m", "decentral.peer", "--plain", "--state-dir", str(folder)]
        arguments += ["--listen", self.listen, "--throttle", str(self.throttles[number]), "--device", self.flags.device]
        if self.memory:
            arguments += ["--memory", str(self.memory[number])]
        if self.flags.metrics:
            arguments += ["--metrics", metrics_address(self.flags.metrics, number)]
        if self.flags.log:
            arguments += ["--log", ",".join(self.flags.log)]
        if join and not restart:
            arguments += ["--join", join, *self.joining(folder.name)]
        elif not restart:
            arguments += ["--private"] if self.flags.private else []
            arguments += [self.flags.config] if self.flags.config else []
            arguments += [part for override in self.flags.overrides for part in ("--set", override)]
        tied = lifeline.tied({**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
        with (folder / "output.txt").open("ab") as output:
            process = self.spawn(number, arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **tied)
        self.members.append(LocalPeer(number, folder, process))

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Starts the process of peer `number`; `options` are those of subprocess.Popen."""
        return subprocess.Popen(arguments, start_new_session=True, **options)

    def own_inputs(self) -> OwnInputs:
        """The code and the data that the first peer's user has named: the user of the others is the same."""
        run = StateFolder(self.folders()[0]).read_run()
        return run[1].own_inputs if run else OwnInputs()

    def joining(self, name: str) -> list[str]:
        """What a peer of this name needs to join besides the address: our inputs, and where the swarm is private an
        invitation, which is made where there is none."""
        founder, invitation = self.folders()[0], self.folder / f"{name}.invite"
        if not founded(founder):
            return self.own_inputs().flags()
        if not invitation.exists():
            with FounderFile.open(founder) as keys:
                write_holding(invitation, keys.invite(name, FOR_EVER, Permission.TRAIN))
        return [*self.own_inputs().flags(), "--invite", str(invitation)]

    def contact(self, started: StartedLine) -> str:
        """The address at which the others join the first peer."""
        return started.addresses[0]

    def await_event(self, member: LocalPeer, event: type[JournalEvent]) -> None:
        """Raises UserError if the peer ends before the event is in its journal, or takes longer than PEER_START_S."""
        deadline, said = self.now() + PEER_START_S, ""
        while member.happened(event, self.began - 1) is None:
            does = _last_output(member.folder)
            if does != said and does.startswith(shared.STAGE):
                self.say(f"peer {member.number} {printable(does, REASON_CHARS)}")
                said = does
            if member.process.poll() is not None:
                raise UserError(f"peer {member.number} did not start: {_last_output(member.folder)}")
            if self.now() > deadline:
                waited = f"within {PEER_START_S:.0f} s; is the machine loaded?"
                raise UserError(f"peer {member.number} did not start {waited}")
            time.sleep(POLL_S)

    def _running(self) -> list[LocalPeer]:
        return [member for member in self.members if member.process.poll() is None]


def metrics_address(first: tuple[str, int], number: int) -> str:
    """Where peer `number` serves its metrics: the ports follow the first one's; 0 is any free one for all."""
    host, port = first
    return f"{f'[{host}]' if ':' in host else host}:{port + number if port else 0}"


def _last_output(folder: Path) -> str:
    with (folder / "output.txt").open("rb") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_OUTPUT_BYTES))
        lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"


def _report(console: Console, result: summary.Summary) -> None:
    for peer in result["peers"]:
        exchanges = "/".join(str(peer["exchanges"][outcome]) for outcome in OUTCOMES)
        console.print(
            f"peer {peer['peer'][-6:]}  throttle {peer['throttle']:g}  {peer['micro_batches']} micro-batches  "
            f"busy {peer['busy_fraction']:.3f}  exchanges {exchanges} (done/solo/failed)  "
            f"sent {readable_bytes(peer['sent_bytes'])}  received {readable_bytes(peer['received_bytes'])}  "
            f"loss {_number(peer['loss_last'])}" + (f"  DEAD: {peer['death']}" if peer["death"] else ""),
            soft_wrap=True,
        )
    swarm = result["swarm"]
    console.print(
        f"swarm: {swarm['tokens']:,} tokens in {swarm['seconds']:.0f} s ({swarm['tokens_per_s']:,.0f}/s), "
        f"loss {_number(swarm['loss_first'])} -> {_number(swarm['loss_last'])}, "
        f"held-out loss of the average {_number(swarm['heldout_loss'])}, "
        f"replica spread {_number(swarm['replica_spread'], 4)}",
        soft_wrap=True,
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def parse(argv: Sequence[str] | None) -> LocalFlags:
    parser = shared.Parser(prog="python -m decentral.local", description="A whole swarm on this machine.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped one's name")
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="how many; default 4")
    parser.add_argument("--throttle", metavar="F,F,...", help="each peer's slowness, such as 1,1,1,10")
    parser.add_argument("--stop-after", default="90s", metavar="AMOUNT", help="90s, or each peer's 500steps, 2e6tokens")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for all")
    parser.add_argument("--memory", metavar="BYTES,...", help="each peer's, or one for all; default: the device's")
    parser.add_argument("--private", action="store_true", help="the peers are invited, and nobody else may join")
    parser.add_argument("--state-dir", metavar="DIR", help="keep the peers' folders here, and go on from them")
    add_dashboard_flag(parser)
    parser.add_argument("--summary", metavar="FILE", help="write the summary as JSON")
    parser.add_argument("--metrics", type=shared.host_port, metavar="[HOST:]PORT", help="Prometheus; ports from it on")
    curves = "curves for tensorboard, wandb (offline), of each peer"
    parser.add_argument("--log", type=shared.log_names, default=[], metavar="NAMES", help=curves)
    given = parser.parse_args(argv)
    if not 1 <= given.peers <= 64:
        raise UserError(f"--peers expects 1 to 64; got {given.peers}")
    if given.summary:
        _require_place(Path(given.summary))
    return LocalFlags(
        config=given.config,
        overrides=tuple(given.set),
        throttles=_throttles(given.throttle, given.peers),
        memory=_memories(given.memory, given.peers),
        stop_after=Amount.parse(given.stop_after),
        device=given.device,
        private=given.private,
        state_dir=given.state_dir,
        dashboard=given.dashboard,
        summary=given.summary,
        metrics=given.metrics,
        log=tuple(given.log),
    )


def _require_place(summary_file: Path) -> None:
    """Raise UserError before the run if its summary could not be written after it."""
    there, folder = summary_file.exists(), f"{summary_file.absolute().parent}/"
    if summary_file.is_dir() or not os.access(summary_file if there else folder, os.W_OK):
        raise UserError(f"--summary {summary_file} cannot be written; name a file in a folder that can be")


def _memories(text: str | None, peers: int) -> tuple[int, ...]:
    if text is None:
        return ()
    sizes = tuple(shared.several(text, shared.size))
    if len(sizes) not in (1, peers):
        raise UserError(f"--memory expects one size or {peers}, such as 800MB,16GB; got {text!r}")
    return sizes * peers if len(sizes) == 1 else sizes


def _throttles(text: str | None, peers: int) -> tuple[float, ...]:
    if text is None:
        return (1.0,) * peers
    factors = tuple(shared.several(text, float))
    if len(factors) != peers or not all(1 <= factor <= 1e4 for factor in factors):
        raise UserError(f"--throttle expects {peers} factors of at least 1, such as 1,1,1,10; got {text!r}")
    return factors


if __name__ == "__main__":
    sys.exit(main())

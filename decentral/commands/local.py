"""python -m decentral.local: run a whole swarm as processes on this machine, over libp2p on loopback.

The peers are ordinary `python -m decentral.peer` processes; only different speeds are emulated (--throttle):
    start the first peer -> the others join it -> wait -> Ctrl-C to each -> summarise journals and checkpoints
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from decentral.comm.net import ports
from decentral.comm.wire.invitations import FOR_EVER, Permission
from decentral.commands import lifeline, shared
from decentral.commands.hook_flags import add_hook_flags, hooks_of
from decentral.commands.local_peer import OUTPUT, LocalPeer
from decentral.commands.progress_bar import progress_bar
from decentral.core import config, quantities, strict_json
from decentral.core.device_names import CHOICES, valid_devices
from decentral.core.errors import ExitCode, UserError, writing
from decentral.core.journal.events import JoinedLine, JournalEvent, StartedLine, StepLine
from decentral.core.own_inputs import OwnInputs
from decentral.core.peer_names import name_of_several
from decentral.core.plain_text import printable
from decentral.core.temporary import temporary_folder
from decentral.core.times import clock_time
from decentral.core.units import Amount, plural
from decentral.peers.runtime.clock import SwarmClock
from decentral.peers.startup.flags import StartFlags
from decentral.peers.startup.invitation_files import FounderFile, founded, write_holding
from decentral.peers.startup.state import StateFolder, refuse_model, refuse_peer
from decentral.view import summary
from decentral.view.event_hooks import Hooks
from decentral.view.page.address import PageAddress, add_dashboard_flag, reserved
from decentral.view.page.child import DashboardProcess, dashboard
from decentral.view.page.source_lines import FactsLine, MissedLine
from decentral.view.page.sources import JournalFolder
from decentral.view.page.swarm_hooks import SwarmHooks

PEER_START_S = 180.0  # a peer must join within this time, even if four peers start at once on two cores
PEER_LEAVE_S = 120.0  # peers that have not saved and left within this time are killed
POLL_S = 0.25
REASON_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFlags:
    """The flags of `decentral.local`."""

    config: str | None
    overrides: tuple[str, ...]
    throttles: tuple[float, ...]  # how many times slower each peer trains
    memory: tuple[int, ...]  # memory of each peer, bytes; (): all memory of its device
    stop_after: Amount
    device: str
    private: bool
    state_dir: str | None
    dashboard: PageAddress | None
    summary: str | None
    metrics: tuple[str, int] | None
    log: tuple[str, ...]
    hooks: Hooks | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a peer died."""
    return shared.run(lambda: _main(parse(argv)), lasting=True)


def _main(flags: LocalFlags) -> None:
    console = Console(highlight=False)
    with ExitStack() as stack:
        page_socket = stack.enter_context(reserved(flags.dashboard))
        if flags.state_dir is None:
            folder = stack.enter_context(temporary_folder())
        else:
            folder = Path(flags.state_dir)
        check_run(flags, folder)
        if flags.state_dir is not None:
            stack.enter_context(StateFolder.claim(flags.state_dir))
        else:
            console.print("the model will not be kept; to keep it, stop and give --state-dir DIR", soft_wrap=True)
        page = stack.enter_context(dashboard(flags.dashboard, folder, listening=page_socket))
        if page:
            console.print(f"the page: {page.url}", style="bold")
        swarm = LocalSwarm(flags, folder, page)
        stack.callback(swarm.kill)
        if flags.hooks:
            flags.hooks.start()
        is_early = True
        try:
            swarm.start(console)
            swarm.wait(console)
            is_early = False
        except KeyboardInterrupt:
            console.print("stopping")
        except StoppedWhileStarting as stopped:
            console.print(f"{stopped}; stopping")
        swarm.stop()
        if flags.hooks:
            swarm.tell_hooks()
            flags.hooks.close()
            for warning in flags.hooks.missed():
                console.print(warning, soft_wrap=True, markup=False)
        deaths = swarm.deaths()
        if is_early and not swarm.has_trained():
            console.print("stopped before any peer trained; nothing saved")
            raise SystemExit(ExitCode.FAILED if deaths else ExitCode.INTERRUPTED)
        result = summary.summarise(swarm.folders(), swarm.throttles, swarm.seconds, deaths)
    summary.report(console, result)
    if flags.summary:
        with writing("--summary", flags.summary):
            Path(flags.summary).write_text(strict_json.dumps(result, indent=1) + "\n")
    console.print(shared.as_called(summary.next_step(flags.state_dir)), soft_wrap=True, markup=False)
    if deaths:
        raise SystemExit(ExitCode.FAILED)
    if not swarm.has_started:
        raise SystemExit(ExitCode.INTERRUPTED)


def check_run(flags: LocalFlags, folder: Path) -> None:
    """Raise UserError if no peer could begin the run that these flags describe, or go on with the folder's run.

    A new run's config has to be valid, and --memory large enough for its model, if that is built in. The folder must
    not be one peer's, and its peers must belong to one run.
    """
    refuse_model(folder)
    refuse_peer(folder)
    first = StateFolder(folder / "peer-0").look_at_run()
    asked = StartFlags(config=flags.config, overrides=flags.overrides, private=flags.private)
    for number in range(len(flags.throttles)):
        peer = StateFolder(folder / f"peer-{number}")
        if kept := peer.read_run():
            replace(asked, private=flags.private and number == 0).require_consistent(kept, peer.path)
            if first is None or kept[0] != first[0]:
                other = f"peer-0 to run {first[0]}" if first else "peer-0 to none"
                raise UserError(f"{peer.path} belongs to run {kept[0]}, but {other}; use another --state-dir")
    if first:
        return
    run = config.load(flags.config, flags.overrides)
    if flags.memory and run.model.layers is None:
        from decentral.engine import measure, memory

        needs = memory.needs_on(run, measure.choose(flags.device))
        memory.check_together(needs, len(flags.memory), max(flags.memory))


class StoppedWhileStarting(Exception):
    """Raised when somebody stops a peer before all peers have joined."""


class LocalSwarm:
    """The peer processes that this command has started."""

    listen = ports.LOOPBACK

    def __init__(self, flags: LocalFlags, folder: Path, page: DashboardProcess | None = None) -> None:
        """Make a swarm without processes. Peers get state folders in `folder`; `page` is the dashboard, if any."""
        self.flags, self.folder, self.page = flags, folder, page
        self.throttles, self.memory = flags.throttles, flags.memory
        self.members: list[LocalPeer] = []
        self.now = SwarmClock()
        self.began = self.joined_at = self.now()
        self.has_started = False  # whether all peers have joined
        self.seconds = 0.0  # training time: from the last peer's join until `stop` is called
        self.address = ""
        self.shown: set[str] = set()  # peers' errors that have been printed; each error is printed only once
        self.say: Callable[[str], None] = lambda text: None
        self.known_dead: set[int] = set()  # indices of the dead peers that the user has been told about
        self.followed = JournalFolder(folder)
        self.hooks = SwarmHooks(flags.hooks) if flags.hooks else None

    def folders(self) -> list[Path]:
        """Return the state folder of each peer, in the order of the peers' numbers."""
        return [self.folder / f"peer-{number}" for number in range(len(self.throttles))]

    def start(self, console: Console) -> None:
        """Start all peers, and print the command for another peer to join. Raise UserError if a peer does not join."""
        self.say = lambda text: console.print(text, soft_wrap=True, markup=False)
        throttles = ", ".join(f"{throttle:g}" for throttle in self.throttles)
        console.print(f"starting {plural(len(self.throttles), 'peer')} (throttle {throttles})")
        self.begin(len(self.throttles))
        console.print("training; a second terminal can join with:", style="bold")
        line = [str(Path(sys.executable)), "-m", "decentral.peer", "--join", self.address, *self.joining("guest")]
        console.print(f"    {shlex.join(line)}", soft_wrap=True, markup=False)

    def begin(self, count: int) -> None:
        """Start the first `count` peers, and return when all have joined.

        Raises:
            UserError: If a peer does not join.
            StoppedWhileStarting: If somebody has stopped one of them.
        """
        self.launch(0, None)
        self.await_event(self.members[0], JoinedLine)
        started = self.members[0].happened(StartedLine, self.began - 1)
        assert started is not None
        self.address = self.contact(started)
        for number in range(1, count):
            self.launch(number, self.address)
        for member in self.members[1:]:
            self.await_event(member, JoinedLine)
        self.joined_at, self.has_started = self.now(), True

    def has_trained(self) -> bool:
        """Return whether a peer has taken a step since this command began."""
        return any(member.happened(StepLine, self.began - 1) for member in self.members)

    def wait(self, console: Console) -> None:
        """Wait until --stop-after is reached, counted from the time at which the last peer joined."""
        goal = self.flags.stop_after.value if self.flags.stop_after.kind == "s" else None
        if self.page and goal is not None:
            facts = {"stop_after": str(self.flags.stop_after), "since": self.joined_at}
            self.page.tell("", self.now(), FactsLine(facts=facts))
        with progress_bar(console, goal) as show:
            shown_at = self.joined_at
            while self._running() and (goal is None or self.now() < self.joined_at + goal):
                time.sleep(POLL_S)
                self.tell_deaths()
                self.tell_hooks()
                for member in self._running():
                    if member.has_done(self.flags.stop_after, self.joined_at):
                        member.process.send_signal(signal.SIGINT)
                if self.now() >= shown_at + 5:
                    shown_at = self.now()
                    line = "loss " + ", ".join(member.progress(self.began) for member in self.members)
                    show(shown_at - self.joined_at, line)
                    if not console.is_terminal:
                        self.say(f"{clock_time(shown_at)}  {shown_at - self.joined_at:4.0f} s  {line}")
                    self.warn(console)
        self.tell_deaths()

    def tell_deaths(self) -> None:
        """Report each peer that died since the last call, with a line for the user and a message to the dashboard."""
        for member in self.members:
            death = member.death()
            if not death or member.number in self.known_dead:
                continue
            self.known_dead.add(member.number)
            is_said = member.process.returncode < 0 or (reason := member.failure()).startswith(death)
            why = "" if is_said else f": {reason}"
            self.say(printable(f"warning: peer {member.number} has ended ({death}){why}", REASON_CHARS))
            started = member.happened(StartedLine, self.began - 1)
            if self.page and started:
                self.page.tell("", self.now(), MissedLine(peer=started.peer, reason=death, certain=True))

    def tell_hooks(self) -> None:
        """Tell the hooks, if there are any, what has happened since the last call, and the user of their failures."""
        if self.hooks is not None:
            for warning in self.hooks.follow(self.followed.lines(), self.began):
                self.say(warning)

    def deaths(self) -> dict[int, str]:
        """Return signal or exit code of each peer whose latest process died, as text by the peer's number."""
        latest = {member.number: member.death() for member in self.members}
        return {number: death for number, death in latest.items() if death}

    def warn(self, console: Console) -> None:
        """Print each error in the peers' journals once, except errors from before the last peer joined."""
        for member in self.members:
            for reason, at in member.troubles.items():
                if at >= self.joined_at and reason not in self.shown:
                    self.shown.add(reason)
                    text = f"warning: peer {member.number}: {printable(reason, REASON_CHARS)}"
                    console.print(f"{clock_time(at)}  {text}", soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Send Ctrl-C to every peer, and wait while they save. Kill those that take longer than PEER_LEAVE_S."""
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
        """Kill every running peer."""
        for member in self._running():
            member.process.kill()
            member.process.wait()

    def launch(self, number: int, join: str | None) -> None:
        """Start a peer. It continues the run in its folder, or joins at `join`, or begins a run if `join` is None."""
        folder = self.folders()[number]
        StateFolder.prepare(folder)
        restart = (folder / "run.json").exists()
        arguments = [sys.executable, "-m", "decentral.peer", "--plain", "--state-dir", str(folder)]
        arguments += ["--name", name_of_several(number)]
        arguments += ["--listen", self.listen, "--throttle", str(self.throttles[number]), "--device", self.flags.device]
        arguments += ["--memory", f"{self.memory[number]}B"] if self.memory else []
        if self.flags.metrics:
            arguments += ["--metrics", shared.metrics_address(self.flags.metrics, number)]
        arguments += ["--log", ",".join(self.flags.log)] if self.flags.log else []
        if join and not restart:
            arguments += ["--join", join, *self.joining(folder.name)]
        elif not restart:
            arguments += ["--private"] if self.flags.private else []
            arguments += [self.flags.config] if self.flags.config else []
            arguments += [part for override in self.flags.overrides for part in ("--set", override)]
        tied = lifeline.tied({**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
        with (folder / OUTPUT).open("ab") as output:
            output_from = output.tell()
            process = self.spawn(number, arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **tied)
        self.members.append(LocalPeer(number, folder, process, output_from))

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start the process of peer `number`; `options` are those of subprocess.Popen."""
        return subprocess.Popen(arguments, start_new_session=True, **options)

    def own_inputs(self) -> OwnInputs:
        """Return the code and data that the user gave to the first peer; the other peers get the same."""
        run = StateFolder(self.folders()[0]).read_run()
        return run[1].own_inputs if run else OwnInputs()

    def joining(self, name: str) -> list[str]:
        """Return flags for peer `name` to join: the first peer's code and data; in a private swarm, an invitation."""
        founder, invitation = self.folders()[0], self.folder / f"{name}.invite"
        if not founded(founder):
            return self.own_inputs().flags()
        if not invitation.exists():
            with FounderFile.open(founder) as keys:
                write_holding(invitation, keys.invite(name, FOR_EVER, Permission.TRAIN))
        return [*self.own_inputs().flags(), "--invite", str(invitation)]

    def contact(self, started: StartedLine) -> str:
        """Return the address at which other peers join, from the first peer's journal line."""
        return started.addresses[0]

    def await_event(self, member: LocalPeer, event: type[JournalEvent]) -> None:
        """Wait for an event in a peer's journal.

        Raises:
            UserError: If the peer ends first, or after PEER_START_S.
            StoppedWhileStarting: If somebody has stopped any peer.
        """
        deadline, said = self.now() + PEER_START_S, ""
        while True:
            has_ended = member.process.poll() is not None
            has_happened = member.happened(event, self.began - 1) is not None
            for one in {one.number: one for one in self.members}.values():
                # A peer that leaves is only looked for where it matters, as that takes reading its whole journal.
                may_leave = has_ended or has_happened or one.process.poll() is not None
                if may_leave and one.was_stopped(self.began):
                    raise StoppedWhileStarting(f"peer {one.number} was stopped while starting")
            if has_happened:
                return
            self.tell_hooks()
            does = member.last_output()
            if does != said and does.startswith(shared.STARTING):
                self.say(f"peer {member.number} {printable(does, REASON_CHARS)}")
                said = does
            if has_ended:
                raise UserError(f"peer {member.number} did not start: {member.failure()}")
            if self.now() > deadline:
                waited = f"within {PEER_START_S:.0f} s; the machine may be overloaded: start fewer peers"
                raise UserError(f"peer {member.number} did not start {waited}")
            time.sleep(POLL_S)

    def _running(self) -> list[LocalPeer]:
        return [member for member in self.members if member.process.poll() is None]


def parse(argv: Sequence[str] | None) -> LocalFlags:
    """Return the command's flags, or raise UserError if they are not valid."""
    parser = shared.Parser(prog="python -m decentral.local", description="Run a whole swarm on this machine.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a shipped one")
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="number of peers; default 4")
    parser.add_argument("--throttle", metavar="F,F,...", help="times that each peer is slower, such as 1,1,1,10")
    parser.add_argument("--stop-after", default="90s", metavar="AMOUNT", help="15m, or each peer's 500steps, 2Mtokens")
    shared.add_set_flag(parser)
    parser.add_argument("--device", type=valid_devices, default="auto", help=CHOICES)
    parser.add_argument("--memory", metavar="BYTES,...", help="each peer's memory, or one size for all of them")
    parser.add_argument("--private", action="store_true", help="begin a swarm that only invited peers may join")
    parser.add_argument("--state-dir", metavar="DIR", help="keep the peers' folders here, and continue from them")
    add_dashboard_flag(parser)
    parser.add_argument("--summary", metavar="FILE", help="write the summary as JSON")
    parser.add_argument("--metrics", type=shared.host_port, metavar="[HOST:]PORT", help="Prometheus, PORT and the next")
    parser.add_argument("--log", type=shared.log_names, default=[], metavar="NAMES", help="curves: tensorboard, wandb")
    add_hook_flags(parser)
    given = parser.parse_args(argv)
    shared.refuse_number(given.config)
    if not 1 <= given.peers <= 64:
        raise UserError(f"--peers expects 1 to 64; got {given.peers}")
    if given.metrics and given.metrics[1] + given.peers > shared.PORTS:
        raise UserError(f"--metrics expects a port of at most {shared.PORTS - given.peers}; got {given.metrics[1]}")
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
        hooks=hooks_of(given),
    )


def _require_place(summary_file: Path) -> None:
    """Raise UserError if `summary_file` cannot be written, so that the user learns it before the run."""
    there, folder = summary_file.exists(), f"{summary_file.absolute().parent}/"
    if summary_file.is_dir() or not os.access(summary_file if there else folder, os.W_OK):
        raise UserError(f"--summary {summary_file} cannot be written; choose a file in a folder that can be written")


def _memories(text: str | None, peers: int) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        sizes = quantities.memories_bytes(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--memory: {error}") from None
    if len(sizes) not in (1, peers):
        raise UserError(f"--memory expects one size or {peers}, such as 800MB,16GB; got {text!r}")
    return sizes * peers if len(sizes) == 1 else sizes


def _throttles(text: str | None, peers: int) -> tuple[float, ...]:
    if text is None:
        return (1.0,) * peers
    factors = tuple(shared.several(text, shared.finite))
    if len(factors) != peers or not all(1 <= factor <= 1e4 for factor in factors):
        raise UserError(f"--throttle expects {peers} factors of at least 1, such as 1,1,1,10; got {text!r}")
    return factors


if __name__ == "__main__":
    sys.exit(main())

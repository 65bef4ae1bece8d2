"""Show the state of a running peer to its user: as a live view on a terminal, or as lines of text."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from decentral.commands.shared import starting
from decentral.core.choices import ALGORITHMS, names_with
from decentral.core.ids import PeerId, short
from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.peer_names import departed, titled
from decentral.core.plain_text import plain_text, printable
from decentral.core.times import ago, clock_time, duration
from decentral.core.units import Seconds, plural, readable_bytes
from decentral.peers.membership.records import PeerPhase, Profile
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.progress import Evaluations
from decentral.peers.runtime.setup import NodeSetup
from decentral.peers.startup.invitation_files import founder_path

LONG_STEP_S = 15.0
MOST_CHANGES = 8
REASON_CHARS = 500  # longer texts of warnings and reasons are cut to this many characters
WIDE = 115  # a terminal of at least this many columns shows devices and regions
DEVICE_COLUMNS, REGION_COLUMNS = 36, 14  # longer names of devices and regions are cut
OTHER_COLUMNS = 105  # the peers' table without its device column takes at most this many, gaps included
BETWEEN = 3  # at least this many columns separate two values
LEAST_PEERS = 3  # a low terminal still shows this many other peers


class Display(Protocol):
    """Interface of a display of one running peer; implemented by LineDisplay and LiveDisplay."""

    interval_s: float

    def introduce(self, node: Node, folder: Path) -> None:
        """Show the run, this peer's device, and how other peers join; `folder` is the state folder."""

    def update(self, node: Node, now: Seconds, troubles: Sequence[str] = ()) -> None:
        """Show who joined or left, the `figures`, and `troubles`: warnings about this machine, one line each."""

    def close(self) -> None:
        """End the display."""


class Company:
    """The other peers that a display knows; `changes` compares them with the peers that are present now."""

    def __init__(self) -> None:
        """Begin without known peers. The first comparison makes all present peers known, and reports no change."""
        self._shown: dict[PeerId, str] | None = None  # peer -> end of its id, and its name, as people see them

    def changes(self, node: Node) -> list[str]:
        """Return a line for each peer that joined or left since the last call; [] while this peer does not train.

        The first call returns a warning if another peer has this peer's name.
        """
        if node.phase is not PeerPhase.TRAINING:
            return []
        here = {peer: titled(peer, entry.record.profile.name) for peer, entry in node.roster.live.items()}
        if self._shown is None:
            self._shown = here
            return _namesakes(node)
        before, self._shown = self._shown, here
        counts = f"peers {len(before)} -> {len(here)}"
        came = [f"peer {here[peer]} joined ({counts})" for peer in sorted(here.keys() - before.keys())]
        gone = {peer: departed(node.roster.gone.get(peer, "left")) for peer in sorted(before.keys() - here.keys())}
        left = [f"peer {before[peer]} {how} ({counts})" for peer, how in gone.items()]
        changes = left + came
        more = len(changes) - MOST_CHANGES
        return [*changes[:MOST_CHANGES], *([f"and {more} more"] if more > 0 else [])]


def _namesakes(node: Node) -> list[str]:
    """Return a warning that names the other peers with this peer's name; [] if there are none."""
    name = node.setup.profile.name
    same = [peer for peer, entry in node.roster.live.items() if name and entry.record.profile.name == name]
    others = ", ".join(short(peer) for peer in sorted(same)[:MOST_CHANGES])
    called = f"{'both' if len(same) == 1 else 'all'} called {plain_text(name)}"
    return [f"warning: {plain_text(others)} and this peer are {called}; --name NAME renames one"] if same else []


class LineDisplay:
    """A display that prints a line with step, loss, speed and so on every few seconds, after the date and time."""

    interval_s = 5.0

    def __init__(self) -> None:
        """Begin without known peers, so that the first update reports no peer as joined."""
        self._company = Company()

    def introduce(self, node: Node, folder: Path) -> None:
        """Print the run, this peer's device, and how other peers join."""
        say(introduction(node, folder))

    def update(self, node: Node, now: Seconds, troubles: Sequence[str] = ()) -> None:
        """Print who joined or left, a line with the present values of `figures`, and the warnings in `troubles`."""
        at = clock_time(now)
        for change in self._company.changes(node):
            say(f"{at}  {change}")
        shown = figures(node, now)
        if node.phase is PeerPhase.JOINING:
            starting(f"joining; known peers: {shown['peers']}, received: {shown['received']}")
        else:
            goal = {"goal": told} if (told := _progress(node, now)[2]) else {}
            say("  ".join([at, *(f"{name} {value}" for name, value in (shown | goal).items())]))
        for trouble in (*troubles, *first_step(node, now)):
            say(f"{at}  warning: {printable(trouble, REASON_CHARS)}")

    def close(self) -> None:
        """Do nothing, because printed lines need no cleanup."""


class LiveDisplay:
    """A display that updates in place: a progress bar towards --stop-after, a table of `figures`, a table of peers."""

    interval_s = 0.5

    def __init__(self, console: Console | None = None) -> None:
        """Prepare the view on this console, or on stdout."""
        self._company, self._console = Company(), console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[end]}")
        )
        self._task = self._bar.add_task(PeerPhase.JOINING, total=None, end="")
        self._live = Live(self._bar, console=self._console, refresh_per_second=4)

    def introduce(self, node: Node, folder: Path) -> None:
        """Print the run, this peer's device, and how other peers join; begin the live view."""
        self._console.print(introduction(node, folder), soft_wrap=True, markup=False)
        self._live.start()

    def update(self, node: Node, now: Seconds, troubles: Sequence[str] = ()) -> None:
        """Print who joined or left, and update the view with the values of `figures` and the warnings in `troubles`."""
        for change in self._company.changes(node):
            self._console.print(f"{clock_time(now)}  {change}", markup=False)
        done, total, end = _progress(node, now)
        self._bar.update(self._task, description=node.phase, completed=done, total=total, end=end)
        said = (*troubles, *first_step(node, now))
        warnings = [Text(f"warning: {printable(one, REASON_CHARS)}", style="yellow") for one in said]
        size, figured = self._console.size, _table(figures(node, now), self._console.width)
        above = [figured, *warnings]
        taken = 1 + sum(len(self._console.render_lines(one)) for one in above)
        peers = _peers(node, now, size, size.height - 1 - taken)  # the last line is the cursor's
        self._live.update(Group(self._bar, *above, peers))

    def close(self) -> None:
        """End the live view."""
        self._live.stop()


def say(text: str) -> None:
    """Print a line for the user and flush stdout."""
    print(text, flush=True)


def first_step(node: Node, now: Seconds) -> list[str]:
    """Return a warning if the first step of this process takes longer than LONG_STEP_S, else []."""
    progress = node.progress
    if node.phase is not PeerPhase.TRAINING or progress.tokens or progress.joined_at is None:
        return []
    taken_s = now - progress.joined_at
    said = f"the first step is taking {duration(taken_s)} (train.micro_batch {node.setup.config.train.micro_batch})"
    return [said] if taken_s >= LONG_STEP_S else []


def introduction(node: Node, folder: Path) -> str:
    """Return the text that a user reads first: the run, this peer's device, and how other peers join."""
    setup, profile = node.setup, node.setup.profile
    parameters = sum(fragment.parameters for fragment in setup.fragments)
    speed = f"{profile.tokens_per_s:,.0f}" if profile.tokens_per_s else "its first steps will measure its"
    called = f" ({plain_text(profile.name)})" if profile.name else ""
    adapters = setup.config.model.lora is not None
    trained = "trained parameters (adapters; the other weights are frozen)" if adapters else "parameters"
    return (
        f"run {setup.run}: {parameters / 1e6:.2f} M {trained} in {plural(len(setup.fragments), 'fragment')}\n"
        f"peer {setup.own.peer}{called} on {profile.device}: {speed} tokens/s\n"
        f"state in {folder}; continue later with: python -m decentral.peer --state-dir {shlex.quote(str(folder))}\n"
        f"others join with:\n    {' '.join(['python -m decentral.peer --join', setup.addresses[0], *_needed(setup)])}"
    )


def openness(setup: NodeSetup, folder: Path) -> str:
    """Return a line that says who may join the swarm."""
    if setup.private is None:
        public = "this swarm is public: anybody who has an address may join, read the weights and change them"
        used, safer = setup.config.gossip.algorithm, names_with(ALGORITHMS, lambda one: one.limits_partners)
        if ALGORITHMS[used].limits_partners:
            return public
        return f"{public}; with gossip.algorithm={used} one hostile peer can undo training; {safer} limits that"
    if founder_path(folder).exists():
        return f"this swarm is private; invite others with: python -m decentral.invite --state-dir {folder} --for NAME"
    return "this swarm is private: only peers that its founder has invited may join"


def _needed(setup: NodeSetup) -> list[str]:
    """Return the flags that a user must give each joining peer, since peers accept no code or paths from each other."""
    model, data = setup.config.model, setup.config.data
    reads_folder = model.lora is not None and model.weights is not None
    needed = {
        f"--trust-model-code {shlex.quote(model.layers or '')}": model.layers is not None,
        "--invite FILE": setup.private is not None,
        "--data PATH": data.facts.needs_path,
        "--model-from DIR": reads_folder,
        "--tokenizer PATH": data.facts.needs_tokenizer and (data.tokenizer is not None or not reads_folder),
    }
    return [flag for flag, is_needed in needed.items() if is_needed]


def farewell(node: Node, folder: Path, reason: str, unsaved: str = "") -> None:
    """Print the last lines for the user: why the peer stopped, what it trained, where its state is, how to use it.

    Args:
        node: The peer.
        folder: The peer's state folder.
        reason: Why the peer stopped.
        unsaved: Why the last checkpoint could not be written; "" if it was written.
    """
    progress = node.progress
    done = f"after {progress.tokens:,} tokens since this start, loss {progress.losses}"
    why, said = printable(unsaved, REASON_CHARS), printable(reason, REASON_CHARS)
    before = f"{folder} keeps the previous checkpoint, if there is one" if folder.exists() else f"{folder} was deleted"
    saved = (
        f"saved in {folder}"
        if not unsaved
        else f"NOT saved: {before}"
        if why in said
        else f"NOT saved ({why}): {before}"
    )
    say(f"stopped ({said}) {done}; {saved}")
    if not unsaved and node.setup.whole:
        flags = f"--state-dir {shlex.quote(str(folder))} 'Once upon a time'"
        say(f"use the model with: python -m decentral.generate {flags}")


def figures(node: Node, now: Seconds) -> dict[str, str]:
    """Return the values that both displays show, as text by name: steps, loss, speed, traffic and so on."""
    progress = node.progress
    return {
        "own step": f"{progress.step}",
        "learning-rate step": f"{progress.lr_step}",
        "loss": str(progress.losses),
        "held-out": _held_out(progress.evaluations, now),
        "tokens/s": f"{progress.speed(now):,.0f}",
        "MFU": "-" if (mfu := node.own_record.utilisation(now)) is None else f"{mfu:.0%}",
        "busy": _busy(node) if progress.spent.total else "-",
        "windows": _windows(node),
        "peers": f"{len(node.roster.live)}",
        "exchanges": "/".join(str(node.gossip.counts.outcomes[outcome]) for outcome in OUTCOMES),
        "sent": readable_bytes(node.traffic.sent_bytes),
        "received": readable_bytes(node.traffic.received_bytes),
        "checkpoint": "-" if progress.saved_at is None else ago(progress.saved_at, now),
    }


def _held_out(known: Evaluations, now: Seconds) -> str:
    """Return the last held-out loss and its age; "-" before the first evaluation."""
    return "-" if known.held_out is None else f"{known.held_out:.3f} ({ago(known.measured_at, now)})"


def _windows(node: Node) -> str:
    """Return the present length of a gossip window and, if the window was lengthened, the reason."""
    count, bound = node.gossip.windows
    return f"{node.selection.lengths.window_s() * count:g} s" + (f" ({bound})" if bound else "")


def _busy(node: Node) -> str:
    """Return the shares of the training thread's time for training and for other kinds of work above 1%."""
    shares = node.progress.spent.shares()
    training = shares.pop("training")
    aside = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)
    return f"{training:.0%}" + (f" ({aside})" if aside else "")


def _table(shown: Mapping[str, str], width: int) -> Text:
    """Return the values with their names above them, in as many rows as a terminal of `width` columns needs."""
    table, names, values = Text(no_wrap=True, overflow="ellipsis"), "", ""
    for name, value in shown.items():
        needs = max(len(name), len(value)) + BETWEEN
        if names and len(names) + needs > width:
            table.append(f"{names.rstrip()}\n", style="dim").append(f"{values.rstrip()}\n")
            names, values = "", ""
        names, values = names + name.ljust(needs), values + value.ljust(needs)
    return table.append(f"{names.rstrip()}\n", style="dim").append(values.rstrip())


def _peers(node: Node, now: Seconds, size: ConsoleDimensions, lines: int) -> Table:
    """Return a table of this peer and the others in at most `lines` lines; without device and region if narrow."""
    wide, setup = size.width >= WIDE, node.setup
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    most = {"device": min(DEVICE_COLUMNS, size.width - OTHER_COLUMNS), "region": REGION_COLUMNS}
    for column in ("peer", *(("device", "region") if wide else ()), "step", "tokens/s", "from it", "heard"):
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=most.get(column))

    def place(profile: Profile) -> list[str]:
        return [plain_text(profile.device), plain_text(profile.region)] if wide else []

    figures = [str(node.progress.step), f"{node.progress.speed(now):,.0f}", "-", "this one"]
    rows = [[titled(setup.own.peer, setup.profile.name), *place(setup.profile), *figures]]
    known = sorted(node.roster.live.items())
    room = max(LEAST_PEERS, lines - 2)
    shown = known if len(known) <= room else known[: room - 1]
    for peer, entry in shown:
        record, rate = entry.record, node.meter.bandwidth(peer)
        link = f"{readable_bytes(rate)}/s" if rate else "-"
        figures = [str(record.step), f"{record.profile.tokens_per_s:,.0f}", link, ago(record.time, now)]
        rows.append([titled(peer, record.profile.name), *place(record.profile), *figures])
    if shown != known:
        rows.append([f"and {len(known) - len(shown)} more"])
    for number, row in enumerate(rows):
        table.add_row(*row, style="" if number else "bold")
    return table


def _progress(node: Node, now: Seconds) -> tuple[float, float | None, str]:
    """Return the progress towards --stop-after, the goal (None if there is no goal), and a text that shows both."""
    known = node.progress.towards_goal(now)
    if node.phase is not PeerPhase.TRAINING or known is None:
        return 0.0, None, ""
    left = f", about {duration(known.left_s)} left" if known.left_s is not None else ""
    done = duration(known.done) if known.goal.kind == "s" else f"{known.done:,.0f}"
    return known.done, known.goal.value, f"{done} of {known.goal}{left}"

"""The swarm that is soaked: real peers at places, each with a disk, in the lab where there is root, else on loopback.

Peer n lives at place n % size; those from `size` on have joined late. The first places have peers with the whole model,
the others peers with a part of it. Micro-batches are emulated: they take EMULATED_S however small the model is, so that
two cores are enough for all peers and for those that start again.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.hostile_processes import hostile
from benchmarks.processes import resident_bytes, started_at
from benchmarks.soak.disks import Disks, used_bytes
from benchmarks.soak.evidence import Line, Sample
from benchmarks.wan import description, namespaces
from benchmarks.wan.lab import Lab
from benchmarks.wan.swarm import LISTEN, OUTSIDE
from decentral.comm.net.ports import LOOPBACK
from decentral.commands.local import LocalFlags, LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.commands.local_peer import LocalPeer
from decentral.core.journal.events import StartedLine
from decentral.core.journal.file import Tail
from decentral.core.journal.lines import recorded
from decentral.scheduler.topology import topology

EMULATED_S = 0.4
LAYERS = 6
WHOLE_MEMORY, PART_MEMORY = "1GB", "34MB"  # of the three fragments, two fit into the second
LATENCY_MS, RATE_GBPS = 2, 0.1
TRACEBACK, TRACEBACK_CHARS = "Traceback", 4000
SETTINGS = (
    "model.depth=4 model.width=64 model.context=64 train.micro_batch=4 "
    f"train.emulated_micro_batch_s={EMULATED_S} train.learning_rate=4e-3 "
    "gossip.window_s=2 gossip.start_steps=20 gossip.core_share=1 swarm.checkpoint_every_s=10"
).split()


def local_flags(places: int, whole: int) -> LocalFlags:
    """The flags of `decentral.local` for so many peers, `whole` of them with the whole model."""
    memory = ",".join([WHOLE_MEMORY] * whole + [PART_MEMORY] * (places - whole))
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return parse_local(["--peers", str(places), "--memory", memory, "--stop-after", "1e6s", *settings])


def lab_of(places: int, seconds: float) -> Lab:
    """Raises UserError where it cannot run."""
    tree = {"regions": {"lan": {"count": places}}, "inside": {"delay_ms": LATENCY_MS, "bandwidth_gbps": RATE_GBPS}}
    return Lab(description.from_topology(topology.parse(tree)), seconds)


class SoakSwarm(LocalSwarm):
    """Its peers' journals are followed all the time, and kept."""

    def __init__(self, flags: LocalFlags, disks: Disks, lab: Lab | None, generations: int, lie: str = "") -> None:
        """`generations`: how many peers may live at a place, one after the other. `lie`: what the last place sends."""
        super().__init__(flags, disks.places[0].parent)
        self.lab, self.size, self.lie = lab, len(flags.throttles), lie
        self.listen = LISTEN if lab else LOOPBACK
        self.throttles, self.memory = self.throttles * generations, self.memory * generations
        self.disks = disks
        self.journals: dict[int, list[Line]] = {}  # by peer
        self._tails: dict[int, Tail] = {}

    def folders(self) -> list[Path]:
        return [self.disks.places[n % self.size] / f"peer-{n}" for n in range(len(self.throttles))]

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        if self.lie and number % self.size == self.size - 1:
            arguments = hostile(arguments, ["--lie", self.lie])
        if self.lab is not None:
            return self.lab.popen(number % self.size, arguments, start_new_session=True, **options)
        return subprocess.Popen(arguments, start_new_session=True, preexec_fn=namespaces.die_with_parent, **options)

    def contact(self, started: StartedLine) -> str:
        return next((one for one in started.addresses if one.startswith(OUTSIDE)), started.addresses[0])

    def at(self, place: int) -> LocalPeer:
        """The latest process at a place."""
        return next(one for one in reversed(self.members) if one.number % self.size == place)

    def follow(self) -> None:
        """Takes up the journals' new lines."""
        for number in {member.number for member in self.members}:
            tail = self._tails.setdefault(number, Tail(self.folders()[number] / "journal.jsonl"))
            self.journals.setdefault(number, []).extend(tail.new())

    def latest(self, number: int, event: str, since: float) -> Line | None:
        """The last line of this event, if it was written at `since` or later. An exchange has to be done."""
        for line in reversed(self.journals.get(number, [])):
            if line["t"] < since:
                return None
            if line["event"] == event and line.get("outcome", "done") == "done":
                return line
        return None

    def restart(self, place: int) -> None:
        self.launch(self.at(place).number, None)

    def replace(self, place: int, at: int) -> None:
        """Starts a newcomer, which joins at the peer of the place `at`. Of the one before only its journal stays."""
        before = self.at(place)
        for file in before.folder.glob("*.safetensors"):
            file.unlink()
        contact = self.at(at).number
        started = [line.event for line in recorded(self.journals[contact]) if isinstance(line.event, StartedLine)]
        self.launch(before.number + self.size, self.contact(started[-1]))

    def fill(self, place: int) -> None:
        self.disks.fill(place, self.at(place).process.pid)

    def free(self, place: int) -> None:
        self.disks.free(place, self.at(place).process.pid)

    def samples(self, now: float) -> list[Sample]:
        """What each process uses now. One that ends meanwhile is left out."""
        found = []
        for place in range(self.size):
            process = self.at(place).process
            if process.poll() is None:
                pids = [("peer", process.pid), *(("daemon", pid) for pid in daemons(process.pid))]
                found += [one for role, pid in pids if (one := _sample(now, place, role, pid)) is not None]
        return found

    def disk_bytes(self, place: int) -> int:
        return used_bytes(self.disks.places[place])

    def last_words(self, number: int) -> str:
        lines = (self.folders()[number] / "output.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def tracebacks(self) -> list[str]:
        """The last one of each peer that has printed any."""
        outputs = {member.number: (member.folder / "output.txt").read_text(errors="replace") for member in self.members}
        return [
            f"peer {number}: {text[text.rindex(TRACEBACK) :][:TRACEBACK_CHARS]}"
            for number, text in outputs.items()
            if TRACEBACK in text
        ]


def daemons(pid: int) -> list[int]:
    """The libp2p daemon of a peer; a peer has no other children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # the peer has ended
        return []


def signal_all(pid: int, what: signal.Signals) -> None:
    """Send a signal to a peer and its daemon, as if it hit the whole machine."""
    for each in (*daemons(pid), pid):
        with suppress(ProcessLookupError):
            os.kill(each, what)


def _sample(now: float, place: int, role: str, pid: int) -> Sample | None:
    try:
        files = len(os.listdir(f"/proc/{pid}/fd"))
        return Sample(now, place, pid, role, now - started_at(pid), resident_bytes(pid), files)
    except (OSError, ValueError):  # it has ended
        return None


def write_json(path: Path, result: object) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")

"""Churn in the lab: every so many seconds a peer is killed (`kill -9`), and a newcomer starts in its place.

The newcomer has a folder and an identity of its own, and joins at a peer that was there from the beginning. Half of the
peers are never killed: they are the survivors, whose training is compared with the time before. A newcomer's download
is compared with the time that its downlink needs for the state.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.kill import trouble
from benchmarks.wan.lab import Lab
from benchmarks.wan.swarm import LabSwarm, Line, of_router
from decentral.commands.local import LocalFlags
from decentral.core.config import load
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals


class ChurningSwarm(LabSwarm):
    """Peer n of the swarm lives in place n % size of the lab; those from `size` on have joined late."""

    def __init__(self, flags: LocalFlags, folder: Path, lab: Lab, kills: int) -> None:
        super().__init__(flags, folder, lab)
        self.size = len(self.throttles)
        generations = 2 + kills // max(1, self.size - self.size // 2)
        self.throttles = self.throttles * generations

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> Any:
        return super().spawn(number % self.size, arguments, **options)


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds: of the whole run, until the first kill, and from one to the next."""

    whole_s: float
    quiet_s: float
    every_s: float


def run(lab: Lab, flags: LocalFlags, folder: Path, times: Times, console: Console) -> Line:
    """Runs a swarm, kills and starts peers, and reads from the journals what became of them."""
    seconds, quiet_s, every_s = times.whole_s, times.quiet_s, times.every_s
    swarm = ChurningSwarm(flags, folder, lab, int((seconds - quiet_s) / every_s) + 1)
    try:
        swarm.begin(swarm.size)
        before, began = lab.traffic(), time.time()
        killed = _kill_and_join(swarm, began + quiet_s, began + seconds, every_s, console)
        traffic, ended = lab.traffic() - before, time.time()
        swarm.stop()
    finally:
        swarm.kill()
    journals = {member.number: list(read(member.folder / "journal.jsonl")) for member in swarm.members}
    late = [number for number in journals if number >= swarm.size]
    survivors = [number for number in range(swarm.size) if number not in killed]
    needed = {number: _state_s(lab, swarm, number) for number in late}
    return {
        "seconds": ended - began,
        "killed": len(killed),
        "survivors": [of_survivor(journals[one], began, began + quiet_s, ended) for one in survivors],
        "newcomers": [of_newcomer(journals[one], needed[one]) for one in late],
        "trouble": trouble(swarm.members),
        "router": of_router(lab, traffic),
    }


def _kill_and_join(swarm: ChurningSwarm, begin: float, end: float, every_s: float, console: Console) -> list[int]:
    """Kills the second half of the peers in turn, the latest in a place first. Returns the numbers of the killed."""
    killed, at = list[int](), begin
    places = range(swarm.size // 2, swarm.size)
    while at < end:
        time.sleep(max(0.0, at - time.time()))
        place = places[len(killed) % len(places)]
        victim = next(member for member in reversed(swarm.members) if member.number % swarm.size == place)
        victim.process.kill()
        victim.process.wait()
        swarm.launch(victim.number + swarm.size, swarm.address)
        killed.append(victim.number)
        at += every_s
        running = sum(member.process.poll() is None for member in swarm.members)
        console.print(f"{time.time() - begin:4.0f} s  peer {victim.number} killed, another started; {running} run")
    time.sleep(max(0.0, end - time.time()))
    return killed


def of_survivor(journal: Sequence[Line], began: float, first_kill: float, ended: float) -> Line:
    """Training's share of its time before the first kill and after it, and its tokens a second."""

    def share(begin: float, end: float) -> tuple[float, float]:
        steps = [line for line in journal if line["event"] == "step" and begin <= line["t"] < end]
        spent = PeerTotals.of(steps).work.spent
        tokens = sum(line["tokens"] for line in steps[1:])
        lasted = steps[-1]["t"] - steps[0]["t"] if len(steps) > 1 else 0.0
        return (spent.shares()["training"] if spent.total else 0.0), tokens / lasted if lasted else 0.0

    before, after = share(began, first_kill), share(first_kill, ended)
    return {"share_before": before[0], "share_after": after[0], "speed": after[1] / before[1] if before[1] else 0.0}


def of_newcomer(journal: Sequence[Line], needed_s: float) -> Line:
    """Seconds from its first line to its first step, those until it has joined, and those that its link needs."""
    first = {line["event"]: line for line in reversed(journal)}
    if not {"started", "joined", "step"} <= first.keys():
        return {"trained": False}
    return {
        "trained": True,
        "seconds": first["step"]["t"] - first["started"]["t"],
        "join_s": first["joined"]["seconds"],
        "needed_s": needed_s,
    }


def report(result: Line) -> str:
    survivors, newcomers = result["survivors"], result["newcomers"]
    shares = [one["share_after"] / one["share_before"] for one in survivors if one["share_before"]]
    speeds = [one["speed"] for one in survivors]
    joined = [one for one in newcomers if one["trained"]]
    lines = [
        f"{result['killed']} killed and as many started in {result['seconds']:.0f} s; {len(survivors)} survivors",
        f"survivors' training share, of before: {_spread(shares)}; tokens/s, of before: {_spread(speeds)}",
    ]
    if joined:
        seconds = sorted(one["seconds"] for one in joined)
        lines.append(
            f"{len(joined)} of {len(newcomers)} newcomers trained, "
            f"{median(seconds):.1f} s after their start (most {seconds[-1]:.1f}); "
            f"joined within {median(one['join_s'] for one in joined):.1f} s, where their links need "
            f"{median(one['needed_s'] for one in joined):.1f} s for the state"
        )
    lines += result["trouble"] or ["no exception in any output, no error in any journal"]
    lines += [f"{complaint}: these figures are not the links'" for complaint in result["router"]["complaints"]]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"median {median(values):.3f}, least {min(values):.3f}" if values else "-"


def _state_s(lab: Lab, swarm: LabSwarm, number: int) -> float:
    """How long the newcomer's downlink, or its path to the median peer, needs for a model's weights in fp32."""
    place, asked = number % len(lab.description), lab.description
    paths = [asked.rate(other, place) for other in range(len(asked)) if other != place]
    return (
        4
        * sum(load(swarm.flags.config, swarm.flags.overrides).model.layer_parameters)
        / min(float(asked.down[place]), median(paths))
    )

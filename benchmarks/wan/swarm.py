"""A local swarm over the lab: each peer a real `decentral.peer` process in its own namespace.

The first peer starts the run, the others join it at its address in the lab. Afterwards their journals and the router's
counters say what each did, and what the links carried meanwhile.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.wan.lab import ROOT, Lab, Traffic
from benchmarks.wan.links import Count
from decentral.commands.local import LocalFlags, LocalSwarm
from decentral.core.journal.events import StartedLine
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals
from decentral.view import summary

LISTEN = "/ip4/0.0.0.0/tcp/0"  # every interface of its namespace, as a peer does without a flag
OUTSIDE = "/ip4/11."
LOOK_S = 60.0
Line = dict[str, Any]


class LabSwarm(LocalSwarm):
    """The swarm of `decentral.local`, with peer n started in the namespaces of the lab's peer n."""

    listen = LISTEN

    def __init__(self, flags: LocalFlags, folder: Path, lab: Lab) -> None:
        super().__init__(flags, folder)
        self.lab = lab

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        region = ["--region", self.lab.description.regions[number]]
        return self.lab.popen(number, [*arguments, *region], start_new_session=True, **options)

    def contact(self, started: StartedLine) -> str:
        """The first peer's address in the lab: it also listens on loopback."""
        return next(address for address in started.addresses if address.startswith(OUTSIDE))


def train(lab: Lab, flags: LocalFlags, folder: Path, schedule: str, console: Console) -> Line:
    """Runs a swarm for `flags.stop_after`; the schedule begins when all have joined. Returns the report."""
    swarm = LabSwarm(flags, folder, lab)
    try:
        swarm.start(console)
        before = lab.traffic()
        if schedule:
            lab.change(schedule)
        swarm.wait(console)
        traffic = lab.traffic() - before
        ended = time.time()
        believed = _believed(swarm)
        swarm.stop()
    finally:
        swarm.kill()
    result = summary.summarise(swarm.folders(), swarm.throttles, swarm.seconds)
    for number, peer in enumerate(result["peers"]):
        journal = read(swarm.folders()[number] / "journal.jsonl")
        lines = [line for line in journal if swarm.joined_at <= line["t"] <= ended]
        peer |= of_peer(lab, number, lines, traffic)
        peer["believed"] = believed.get(peer["peer"])
    result["router"] = of_router(lab, traffic)
    return result


def of_peer(lab: Lab, number: int, lines: Sequence[Line], traffic: Traffic) -> Line:
    """What a peer did by its journal's `lines`, and what its links carried, from when all had joined."""
    spent = PeerTotals.of(lines).work.spent
    return {
        "name": lab.description.names[number],
        "asked": _asked(lab, number),
        "tokens": sum(line["tokens"] for line in lines if line["event"] == "step"),
        "training_share": spent.shares()["training"] if spent.total else 0.0,
        "exchanges": {outcome: sum(_is(line, outcome) for line in lines) for outcome in ("done", "solo", "failed")},
        "failures": Counter(line["reason"] for line in lines if _is(line, "failed")),
        "pulls": _pulls(lines),
        "link": {
            "sent_bytes_per_s": traffic.rate(source=number),
            "received_bytes_per_s": traffic.rate(target=number),
            "dropped": _drops(traffic, number),
            "longest_wait_s": float(traffic.counts[number, :, Count.LONGEST_WAIT_NS].max()) / 1e9,
        },
    }


def of_router(lab: Lab, traffic: Traffic) -> Line:
    """What the router needed, and whether it was itself what held the swarm up."""
    between = lab.description.delay_s[~np.eye(len(lab.description), dtype=bool)]
    return {
        "complaints": traffic.complaints(2 * float(between.min())),
        "seconds": traffic.seconds,
        "cores": traffic.router_cores,
        "late_ms_p99": traffic.late_ms(0.99),
        "tally": traffic.tally,
        "bytes": traffic.counts[..., Count.DELIVERED_BYTES].tolist(),
    }


def _believed(swarm: LabSwarm) -> dict[str, Line]:
    """What each peer publishes of its links at the end, by its id; nothing if the first peer does not answer."""
    looking = swarm.lab.popen(
        0,
        [sys.executable, "-m", "benchmarks.wan.look", swarm.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        text, _ = looking.communicate(timeout=LOOK_S)
    except subprocess.TimeoutExpired:
        looking.kill()
        return {}
    return dict(json.loads(text)) if looking.returncode == 0 else {}


def _asked(lab: Lab, number: int) -> Line:
    asked = lab.description
    others = [other for other in range(len(asked)) if other != number]
    return {
        "up": float(asked.up[number]),
        "down": float(asked.down[number]),
        "pair_median": median(asked.rate(other, number) for other in others),
        "round_trip_s_median": median(asked.round_trip_s(other, number) for other in others),
        "nat": asked.nat.get(number),
    }


def _pulls(lines: Sequence[Line]) -> Line:
    """How fast an exchange's bytes came, in bytes/s from its begin to its merge, and how long it took."""
    done = [line for line in lines if _is(line, "done") and line["seconds"] > 0]
    rates = [line["received_bytes"] / line["seconds"] for line in done]
    return {
        "done": len(done),
        "received_bytes_median": median([line["received_bytes"] for line in done] or [0]),
        "seconds_median": median([line["seconds"] for line in done] or [0.0]),
        "bytes_per_s_median": median(rates or [0.0]),
    }


def _is(line: Line, outcome: str) -> bool:
    return bool(line["event"] == "exchange" and line["outcome"] == outcome)


def _drops(traffic: Traffic, number: int) -> dict[str, int]:
    """What was dropped of what this peer sent, and where."""
    kinds = (Count.CUT, Count.UPLINK_FULL, Count.PATH_FULL, Count.DOWNLINK_FULL, Count.LOST)
    return {kind.name.lower(): traffic.of(kind, source=number) for kind in kinds}


COLUMNS = {  # heading: width
    **{"peer": 14, "tokens": 9, "training": 8, "done/solo/failed": 16, "sent": 6, "of up": 6, "received": 8},
    **{"of down": 7, "a pull: kB": 10, "s": 6, "its rate": 8, "believed up": 11, "down": 6, "latency, ms": 11},
    **{"asked": 6, "drops": 6},
}


def table(result: Line) -> str:
    """A line for each peer, and one for the router. Rates in Mb/s."""
    lines = [_aligned(list(COLUMNS)), *(_aligned(_cells(peer)) for peer in result["peers"])]
    router = result["router"]
    lines.append(
        f"rates in Mb/s; router: {router['cores']:.3f} of a core, 99% of the packets late by less than "
        f"{router['late_ms_p99']:.2f} ms"
        + "".join(f"; {complaint}: these figures are not the links'" for complaint in router["complaints"])
    )
    return "\n".join(lines)


def _cells(peer: Line) -> list[str]:
    link, asked, pulls, believed = peer["link"], peer["asked"], peer["pulls"], peer["believed"] or {}
    sent, received = link["sent_bytes_per_s"], link["received_bytes_per_s"]
    cells = [peer["name"], f"{peer['tokens']:,}", f"{peer['training_share']:.3f}"]
    cells.append("/".join(str(peer["exchanges"][outcome]) for outcome in ("done", "solo", "failed")))
    cells += [f"{sent * 8e-6:.2f}", f"{sent / asked['up']:.1%}", f"{received * 8e-6:.2f}"]
    cells += [f"{received / asked['down']:.1%}", f"{pulls['received_bytes_median'] / 1e3:.0f}"]
    cells += [f"{pulls['seconds_median']:.2f}", f"{pulls['bytes_per_s_median'] * 8e-6:.2f}"]
    cells += [_believes(believed, "up", 8e-6), _believes(believed, "down", 8e-6), _believes(believed, "latency_s", 1e3)]
    cells += [f"{asked['round_trip_s_median'] * 1e3:.0f}", f"{sum(link['dropped'].values())}"]
    return cells


def _believes(believed: Line, name: str, unit: float) -> str:
    return f"{believed[name] * unit:.1f}" if believed.get(name) else "-"


def _aligned(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))

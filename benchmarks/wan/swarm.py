"""A local swarm over the lab: each peer a real `decentral.peer` process in its own namespace.

The first peer starts the run, the others join it at its address in the lab. Afterwards their journals and the router's
counters say what each did, and what the links carried meanwhile.
"""

import argparse
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.wan.lab import Lab, Traffic
from benchmarks.wan.links import Count
from decentral import summary
from decentral.core.journal import read
from decentral.local import LocalSwarm

LISTEN = "/ip4/0.0.0.0/tcp/0"  # every interface of its namespace, as a peer does without a flag
OUTSIDE = "/ip4/11."
Line = dict[str, Any]


class LabSwarm(LocalSwarm):
    """`decentral.local`'s swarm, its processes started in the lab's namespaces: peer n of the one is peer n of the other."""

    listen = LISTEN

    def __init__(self, flags: argparse.Namespace, folder: Path, lab: Lab) -> None:
        super().__init__(flags, folder)
        self.lab = lab

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        region = ["--region", self.lab.description.regions[number]]
        return self.lab.popen(number, [*arguments, *region], start_new_session=True, **options)

    def contact(self, started: Line) -> str:
        """The first peer's address in the lab: it also listens on loopback."""
        return next(str(address) for address in started["addresses"] if str(address).startswith(OUTSIDE))


def train(lab: Lab, flags: argparse.Namespace, folder: Path, schedule: str, console: Console) -> Line:
    """Runs a swarm for `flags.stop_after`; the schedule begins when all have joined. Returns the report."""
    swarm = LabSwarm(flags, folder, lab)
    try:
        swarm.start(console)
        before = lab.traffic()
        if schedule:
            lab.change(schedule)
        swarm.wait(console)
        traffic = lab.traffic() - before
        swarm.stop()
    finally:
        swarm.kill()
    result = summary.summarise(swarm.folders(), swarm.throttles, swarm.seconds)
    return report(swarm, result, traffic)


def report(swarm: LabSwarm, result: summary.Summary, traffic: Traffic) -> Line:
    """The summary of `decentral.local`, with what each peer's links carried and how its pulls went."""
    asked = swarm.lab.description
    for number, peer in enumerate(result["peers"]):
        lines = [line for line in read(swarm.folders()[number] / "journal.jsonl") if line["t"] >= swarm.joined_at]
        peer |= {
            "name": asked.names[number],
            "asked": _asked(swarm.lab, number),
            "link": {
                "sent_bytes_per_s": traffic.rate(source=number),
                "received_bytes_per_s": traffic.rate(target=number),
                "dropped": _drops(traffic, number),
                "longest_wait_s": float(traffic.counts[number, :, Count.LONGEST_WAIT_NS].max()) / 1e9,
            },
            "pulls": _pulls(lines),
            "failures": Counter(line["reason"] for line in lines if _is(line, "failed")),
        }
    result["router"] = {
        "cores": traffic.router_cores,
        "late_ms_p99": traffic.late_ms(0.99),
        "tally": traffic.tally,
        "bytes": traffic.counts[..., Count.DELIVERED_BYTES].tolist(),
    }
    return result


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
    return line["event"] == "exchange" and line["outcome"] == outcome


def _drops(traffic: Traffic, number: int) -> dict[str, int]:
    """What was dropped of what this peer sent, and where."""
    kinds = (Count.CUT, Count.UPLINK_FULL, Count.PATH_FULL, Count.DOWNLINK_FULL, Count.LOST)
    return {kind.name.lower(): traffic.of(kind, source=number) for kind in kinds}


def table(result: Line) -> str:
    """A line for each peer, and one for the router."""
    lines = [
        f"{'peer':14} {'tokens':>9} {'training':>9} {'done/solo/failed':>17} {'sent':>6} {'of up':>6} "
        f"{'received':>9} {'of down':>8} {'a pull':>17} {'its rate':>9} {'round trip':>11} {'drops':>6}"
    ]
    for peer in result["peers"]:
        exchanges = "/".join(str(peer["exchanges"][outcome]) for outcome in ("done", "solo", "failed"))
        link, asked, pulls = peer["link"], peer["asked"], peer["pulls"]
        sent, received = link["sent_bytes_per_s"], link["received_bytes_per_s"]
        pull = f"{pulls['received_bytes_median'] / 1e3:.0f} kB, {pulls['seconds_median']:.2f} s"
        lines.append(
            f"{peer['name']:14} {peer['tokens']:9,} {peer['busy_fraction']:9.3f} {exchanges:>17} {sent * 8e-6:6.2f} "
            f"{sent / asked['up']:6.1%} {received * 8e-6:9.2f} {received / asked['down']:8.1%} {pull:>17} "
            f"{pulls['bytes_per_s_median'] * 8e-6:9.2f} {asked['round_trip_s_median'] * 1e3:8.0f} ms "
            f"{sum(link['dropped'].values()):6}"
        )
    router = result["router"]
    lines.append(
        f"rates in Mb/s; router: {router['cores']:.3f} of a core, 99% of the packets late by less than "
        f"{router['late_ms_p99']:.2f} ms"
    )
    return "\n".join(lines)

"""A newcomer's download beside the exchanges of the others: how much of what the links can carry does it get?

All peers but the last train for some seconds, then the last one joins. What can be had is the lesser of its downlink
and the sum of its donors' uplinks; what the others exchange meanwhile takes a part of that. How long their exchanges
take is compared with the time before.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.wan.description import Description
from benchmarks.wan.lab import Lab, Traffic
from benchmarks.wan.links import Count
from benchmarks.wan.swarm import LabSwarm, Line, of_router
from decentral.commands.local import POLL_S, LocalFlags
from decentral.core.journal.events import JoinedLine, StartedLine
from decentral.core.journal.file import read


def join_late(lab: Lab, flags: LocalFlags, folder: Path, seconds: float, console: Console) -> Line:
    """Runs the swarm without its last peer for so many seconds, and then until that one has its state."""
    swarm = LabSwarm(flags, folder, lab)
    newcomer = len(lab.description) - 1
    try:
        swarm.begin(newcomer)
        console.print(f"{newcomer} peers train; the last one joins in {seconds:g} s")
        quiet_from, at_first = time.time(), lab.traffic()
        time.sleep(seconds)
        quiet = lab.traffic() - at_first
        swarm.launch(newcomer, swarm.address)
        swarm.await_event(swarm.members[newcomer], StartedLine)
        asked_at, before = time.time(), lab.traffic()
        swarm.await_event(swarm.members[newcomer], JoinedLine)
        joined_at, traffic = time.time(), lab.traffic() - before
        time.sleep(2 * POLL_S)  # for the others' lines about what has just ended
    finally:
        swarm.kill()
    journals = [read(one / "journal.jsonl") for one in swarm.folders()]
    joined = next(line for line in journals[newcomer] if line["event"] == "joined")
    others = [line for journal in journals[:newcomer] for line in journal]
    return {
        "download": of_download(lab.description, traffic, joined["seconds"]),
        "before": of_exchanges(quiet, others, (quiet_from, asked_at)),
        "during": of_exchanges(traffic, others, (asked_at, joined_at)),
        "router": of_router(lab, traffic),
    }


def of_download(asked: Description, traffic: Traffic, seconds: float) -> Line:
    """What the newcomer's links carried while it fetched its state, and what they could have."""
    newcomer = len(asked) - 1
    received = traffic.of(Count.DELIVERED_BYTES, target=newcomer)
    limit = min(float(asked.down[newcomer]), float(asked.up[:newcomer].sum()))
    return {"bytes": received, "seconds": seconds, "limit": limit, "share": received / seconds / limit}


def of_exchanges(traffic: Traffic, lines: Sequence[Line], between: tuple[float, float]) -> Line:
    """The exchanges of the other peers that ended in this time, and what their uplinks carried among themselves."""
    begin, end = between
    found = [line for line in lines if line["event"] == "exchange" and begin <= line["t"] < end]
    done = [line["seconds"] for line in found if line["outcome"] == "done"]
    others = range(len(traffic.counts) - 1)
    carried = sum(traffic.of(Count.DELIVERED_BYTES, one, other) for one in others for other in others)
    return {
        "done": len(done),
        "failed": sum(line["outcome"] == "failed" for line in found),
        "seconds_median": median(done or [0.0]),
        "seconds_p95": sorted(done)[int(0.95 * len(done))] if done else 0.0,
        "bytes_per_s": carried / max(1e-9, traffic.seconds),
        "dropped": sum(traffic.of(kind) for kind in (Count.UPLINK_FULL, Count.PATH_FULL, Count.DOWNLINK_FULL)),
    }


def report(result: Line) -> str:
    """A line about the download, and one about the exchanges before and during it."""
    download = result["download"]
    rate, limit = download["bytes"] / download["seconds"] * 8e-6, download["limit"] * 8e-6
    lines = [
        f"state: {download['bytes'] * 1e-6:.1f} MB in {download['seconds']:.1f} s, {rate:.1f} of {limit:.1f} Mb/s: "
        f"{download['share']:.0%} of what the downlink and the donors' uplinks can carry"
    ]
    for name in ("before", "during"):
        one = result[name]
        lines.append(
            f"{name}: {one['done']} exchanges of the others done, {one['failed']} failed; "
            f"{one['seconds_median']:.2f} s each (95%: {one['seconds_p95']:.2f} s), "
            f"{one['bytes_per_s'] * 8e-6:.1f} Mb/s, {one['dropped']} packets dropped"
        )
    lines += [f"{complaint}: these figures are not the links'" for complaint in result["router"]["complaints"]]
    return "\n".join(lines)

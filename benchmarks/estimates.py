"""Estimates against runs: what `decentral.estimate` predicts, and what real and simulated swarms then do.

    python -m benchmarks.estimates [--part real|simulated|routed] [--only NAME;...] [--json FILE]
    python -m benchmarks.estimates --part real --sizes 85M       # one real swarm, in about 25 minutes

`real`: three swarms of processes on this machine, whose processor is measured for the estimate just after. All keys of
gossip have their defaults, so that 85 M has windows of about a minute; the interval begins when windows have settled.
`simulated`: ten swarms of peers with the whole model in virtual time, on links of several kinds, with another seed and
for longer than the estimate plays them; devices are as fast as the estimate assumes. `routed`: swarms whose peers hold
parts of the model, with another plan. A row has the estimate over the run, and whether its range contains the run.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from benchmarks import processes
from benchmarks.shapes import SIZES
from benchmarks.sizes import training
from decentral.comm.gossip.gossip_cost import FEWER_CORES
from decentral.commands.estimates import places
from decentral.commands.estimates.figures import Figure
from decentral.commands.estimates.forecast import Forecast, forecast
from decentral.commands.estimates.peer_devices import PeerDevice, devices_of, step_tokens
from decentral.commands.estimates.playing import PlayedSwarm, scenario_of
from decentral.commands.estimates.traffic import Gossiper
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.core import config
from decentral.core.config import Config
from decentral.core.journal.events import ExchangeLine, JournalEvent, StatusLine, StepLine
from decentral.core.journal.file import read
from decentral.core.journal.lines import Recorded, recorded
from decentral.peers.membership.link_probes import PROBE_BYTES, longest_pause_s
from decentral.peers.runtime.host import CORES_S
from decentral.peers.runtime.traffic import TRAFFIC_S
from decentral.scheduler.throughput.planning import throughput_plan
from decentral.scheduler.topology import topology as topologies
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology
from decentral.sim.run import run

STEADY = ["gossip.start_steps=0", "train.eval_every_s=1e6"]
RARE = ["gossip.window_s=8", "gossip.fragment_parameters=30000000"]  # so that large swarms are played soon
KNOWN = (0.9, 1.02)  # range of tokens/s, over those of a device whose speed is known
WINDOWS = 4  # a real interval has at least so many windows
SETTLED_WINDOWS = 3  # windows have settled when the lengths of so many lie at most one step, a factor of 2, apart
SETTLE_S = 600.0  # a swarm whose windows still change after this time is measured as it is


@dataclass(frozen=True, slots=True)
class Case:
    """A swarm to estimate and to run: its config's overrides, and its peers as for --peers or a topology's name."""

    name: str
    overrides: Sequence[str]
    peers: str
    step_s: tuple[float, ...] = ()  # of peers of a simulated topology, repeated; (): by their cards


REAL = [
    Case("0.5M", [*SIZES["0.5M"], *STEADY], "2xcpu"),
    Case("10M", [*SIZES["10M"], *STEADY], "2xcpu"),
    Case("85M", [*SIZES["85M"], *STEADY, "train.optimizer=adamw"], "2xcpu"),
]
SIMULATED = [
    Case("four-homes, 0.5 M", SIZES["0.5M"], "four-homes", (0.2,)),
    Case("four-far-homes, 10 M", SIZES["10M"], "four-far-homes", (0.4, 0.4, 0.8, 4.0)),
    Case("home-among-labs, 125 M", SIZES["125M"], "home-among-labs", (0.5, 0.5, 0.5, 2.0)),
    Case("24-in-ten-cities, 125 M", [*SIZES["125M"], *RARE], "24-in-ten-cities", (0.5,)),
    Case("ten-cities, 350 M", [*SIZES["350M"], *RARE], "ten-cities", (1.0, 1.5)),
    Case("home of four and a cluster, 350 M", [*SIZES["350M"], *RARE], "4x4090 home:50/500, 8xA100 oregon"),
    Case(
        "five unequal homes, 125 M", SIZES["125M"], "4090 home1, 3090 home2:40/200, 4070 home3, 3080 home4, 5090 home5"
    ),
    Case("sixteen homes, 10 M", SIZES["10M"], ", ".join(f"3060 home{n}" for n in range(16))),
    Case("one cluster of eight, 350 M", [*SIZES["350M"], *RARE], "8xH100 lab"),
    Case(
        "two labs and a phone line, 85 M",
        [*SIZES["85M"], *RARE],
        "3xL4 porto:200/200, 3xL40S braga:500/500, T4 home:5/20",
    ),
]
ROUTED = [
    Case("four small cards in one lab, 1 B", SIZES["1B"], "4xRTX 4070 lab"),
    Case("six homes, 1 B", SIZES["1B"], ", ".join(f"3080 home{n}:100/500" for n in range(6))),
]


def main() -> None:
    torch.set_num_threads(1)
    args = _arguments()
    parts = {"real": (REAL, real), "simulated": (SIMULATED, simulated), "routed": (ROUTED, simulated)}
    cases, play = parts[args.part]
    for case in cases:
        if args.only and case.name not in args.only:
            continue
        row = {"case": case.name, "part": args.part} | play(case, args)
        print(json.dumps(row), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


def real(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run a swarm on this machine, estimate it, and compare.

    Other programs may run here, too. So tokens/s are divided by the share of a core that training got, and the
    estimate decides about windows by the cores that peers saw. A virtual machine's own speed may change by half within
    minutes, as neighbours use its memory bus. So the estimate times this machine just after the interval of tokens/s,
    which is the last minute of the run; its timing before the run is shown beside it.
    """
    run_config, groups = config.load(None, case.overrides), places.groups_of(case.peers)
    (before_run,), count = devices_of(run_config, groups), groups[0].count
    flags = ["--peers", f"{count}", "--stop-after", "1d"] + [part for key in case.overrides for part in ("--set", key)]
    with tempfile.TemporaryDirectory(prefix="estimates-") as folder:
        swarm = LocalSwarm(parse_local(flags), Path(folder))
        with training(swarm):
            settle(swarm, args.settle)
            pids = [member.process.pid for member in swarm.members]
            begins, cores = time.time(), seen_cores(pids, WINDOWS * last_window_s(swarm))
            timed, before = time.time(), [processes.cpu_of_peer(pid) for pid in pids]
            time.sleep(args.seconds)
            ends, after = time.time(), [processes.cpu_of_peer(pid) for pid in pids]
            journals = [list(recorded(read(one / "journal.jsonl"))) for one in swarm.folders()]
    (device,) = devices_of(run_config, groups)
    where = places.topology_of(groups, [device.memory_bytes / 1e9], [1.0])
    within = [[one for one in lines if begins <= one.t <= ends + TRAFFIC_S] for lines in journals]
    tokens = [
        [(one.t, one.event.tokens) for one in lines if isinstance(one.event, StepLine) and timed <= one.t <= ends]
        for lines in journals
    ]
    speed = sum(sum(count for _, count in own[1:]) / (own[-1][0] - own[0][0]) for own in tokens)
    windows = [
        sorted({line.event.window_s for line in lines if isinstance(line.event, StatusLine)}) for lines in within
    ]
    sent = sum(map(exchanged_per_s, within)) + sum(PROBE_BYTES / longest_pause_s(lengths[-1]) for lengths in windows)
    spent = [processes.spent(pid, begun, ended) for pid, begun, ended in zip(pids, before, after, strict=True)]
    share = sum(one.training for one in spent) / count / (ends - timed)
    loaded = replace(device, gossiper=replace(device.gossiper, step_s=device.gossiper.step_s / share, cores=cores))
    found = forecast(run_config, where, [loaded] * count)
    drift = round(before_run.tokens_per_s / device.tokens_per_s, 3)
    of_run = {
        "share": round(share, 3),
        "speed_before_over_after": drift,
        "cores": round(cores, 3),
        "tokens_per_s": round(speed, 1),
    }
    return compared(found, speed / min(1.0, share), [sent]) | of_run | {"real_windows": windows}


def settle(swarm: LocalSwarm, least_s: float) -> None:
    """Wait `least_s` seconds, and until the windows of a swarm's peers have settled, but for at most SETTLE_S more."""
    time.sleep(least_s)
    began, seen = time.time(), [last_window_s(swarm)]
    while time.time() < began + SETTLE_S:
        late = seen[-ceil(SETTLED_WINDOWS * seen[-1] / TRAFFIC_S) :]
        if len(late) * TRAFFIC_S >= SETTLED_WINDOWS * seen[-1] and max(late) <= 2 * min(late):
            return
        time.sleep(TRAFFIC_S)
        seen.append(last_window_s(swarm))


def last_window_s(swarm: LocalSwarm) -> float:
    """Return the longest windows of a swarm's peers now, in seconds."""
    journals = [recorded(read(one / "journal.jsonl")) for one in swarm.folders()]
    found = [[line.event.window_s for line in lines if isinstance(line.event, StatusLine)] for lines in journals]
    return max(windows[-1] for windows in found)


def exchanged_per_s(lines: Sequence[Recorded[JournalEvent]]) -> float:
    """Return the bytes/s that a peer received in exchanges, between the first window of a fragment and the last one.

    An interval would begin and end within a window, whose bytes all come at its end.
    """
    by_fragment: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for line in lines:
        if isinstance(line.event, ExchangeLine):
            by_fragment[line.event.fragment].append((line.t, line.event.received_bytes))
    several = [own for own in by_fragment.values() if len(own) > 1]
    return sum(sum(size for _, size in own[1:]) / (own[-1][0] - own[0][0]) for own in several)


def seen_cores(pids: Sequence[int], seconds: float) -> float:
    """Return the cores that training keeps busy as peers estimate them (GossipCost.measured), after some seconds."""
    known, until = [0.0] * len(pids), time.time() + seconds
    while time.time() < until:
        began, before = time.time(), [processes.cpu_of_peer(pid) for pid in pids]
        time.sleep(CORES_S)
        after, took_s = [processes.cpu_of_peer(pid) for pid in pids], time.time() - began
        used = [processes.spent(pid, old, new) for pid, old, new in zip(pids, before, after, strict=True)]
        shares = [one.training / took_s for one in used]
        known = [max(new, old + FEWER_CORES * (new - old)) for old, new in zip(known, shares, strict=True)]
    return sum(known) / len(known)


def simulated(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Estimate a swarm, play it in virtual time, and compare."""
    run_config = config.load(None, [*case.overrides, "gossip.start_steps=0"])
    where, devices = _swarm(case, run_config)
    if args.part == "simulated":  # every peer has the whole model, however little memory its card has
        devices = [replace(one, memory_bytes=max(one.memory_bytes, one.whole_bytes)) for one in devices]
    found = forecast(run_config, where, devices, args.budget_s)
    plan = None
    if args.part == "routed":
        where = replace(where, costs=tuple(one.costs for one in devices))
        plan = throughput_plan(where, run_config, "genetic", args.seed, SearchBudget(5.0))
    began = time.process_time()
    scenario = scenario_of(run_config, where, devices, plan, run_config.gossip.window_s, args.virtual_s, args.seed)
    watch = PlayedSwarm()
    run(scenario, lambda _: watch.sample(), watches=[watch])
    begin = next(one for one in watch.at if one[0] >= args.virtual_s / 3)
    end, lasted_s = watch.at[-1], watch.at[-1][0] - begin[0]
    sent = [0.0] * len(where)
    for (source, _), size in (end[2] - begin[2]).items():
        sent[watch.number[source]] += size / lasted_s
    of_run = {"cpu_s": round(time.process_time() - began, 1), "played_windows": sorted(set(watch.windows.values()))}
    return compared(found, (end[1] - begin[1]) / lasted_s, sent) | of_run


def _swarm(case: Case, run_config: Config) -> tuple[Topology, list[PeerDevice]]:
    """Return the topology, and each peer's device, whose speed is known and whose processor limits no gossip."""
    low, high = KNOWN
    if case.step_s:
        where = topologies.load(case.peers)
        model = devices_of(run_config, places.groups_of("H200"))[0]
        steps = [case.step_s[number % len(case.step_s)] for number in range(len(where))]
        return where, [
            replace(
                model, tokens_per_s=step_tokens(run_config) / step, low=low, high=high, gossiper=Gossiper(step, None)
            )
            for step in steps
        ]
    groups = places.groups_of(case.peers)
    kinds = [
        replace(one, low=low, high=high, gossiper=Gossiper(one.gossiper.step_s, None))
        for one in devices_of(run_config, groups)
    ]
    where = places.topology_of(groups, [one.memory_bytes / 1e9 for one in kinds], [1.0] * len(groups))
    return where, [one for one, group in zip(kinds, groups, strict=True) for _ in range(group.count)]


def compared(found: Forecast, tokens_per_s: float, sent: Sequence[float]) -> dict[str, Any]:
    """Return the estimates over what a run reached, and whether their ranges contain it."""
    everyone = range(len(found.spans))
    bytes_per_s = found.pairs.between(everyone, everyone)
    by_peer = [
        found.pairs.between([peer], everyone).mid / one for peer, one in enumerate(sent) if len(sent) > 1 and one
    ]
    return {
        "tokens_per_s": round(tokens_per_s, 1),
        "estimated": round(found.tokens_per_s.mid, 1),
        "speed_ratio": round(found.tokens_per_s.mid / tokens_per_s, 3),
        "speed_in_range": _within(found.tokens_per_s, tokens_per_s),
        "sent_per_s": round(sum(sent)),
        "estimated_sent": round(bytes_per_s.mid),
        "bytes_ratio": round(bytes_per_s.mid / sum(sent), 3),
        "bytes_in_range": _within(bytes_per_s, sum(sent)),
        "by_peer": [round(one, 2) for one in by_peer[:12]],
        "windows": sorted({(round(length, 2), bound) for length, bound in found.windows}),
    }


def _within(figure: Figure, value: float) -> bool:
    return figure.low <= value <= figure.high


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["real", "simulated", "routed"], default="simulated")
    some = "cases of the part"
    parser.add_argument("--only", "--sizes", type=lambda text: text.split(";"), metavar="NAME;...", help=some)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tokens/s of a real run")
    parser.add_argument("--virtual-s", type=float, default=3600.0, help="of a simulated run, of which two thirds count")
    parser.add_argument("--budget-s", type=float, default=60.0, help="of a simulated swarm's estimate")
    parser.add_argument("--settle", type=float, default=25.0, help="seconds before a real interval")
    parser.add_argument("--seed", type=int, default=1, help="of simulated runs; estimates have 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which each row is appended")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""A large swarm that holds a model in spans, preempted and replaced: tokens/s over the flow bound, and coverage.

    python -m benchmarks.scale [--peers 1000] [--layers 64] [--seconds 3600] [--step 256] [--life 14400] [--json FILE]

A peer has memory for an eighth to a third of the layers; speeds differ fourfold, and memories with them. Lifetimes are
exponential, and a preempted peer is replaced after a minute by a newcomer, which chooses its layers. The bound is
that of scheduler/placement/span_choice.py over the peers that train, every minute. `share` is the rate of tokens that a
layer's weights have counted, as a mean over layers by their parameters, over the bound; `begun` is the same for the
tokens of the origin peers' own micro-batches. After Ctrl-C or SIGTERM the run ends at the next full minute, and prints
what it has measured.
"""

import argparse
import json
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decentral.core import config, jobs, rng
from decentral.core.journal.events import CountedLine
from decentral.core.layer_work import share
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.span_choice import flow, holder_of
from decentral.sim import run as runs
from decentral.sim.faults import Fault
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, StopRun, run
from decentral.sim.swarm import SwarmSettings

THROTTLES = (1.0, 0.5, 1.0, 0.25)
PARTS = (0.125, 0.2, 0.125, 0.3)  # the share of the layers that fits into the memory of the same peers
TOKENS = 64
CONTEXT = 64
SAMPLE_S = 60.0
REPLACED_S = 60.0
WIRES = TypicalLink(0.03, 25e6, 125e6)


@dataclass(slots=True)
class Watching:
    """The tokens that were counted, and the peers that were present, minute by minute."""

    shape: SwarmSettings
    counted: float = 0.0  # tokens through the whole model since the last sample
    begun: int = 0
    jobs_done: int = 0
    hosts: dict[str, VirtualHost] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[tuple[int, int], float] = field(default_factory=dict)

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        self.hosts[host.peer] = host
        for effect in effects:
            match effect:
                case Log(CountedLine(of=executions)):
                    self.counted += sum(one.tokens * self._part(one.first, one.last) for one in executions)

    def _part(self, first: int, last: int) -> float:
        if (first, last) not in self.parts:
            self.parts[first, last] = share(self.shape.fragments, first, last)
        return self.parts[first, last]

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        self.jobs_done += isinstance(outcome, jobs.BackwardDone)
        if isinstance(outcome, jobs.Stepped):
            self.begun += outcome.tokens

    def sample(self, at: Seconds) -> None:
        self.hosts = {peer: host for peer, host in self.hosts.items() if host.ended is None}
        training = [host for host in self.hosts.values() if host.node.routes and host.node.routes.active]
        cuts = self.shape.fragments
        held = [
            holder_of(cuts, host.node.setup.fragments[0].first, host.node.setup.fragments[-1].last,
                      TOKENS / host.engine.pace.step_s)
            for host in training
        ]  # fmt: skip
        holders = [sum(one.begin <= index < one.end for one in held) for index in range(len(cuts))]
        bound = flow(cuts, held)
        shares = (tokens / SAMPLE_S / bound if bound else 0.0 for tokens in (self.counted, self.begun))
        row = dict(zip(("share", "begun"), (round(share, 3) for share in shares), strict=True))
        present = {"at": round(at), "training": len(training), "fewest_holders": min(holders)}
        self.rows.append(present | row | {"bound": round(bound), "legs": self.jobs_done})
        self.counted, self.begun, self.jobs_done = 0.0, 0, 0


def shape_of(peers: int, layers: int, step_s: Seconds, overrides: list[str]) -> SwarmSettings:
    """A swarm for a model of `layers` blocks; the first and the last fragment include the embedding and the head."""
    settings = [
        *(f"model.depth={layers}", "model.width=256", f"model.context={CONTEXT}", "train.micro_batch=1"),
        *("gossip.fragment_parameters=500000", "gossip.window_s=1800", "gossip.start_window_s=1800"),
        *("gossip.partners=1", "swarm.checkpoint_every_s=3600", "routes.overlap=true"),
    ]
    shape = SwarmSettings.of(config.load(None, [*settings, *overrides]), Pace(step_s, 0.05), THROTTLES, TOKENS)
    count = len(shape.fragments)
    needs = memory.needs(shape.config, shape.fragments)
    widths = [max(1, round(count * part)) for part in PARTS]
    memories = [needs.span_bytes(0, width, needs.wanted_in_flight(0, width)) for width in widths]
    return replace(shape, unquantised=True, moves=False, memory=tuple(memories))


def churn(peers: int, seconds: Seconds, life_s: Seconds, seed: int) -> list[Fault]:
    """Crashes and joins that give each place in the swarm one peer after another, numbered in order of joining."""
    chance, faults, number = rng.stream(seed, "lives"), [], peers
    ends = sorted((300.0 + chance.expovariate(1 / life_s), place) for place in range(peers))
    while ends and ends[0][0] < seconds:
        at, member = ends.pop(0)
        faults += [Fault("crash", at, (member,)), Fault("join", at + REPLACED_S, value=1)]
        ends.append((at + REPLACED_S + chance.expovariate(1 / life_s), number))
        ends.sort()
        number += 1
    return faults


def main() -> None:
    torch.set_num_threads(1)
    args = _arguments()
    shape = shape_of(args.peers, args.layers, args.step, args.set)
    watch, began = Watching(shape), time.monotonic()
    lost = churn(args.peers, args.seconds, args.life, args.seed)
    scenario = Scenario(shape, args.peers, args.seconds, args.seed, tuple(lost), WIRES, audited=False)

    def tell(at: Seconds) -> None:
        watch.sample(at)
        print(json.dumps(watch.rows[-1] | {"wall_s": round(time.monotonic() - began)}), flush=True)
        if stopped:
            raise StopRun

    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))

    runs.SAMPLES = round(args.seconds / SAMPLE_S)
    report = run(scenario, tell, watch)
    settled = [row for row in watch.rows if row["at"] > runs.START_SPREAD_S + 2 * SAMPLE_S]
    result = {
        "peers": args.peers,
        "fragments": len(shape.fragments),
        "virtual_hours": round(report.seconds / 3600, 3),
        "wall_s": round(time.monotonic() - began),
        "preempted": sum(fault.kind == "crash" and fault.at <= report.seconds for fault in lost),
        "share": round(sum(row["share"] for row in watch.rows) / max(1, len(watch.rows)), 3),
        "share_settled": round(sum(row["share"] for row in settled) / max(1, len(settled)), 3),
        "begun_settled": round(sum(row["begun"] for row in settled) / max(1, len(settled)), 3),
        "fewest_holders": min((row["fewest_holders"] for row in settled), default=0),
        "events": report.audit.events,
        "routed": report.routes.routed,
    }
    print(json.dumps(result), flush=True)
    if args.json:
        args.json.write_text(json.dumps([result, *watch.rows], indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument(
        "--step", type=float, default=4.0, metavar="S", help="seconds of a micro-batch on the slowest device"
    )
    parser.add_argument(
        "--life", type=float, default=4 * 3600.0, metavar="S", help="mean seconds until a peer is preempted"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

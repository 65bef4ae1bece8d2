"""How busy devices are, and throughput over the flow bound, in swarms that hold a model in spans, in virtual time.

    python -m benchmarks.overlap [--seconds 120] [--slow] [--json FILE]

Each of four layer groups takes 100 ms of computing, every link has a delay, and the nodes are the real ones
(decentral/sim). The bound is that of scheduler/placement/span_choice.py, for which links cost nothing. With `--slow`
one peer becomes 5 times slower in the middle of the run.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decentral.core import config, jobs
from decentral.core.journal.events import CountedLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.span_choice import flow, holder_of
from decentral.sim import faults
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

LAYERS = 4  # groups of layers, of 100 ms each
STEP_S = 0.4
JOB_S = 1e-4
TOKENS = 64
SPANS = ((0, 2), (0, 2), (1, 3), (1, 3), (2, 4), (2, 4))
WARM_UP_S = 40.0
BUCKET_S = 10.0  # a rate is a mean over this time
NEAR = 0.05  # a rate this close to the final one counts as settled


@dataclass(slots=True)
class Watching:
    """Watches a run in place of the audit: which tokens were counted when, and how long devices computed."""

    counted: list[tuple[Seconds, int]] = field(default_factory=list)  # (time, tokens), at the origin peers
    busy: dict[str, list[tuple[Seconds, Seconds]]] = field(default_factory=lambda: defaultdict(list))
    steps: int = 0
    micro_batches: int = 0  # counted in these steps

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        for effect in effects:
            match effect:
                case Log(CountedLine(of=of)) if host.agenda.now > WARM_UP_S:
                    self.steps, self.micro_batches = self.steps + 1, self.micro_batches + len(of)

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        if isinstance(outcome, jobs.Stepped):
            self.counted.append((host.agenda.now, outcome.tokens))
            self.busy[host.peer].append((host.agenda.now, outcome.spent.busy))

    def tokens_per_s(self, begin: Seconds, end: Seconds) -> float:
        return sum(tokens for at, tokens in self.counted if begin < at <= end) / (end - begin)

    def least_busy(self, begin: Seconds, end: Seconds) -> float:
        """The busy share of the least busy device, from its first to its last step within this time."""
        shares = []
        for reports in self.busy.values():
            within = [(at, seconds) for at, seconds in reports if begin < at <= end]
            if len(within) > 1:
                shares.append(sum(seconds for _, seconds in within[1:]) / (within[-1][0] - within[0][0]))
        return min(shares, default=0.0)


def shape_of(
    spans: Sequence[tuple[int, int]], overlap: bool, accumulate: int, throttles: Sequence[float]
) -> SwarmSettings:
    """A swarm whose peers hold these `spans` of fragments, and whose memory is no limit."""
    overrides = [
        *("model.depth=4", "model.width=32", "model.context=32", "train.micro_batch=2"),
        *("gossip.fragment_parameters=10000", "gossip.window_s=10", "gossip.start_window_s=10"),
        *(f"routes.overlap={str(overlap).lower()}", f"train.accumulate={accumulate}"),
    ]
    shape = SwarmSettings.of(config.load(None, overrides), Pace(STEP_S, job_s=JOB_S), tuple(throttles), TOKENS)
    cuts = shape.fragments
    layers = tuple((cuts[begin].first, cuts[end - 1].last) for begin, end in spans)
    return replace(shape, memory=(1 << 40,), spans=layers)


def bound(shape: SwarmSettings, throttles: Sequence[float]) -> float:
    """Tokens/s of the flow through the spans of `shape`, with links that cost nothing."""
    held = [
        holder_of(shape.fragments, *span, TOKENS / (STEP_S * slow))
        for span, slow in zip(shape.spans, throttles, strict=True)
    ]
    return flow(shape.fragments, held)


def measure(delay_s: Seconds, overlap: bool, accumulate: int, seconds: Seconds) -> dict[str, Any]:
    throttles = [1.0] * len(SPANS)
    shape, watch = shape_of(SPANS, overlap, accumulate, throttles), Watching()
    end = WARM_UP_S + seconds
    play(shape, end, delay_s, watch)
    return {
        "delay_ms": round(1e3 * delay_s),
        "overlap": overlap,
        "accumulate": accumulate,
        "per_step": round(watch.micro_batches / max(1, watch.steps), 1),
        "share": round(watch.tokens_per_s(WARM_UP_S, end) / bound(shape, throttles), 3),
        "least_busy": round(watch.least_busy(WARM_UP_S, end), 3),
    }


def play(shape: SwarmSettings, end: Seconds, delay_s: Seconds, watch: Watching, spec: str = "") -> None:
    wires = TypicalLink(delay_s, 1e9, 1e9, spread=0.0)
    run(Scenario(shape, len(SPANS), end, 1, tuple(faults.parse(spec)), wires, audited=False), observer=watch)


def slowed(victim: int, delay_s: Seconds, seconds: Seconds) -> dict[str, Any]:
    """Throughput after one peer became 5 times slower: shares of the new bound, and when they have settled."""
    shape, watch = shape_of(SPANS, True, 1, [1.0] * len(SPANS)), Watching()
    at = WARM_UP_S + BUCKET_S
    play(shape, at + seconds, delay_s, watch, f"slow {victim} x5 at {at} for {seconds + 1}")
    best = bound(shape, [5.0 if number == victim else 1.0 for number in range(len(SPANS))])
    rates = [watch.tokens_per_s(at + t, at + t + BUCKET_S) for t in range(0, int(seconds), int(BUCKET_S))]
    late = rates[len(rates) // 2 :]
    settled = sum(late) / len(late)
    pairs = [(before + after) / 2 for before, after in pairwise(rates)]
    first = next((index for index, rate in enumerate(pairs) if rate >= (1 - NEAR) * settled), len(pairs))
    return {
        "victim": SPANS[victim],
        "shares": [round(rate / best, 2) for rate in rates],
        "settled": round(settled / best, 3),
        "seconds_until_settled": round(first * BUCKET_S),  # the mean of two buckets is near the final rate
    }


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--delay-ms", type=float, default=100.0)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    delay_s, rows = args.delay_ms / 1e3, []
    if args.slow:
        runs = (slowed(victim, delay_s, args.seconds) for victim in (0, 2, 4))
    else:
        settings = [(True, 1), (True, 8), *((False, count) for count in (1, 4, 16, 64, 256))]
        runs = (measure(delay_s, overlap, accumulate, args.seconds) for overlap, accumulate in settings)
    for row in runs:
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Random swarms of six peers that together hold a model only tightly: the tokens/s reached over the best layout's.

    python -m benchmarks.tight_swarms [--seeds 10] [--first 0] [--seconds 900] [--set KEY=VALUE] [--json FILE]

Each peer has memory for 0.3 to 0.6 of the model, so most layers have one or two holders, and few layouts of layers fit.
The best layout is the optimum of a mixed-integer programme (scheduler/throughput/milp.py). `planned` is the flow
through the layers that the peers hold at the end, over the optimum's; `counted` the tokens that the swarm counted in
the last third of the time, over those that it counts in that time if it starts at the optimum and never moves;
`covered_s` the time until all layers have a holder. Swarms that no layout fits are drawn again.
"""

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from decentral.core import config, jobs, rng
from decentral.core.ids import PeerId
from decentral.core.journal.events import CountedLine
from decentral.core.layer_work import share
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.evaluate import PlanTask, TrainingPeer, work_of
from decentral.scheduler.throughput import max_flow, milp
from decentral.scheduler.throughput.link_limits import TokenLinks
from decentral.scheduler.topology.arrays import Ints
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

MODEL = [
    *("model.depth=6", "model.width=256", "model.context=128", "train.micro_batch=1"),
    *("gossip.window_s=60", "gossip.start_window_s=60", "swarm.checkpoint_every_s=60"),
]
PEERS = 6
MEMORY = (0.3, 0.6)  # of the bytes that the whole model takes
THROTTLES = (1.0, 1.0, 2.67, 4.0, 8.0)
STEP_S = 0.5
TOKENS = 128
LINKS = TypicalLink(0.02, 25e6, 125e6)
FIRST_START_S = 0.5  # the simulator starts the peers from then on, all within two seconds


@dataclass(slots=True)
class Counted:
    """The tokens that a swarm counts from `since` on, and the spans that its peers hold."""

    shape: SwarmSettings
    since: Seconds
    tokens: float = 0.0
    covered_at: Seconds | None = None
    held: dict[PeerId, range] = field(default_factory=dict)

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        """Count the tokens of committed micro-batches, and note the peer's span."""
        self.held[host.peer] = host.node.setup.held
        now = host.agenda.now
        if self.covered_at is None and len({i for span in self.held.values() for i in span}) == len(
            self.shape.fragments
        ):
            self.covered_at = now
        for effect in effects:
            match effect:
                case Log(CountedLine(of=executions)) if now >= self.since:
                    self.tokens += sum(
                        one.tokens * share(self.shape.fragments, one.first, one.last) for one in executions
                    )

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        """Ignore the outcomes of jobs."""


@dataclass(frozen=True, slots=True)
class TightSwarm:
    """A swarm, and the layout of layers with the greatest flow."""

    shape: SwarmSettings
    task: PlanTask
    best: Ints
    tokens_per_s: float


def tight_swarm(seed: int, overrides: Sequence[str]) -> TightSwarm:
    """Return the random swarm of a seed that some layout of layers fits."""
    chance = rng.stream(seed, "tight swarms")
    run_config = config.load(None, [*MODEL, *overrides])
    shape = SwarmSettings.of(run_config, Pace(STEP_S, 0.05), THROTTLES, TOKENS)
    cuts = shape.fragments
    needs = memory.needs(run_config, cuts)
    whole = needs.span_bytes(0, len(cuts))
    while True:
        memories = tuple(round(whole * chance.uniform(*MEMORY)) for _ in range(PEERS))
        throttles = tuple(chance.choice(THROTTLES) for _ in range(PEERS))
        shape = replace(shape, throttles=throttles, memory=memories, unquantised=True)
        members = tuple(
            (PeerId(f"sim{number:05d}"), TrainingPeer(range(0), memories[number], TOKENS / STEP_S / throttles[number]))
            for number in range(PEERS)
        )
        task = PlanTask(needs, members, TokenLinks.of(run_config), holders=1)
        work = work_of(task)
        best = milp.best_spans(work)
        if best is not None and work.valid(best):
            return TightSwarm(shape, task, best, max_flow.maximum(work, best).tokens_per_s)


def played(swarm: TightSwarm, seed: int, seconds: Seconds, fixed: bool) -> Counted:
    """Play the swarm for `seconds`, from the best layout and without moves if `fixed`, and return what it counted."""
    shape, cuts = swarm.shape, swarm.shape.fragments
    if fixed:
        layers = tuple((cuts[a].first, cuts[b - 1].last) if a < b else (0, 0) for a, b in swarm.best)
        shape = replace(shape, spans=layers)
    counted = Counted(shape, seconds * 2 / 3)
    run(Scenario(shape, PEERS, seconds, seed, (), LINKS, audited=False), observer=counted)
    return counted


def row(seed: int, seconds: Seconds, overrides: Sequence[str]) -> dict[str, float | int | None]:
    """Return the figures of one seed."""
    swarm = tight_swarm(seed, overrides)
    free = played(swarm, seed, seconds, fixed=False)
    spans = np.array([(held.start, held.stop) for _, held in sorted(free.held.items())])
    reached = max_flow.maximum(work_of(swarm.task), spans).tokens_per_s
    best = played(swarm, seed, seconds, fixed=True)
    return {
        "seed": seed,
        "optimum": round(swarm.tokens_per_s, 1),
        "planned": round(reached / swarm.tokens_per_s, 3),
        "counted": round(free.tokens / best.tokens, 3) if best.tokens else None,
        "counted_per_s": round(3 * free.tokens / seconds, 1),
        "fixed_per_s": round(3 * best.tokens / seconds, 1),
        "covered_s": None if free.covered_at is None else round(free.covered_at - FIRST_START_S, 1),
    }


def seeds_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags of `play_seeds`, to which a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    return parser


def play_seeds(args: argparse.Namespace, row_of: Callable[[int], dict[str, float | int | None]]) -> None:
    """Print the row of figures of each seed as a line of JSON, and write all rows to the file of --json.

    Args:
        args: Parsed by `seeds_parser`.
        row_of: Plays the swarm of a seed, and returns its figures.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    torch.set_num_threads(1)
    rows = []
    for seed in range(args.first, args.first + args.seeds):
        rows.append(row_of(seed))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    """Play the swarms of some seeds, and print a line for each."""
    parser = seeds_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=900.0, help="virtual seconds of each swarm")
    args = parser.parse_args()
    play_seeds(args, lambda seed: row(seed, args.seconds, args.set))


if __name__ == "__main__":
    main()

"""What a swarm over thin links learns with each code of pseudo-gradients: real peers, real gradients, virtual time.

    python -m benchmarks.thin_links [--codes q4,q1,auto] [--up-mbps 5] [--seeds 0,1] [--rates 1.6e-2] [--steps 600]
        [--set KEY=VALUE] [--json FILE]

Four equal peers with the default model (0.47 M parameters), 0.4 s a micro-batch, 75 ms one way, and uplinks of
`--up-mbps` with four times that down. The learning rate falls to a tenth along `--steps` steps. The whole peer runs:
joining, roster, measured links, windows that stretch, exchanges. Loss: of the mean of the replicas, on held-out text.
"""

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.trained_swarm import keeping_models, loss_of_mean, say
from decentral.core import config
from decentral.core.ids import PeerId
from decentral.core.journal.events import ExchangeLine
from decentral.core.machine import Log
from decentral.core.temporary import temporary_folder
from decentral.core.units import Seconds
from decentral.sim.host import Pace
from decentral.sim.network.geography import TypicalLink
from decentral.sim.real_training import real_gradients
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

PEERS = 4
STEP_S = 0.4
ONE_WAY_S = 0.075
JOIN_S = 15.0  # in which the peers come and fetch their states: beyond the steps that are asked for
DOWN = 4.0  # times the uplink
MBIT = 1e6 / 8


class Exchanges:
    """Watches a run: how its exchanges ended, and how long windows were said to be."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds: list[Seconds] = []

    def begin(self, swarm: SimulatedSwarm) -> None: ...

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        if isinstance(log.event, ExchangeLine):
            self.outcomes[log.event.outcome] += 1
            if log.event.outcome == "done":
                self.seconds.append(log.event.seconds)

    def end(self) -> None: ...


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for code in args.codes:
            for rate in args.rates:
                began = time.perf_counter()
                line = {"code": code, "up_mbps": args.up_mbps, "steps": args.steps, "rate": rate, "seed": seed}
                with temporary_folder() as folder:
                    line |= trained(args, code, rate, seed, folder)
                say(line | {"took_s": round(time.perf_counter() - began, 1)}, args.json)


def trained(args: argparse.Namespace, code: str, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """One swarm's life, and what it came to."""
    settings = [f"gossip.code={code}", f"train.learning_rate={rate}", f"train.total_steps={args.steps}", f"seed={seed}"]
    run_config = config.load(None, [*settings, *args.set])
    tokens = int(run_config.train.micro_batch) * run_config.model.context
    swarm, trainings = keeping_models(
        real_gradients(SwarmSettings.of(run_config, Pace(STEP_S, 0.05, report_s=10.0), (1.0,), tokens), folder)
    )
    link = TypicalLink(ONE_WAY_S, args.up_mbps * MBIT, DOWN * args.up_mbps * MBIT)
    seconds, exchanges = args.steps * STEP_S + JOIN_S, Exchanges()
    report = run(Scenario(swarm, PEERS, seconds, seed, link=link, audited=False), watches=[exchanges])
    done = exchanges.outcomes["done"]
    return {
        "loss": round(loss_of_mean(list(trainings.values())), 4),
        "steps_each": round(report.throughput.tokens / tokens / PEERS),
        "sent_mbps": round(report.throughput.sent_bytes / PEERS / seconds / MBIT, 2),
        "exchanges": dict(exchanges.outcomes),
        "exchange_s": round(sum(exchanges.seconds) / max(1, done), 2),
        "spread": round(report.replicas.spread, 4),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what a swarm over thin links learns with each code")
    parser.add_argument("--codes", type=lambda text: text.split(","), default=["q4", "q1", "auto"])
    parser.add_argument("--up-mbps", type=float, default=5.0, help="of each peer")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[1.6e-2])
    parser.add_argument("--steps", type=int, default=600, help="of each peer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    return parser.parse_args()


if __name__ == "__main__":
    main()

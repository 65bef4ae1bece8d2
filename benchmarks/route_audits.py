"""What one hostile hop of five peers does to a swarm of spans, with audits and without: real gradients, virtual time.

    python -m benchmarks.route_audits [--lies none,hop-flipped] [--seeds 0,1] [--seconds 600] [--without] [--json FILE]

Two peers hold all layers but the last, and so are the origin peers; three hold the last one. Peer 4, one of those, lies
from the start about every gradient that it gives back (decentral/sim/liars.py has the lies), is honest, or is not
there (`none`). Loss: of the mean of the honest peers' weights, on held-out text. Beside it: in how many audits the
answers agreed, who was found to be wrong, how like honest answers were (`agreement`), and the share of micro-batches
that went to the liar in each tenth of the run.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.trained_swarm import keeping_models, say
from decentral.comm.codecs import blockwise
from decentral.comm.pipeline.audits import RouteAudits
from decentral.core import config, jobs
from decentral.core.ids import PeerId
from decentral.core.journal.events import AuditLine, CountedLine, UncountedLine
from decentral.core.machine import Log
from decentral.core.temporary import temporary_folder
from decentral.data import corpora
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Device, held_out_loss
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.sim import faults
from decentral.sim.faults import HOP_LIES
from decentral.sim.host import Pace, VirtualHost
from decentral.sim.network.geography import TypicalLink
from decentral.sim.real_training import Trained, real_gradients
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings

LIAR = 4
SPANS = ((0, 4), (4, 5), (0, 4), (4, 5), (4, 5))
SETTINGS = (
    *("model.width=64", "model.depth=3", "model.context=64", "train.micro_batch=8"),
    *("train.learning_rate=8e-3", "train.warmup_steps=20", "gossip.core_share=1", "gossip.window_s=5"),
    *("gossip.start_window_s=1", "gossip.fragment_parameters=10000"),
)
TENTHS = 10


@dataclass(slots=True)
class RouteObserver:
    """Collects the journals' lines on audits and counts."""

    seconds: float
    audits: list[tuple[PeerId, AuditLine]] = field(default_factory=list)
    counted: Counter[tuple[PeerId, int]] = field(default_factory=Counter)  # by peer, in each tenth of the run
    uncounted: int = 0

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        """Takes what a peer writes into its journal."""
        for effect in effects:
            match effect:
                case Log(AuditLine() as line):
                    self.audits.append((host.peer, line))
                case Log(CountedLine(of=of)):
                    self.counted[host.peer, int(TENTHS * host.agenda.now / self.seconds)] += len(of)
                case Log(UncountedLine(of=of)):
                    self.uncounted += len(of)

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        """Jobs are not looked at."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for lie in args.lies:
            began = time.perf_counter()
            with unaudited(args.without), temporary_folder() as folder:
                line = played(lie, seed, args.seconds, args.set, folder)
            line |= {"audits_on": not args.without, "took_s": round(time.perf_counter() - began, 1)}
            say(line, args.json)


def played(lie: str, seed: int, seconds: float, more: list[str], folder: Path) -> dict[str, Any]:
    """One swarm's life."""
    run_config = config.load(None, [*SETTINGS, f"train.total_steps={int(seconds)}", f"seed={seed}", *more])
    made = real_gradients(SwarmSettings.of(run_config, Pace(1.0, 0.05, report_s=10.0), (1.0,), 512), folder)
    settings, trained = keeping_models(replace(made, memory=(1 << 28,), spans=SPANS))
    lying = faults.parse(f"lie {LIAR} {lie} at 0 for {seconds + 1:g}") if lie in HOP_LIES else []
    observer, liar = RouteObserver(seconds), PeerId(f"sim{LIAR:05d}")
    peers = len(SPANS) - (lie == "none")
    scenario = Scenario(settings, peers, seconds, seed, tuple(lying), TypicalLink(0.01), audited=False)
    report = run(scenario, observer=observer)
    honest = [training for peer, training in trained.items() if lie not in HOP_LIES or peer != liar]
    tails = [peer for number, peer in enumerate(sorted(trained)) if SPANS[number][0] > 0]
    to_liar = [
        round(observer.counted[liar, tenth] / max(1, sum(observer.counted[peer, tenth] for peer in tails)), 3)
        for tenth in range(TENTHS)
    ]
    verdicts = Counter(line.verdict for _, line in observer.audits)
    wrong = Counter("liar" if line.wrong == liar else "honest" for _, line in observer.audits if line.wrong)
    return {
        "lie": lie,
        "seed": seed,
        "loss": round(loss_of_mean(honest, run_config), 4),
        "counted": report.routes.routed,
        "uncounted": observer.uncounted,
        "audits": dict(verdicts),
        "wrong": dict(wrong),
        "to_liar": to_liar,
        "agreement": agreement(observer, liar if lie in HOP_LIES else PeerId("")),
    }


def agreement(observer: RouteObserver, liar: PeerId) -> dict[str, float]:
    """How unlike honest peers' answers were at worst, and in one of twenty audits."""
    pairs = [line for _, line in observer.audits if liar not in line.peers]
    if not pairs:
        return {}
    cosines = sorted(one for line in pairs for one in line.cosine)
    ratios = sorted(max(one, 1 / one) if one else 1e9 for line in pairs for one in line.ratio)
    losses = sorted(max(line.loss) / min(line.loss) for line in pairs)
    at = len(pairs) // 20
    return {
        "audits": len(pairs),
        "cosine": cosines[0],
        "cosine_p5": cosines[at],
        "ratio": round(ratios[-1], 4),
        "ratio_p95": round(ratios[-1 - at], 4),
        "loss_ratio": round(losses[-1], 4),
    }


def loss_of_mean(parts: list[Trained], run_config: config.Config) -> float:
    """The held-out loss of the model whose fragments are the means of these peers' fragments."""
    corpus, device = corpora.load(run_config.data, run_config.model), Device(torch.device("cpu"), torch.float32)
    whole = Compute(ComputeSetup(run_config, PeerId("whole"), corpus, blockwise, device, Path("unused")))
    for live in whole.span.inner.lives:
        held = [one.theta for part in parts for one in part.span.inner.lives if one.fragment == live.fragment]
        live.theta.copy_(torch.stack(held).mean(dim=0))
    return held_out_loss(whole.span.forward, whole.held_out, device, at_once=64)


@contextmanager
def unaudited(without: bool) -> Iterator[None]:
    """Nobody audits."""
    before = RouteAudits.gave_back
    try:
        if without:
            RouteAudits.gave_back = lambda *_: []  # type: ignore[method-assign]
        yield
    finally:
        RouteAudits.gave_back = before  # type: ignore[method-assign]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what one hostile hop of five peers does to a swarm of spans")
    known = ["none", "honest", *HOP_LIES]
    parser.add_argument("--lies", type=lambda text: text.split(","), default=known, help=", ".join(known))
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--without", action="store_true", help="nobody audits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    return parser.parse_args()


if __name__ == "__main__":
    main()

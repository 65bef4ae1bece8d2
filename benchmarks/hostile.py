"""What one hostile peer of five does to the others: the real peers and their real gradients, in virtual time.

    python -m benchmarks.hostile [--lies none,flipped] [--seeds 0,1,2] [--seconds 300] [--credulous] [--json FILE]
    python -m benchmarks.hostile --real [--lies none,flipped] [--credulous] [--steps 300] [--json FILE]
    python -m benchmarks.hostile --real --eclipse none:peers:revoked:peers,revoked [--steps 300] [--json FILE]

One swarm has four honest peers alone (`none`); in each of the others a fifth one joins last and lies from the start
(decentral/sim/liars.py has the lies). Loss: of the mean of the honest replicas, on held-out text. A peer takes one step
in a second; windows last WINDOW_S. The whole peer runs: roster, exchanges, update rule, optimizer (Muon).

With --real the peers are processes over libp2p on loopback, and the liar floods the others with questions besides
(benchmarks/hostile_processes.py). With --credulous the honest ones have no defences (tests/hostile/credulous.py). With
--eclipse one peer of ten owns the nodes next to some keys of the DHT (benchmarks/hostile_eclipse.py).
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch

from benchmarks import hostile_eclipse, hostile_processes
from benchmarks.trained_swarm import keeping_models, loss_of_mean, say
from decentral.core import config
from decentral.core.temporary import temporary_folder
from decentral.sim import faults
from decentral.sim.host import Pace
from decentral.sim.real_training import real_gradients
from decentral.sim.run import Scenario, run
from decentral.sim.swarm import SwarmSettings
from tests.hostile.credulous import without_defences
from tests.hostile.liar import LIES

HONEST = 4
WINDOW_S = 5
STEP_S = 1.0
LIAR = "sim00004"
SETTINGS = (
    "model.width=64 model.depth=2 model.context=64 train.micro_batch=8 "
    "train.learning_rate=1.6e-2 train.warmup_steps=20 gossip.core_share=1 "
    f"gossip.window_s={WINDOW_S} gossip.start_window_s={STEP_S:g}"
).split()


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    if args.credulous:
        without_defences(setattr)
    settings = [*SETTINGS, *args.set]
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for seed in args.seeds:
        for lie in args.lies:
            began = time.perf_counter()
            if args.eclipse:
                result = hostile_eclipse.run(lie, [*settings, f"seed={seed}"], args.steps, args.memory)
                line = {"seed": seed, **result}
                losses[lie][seed] = result["loss"]
            elif args.real:
                result = hostile_processes.run(lie, [*settings, f"seed={seed}"], args.steps, args.credulous)
                line = {"lie": lie, "seed": seed, **result}
                losses[lie][seed] = result["loss"]
            else:
                with temporary_folder() as folder:
                    losses[lie][seed] = held_out(lie, seed, args.seconds, args.set, folder)
                line = {"lie": lie, "seed": seed, "seconds": args.seconds, "loss": round(losses[lie][seed], 4)}
            line["credulous"], line["took_s"] = args.credulous, round(time.perf_counter() - began, 1)
            say(line, args.json)
    print("\n".join(table(losses)))


def held_out(lie: str, seed: int, seconds: float, more: Sequence[str], folder: Path) -> float:
    """The held-out loss of the honest peers' mean after one swarm's life."""
    run_config = config.load(None, [*SETTINGS, f"train.total_steps={int(seconds / STEP_S)}", f"seed={seed}", *more])
    pace = Pace(STEP_S, 0.05, report_s=10.0)
    settings, trained = keeping_models(real_gradients(SwarmSettings.of(run_config, pace, (1.0,), 512), folder))
    lying = [] if lie in ("none", "honest") else faults.parse(f"lie {HONEST} {lie} at 0 for {seconds + 1:g}")
    peers = HONEST + (lie != "none")
    report = run(Scenario(settings, peers, seconds, seed, tuple(lying), audited=False))
    if ended := [one["peer"] for one in report.by_peer if one["peer"] != LIAR and not one["alive"]]:
        raise SystemExit(f"honest peers {ended} have ended")
    return loss_of_mean([one for peer, one in trained.items() if peer != LIAR])


def table(losses: dict[str, dict[int, float]]) -> Iterator[str]:
    yield "lie        seeds  loss    relative to no liar: mean, worst"
    for lie, by_seed in losses.items():
        base = losses.get("none", {})
        ratios = [loss / base[seed] - 1 for seed, loss in by_seed.items() if seed in base]
        apart = f"{mean(ratios):+.3%} {max(ratios):+.3%}" if ratios else ""
        yield f"{lie:10s} {len(by_seed):5d}  {mean(by_seed.values()):.4f}  {apart}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what one hostile peer of five does to the others")
    real = ["none", "honest", *LIES]
    known = [*real, "stale"]
    parser.add_argument("--lies", type=lambda text: text.split(","), help=", ".join(known))
    parser.add_argument("--real", action="store_true", help="processes over libp2p, for steps and not for seconds")
    parser.add_argument(
        "--eclipse", type=lambda text: text.split(":"), help="keys, with --real: none:peers,revoked:plan"
    )
    parser.add_argument("--memory", default="", help="of each peer, with --eclipse: 51MB makes it hold a part")
    parser.add_argument("--credulous", action="store_true", help="honest peers without defences")
    parser.add_argument("--steps", type=int, default=300, help="of each honest peer, with --real")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    args = parser.parse_args()
    if args.eclipse:
        args.lies = args.eclipse
    args.lies = args.lies or (real if args.real else known)
    return args


if __name__ == "__main__":
    main()

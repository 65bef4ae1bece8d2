"""Recovered gain: how much of the gain from four peers' data, or more, asynchronous gossip keeps.

    python -m benchmarks.convergence [--methods gossip,average] [--seeds 0,1,2] [--horizons 500] [--window 5]
        [--latency 0.2] [--slow 10] [--rates 4e-3] [--optimizer adamw] [--peers 4] [--quick | --large]
        [--json FILE] [--from FILE]

Time is virtual, in one process, and deterministic from the seed: a fast peer takes one step per unit, a slow one needs
`--slow` units. Gradients are real (a byte-level GPT on the standard library's text), and so are the project's
numerics: comm/gossip/outer.py merges, comm/codecs/blockwise.py quantises. Every method is trained at each of `--rates`,
and its best rate counts.

    recovered gain = (fastest peer alone - swarm) / (fastest peer alone - synchronous with free communication)

on the same held-out text at the same virtual time. `loss` is that of the average of all replicas, `fast` that of
one fast replica. `--from` adds the results of an earlier run's `--json` to the table.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

import torch

from benchmarks import outer_step
from benchmarks.convergence_model import Optimizer, held_out_loss
from benchmarks.convergence_swarm import NEVER, PEERS, SEQUENCES, Method, Setting, Swarm
from decentral.core import config
from decentral.data import corpora

HELD_OUT_SEQUENCES = 384

FULL, QUICK, LARGE = (2, 96, 96), (2, 64, 64), (6, 384, 64)  # blocks, width, positions

NOLOCO = outer_step.Constants(alpha=0.3, beta=0.7, gamma=0.7)
METHODS: dict[str, Method] = {
    "alone": Method(peers=1, talks=False),
    "sync": Method(peers=1, sequences=SEQUENCES * PEERS, talks=False),
    "average": Method(exact=True, latency=0.0, phi_every=1),
    "average-dense": Method(exact=True, latency=0.0, phi_every=1, dense=100),
    "average-moment": Method(exact=True, latency=0.0, phi_every=1, kappa=1.0),
    "average-dense-moment": Method(exact=True, latency=0.0, phi_every=1, dense=100, kappa=1.0),
    "gossip": Method(),
    "gossip-dense": Method(dense=100),
    "gossip-q1": Method(dense=100, code="q1"),
    "gossip-q1-later": Method(dense=100, code="q1", code_from=100),
    "gossip-sparse-q1": Method(code="q1"),
    "gossip-beside": Method(dense=100, beside=True),
    "gossip-moment": Method(kappa=1.0),
    "gossip-dense-moment": Method(dense=100, kappa=1.0),
    "gossip-half": Method(kappa=0.5),
    "gossip-exact": Method(exact=True),
    "gossip-rho1": Method(rho=1.0),
    "gossip-rho1-moment": Method(rho=1.0, kappa=1.0),
    "one": Method(dense=100, partners=1),
    "two": Method(dense=100, partners=2),
    "two-q1": Method(dense=100, partners=2, code="q1"),
    "two-rare": Method(dense=100, partners=2, phi_every=9),
    "two-missed": Method(dense=100, partners=2, missed=1 / 3),
    "two-missed-rare": Method(dense=100, partners=2, missed=1 / 3, phi_every=9),
    "two-late-in-part": Method(dense=100, partners=2, late_as="adamw"),
    "rare": Method(dense=100, phi_every=9),
    "rare-q1": Method(dense=100, phi_every=9, code="q1"),
    "unaligned": Method(aligned=False),
    "noloco": Method(partners=1, phi_every=1, aligned=False, rho=1.0, constants=NOLOCO),
    "three": Method(dense=100, peers=PEERS - 1),
    "slow": Method(dense=100, slow=True),
    "thin": Method(code="q1", phi_every=NEVER),
    "thin-q4": Method(phi_every=NEVER),
    "sparse": Method(code="sparse", phi_every=NEVER),
    "rarer-64": Method(code="sparse", phi_every=NEVER, rarer=64, kept=0.5),
    "sparse-whole": Method(code="sparse", phi_every=24),
    "sliced": Method(code="sparse", phi_every=1, slices=24),
    "sliced-twice": Method(code="sparse", phi_every=1, slices=24, constants=outer_step.Constants(gamma=2.0)),
    "sliced-far": Method(code="sparse", phi_every=1, slices=24, constants=outer_step.Constants(beta=2.0, gamma=2.0)),
    "sliced-twice-exp": Method(
        code="sparse", phi_every=1, slices=25, exponential=True, constants=outer_step.Constants(gamma=2.0)
    ),
    "exact-all": Method(exact=True, partners=NEVER, phi_every=NEVER),
    "exact-all-muon": Method(exact=True, partners=NEVER, phi_every=NEVER, orthogonal=True),
    "exact-three": Method(exact=True, phi_every=1),
    "all-64": Method(code="sparse", partners=NEVER, phi_every=NEVER, rarer=64, kept=0.5),
    "parts-sparse": Method(code="sparse", phi_every=NEVER, parts=True),
    "parts-uneven": Method(code="sparse", phi_every=NEVER, parts=True, rarer=32, mean_rarer=8),
    "parts-thin": Method(code="sparse", phi_every=NEVER, parts=True, rarer=32, mean_rarer=20),
    "parts": Method(code="q1", phi_every=NEVER, parts=True),
}
DEFAULT = "alone,sync,average-dense,gossip-dense,three,slow"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of `--json`."""

    method: str
    width: int
    horizon: int
    window: int
    latency: float
    slow: int
    seed: int
    rate: float
    loss: float
    fast: float
    spread: float
    window_bytes: float  # received by a peer, per parameter
    step_bytes: float
    seconds: float
    optimizer: Optimizer = "adamw"
    peers: int = PEERS

    def setting(self) -> tuple[object, ...]:
        """What must agree, beside the method, for two results to be seeds of one entry of the table."""
        return self.width, self.horizon, self.window, self.latency, self.slow, self.optimizer, self.peers

    def trained(self) -> tuple[object, ...]:
        """What `alone` and `sync` must have in common with a method to be the ends of its gain."""
        return self.width, self.horizon, self.optimizer, self.peers


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    results = [] if args.earlier is None else list(_read(args.earlier))
    for result in _run_all(args):
        results.append(result)
        line = json.dumps({one.name: getattr(result, one.name) for one in fields(Result)})
        print(line, file=sys.stderr, flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(line + "\n")
    print("\n".join(table(results)))


def method(name: str, peers: int) -> Method:
    """The named method in a swarm of so many peers."""
    found = METHODS[name]
    if name == "sync":
        return replace(found, sequences=SEQUENCES * peers)
    return replace(found, peers=peers + found.peers - PEERS) if found.talks else found


def run(name: str, setting: Setting, corpus: corpora.Corpus, peers: int = PEERS) -> Result:
    """Trains one swarm from its initial weights to the horizon."""
    began = time.perf_counter()
    swarm = Swarm(method(name, peers), setting, corpus)
    for now in range(setting.horizon):
        swarm.step(now)
    inputs, targets = corpus.evaluation(HELD_OUT_SEQUENCES)
    shape, rows_PN = swarm.replicas.shape, swarm.replicas.theta_PN
    average_N = rows_PN.mean(dim=0)
    apart = (rows_PN - average_N).square().mean().sqrt() / average_N.square().mean().sqrt()
    return Result(
        method=name,
        width=setting.model.d_model,
        horizon=setting.horizon,
        window=setting.window,
        latency=setting.latency,
        slow=setting.slow,
        seed=setting.seed,
        rate=setting.rate,
        loss=round(held_out_loss(shape, average_N, inputs, targets), 4),
        fast=round(held_out_loss(shape, rows_PN[0], inputs, targets), 4),
        spread=round(float(apart), 5),
        window_bytes=round(swarm.received / max(1, sum(swarm.closed)), 3),
        step_bytes=round(swarm.received / len(rows_PN) / setting.horizon, 3),
        seconds=round(time.perf_counter() - began, 1),
        optimizer=setting.optimizer,
        peers=peers,
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """Each method at its best rate, by horizon; the gain needs `alone` and `sync` of the same kind."""
    entries: dict[tuple[object, ...], dict[float, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        entries[(result.method, *result.setting())][result.rate].append(result)
    best = [_best(list(rates.values())) for rates in entries.values()]
    yield (
        "method          optim  peers window latency horizon seeds  rate   loss            fast   gain   spread "
        "B/window B/step"
    )
    for seeds in best:
        one = seeds[0]
        losses = [seed.loss for seed in seeds]
        gain = _gain(seeds, best)
        yield (
            f"{one.method:15s} {one.optimizer:6s} {one.peers:5d} {one.window:6d} {one.latency:7.2f} {one.horizon:7d} "
            f"{len(seeds):5d}  {one.rate:5g}  "
            f"{mean(losses):.3f} +- {stdev(losses) if len(losses) > 1 else 0.0:.3f} {mean(s.fast for s in seeds):.3f}  "
            f"{'' if gain is None else format(gain, '5.2f'):5s}  {mean(s.spread for s in seeds):.4f}  "
            f"{mean(s.window_bytes for s in seeds):8.2f} {mean(s.step_bytes for s in seeds):6.3f}"
        )


def _gain(seeds: Sequence[Result], best: Sequence[Sequence[Result]]) -> float | None:
    """The mean gain over the seeds that the method, `alone` and `sync` have in common."""
    ends = {}
    for name in ("alone", "sync"):
        for other in best:
            if other[0].method == name and other[0].trained() == seeds[0].trained():
                ends[name] = {one.seed: one.loss for one in other}
    gains = [
        (ends["alone"][one.seed] - one.loss) / (ends["alone"][one.seed] - ends["sync"][one.seed])
        for one in seeds
        if len(ends) == 2 and one.seed in ends["alone"] and one.seed in ends["sync"]
    ]
    return mean(gains) if gains else None


def _best(rates: Sequence[Sequence[Result]]) -> Sequence[Result]:
    """The results of the rate with the lowest loss, among the rates that were tried with the most seeds."""
    most = max(len(seeds) for seeds in rates)
    return min((seeds for seeds in rates if len(seeds) == most), key=_loss)


def _loss(seeds: Sequence[Result]) -> float:
    return mean(seed.loss for seed in seeds)


def _run_all(args: argparse.Namespace) -> Iterator[Result]:
    depth, width, context = args.size
    model = config.ModelConfig(depth=depth, width=width, context=context)
    corpus = corpora.corpus(config.DataConfig(), model)
    for horizon in args.horizons:
        for seed in args.seeds:
            for name in args.methods:
                for rate in args.rates:
                    times = args.window, args.latency, args.slow, horizon
                    yield run(name, Setting(*times, seed, rate, model, args.optimizer), corpus, args.peers)


def _read(path: Path) -> Iterator[Result]:
    for line in path.read_text().splitlines():
        yield Result(**json.loads(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="recovered gain of asynchronous gossip, in virtual time")
    parser.add_argument("--methods", type=_names, default=_names(DEFAULT), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=_numbers, default=[0])
    parser.add_argument("--horizons", type=_numbers, default=[500])
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[4e-3])
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default="adamw")
    parser.add_argument("--peers", type=int, default=PEERS, help="of a swarm")
    parser.add_argument("--window", type=int, default=5, help="steps of a fast peer")
    parser.add_argument("--latency", type=float, default=0.2, help="from a close to its merge, in windows")
    parser.add_argument("--slow", type=int, default=10, help="units that a slow peer needs for a step")
    parser.set_defaults(size=FULL)
    for name, size, parameters in (("--quick", QUICK, "0.14"), ("--large", LARGE, "10.8")):
        parser.add_argument(
            name, action="store_const", const=size, dest="size", help=f"a model of {parameters} M parameters"
        )
    parser.add_argument("--json", type=Path, help="file to which each result is appended")
    parser.add_argument("--from", dest="earlier", type=Path, help="file of earlier results for the table")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    unknown = set(text.split(",")) - METHODS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are none of {', '.join(METHODS)}")
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()

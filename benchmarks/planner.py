"""The planner's figures: `python -m benchmarks.planner [--part NAME] [--seeds N] [--quick]`.

    published   the five published cases: genetic for 2 s from each seed, against the proven optimum
    irregular   random cities and noisy rates: genetic after 10 s and 30 s against gcma after as many candidates as the
                published, interpreted code tries in 360 s (720), in its main program (5,000), and after 50,000
    large       1,024 and 4,096 devices against the best hand layout, and the memory it took
    throughput  64 unequal devices, against equal spans placed at random and against the bound
    gossip      mixing per second of the planned partners against uniform and bandwidth-proportional

Seconds are CPU seconds of this process, so that other load does not change what a search may do. All ratios are
within one run. Prints one JSON line per measurement.
"""

import argparse
import json
import resource
import time
from dataclasses import replace

import numpy as np

from decentral.core import config
from decentral.scheduler import evolve, flow, gcma, gossip, spans, throughput, topology, work
from decentral.scheduler.arrays import Ints
from decentral.scheduler.cost import layout, problem
from decentral.scheduler.plan import hand_costs, regions_of
from decentral.scheduler.progress import Budget
from decentral.scheduler.topology import Topology, Workload

OPTIMA = {"data-centre": 3.43980, "universities": 16.08684, "four-regions": 34.80204, "eight-cities": 49.21838,
          "spot": 31.63416}  # fmt: skip
CANDIDATES = (720, 5_000, 50_000)
CITIES = ("Frankfurt", "Ireland", "London", "Ohio", "Oregon", "Seoul", "Singapore", "Sydney", "Tokyo", "Virginia")
KINDS = (("A100", 80.0, 80.0), ("A40", 40.0, 40.0), ("L4", 24.0, 20.0), ("T4", 12.0, 10.0))  # GB, TFLOP/s: 8:4:2:1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = {"published": published, "irregular": irregular, "large": large, "throughput": unequal, "gossip": partners}
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the seconds and candidates")
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    _genetic(topology.load("spot"), 0, 0.01)  # compile, or load what is compiled
    for name in options.part or parts:
        for seed in range(options.seeds):
            parts[name](seed, scale)


def published(seed: int, scale: float) -> None:
    for case, optimum in OPTIMA.items():
        cost, when = _genetic(topology.load(case), seed, 2 * scale)
        _line("published", case=case, seed=seed, cost=cost, over_optimum=cost / optimum, found_after_s=when)


def irregular(seed: int, scale: float) -> None:
    for case, swarm in (("cities", scattered(64, seed)), ("noisy", noisy(seed))):
        short, _ = _genetic(swarm, seed, 10 * scale)
        long, _ = _genetic(swarm, seed, 30 * scale)
        for candidates in CANDIDATES:
            task = problem(swarm, swarm.workload or Workload())
            budget = Budget(
                rounds=max(1, scale * (candidates - gcma.POPULATION) / gcma.TRIALS), clock=time.process_time
            )
            begin = time.process_time()
            slots = gcma.search(task, regions_of(swarm), budget, np.random.default_rng(seed))
            rate = candidates * scale / (time.process_time() - begin)
            baseline = layout(task, slots).cost.total
            _line("irregular", case=case, seed=seed, candidates=int(candidates * scale), gcma=baseline, gcma_rate=rate,
                  ratio_10_s=short / baseline, ratio_30_s=long / baseline)  # fmt: skip


def large(seed: int, scale: float) -> None:
    for count, seconds in ((1024, 30), (4096, 60)):
        side = int(count**0.5)
        swarm = replace(scattered(count, seed), workload=Workload(side, side))
        hand = min(hand_costs(problem(swarm, Workload(side, side)), regions_of(swarm), seed).values())
        cost, _ = _genetic(swarm, seed, seconds * scale)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        _line("large", peers=count, seed=seed, cost=cost, best_hand=hand, ratio=cost / hand, peak_gib=peak)


def unequal(seed: int, scale: float) -> None:
    swarm = mixed(seed)
    task = work.of(swarm, config.load(None, LLAMA_7B))
    baseline = throughput.random_throughput(task, seed)
    budget = Budget(20 * scale, clock=time.process_time)
    begin = time.process_time()
    found = flow.maximum(task, spans.search(task, regions_of(swarm), budget, np.random.default_rng(seed)))
    rate, bound = found.tokens_per_s, task.compute_bound()
    _line("throughput", seed=seed, tokens_per_s=rate, of_bound=rate / bound, of_random=rate / baseline,
          seconds=time.process_time() - begin)  # fmt: skip


def partners(seed: int, _scale: float) -> None:
    swarm = scattered(32, seed)
    found = gossip.partners(swarm, np.ones((32, 1), dtype=bool), np.array([1e8]))
    _line("gossip", seed=seed, of_uniform=found.mixing_per_s / found.uniform_per_s,
          of_bandwidth=found.mixing_per_s / found.bandwidth_per_s)  # fmt: skip


LLAMA_7B = ["model.depth=32", "model.width=4096", "model.heads=32", "model.hidden=11008", "model.vocabulary=32000",
            "model.context=2048"]  # fmt: skip


def scattered(count: int, seed: int) -> Topology:
    """Devices placed at random over the ten cities."""
    cities = np.bincount(np.random.default_rng(seed).integers(0, 10, count), minlength=10)
    groups = {city: {"count": int(size)} for city, size in zip(CITIES, cities, strict=True)}
    return topology.parse(
        {"regions": groups, "based_on": "ten-cities", "workload": {"stages": 8, "replicas": count // 8}}
    )


def noisy(seed: int) -> Topology:
    """The eight cities with every link's rate times a lognormal of sigma 0.2, the same both ways."""
    swarm = topology.load("eight-cities")
    noise = np.triu(np.random.default_rng(seed).normal(0, 0.2, (64, 64)), 1)
    return replace(swarm, bandwidth=swarm.bandwidth * np.exp(noise + noise.T))


def mixed(seed: int) -> Topology:
    """16 devices of each of four kinds, at random over eight cities."""
    place = np.random.default_rng(seed).permutation(64) // 8
    cities = list(dict.fromkeys(topology.load("eight-cities").regions))
    kinds = [KINDS[number % 4] for number in range(64)]
    peers = [
        {
            "id": f"{kind}-{number:02}",
            "region": cities[place[number]],
            "device": kind,
            "memory_gb": gb,
            "tflops": tflops,
        }
        for number, (kind, gb, tflops) in enumerate(kinds)
    ]
    return topology.parse({"peers": peers, "based_on": "ten-cities"})


def _genetic(swarm: Topology, seed: int, seconds: float) -> tuple[float, float]:
    """(cost, CPU seconds after which it was found)."""
    task = problem(swarm, swarm.workload or Workload())
    begin = time.process_time()
    found: list[tuple[float, float]] = []

    def note(_fraction: float, best: float) -> None:
        if not found or best < found[-1][0] - 1e-9:
            found.append((best, time.process_time() - begin))

    region: Ints = regions_of(swarm)
    slots = evolve.search(
        task, region, Budget(seconds, clock=time.process_time, report=note), np.random.default_rng(seed)
    )
    return layout(task, slots).cost.total, found[-1][1]


def _line(part: str, **figures: object) -> None:
    rounded = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"part": part, **rounded}), flush=True)


if __name__ == "__main__":
    main()

"""The planner's figures: `python -m benchmarks.planner [--part NAME]... [--seeds N] [--first N] [--quick]`.

    compile     the first compilation ever, into an empty cache, for each solver in a process of its own
    check       gcma against the published code's own loop, interpreted: the same walk, and candidates per second
    published   the five published cases: genetic for 2 s from each seed, against the proven optimum
    cities      64 devices at random over ten cities: genetic after 10 s and 30 s against gcma after as many candidates
                as the interpreted code tries in 360 s (its rate is measured here, on this swarm), and what the
                published code's own pipelines cost; for the first draw also after 50,000 candidates
    noisy       the same for eight cities with every link's rate times a lognormal of sigma 0.2
    bound       whether any layout of 64 devices over ten cities costs less than 0.88 of gcma's (or less than what
                genetic finds in 10 s, where that is less); the proof may take up to 600 s
    large       1,024 devices for 30 s and 4,096 for 60 s against the best hand layout, and the memory in use
    sync-enumerated  genetic for 2 s against the enumerated optimum of 4 to 8 peers, some of which may be left out
    small       throughput of up to 6 peers and 8 layers: the default solver against `exact`
    enumerated  throughput of up to 4 peers and 5 layers whose uplinks and links limit it: the default solver and
                `exact` against all spans (planner_layouts.py)
    unequal     throughput of 64 unequal devices in 20 s, against equal spans placed at random and against the bound
    gossip      mixing per second of the planned partners against the two simple rules, within 2 s
    solvers     throughput of every solver after 10 s as a share of the bound, on the shipped topologies: 125 M and 7 B
    command     seconds that `python -m decentral.plan --seconds 2` searches, throughput of 64 peers
    seeds       throughput of the shipped topologies in 10 s, 125 M and 7 B, and of three labs and thirty homes, 1.3 B
                and 7 B: one line for each seed
    size        1,000 volunteers (planner_volunteers.py) and 80 blocks in 30 s: 1, 4 and 16 billion parameters

Seconds are CPU seconds of this process, so that other load does not change what a search may do. All ratios are
within one run. Prints one JSON line per measurement.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files

import numpy as np

from benchmarks import layout_bound, planner_enumerated, planner_layouts, planner_volunteers
from benchmarks import planner_published as published_code
from decentral.core import config
from decentral.core.errors import UserError
from decentral.scheduler.partners import mixing
from decentral.scheduler.sync import evolve, gcma
from decentral.scheduler.sync.layout_cost import best_layout, problem_of
from decentral.scheduler.sync.sync_plan import sync_plan
from decentral.scheduler.throughput import layer_costs, max_flow, milp, planning, solvers, span_search
from decentral.scheduler.throughput.span_search import FlowProblem
from decentral.scheduler.topology import topology
from decentral.scheduler.topology.search_budget import SearchBudget
from decentral.scheduler.topology.topology import Topology, Workload, regions_of

OPTIMA = {"data-centre": 3.43980, "universities": 16.08684, "four-regions": 34.80204, "eight-cities": 49.21838,
          "spot": 31.63416}  # fmt: skip
PUBLISHED_S = 360.0
SAMPLE = 25  # candidates to measure the interpreted code's rate with: one round of gcma's trials
STANDS_STILL = 50_000  # candidates
AIM, PROOF_S = 0.88, 600.0
CITIES = ("Frankfurt", "Ireland", "London", "Ohio", "Oregon", "Seoul", "Singapore", "Sydney", "Tokyo", "Virginia")
KINDS = (("A100", 80.0, 80.0), ("A40", 40.0, 40.0), ("L4", 24.0, 20.0), ("T4", 12.0, 10.0))  # GB, TFLOP/s: 8:4:2:1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = {"compile": compilation, "check": check, "published": published, "cities": cities, "noisy": noisy_rates,
             "bound": proof, "large": large, "sync-enumerated": sync_enumerated, "small": small,
             "enumerated": enumerated, "unequal": unequal, "gossip": partners, "solvers": compared,
             "command": command, "seeds": seeds, "size": size}  # fmt: skip
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true", help="a tenth of the seconds and candidates")
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    _genetic(topology.load("spot"), 0, 0.01)  # compile, or load what is compiled
    _gcma(topology.load("spot"), 0, gcma.POPULATION + 1)
    for name in options.part or parts:
        for seed in range(options.first, options.first + options.seeds):
            parts[name](seed, scale)


def compilation(seed: int, _scale: float) -> None:
    """The first compilation of each solver. One seed is enough: others measure the same."""
    for solver in ("genetic", "annealing", "gcma"):
        code = (
            "import time; from decentral.scheduler.topology import search_budget, topology; "
            "from decentral.scheduler.sync import sync_plan; "
            "spot, begin = topology.load('spot'), time.process_time(); "
            f"sync_plan.sync_plan(spot, {solver!r}, 0, search_budget.SearchBudget(rounds=1)); "
            "print(time.process_time() - begin)"
        )
        with tempfile.TemporaryDirectory() as empty:
            environment = {**os.environ, "NUMBA_CACHE_DIR": empty}
            runs = [
                subprocess.run(
                    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
                )
                for _ in range(2)
            ]
        first, again = (float(run.stdout) for run in runs)
        _line("compile", seed=seed, solver=solver, first_s=first, again_s=again, compiling_s=first - again)


def check(seed: int, _scale: float) -> None:
    for case in OPTIMA:
        swarm = topology.load(case)
        walked, rate = _interpreted(swarm, seed, 100)
        ours, _ = _gcma(swarm, seed, walked.candidates)
        _line("check", case=case, seed=seed, candidates=walked.candidates, interpreted=walked.best, gcma=ours,
              interpreted_per_s=rate, in_360_s=_tried(rate))  # fmt: skip


def published(seed: int, scale: float) -> None:
    for case, optimum in OPTIMA.items():
        found = _genetic(topology.load(case), seed, 2 * scale)
        cost, when = found[-1]
        baseline, _ = _gcma(topology.load(case), seed, int(5000 * scale))
        _line("published", case=case, seed=seed, cost=cost, over_optimum=cost / optimum, found_after_s=when,
              gcma_5000=baseline)  # fmt: skip


def cities(seed: int, scale: float) -> None:
    _against_gcma("cities", scattered(64, seed), seed, scale)


def noisy_rates(seed: int, scale: float) -> None:
    _against_gcma("noisy", noisy(seed), seed, scale)


def _against_gcma(part: str, swarm: Topology, seed: int, scale: float) -> None:
    record = _genetic(swarm, seed, 30 * scale)
    long, short = record[-1][0], min(cost for cost, when in record if when <= 10 * scale)
    candidates, rate = _candidates(swarm, seed, scale)
    baseline, best_N = _gcma(swarm, seed, candidates)
    case = published_code.case_of(swarm, swarm.workload or Workload())
    written = published_code.written_pipelines(case, best_N)
    _line(part, seed=seed, genetic_10_s=short, genetic_30_s=long, interpreted_per_s=rate, candidates=candidates,
          gcma=baseline, ratio_10_s=short / baseline, ratio_30_s=long / baseline, gcma_as_written=written,
          written_ratio_10_s=short / written)  # fmt: skip
    if seed == 0:
        begin = time.process_time()
        baseline, _ = _gcma(swarm, seed, int(STANDS_STILL * scale))
        _line(part, seed=seed, candidates=int(STANDS_STILL * scale), seconds=time.process_time() - begin,
              gcma=baseline, ratio_10_s=short / baseline, ratio_30_s=long / baseline)  # fmt: skip


def proof(seed: int, scale: float) -> None:
    swarm = scattered(64, seed)
    problem = problem_of(swarm, swarm.workload or Workload())
    candidates, _ = _candidates(swarm, seed, scale)
    baseline, _ = _gcma(swarm, seed, candidates)
    best = _genetic(swarm, seed, 10 * scale)[-1][0]
    begin = time.process_time()
    budget = SearchBudget(PROOF_S * scale, clock=time.process_time)
    verdict = layout_bound.below(problem, min(AIM * baseline, best), budget)
    found = None if verdict.slots is None else best_layout(problem, verdict.slots).cost.total
    _line("bound", seed=seed, gcma=baseline, genetic=best, aim=AIM * baseline, cut=min(AIM * baseline, best),
          none_below=verdict.proven and found is None, found=found, proven=verdict.proven,
          seconds=time.process_time() - begin)  # fmt: skip


def large(seed: int, scale: float) -> None:
    for count, seconds in ((1024, 30), (4096, 60)):
        side = int(count**0.5)
        swarm = replace(scattered(count, seed), workload=Workload(side, side))
        begin = time.process_time()
        plan = sync_plan(swarm, "genetic", seed, SearchBudget(seconds * scale, clock=time.process_time))
        used = time.process_time() - begin
        cost, hand = plan.cost["total"], min(plan.baselines.values())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        _line("large", peers=count, seed=seed, cost=cost, best_hand=hand, ratio=cost / hand, seconds=used,
              peak_gib=peak)  # fmt: skip


def sync_enumerated(seed: int, scale: float) -> None:
    swarm = planner_enumerated.random_swarm(np.random.default_rng(seed))
    best, stages = planner_enumerated.best_step(swarm)
    if not stages:
        _line("sync-enumerated", seed=seed, peers=len(swarm), fits=False)
        return
    plan = sync_plan(swarm, "genetic", seed, SearchBudget(2 * scale, clock=time.process_time))
    pair = f"{len(plan.stages)}x{len(plan.pipelines)}"
    _line("sync-enumerated", seed=seed, peers=len(swarm), pair=pair, step_s=plan.cost["step"], optimum_s=best,
          over_optimum=plan.cost["step"] / best)  # fmt: skip


def small(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    costs = tiny(rng, int(rng.integers(3, 7)), int(rng.integers(4, 9)))
    begin = time.process_time()
    exact = milp.best_spans(costs)
    between = time.process_time()
    assert exact is not None
    budget = SearchBudget(max(20.0, 3 * (between - begin)) * scale, clock=time.process_time)
    problem = FlowProblem(costs, np.arange(costs.peers) % 2)
    found = span_search.search(problem, budget, np.random.default_rng(seed))
    rates = [max_flow.maximum(costs, spans).tokens_per_s for spans in (found, exact)]
    _line("small", seed=seed, peers=costs.peers, layers=costs.layers, of_exact=rates[0] / rates[1],
          exact_s=between - begin, seconds=time.process_time() - between)  # fmt: skip


def enumerated(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    costs = tiny(rng, int(rng.integers(2, 5)), int(rng.integers(3, 6)))
    exact = milp.best_spans(costs)
    assert exact is not None
    budget = SearchBudget(10 * scale, clock=time.process_time)
    problem = FlowProblem(costs, np.arange(costs.peers) % 2)
    found = span_search.search(problem, budget, np.random.default_rng(seed))
    rates = [max_flow.maximum(costs, chosen).tokens_per_s for chosen in (found, exact)]
    begin = time.process_time()
    best, solved = planner_layouts.best_flow(costs, 0.9 * max(rates))
    choices = math.prod(1 + sum(costs.reach(peer, a) - a for a in range(costs.layers)) for peer in range(costs.peers))
    _line("enumerated", seed=seed, peers=costs.peers, layers=costs.layers, choices=choices, solved=solved,
          found=rates[0] / best, exact=rates[1] / best, of_bound=best / costs.compute_bound(),
          enumerating_s=time.process_time() - begin)  # fmt: skip


def unequal(seed: int, scale: float) -> None:
    swarm = mixed(seed)
    costs = layer_costs.of_model(swarm, config.load(None, LLAMA_7B))
    budget = SearchBudget(20 * scale, clock=time.process_time)
    problem = FlowProblem(costs, regions_of(swarm))
    baseline = planning.random_throughput(problem, seed, budget) or np.inf
    begin = time.process_time()
    rate = problem.evaluate(span_search.search(problem, budget, np.random.default_rng(seed))).value
    bound = costs.compute_bound()
    _line("unequal", seed=seed, tokens_per_s=rate, of_bound=rate / bound, of_random=rate / baseline,
          seconds=time.process_time() - begin)  # fmt: skip


def partners(seed: int, scale: float) -> None:
    for count in (16, 32, 64, 96):
        swarm = scattered(count, seed)
        begin = time.process_time()
        budget, held = SearchBudget(2 * scale, clock=time.process_time), np.ones((count, 1), dtype=bool)
        share = config.load(None).gossip.link_share
        found = mixing.partners(swarm, held, np.array([1e8]), np.zeros((count, count)), share, budget)
        _line("gossip", seed=seed, peers=count, of_uniform=found.mixing_per_s / found.uniform_per_s,
              of_bandwidth=found.mixing_per_s / found.bandwidth_per_s, seconds=time.process_time() - begin)  # fmt: skip


def compared(seed: int, scale: float) -> None:
    for name, model, swarm, keys in _shipped():
        problem = planning.problem_of(swarm, config.load(None, keys), 1, layer_costs.UTILISATION)
        bound = problem.bound()
        records = solvers.solver_records(problem, seed, 10 * scale, time.process_time)
        _line("solvers", topology=name, model=model, seed=seed, bound=bound,
              of_bound={name: round(record[-1][1] / bound, 4) for name, record in records.items()})  # fmt: skip


def seeds(seed: int, scale: float) -> None:
    tested = [
        (name, model, topology.load(f"tests/scheduler/topologies/{name}.yaml"), keys)
        for name in ("three-labs", "thirty-homes")
        for model, keys in (("1.3B", GPT_1300M), ("7B", LLAMA_7B))
    ]
    for name, model, swarm, keys in (*_shipped(), *tested):
        _planned("seeds", f"{name} {model}", swarm, keys, seed, 10 * scale)


def size(seed: int, scale: float) -> None:
    swarm = topology.parse(planner_volunteers.volunteers(1000, seed))
    for width in (1024, 2048, 4096):
        keys = ["model.depth=80", f"model.width={width}", "model.vocabulary=32000", "model.context=1024"]
        _planned("size", f"width {width}", swarm, keys, seed, 30 * scale)


def _shipped() -> Iterator[tuple[str, str, Topology, list[str]]]:
    """Yield name, model, topology and the model's config, of each shipped topology that can hold the model."""
    for model, keys in (("125M", GPT_125M), ("7B", LLAMA_7B)):
        for path in sorted(files("decentral.configs").joinpath("topologies").iterdir(), key=lambda path: path.name):
            name = path.name.removesuffix(".yaml")
            swarm = topology.load(name)
            try:
                layer_costs.of_model(swarm, config.load(None, keys))
            except UserError:  # the model does not fit, or the topology has no devices
                continue
            yield name, model, swarm, keys


def _planned(part: str, case: str, swarm: Topology, keys: list[str], seed: int, seconds: float) -> None:
    begin = time.process_time()
    budget = SearchBudget(seconds, clock=time.process_time)
    plan = planning.throughput_plan(swarm, config.load(None, keys), "genetic", seed, budget)
    rate, bound = plan.throughput["tokens_per_s"], plan.throughput["bound"]
    _line(part, case=case, seed=seed, tokens_per_s=rate, of_bound=rate / bound, most_used=max(plan.use.values()),
          seconds=time.process_time() - begin)  # fmt: skip


def command(seed: int, scale: float) -> None:
    budget = SearchBudget(2 * scale, clock=time.process_time)
    begin = time.process_time()
    plan = planning.throughput_plan(mixed(seed), config.load(None, LLAMA_7B), "genetic", seed, budget)
    _line("command", seed=seed, asked_s=2 * scale, seconds=time.process_time() - begin,
          of_bound=plan.throughput["tokens_per_s"] / plan.throughput["bound"])  # fmt: skip


GPT_125M = ["model.depth=12", "model.width=768", "model.heads=12", "model.vocabulary=50304", "model.context=1024"]
GPT_1300M = ["model.depth=24", "model.width=2048", "model.heads=16", "model.vocabulary=50304", "model.context=2048"]
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
    return replace(swarm, links=swarm.links._replace(bandwidth=swarm.bandwidth * np.exp(noise + noise.T)))


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


def tiny(rng: np.random.Generator, peers: int, layers: int) -> layer_costs.LayerCosts:
    """Unequal peers that hold between two and most of the equal layers, on slow unequal uplinks and links."""
    rate = rng.lognormal(0, 1, peers) * 2e6
    link = rng.lognormal(0, 1, (peers, peers)) * 6e5
    link = np.minimum(np.minimum(link, link.T), np.minimum.outer(rate, rate))
    np.fill_diagonal(link, 0.0)
    speed, memory = rng.choice([1.0, 2.0, 4.0, 8.0], peers), rng.choice([2.5, 4.0, 6.0], peers)
    memory[: int(np.ceil(layers / 2))] += 1.0  # enough for every layer
    ones = np.ones(layers)
    return layer_costs.LayerCosts(
        np.outer(1 / speed, ones) / 200, ones, ones / 9, ones * 0.1, ones * 1e3, memory, link, 2000.0, 1, rate,
        np.full(peers, -1), np.zeros(0),
    )  # fmt: skip


def _genetic(swarm: Topology, seed: int, seconds: float) -> list[tuple[float, float]]:
    """(cost, CPU seconds after which it was found), at each improvement. The last is the realised cost."""
    problem = problem_of(swarm, swarm.workload or Workload())
    begin = time.process_time()
    found: list[tuple[float, float]] = []

    def note(_fraction: float, best: float) -> None:
        if not found or best < found[-1][0] - 1e-9:
            found.append((best, time.process_time() - begin))

    budget = SearchBudget(seconds, clock=time.process_time, report=note)
    slots = evolve.search(problem, regions_of(swarm), budget, np.random.default_rng(seed))
    when = found[-1][1] if found else time.process_time() - begin
    return [*found, (best_layout(problem, slots).cost.total, when)]


def _gcma(swarm: Topology, seed: int, candidates: int) -> tuple[float, list[int]]:
    """The cost that gcma reaches with this many candidates, and each peer's stage."""
    problem = problem_of(swarm, swarm.workload or Workload())
    budget = SearchBudget(rounds=max(1, round((candidates - gcma.POPULATION) / gcma.TRIALS)))
    slots = gcma.search(problem, regions_of(swarm), budget, np.random.default_rng(seed))
    stage_N = np.empty(problem.peers, np.int64)
    stage_N[slots] = np.arange(problem.peers) // problem.replicas
    return best_layout(problem, slots).cost.total, stage_N.tolist()


def _interpreted(swarm: Topology, seed: int, trials: int) -> tuple[published_code.Search, tuple[float, float]]:
    """The published code's walk, and its candidates per CPU second: of the first population, and of the trials."""
    case = published_code.case_of(swarm, swarm.workload or Workload())
    begin = time.process_time()
    search = published_code.Search(case, gcma.POPULATION, np.random.default_rng(seed))
    between = time.process_time()
    for _ in range(trials // gcma.TRIALS):
        search.trials()
    end = time.process_time()
    return search, (gcma.POPULATION / (between - begin), trials / (end - between))


def _candidates(swarm: Topology, seed: int, scale: float) -> tuple[int, tuple[float, float]]:
    """How many candidates the interpreted code tries on this swarm in PUBLISHED_S, and its rates."""
    _, rate = _interpreted(swarm, seed, SAMPLE)
    return int(_tried(rate) * scale), rate


def _tried(rate: tuple[float, float]) -> int:
    """Candidates in PUBLISHED_S at these rates: of the first population, and of the trials."""
    return gcma.POPULATION + int((PUBLISHED_S - gcma.POPULATION / rate[0]) * rate[1])


def _line(part: str, **figures: object) -> None:
    rounded = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"part": part, **rounded}), flush=True)


if __name__ == "__main__":
    main()

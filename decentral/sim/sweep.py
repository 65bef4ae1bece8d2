"""Small swarms with faults by chance, seed after seed: what a seed stands for, and many of them on all cores.

A seed decides the number of peers, their speeds, the algorithm, the wires, and from one to five faults. The clock of
these swarms is quick (windows of 3 s, records of 24 s), so that two minutes hold everything that happens in an hour.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context

import torch

from decentral.core import config, rng
from decentral.core.units import Seconds
from decentral.sim import faults
from decentral.sim.audit import Violation
from decentral.sim.geography import Wires
from decentral.sim.run import ROSTER_SETTLE_S, Scenario, run
from decentral.sim.swarm import Shape
from decentral.sim.virtual_host import Pace
from decentral.train import memory

FAULTS_UNTIL_S: Seconds = 60.0
SPANS_EVERY = 4  # seeds, of which the last stands for a swarm whose peers hold spans of the model
SPAN_MODEL = [
    *("model.depth=4", "model.width=32", "model.context=32", "train.micro_batch=2"),
    "gossip.fragment_parameters=10000",  # four of them
]
ALGORITHMS = ("pull", "pull", "pull", "symmetric", "push_sum", "allreduce")
SETTINGS = [
    "gossip.window_s=3",
    "gossip.start_window_s=1",
    "gossip.start_steps=20",
    "gossip.max_age_s=8",
    "swarm.record_ttl_s=24",
    "swarm.renew_s=8",
    "swarm.checkpoint_every_s=10",
]
AHEAD = 8  # seeds that wait for a process


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    seed: int
    digest: str
    checks: int
    violated: str = ""  # the rule, if one was
    said: str = ""
    latest: tuple[str, ...] = ()
    faults: str = ""
    farthest: float = 0.0  # of the replicas at the end, in windows' noise


def scenario_of(seed: int) -> Scenario:
    chance = rng.stream(seed, "sweep")
    peers = chance.randint(3, 6)
    throttles = tuple(chance.choice([1.0, 1.0, 1.5, 4.0]) for _ in range(peers))
    algorithm = chance.choice(ALGORITHMS)
    spans = seed % SPANS_EVERY == SPANS_EVERY - 1
    shape = _shape_of_spans(algorithm, throttles, seed) if spans else _shape(algorithm, throttles)
    drawn = faults.draw(chance, peers, FAULTS_UNTIL_S, chance.randint(1, 5))
    over = max(fault.at + fault.lasts for fault in drawn)
    seconds = over + shape.config.swarm.record_ttl_s + ROSTER_SETTLE_S + 1
    wires = Wires(delay_s=chance.choice([0.005, 0.05, 0.2]))
    return Scenario(shape, peers, seconds, seed, tuple(drawn), wires)


@cache
def _shape(algorithm: str, throttles: tuple[float, ...]) -> Shape:
    run_config = config.load(None, [*SETTINGS, f"gossip.algorithm={algorithm}"])
    return Shape.of(run_config, Pace(0.4, 0.05, report_s=5.0), throttles, 1024)


def _shape_of_spans(algorithm: str, throttles: tuple[float, ...], seed: int) -> Shape:
    """Of four fragments each peer has room for one to three, most for two; few have room for all."""
    chance = rng.stream(seed, "spans")
    overlap = chance.random() < 0.5
    accumulate = chance.choice([1, 1, 2, 4])
    run_config = _span_config(algorithm, overlap, accumulate)
    shape = Shape.of(run_config, Pace(1.0, 0.05, report_s=5.0), throttles, 64)
    under_way = chance.choice([4, 6, 8])
    sizes = [chance.choice([1, 2, 2, 2, 3, len(shape.fragments)]) for _ in throttles]
    return replace(shape, memory=tuple(room_for(shape, size, under_way) for size in sizes))


def room_for(shape: Shape, count: int, under_way: int) -> int:
    """Bytes that any `count` fragments take with so many micro-batches under way; not enough for more fragments."""
    needs = memory.needs(shape.config, shape.fragments)
    starts = range(len(needs.fragments) - count + 1)
    enough = max(needs.span_bytes(at, at + count, under_way) for at in starts)
    more = [needs.span_bytes(at, at + count + 1) - 1 for at in starts[:-1]]
    return min([enough, *more])


@cache
def _span_config(algorithm: str, overlap: bool, accumulate: int) -> config.Config:
    routes = [f"routes.overlap={str(overlap).lower()}", f"train.accumulate={accumulate}"]
    return config.load(None, [*SETTINGS, *SPAN_MODEL, *routes, f"gossip.algorithm={algorithm}"])


def play(seed: int) -> SweepOutcome:
    """One seed, and what came of it. An error of our own is an outcome too."""
    scenario = scenario_of(seed)
    text = faults.text_of(scenario.faults)
    try:
        report = run(scenario)
    except Violation as violation:
        return SweepOutcome(seed, "", 0, violation.rule, str(violation), tuple(violation.latest), text)
    except Exception as error:  # an assertion of ours: the sweep goes on and names the seed
        return SweepOutcome(seed, "", 0, "raised", f"{type(error).__name__}: {error}", (), text)
    return SweepOutcome(seed, report.digest, report.checks, farthest=report.farthest)


def sweep(seeds: Iterable[int], processes: int) -> Iterator[SweepOutcome]:
    """As they come, in the order of the seeds. Who stops listening waits for at most AHEAD seeds of each process."""
    if processes == 1:
        yield from map(play, seeds)
        return
    under_way: deque[Future[SweepOutcome]] = deque()
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_one_thread) as pool:
        try:
            for seed in seeds:
                under_way.append(pool.submit(play, seed))
                if len(under_way) >= AHEAD * processes:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)

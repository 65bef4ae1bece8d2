"""The sweep: small swarms with faults by chance, one for each seed, many of them on all cores.

A seed decides the number of peers, their speeds, the algorithm, the links, and one to five faults. Windows of these
swarms last 3 s and records 24 s, so that two minutes hold everything that happens in an hour elsewhere.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from multiprocessing import get_context

import torch

from decentral.core import config, rng
from decentral.core.units import Seconds
from decentral.engine import memory
from decentral.peers.membership.records import RENEWALS
from decentral.peers.membership.swarm_size import SwarmTimes
from decentral.sim import faults
from decentral.sim.host import Pace
from decentral.sim.invariants.evidence import Violation
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import ROSTER_SETTLE_S, Scenario, run
from decentral.sim.swarm import SwarmSettings

FAULTS_UNTIL_S: Seconds = 60.0
SPANS_EVERY = 4  # in every so many seeds, the last one stands for a swarm whose peers hold spans of the model
HOSTS_EVERY, HOSTS_AT = 10, 3  # of so many rows of SPANS_EVERY seeds, one has faults of machines: full disks, clocks
LIARS_EVERY, LIARS_AT = 10, 5  # likewise of knowing liars
SPAN_MODEL = [
    *("model.depth=4", "model.width=32", "model.context=32", "train.micro_batch=2"),
    "gossip.fragment_parameters=10000",  # which makes four fragments
]
SAMPLED_ALGORITHMS = (*5 * ("pull",), "allreduce")
SETTINGS = [
    "gossip.window_s=3",
    "gossip.start_window_s=1",
    "gossip.start_steps=20",
    "swarm.checkpoint_every_s=10",
]
QUICK = SwarmTimes(renew_s=8.0, max_age_s=8.0)
AHEAD = 8  # seeds that wait for a process


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What came of one seed: a digest, or the rule that was violated and what is known of it."""

    seed: int
    digest: str
    checks: int
    violated: str = ""  # the rule; empty where none was violated
    said: str = ""
    latest: tuple[str, ...] = ()  # the last events of the peer concerned
    faults: str = ""
    farthest: float = 0.0  # a replica's distance from the mean at the end, in windows' noise


def scenario_of(seed: int) -> Scenario:
    """The scenario that a seed stands for; always the same one."""
    chance = rng.stream(seed, "sweep")
    peers = chance.randint(3, 6)
    throttles = tuple(chance.choice([1.0, 1.0, 1.5, 4.0]) for _ in range(peers))
    algorithm = f"gossip.algorithm={chance.choice(SAMPLED_ALGORITHMS)}"
    if seed % SPANS_EVERY == SPANS_EVERY - 1:
        settings = _span_settings(algorithm, throttles, seed)
    else:
        settings = SwarmSettings.of(_config((algorithm,)), Pace(0.4, 0.05, report_s=5.0), throttles, 1024)
    drawn = faults.draw(chance, peers, FAULTS_UNTIL_S, chance.randint(1, 5))
    if besides(seed) == "hosts":
        drawn += faults.draw_of_hosts(rng.stream(seed, "hosts"), peers, FAULTS_UNTIL_S)
    if besides(seed) == "liars":
        with_routes = len(settings.memory) > 0
        drawn += faults.draw_of_liars(rng.stream(seed, "liars"), peers, FAULTS_UNTIL_S, with_routes)
    over = max(fault.at + fault.lasts for fault in drawn)
    settings = replace(settings, times=QUICK)
    seconds = over + RENEWALS * QUICK.renew_s + ROSTER_SETTLE_S + 1
    link = TypicalLink(delay_s=chance.choice([0.005, 0.05, 0.2]))
    return Scenario(settings, peers, seconds, seed, tuple(drawn), link)


def seeds_from(first: int, only: Collection[str]) -> Iterator[int]:
    """All seeds from the first on; with `only`, those whose swarms have a fault of one of these kinds besides."""
    return (seed for seed in count(first) if not only or besides(seed) in only)


def besides(seed: int) -> str:
    """What a seed draws beside its one to five faults: some of machines (`hosts`), knowing liars (`liars`), or none."""
    row = seed // SPANS_EVERY
    if row % HOSTS_EVERY == HOSTS_AT:
        return "hosts"
    return "liars" if row % LIARS_EVERY == LIARS_AT else ""


@cache
def _config(overrides: tuple[str, ...]) -> config.Config:
    return config.load(None, [*SETTINGS, *overrides])


def _span_settings(algorithm: str, throttles: tuple[float, ...], seed: int) -> SwarmSettings:
    """The memory of each peer takes one to three of the four fragments, mostly two; a few take all."""
    chance = rng.stream(seed, "spans")
    overlap = f"routes.overlap={str(chance.random() < 0.5).lower()}"
    accumulate = f"train.accumulate={chance.choice([1, 1, 2, 4])}"
    run_config = _config((*SPAN_MODEL, overlap, accumulate, algorithm))
    settings = SwarmSettings.of(run_config, Pace(1.0, 0.05, report_s=5.0), throttles, 64)
    under_way = chance.choice([4, 6, 8])
    sizes = [chance.choice([1, 2, 2, 2, 3, len(settings.fragments)]) for _ in throttles]
    return replace(settings, memory=tuple(memory_for(settings, size, under_way) for size in sizes))


def memory_for(settings: SwarmSettings, count: int, under_way: int) -> int:
    """Bytes that any `count` fragments take with so many micro-batches under way, and that more do not fit into."""
    needs = memory.needs(settings.config, settings.fragments)
    starts = range(len(needs.fragments) - count + 1)
    enough = max(needs.span_bytes(at, at + count, under_way) for at in starts)
    more = [needs.span_bytes(at, at + count + 1) - 1 for at in starts[:-1]]
    return min([enough, *more])


def play(seed: int) -> SweepOutcome:
    """Plays one seed. An error of our own is an outcome too."""
    scenario = scenario_of(seed)
    text = faults.text_of(scenario.faults)
    try:
        report = run(scenario)
    except Violation as violation:
        return SweepOutcome(seed, "", 0, violation.rule, str(violation), tuple(violation.latest), text)
    except Exception as error:  # such as a failed assertion: the sweep goes on and names the seed
        return SweepOutcome(seed, "", 0, "raised", f"{type(error).__name__}: {error}", (), text)
    return SweepOutcome(seed, report.audit.digest, report.audit.checks, farthest=report.audit.farthest)


def sweep(seeds: Iterable[int], processes: int) -> Iterator[SweepOutcome]:
    """The outcomes in the order of the seeds. A caller that stops early waits for at most AHEAD seeds per process."""
    if processes == 1:
        yield from map(play, seeds)
        return
    under_way: deque[Future[SweepOutcome]] = deque()
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        try:
            for seed in seeds:
                under_way.append(pool.submit(play, seed))
                if len(under_way) >= AHEAD * processes:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

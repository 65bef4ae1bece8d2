"""Sweep over seeds: play many small swarms with random faults, on several processes.

A seed decides the number of peers, their speeds, the algorithm, the links, and one to five faults. Gossip windows last
3 s and DHT records 24 s, so that two minutes show what happens in an hour of a real swarm. Start reading at
`scenario_of` and `sweep`.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from multiprocessing import get_context
from random import Random

import torch

from decentral.comm.wire.invitations import FounderKeys
from decentral.core import config, rng
from decentral.core.memory_needs import USUAL_IN_FLIGHT, MemoryNeeds
from decentral.core.units import Seconds
from decentral.peers.membership.records import RENEWALS
from decentral.peers.membership.swarm_size import SwarmTimes
from decentral.sim import faults
from decentral.sim.host import Pace
from decentral.sim.invariants.evidence import Violation
from decentral.sim.network.geography import TypicalLink
from decentral.sim.run import ROSTER_SETTLE_S, Scenario, run
from decentral.sim.swarm import SwarmSettings

FAULTS_UNTIL_S: Seconds = 60.0  # all faults begin before this virtual time, except restarts
SPANS_EVERY = 4  # in one of this many seeds, each peer holds only some layers of the model
HOSTS_EVERY, HOSTS_AT = 10, 3  # in seeds with seed // 4 % 10 == 3, disks also become full or clocks jump
ECLIPSES_EVERY, ECLIPSES_AT = 20, 17  # in seeds with seed % 20 == 17, hostile DHT nodes hide a key's records
LIARS_EVERY, LIARS_AT = 10, 5  # in seeds with seed // 4 % 10 == 5, one peer lies (faults.draw_of_liars)
SPAN_MODEL = [
    *("model.depth=4", "model.width=32", "model.context=32", "train.micro_batch=2"),
    "gossip.fragment_parameters=10000",
]
SAMPLED_ALGORITHMS = (*5 * ("pull",), "allreduce")  # each seed samples one entry, so about five in six seeds use pull
SETTINGS = [
    "gossip.window_s=3",
    "gossip.start_window_s=1",
    "gossip.start_steps=20",
    "swarm.checkpoint_every_s=10",
]
RARE = ("gossip.window_s=60", "gossip.start_window_s=60")
ECLIPSED_PACE = Pace(10.0, 0.05, report_s=10.0)
# Since a run is short, peers renew their records more often and drop old windows sooner than in a real swarm.
QUICK = SwarmTimes(renew_s=8.0, max_age_s=8.0)
AHEAD = 8  # for each process, this many seeds are in progress or queued


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The outcome of one seed's run."""

    seed: int
    digest: str  # digest of the run (AuditReport.digest); "" if the run failed
    checks: int  # number of workers' jobs after which the invariants were checked
    violated: str = ""  # the violated rule; "raised" after any other error; "" if the run passed
    said: str = ""  # the text of the error; "" if the run passed
    latest: tuple[str, ...] = ()  # the last events of the peer that violated the rule, one text for each
    faults: str = ""  # the scenario's faults as text; "" if no rule was violated
    farthest: float = 0.0  # largest final distance of a replica from the mean, in units of one gossip window's noise


def scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed; equal seeds give equal scenarios."""
    if besides(seed) == "eclipses":
        return eclipsed(seed)
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


def eclipsed(seed: int) -> Scenario:
    """Return a scenario in which hostile nodes own one key of the DHT, and peers must learn news from each other.

    Peers take few steps and exchange little, because this scenario is about records. Where the news is a plan, peers
    have memory for the first fragment only, the smallest, so that they cannot plan anything themselves.
    """
    chance = rng.stream(seed, "eclipses")
    peers, key = chance.randint(4, 6), chance.choice(faults.ECLIPSED)
    if key == "plan":
        settings = SwarmSettings.of(
            _config((*SPAN_MODEL, *RARE, "gossip.fragment_parameters=20000")), ECLIPSED_PACE, (1.0,), 64
        )
        settings = replace(settings, memory=(settings.needs.span_bytes(0, 1),))
    else:
        settings = SwarmSettings.of(_config(RARE), ECLIPSED_PACE, (1.0,), 1024)
    if key == "revoked":
        settings = replace(settings, founder=FounderKeys.create("simulated", Random(seed).randbytes))
    drawn = faults.draw_of_eclipses(chance, peers, key)
    seconds = drawn[0].at + drawn[0].lasts
    link = TypicalLink(delay_s=chance.choice([0.005, 0.05]))
    return Scenario(replace(settings, times=QUICK), peers, seconds, seed, tuple(drawn), link)


def seeds_from(first: int, only: Collection[str]) -> Iterator[int]:
    """Yield the seeds from `first` on, without end; `only` restricts them to seeds with these kinds of extra faults."""
    return (seed for seed in count(first) if not only or besides(seed) in only)


def besides(seed: int) -> str:
    """Return the kind of a seed's extra faults, one of BESIDES, or "" for none."""
    if seed % ECLIPSES_EVERY == ECLIPSES_AT:
        return "eclipses"
    row = seed // SPANS_EVERY
    if row % HOSTS_EVERY == HOSTS_AT:
        return "hosts"
    return "liars" if row % LIARS_EVERY == LIARS_AT else ""


@cache
def _config(overrides: tuple[str, ...]) -> config.Config:
    return config.load(None, [*SETTINGS, *overrides])


def _span_settings(algorithm: str, throttles: tuple[float, ...], seed: int) -> SwarmSettings:
    """Return settings in which each peer has memory for one to four of the model's four fragments, mostly for two."""
    chance = rng.stream(seed, "spans")
    overlap = f"routes.overlap={str(chance.random() < 0.5).lower()}"
    accumulate = f"train.accumulate={chance.choice([1, 1, 2, 4])}"
    run_config = _config((*SPAN_MODEL, overlap, accumulate, algorithm))
    settings = SwarmSettings.of(run_config, Pace(1.0, 0.05, report_s=5.0), throttles, 64)
    under_way = chance.choice([4, 6, 8])
    sizes = [chance.choice([1, 2, 2, 2, 3, len(settings.fragments)]) for _ in throttles]
    return with_memory_for(settings, sizes, under_way)


def in_parts(settings: SwarmSettings) -> SwarmSettings:
    """Return the settings of a swarm whose peers hold the whole model only beside USUAL_IN_FLIGHT micro-batches.

    A micro-batch takes as much memory as half of such a small model, so a peer that has memory for half of the model
    and a few micro-batches could otherwise hold all of it.
    """
    return replace(settings, planned_needs=replace(settings.needs, whole_in_flight=USUAL_IN_FLIGHT))


def with_memory_for(settings: SwarmSettings, sizes: Sequence[int], under_way: int) -> SwarmSettings:
    """Return `in_parts(settings)` with memory for any neighbouring fragments and at most `under_way` micro-batches.

    Beside one fragment more fit fewer micro-batches than peers prefer, so peers hold these only if they must.

    Args:
        settings: The settings of the swarm.
        sizes: Number of fragments for which each peer has memory; peers take turns.
        under_way: Number of micro-batches in flight, whose activations need memory besides the fragments.
    """
    parted = in_parts(settings)
    return replace(parted, memory=tuple(_memory_for(parted.needs, size, under_way) for size in sizes))


def _memory_for(needs: MemoryNeeds, count: int, under_way: int) -> int:
    starts = range(len(needs.fragments) - count + 1)
    enough = max(needs.span_bytes(at, at + count, under_way) for at in starts)
    more = [needs.span_bytes(at, at + count + 1, needs.preferred_in_flight(count + 1)) - 1 for at in starts[:-1]]
    return min([enough, *more])


def play(seed: int) -> SweepOutcome:
    """Run the scenario of one seed and return its outcome. An error of the simulated program does not raise."""
    scenario = scenario_of(seed)
    text = faults.text_of(scenario.faults)
    try:
        report = run(scenario)
    except Violation as violation:
        return SweepOutcome(seed, "", 0, violation.rule, str(violation), tuple(violation.latest), text)
    except Exception as error:  # such as a failed assertion, which must not end the sweep
        return SweepOutcome(seed, "", 0, "raised", f"{type(error).__name__}: {error}", (), text)
    return SweepOutcome(seed, report.audit.digest, report.audit.checks, farthest=report.audit.farthest)


def sweep(seeds: Iterable[int], processes: int) -> Iterator[SweepOutcome]:
    """Yield the outcomes of seeds, in their order, computed by `processes` processes.

    A caller that closes the iterator early waits until all seeds whose run has begun are finished.
    """
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

"""One simulated run, from a scenario to a report: the same scenario gives the same digest, always.

scenario -> swarm, faults and audit -> samples on the way -> report
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from decentral.core.ids import PeerId
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.membership.records import RENEWALS
from decentral.peers.membership.swarm_size import MOST_RENEW_S
from decentral.scheduler.topology.topology import Topology
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.faults import Fault
from decentral.sim.host import Observer
from decentral.sim.invariants.audit import CHECK_S, InvariantAudit
from decentral.sim.invariants.evidence import Violation
from decentral.sim.network.geography import SwarmGeography, TypicalLink
from decentral.sim.report import RunReport, RunStatistics
from decentral.sim.swarm import SimulatedSwarm, SwarmSettings

SAMPLES = 200
MANY_SIMULATED = 1000
ROSTER_SETTLE_S = 30.0  # beyond a record's lifetime, until every peer must know which peers live
ALL_AT_ONCE_S = 0.2  # between two starts of a small swarm
START_SPREAD_S = 200.0  # in which a large one starts

OnProgress = Callable[[Seconds], None]
"""Called once for each sample, with the virtual time."""


class Watch(Protocol):
    """Looks on while a run is played, and changes nothing of it."""

    def begin(self, swarm: SimulatedSwarm) -> None:
        """The swarm that is going to be played, before its first peer starts."""

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """One journal line of a peer, written at its clock's time `t`."""

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Scenario:
    """A swarm, what happens to it, and for how long. It says all that a run depends on."""

    settings: SwarmSettings
    peers: int
    seconds: Seconds
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    link: TypicalLink = field(default_factory=TypicalLink)
    topology: Topology | None = None
    audited: bool = True


class StopRun(Exception):
    """Raised by a run's `on_progress`: the run ends here, and reports what there is."""


def run(
    scenario: Scenario,
    on_progress: OnProgress | None = None,
    observer: Observer | None = None,
    watches: Sequence[Watch] = (),
) -> RunReport:
    """Plays the scenario. Raises Violation. `observer` sees every event where the scenario is not audited."""
    geography = SwarmGeography(scenario.seed, scenario.link, scenario.topology)
    swarm = SimulatedSwarm(scenario.settings, scenario.seed, geography, observer)
    injector = FaultInjector(swarm)
    audit = InvariantAudit(swarm, injector)
    if scenario.audited:
        swarm.observe(audit)
    statistics = RunStatistics(swarm)
    swarm.listen(statistics.line)
    for watch in watches:
        watch.begin(swarm)
        swarm.listen(watch.line)
    with _few_collections(scenario.peers > MANY_SIMULATED), suppress(StopRun):
        _start(swarm, scenario.peers)
        injector.plan(scenario.faults)
        for moment, sampled in _moments(scenario):
            swarm.agenda.run(moment)
            if scenario.audited:
                audit.check()
            if sampled:
                statistics.sample()
                if on_progress is not None:
                    on_progress(moment)
    for watch in watches:
        watch.end()
    if scenario.audited:
        ttl_s = RENEWALS * scenario.settings.times.renewals_s(scenario.peers, lambda: MOST_RENEW_S)
        audit.finish(settled=swarm.agenda.now >= injector.last_at + ttl_s + ROSTER_SETTLE_S)
    return statistics.report(scenario.peers, scenario.faults, audit.checks, audit.convergence.farthest)


def _start(swarm: SimulatedSwarm, count: int) -> None:
    """The first peer starts alone, the others when it trains."""
    gap_s = min(ALL_AT_ONCE_S, START_SPREAD_S / count)
    for number in range(count):
        member = swarm.add()
        swarm.agenda.at(0.0 if number == 0 else 0.5 + gap_s * number, partial(swarm.start, member))


def _moments(scenario: Scenario) -> Iterator[tuple[Seconds, bool]]:
    """When to look, and whether to take a sample then: samples, and the audit's checks where they are asked for."""
    seconds = scenario.seconds
    count = SAMPLES if scenario.peers <= MANY_SIMULATED else SAMPLES // 4  # each looks at all peers
    samples = {seconds * number / count for number in range(1, count + 1)}
    checks = {CHECK_S * number for number in range(1, int(seconds / CHECK_S) + 1)} if scenario.audited else set()
    yield from ((moment, moment in samples) for moment in sorted(samples | checks))


@contextmanager
def _few_collections(many: bool) -> Iterator[None]:
    """A simulation makes millions of objects and few cycles: looking for them would take a tenth of the time.

    What a large one leaves behind stays until the process ends: to take it apart would take seconds.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000_000, 50, 100)
    try:
        yield
    finally:
        if many:
            gc.freeze()
        gc.set_threshold(*before)


def shrink(scenario: Scenario, rule: str, on_fewer: Callable[[str], None] = lambda text: None) -> tuple[Fault, ...]:
    """The fewest of the faults with which the rule is still violated (Zeller's ddmin, one by one at last)."""
    faults, step = list(scenario.faults), max(1, len(scenario.faults) // 2)
    while True:
        for start in range(0, len(faults), step):
            fewer = faults[:start] + faults[start + step :]
            if _violates(scenario, fewer, rule):
                on_fewer(f"{len(fewer)} faults are enough")
                faults, step = fewer, min(step, max(1, len(fewer) // 2))
                break
        else:
            if step == 1:
                return tuple(faults)
            step = max(1, step // 2)


def _violates(scenario: Scenario, faults: Sequence[Fault], rule: str) -> bool:
    try:
        run(replace(scenario, faults=tuple(faults)))
    except Violation as violation:
        return violation.rule == rule
    return False

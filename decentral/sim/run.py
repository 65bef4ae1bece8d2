"""Play one simulated run, from a scenario to a report; equal scenarios give equal reports.

    scenario -> swarm, faults and audit -> samples over virtual time -> report

Start reading at `run`.
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

SAMPLES = 200  # a run samples the swarm this many times, or a quarter as often with more than MANY_SIMULATED peers
MANY_SIMULATED = 1000  # with more peers, a run is sampled less often, and its objects are never garbage-collected
ROSTER_SETTLE_S = 30.0  # rosters must be right this long after the DHT records from the time of the last fault expired
ALL_AT_ONCE_S = 0.2  # each peer starts this long after the previous peer; sooner if START_SPREAD_S requires it
START_SPREAD_S = 200.0  # all peers start within about this time, however many they are

OnProgress = Callable[[Seconds], None]
"""Called with the virtual time of each sample."""


class Watch(Protocol):
    """Interface of a reader of a run's journal lines, such as `SimulatedPage`; a reader must not change the run."""

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Prepare to read lines of this swarm; called before its first peer starts."""

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Read a line of a peer's journal, written at time `t` of its clock."""

    def end(self) -> None:
        """Finish reading; called at the end of the run, after the last line."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The inputs that decide a run completely: a swarm, its faults, and how long to simulate."""

    settings: SwarmSettings
    peers: int
    seconds: Seconds
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    link: TypicalLink = field(default_factory=TypicalLink)
    topology: Topology | None = None
    audited: bool = True


class StopRun(Exception):
    """Raised by a caller's `on_progress` to end the run early; `run` then reports the run so far."""


def run(
    scenario: Scenario,
    on_progress: OnProgress | None = None,
    observer: Observer | None = None,
    watches: Sequence[Watch] = (),
) -> RunReport:
    """Play a scenario and return its report.

    Args:
        scenario: What to simulate.
        on_progress: Called at each sample with the virtual time; it may raise StopRun.
        observer: Observes every event and job; ignored if the scenario is audited, because the audit then observes.
        watches: Readers of all peers' journal lines.

    Raises:
        Violation: If the scenario is audited, and a rule of invariants/audit.py is broken.
    """
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
    """Schedule the starts of `count` peers: the first at virtual time 0, the others one by one from 0.5 s on.

    Peers that have a checkpoint (`SwarmSettings.saved`) all start at 0.
    """
    gap_s = min(ALL_AT_ONCE_S, START_SPREAD_S / count)
    for number in range(count):
        member = swarm.add()
        at_once = number == 0 or swarm.settings.saved
        swarm.agenda.at(0.0 if at_once else 0.5 + gap_s * number, partial(swarm.start, member))


def _moments(scenario: Scenario) -> Iterator[tuple[Seconds, bool]]:
    """Yield, in order, the virtual times at which to sample the swarm or check invariants, and whether to sample."""
    seconds = scenario.seconds
    count = SAMPLES if scenario.peers <= MANY_SIMULATED else SAMPLES // 4
    samples = {seconds * number / count for number in range(1, count + 1)}
    checks = {CHECK_S * number for number in range(1, int(seconds / CHECK_S) + 1)} if scenario.audited else set()
    yield from ((moment, moment in samples) for moment in sorted(samples | checks))


@contextmanager
def _few_collections(many: bool) -> Iterator[None]:
    """Make garbage collections rare within the block: they would take 10% of a run's time, and find few cycles.

    Args:
        many: Whether the run has very many objects. If True, collections after the block ignore them.
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
    """Return a minimal subset of a scenario's faults with which the rule is still violated.

    Args:
        scenario: A scenario that violates the rule.
        rule: Name of the rule.
        on_fewer: Called with a line of text whenever fewer faults are found to be enough.

    Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002 (ddmin).
    """
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

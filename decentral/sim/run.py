"""One simulated run, from a scenario to a report: the same scenario gives the same digest, always.

scenario -> swarm, storm and audit -> samples on the way -> report
"""

import gc
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import torch

from decentral.audit import Counts
from decentral.core.ids import PeerId
from decentral.core.machine import Effect, Log
from decentral.core.units import Seconds
from decentral.sim.audit import CHECK_S, InvariantAudit, Violation, distances, weights_of
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.faults import Fault
from decentral.sim.geography import Earth, Wires
from decentral.sim.swarm import Shape, SimulatedPeer, SimulatedSwarm
from decentral.sim.virtual_host import VirtualHost, Watch

SAMPLES = 200
MANY_SIMULATED = 1000
SAMPLED = 256  # peers that a sample looks at closely
ROSTER_SETTLE_S = 30.0  # beyond a record's lifetime, until everybody must know who is there
ALL_AT_ONCE_S = 0.2  # between two starts of a small swarm
START_SPREAD_S = 200.0  # in which a large one starts


@dataclass(frozen=True, slots=True)
class Scenario:
    shape: Shape
    peers: int
    seconds: Seconds
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    wires: Wires = field(default_factory=Wires)
    topology: Any = None  # scheduler/shared/topology.py's Topology
    audited: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    at: Seconds
    live: int
    training: int
    tokens: int  # made so far, by all
    spread: float
    roster_error: float  # mean over peers: wrong entries, over those there should be


@dataclass(slots=True)
class RunReport:
    peers: int
    seconds: Seconds
    seed: int
    tokens: int = 0
    tokens_per_s: float = 0.0
    busy_fraction: float = 0.0  # least of the peers that lived through
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # of exchanges, by reason
    exchange_s: float = 0.0  # mean, of those done
    routed: dict[str, int] = field(default_factory=dict)  # micro-batches by what became of them: decentral/audit.py
    moves: dict[str, int] = field(default_factory=dict)  # of spans, by why and outcome: "plan done"
    plans: int = 0  # different ones that were followed
    loss: float = 0.0
    spread: float = 0.0
    roster_error: float = 0.0
    recovery_s: dict[str, Seconds | None] = field(default_factory=dict)  # by fault; None: not before the end
    events: int = 0
    checks: int = 0
    farthest: float = 0.0  # of the replicas at the end, in windows' noise
    digest: str = ""
    samples: list[Sample] = field(default_factory=list)
    by_peer: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "samples"}
        return plain | {"samples": [{name: getattr(one, name) for name in Sample.__slots__} for one in self.samples]}


Tell = Callable[[Seconds], None]


class Enough(Exception):
    """Raised by a run's `tell`: it ends here, and reports what there is."""


def run(scenario: Scenario, tell: Tell | None = None, watch: Watch | None = None) -> RunReport:
    """Raises Violation. `tell` hears how far it is, once a sample; `watch` sees all where nothing is audited."""
    audit = InvariantAudit(scenario.shape.config.gossip.max_age_s)
    watch = audit if scenario.audited else watch or Unwatched()
    earth = Earth(scenario.seed, scenario.wires, scenario.topology)
    swarm = SimulatedSwarm(scenario.shape, scenario.seed, earth, watch)
    storm = FaultInjector(swarm)
    audit.swarm, audit.storm = swarm, storm
    ledger = RunStatistics(swarm)
    swarm.journal = ledger.line
    with _few_collections(scenario.peers > MANY_SIMULATED), suppress(Enough):
        _start(swarm, scenario)
        storm.plan(scenario.faults)
        for moment, sampled in _moments(scenario):
            swarm.agenda.run(moment)
            if scenario.audited:
                audit.check()
            if sampled:
                ledger.sample()
                if tell is not None:
                    tell(moment)
    if scenario.audited:
        ttl_s = scenario.shape.config.swarm.record_ttl_s
        audit.finish(settled=swarm.agenda.now >= storm.last_at + ttl_s + ROSTER_SETTLE_S)
    return ledger.report(replace(scenario, seconds=swarm.agenda.now), audit)


class Unwatched:
    """For swarms so large that a look at every event would cost as much as the event."""

    def handled(self, host: VirtualHost, event: object, effects: list[Effect]) -> None: ...

    def done(self, host: VirtualHost, job: object, outcome: object) -> None: ...


def _start(swarm: SimulatedSwarm, scenario: Scenario) -> None:
    """The first peer alone, the others when it trains."""
    count = scenario.peers
    gap_s = min(ALL_AT_ONCE_S, START_SPREAD_S / count)
    for number in range(count):
        member = swarm.add()
        swarm.agenda.at(0.0 if number == 0 else 0.5 + gap_s * number, _starting(swarm, member))


def _starting(swarm: SimulatedSwarm, member: SimulatedPeer) -> Callable[[], None]:
    return lambda: swarm.start(member)


def _moments(scenario: Scenario) -> Iterator[tuple[Seconds, bool]]:
    """When to look, and whether to take a sample then: samples, and the audit's checks where they are asked for."""
    seconds = scenario.seconds
    count = SAMPLES if scenario.peers <= MANY_SIMULATED else SAMPLES // 4  # each looks at all peers
    samples = {seconds * number / count for number in range(1, count + 1)}
    checks = {CHECK_S * number for number in range(1, int(seconds / CHECK_S) + 1)} if scenario.audited else set()
    yield from ((moment, moment in samples) for moment in sorted(samples | checks))


@contextmanager
def _few_collections(many: bool) -> Iterator[None]:
    """A simulation makes millions of objects and no cycles to speak of: looking for some takes a tenth of the time.

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


@dataclass(slots=True)
class RunStatistics:
    """Reads the journals as they are written."""

    swarm: SimulatedSwarm
    samples: list[Sample] = field(default_factory=list)
    exchanges: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # of exchanges done
    tokens: Counter[PeerId] = field(default_factory=Counter)
    busy_s: dict[PeerId, Seconds] = field(default_factory=lambda: defaultdict(float))
    joined_at: dict[PeerId, Seconds] = field(default_factory=dict)
    last_at: dict[PeerId, Seconds] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    moves: Counter[str] = field(default_factory=Counter)
    plans: set[str] = field(default_factory=set)
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _pack: Any = field(default_factory=lambda: msgpack.Packer().pack)  # one for all lines: there are many

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        fields = log.fields
        self._hash.update(self._pack((peer, round(t, 6), log.event, fields)))
        match log.event:
            case "step":
                self.tokens[peer] += fields["tokens"]
                self.busy_s[peer] += fields["seconds"]
                self.last_at[peer] = t
            case "exchange":
                self.exchanges[fields["outcome"]] += 1
                if fields["outcome"] == "done":
                    self.seconds += fields["seconds"]
                elif fields["outcome"] == "failed":
                    self.failures[fields["reason"]] += 1
            case "joined":
                self.joined_at[peer], self.busy_s[peer] = t, 0.0
            case "counted" | "uncounted":
                self.counts.add(log.event, fields)
            case "move":
                self.moves[f"{fields['why']} {fields['outcome']}"] += 1
            case "plan":
                self.plans.add(fields["digest"])

    def sample(self) -> None:
        living = self.swarm.living
        training = [member for member in living if member.training]
        far = distances(training[:SAMPLED])
        spread = (sum(d * d for d in far.values()) / len(far)) ** 0.5 if far else 0.0
        error = self._roster_error(living[:SAMPLED])
        at = self.swarm.agenda.now
        self.samples.append(Sample(at, len(living), len(training), sum(self.tokens.values()), spread, error))

    def _roster_error(self, living: Sequence[SimulatedPeer]) -> float:
        """Where the roster is sharded nobody has to know everybody: only the dead that are still in it count."""
        there = {member.peer for member in self.swarm.members if member.alive}
        sharded = self.swarm.shape.config.swarm.shards > 1
        if len(there) < 2:
            return 0.0
        wrong, known = 0, 0
        for member in living:
            assert member.host is not None
            live = member.host.node.roster.live.keys()
            wrong += len(live - there) + (0 if sharded else len(there - live) - 1)
            known += max(1, len(live))
        return wrong / known

    def report(self, scenario: Scenario, audit: InvariantAudit) -> RunReport:
        swarm, report = self.swarm, RunReport(scenario.peers, scenario.seconds, scenario.seed)
        nodes = [member.host.node for member in swarm.members if member.host is not None]
        report.tokens = sum(self.tokens.values())
        report.tokens_per_s = round(report.tokens / scenario.seconds, 1)
        report.sent_bytes = sum(node.traffic.sent_bytes for node in nodes)
        report.received_bytes = sum(node.traffic.received_bytes for node in nodes)
        report.exchanges, report.failures = dict(self.exchanges), dict(self.failures)
        report.exchange_s = round(self.seconds / max(1, self.exchanges["done"]), 4)
        if swarm.shape.memory:
            report.routed = self.counts.result(swarm.shape.fragments[-1].last).figures()
        report.moves, report.plans = dict(self.moves), len(self.plans)
        report.by_peer = [self._of(member) for member in swarm.members]
        busy = [one["busy_fraction"] for one in report.by_peer if one["lives"] == 1 and one["alive"]]
        report.busy_fraction = min(busy, default=0.0)
        report.loss, report.spread = _loss(swarm), self.samples[-1].spread
        report.roster_error = self.samples[-1].roster_error
        report.recovery_s = self._recoveries(scenario.faults)
        report.events, report.checks, report.samples = swarm.agenda.events, audit.checks, self.samples
        report.farthest, report.digest = round(audit.farthest, 2), self._digest()
        return report

    def _of(self, member: SimulatedPeer) -> dict[str, Any]:
        peer = member.peer
        since = self.last_at.get(peer, 0.0) - self.joined_at.get(peer, 0.0)
        node = member.host.node if member.host is not None else None
        return {
            "peer": peer,
            "lives": member.lives,
            "alive": member.alive,
            "tokens": self.tokens[peer],
            "tokens_per_s": round(self.tokens[peer] / since, 1) if since > 0 else 0.0,
            "busy_fraction": round(min(1.0, self.busy_s[peer] / since), 4) if since > 0 else 0.0,
            "sent_bytes": node.traffic.sent_bytes if node else 0,
            "received_bytes": node.traffic.received_bytes if node else 0,
            "exchanges": dict(node.traffic.exchanges) if node else {},
        }

    def _recoveries(self, faults: Sequence[Fault]) -> dict[str, Seconds | None]:
        """From the end of a fault until all who live train, and know each other."""
        found: dict[str, Seconds | None] = {}
        for fault in faults:
            over = fault.at + fault.lasts
            well = (one.at for one in self.samples if one.at >= over and one.live == one.training)
            first = next((at for at in well if self._roster_right(at)), None)
            found[str(fault)] = None if first is None else round(first - over, 2)
        return found

    def _roster_right(self, at: Seconds) -> bool:
        return next(one.roster_error for one in self.samples if one.at == at) == 0.0

    def _digest(self) -> str:
        for member in self.swarm.members:
            if member.host is not None:
                self._hash.update(weights_of(member.host).numpy().tobytes())
        return str(self._hash.hexdigest())


def _loss(swarm: SimulatedSwarm) -> float:
    """Mean square of the average of the replicas: their distance from the optimum, if they are sketches."""
    weights: dict[int, list[torch.Tensor]] = {}
    for member in swarm.living:
        for mixed in member.host.training.gossip.fragments if member.training and member.host is not None else ():
            weights.setdefault(mixed.live.fragment.index, []).append(mixed.live.theta)
    means = [torch.stack(held).mean(dim=0).square() for held in weights.values()]
    return float(torch.cat(means).mean()) if means else 0.0


def shrink(scenario: Scenario, rule: str, tell: Callable[[str], None] = lambda text: None) -> tuple[Fault, ...]:
    """The fewest of the faults with which the rule is still violated (Zeller's ddmin, one by one at last)."""
    faults, step = list(scenario.faults), max(1, len(scenario.faults) // 2)
    while True:
        for start in range(0, len(faults), step):
            fewer = faults[:start] + faults[start + step :]
            if _violates(scenario, fewer, rule):
                tell(f"{len(fewer)} faults are enough")
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

"""Report a simulated run: results of the swarm and of each peer, samples over time, and a digest."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from statistics import median
from typing import Any

import msgpack

from decentral.core.ids import PeerId
from decentral.core.journal.events import CountedLine, JoinedLine, MoveLine, PlanLine, UncountedLine
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.journal.micro_batch_counts import MicroBatchCounts
from decentral.core.journal.peer_totals import ExchangeTotals, PeerTotals
from decentral.core.machine import Log
from decentral.core.strict_json import JsonObject
from decentral.core.units import Seconds
from decentral.sim.faults import Fault
from decentral.sim.invariants.convergence import distances, loss_of_mean
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm

SAMPLED = 256  # a sample inspects the weights and rosters of at most this many peers, to limit its cost


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of the swarm at one moment of virtual time."""

    at: Seconds
    live: int
    training: int
    tokens: int
    spread: float  # root mean square distance of the peers' weights from their mean
    roster_error: float  # number of wrong and missing entries in the peers' rosters, divided by the number of entries
    loss: float | None  # median of the training peers' last losses; None before the first step


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens that all peers together trained in a run, and bytes that they transferred."""

    tokens: int
    tokens_per_s: float
    busy_fraction: float  # each peer that never stopped spent at least this share of its time on training
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """Counts and mean duration of the gossip exchanges of all peers in a run."""

    exchanges: dict[str, int]
    failures: dict[str, int]
    exchange_s: Seconds  # mean duration of successful exchanges


@dataclass(frozen=True, slots=True)
class RouteReport:
    """Numbers of micro-batches, changes of layers, and plans, in a swarm whose peers hold parts of the model."""

    routed: dict[str, int]  # the counts of a CountAudit, by field name
    moves: dict[str, int]  # number of changes of layers, by cause and outcome, such as "plan done"
    plans: int  # number of different plans that peers adopted


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How far the replicas are from the optimum and from each other at the end of the run, and errors of rosters."""

    loss: float  # mean square distance of the mean replica from the optimum of the surrogate workload
    spread: float  # root mean square distance of the peers' weights from their mean
    roster_error: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """How much the run simulated and audited, how far the replicas differ, and the digest of the run."""

    events: int  # number of actions that ran in virtual time
    checks: int  # number of workers' jobs after which the invariants were checked
    farthest: float  # largest final distance of a replica from the mean, in units of the noise of one gossip window
    digest: str  # hash of all journal lines and final weights; equal runs have equal digests


@dataclass(frozen=True, slots=True)
class RunReport:
    """The report of one simulated run. Equal scenarios give equal reports."""

    peers: int
    seconds: Seconds
    seed: int
    throughput: Throughput
    gossip: ExchangeReport
    routes: RouteReport
    replicas: ReplicaReport
    # For each fault: time from its end until all peers train and know each other; None if that never happens.
    recovery_s: dict[str, Seconds | None]
    audit: AuditReport
    by_peer: list[JsonObject]
    samples: list[Sample]

    def to_json(self) -> JsonObject:
        """Return the report as one flat JSON object: the fields of nested reports stand at the top level."""
        flat: JsonObject = {}
        for name, value in asdict(self).items():
            flat |= value if is_dataclass(getattr(self, name)) else {name: value}
        return flat


@dataclass(slots=True)
class RunStatistics:
    """Collects a run's statistics from journal lines (`line`) and from the swarm (`sample`), and makes the report."""

    swarm: SimulatedSwarm
    samples: list[Sample] = field(default_factory=list)
    totals: dict[PeerId, PeerTotals] = field(default_factory=lambda: defaultdict(PeerTotals))
    counts: MicroBatchCounts = field(default_factory=MicroBatchCounts)
    moves: Counter[str] = field(default_factory=Counter)
    plans: set[str] = field(default_factory=set)
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _pack: Any = field(default_factory=lambda: msgpack.Packer().pack)  # creating a packer for each line is slow

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Add a line of a peer's journal, written at time `t` of its clock, to the statistics and the digest."""
        event = log.event
        self._hash.update(self._pack((peer, round(t, 6), JOURNAL_LINES.name(event), JOURNAL_LINES.fields(event))))
        match event:
            case CountedLine() | UncountedLine():
                self.counts.take(event)
            case MoveLine():
                self.moves[f"{event.why} {event.outcome}"] += 1
            case PlanLine():
                self.plans.add(event.digest)
            case JoinedLine():
                self.totals[peer].begin(t)
        self.totals[peer].take(t, event)

    def sample(self) -> None:
        """Add a sample of the swarm as it is now."""
        living = self.swarm.living
        training = [member for member in living if member.training]
        of_each = distances(training[:SAMPLED])
        spread = (sum(d * d for d in of_each.values()) / len(of_each)) ** 0.5 if of_each else 0.0
        at, tokens, error = self.swarm.agenda.now, self._tokens(), self._roster_error(living[:SAMPLED])
        losses = [loss for member in training if (loss := self.totals[member.peer].work.loss) is not None]
        loss = median(losses) if losses else None
        self.samples.append(Sample(at, len(living), len(training), tokens, spread, error, loss))

    def _tokens(self) -> int:
        return sum(totals.tokens for totals in self.totals.values())

    def _roster_error(self, living: Sequence[SimulatedPeer]) -> float:
        """Return how many entries of these peers' rosters are wrong or missing, divided by the number of entries.

        An entry of a dead peer is wrong. In a large swarm peers read only some records, so no entry counts as missing.
        """
        there = {member.peer for member in self.swarm.living}
        sharded = any(member.host.node.roster.size.level for member in living if member.host)
        if len(there) < 2:
            return 0.0
        wrong, known = 0, 0
        for member in living:
            assert member.host is not None
            live = member.host.node.roster.live.keys()
            wrong += 0 if there.issuperset(live) else len(live - there)
            wrong += 0 if sharded else len(there - live) - 1
            known += max(1, len(live))
        return wrong / known

    def report(self, peers: int, faults: Sequence[Fault], checks: int, farthest: float) -> RunReport:
        """Return the report of the run so far.

        Args:
            peers: Number of peers in the scenario.
            faults: Faults of the scenario.
            checks: Number of workers' jobs that the audit of invariants checked.
            farthest: Largest final distance of a replica from the mean, in units of the noise of one gossip window.
        """
        swarm, last = self.swarm, self.samples[-1]
        by_peer = [self._of(member) for member in swarm.members]
        counted = self.counts.result(swarm.settings.fragments[-1].last).figures() if swarm.settings.memory else {}
        exchanges = sum((totals.whole.exchanges for totals in self.totals.values()), ExchangeTotals())
        mean_s = round(exchanges.done_s / max(1, exchanges.outcomes["done"]), 4)
        loss = loss_of_mean(member for member in swarm.living if member.training)
        return RunReport(
            peers,
            swarm.agenda.now,
            swarm.seed,
            self._throughput(by_peer),
            ExchangeReport(dict(exchanges.outcomes), dict(exchanges.failures), mean_s),
            RouteReport(counted, dict(self.moves), len(self.plans)),
            ReplicaReport(loss, last.spread, last.roster_error),
            self._recoveries(faults),
            AuditReport(swarm.agenda.events, checks, round(farthest, 2), self._digest()),
            by_peer,
            self.samples,
        )

    def _throughput(self, by_peer: Sequence[JsonObject]) -> Throughput:
        tokens = self._tokens()
        busy = [one["busy_fraction"] for one in by_peer if one["lives"] == 1 and one["alive"]]
        sent, received = (sum(one[name] for one in by_peer) for name in ("sent_bytes", "received_bytes"))
        return Throughput(tokens, round(tokens / self.swarm.agenda.now, 1), min(busy, default=0.0), sent, received)

    def _of(self, member: SimulatedPeer) -> JsonObject:
        totals = self.totals[member.peer]
        joined_at = totals.lives[-1].joined or 0.0 if totals.lives else 0.0
        since, busy_s = totals.work.stepped_at - joined_at, totals.work.spent.training
        node = member.host.node if member.host is not None else None
        return {
            "peer": member.peer,
            "lives": member.lives,
            "alive": member.alive,
            "tokens": totals.tokens,
            "tokens_per_s": round(totals.tokens / since, 1) if since > 0 else 0.0,
            "busy_fraction": round(min(1.0, busy_s / since), 4) if since > 0 else 0.0,
            "sent_bytes": node.traffic.sent_bytes if node else 0,
            "received_bytes": node.traffic.received_bytes if node else 0,
            "exchanges": dict(node.gossip.counts.outcomes) if node else {},
        }

    def _recoveries(self, faults: Sequence[Fault]) -> dict[str, Seconds | None]:
        """Return, for each fault, the time from its end until all peers train and know each other; None if never."""
        good = [one.at for one in self.samples if 0 < one.live == one.training and not one.roster_error]
        ends = {str(fault): fault.at + fault.lasts for fault in faults}
        return {name: next((round(at - over, 2) for at in good if at >= over), None) for name, over in ends.items()}

    def _digest(self) -> str:
        """Return a hash of all journal lines in their order, and of all weights at the end."""
        for member in self.swarm.members:
            for held in member.host.training.gossip.fragments if member.host is not None else ():
                self._hash.update(held.live.theta.float().numpy().tobytes())
        return str(self._hash.hexdigest())

"""What a simulated run reports: figures of the whole swarm and of each peer, samples on the way, and a digest."""

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

SAMPLED = 256  # peers that a sample looks at closely


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm at one moment of virtual time."""

    at: Seconds
    live: int
    training: int
    tokens: int  # trained so far, by all peers together
    spread: float
    roster_error: float  # mean over peers: wrong entries, over those there should be
    loss: float | None  # the median of the training peers' last losses; None: no step was taken


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the peers trained and moved. `busy_fraction`: the least of the peers that lived through the run."""

    tokens: int
    tokens_per_s: float
    busy_fraction: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """Gossip exchanges by outcome, failed ones by reason, and the mean time of those done."""

    exchanges: dict[str, int]
    failures: dict[str, int]
    exchange_s: Seconds


@dataclass(frozen=True, slots=True)
class RouteReport:
    """What became of micro-batches and spans, where peers hold spans of the model."""

    routed: dict[str, int]  # micro-batches by what became of them: core/journal/micro_batch_counts.py
    moves: dict[str, int]  # changes of span, by why and outcome: "plan done"
    plans: int  # different plans that were followed


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The replicas and the rosters at the end."""

    loss: float
    spread: float
    roster_error: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What identifies the run, and what its audit has seen. `farthest`: a replica's distance, in windows' noise."""

    events: int
    checks: int
    farthest: float
    digest: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """One simulated run. The same scenario gives the same report."""

    peers: int
    seconds: Seconds
    seed: int
    throughput: Throughput
    gossip: ExchangeReport
    routes: RouteReport
    replicas: ReplicaReport
    recovery_s: dict[str, Seconds | None]  # by fault; None: not before the end
    audit: AuditReport
    by_peer: list[JsonObject]
    samples: list[Sample]

    def to_json(self) -> JsonObject:
        """One flat object: the figures of each group stand beside the others."""
        flat: JsonObject = {}
        for name, value in asdict(self).items():
            flat |= value if is_dataclass(getattr(self, name)) else {name: value}
        return flat


@dataclass(slots=True)
class RunStatistics:
    """Reads the peers' journals as they are written, and takes samples."""

    swarm: SimulatedSwarm
    samples: list[Sample] = field(default_factory=list)
    totals: dict[PeerId, PeerTotals] = field(default_factory=lambda: defaultdict(PeerTotals))
    counts: MicroBatchCounts = field(default_factory=MicroBatchCounts)
    moves: Counter[str] = field(default_factory=Counter)
    plans: set[str] = field(default_factory=set)
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _pack: Any = field(default_factory=lambda: msgpack.Packer().pack)  # one packer for all lines: there are many

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Takes one journal line of a peer, written at its clock's time `t`."""
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
        living = self.swarm.living
        training = [member for member in living if member.training]
        apart = distances(training[:SAMPLED])
        spread = (sum(d * d for d in apart.values()) / len(apart)) ** 0.5 if apart else 0.0
        at, tokens, error = self.swarm.agenda.now, self._tokens(), self._roster_error(living[:SAMPLED])
        losses = [loss for member in training if (loss := self.totals[member.peer].work.loss) is not None]
        loss = median(losses) if losses else None
        self.samples.append(Sample(at, len(living), len(training), tokens, spread, error, loss))

    def _tokens(self) -> int:
        return sum(totals.tokens for totals in self.totals.values())

    def _roster_error(self, living: Sequence[SimulatedPeer]) -> float:
        """Where the roster is sharded nobody has to know everybody: only the dead that are still in it count."""
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
        """The run so far. `checks` and `farthest` come from the audit."""
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
        """The time from the end of each fault until there are peers, and all train and know each other."""
        good = [one.at for one in self.samples if 0 < one.live == one.training and not one.roster_error]
        ends = {str(fault): fault.at + fault.lasts for fault in faults}
        return {name: next((round(at - over, 2) for at in good if at >= over), None) for name, over in ends.items()}

    def _digest(self) -> str:
        """The hash of all journal lines in their order, and of all weights at the end."""
        for member in self.swarm.members:
            for held in member.host.training.gossip.fragments if member.host is not None else ():
                self._hash.update(held.live.theta.float().numpy().tobytes())
        return str(self._hash.hexdigest())

"""The rules of micro-batches that travel through several peers.

    counted      no layer's weights count a micro-batch twice, whichever peer retried or restarted. The audit
                 goes by what the sums of gradients hold, not by what their peers believe
    told         the journals' `counted` lines say exactly what the sums held
    accounted    where nothing went wrong a micro-batch counts in all layers, or in none, or a journal says which
                 peer threw its gradients away
    covered      a layer's last living holder does not let go of it
    bounded      executions, decisions that wait to be told, held activations and the ledger have limits
    converges    all peers that follow a plan follow the same one, soon after some peer found it
    goes on      while each layer has a holder and nothing is wrong with the network, micro-batches are counted

Assertions in sim/surrogate_stages.py check that activations and gradients come where they belong.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.pipeline import commits
from decentral.comm.pipeline.admission import MOST_HELD
from decentral.comm.pipeline.execution_table import JOBS_AT_ONCE
from decentral.comm.pipeline.next_peer import CANDIDATES
from decentral.comm.wire.messages import Offer
from decentral.core.ids import PeerId
from decentral.core.jobs import MOST_UNDER_WAY
from decentral.core.journal.events import CountedLine, UncountedLine
from decentral.core.journal.micro_batch_counts import Span, covered, overlap
from decentral.core.units import Seconds
from decentral.scheduler.placement.plans import SwarmPlan
from decentral.sim.host import VirtualHost
from decentral.sim.invariants.evidence import Evidence
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.surrogate import SurrogateWorkload
from decentral.sim.surrogate_stages import SurrogateGradient

MOST_IN_SUMS = 64  # times a peer's capacity: a sum may wait for LONGEST_S
MOST_OUTBOXES = 8  # times the number of living peers
LONGEST_S = 60.0  # in which a micro-batch of these swarms is committed or aborted
CONVERGED_S = 40.0  # in which all peers have seen each other and all plans, and have evaluated those
ROUTE_STALLED_S = 2 * LONGEST_S  # without a micro-batch counted anywhere
COUNTED_EVERYWHERE_S = 2 * LONGEST_S + 5.0  # after its first count a micro-batch counts everywhere, or never will


@dataclass(slots=True)
class UnmatchedGradients:
    """Gradients of which only one is known so far: that a sum held them, or that the journal counted them."""

    life: int
    summed: deque[SurrogateGradient] = field(default_factory=deque)
    journaled: deque[SurrogateGradient] = field(default_factory=deque)


@dataclass(slots=True)
class RouteAudit:
    """Compares sums of gradients with journals, holders with fragments, and plans with one another."""

    evidence: Evidence
    counted: dict[tuple[str, int], list[Span]] = field(default_factory=dict)  # by origin peer and number
    first_at: dict[tuple[str, int], Seconds] = field(default_factory=dict)
    thrown_away: set[tuple[str, int]] = field(default_factory=set)
    troubled_at: Seconds = 0.0  # the last moment at which a layer had no holder or a peer could not be reached
    counted_at: Seconds = 0.0
    _unmatched: dict[PeerId, UnmatchedGradients] = field(default_factory=dict)
    _holders: dict[int, dict[PeerId, int]] = field(default_factory=dict)  # by fragment: peer, and which life
    _followed: dict[PeerId, tuple[SwarmPlan | None, Seconds]] = field(default_factory=dict)  # a plan, and since when
    _there: frozenset[tuple[PeerId, int]] = frozenset()  # the peers that train, and in which life
    _changed_at: Seconds = 0.0  # when `_there` last changed

    # Event by event

    def stepped(self, host: VirtualHost) -> None:
        """Takes the gradients of a sum that has been applied to the weights."""
        training = host.training
        if not isinstance(training, SurrogateWorkload):
            return
        for one in training.span.stages.applied:
            name = (one.origin, one.number)
            spans = self.counted.setdefault(name, [])
            spans.append((one.first, one.last))
            self.first_at.setdefault(name, host.agenda.now)
            if overlap(spans):
                self.evidence.violated("counted", f"{host.peer} counts {name} in layers {spans[-1]} again", host)
        self.counted_at = host.agenda.now
        self._compare(host, summed=training.span.stages.applied)

    def logged(self, host: VirtualHost, line: CountedLine | UncountedLine) -> None:
        """Takes a line of a peer's journal."""
        if isinstance(line, UncountedLine):
            self.thrown_away |= {(one.origin, one.number) for one in line.of}
        elif isinstance(host.training, SurrogateWorkload):
            self._compare(host, journaled=[SurrogateGradient(*one) for one in line.of])

    def _compare(
        self, host: VirtualHost, summed: Iterable[SurrogateGradient] = (), journaled: Iterable[SurrogateGradient] = ()
    ) -> None:
        life = self.evidence.life(host.peer)
        unmatched = self._unmatched.get(host.peer)
        if unmatched is None or unmatched.life != life:
            unmatched = self._unmatched[host.peer] = UnmatchedGradients(life)
        unmatched.summed.extend(summed)
        unmatched.journaled.extend(journaled)
        while unmatched.summed and unmatched.journaled:
            held, told = unmatched.summed.popleft(), unmatched.journaled.popleft()
            if held != told:
                self.evidence.violated("told", f"the journal says {told}, the sum held {held}", host)

    # Now and then

    def check(self) -> None:
        """The rules that hold at any time."""
        now, living = self.evidence.swarm.agenda.now, self.evidence.swarm.living
        for member in living:
            self._check_bounds(member, len(living))
        self._check_holders(living)
        layers = len(self.evidence.swarm.settings.fragments)
        routed = any(len(one.host.node.setup.fragments) < layers for one in living if one.training and one.host)
        if self.evidence.network_trouble_at == now or not all(self._holders.values()) or not routed:
            self.troubled_at = now  # of peers that each hold the whole model nothing is routed
        quiet_since = max(self.troubled_at, self.counted_at)
        if now - quiet_since > ROUTE_STALLED_S:
            self.evidence.violated("goes on", f"nothing was counted for {now - quiet_since:.0f} s", None)
        self._check_plans(living, now)

    def _check_plans(self, living: list[SimulatedPeer], now: Seconds) -> None:
        there = frozenset((member.peer, member.lives) for member in living if member.training)
        if there != self._there:
            self._there, self._changed_at = there, now
        quiet_since = max(self.troubled_at, self._changed_at)
        followed: list[tuple[SimulatedPeer, SwarmPlan]] = []
        for member in living:
            spans = member.host.node.span_manager if member.training and member.host is not None else None
            plan = spans.swarm_plans.adopted if spans else None
            known, since = self._followed.get(member.peer, (None, now))
            if known is None or known != plan:
                self._followed[member.peer] = plan, now
            elif now - max(since, quiet_since) > CONVERGED_S:
                followed.append((member, known))
        for member, plan in followed[1:]:
            if plan != followed[0][1]:
                first = followed[0][0].peer
                self.evidence.violated("converges", f"{member.peer} and {first} follow different plans", member.host)

    def _check_holders(self, living: list[SimulatedPeer]) -> None:
        holders: dict[int, dict[PeerId, int]] = {one.index: {} for one in self.evidence.swarm.settings.fragments}
        for member in living:
            for fragment in member.host.node.setup.fragments if member.training and member.host is not None else ():
                holders[fragment.index][member.peer] = member.lives
        there = {member.peer: member.lives for member in living}
        for index, before in self._holders.items():
            still = next((peer for peer, life in before.items() if there.get(peer) == life), None)
            if still is not None and not holders[index]:
                detail = f"{still} was the last holder of fragment {index}, and let it go"
                self.evidence.violated("covered", detail, None)
        self._holders = holders

    def _check_bounds(self, member: SimulatedPeer, living: int) -> None:
        host = member.host
        if host is None or host.node.routes is None:
            return
        routes, stage, capacity = host.node.routes, host.node.routes.stage, host.node.routes.stage.capacity
        decided = max((len(box.commit) + len(box.abort) for box in routes.commits.boxes.values()), default=0)
        graphs = host.training.span.stages.pending.values() if isinstance(host.training, SurrogateWorkload) else ()
        activations = sum(stage.memory_share(one.first, one.last) for one in graphs)
        offers = sum(isinstance(one.envelope.message, Offer) for one in host.port.asked)
        sizes: dict[str, tuple[float, float]] = {
            "executions": (len(routes.executions), MOST_HELD * capacity),
            "gradients in sums": (len(routes.ledger.entries), MOST_IN_SUMS * capacity),
            "graphs": (len(graphs), MOST_UNDER_WAY + JOBS_AT_ONCE),
            "spans' activations": (activations, capacity + JOBS_AT_ONCE),
            "offers": (offers, CANDIDATES * MOST_HELD * capacity),
            "decisions for one peer": (decided, 2 * commits.DECISIONS_KEPT),
            "peers to be told": (len(routes.commits.boxes), MOST_OUTBOXES * max(living, 4)),
        }
        for what, (size, most) in sizes.items():
            if size > most:
                self.evidence.violated("bounded", f"{member.peer}: {size:g} {what}, at most {most:g}", host)

    # At the end

    def finish(self) -> None:
        """The rule at the end of a run that had no faults."""
        layers, now = self.evidence.swarm.settings.fragments[-1].last, self.evidence.swarm.agenda.now
        old = (name for name, at in self.first_at.items() if now - at > COUNTED_EVERYWHERE_S)
        missed = [name for name in old if covered(self.counted[name]) < layers and name not in self.thrown_away]
        if missed:
            detail = f"{missed[0]} counts in layers {self.counted[missed[0]]} only"
            self.evidence.violated("accounted", detail, None)

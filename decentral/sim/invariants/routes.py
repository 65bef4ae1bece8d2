"""Check the rules of micro-batches that travel through several peers, each with a part of the model.

    counted      no layer counts a micro-batch twice, even if peers retry or restart; the audit reads the gradient sums
    told         the `counted` lines of the journals name exactly the gradients in the sums
    accounted    in a run without faults, a micro-batch counts in all layers or in none, or a journal says which peer
                 dropped its gradients
    covered      a peer does not give up a layer that no other running peer holds, unless another peer has fetched the
                 layer's state for a move under way (move.py); the layer then has a holder again soon
    copied       in a quiet swarm, a layer with one holder has a copy on another peer's disk that is at most one
                 checkpoint interval old, beside the time of a fetch
    bounded      the numbers of stage executions, undelivered commit decisions, stored activations and gradients in sums
                 have limits
    converges    soon after any change, all peers that have adopted a plan have adopted the same plan
    goes on      while each layer has a holder and the network has no fault, micro-batches are counted

A layer counts a micro-batch when it applies a sum with the micro-batch's gradient to its weights. Assertions in
sim/surrogate_stages.py check that activations and gradients arrive at the right layers.
"""

from collections import deque
from collections.abc import Iterable, Mapping
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
from decentral.peers.runtime.clock import CLOCKS_AGREE_S
from decentral.scheduler.placement.evaluate import SwarmPlan
from decentral.scheduler.placement.move import MovePhase
from decentral.sim.host import VirtualHost
from decentral.sim.invariants.evidence import Evidence, slowest_step_s
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.surrogate import SurrogateWorkload
from decentral.sim.surrogate_stages import SurrogateGradient

MOST_IN_SUMS = 64  # a peer's sums may contain this many gradients for each micro-batch that fits into its memory
MOST_OUTBOXES = 8  # a peer may owe commit or abort decisions to at most this many peers for each running peer
LONGEST_S = 60.0  # peers commit or abort a micro-batch within this time
CONVERGED_S = 40.0  # all peers must follow one plan this long after the set of training peers last changed
ROUTE_STALLED_S = 2 * LONGEST_S  # the audit fails if no peer applies a routed gradient for this time
COPIED_AFTER_S = 40.0  # rule "copied": the swarm must have been quiet for this long
COPY_SLACK_S = 10.0  # rule "copied": a copy may take this long, beside the steps for which its export waits
HAS_FETCHED = (MovePhase.LEASING, MovePhase.DRAINING, MovePhase.SWITCHING)
COUNTED_EVERYWHERE_S = 2 * LONGEST_S + 5.0  # once one layer applies a micro-batch, all layers must within this time


@dataclass(slots=True)
class UnmatchedGradients:
    """Gradients of one peer that the audit has seen either in an applied sum or in the journal, but not in both."""

    life: int
    summed: deque[SurrogateGradient] = field(default_factory=deque)  # in an applied sum, but not yet in the journal
    journaled: deque[SurrogateGradient] = field(default_factory=deque)  # in the journal, but not yet in an applied sum


@dataclass(slots=True)
class RouteAudit:
    """The audit of routed micro-batches, of holders of layers, and of plans; its methods raise Violation."""

    evidence: Evidence
    # The key (str, int) is a micro-batch: its origin peer, and the number that this peer gave it.
    counted: dict[tuple[str, int], list[Span]] = field(default_factory=dict)  # layers that applied its gradient
    first_at: dict[tuple[str, int], Seconds] = field(default_factory=dict)  # when a layer first applied its gradient
    thrown_away: set[tuple[str, int]] = field(default_factory=set)
    troubled_at: Seconds = 0.0  # last time at which a layer had no holder, or the network had a fault
    counted_at: Seconds = 0.0  # when a peer last applied a routed gradient
    _unmatched: dict[PeerId, UnmatchedGradients] = field(default_factory=dict)
    _gaps: dict[int, Seconds] = field(default_factory=dict)  # fragment -> when its last holder gave it up
    _holders: dict[int, dict[PeerId, int]] = field(default_factory=dict)  # fragment -> holder -> its number of starts
    _held_since: Seconds = 0.0  # when a layer last got or lost a holder
    _copied_at: dict[tuple[PeerId, int], Seconds] = field(default_factory=dict)  # (peer, fragment) -> time of last copy
    # The plan that each peer has adopted, and when the peer adopted it.
    _followed: dict[PeerId, tuple[SwarmPlan | None, Seconds]] = field(default_factory=dict)
    _there: frozenset[tuple[PeerId, int]] = frozenset()  # each training peer, with its number of starts
    _changed_at: Seconds = 0.0  # when `_there` last changed

    def check_applied(self, host: VirtualHost) -> None:
        """Check the rules "counted" and "told" for a sum of gradients that a peer has applied to its weights."""
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
        """Check the rule "told" for a `counted` line; record the dropped micro-batches of an `uncounted` line."""
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

    def copied(self, host: VirtualHost, fragment: int) -> None:
        """Record that a peer's disk has a new copy of a fragment."""
        self._copied_at[host.peer, fragment] = host.agenda.now

    def check(self) -> None:
        """Check the rules "covered", "copied", "bounded", "converges" and "goes on" for the present state."""
        now, living = self.evidence.swarm.agenda.now, self.evidence.swarm.living
        for member in living:
            self._check_bounds(member, len(living))
        self._check_holders(living)
        layers = len(self.evidence.swarm.settings.fragments)
        routed = any(len(one.host.node.setup.fragments) < layers for one in living if one.training and one.host)
        if self.evidence.network_trouble_at == now or not all(self._holders.values()) or not routed:
            self.troubled_at = now
        quiet_since = max(self.troubled_at, self.counted_at)
        if now - quiet_since > ROUTE_STALLED_S:
            self.evidence.violated("goes on", f"no micro-batch was counted for {now - quiet_since:.0f} s", None)
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
            if still is not None and not holders[index] and not any(_takes(one, index) for one in living):
                detail = f"{still} was the last holder of fragment {index}, and gave it up"
                self.evidence.violated("covered", detail, None)
            if still is not None and not holders[index]:
                self._gaps.setdefault(index, self.evidence.swarm.agenda.now)
        self._gaps = {index: since for index, since in self._gaps.items() if not holders[index]}
        for index, since in self._gaps.items():
            quiet_since = max(since, self._changed_at, self.evidence.network_trouble_at)
            if self.evidence.swarm.agenda.now - quiet_since > ROUTE_STALLED_S:
                self.evidence.violated("covered", f"nobody has taken fragment {index}, which was given up", None)
        self._check_copies(living, holders)
        self._held_since = self._held_since if holders == self._holders else self.evidence.swarm.agenda.now
        self._holders = holders

    def _check_copies(self, living: list[SimulatedPeer], holders: Mapping[int, Mapping[PeerId, int]]) -> None:
        evidence, now = self.evidence, self.evidence.swarm.agenda.now
        quiet_since = max(self._held_since, self._changed_at, evidence.network_trouble_at)
        troubled = any(one.byzantine or one.disk.full for one in living) or evidence.skew_s() > CLOCKS_AGREE_S
        hosts = [one.host for one in living if one.training and one.host and one.host.node.span_manager]
        if troubled or holders != self._holders or now < quiet_since + COPIED_AFTER_S or not hosts:
            return
        longest = (
            hosts[0].node.setup.config.swarm.checkpoint_every_s + COPY_SLACK_S + 2 * max(map(slowest_step_s, hosts))
        )
        for index, held_by in holders.items():
            copiers = [one.peer for one in hosts if one.peer not in held_by]
            if (
                len(held_by) == 1
                and copiers
                and not any(now <= self._copied_at.get((peer, index), 0.0) + longest for peer in copiers)
            ):
                self.evidence.violated(
                    "copied", f"fragment {index} has one holder, and no copy for {longest:.0f} s", None
                )

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

    def finish(self) -> None:
        """Check the rule "accounted", at the end of a run without faults."""
        layers, now = self.evidence.swarm.settings.fragments[-1].last, self.evidence.swarm.agenda.now
        old = (name for name, at in self.first_at.items() if now - at > COUNTED_EVERYWHERE_S)
        missed = [name for name in old if covered(self.counted[name]) < layers and name not in self.thrown_away]
        if missed:
            detail = f"micro-batch {missed[0]} counts only in layers {self.counted[missed[0]]}"
            self.evidence.violated("accounted", detail, None)


def _takes(member: SimulatedPeer, index: int) -> bool:
    """Return whether a peer has fetched a fragment for a move under way."""
    spans = member.host.node.span_manager if member.host else None
    return spans is not None and index in spans.span_move.target and spans.span_move.phase in HAS_FETCHED

"""Check a simulated swarm, while it runs, against rules that must hold under any faults.

    gossip.py        rules of gossip: whole, once, baseline, timely, folded, fresh
    routes.py        rules of micro-batches that travel through several peers
    convergence.py   rules of replicas and rosters: thrown, together, drift, roster
    eclipses.py      rules of rosters, revocations and plans while hostile nodes own a key of the DHT
    this file        saved        a peer's checkpoint is at most two checkpoint intervals old, unless its disk was full
                     holds state  no peer starts from initial weights while it can reach a peer that trains
                     bounded      the number of requests at a peer, of its own requests, of its queued jobs and of its
                                  waiting answers is limited, and each request ends in time
                     never waits  a training peer takes its next step in the time that its device needs, unless the
                                  algorithm makes it wait for others

Start reading at `InvariantAudit`. A broken rule raises Violation, with the peer's last events (evidence.py).
"""

from collections.abc import Iterator

from decentral.comm.gossip.snapshots import MAX_WAITING_PULLS
from decentral.comm.net.fair_shares import MAX_STREAMS
from decentral.comm.net.streams import READ_S, WRITE_S
from decentral.comm.wire.messages import ForwardRequest, Offer
from decentral.core import jobs
from decentral.core.choices import ALGORITHMS
from decentral.core.ids import PeerId
from decentral.core.journal.events import CountedLine, JoinedLine, PeerLeftLine, UncountedLine
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.runtime.clock import CLOCKS_AGREE_S
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.host import VirtualHost
from decentral.sim.invariants.convergence import ConvergenceAudit
from decentral.sim.invariants.eclipses import EclipseAudit
from decentral.sim.invariants.evidence import SLACK_S, Evidence, slowest_step_s
from decentral.sim.invariants.gossip import GossipAudit
from decentral.sim.invariants.routes import RouteAudit
from decentral.sim.network.virtual_network import OpenQuestion
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm

MOST_OWN_REQUESTS = 64  # a peer may have this many unanswered requests, besides Offers, which routes.py limits
MOST_OPEN = 2 * MAX_STREAMS
MOST_JOBS = 256
LONGEST_REQUEST_S = 75.0 + 60.0  # within this time, each request gets an answer or an error
# The time to read a question, to compute the answer (90 s, or longer by a forward request's `patience_s`), and to write
# the answer.
LONGEST_ANSWER_S = READ_S + 90.0 + WRITE_S + 1.0
STEP_STALLED_S = 5.0  # rule "never waits": a step may take this much longer than its device needs
SAVE_SLACK_S = 10.0  # rule "saved": a checkpoint may wait this long for jobs that were queued before it
CHECK_S = 1.0
SETTLED_S = 60.0  # this long after a join or a network fault, peers may lack each other's records


class InvariantAudit:
    """An observer of every event, effect and job of a swarm, which raises Violation when a rule is broken."""

    def __init__(self, swarm: SimulatedSwarm, injector: FaultInjector) -> None:
        """Prepare to audit this swarm. `injector` counts the swarm's faults and records false snapshots."""
        self.swarm = swarm
        self.evidence = Evidence(swarm, injector)
        self.gossip, self.routes = GossipAudit(self.evidence), RouteAudit(self.evidence)
        self.convergence = ConvergenceAudit(self.evidence)
        self.eclipses = EclipseAudit(self.evidence)
        self.checks = 0
        self._stepped_at: dict[PeerId, Seconds] = {}
        self._saved_at: dict[PeerId, Seconds] = {}  # when each peer last saved a checkpoint, or was excused from saving
        self._blocking = ALGORITHMS[swarm.settings.config.gossip.algorithm].blocking

    def handled(self, host: VirtualHost, event: PeerEvent | Stop, effects: list[PeerEffect]) -> None:
        """Check the effects of an event that a peer has handled; store the event, to show it with a later violation."""
        if not isinstance(event, jobs.Stepped):
            self.evidence.note(host, event)
        for effect in effects:
            match effect:
                case Log(JoinedLine(donors=donors)):
                    self._joined(host, bool(donors))
                case Log(PeerLeftLine(peer=peer, reason=Reason.SILENT)):
                    self.convergence.unanswered(host, peer)
                case Log(CountedLine() | UncountedLine() as line):
                    self.routes.logged(host, line)
                case jobs.Merge(fragment, _, contributions):
                    self.gossip.taken_for_merge(host, fragment, contributions)

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        """Check a job that a peer has done, and its outcome."""
        self.checks += 1
        match job, outcome:
            case jobs.CloseWindow(), jobs.WindowClosed():
                self.gossip.closed(host, outcome)
                self.convergence.closed(host, outcome.fragment)
            case _, jobs.Rested():
                self.gossip.resting.add((host.peer, outcome.fragment))
            case _, jobs.SectionsEncoded():
                self.gossip.encoded(host, outcome)
            case jobs.Merge(fragment, _, contributions), jobs.Merged(used=used):
                for one in contributions:
                    if one.peer in used:
                        self.gossip.merged(host, fragment, one)
                forged = any(self.evidence.has_forged(one.peer, one.blob) for one in contributions if one.peer in used)
                self.convergence.corrected(host, fragment, forged)
            case jobs.Seal() | jobs.Apply(), jobs.Stepped() if host.ended is None:
                self.routes.check_applied(host)
            case jobs.RetainCopy(fragment), jobs.RetainedChanged(reason=""):
                self.routes.copied(host, fragment)
            case jobs.ChangeSpan(), jobs.SpanChanged(accepted=True):
                self.gossip.moved(host)
            case _, jobs.Saved():
                self.gossip.saved(host)
                self._saved_at[host.peer] = host.agenda.now

    def check(self) -> None:
        """Check all rules about the present state of the swarm; called every CHECK_S of virtual time."""
        self.evidence.note_network()
        self.convergence.check()
        self.eclipses.check()
        for member in self.swarm.living:
            self._check_bounds(member)
        if self.swarm.settings.memory:
            self.routes.check()

    def finish(self, settled: bool) -> None:
        """Check the rules at the end of a run. If `settled` (the last fault ended long ago), also check convergence."""
        self.check()
        if not self.evidence.injector.planned:
            self.routes.finish()
        if settled:
            self.convergence.finish()

    def _check_bounds(self, member: SimulatedPeer) -> None:
        """Check the rules "saved", "bounded" and "never waits" for one peer.

        "never waits" is not checked with all-reduce or for peers with a part of the model: they must wait for others.
        """
        assert member.host is not None
        host, now = member.host, self.swarm.agenda.now
        if member.frozen:
            self._stepped_at[member.peer] = self._saved_at[member.peer] = now
            return
        self._check_saved(member, host)
        for detail in _broken_bounds(host, now):
            self.evidence.violated("bounded", f"{member.peer}: {detail}", host)
        if not member.training or self._blocking or not host.node.setup.whole:
            return
        last = max(self._stepped_at.get(member.peer, 0.0), host.engine.last_computed or 0.0)
        self._stepped_at[member.peer] = last
        longest = slowest_step_s(host) + host.engine.pace.report_s + STEP_STALLED_S
        if now - last > longest:
            self.evidence.violated("never waits", f"{member.peer} has taken no step for {longest:.0f} s", host)

    def _check_saved(self, member: SimulatedPeer, host: VirtualHost) -> None:
        """Check the rule "saved" for one peer, unless its disk is full or it has not taken its first step."""
        stepped = bool(host.node.progress.spent.total)
        if member.disk.full or not member.training or not stepped or self.swarm.settings.gradients is not None:
            self._saved_at[member.peer] = self.swarm.agenda.now
            return
        longest = 2 * host.node.setup.config.swarm.checkpoint_every_s + host.engine.pace.report_s
        longest += 2 * slowest_step_s(host) + SAVE_SLACK_S
        age_s = self.swarm.agenda.now - self._saved_at.setdefault(member.peer, self.swarm.agenda.now)
        if age_s > longest:
            self.evidence.violated("saved", f"{member.peer} has had no checkpoint for {age_s:.0f} s", host)

    def _joined(self, host: VirtualHost, from_donors: bool) -> None:
        """Check the rule "holds state" for a peer that joins. `from_donors`: whether other peers sent its weights."""
        self._stepped_at[host.peer] = self._saved_at[host.peer] = host.agenda.now
        self.gossip.joined(host, from_donors)
        restored = host.node.setup.restored_step is not None
        if from_donors or restored or host.agenda.now < self.evidence.network_trouble_at + SETTLED_S:
            return
        held = set(host.node.setup.fragments)
        for other in self.swarm.members:
            if other.training and other.peer != host.peer and not other.byzantine and other.host is not None:
                node, apart_s = other.host.node, abs(other.host.clock() - host.clock())
                if apart_s > CLOCKS_AGREE_S or not held & set(node.setup.fragments):
                    continue  # these peers cannot donate: their clocks differ too much, or they share no layers
                if (node.progress.joined_at or 0) < host.clock() - SETTLED_S:
                    self.evidence.violated("holds state", f"took initial weights while {other.peer} trains", host)


def _patience_s(question: OpenQuestion) -> Seconds:
    """Return the extra time that a request may take: `patience_s` of a forward request, 0 for other requests."""
    request = question.envelope.message
    return request.patience_s if isinstance(request, ForwardRequest) else 0.0


def _broken_bounds(host: VirtualHost, now: Seconds) -> Iterator[str]:
    """Yield one message for each limit of the rule "bounded" that a peer exceeds."""
    port, queued = host.port, len(host.engine.inbox)
    asked = sum(not isinstance(one.envelope.message, Offer) for one in port.asked)
    if len(port.open) > MOST_OPEN or asked > MOST_OWN_REQUESTS or queued > MOST_JOBS:
        yield f"{len(port.open)} open, {asked} asked, {queued} jobs"
    waits = [
        ("a request has been open", [(at, LONGEST_ANSWER_S + _patience_s(one)) for one, at in port.open.items()]),
        ("an answer has been written", [(one.writing, WRITE_S) for one in port.open if one.writing is not None]),
        ("it has waited for an answer", [(one.began, LONGEST_REQUEST_S + _patience_s(one)) for one in port.asked]),
    ]
    for what, begun in waits:
        late = [now - at for at, limit_s in begun if now - at > limit_s + SLACK_S]
        if late:
            yield f"{what} for {max(late):.0f} s"
    for exchange in host.node.gossip.running.values():
        if len(exchange.published.waiting) > MAX_WAITING_PULLS:
            yield f"{len(exchange.published.waiting)} answers wait"

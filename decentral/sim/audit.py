"""What must hold whatever goes wrong, checked while it goes.

    gossip_audit.py       whole, once, baseline, fresh, mass
    bounds_audit.py       bounded, never waits
    route_audit.py        micro-batches that travel through several peers
    convergence_audit.py  together, drift, roster
    here                  holds state: no peer starts from nothing while a peer that trains can be reached

A violation names the seed, the time, and what the peers concerned did last (evidence.py).
"""

from decentral.core import jobs
from decentral.core.machine import Effect, Log
from decentral.sim.bounds_audit import BoundsAudit
from decentral.sim.convergence_audit import ConvergenceAudit
from decentral.sim.evidence import Evidence
from decentral.sim.fault_injector import FaultInjector
from decentral.sim.gossip_audit import GossipAudit
from decentral.sim.route_audit import RouteAudit
from decentral.sim.swarm import SimulatedSwarm
from decentral.sim.virtual_host import VirtualHost

CHECK_S = 1.0
SETTLED_S = 60.0  # after trouble in the network, or after a peer has joined, until others must have found it


class InvariantAudit:
    """An Observer of every event, effect and job of a swarm. It raises Violation."""

    def __init__(self, swarm: SimulatedSwarm, injector: FaultInjector) -> None:
        self.swarm = swarm
        self.evidence = Evidence(swarm, injector)
        self.gossip, self.bounds = GossipAudit(self.evidence), BoundsAudit(self.evidence)
        self.routes, self.convergence = RouteAudit(self.evidence.violated), ConvergenceAudit(self.evidence)
        self.checks = 0  # jobs that were audited
        self._mass_checked_at = 0.0

    def handled(self, host: VirtualHost, event: object, effects: list[Effect]) -> None:
        if not isinstance(event, jobs.Stepped):
            self.evidence.note(host, event)
        for effect in effects:
            match effect:
                case Log("joined"):
                    self._joined(host, bool(effect.fields["donors"]))
                case Log("counted" | "uncounted"):
                    self.routes.logged(host, self.evidence.life(host.peer), effect)
                case jobs.Merge(fragment, _, contributions):
                    self.gossip.taken_for_merge(host, fragment, contributions)

    def done(self, host: VirtualHost, job: jobs.Job, outcome: jobs.Outcome) -> None:
        self.checks += 1
        match job, outcome:
            case jobs.CloseWindow(), jobs.WindowClosed():
                self.gossip.closed(host, outcome)
                self.convergence.closed(host, outcome.fragment)
            case jobs.Merge(fragment, _, contributions), jobs.Merged(used=used):
                for one in contributions:
                    if one.peer in used:
                        self.gossip.merged(host, fragment, one)
                self.convergence.corrected(host, fragment)
            case jobs.Absorb(fragment, contribution), jobs.Absorbed(accepted=True):
                self.gossip.absorbed(host, fragment, contribution)
            case jobs.Seal() | jobs.Apply(), jobs.Stepped() if host.ended is None:
                self.routes.stepped(host, self.evidence.life(host.peer))
            case jobs.ChangeSpan(), jobs.SpanChanged(accepted=True):
                self.gossip.moved(host)
            case _, jobs.Saved():
                self.gossip.saved(host)

    def check(self) -> None:
        """The rules that are checked every CHECK_S of virtual time."""
        settings, now = self.swarm.settings, self.swarm.agenda.now
        self.evidence.note_network()
        for member in self.swarm.living:
            self.bounds.check(member, now)
        if settings.memory:
            trouble = self.evidence.network_trouble_at == now
            self.routes.check(self.swarm.living, settings.fragments, trouble, now)
        if settings.config.gossip.algorithm == "push_sum" and now > self._mass_checked_at + CHECK_S / 2:
            self._mass_checked_at = now
            self.gossip.check_mass()

    def finish(self, settled: bool) -> None:
        """The rules at the end. `settled`: the last fault is long enough ago for all of them."""
        self.check()
        undisturbed = not self.evidence.injector.last_at
        self.routes.finish(self.swarm.settings.fragments[-1].last, self.swarm.agenda.now, undisturbed)
        if settled:
            self.convergence.finish()

    def _joined(self, host: VirtualHost, from_donors: bool) -> None:
        self.bounds.joined(host)
        self.gossip.joined(host, from_donors)
        restored = host.node.setup.restored_step is not None
        if from_donors or restored or host.agenda.now < self.evidence.network_trouble_at + SETTLED_S:
            return
        held = set(host.node.setup.fragments)
        for other in self.swarm.members:
            if not other.training or other.peer == host.peer or other.byzantine or other.host is None:
                continue
            node = other.host.node
            if (node.progress.joined_at or 0) < host.clock() - SETTLED_S and held & set(node.setup.fragments):
                self.evidence.violated("holds state", f"started from nothing while {other.peer} trains", host)

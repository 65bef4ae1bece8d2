"""Check that peers learn from each other what the records of a DHT key say, while hostile nodes own this key.

    known    a peer's roster has all but MOST_MISSING of the peers that train
    revoked  all members have a list of revocations once DELAY_RENEWALS renewals of a record have passed since the first
             member had it
    planned  all peers that take part in plans have a plan within the same time after its proposer had it

The rules are about honest peers that have trained for that time, and joined before the eclipse or through an honest
peer. They are checked only if the network had no other fault in that time.
"""

from dataclasses import dataclass, field

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.invariants.evidence import Evidence
from decentral.sim.simulated_peer import SimulatedPeer

MOST_MISSING = 0.05  # share of the training peers that a roster may lack
DELAY_RENEWALS = 3  # a record expires after this many missed renewals, a minute with the usual renewal every 20 s


@dataclass(slots=True)
class EclipseAudit:
    """The audit of rosters, revocations and plans during an eclipse; `check` may raise Violation."""

    evidence: Evidence
    _began_at: Seconds = 0.0
    # (proposer of a plan, time of the plan) -> virtual time at which the audit first saw the plan at the proposer
    proposed_at: dict[tuple[PeerId, float], Seconds] = field(default_factory=dict)
    revoked_at: dict[int, Seconds] = field(default_factory=dict)  # number of a list -> when a member first had the list

    def check(self) -> None:
        """Check the three rules; called every CHECK_S of virtual time."""
        swarm = self.evidence.swarm
        if not swarm.records.eclipsed:
            self._began_at = swarm.agenda.now
            return
        delay_s = DELAY_RENEWALS * swarm.settings.times.renew_s
        honest = [one for one in swarm.living if one.training and not one.byzantine and self._met_honest_peers(one)]
        members = [one for one in honest if _trained_for_s(one) > delay_s]
        quiet = swarm.agenda.now > self.evidence.network_trouble_at + delay_s
        due_at = swarm.agenda.now - delay_s
        self._check_revoked(members if quiet else [], honest, due_at)
        self._check_planned(members if quiet else [], honest, due_at)
        if quiet:
            self._check_known(members)

    def _met_honest_peers(self, member: SimulatedPeer) -> bool:
        """Return whether the member joined before the eclipse, or through an honest peer."""
        assert member.host is not None
        contacts, now = member.host.node.record_gossip.contacts, self.evidence.swarm.agenda.now
        before = now - _trained_for_s(member) < self._began_at
        return before or any(not self.evidence.swarm.by_peer[one].byzantine for one in contacts)

    def _check_known(self, members: list[SimulatedPeer]) -> None:
        for one in members:
            assert one.host is not None
            missing = [
                other.peer for other in members if other is not one and other.peer not in one.host.node.roster.live
            ]
            if len(missing) > MOST_MISSING * len(members):
                self.evidence.violated("known", f"{one.peer} lacks {missing}", one.host)

    def _check_revoked(self, members: list[SimulatedPeer], honest: list[SimulatedPeer], due_at: Seconds) -> None:
        for one in honest:
            self.revoked_at.setdefault(_revocations(one), self.evidence.swarm.agenda.now)
        due = max((number for number, at in self.revoked_at.items() if at < due_at), default=0)
        for one in members:
            if _revocations(one) < due:
                self.evidence.violated("revoked", f"{one.peer} does not have list {due} of revocations", one.host)

    def _check_planned(self, members: list[SimulatedPeer], honest: list[SimulatedPeer], due_at: Seconds) -> None:
        """Check that all peers that take part in plans have each proposer's plan, or a newer plan of the proposer."""
        for one in honest:
            if (time := _plans(one).get(one.peer)) is not None:
                self.proposed_at.setdefault((one.peer, time), self.evidence.swarm.agenda.now)
        for (proposer, time), at in self.proposed_at.items():
            for one in members if at < due_at else ():
                assert one.host is not None
                spans = one.host.node.span_manager
                if spans and proposer in one.host.node.roster.live and _plans(one).get(proposer, 0.0) < time:
                    self.evidence.violated("planned", f"{one.peer} does not have the plan of {proposer}", one.host)


def _trained_for_s(member: SimulatedPeer) -> Seconds:
    assert member.host is not None
    joined_at = member.host.node.progress.joined_at
    return 0.0 if joined_at is None else member.host.clock() - joined_at


def _revocations(member: SimulatedPeer) -> int:
    """Return the number of the member's list of revocations; 0 in a public swarm."""
    assert member.host is not None
    private = member.host.node.setup.private
    return private.revocations.number if private else 0


def _plans(member: SimulatedPeer) -> dict[PeerId, Seconds]:
    """Return, by proposer, the time of the newest plan that the member has from this proposer."""
    assert member.host is not None
    spans = member.host.node.span_manager
    return {one: known.plan.time for one, known in spans.swarm_plans.known.items()} if spans else {}

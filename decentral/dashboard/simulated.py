"""A simulated swarm's lines for its page.

What peers say of each other's coming and going is left out: in a large swarm each says it of each. Who lives is known
here.
"""

from dataclasses import dataclass, field
from typing import Any

from decentral.core.ids import PeerId
from decentral.core.machine import Log
from decentral.core.swarm_config import facts_of
from decentral.core.units import Seconds
from decentral.dashboard.child import DashboardProcess
from decentral.sim.run import Scenario
from decentral.sim.swarm import EPOCH, SimulatedSwarm

OF_OTHERS = ("peer_joined", "peer_left")
SIMULATION_NOTE = (
    "A simulation: time is virtual. Unless --gradients asks for it nothing is trained, a few numbers stand for the "
    "model, and their gossip is real."
)


@dataclass(slots=True)
class SimulatedPage:
    """A Watch (sim/run.py) that tells the page."""

    page: DashboardProcess
    scenario: Scenario
    _living: set[PeerId] = field(default_factory=set)

    def begins(self, swarm: SimulatedSwarm) -> None:
        settings, now = self.scenario.settings, EPOCH + swarm.agenda.now
        facts = facts_of(settings.config) | {"layers": settings.fragments[-1].last}
        self._say(now, "facts", facts={"run": settings.run, "note": SIMULATION_NOTE, **facts})
        self._say(now, "now")

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        if log.event not in OF_OTHERS:
            self.page.tell(peer, {"t": t, "event": log.event, **log.fields})

    def sampled(self, swarm: SimulatedSwarm) -> None:
        """Who began to live, who died, and what time it is."""
        now, living = EPOCH + swarm.agenda.now, {member.peer for member in swarm.living}
        for member in swarm.members:
            if member.peer in living - self._living:
                throttle = self.scenario.settings.throttles[member.number % len(self.scenario.settings.throttles)]
                place = {"device": "simulated", "region": swarm.geography.region(member.peer), "throttle": throttle}
                self._say(now, "place", peer=member.peer, **place)
        for peer in self._living - living:
            self._say(now, "missed", peer=peer, reason="crashed, or stopped", certain=True)
        self._living = living
        self._say(now, "now")

    def _say(self, t: Seconds, event: str, **fields: Any) -> None:
        self.page.tell("", {"t": t, "event": event, **fields})

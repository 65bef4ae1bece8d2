"""A simulated swarm's lines for its page.

What peers say of each other's coming and going is left out: in a large swarm each says it of each. Who lives is known
here.
"""

from dataclasses import dataclass, field

from decentral.core.ids import PeerId
from decentral.core.journal.events import GoodbyeLine, PeerJoinedLine, PeerLeftLine
from decentral.core.machine import Log
from decentral.core.received import facts_of
from decentral.core.units import Seconds
from decentral.sim.swarm import SimulatedSwarm
from decentral.sim.virtual_claims import EPOCH
from decentral.view.page.child import DashboardProcess
from decentral.view.page.source_lines import FactsLine, MissedLine, NowLine, PlaceLine

LOOKED_S = 1.0  # of virtual time, between two looks at who lives
SIMULATION_NOTE = (
    "A simulation: time is virtual. Unless --gradients asks for it nothing is trained, a few numbers stand for the "
    "model, and their gossip is real."
)


@dataclass(slots=True)
class SimulatedPage:
    """A Watch (sim/run.py) that tells the page."""

    page: DashboardProcess
    swarm: SimulatedSwarm = field(init=False)
    _living: set[PeerId] = field(default_factory=set)
    _looked_at: Seconds = 0.0  # unix time, as all lines have it

    def begin(self, swarm: SimulatedSwarm) -> None:
        self.swarm = swarm
        settings = swarm.settings
        facts = facts_of(settings.config) | {"layers": settings.fragments[-1].last}
        self.page.tell("", EPOCH, FactsLine(facts={"run": settings.run, "note": SIMULATION_NOTE} | facts))
        self.page.tell("", EPOCH, NowLine())

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        if t >= self._looked_at + LOOKED_S:
            self._look(t)
        if not isinstance(log.event, PeerJoinedLine | PeerLeftLine | GoodbyeLine):
            self.page.tell(peer, t, log.event)

    def end(self) -> None:
        self._look(EPOCH + self.swarm.agenda.now)

    def _look(self, t: Seconds) -> None:
        """Who began to live, and who does not live any more."""
        self._looked_at, living = t, {member.peer for member in self.swarm.living}
        for peer in living - self._living:
            throttle = self.swarm.settings.throttle(self.swarm.by_peer[peer].number)
            region = self.swarm.geography.region(peer)
            self.page.tell("", t, PlaceLine(peer=peer, device="simulated", region=region, throttle=throttle))
        for peer in self._living - living:
            self.page.tell("", t, MissedLine(peer=peer, reason="crashed, or stopped", certain=True))
        self._living = living

"""Send a simulated swarm's events to its live page.

The page does not receive the peers' reports that other peers joined or left, because in a large swarm every peer
reports every other peer. Instead, the page learns from the simulator which peers run.
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

LOOKED_S = 1.0
SIMULATION_NOTE = (
    "This is a simulation in virtual time. Unless --gradients trains the real model, a few numbers stand for the "
    "model; the gossip code is the real one."
)


@dataclass(slots=True)
class SimulatedPage:
    """An observer of a simulation (a `Watch` of sim/run.py) that sends the simulation's events to the page."""

    page: DashboardProcess
    swarm: SimulatedSwarm = field(init=False)
    _living: set[PeerId] = field(default_factory=set)
    _looked_at: Seconds = 0.0

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Send the run's name and settings, and a line that says that the run is a simulation."""
        self.swarm = swarm
        settings = swarm.settings
        facts = facts_of(settings.config) | {"layers": settings.fragments[-1].last}
        self.page.tell("", EPOCH, FactsLine(facts={"run": settings.run, "note": SIMULATION_NOTE} | facts))
        self.page.tell("", EPOCH, NowLine())

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Send the page a line of this peer's journal; once a virtual second, tell it which peers started or ended."""
        if t >= self._looked_at + LOOKED_S:
            self._look(t)
        if not isinstance(log.event, PeerJoinedLine | PeerLeftLine | GoodbyeLine):
            self.page.tell(peer, t, log.event)

    def end(self) -> None:
        """Tell the page, at the end of the run, which peers have started or ended since the last check."""
        self._look(EPOCH + self.swarm.agenda.now)

    def _look(self, t: Seconds) -> None:
        """Tell the page which peers have started or ended since the last check."""
        self._looked_at, living = t, {member.peer for member in self.swarm.living}
        for peer in living - self._living:
            throttle = self.swarm.settings.throttle(self.swarm.by_peer[peer].number)
            region = self.swarm.geography.region(peer)
            self.page.tell("", t, PlaceLine(peer=peer, device="simulated", region=region, throttle=throttle))
        for peer in self._living - living:
            self.page.tell("", t, MissedLine(peer=peer, reason="crashed, or stopped", certain=True))
        self._living = living

"""Where the simulated peers are: delays and rates of their links, from a topology file or from a few numbers."""

from dataclasses import dataclass, field

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.plain_text import plain_text
from decentral.core.units import Seconds
from decentral.scheduler.topology.topology import Topology

RELAY_DELAYS = 2.0  # a path through a relay is about this much longer
RELAY_RATE = 1.25e6  # bytes/s: what a volunteer's relay gives away
PROCESSING_S = 1e-4  # by the processes at both ends, of a message


@dataclass(frozen=True, slots=True)
class TypicalLink:
    """The access links of peers of which nothing else is known. Rates in bytes/s."""

    delay_s: Seconds = 0.03  # one way, of the typical link
    up: float = 2.5e6
    down: float = 12.5e6
    spread: float = 0.5  # standard deviation of the logarithm, of each figure from peer to peer


@dataclass(slots=True)
class SwarmGeography:
    """A Geography: per peer where each differs, per pair where a topology says so, and what faults do to them."""

    seed: int
    link: TypicalLink = field(default_factory=TypicalLink)
    topology: Topology | None = None
    processing_s: Seconds = PROCESSING_S
    relayed: set[PeerId] = field(default_factory=set)  # behind a NAT: others reach them through a relay
    degraded: dict[frozenset[PeerId], float] = field(default_factory=dict)  # share of a link's rate that is left
    _places: dict[PeerId, int] = field(default_factory=dict)
    _own: dict[PeerId, tuple[Seconds, float, float]] = field(default_factory=dict)  # half a delay, rates up and down

    def add(self, peer: PeerId, number: int) -> None:
        """Places a peer by its number in the swarm: the topology's places are taken in turn."""
        self._places[peer] = number
        draw = rng.stream(self.seed, "wires", number)
        typical = self.link.delay_s / 2, self.link.up, self.link.down
        half, up, down = (figure * draw.lognormvariate(0, self.link.spread) for figure in typical)
        self._own[peer] = half, up, down

    def up(self, peer: PeerId) -> float:
        return self._own[peer][1] if self.topology is None else float(self.topology.up[self._at(peer)])

    def down(self, peer: PeerId) -> float:
        return self._own[peer][2] if self.topology is None else float(self.topology.down[self._at(peer)])

    def region(self, peer: PeerId) -> str:
        """Its name in the topology; "" without one."""
        return "" if self.topology is None else plain_text(self.topology.regions[self._at(peer)])

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        return self._path_s(source, target) + self.processing_s

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        return self._path_s(source, target) + self._path_s(target, source)

    def _path_s(self, source: PeerId, target: PeerId) -> Seconds:
        if self.topology is None:
            delay_s = self._own[source][0] + self._own[target][0]
        else:
            delay_s = float(self.topology.delay_s[self._at(source), self._at(target)])
        relayed = self.relayed and (target in self.relayed or source in self.relayed)
        return delay_s * RELAY_DELAYS if relayed else delay_s

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        """The rate of the pair's own link in bytes/s, beside the two access links."""
        topology = self.topology
        rate = float("inf") if topology is None else float(topology.bandwidth[self._at(source), self._at(target)])
        if self.relayed and (target in self.relayed or source in self.relayed):
            rate = min(rate, RELAY_RATE)
        if not self.degraded:
            return rate
        rate = min(rate, self.up(source), self.down(target))
        return rate * self.degraded.get(frozenset((source, target)), 1.0)

    def _at(self, peer: PeerId) -> int:
        assert self.topology is not None
        return self._places[peer] % len(self.topology)

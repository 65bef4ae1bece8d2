"""Give simulated peers their links' delays and rates, from a topology file or at random around a typical link."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decentral.core import rng
from decentral.core.ids import PeerId
from decentral.core.plain_text import plain_text
from decentral.core.units import Seconds
from decentral.scheduler.topology.topology import Topology
from decentral.sim.network.shared_links import SiteLink

RELAY_DELAYS = 2.0  # a message through a relay takes this many times the delay of the direct path
RELAY_RATE = 1.25e6  # bytes/s of one path through a volunteer's relay
PROCESSING_S = 1e-4  # the processes at both ends together need this time for a message


@dataclass(frozen=True, slots=True)
class TypicalLink:
    """The typical access link, around which peers' links are sampled if the swarm has no topology."""

    delay_s: Seconds = 0.03
    up: float = 2.5e6  # bytes/s of the uplink
    down: float = 12.5e6  # bytes/s of the downlink
    spread: float = 0.5  # peers' delays and rates are log-normal, with this standard deviation of their logarithms


@dataclass(slots=True)
class SwarmGeography:
    """The rates and delays of all peers' links, including the effect of faults; implements `Geography`."""

    seed: int
    link: TypicalLink = field(default_factory=TypicalLink)
    topology: Topology | None = None
    processing_s: Seconds = PROCESSING_S
    relayed: set[PeerId] = field(default_factory=set)  # peers behind a NAT, which others reach through a relay
    # By pair of peers: the share of the link's rate that a fault has left.
    degraded: dict[frozenset[PeerId], float] = field(default_factory=dict)
    _places: dict[PeerId, int] = field(default_factory=dict)
    # By peer: its half of a path's delay, and its upload and download rate in bytes/s.
    _own: dict[PeerId, tuple[Seconds, float, float]] = field(default_factory=dict)

    def add(self, peer: PeerId, number: int) -> None:
        """Add a peer.

        Its links are those of the topology's peer with index `number`, modulo the number of the topology's peers.
        Without a topology, its link is sampled around the typical link.
        """
        self._places[peer] = number if self.topology is None else number % len(self.topology)
        draw = rng.stream(self.seed, "wires", number)
        typical = self.link.delay_s / 2, self.link.up, self.link.down
        half, up, down = (figure * draw.lognormvariate(0, self.link.spread) for figure in typical)
        self._own[peer] = half, up, down

    def up(self, peer: PeerId) -> float:
        """Return the rate of a peer's uplink, in bytes/s."""
        return self._own[peer][1] if self.topology is None else self.topology.up.item(self._places[peer])

    def down(self, peer: PeerId) -> float:
        """Return the rate of a peer's downlink, in bytes/s."""
        return self._own[peer][2] if self.topology is None else self.topology.down.item(self._places[peer])

    def region(self, peer: PeerId) -> str:
        """Return the name of a peer's region in the topology; "" without a topology."""
        return "" if self.topology is None else plain_text(self.topology.regions[self._places[peer]])

    def delay_s(self, source: PeerId, target: PeerId) -> Seconds:
        """Return the one-way delay of a message, processing included."""
        return self._path_s(source, target) + self.processing_s

    def round_trip_s(self, source: PeerId, target: PeerId) -> Seconds:
        """Return the round-trip time of a packet, without queues."""
        return self._path_s(source, target) + self._path_s(target, source)

    def _path_s(self, source: PeerId, target: PeerId) -> Seconds:
        if self.topology is None:
            delay_s = self._own[source][0] + self._own[target][0]
        else:
            delay_s = self.topology.delay_s.item(self._places[source], self._places[target])
        relayed = self.relayed and (target in self.relayed or source in self.relayed)
        return delay_s * RELAY_DELAYS if relayed else delay_s

    def bandwidth(self, source: PeerId, target: PeerId) -> float:
        """Return the bytes/s that the path between two peers' access links carries; infinite without a limit."""
        topology, places = self.topology, self._places
        rate = float("inf") if topology is None else topology.bandwidth.item(places[source], places[target])
        if self.relayed and (target in self.relayed or source in self.relayed):
            rate = min(rate, RELAY_RATE)
        if not self.degraded:
            return rate
        rate = min(rate, self.up(source), self.down(target))
        return rate * self.degraded.get(frozenset((source, target)), 1.0)

    def site_links(self, source: PeerId, target: PeerId) -> Sequence[SiteLink]:
        """Return the links of sites that the path between two peers uses: none, one or two."""
        if self.topology is None or not self.topology.sites:
            return ()
        own, other = self.topology.regions[self._places[source]], self.topology.regions[self._places[target]]
        if own == other:
            return ()
        sites = self.topology.sites
        leaves = [SiteLink(site.region, True, site.up) for site in sites if site.region == own]
        return leaves + [SiteLink(site.region, False, site.down) for site in sites if site.region == other]

"""What all audits of a simulated swarm share: the swarm, its faults, and how a broken rule is reported."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.peers.runtime.handlers import PeerEvent
from decentral.peers.runtime.progress import Stop
from decentral.sim.fault_injector import FaultInjector, fingerprint
from decentral.sim.host import VirtualHost
from decentral.sim.swarm import SimulatedSwarm

LATEST_EVENTS = 12  # events of a peer that a violation shows
SHOWN_CHARACTERS = 160  # of an event
SLACK_S = 1.0  # by which any time limit may be missed


class Violation(Exception):
    """A rule that must hold was broken. `latest` is what the peer concerned did last, one line for each event."""

    def __init__(self, rule: str, detail: str, at: Seconds, latest: Sequence[str]) -> None:
        super().__init__(f"{rule}: {detail}, at {at:.2f} s of virtual time")
        self.rule, self.detail, self.at, self.latest = rule, detail, at, list(latest)


@dataclass(slots=True)
class Evidence:
    """The swarm under audit. The audits find in it what peers cannot know: others' lives, clocks and faults."""

    swarm: SimulatedSwarm
    injector: FaultInjector
    network_trouble_at: Seconds = -1e9  # the last moment at which some living peer could not be reached
    _latest: dict[PeerId, deque[tuple[Seconds, PeerEvent | Stop]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LATEST_EVENTS))
    )

    def note(self, host: VirtualHost, event: PeerEvent | Stop) -> None:
        self._latest[host.peer].append((host.agenda.now, event))

    def note_network(self) -> None:
        """Looks whether something is wrong with the network or with a process at this moment."""
        network = self.swarm.network_faults
        frozen = any(member.frozen for member in self.swarm.living)
        faulty = network.sides or network.one_way or network.rates
        if faulty or frozen or self.swarm.records.late_s:
            self.network_trouble_at = self.swarm.agenda.now

    def life(self, peer: PeerId) -> int:
        return self.swarm.by_peer[peer].lives

    def skew_s(self) -> Seconds:
        """The most by which two clocks of the swarm can differ."""
        clocks = [member.clock_s for member in self.swarm.members if member.alive] or [0.0]
        return 2 * max(abs(member.skew_s) for member in self.swarm.members) + max(clocks) - min(clocks)

    def has_forged(self, peer: PeerId, blob: bytes) -> bool:
        """Whether the peer has sent this blob in the place of what it published, under a digest that is right."""
        return (peer, fingerprint(blob)) in self.injector.forged

    def violated(self, rule: str, detail: str, host: VirtualHost | None) -> NoReturn:
        latest = self._latest[host.peer] if host is not None else ()
        lines = [f"{at:9.3f} {_short(event)}" for at, event in latest]
        raise Violation(rule, detail, self.swarm.agenda.now, lines)


def _short(event: PeerEvent | Stop) -> str:
    text = repr(event)
    return text if len(text) < SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def slowest_step_s(host: VirtualHost) -> Seconds:
    """Twice the mean step at the slowest speed that the device has had: noise included."""
    engine = host.engine
    return 2 * engine.pace.step_s * max(engine.stretched, engine.slowest)

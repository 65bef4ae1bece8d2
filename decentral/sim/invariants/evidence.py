"""Define what all audits share: the swarm under audit, the latest events of its peers, and the error `Violation`."""

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

LATEST_EVENTS = 12
SHOWN_CHARACTERS = 160
SLACK_S = 1.0  # the audits extend each of their time limits by this


class Violation(Exception):
    """Raised when a simulated swarm breaks a rule."""

    def __init__(self, rule: str, detail: str, at: Seconds, latest: Sequence[str]) -> None:
        """Create the error: the rule's name, details, the virtual time, and the peer's latest events, one per line."""
        super().__init__(f"{rule}: {detail}, at {at:.2f} s of virtual time")
        self.rule, self.detail, self.at, self.latest = rule, detail, at, list(latest)


@dataclass(slots=True)
class Evidence:
    """The swarm under audit: the number of starts, clock and latest events of each peer, and the swarm's faults."""

    swarm: SimulatedSwarm
    injector: FaultInjector
    network_trouble_at: Seconds = -1e9  # last virtual time with a fault of the network or DHT, or a frozen process
    _latest: dict[PeerId, deque[tuple[Seconds, PeerEvent | Stop]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LATEST_EVENTS))
    )

    def note(self, host: VirtualHost, event: PeerEvent | Stop) -> None:
        """Store an event of a peer, to show it in a later violation."""
        self._latest[host.peer].append((host.agenda.now, event))

    def note_network(self) -> None:
        """Set `self.network_trouble_at` to now if the network or the DHT is faulty, or a process is frozen."""
        network = self.swarm.network_faults
        frozen = any(member.frozen for member in self.swarm.living)
        faulty = network.sides or network.one_way or network.rates
        if faulty or frozen or self.swarm.records.late_s:
            self.network_trouble_at = self.swarm.agenda.now

    def life(self, peer: PeerId) -> int:
        """Return how often a peer's process has been started; this number identifies the present process."""
        return self.swarm.by_peer[peer].lives

    def skew_s(self) -> Seconds:
        """Return an upper bound for the difference between the clocks of any two running peers."""
        clocks = [member.clock_s for member in self.swarm.members if member.alive] or [0.0]
        return 2 * max(abs(member.skew_s) for member in self.swarm.members) + max(clocks) - min(clocks)

    def has_forged(self, peer: PeerId, blob: bytes) -> bool:
        """Return whether the peer, as a liar, has sent this blob in a false snapshot with a valid digest."""
        return (peer, fingerprint(blob)) in self.injector.forged

    def violated(self, rule: str, detail: str, host: VirtualHost | None) -> NoReturn:
        """Raise Violation of this rule, with the latest events of the host's peer, or no events if `host` is None."""
        latest = self._latest[host.peer] if host is not None else ()
        lines = [f"{at:9.3f} {_short(event)}" for at, event in latest]
        raise Violation(rule, detail, self.swarm.agenda.now, lines)


def _short(event: PeerEvent | Stop) -> str:
    text = repr(event)
    return text if len(text) < SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def slowest_step_s(host: VirtualHost) -> Seconds:
    """Return an upper bound for a step's duration: twice the mean at the slowest speed that the peer has had."""
    engine = host.engine
    return 2 * engine.pace.step_s * max(engine.stretched, engine.slowest)

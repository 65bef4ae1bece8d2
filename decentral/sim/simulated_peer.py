"""A peer of a simulated swarm with its disk: it may live several times."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.wire.invitations import NOTHING_REVOKED, Holding, Revocations
from decentral.core.ids import PeerId
from decentral.core.journal.events import LostLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.runtime.clock import agreed_s
from decentral.peers.runtime.node import NodePhase
from decentral.sim.host import VirtualHost
from decentral.sim.surrogate import SurrogateDisk


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """A peer, its disk, and its present life if it has one."""

    number: int
    peer: PeerId
    host: VirtualHost | None = None
    disk: SurrogateDisk = field(default_factory=SurrogateDisk)
    span: tuple[int, int] = (0, 0)  # layers with which its present life began
    claiming: bool = False  # it is choosing its layers
    has_run: bool = False  # its disk knows the run: a restart needs no contact
    wiped: bool = False  # its identity is lost with its disk: nobody starts as this member any more
    address_book: dict[PeerId, None] = field(default_factory=dict)  # on its disk: the peers that it has learned of
    lives: int = 0
    skew_s: Seconds = 0.0  # of its clock
    machine_s: Seconds = 0.0  # by which its machine's clock has jumped so far
    clock_s: Seconds = 0.0  # by which its present life's clock is wrong, skew aside
    lost_lines: int = 0  # of its journal, since its disk is full
    byzantine: str = ""  # how it falsifies its answers, if it does
    stretched: float = 1.0  # how much slower than its pace it is at present
    holding: Holding | None = None  # its invitation, where the swarm is private
    revocations: Revocations = NOTHING_REVOKED  # what its disk knows to be revoked

    def begin_life(self, contacts: Iterable[PeerId]) -> None:
        """Count a life. A newcomer keeps its contacts as --join, which stands in the line that starts it again."""
        if not self.has_run:
            self.meet(contacts)
        self.has_run = True
        self.lives += 1

    def choose_layers(self) -> None:
        self.claiming = True

    def hold(self, span: tuple[int, int]) -> None:
        """Begin the life with these layers, which are chosen."""
        self.span, self.claiming = span, False

    def run(self, host: VirtualHost) -> None:
        """Let this host be the present life."""
        self.host = host
        host.engine.set_speed(self.stretched)
        host.start()

    def cease(self) -> VirtualHost | None:
        """Stop choosing layers, or keep what the next life finds on the disk. Return the host that is alive, if any."""
        self.claiming = False
        if (host := self.life) and (private := host.node.setup.private):
            self.revocations = private.revocations
        return host

    def wipe(self) -> None:
        """Lose the disk: nobody starts as this member any more."""
        self.wiped, self.has_run = True, False

    def meet(self, peers: Iterable[PeerId]) -> None:
        self.address_book |= dict.fromkeys(peers)

    def slow_down(self, times: float) -> None:
        """Compute so many times more slowly than the pace from now on, in later lives as well."""
        self.stretched = times
        if host := self.life:
            host.engine.set_speed(times)

    def skew_clock(self, seconds: Seconds) -> None:
        self.skew_s = seconds

    def jump_clock(self, seconds: Seconds) -> None:
        """Set the machine's clock. The present life goes by the time since its start (peers/runtime/clock.py)."""
        self.machine_s += seconds

    def read_clock(self, others: Iterable["SimulatedPeer"]) -> Seconds:
        """Set the clock of a new life by those of the peers that it has reached. Return its error."""
        own_s = self.machine_s + self.skew_s
        self.clock_s = self.machine_s + agreed_s([one.clock_s + one.skew_s - own_s for one in others])
        return self.clock_s

    def written(self, line: Log) -> list[Log]:
        """Return what the disk takes of a journal line: nothing while it is full, then also how many it has lost."""
        if self.disk.full:
            self.lost_lines += 1
            return []
        lost, self.lost_lines = self.lost_lines, 0
        return [Log(LostLine(lines=lost)), line] if lost else [line]

    def lie(self, how: str) -> None:
        """Falsify answers in this way from now on."""
        self.byzantine = how

    def stop_lying(self) -> None:
        self.byzantine = ""

    @property
    def life(self) -> VirtualHost | None:
        """Its host while it is alive."""
        return self.host if self.host is not None and self.host.ended is None else None

    @property
    def alive(self) -> bool:
        return self.life is not None

    @property
    def frozen(self) -> bool:
        """Whether the process is stopped, or was when it ended."""
        return self.host is not None and self.host.port.frozen

    @property
    def training(self) -> bool:
        return self.life is not None and self.life.node.phase is NodePhase.TRAINING

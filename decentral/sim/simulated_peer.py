"""Define a simulated peer: its disk, its clock and its present faults, which outlive the peer's process.

A life is the time from a start of the peer's process to the end of that process; a peer may have several lives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.wire.invitations import NOTHING_REVOKED, Holding, Revocations
from decentral.core.ids import PeerId
from decentral.core.journal.events import LostLine
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.peers.membership.records import PeerPhase
from decentral.peers.runtime.clock import agreed_s
from decentral.sim.host import VirtualHost
from decentral.sim.surrogate import SurrogateDisk


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """A peer of a simulated swarm: its disk and clock, which outlive its process, and the host of its last life."""

    number: int
    peer: PeerId
    host: VirtualHost | None = None
    disk: SurrogateDisk = field(default_factory=SurrogateDisk)
    span: tuple[int, int] = (0, 0)  # (first, last): at its last start, the peer held layers first to last - 1
    claiming: bool = False  # the process has started, and the peer is choosing its layers
    has_run: bool = False  # whether the peer can rejoin from the peers stored on its disk, without a contact
    wiped: bool = False  # the peer's disk and identity are lost, so it never starts again
    address_book: dict[PeerId, None] = field(default_factory=dict)
    lives: int = 0
    skew_s: Seconds = 0.0  # constant error of the peer's clock, from the fault `skew`
    machine_s: Seconds = 0.0  # the faults `clock` have together moved the machine's clock by this
    clock_s: Seconds = 0.0  # error of the peer's clock since its last start, without the constant part `skew_s`
    lost_lines: int = 0  # number of journal lines that the full disk has refused since it last stored a line
    byzantine: str = ""  # the lie that the peer tells, one of ALL_LIES; "" if the peer is honest
    stretched: float = 1.0  # a step takes this many times as long as at full speed
    holding: Holding | None = None
    revocations: Revocations = NOTHING_REVOKED

    def begin_life(self, contacts: Iterable[PeerId]) -> None:
        """Count a start of the process; at the first start, store `contacts` (the peers of --join) as known peers."""
        if not self.has_run:
            self.meet(contacts)
        self.has_run = True
        self.lives += 1

    def choose_layers(self) -> None:
        """Record that the peer is choosing its layers, until `layers_chosen` sets them."""
        self.claiming = True

    def layers_chosen(self, span: tuple[int, int]) -> None:
        """Set the layers [first, last) of the new life, and record that the choice of layers is over."""
        self.span, self.claiming = span, False

    def run(self, host: VirtualHost) -> None:
        """Make `host` the peer's running process, set its speed according to `self.stretched`, and start it."""
        self.host = host
        host.engine.set_speed(self.stretched)
        host.start()

    def cease(self) -> VirtualHost | None:
        """Prepare for the end of the process: store its revocations on the disk, and abandon a choice of layers.

        Returns:
            The host of the present life, which the caller must then end; None if the peer does not run.
        """
        self.claiming = False
        if (host := self.life) and (private := host.node.setup.private):
            self.revocations = private.revocations
        return host

    def wipe(self) -> None:
        """Record that the disk and the peer's identity on it are lost, so that this peer can never start again."""
        self.wiped, self.has_run = True, False

    def meet(self, peers: Iterable[PeerId]) -> None:
        """Add peers to the address book."""
        self.address_book |= dict.fromkeys(peers)

    def slow_down(self, times: float) -> None:
        """Make each step take `times` as long as at full speed, in this life and in later lives."""
        self.stretched = times
        if host := self.life:
            host.engine.set_speed(times)

    def skew_clock(self, seconds: Seconds) -> None:
        """Set the constant error of the peer's clock."""
        self.skew_s = seconds

    def jump_clock(self, seconds: Seconds) -> None:
        """Move the machine's clock. A running peer does not notice: it reads that clock only when it starts."""
        self.machine_s += seconds

    def read_clock(self, others: Iterable["SimulatedPeer"]) -> Seconds:
        """Set the peer's clock at a start, from the machine's clock and the clocks of `others`; return `clock_s`."""
        own_s = self.machine_s + self.skew_s
        self.clock_s = self.machine_s + agreed_s([one.clock_s + one.skew_s - own_s for one in others])
        return self.clock_s

    def written(self, line: Log) -> list[Log]:
        """Return the lines that are written to the journal on disk for `line`: none while the disk is full.

        The first line after a full disk is a LostLine with the number of lost lines.
        """
        if self.disk.full:
            self.lost_lines += 1
            return []
        lost, self.lost_lines = self.lost_lines, 0
        return [Log(LostLine(lines=lost)), line] if lost else [line]

    def lie(self, how: str) -> None:
        """Make the peer tell the lie `how`, one of ALL_LIES, from now on."""
        self.byzantine = how

    def stop_lying(self) -> None:
        """Make the peer answer honestly from now on."""
        self.byzantine = ""

    @property
    def life(self) -> VirtualHost | None:
        """The host of the present life; None if the peer does not run."""
        return self.host if self.host is not None and self.host.ended is None else None

    @property
    def alive(self) -> bool:
        """Whether the peer's process runs, frozen or not."""
        return self.life is not None

    @property
    def frozen(self) -> bool:
        """Whether the process is frozen; if the process has ended, whether it was frozen at the end."""
        return self.host is not None and self.host.port.frozen

    @property
    def training(self) -> bool:
        """Whether the peer has joined and trains."""
        return self.life is not None and self.life.node.phase is PeerPhase.TRAINING

"""What the user of a peer asks for by flags, and one start of that peer."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from decentral.comm.wire.identity import Identity
from decentral.core.ids import PeerId
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.units import Amount, Seconds
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.view.page.address import PageAddress

if TYPE_CHECKING:
    from decentral.engine.island import Island


@dataclass(frozen=True, slots=True)
class StartFlags:
    """The flags of `decentral.peer`, as given. PeerStart and SwarmAccess hold what a start derives from them."""

    peer: PeerFlags = field(default_factory=PeerFlags)  # as given, else as the state folder keeps them
    own: OwnInputs = NOTHING_NAMED
    config: str | None = None
    overrides: tuple[str, ...] = ()  # of --set
    join: tuple[str, ...] = ()
    join_wait: Seconds = 0.0
    invite: str | None = None
    private: bool = False
    state_dir: str | None = None
    stop_after: Amount | None = None
    plain: bool = False
    dashboard: PageAddress | None = None

    @property
    def say_config(self) -> bool:
        """Whether they say what the config of a new run is."""
        return bool(self.config or self.overrides)

    def without_address_of(self, peer: PeerId) -> "StartFlags":
        """Return these flags without the addresses in --join that are this peer's own."""
        return replace(self, join=tuple(address for address in self.join if not address.endswith(f"/p2p/{peer}")))

    def of_restart(self, has_run: bool, knows_peers: bool) -> "StartFlags":
        """Return these flags for a peer that goes on from its folder, whatever its line says of the first start."""
        begun = replace(self, config=None, overrides=(), private=False, invite=None) if has_run else self
        return replace(begun, join=()) if knows_peers else begun  # the peer at --join may be gone by now


@dataclass(frozen=True, slots=True)
class PeerStart:
    """One start of a peer: alone on its device, or as rank 0 of its island."""

    flags: StartFlags
    folder: StateFolder
    own: Identity
    device: str  # on which this process computes
    island: "Island | None" = None
    warnings: list[str] = field(default_factory=list)  # grows; the user is told when training begins

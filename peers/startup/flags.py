"""The parsed flags of `decentral.peer` (`StartFlags`), and the inputs of one start of a peer (`PeerStart`)."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from decentral.comm.wire.identity import Identity
from decentral.core.ids import PeerId
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.units import Amount, Seconds
from decentral.peers.startup.state import PeerFlags, StateFolder
from decentral.view.event_hooks import Hooks
from decentral.view.page.address import PageAddress

if TYPE_CHECKING:
    from decentral.engine.island import Island


@dataclass(frozen=True, slots=True)
class StartFlags:
    """The flags of `decentral.peer`; flags in `peer` that the user does not give come from the state folder."""

    peer: PeerFlags = field(default_factory=PeerFlags)
    own: OwnInputs = NOTHING_NAMED
    config: str | None = None
    overrides: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    join_wait: Seconds = 0.0
    invite: str | None = None
    private: bool = False
    state_dir: str | None = None
    stop_after: Amount | None = None
    plain: bool = False
    dashboard: PageAddress | None = None
    hooks: Hooks | None = None  # what --on-event and --webhook ask for; None without these flags
    resume_from: str | None = None  # where the upload to resume is; `start` needs the local folder of its download

    @property
    def say_config(self) -> bool:
        """Return whether CONFIG or --set is given, so that the flags define the config of a new run."""
        return bool(self.config or self.overrides)

    def without_address_of(self, peer: PeerId) -> "StartFlags":
        """Return a copy of these flags whose --join lacks the addresses of `peer`, which is this peer itself."""
        return replace(self, join=tuple(address for address in self.join if not address.endswith(f"/p2p/{peer}")))

    def of_restart(self, has_run: bool, knows_peers: bool) -> "StartFlags":
        """Return a copy of these flags for a restart, without the flags that the state folder replaces.

        Args:
            has_run: Whether the folder has a run, which replaces CONFIG, --set, --private and --invite.
            knows_peers: Whether the folder has peers' addresses. They replace --join, whose peer may be gone by now.
        """
        begun = replace(self, config=None, overrides=(), private=False, invite=None) if has_run else self
        return replace(begun, join=()) if knows_peers else begun


@dataclass(frozen=True, slots=True)
class PeerStart:
    """The inputs of one start of a peer, with one device or as rank 0 of several devices (an island)."""

    flags: StartFlags
    folder: StateFolder
    own: Identity
    device: str
    island: "Island | None" = None
    warnings: list[str] = field(default_factory=list)

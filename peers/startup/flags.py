"""The parsed flags of `decentral.peer` (`StartFlags`), and the inputs of one start of a peer (`PeerStart`)."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from decentral.comm.wire.identity import Identity
from decentral.comm.wire.invitations import is_private
from decentral.core.config import OWN_KEYS, Config, load, tree_of
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.own_inputs import FLAGS, NOTHING_NAMED, OwnInputs
from decentral.core.units import Amount, Seconds
from decentral.peers.startup.invitation_files import founded
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

    def require_consistent(self, kept: tuple[RunId, Config] | None, folder: Path) -> list[str]:
        """Check that the flags do not contradict the folder's run or each other; return what is not used, as warnings.

        The command line that made the folder is accepted again, since supervisors restart a peer with the same command.

        Args:
            kept: The run in the state folder; None if it has none.
            folder: The state folder.

        Raises:
            UserError: If flags contradict the run or each other; the error names the flag to leave out.
        """
        if self.join and self.say_config:
            raise UserError("with --join the config comes from the swarm; leave CONFIG and --set out")
        if kept and self.say_config and self._config_in_place_of(kept[1]).digest() != kept[1].digest():
            settled = "whose config cannot change, and differs from these CONFIG and --set"
            raise UserError(f"{folder} belongs to run {kept[0]}, {settled}; leave CONFIG and --set out")
        unused = self._require_kept_inputs(kept, folder) if kept and self.say_config else []
        if self.private and (self.join or (kept and not founded(folder))):
            raise UserError("--private begins a new swarm; leave it out to join one, or to resume a peer")
        if self.invite and not (self.join or kept):
            raise UserError("--invite is for an existing swarm: give --join ADDR, the address of one of its peers")
        if self.invite and not Path(self.invite).exists():
            raise UserError(f"--invite {self.invite}: no such file")
        if self.invite and kept and not is_private(kept[0]):
            raise UserError(f"--invite: {folder} belongs to run {kept[0]}, which is public; use another --state-dir")
        return unused

    def _require_kept_inputs(self, kept: tuple[RunId, Config], folder: Path) -> list[str]:
        """Raise UserError if CONFIG or --set names another own file or upload destination than the folder's run.

        The folder's values are used, and only flags change them. So a value that no flag replaces must be the same, or
        that of the folder's first start: a supervisor repeats that command after a user has changed the value by flags.
        Return a warning for each such value that is not used.
        """
        first, unused = StateFolder(folder).first_inputs(), list[str]()
        said, known = tree_of(self.config, self.overrides), kept[1].model_dump(by_alias=True)
        for section, fields in OWN_KEYS.items():
            values = said.get(section)
            for key, field_name in fields.items():
                given = values.get(key) if isinstance(values, dict) else None
                old, flag = known[section][key], FLAGS[field_name]
                if given is None or getattr(self.own, field_name) is not None:
                    continue
                if _same_place(given, old):
                    continue
                if _same_place(given, getattr(first, field_name)):
                    now = f"a later start has set it to {old}" if old else "a later start has ended it"
                    unused.append(f"{section}.{key} {given} is not used: {now} by {flag}, as {folder} keeps")
                    continue
                change = f"change it by decentral.peer --state-dir {quote(str(folder))} {flag} {quote(str(given))}"
                belongs = f"{folder} belongs to run {kept[0]}, where {section}.{key} is {old or 'not set'}, not {given}"
                raise UserError(f"{belongs}; leave {section}.{key} out, or {change}")
        return unused

    def _config_in_place_of(self, kept: Config) -> Config:
        """Return the config of CONFIG and --set, but with the paths and digests of own files that `kept` has.

        Raises:
            UserError: If the config cannot be loaded.
        """
        found = load(self.config, self.overrides, kept.own_inputs)
        model = found.model.model_copy(update={"weights": kept.model.weights})
        data = found.data.model_copy(update={"tokenizer_digest": kept.data.tokenizer_digest})
        return found.model_copy(update={"model": model, "data": data})


def _same_place(one: str, other: str | None) -> bool:
    """Return whether two texts are equal, or paths of the same file; `other` is of a state folder, with absolute paths.

    A path that leads nowhere in this working folder is taken for one that began the run in another working folder.
    """
    if other is None or one == other or os.path.realpath(one) == os.path.realpath(other):
        return other is not None
    return os.path.isabs(other) and not os.path.exists(one) and other.endswith(os.sep + os.path.normpath(one))


@dataclass(frozen=True, slots=True)
class PeerStart:
    """The inputs of one start of a peer, with one device or as rank 0 of several devices (an island)."""

    flags: StartFlags
    folder: StateFolder
    own: Identity
    device: str
    island: "Island | None" = None
    warnings: list[str] = field(default_factory=list)

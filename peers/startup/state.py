"""A peer's state folder, with its identity, run, flags, measurements, journal and checkpoint. Start at `StateFolder`.

Only one process at a time may use a folder. Its lock ends with the process, even if the process is killed. If a start
fails before the peer trains, the files that this start made are removed, and the folder too if this start made it.
"""

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from decentral.comm.net import ports
from decentral.core import config, foreign_file, received, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError, writing
from decentral.core.ids import RunId
from decentral.core.own_inputs import NO_UPLOAD, NOTHING_NAMED, PATHS, OwnInputs
from decentral.core.peer_folders import CHECKPOINT, JOURNAL, KEY, changed_at
from decentral.core.plain_text import plain_text
from decentral.core.rank_place import Split
from decentral.core.units import KiB, Measured
from decentral.model.families import CONFIG_FILE
from decentral.peers.startup.running_peers import running_peers
from decentral.store.places import is_address

MADE_BY_A_START = (  # name patterns of the files that a start makes before the peer trains
    *("lock", "identity.key", "listen.json", "profile.json", "flags.json", "peers.json", "journal.jsonl", "compiled"),
    *("position.json", "names.key", "data-position.json", "data-position-*.json"),
    *("invitation.json", "founder.json", "founder.lock", "revoked"),
)
MOST_STATE_BYTES = 64 * KiB  # longer JSON files in the folder are refused unread; the largest has at most 10 KiB
PEERS_NAMED = 8  # an error about several peers' folders names at most this many
DISK_REMEDY = "make room there, or use another --state-dir"


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """The flags that a peer keeps in `flags.json` for its next start; `run.json` has the user's own files and code."""

    device: str = "auto"
    memory: int | None = None  # bytes
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    region: str = ""
    throttle: float = 1.0
    metrics: tuple[str, int] | None = None  # host and port of the metrics server
    log: tuple[str, ...] = ()
    name: str | None = None  # None: the host name
    upload_keep: int = 3  # number of uploaded checkpoints that are kept, the latest ones
    upload_rate: float | None = None  # bytes/s; None: no limit
    split: Split = Split.AUTO  # how several devices divide the model


_PEER_FLAGS = TypeAdapter(PeerFlags)
_MEASURED = TypeAdapter(Measured)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """One peer's state folder; its files are read when asked for, and written atomically."""

    path: Path

    @classmethod
    @contextmanager
    def claim(cls, wanted: str | None) -> Iterator["StateFolder"]:
        """Yield the folder `wanted`, or for None a new folder swarm/peer-N; lock the folder until the context ends.

        A missing folder is made. If the folder has no run when the context ends, the files and folders that this start
        made are removed.

        Raises:
            UserError: If the folder cannot be made, or another process uses it.
        """
        path = Path(wanted) if wanted else new_path()
        _refuse_file(path)
        made = [one for one in (path, *path.parents) if not one.exists()]
        before = _made_by_a_start(path)
        with writing("--state-dir", path, "folder"):
            path.mkdir(parents=True, exist_ok=True)
            lock = foreign_file.opened_to_lock(path / "lock")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                stop = f"end it with: decentral stop {shlex.quote(str(path))}"
                raise UserError(
                    f"--state-dir {path} is in use by {cls(path)._user()}; choose another folder, or {stop}"
                ) from None
            claimed = cls(path.absolute())
            try:
                yield claimed
            finally:
                if not (claimed.path / "run.json").exists():
                    left = _made_by_a_start(claimed.path) - before
                    _remove(claimed.path, left, [one.absolute() for one in made])

    @classmethod
    def prepare(cls, path: Path) -> None:
        """Make the folder of a peer that another process will run; raise UserError as `claim` does."""
        with writing("--state-dir", path, "folder"):
            path.mkdir(parents=True, exist_ok=True)
        with cls.claim(str(path)):
            pass

    def _user(self) -> str:
        """Return the name and the process id of the peer that uses the folder, as far as they are known."""
        name: str | None = None
        with suppress(UserError):
            name = self.read_flags().name
        pid = next((peer.pid for peer in running_peers() if peer.folder == self.path.resolve()), None)
        return (f"peer {plain_text(name)}" if name else "another peer") + (f" (pid {pid})" if pid else "")

    def read_run(self, own: OwnInputs = NOTHING_NAMED) -> tuple[RunId, config.Config] | None:
        """Return the run that this folder belongs to, with its config; None if the folder has no run.

        Only the folder's own peer calls this, since the config then names the files and code that `run.json` names.

        Args:
            own: The user's own files and code as given now; they replace those that the folder names.

        Raises:
            UserError: If `run.json` is damaged.
        """
        kept = self._kept_run()
        return None if kept is None else (kept[0], kept[1].adopt(own.or_else(kept[2])))

    def look_at_run(self) -> tuple[RunId, received.ReceivedConfig] | None:
        """Return the run that this folder belongs to, without the files and code that `run.json` names.

        Commands that only read a folder call this, since somebody else may have written the folder. None: no run.

        Raises:
            UserError: If `run.json` is damaged.
        """
        kept = self._kept_run()
        return None if kept is None else kept[:2]

    def _kept_run(self) -> tuple[RunId, received.ReceivedConfig, OwnInputs] | None:
        kept = self._read("run.json")
        if kept is None:
            return None
        run, text, named = kept.get("run"), kept.get("config"), kept.get("own", {})
        if not isinstance(run, str) or not isinstance(text, str) or not isinstance(named, dict):
            raise UserError(f"{self.path / 'run.json'} names no run; move it away, or use another --state-dir")
        try:
            settings = received.received(text)
        except UserError as error:
            raise UserError(f"{self.path / 'run.json'}: {error}; or use another --state-dir") from None
        return RunId(run), settings, _inputs(named)

    def first_inputs(self) -> OwnInputs:
        """Return the user's own files and code at the first start of the folder's run; later flags may replace them."""
        kept = self._read("run.json") or {}
        return _inputs(kept.get("begun") or kept.get("own"))

    def write_run(self, run: RunId, settings: config.Config) -> None:
        """Write the run, its config, and the absolute paths of the user's own files and code to `run.json`.

        The file keeps the paths of the first start, too.

        Raises:
            UserError: If the file cannot be written.
        """
        named = asdict(settings.own_inputs)
        for key in PATHS:
            on_hub = key == "data" and settings.data.facts.may_be_on_hub and not Path(named[key] or "").exists()
            if named[key] is not None and not on_hub:
                named[key] = str(Path(named[key]).absolute())
        if (place := named["upload"]) is not None and place != NO_UPLOAD and not is_address(place):
            named["upload"] = str(Path(place).absolute())
        first = self.first_inputs()
        begun = named if first == NOTHING_NAMED else asdict(first)
        self._write("run.json", {"run": run, "config": settings.canonical(), "own": named, "begun": begun})

    def data_name(self) -> str:
        """Return the name of the data that the peer reads, without the folders before it; "" if it names none.

        The result is only shown to people. The name of a data set on Hugging Face is returned whole.
        """
        kept = self._kept_run()
        data = (kept[2].data if kept else None) or ""
        return Path(data).name if data.startswith("/") else data

    def restore(self, upload: Path) -> None:
        """Begin with the checkpoint and the run of a downloaded upload, unless the folder has a run.

        Args:
            upload: The folder of the download. The folder stays, since other peers of this machine may begin with it.

        Raises:
            UserError: If the upload names no run, the folder has another run, or a file cannot be written.
        """
        found, kept = StateFolder(upload).look_at_run(), self.look_at_run()
        if found is None or (kept is not None and kept[0] != found[0]):
            belongs = f"{self.path} belongs to run {kept[0]}" if kept else "the upload names no run"
            raise UserError(f"--resume-from: {belongs}; use another --state-dir, or name another upload")
        if kept is None:
            fresh = self.path / f"{CHECKPOINT}.new"
            with writing("--state-dir", self.path, "folder"):
                fresh.unlink(missing_ok=True)
                try:
                    os.link(upload / CHECKPOINT, fresh)
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(upload / CHECKPOINT, fresh)
                fresh.replace(self.path / CHECKPOINT)
            self._write("run.json", {"run": found[0], "config": found[1].canonical()})

    def read_flags(self) -> PeerFlags:
        """Return the flags in the folder's `flags.json`; the default flags if the file is missing.

        Raises:
            UserError: If `flags.json` is damaged.
        """
        repeat = "remove it, and repeat the flags of this peer (--listen, --device, ...) on the command line"
        try:
            return _PEER_FLAGS.validate_python(self._read("flags.json", repeat) or {})
        except ValidationError:
            raise UserError(f"{self.path / 'flags.json'} is damaged; {repeat}") from None

    def write_flags(self, flags: PeerFlags) -> None:
        """Write these flags to `flags.json`.

        Raises:
            UserError: If the file cannot be written.
        """
        self._write("flags.json", asdict(flags))

    def listen(self, wanted: Sequence[str]) -> list[str]:
        """Return the addresses to listen at: `wanted`, or all interfaces if `wanted` is empty.

        Port 0 (tcp/0), which lets the system choose a port, is replaced by the port of the last start.
        """
        kept = self._hints("listen.json")
        asked = list(wanted) or ports.anywhere()
        found = ((address, kept.get(address, address)) for address in asked)
        return [known if isinstance(known, str) else address for address, known in found]

    def listening(self) -> list[str]:
        """Return the loopback address at which this folder's peer was last reachable; [] if it is not known."""
        known = self._hints("listen.json").get(ports.LOOPBACK)
        return [known] if isinstance(known, str) else []

    def write_listen(self, addresses: Sequence[str], wanted: Sequence[str] = ()) -> None:
        """Store which port the system chose for each `tcp/0` address, so that the next start uses the same port.

        Args:
            addresses: The addresses at which this start listens, with their ports.
            wanted: The addresses of --listen.
        """
        if kept := ports.chosen(addresses, wanted):
            with suppress(UserError):  # the peer works without this file: its record tells other peers the new port
                self._write("listen.json", kept)

    def read_profile(self, key: str) -> Measured | None:
        """Return the measurements stored with this key (device, model, version); None if there are no valid ones."""
        kept = self._hints("profile.json")
        try:
            return _MEASURED.validate_python(kept.get("measured")) if kept.get("key") == key else None
        except ValidationError:
            return None

    def write_profile(self, key: str, measured: Measured) -> None:
        """Store the measurements with this key in place of older ones; if that fails, the next start measures again."""
        with suppress(UserError):
            self._write("profile.json", {"key": key, "measured": asdict(measured)})

    def _read(self, name: str, remedy: str = "move it away, or use another --state-dir") -> dict[str, object] | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            content: dict[str, object] = strict_json.loads(foreign_file.read_text(path, MOST_STATE_BYTES))
            if not isinstance(content, dict):
                raise ValueError("expected a JSON object")
            return content
        except (OSError, ValueError):
            raise UserError(f"{path} is damaged; {remedy}") from None

    def _hints(self, name: str) -> dict[str, object]:
        """Return the content of a file that the peer can do without; {} if the file is missing or damaged."""
        try:
            return self._read(name) or {}
        except UserError:
            return {}

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        """Write a file unless it already has this content, so that a peer can restart while the disk is full.

        Raises:
            UserError: If the file cannot be written.
        """
        path, data = self.path / name, json.dumps(content, indent=1).encode()
        try:
            with suppress(OSError):
                if foreign_file.read_bytes(path, len(data)) == data:
                    return
            write_atomically(path, data)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); {DISK_REMEDY}") from None


def require_meant(wanted: str, says_run: bool, says_peer: bool = False) -> None:
    """Check that the user did not mistype `--state-dir`, so that no new swarm starts by mistake.

    A folder with a run is accepted, and so is an existing folder in which no peer was started. Any other folder either
    does not exist, or has no run because its first start was killed. Such a folder is accepted if the command names a
    run. It is also accepted if the command has flags of a peer and no folder of another peer is beside this folder.

    Args:
        wanted: The value of --state-dir.
        says_run: Whether the command names a run, by CONFIG or --join.
        says_peer: Whether the command has flags that `PeerFlags` keeps.

    Raises:
        UserError: If the folder is not accepted, is a file, has a model, or contains the folders of peers.
    """
    path = Path(wanted)
    _refuse_file(path)
    if (path / "run.json").exists():
        return
    refuse_model(path)
    refuse_swarm(path)
    there = path.exists()
    beside = _peers_in(path.parent)
    if not (says_run or (says_peer and not beside)) and (not there or _made_by_a_start(path)):
        known = f" (peers beside it: {beside})" if beside else ""
        found = "has no run: the start that made it ended too early" if there else "does not exist"
        start = "to start one there, add a CONFIG, such as default, or --join ADDR"
        raise UserError(f"--state-dir {path} {found}{known}; to resume a peer, correct the path; {start}")


def _refuse_file(path: Path) -> None:
    if path.is_file():
        meant = f"did you mean {path.parent}?" if (path.parent / "run.json").exists() else "name a folder"
        raise UserError(f"--state-dir {path} is a file; {meant}")


def refuse_model(path: Path) -> None:
    """Raise UserError if a folder is an exported model's, so that no peer's files are mixed with the model's."""
    if (path / CONFIG_FILE).exists() and not _peers_in(path):
        raise UserError(f"--state-dir {path} has a model ({CONFIG_FILE}); choose another folder for the peers' files")


def refuse_swarm(path: Path) -> None:
    """Raise UserError if a folder has the folders of peers and is no peer's own, where a command expects one peer's."""
    if (inside := _peers_in(path)) and not (path / "run.json").exists():
        raise UserError(
            f"--state-dir expects the folder of one peer; {path} holds folders of peers: name one: {inside}"
        )


def refuse_peer(path: Path) -> None:
    """Raise UserError if a folder is one peer's and has no folders of peers, where a command expects a swarm's."""
    if any((path / name).exists() for name in ("run.json", KEY)) and not _peers_in(path):
        whole = f"for its whole swarm give --state-dir {path.parent}; " if _peers_in(path.parent) else ""
        alone = f"for this peer alone: decentral.peer --state-dir {path}"
        raise UserError(f"--state-dir {path} is the folder of one peer; {whole}{alone}")


def _inputs(named: object) -> OwnInputs:
    """Return the own inputs in a part of `run.json`; a value that is not text counts as not named."""
    known = named if isinstance(named, dict) else {}
    return OwnInputs.of(lambda name: text if isinstance(text := known.get(name), str) else None)


def _made_by_a_start(folder: Path) -> set[str]:
    """Return the names of the files in this folder that a start made, with temporary files of interrupted writes."""
    patterns = (pattern + end for pattern in MADE_BY_A_START for end in ("", ".new"))
    return {found.name for pattern in patterns for found in folder.glob(pattern)}


def _peers_in(folder: Path) -> str:
    """Return the names of up to PEERS_NAMED peers' folders in `folder` as text, and how many more there are."""
    found = sorted(run.parent.name for run in folder.glob("*/run.json"))
    return ", ".join(found[:PEERS_NAMED]) + (f" and {len(found) - PEERS_NAMED} more" if found[PEERS_NAMED:] else "")


def _remove(folder: Path, names: Iterable[str], made: Sequence[Path]) -> None:
    """Remove these files from the folder, the lock last; then remove the folders `made`, innermost first, if empty.

    Errors are ignored.
    """
    for path in sorted((folder / name for name in names), key=lambda path: path.name == "lock"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        for one in made:
            one.rmdir()


def stopped_beside(folder: Path) -> Path | None:
    """Return the folder of a stopped peer beside `folder`, the one that trained last; None if there is none."""
    folder = folder.absolute()
    running = {peer.folder for peer in running_peers()}
    beside = [run.parent for run in folder.parent.glob("*/run.json") if run.parent.resolve() not in running]
    return max((one for one in beside if one != folder), key=lambda one: changed_at(one / JOURNAL), default=None)


def new_path() -> Path:
    """Return the first swarm/peer-N that does not exist: a peer without --state-dir uses this folder."""
    paths = (Path(f"swarm/peer-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())

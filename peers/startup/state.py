"""A peer's state folder: identity.key, run.json, flags.json, listen.json, profile.json, peers.json, journal.jsonl,
checkpoint.

One process at a time may use it; the lock goes with the process, however that ends. A start that fails before the peer
trains settles nothing, and leaves no folder behind where there was none.
"""

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from decentral.comm.net import ports
from decentral.core import config, received, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.core.errors import UserError, writing
from decentral.core.ids import RunId
from decentral.core.own_inputs import NOTHING_NAMED, OwnInputs
from decentral.core.units import Measured

MADE_BY_A_START = (  # names, with wildcards, of what a start makes before the peer trains
    *("lock", "identity.key", "listen.json", "profile.json", "flags.json", "peers.json", "journal.jsonl", "compiled"),
    *("position.json", "names.key", "data-position.json", "data-position-*.json"),
    *("invitation.json", "founder.json", "founder.lock", "revoked"),
)
PEERS_NAMED = 8  # in an error
DISK_REMEDY = "make room there, or use another --state-dir"


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """Flags that stay the same across restarts of a peer, kept in `flags.json`; `OwnInputs` are kept in `run.json`."""

    device: str = "auto"
    memory: int | None = None  # bytes
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    region: str = ""
    throttle: float = 1.0
    metrics: tuple[str, int] | None = None  # host and port
    log: tuple[str, ...] = ()


_PEER_FLAGS = TypeAdapter(PeerFlags)
_MEASURED = TypeAdapter(Measured)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """One peer's folder. Its files are read when they are asked for, and written atomically."""

    path: Path

    @classmethod
    @contextmanager
    def claim(cls, wanted: str | None) -> Iterator["StateFolder"]:
        """Lock the folder, and make it if need be; if none is named, it is a new swarm/peer-N.

        Unless a run is written into it meanwhile, what this start has made is removed again. Raises UserError.
        """
        path = Path(wanted) if wanted else new_path()
        made = [one for one in (path, *path.parents) if not one.exists()]
        before = _made_by_a_start(path)
        with writing("--state-dir", path, "folder"):
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"--state-dir {path} is in use by another peer; choose another folder") from None
            claimed = cls(path.absolute())
            try:
                yield claimed
            finally:
                if not (claimed.path / "run.json").exists():
                    left = _made_by_a_start(claimed.path) - before
                    _remove(claimed.path, left, [one.absolute() for one in made])

    def read_run(self, own: OwnInputs = NOTHING_NAMED) -> tuple[RunId, config.Config] | None:
        """The run that this folder belongs to; None for a new folder. Raises UserError if the file is damaged.

        `own`: what the user names this time, before what was named when the folder was made.
        """
        kept = self._read("run.json")
        if kept is None:
            return None
        run, text, named = kept.get("run"), kept.get("config"), kept.get("own", {})
        if not isinstance(run, str) or not isinstance(text, str) or not isinstance(named, dict):
            raise UserError(f"{self.path / 'run.json'} does not name a run; move it away, or use another --state-dir")
        try:
            settings = received.received(text)
        except UserError as error:
            raise UserError(f"{self.path / 'run.json'}: {error}; or use another --state-dir") from None
        kept_own = OwnInputs.of(lambda name: text if isinstance(text := named.get(name), str) else None)
        return RunId(run), settings.adopt(own.or_else(kept_own))

    def write_run(self, run: RunId, settings: config.Config) -> None:
        """Keeps the config, and what the user has named; files with their whole path. Raises UserError if the disk
        refuses.
        """
        named = asdict(settings.own_inputs)
        for key in ("data", "model_folder", "tokenizer"):
            on_hub = key == "data" and settings.data.facts.may_be_on_hub and not Path(named[key] or "").exists()
            if named[key] is not None and not on_hub:
                named[key] = str(Path(named[key]).absolute())
        self._write("run.json", {"run": run, "config": settings.canonical(), "own": named})

    def read_flags(self) -> PeerFlags:
        """Return the flags that the folder keeps, or the defaults. Raises UserError if the file is damaged."""
        repeat = "remove it, and repeat the flags of this peer (--listen, --device, ...) on the command line"
        try:
            return _PEER_FLAGS.validate_python(self._read("flags.json", repeat) or {})
        except ValidationError:
            raise UserError(f"{self.path / 'flags.json'} is damaged; {repeat}") from None

    def write_flags(self, flags: PeerFlags) -> None:
        """Keep these flags. Raises UserError if the disk refuses."""
        self._write("flags.json", asdict(flags))

    def listen(self, wanted: Sequence[str]) -> list[str]:
        """The addresses to listen at: `wanted`, else where this peer listened before, so that others find it again."""
        kept = self._hints("listen.json")
        asked = list(wanted) or ports.anywhere()
        found = ((address, kept.get(address, address)) for address in asked)
        return [known if isinstance(known, str) else address for address, known in found]

    def listening(self) -> list[str]:
        """Where a peer with this folder can be reached from this machine."""
        known = self._hints("listen.json").get(ports.LOOPBACK)
        return [known] if isinstance(known, str) else []

    def write_listen(self, addresses: Sequence[str], wanted: Sequence[str] = ()) -> None:
        """Keep the port that `tcp/0` became, of the addresses that were `wanted` too."""
        by_protocol: dict[str, set[str]] = {}  # "ip4" or "ip6": its ports
        for address in addresses:
            if "/tcp/" in address:
                by_protocol.setdefault(address.split("/")[1], set()).add(address.split("/tcp/")[1].split("/")[0])
        every, kept = {port for found in by_protocol.values() for port in found}, {}
        usual = (ports.ALL_IPV4, ports.ALL_IPV6, ports.LOOPBACK)
        for place in (*usual, *(one for one in wanted if one.endswith("/tcp/0"))):
            numbers = by_protocol.get(place.split("/")[1], every)
            if len(numbers) == 1:
                kept[place] = place.removesuffix("0") + min(numbers)
        if kept:
            with suppress(UserError):  # another port is found by the records that others read
                self._write("listen.json", kept)

    def read_profile(self, key: str) -> Measured | None:
        """What was measured of this device, model and version; None if nothing was, or the file is damaged."""
        kept = self._hints("profile.json")
        try:
            return _MEASURED.validate_python(kept.get("measured")) if kept.get("key") == key else None
        except ValidationError:
            return None

    def write_profile(self, key: str, measured: Measured) -> None:
        with suppress(UserError):  # it is measured again
            self._write("profile.json", {"key": key, "measured": asdict(measured)})

    def _read(self, name: str, remedy: str = "move it away, or use another --state-dir") -> dict[str, object] | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            content: dict[str, object] = strict_json.loads(path.read_text())
            if not isinstance(content, dict):
                raise ValueError("not a mapping")
            return content
        except (OSError, ValueError):
            raise UserError(f"{path} is damaged; {remedy}") from None

    def _hints(self, name: str) -> dict[str, object]:
        """The content of a file that the peer can do without; nothing, if it is damaged."""
        try:
            return self._read(name) or {}
        except UserError:
            return {}

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        """A file that has this content is left as it is, so that a peer starts again on a full disk."""
        path, data = self.path / name, json.dumps(content, indent=1).encode()
        try:
            if not path.exists() or path.read_bytes() != data:
                write_atomically(path, data)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); {DISK_REMEDY}") from None


def require_meant(wanted: str, says_run: bool, says_peer: bool = False) -> None:
    """Raise UserError if `--state-dir` is probably mistyped, so that no new swarm starts by mistake.

    A folder that does not exist, or whose first start was killed before it had a run, is accepted if the command names
    a run (`says_run`), or has flags of a peer (`says_peer`) and no other peer's folder is beside it. A folder that
    holds the folders of peers is not the folder of one peer.
    """
    path = Path(wanted)
    if (path / "run.json").exists():
        return
    if inside := _peers_in(path):
        raise UserError(
            f"--state-dir expects the folder of one peer; {path} holds folders of peers: name one: {inside}"
        )
    there = path.exists()
    beside = _peers_in(path.parent)
    if not (says_run or (says_peer and not beside)) and (not there or _made_by_a_start(path)):
        known = f" (peers beside it: {beside})" if beside else ""
        found = "has no run: the start that made it ended too early" if there else "does not exist"
        start = "to start one there, add a CONFIG, such as default, or --join ADDR"
        raise UserError(f"--state-dir {path} {found}{known}; to resume a peer, correct the path; {start}")


def _made_by_a_start(folder: Path) -> set[str]:
    """Return the names of what a start has made in this folder, and of temporary files of a write that was killed."""
    patterns = (pattern + end for pattern in MADE_BY_A_START for end in ("", ".new"))
    return {found.name for pattern in patterns for found in folder.glob(pattern)}


def _peers_in(folder: Path) -> str:
    """Return the names of the peers' folders in this one, some of them if there are many; "" if there are none."""
    found = sorted(run.parent.name for run in folder.glob("*/run.json"))
    return ", ".join(found[:PEERS_NAMED]) + (f" and {len(found) - PEERS_NAMED} more" if found[PEERS_NAMED:] else "")


def _remove(folder: Path, names: Iterable[str], made: Sequence[Path]) -> None:
    """Remove these names of the folder, and folders of `made` that are empty then; the innermost comes first.

    The lock goes last: until then no other peer begins there. What the disk does not remove stays.
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


def new_path() -> Path:
    """The folder of a peer for which the user has named none."""
    paths = (Path(f"swarm/peer-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())

"""Read and write the files of a private swarm: invitations, the founder's keys, and the list of revocations.

    FILE (--out, --invite)     an invitation with its secrets, as the founder sends it to a member
    STATE/invitation.json      a member's copy of that file
    STATE/revoked              the latest list of revocations that a member has seen, kept across restarts
    STATE/founder.json         the founder's keys, invitations and revocations; only in the folder that began the run

All files but STATE/revoked are secret: only their owner may read them.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from decentral.comm.wire.invitations import (
    FOR_EVER,
    ID_BYTES,
    KEY_BYTES,
    MAX_REVOCATIONS_BYTES,
    MOST_REVOKED,
    NOTHING_REVOKED,
    FounderKeys,
    Holding,
    Invitation,
    Permission,
    Revocations,
    founded_by,
    invitation_of,
)
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.core import foreign_file
from decentral.core.atomic_file import SECRET, write_atomically
from decentral.core.errors import ProtocolError, UserError, writing
from decentral.core.ids import PeerId, RunId
from decentral.core.strict_json import JsonObject
from decentral.peers.runtime.clock import SwarmClock

MAX_INVITATION_BYTES = 16 * 1024  # longer files are refused unread; an invitation has about 700 bytes
MAX_FOUNDER_BYTES = (
    16 * 1024 * 1024
)  # a longer founder.json is refused unread; one with MOST_INVITED entries is shorter
MOST_INVITED = 10_000  # at most this many invitations in one swarm; each takes up to 900 bytes of founder.json
FOUNDER = "founder"
FORMAT = 1
KEYS = ("secret", "swarm_key")
KEPT_REVOKED_S = 30 * 86400.0  # a revoked invitation stays on the list for at least this long after its expiry
MOST_LISTS = 1 << 62  # lists of revocations have lower numbers than this; a higher number shows a damaged file


def write_holding(path: Path, holding: Holding) -> None:
    """Write an invitation with its secrets to a file that only its owner can read.

    Raises:
        UserError: If the file cannot be written.
    """
    one = holding.invitation
    content = {
        "decentral invitation": FORMAT,
        "note": "whoever has this file can take part as its holder: send it as you would send a password",
        "run": one.run,
        "id": one.text(),
        "for": one.holder,
        "until": one.until,
        "may": one.may.value,
        "founder": one.founder.hex(),
        "key": one.key.hex(),
        "signature": one.signature.hex(),
        "secret": holding.secret.hex(),
        "swarm_key": holding.swarm_key.hex(),
    }
    _write(path, content)


def read_holding(path: Path) -> Holding:
    """Return the invitation in a file, with its secrets.

    Raises:
        UserError: If the file cannot be read, has no invitation signed by the run's founder, or has a wrong key.
    """
    content = _read(path, "not a valid invitation")
    try:
        if content.get("decentral invitation") != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {content.get('decentral invitation')!r}")
        texts = (str(content[name]) for name in ("id", "founder", "key", "signature", "secret", "swarm_key"))
        number, founder, key, signature, secret, swarm_key = map(bytes.fromhex, texts)
        about = (str(content["run"]), number, str(content["for"]), float(content["until"]), str(content["may"]))
        invitation = invitation_of((*about, founder, key, signature))
        invitation.require_founder()
        if len(secret) != KEY_BYTES or len(swarm_key) != KEY_BYTES:
            raise ValueError(f"`secret` and `swarm_key` need {KEY_BYTES} bytes, not {len(secret)} and {len(swarm_key)}")
        holding = Holding(invitation, secret, swarm_key)
        holding.require_secret()
    except (KeyError, ValueError, TypeError, OverflowError, ProtocolError) as error:
        raise UserError(f"{path} is not a valid invitation ({error}); ask the founder for it again") from None
    return holding


@dataclass(slots=True)
class FounderFile:
    """The founder's keys, invitations and revocations, as stored in founder.json; each change writes the file."""

    path: Path
    keys: FounderKeys
    invited: list[JsonObject] = field(default_factory=list)  # keys of an entry: `id`, `for` (holder), `until`, `may`
    number: int = 0
    revoked: frozenset[bytes] = frozenset()

    @classmethod
    def create(cls, folder: Path, name: str) -> "FounderFile":
        """Make the keys of a new private run with this name, write them to the folder, and return the founder's file.

        Raises:
            UserError: If the file cannot be written.
        """
        founder = cls(founder_path(folder), FounderKeys.create(name, os.urandom))
        founder.save()
        return founder

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator["FounderFile"]:
        """Return the founder's file of this folder, locked against other commands until the context ends.

        Raises:
            UserError: If the folder has no founder's file, or the file is damaged.
        """
        path = founder_path(folder)
        if not founded(folder):
            raise UserError(
                f"--state-dir {folder}: no private swarm was begun there; name the folder of the founder's peer, "
                "which began the swarm with python -m decentral.peer --private"
            )
        with writing("--state-dir", folder, "folder"):
            lock = foreign_file.opened_to_lock(folder / "founder.lock")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield cls._parsed(path, _read(path, "not a founder's file"))

    @classmethod
    def _parsed(cls, path: Path, content: JsonObject) -> "FounderFile":
        """Return the founder's file with this content.

        Raises:
            UserError: If any part is invalid. A wrong key or number must not get into a list that members accept.
        """
        try:
            secret, swarm_key = (bytes.fromhex(content[name]) for name in KEYS)
            keys = FounderKeys(RunId(content["run"]), secret, swarm_key)
            invited, number = content["invited"], content["number"]
            revoked = frozenset(map(bytes.fromhex, content["revoked"]))
            if len(keys.swarm_key) != KEY_BYTES or not founded_by(keys.run, keys.public):
                raise ValueError(f"`swarm_key` needs {KEY_BYTES} bytes, and `secret` must be the key of `run`")
            if type(number) is not int or not 0 <= number < MOST_LISTS:
                raise ValueError(f"`number` must be an integer from 0 to {MOST_LISTS - 1}; it is {number!r:.60}")
            if not isinstance(invited, list):
                raise ValueError("`invited` must be a list")
            if not all(len(one) == ID_BYTES for one in revoked):
                raise ValueError(f"each id in `revoked` must have {ID_BYTES} bytes; at least one has another length")
            for one in invited:
                _require_noted(one)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}); restore it from a backup") from None
        return cls(path, keys, invited, number, revoked)

    def save(self) -> None:
        """Write the file so that only its owner can read it.

        Raises:
            UserError: If the file cannot be written.
        """
        keys = {"run": self.keys.run, "secret": self.keys.secret.hex(), "swarm_key": self.keys.swarm_key.hex()}
        revoked = sorted(one.hex() for one in self.revoked)
        _write(self.path, {**keys, "invited": self.invited, "number": self.number, "revoked": revoked})

    def invite(self, holder: str, until: float, may: Permission) -> Holding:
        """Return a new invitation with its secrets, after recording it in the file.

        Args:
            holder: A name for the invited person or machine.
            until: When the invitation expires, unix seconds; from FOR_EVER on, it never expires.
            may: What the invitation allows.

        Raises:
            UserError: If MOST_INVITED invitations were made, or the file cannot be written.
        """
        if len(self.invited) >= MOST_INVITED:
            raise UserError(f"{self.path} has {MOST_INVITED} invitations, the most of one swarm; begin another one")
        until = min(until, FOR_EVER)
        holding = self.keys.invite(holder, until, may, os.urandom)
        one = holding.invitation
        self.invited.append({"id": one.text(), "for": holder, "until": until, "may": may.value})
        self.save()
        return holding

    def revoke(self, number: bytes, now: float) -> Revocations:
        """Revoke an invitation, write the file, and return the next list of revocations.

        If the list is full, invitations that expired more than KEPT_REVOKED_S ago are removed from it first. Younger
        ones stay, since a member's clock may be wrong.

        Args:
            number: Id of the invitation.
            now: Unix time in seconds.

        Raises:
            UserError: If the file has no such invitation, the list is still full, or the file cannot be written.
        """
        ends = {str(one.get("id")): float(one.get("until", 0.0)) for one in self.invited}
        if number.hex() not in ends:
            raise UserError(f"no invitation {number.hex()} was made here; --list shows the invitations of this folder")
        lasting = self.revoked
        if len(lasting | {number}) > MOST_REVOKED:
            lasting = frozenset(one for one in lasting if ends.get(one.hex(), FOR_EVER) > now - KEPT_REVOKED_S)
        return self._revoked(lasting | {number}, self.number + 1)

    def latest(self) -> Revocations:
        """Return the present list of revocations, signed by the founder."""
        return self.keys.revoke(self.number, self.revoked)

    def catch_up(self, packed: bytes) -> None:
        """Add the revocations of another list that this founder has signed, and write the file.

        If the file was restored from a backup, members may have a newer list. Members ignore a list with a lower number
        than theirs, so the next list gets a higher number. A list with another signature is ignored.

        Raises:
            UserError: If the list is full, or the file cannot be written.
        """
        with suppress(ProtocolError):
            found = Revocations.parse(packed, self.keys.run, self.keys.public)
            if not found.ids <= self.revoked or found.number > self.number:
                self._revoked(self.revoked | found.ids, max(self.number, found.number) + 1)

    def _revoked(self, ids: frozenset[bytes], number: int) -> Revocations:
        if len(ids) > MOST_REVOKED:
            raise UserError(
                f"the list of revocations is full: {MOST_REVOKED} invitations that have not expired; "
                "begin another private swarm, with invitations for shorter times"
            )
        self.number, self.revoked = number, ids
        self.save()
        return self.latest()

    def own_holding(self, may: Permission, until: float) -> Holding:
        """Return an invitation for the founder's own peer, valid until unix time `until`; the file does not list it."""
        return self.keys.invite(FOUNDER, until, may, os.urandom)


def member(folder: Path, holding: Holding, peer: PeerId, clock: SwarmClock) -> PrivateSwarm:
    """Return this peer's membership of a private swarm, with the revocations that the folder has stored."""
    known, one = NOTHING_REVOKED, holding.invitation
    with suppress(ProtocolError):
        known = Revocations.parse(kept_revocations(folder), one.run, one.founder)
    return PrivateSwarm(peer, holding, clock, known)


def keep_revocations(folder: Path, packed: bytes) -> None:
    """Write the latest list of revocations to the folder; errors are ignored, since the DHT still has the list."""
    with suppress(OSError):
        write_atomically(folder / "revoked", packed)


def kept_revocations(folder: Path) -> bytes:
    """Return the folder's list of revocations without checking its signature; b"" if it cannot be read."""
    try:
        return foreign_file.read_bytes(folder / "revoked", MAX_REVOCATIONS_BYTES)
    except OSError:
        return b""


def founded(folder: Path) -> bool:
    """Return whether a private swarm was begun in this folder."""
    return founder_path(folder).exists()


def kept_path(folder: Path) -> Path:
    """Return the path of a member's invitation in its state folder."""
    return folder / "invitation.json"


def described(one: Invitation, now: float) -> str:
    """Return in words what an invitation allows and for how long, such as `to train, for 2.5 days`."""
    if one.until >= FOR_EVER:
        return f"to {one.may}, without an end"
    left = one.until - now
    return (
        f"to {one.may}, for {left / 86400:.1f} days"
        if left > 2 * 86400
        else f"to {one.may}, for {left / 3600:.1f} hours"
    )


def _require_noted(one: JsonObject) -> None:
    """Check that an entry of `invited` has the fields that `FounderFile.invite` writes.

    Raises:
        KeyError, TypeError, ValueError: If a field is missing or invalid.
    """
    until, holder = one["until"], one["for"]
    Permission(one["may"])
    fits = type(until) in (int, float) and 0 <= until <= FOR_EVER and isinstance(holder, str)
    if not fits or len(bytes.fromhex(one["id"])) != ID_BYTES or one["id"] != bytes.fromhex(one["id"]).hex():
        raise ValueError(
            f"each entry of `invited` needs an `id` of {ID_BYTES} bytes in hex, a name `for`, a time `until`"
        )


def founder_path(folder: Path) -> Path:
    """Return the path of the founder's file in a state folder."""
    return folder / "founder.json"


def _read(path: Path, wrong: str) -> JsonObject:
    try:
        most = MAX_FOUNDER_BYTES if path.name == "founder.json" else MAX_INVITATION_BYTES
        content = json.loads(foreign_file.read_text(path, most))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is {wrong} ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is {wrong} (expected a JSON object)")
    return content


def _write(path: Path, content: JsonObject) -> None:
    try:
        write_atomically(path, json.dumps(content, indent=1).encode() + b"\n", SECRET)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None

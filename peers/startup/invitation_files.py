"""The files of a private swarm: an invitation, the founder's keys, and the founder's list of revocations.

    FILE (--out, --invite)     an invitation with its secrets
    STATE/invitation.json      the same, as a member keeps it
    STATE/revoked              the latest list that a member has seen, so that no restart forgets it
    STATE/founder.json         the founder's keys, and what was invited and revoked; only where the run began

All but the list are secrets, and can be read by their owner only.
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
from decentral.core.atomic_file import SECRET, write_atomically
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.strict_json import JsonObject
from decentral.peers.runtime.clock import SwarmClock

MAX_INVITATION_BYTES = 16 * 1024  # of an invitation; it has about 700
FOUNDER = "founder"  # whom the founder's own invitation is for
FORMAT = 1
KEYS = ("secret", "swarm_key")  # of a founder
KEPT_REVOKED_S = 30 * 86400.0  # after it has expired an invitation stays on the list for so long at least
MOST_LISTS = 1 << 62  # of revocations: a number beyond it is none that a founder has counted to


def write_holding(path: Path, holding: Holding) -> None:
    """Writes an invitation with its secrets, for its owner only. Raises UserError."""
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
    """Raises UserError if the file is no invitation that its run's founder has signed."""
    content = _read(path, "no invitation")
    try:
        if content.get("decentral invitation") != FORMAT:
            raise ValueError("another format")
        texts = (str(content[name]) for name in ("id", "founder", "key", "signature", "secret", "swarm_key"))
        number, founder, key, signature, secret, swarm_key = map(bytes.fromhex, texts)
        about = (str(content["run"]), number, str(content["for"]), float(content["until"]), str(content["may"]))
        invitation = invitation_of((*about, founder, key, signature))
        invitation.require_founder()
        if len(secret) != KEY_BYTES or len(swarm_key) != KEY_BYTES:
            raise ValueError("a key is cut")
        holding = Holding(invitation, secret, swarm_key)
        holding.require_secret()
    except (KeyError, ValueError, TypeError, OverflowError, ProtocolError) as error:
        raise UserError(f"{path} is no invitation ({error}); ask the founder for it again") from None
    return holding


@dataclass(slots=True)
class FounderFile:
    """The founder's keys, and what was made with them."""

    path: Path
    keys: FounderKeys
    invited: list[JsonObject] = field(default_factory=list)  # id, for, until, may
    number: int = 0  # of the latest list of revocations
    revoked: frozenset[bytes] = frozenset()

    @classmethod
    def create(cls, folder: Path, name: str) -> "FounderFile":
        """Begins a private run of this name, and keeps its keys. Raises UserError."""
        founder = cls(founder_path(folder), FounderKeys.create(name, os.urandom))
        founder.save()
        return founder

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator["FounderFile"]:
        """The founder's file, which no other process changes meanwhile; its peer may run. Raises UserError."""
        path = founder_path(folder)
        if not founded(folder):
            raise UserError(
                f"--state-dir {folder}: no private swarm was begun there (python -m decentral.peer --private)"
            )
        with (folder / "founder.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield cls._parsed(path, _read(path, "no founder's file"))

    @classmethod
    def _parsed(cls, path: Path, content: JsonObject) -> "FounderFile":
        """Raises UserError if a part is spoilt: what is signed with wrong keys or numbers nobody takes back."""
        try:
            secret, swarm_key = (bytes.fromhex(content[name]) for name in KEYS)
            keys = FounderKeys(RunId(content["run"]), secret, swarm_key)
            invited, number = content["invited"], content["number"]
            revoked = frozenset(map(bytes.fromhex, content["revoked"]))
            if len(keys.swarm_key) != KEY_BYTES or not founded_by(keys.run, keys.public):
                raise ValueError("the keys are not those of the run")
            if type(number) is not int or not 0 <= number < MOST_LISTS:
                raise ValueError("the number of the list is none")
            if not isinstance(invited, list) or not all(len(one) == ID_BYTES for one in revoked):
                raise ValueError("a list is none")
            for one in invited:
                _require_noted(one)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}); get it back from a copy") from None
        return cls(path, keys, invited, number, revoked)

    def save(self) -> None:
        """Raises UserError."""
        keys = {"run": self.keys.run, "secret": self.keys.secret.hex(), "swarm_key": self.keys.swarm_key.hex()}
        revoked = sorted(one.hex() for one in self.revoked)
        _write(self.path, {**keys, "invited": self.invited, "number": self.number, "revoked": revoked})

    def invite(self, holder: str, until: float, may: Permission) -> Holding:
        """A new invitation, which is noted. Raises UserError."""
        holding = self.keys.invite(holder, until, may, os.urandom)
        one = holding.invitation
        self.invited.append({"id": one.text(), "for": holder, "until": until, "may": may.value})
        self.save()
        return holding

    def revoke(self, number: bytes, now: float) -> Revocations:
        """The next list, with this invitation and those revoked before. Raises UserError.

        What has expired long ago leaves it where there is no room for more: by a clock that is ahead, here or at a
        member, an invitation may seem to have expired that others still take.
        """
        ends = {str(one.get("id")): float(one.get("until", 0.0)) for one in self.invited}
        if number.hex() not in ends:
            raise UserError(f"no invitation {number.hex()} was made here; --list shows those that were")
        lasting = self.revoked
        if len(lasting | {number}) > MOST_REVOKED:
            lasting = frozenset(one for one in lasting if ends.get(one.hex(), FOR_EVER) > now - KEPT_REVOKED_S)
        return self._revoked(lasting | {number}, self.number + 1)

    def latest(self) -> Revocations:
        """The list as others take it."""
        return self.keys.revoke(self.number, self.revoked)

    def catch_up(self, packed: bytes) -> None:
        """What this list revokes stays revoked, if the founder has signed it. Raises UserError.

        A file that was got back from a copy does not know it, and nobody would take a list with a lower number.
        """
        with suppress(ProtocolError):
            found = Revocations.parse(packed, self.keys.run, self.keys.public)
            if not found.ids <= self.revoked or found.number > self.number:
                self._revoked(self.revoked | found.ids, max(self.number, found.number) + 1)

    def _revoked(self, ids: frozenset[bytes], number: int) -> Revocations:
        if len(ids) > MOST_REVOKED:
            raise UserError(
                f"{MOST_REVOKED} invitations are revoked that have not expired, and a list takes no more; "
                "begin another private swarm, and invite for shorter times"
            )
        self.number, self.revoked = number, ids
        self.save()
        return self.latest()

    def own_holding(self, may: Permission, until: float) -> Holding:
        """An invitation for the founder itself, which is not noted: nobody else has it."""
        return self.keys.invite(FOUNDER, until, may, os.urandom)


def member(folder: Path, holding: Holding, peer: PeerId, clock: SwarmClock) -> PrivateSwarm:
    """This peer as a member, with what the folder knows to be revoked."""
    known, one = NOTHING_REVOKED, holding.invitation
    with suppress(ProtocolError):
        known = Revocations.parse(kept_revocations(folder), one.run, one.founder)
    return PrivateSwarm(peer, holding, clock, known)


def keep_revocations(folder: Path, packed: bytes) -> None:
    """Keeps the latest list. On a full disk it is read from the DHT again."""
    with suppress(OSError):
        write_atomically(folder / "revoked", packed)


def kept_revocations(folder: Path) -> bytes:
    """The list that `keep_revocations` has kept, unchecked; empty where there is none."""
    try:
        return (folder / "revoked").read_bytes()
    except OSError:
        return b""


def founded(folder: Path) -> bool:
    """Whether a private swarm was begun in this folder."""
    return founder_path(folder).exists()


def kept_path(folder: Path) -> Path:
    """Where a member keeps its invitation."""
    return folder / "invitation.json"


def described(one: Invitation, now: float) -> str:
    """An invitation in a few words, for its user."""
    if one.until >= FOR_EVER:
        return f"to {one.may}, without an end"
    left = one.until - now
    return (
        f"to {one.may}, for {left / 86400:.1f} days"
        if left > 2 * 86400
        else f"to {one.may}, for {left / 3600:.1f} hours"
    )


def _require_noted(one: JsonObject) -> None:
    """Raises KeyError, TypeError or ValueError if this is no note of an invitation, as FounderFile.invite makes it."""
    until, holder = one["until"], one["for"]
    Permission(one["may"])
    fits = type(until) in (int, float) and 0 <= until <= FOR_EVER and isinstance(holder, str)
    if not fits or len(bytes.fromhex(one["id"])) != ID_BYTES or one["id"] != bytes.fromhex(one["id"]).hex():
        raise ValueError("a note of an invitation is none")


def founder_path(folder: Path) -> Path:
    return folder / "founder.json"


def _read(path: Path, wrong: str) -> JsonObject:
    try:
        if path.stat().st_size > MAX_INVITATION_BYTES * (64 if path.name == "founder.json" else 1):
            raise ValueError("it is too large")
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is {wrong} ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is {wrong}")
    return content


def _write(path: Path, content: JsonObject) -> None:
    try:
        write_atomically(path, json.dumps(content, indent=1).encode() + b"\n", SECRET)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None

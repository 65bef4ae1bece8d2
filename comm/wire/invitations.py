"""Invitations to a private swarm: what its founder signs, and what a peer shows to prove that it holds one.

    founder's key --signs--> invitation (run, for whom, until when, what it allows, the holder's public key)
    holder's key  --signs--> membership (run, peer id)          both together are the proof
    founder's key --signs--> revocations (a number that grows, the ids of invitations)

The run's name ends in 128 bits of the hash of the founder's public key, so whoever knows the run's name knows whose
signatures count. A proof names the peer that shows it, and libp2p proves that peer's key on each connection: another
peer that has copied the proof can do nothing with it. All signatures are Ed25519 (RFC 8032).
"""

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.plain_text import plain_text
from decentral.core.reasons import Reason
from decentral.core.units import KiB

ID_BYTES = 8  # of an invitation's id
KEY_BYTES = 32  # of an Ed25519 key, and of the swarm's key
SIGNATURE_BYTES = 64
MAX_HOLDER_CHARS = 64  # of the text that says for whom an invitation is
MAX_PROOF_BYTES = 1 * KiB  # the largest valid one has about 500 bytes
MOST_REVOKED = 1024  # ids in a list of revocations; those of expired invitations leave it
MAX_REVOCATIONS_BYTES = 16 * KiB
FOR_EVER = 1e10  # unix time: an invitation without an end
_FOUNDED = re.compile(r".*-[a-z2-7]{26}")  # the name of a private run


class Permission(StrEnum):
    """What an invitation allows. Each allows what those before it do."""

    LOOK = "look"  # read the config, the records and the weights
    DONATE = "donate"  # hold layers and compute micro-batches of others, which are in no way trained on own data
    TRAIN = "train"  # everything

    def allows(self, other: "Permission") -> bool:
        order = list(Permission)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the founder has signed. It is public: only the holder of `key`'s private half can use it."""

    run: RunId
    id: bytes
    holder: str  # for whom it is, as the founder's user wrote it
    until: float  # unix seconds
    may: Permission
    founder: bytes  # public key
    key: bytes  # the holder's public key
    signature: bytes = b""  # the founder's

    def text(self) -> str:
        """The id as users see it."""
        return self.id.hex()

    def signed(self) -> bytes:
        """The bytes that the founder signs."""
        fields = [self.run, self.id, self.holder, self.until, self.may.value, self.founder, self.key]
        body: bytes = msgpack.packb(["decentral invitation", *fields])
        return body

    def fields(self) -> tuple[object, ...]:
        return self.run, self.id, self.holder, self.until, self.may.value, self.founder, self.key, self.signature

    def require_founder(self) -> None:
        """Raises ProtocolError unless the founder whose key the run's name has the hash of has signed it."""
        if not founded_by(self.run, self.founder):
            raise ProtocolError(Reason.UNINVITED, "the invitation is not of this run's founder")
        _verify(self.founder, self.signature, self.signed())


@dataclass(frozen=True, slots=True)
class Revocations:
    """Which invitations count no longer. Of two lists the one with the higher number counts."""

    number: int
    ids: frozenset[bytes]
    packed: bytes  # as it travels, with the founder's signature

    @classmethod
    def parse(cls, packed: bytes, run: RunId, founder: bytes) -> "Revocations":
        """Raises ProtocolError unless this founder has signed it for this run."""
        if len(packed) > MAX_REVOCATIONS_BYTES:
            raise ProtocolError(Reason.OVERSIZE, f"revocations of {len(packed)} bytes")
        number, ids, signature = _parts(packed, (int, tuple, bytes))
        if number < 1 or len(ids) > MOST_REVOKED or not all(type(one) is bytes for one in ids):
            raise ProtocolError(Reason.FIELDS, "no revocations")
        _verify(founder, signature, _revoking(run, number, ids))
        return cls(number, frozenset(ids), packed)


NOTHING_REVOKED = Revocations(0, frozenset(), b"")


@dataclass(frozen=True, slots=True)
class Holding:
    """An invitation with its secrets, as its holder keeps it in a file."""

    invitation: Invitation
    secret: bytes  # the private half of the invitation's key
    swarm_key: bytes  # seals the records of the swarm in the DHT

    def require_secret(self) -> None:
        """Raises ProtocolError unless the secret belongs to the invitation: nobody takes a proof made with another."""
        if _public(self.secret) != self.invitation.key:
            raise ProtocolError(Reason.SIGNATURE, "the secret is of another invitation")

    def proof(self, peer: PeerId) -> bytes:
        """What this peer shows to others. It is worth nothing to another peer."""
        signature = Ed25519PrivateKey.from_private_bytes(self.secret).sign(_membership(self.invitation.run, peer))
        packed: bytes = msgpack.packb([*self.invitation.fields(), signature])
        return packed


@dataclass(frozen=True, slots=True)
class FounderKeys:
    """The founder's private key and the swarm's key. Whoever has them decides who is a member."""

    run: RunId
    secret: bytes
    swarm_key: bytes

    @classmethod
    def create(cls, name: str, random_bytes: Callable[[int], bytes]) -> "FounderKeys":
        """The keys of a new run of this name. `random_bytes` has to be the system's."""
        secret = random_bytes(KEY_BYTES)
        return cls(RunId(f"{name}-{_fingerprint(_public(secret))}"), secret, random_bytes(KEY_BYTES))

    @property
    def public(self) -> bytes:
        return _public(self.secret)

    def invite(self, holder: str, until: float, may: Permission, random_bytes: Callable[[int], bytes]) -> Holding:
        """A new invitation with a key pair of its own."""
        secret = random_bytes(KEY_BYTES)
        bare = Invitation(self.run, random_bytes(ID_BYTES), holder, until, may, self.public, _public(secret))
        signature = Ed25519PrivateKey.from_private_bytes(self.secret).sign(bare.signed())
        return Holding(replace(bare, signature=signature), secret, self.swarm_key)

    def revoke(self, number: int, ids: frozenset[bytes]) -> Revocations:
        """A list that takes the place of all those with lower numbers."""
        ordered = sorted(ids)
        signature = Ed25519PrivateKey.from_private_bytes(self.secret).sign(_revoking(self.run, number, ordered))
        return Revocations(number, ids, msgpack.packb([number, ordered, signature]))


def is_private(run: RunId) -> bool:
    """Whether the run's name names a founder: only invited peers take part in it."""
    return _FOUNDED.fullmatch(run) is not None


def founded_by(run: RunId, founder: bytes) -> bool:
    """Whether the run's name has the hash of this public key."""
    return run.rpartition("-")[2] == _fingerprint(founder)


def read_proof(proof: bytes, run: RunId, peer: PeerId) -> Invitation:
    """The invitation that `peer` proves to hold for this run. Raises ProtocolError if it does not.

    Whether it has expired or was revoked is not looked at.
    """
    if len(proof) > MAX_PROOF_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a proof of {len(proof)} bytes")
    *fields, signature = _parts(proof, (str, bytes, str, float, str, bytes, bytes, bytes, bytes))
    invitation = invitation_of(tuple(fields))
    if invitation.run != run:
        raise ProtocolError(Reason.UNINVITED, "the invitation is for another run")
    invitation.require_founder()
    _verify(invitation.key, signature, _membership(run, peer))
    return invitation


def invitation_of(fields: tuple[Any, ...]) -> Invitation:
    """The invitation with these fields; its signature is not looked at. Raises ProtocolError if one is out of bounds"""
    run, number, holder, until, may, founder, key, signature = fields
    lengths = (len(number), len(founder), len(key), len(signature))
    fits = lengths == (ID_BYTES, KEY_BYTES, KEY_BYTES, SIGNATURE_BYTES) and len(run) <= 64 and 0 <= until <= FOR_EVER
    if not fits or may not in list(Permission) or holder != plain_text(holder, MAX_HOLDER_CHARS):
        raise ProtocolError(Reason.FIELDS, "no invitation")
    return Invitation(RunId(run), number, holder, until, Permission(may), founder, key, signature)


def _parts(packed: bytes, types: tuple[type, ...]) -> tuple[Any, ...]:
    try:
        parts = msgpack.unpackb(packed, use_list=False)
    except Exception as error:  # msgpack raises a dozen kinds of error for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    if not isinstance(parts, tuple) or tuple(map(type, parts)) != types:
        raise ProtocolError(Reason.GARBAGE, "other parts than expected")
    return parts


def _verify(public: bytes, signature: bytes, signed: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise ProtocolError(Reason.SIGNATURE, "the signature does not fit") from None


def _public(secret: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _fingerprint(public: bytes) -> str:
    """128 bits of a public key's hash, in the 26 lower-case characters of base32."""
    return base64.b32encode(hashlib.blake2b(public, digest_size=16).digest()).decode().rstrip("=").lower()


def _membership(run: RunId, peer: PeerId) -> bytes:
    body: bytes = msgpack.packb(["decentral member", run, peer])
    return body


def _revoking(run: RunId, number: int, ids: "list[bytes] | tuple[bytes, ...]") -> bytes:
    body: bytes = msgpack.packb(["decentral revocations", run, number, list(ids)])
    return body

"""Make, prove, verify and revoke invitations to a private swarm.

    founder's key --signs--> invitation (run, holder, expiry, permission, the holder's public key)
    holder's key  --signs--> membership (run, peer id)          both together are the proof
    founder's key --signs--> list of revocations (its number, the ids of the revoked invitations)

`FounderKeys` makes and revokes invitations, `Holding.proof` makes a proof, and `read_proof` verifies a proof.

The run's name ends in 128 bits of the hash of the founder's public key, so a peer needs only the name to check that the
founder has signed an invitation. A proof names the peer that shows it, and libp2p proves each peer's id on each
connection, so another peer cannot use a copied proof. All signatures are Ed25519 (RFC 8032).
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

from decentral.comm.wire.unpacking import read_msgpack
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId, RunId
from decentral.core.plain_text import plain_text
from decentral.core.reasons import Reason
from decentral.core.units import KiB

ID_BYTES = 8
KEY_BYTES = 32  # size of an Ed25519 key, and of the key that encrypts a swarm's records
SIGNATURE_BYTES = 64
MAX_HOLDER_CHARS = 64
MAX_PROOF_BYTES = 1 * KiB  # a larger proof of membership is refused; the largest valid proof has about 500 bytes
# An encrypted record includes its sender's proof, and is larger than the record by at most this many bytes.
MAX_SEAL_BYTES = MAX_PROOF_BYTES + 64
MOST_REVOKED = 1024  # a list of revocations names at most this many invitations; it leaves out expired invitations
MAX_REVOCATIONS_BYTES = 16 * KiB
FOR_EVER = 1e10  # the expiry date of an invitation that does not expire, in Unix seconds
# Matches the name of a private run: the name that the founder chose, then the fingerprint of the founder's public key.
_FOUNDED = re.compile(r"[a-z0-9][a-z0-9-]*-[a-z2-7]{26}")
MAX_RUN_CHARS = 64


class Permission(StrEnum):
    """What an invitation allows. Each permission includes those listed before it."""

    LOOK = "look"  # may read the config, the records and the weights
    DONATE = "donate"  # may also serve layers, and compute micro-batches that other peers begin
    TRAIN = "train"  # may also begin micro-batches with the peer's own training data

    def allows(self, other: "Permission") -> bool:
        """Return whether this permission includes the other one."""
        order = list(Permission)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation as the founder has signed it. It is not secret: only the owner of its private key can use it."""

    run: RunId
    id: bytes
    holder: str  # name of the invited person, as the founder wrote it
    until: float  # expiry date in Unix seconds
    may: Permission
    founder: bytes  # the public key of the swarm's founder
    key: bytes  # public key of this invitation; the invited person has the private key
    signature: bytes = b""

    def text(self) -> str:
        """Return the id as users see it, in hexadecimal digits."""
        return self.id.hex()

    def signed(self) -> bytes:
        """Return the bytes that the founder signs: all fields except the signature."""
        fields = [self.run, self.id, self.holder, self.until, self.may.value, self.founder, self.key]
        body: bytes = msgpack.packb(["decentral invitation", *fields])
        return body

    def fields(self) -> tuple[object, ...]:
        """Return the fields in the order in which they are sent. `invitation_of` is the inverse."""
        return self.run, self.id, self.holder, self.until, self.may.value, self.founder, self.key, self.signature

    def require_founder(self) -> None:
        """Raise ProtocolError unless the run's founder signed the invitation; the run's name identifies the founder."""
        if not founded_by(self.run, self.founder):
            raise ProtocolError(Reason.UNINVITED, "the invitation is not from this run's founder")
        _verify(self.founder, self.signature, self.signed())


@dataclass(frozen=True, slots=True)
class Revocations:
    """The founder's list of revoked invitations. A list with a higher number replaces lists with lower numbers."""

    number: int  # from 1 on; 0 stands for the empty list before the first revocation
    ids: frozenset[bytes]
    packed: bytes  # the list in the form in which peers pass it on, with the founder's signature

    @classmethod
    def parse(cls, packed: bytes, run: RunId, founder: bytes) -> "Revocations":
        """Decode a list of revocations, and verify its signature.

        Args:
            packed: The list as it is sent.
            run: The run that the list must be for.
            founder: Public key of the founder, who must have signed the list.

        Raises:
            ProtocolError: If the list is too large or malformed, or not signed by this founder for this run.
        """
        if len(packed) > MAX_REVOCATIONS_BYTES:
            raise ProtocolError(
                Reason.OVERSIZE, f"revocations must have at most {MAX_REVOCATIONS_BYTES} bytes; got {len(packed)}"
            )
        number, ids, signature = _parts(packed, (int, tuple, bytes))
        if number < 1 or len(ids) > MOST_REVOKED or not all(type(one) is bytes for one in ids):
            said = f"revocations must be a list numbered 1 or higher, with at most {MOST_REVOKED} ids of type bytes"
            raise ProtocolError(Reason.FIELDS, f"{said}; got list number {number} with {len(ids)} ids")
        _verify(founder, signature, _revoking(run, number, ids))
        return cls(number, frozenset(ids), packed)


NOTHING_REVOKED = Revocations(0, frozenset(), b"")


@dataclass(frozen=True, slots=True)
class Holding:
    """An invitation and its secret keys, as stored in the holder's invitation file."""

    invitation: Invitation
    secret: bytes  # private key of the invitation
    swarm_key: bytes  # symmetric key that encrypts the swarm's records in the DHT

    def require_secret(self) -> None:
        """Raise ProtocolError unless `self.secret` is the private key of the invitation."""
        if _public(self.secret) != self.invitation.key:
            raise ProtocolError(Reason.SIGNATURE, "the secret key in the invitation file belongs to another invitation")

    def proof(self, peer: PeerId) -> bytes:
        """Return the proof that this peer holds the invitation. The proof is valid for no other peer."""
        signature = Ed25519PrivateKey.from_private_bytes(self.secret).sign(_membership(self.invitation.run, peer))
        packed: bytes = msgpack.packb([*self.invitation.fields(), signature])
        return packed


@dataclass(frozen=True, slots=True)
class FounderKeys:
    """The founder's keys: the private key that signs invitations and revocations, and the swarm's encryption key."""

    run: RunId
    secret: bytes  # the founder's private key
    swarm_key: bytes  # symmetric key that encrypts the swarm's records in the DHT; it is given to every invited person

    @classmethod
    def create(cls, name: str, random_bytes: Callable[[int], bytes]) -> "FounderKeys":
        """Return the keys of a new private run.

        Args:
            name: First part of the run's name; `-` and the fingerprint of the founder's public key are appended.
            random_bytes: Returns as many bytes as it is asked for, from the system's secure random source.
        """
        secret = random_bytes(KEY_BYTES)
        return cls(RunId(f"{name}-{_fingerprint(_public(secret))}"), secret, random_bytes(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """Return the founder's public key."""
        return _public(self.secret)

    def invite(self, holder: str, until: float, may: Permission, random_bytes: Callable[[int], bytes]) -> Holding:
        """Return a new signed invitation, for which a new key pair is made.

        Args:
            holder: Name of the person who gets the invitation, at most MAX_HOLDER_CHARS characters.
            until: When the invitation expires, in unix seconds.
            may: What the invitation allows the invited person to do.
            random_bytes: Returns as many bytes as it is asked for, from the system's secure random source.
        """
        secret = random_bytes(KEY_BYTES)
        bare = Invitation(self.run, random_bytes(ID_BYTES), holder, until, may, self.public, _public(secret))
        signature = Ed25519PrivateKey.from_private_bytes(self.secret).sign(bare.signed())
        return Holding(replace(bare, signature=signature), secret, self.swarm_key)

    def revoke(self, number: int, ids: frozenset[bytes]) -> Revocations:
        """Return a signed list of revocations, which replaces all lists with lower numbers.

        Args:
            number: The number of the list, at least 1 and higher than that of all earlier lists.
            ids: Ids of all revoked invitations, at most MOST_REVOKED.
        """
        ordered = sorted(ids)
        signature = Ed25519PrivateKey.from_private_bytes(self.secret).sign(_revoking(self.run, number, ordered))
        return Revocations(number, ids, msgpack.packb([number, ordered, signature]))


def is_private(run: RunId) -> bool:
    """Return whether the run is private: its name ends in the fingerprint of a founder's key."""
    return _FOUNDED.fullmatch(run) is not None


def founded_by(run: RunId, founder: bytes) -> bool:
    """Return whether the run's name ends in the fingerprint of this public key."""
    return run.rpartition("-")[2] == _fingerprint(founder)


def read_proof(proof: bytes, run: RunId, peer: PeerId) -> Invitation:
    """Verify a peer's proof, and return its invitation, which may be expired or revoked.

    Args:
        proof: The proof as the peer has sent it.
        run: The run that the invitation must be for.
        peer: The peer that the proof must name.

    Raises:
        ProtocolError: If the proof is malformed, is for another run or peer, or has a signature that is not valid.
    """
    if len(proof) > MAX_PROOF_BYTES:
        raise ProtocolError(Reason.OVERSIZE, f"a proof must have at most {MAX_PROOF_BYTES} bytes; got {len(proof)}")
    *fields, signature = _parts(proof, (str, bytes, str, float, str, bytes, bytes, bytes, bytes))
    invitation = invitation_of(tuple(fields))
    if invitation.run != run:
        raise ProtocolError(Reason.UNINVITED, "the invitation is not for this run")
    invitation.require_founder()
    _verify(invitation.key, signature, _membership(run, peer))
    return invitation


def invitation_of(fields: tuple[Any, ...]) -> Invitation:
    """Return the invitation with these fields, in the order of `Invitation.fields`.

    The caller must have checked the types of the fields. The signature is not checked.

    Raises:
        ProtocolError: If a field has a wrong length or a value that is not allowed.
    """
    run, number, holder, until, may, founder, key, signature = fields
    lengths = (len(number), len(founder), len(key), len(signature))
    fits = lengths == (ID_BYTES, KEY_BYTES, KEY_BYTES, SIGNATURE_BYTES) and 0 <= until <= FOR_EVER
    named = len(run) <= MAX_RUN_CHARS and is_private(run)
    if not fits or not named or may not in list(Permission) or holder != plain_text(holder, MAX_HOLDER_CHARS):
        said = "the invitation's run, id, holder, expiry, permission, signature or a key has a length or value"
        raise ProtocolError(Reason.FIELDS, f"{said} that is not allowed")
    return Invitation(RunId(run), number, holder, until, Permission(may), founder, key, signature)


def _parts(packed: bytes, types: tuple[type, ...]) -> tuple[Any, ...]:
    try:
        parts = read_msgpack(packed, max_array_len=MOST_REVOKED)
    except Exception as error:  # for malformed bytes, msgpack raises exceptions of many classes
        raise ProtocolError(Reason.GARBAGE, f"the data is not valid msgpack ({type(error).__name__})") from None
    if not isinstance(parts, tuple) or tuple(map(type, parts)) != types:
        raise ProtocolError(
            Reason.GARBAGE, f"expected an array with values of the types {', '.join(one.__name__ for one in types)}"
        )
    return parts


def _verify(public: bytes, signature: bytes, signed: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise ProtocolError(Reason.SIGNATURE, "the signature is not valid") from None


def _public(secret: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _fingerprint(public: bytes) -> str:
    """Return 128 bits of a public key's hash (blake2b), as 26 lower-case characters of base32."""
    return base64.b32encode(hashlib.blake2b(public, digest_size=16).digest()).decode().rstrip("=").lower()


def _membership(run: RunId, peer: PeerId) -> bytes:
    body: bytes = msgpack.packb(["decentral member", run, peer])
    return body


def _revoking(run: RunId, number: int, ids: "list[bytes] | tuple[bytes, ...]") -> bytes:
    body: bytes = msgpack.packb(["decentral revocations", run, number, list(ids)])
    return body

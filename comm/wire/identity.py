"""Load or create a peer's libp2p identity, and sign and verify the records that peers store in the DHT.

`Identity.load_or_create` reads the key file, `Identity.seal` signs a record, and `open_sealed` verifies a record.

The key file has libp2p's format (protobuf PrivateKey, RSA), which hivemind's daemon reads. So one key names the peer on
the network and signs the records that the peer stores. A peer id is the multihash of the public key, so every reader of
a record can check that the peer with that id has signed the record.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import base58
import msgpack
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from decentral.comm.wire.unpacking import read_msgpack
from decentral.core import foreign_file
from decentral.core.atomic_file import SECRET, write_atomically
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.core.peer_folders import MOST_KEY_BYTES
from decentral.core.reasons import Reason

MAX_RECORD_BYTES = 96 * 1024  # a larger record is refused; a plan that assigns layers to 1,300 peers is about as large
MAX_PEER_RECORD_BYTES = 16 * 1024
# A record that expires more than this far ahead is refused. Records live half an hour; clocks may differ by 1.5 hours.
MAX_LIFETIME_S = 2 * 3600.0
KEY_BITS = 2048
EXPONENT = 65537  # RSA keys with another public exponent are refused
MOST_VERIFIED = 1024  # the last this many valid signatures are cached, since lookups return the same records repeatedly

_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=32)
_RSA = b"\x08\x00\x12"  # libp2p's encoding (protobuf) of an RSA key begins with these bytes


class Signer(Protocol):
    """Interface for signing our own records and verifying other peers'; Identity and the simulator implement it."""

    @property
    def peer(self) -> PeerId:
        """Return this peer's id."""

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        """Return a signed record for the DHT.

        Args:
            key: The DHT key for which the record is valid.
            body: Content of the record.
            expires: When the record expires, in unix seconds.
        """

    def bare(self, key: str, peer: PeerId, sealed: bytes) -> tuple[str, bytes]:
        """Return the key that a record's signature covers, and the record without encryption; nothing is verified.

        Raises:
            ProtocolError: If the record cannot be decrypted.
        """

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        """Return the body and the expiry (unix seconds) of a record.

        Args:
            key: The DHT key under which the record was found.
            peer: The peer that must have signed the record.
            record: The record, as that peer's `seal` returned it.
            now: Unix seconds.

        Raises:
            ProtocolError: If the record is malformed or has expired, or the peer has not signed it for this key.
        """


@dataclass(frozen=True, slots=True)
class Identity:
    """The Signer that signs with this peer's private RSA key."""

    peer: PeerId
    key: rsa.RSAPrivateKey

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Return the identity in a key file. A missing file is created with a new key, readable by this user only.

        Raises:
            UserError: If the file cannot be read or written, or has no RSA key in libp2p's format.
        """
        try:
            if not path.exists():
                _create(path)
            key = serialization.load_der_private_key(
                _strip(foreign_file.read_bytes(path, MOST_KEY_BYTES)), password=None
            )
        except OSError as error:
            raise UserError(f"cannot use {path}: {error.strerror}; correct this, or use another --state-dir") from None
        except (ValueError, TypeError, UnsupportedAlgorithm, ProtocolError) as error:
            raise UserError(f"{path} is not a libp2p key file ({error}); move it away to get a new identity") from None
        if not isinstance(key, rsa.RSAPrivateKey):
            raise UserError(f"{path} must contain an RSA key; got {type(key).__name__}; move it away to get a new key")
        return cls(peer_of(_public_bytes(key)), key)

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        """Return a record for the DHT: the body, its expiry (unix seconds), our public key, and our signature.

        The signature covers the DHT key, our peer id, the body and the expiry.
        """
        signature = self.key.sign(_signed(key, self.peer, body, expires), _PADDING, hashes.SHA256())
        record: bytes = msgpack.packb([body, expires, _public_bytes(self.key), signature])
        return record

    def bare(self, key: str, peer: PeerId, sealed: bytes) -> tuple[str, bytes]:
        """Return the key and the record unchanged, since records of public swarms are not encrypted."""
        return key, sealed

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        """Return the body and the expiry (unix seconds) of a record that `peer` has signed for `key`.

        Raises:
            ProtocolError: If the record is too large or malformed, the peer has not signed it for this key, or its
                expiry is past or more than MAX_LIFETIME_S ahead.
        """
        return open_sealed(key, peer, record, now)


def open_sealed(key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
    """Return the body and the expiry (unix seconds) of a record that `peer` has signed for `key`.

    Raises:
        ProtocolError: If the record is too large or malformed, the peer has not signed it for this key, or its expiry
            is past or more than MAX_LIFETIME_S ahead.
    """
    body, expires, public, signature = _parts(record, max_record_bytes(key))
    if not now < expires < now + MAX_LIFETIME_S:
        said = f"a record must expire in 0 to {MAX_LIFETIME_S:g} s; this one expires in {expires - now:.0f} s"
        raise ProtocolError(Reason.EXPIRED, said)
    _verify(peer, public, signature, hashlib.sha256(_signed(key, peer, body, expires)).digest())
    return body, expires


@lru_cache(MOST_VERIFIED)
def _verify(peer: PeerId, public: bytes, signature: bytes, digest: bytes) -> None:
    """Check that `peer` has signed the bytes with this SHA-256 digest; a successful check is cached.

    Raises:
        ProtocolError: If the public key is not the peer's, or is no RSA key with an accepted size and exponent, or if
            the signature is not valid.
    """
    if peer_of(public) != peer:
        raise ProtocolError(Reason.IDENTITY, "the record's public key does not belong to the named peer")
    try:
        loaded = serialization.load_der_public_key(public)
        if not isinstance(loaded, rsa.RSAPublicKey) or not 2048 <= loaded.key_size <= 8192:
            raise ProtocolError(Reason.IDENTITY, "a record's key must be an RSA key of 2048 to 8192 bits")
        if loaded.public_numbers().e != EXPONENT:  # with a long exponent, a verification takes a hundred times as long
            raise ProtocolError(Reason.IDENTITY, f"the exponent of a record's key must be {EXPONENT}")
        loaded.verify(signature, digest, _PADDING, Prehashed(hashes.SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm) as error:
        raise ProtocolError(Reason.SIGNATURE, f"the signature is not valid ({type(error).__name__})") from None


def open_kept(key: str, peer: PeerId, record: bytes) -> bytes:
    """Return the body of a record that `peer` has signed for `key`, whether or not the record has expired.

    Raises:
        ProtocolError: If the record is too large or malformed, or the peer has not signed it for this key.
    """
    expires = _parts(record, max_record_bytes(key))[1]
    return open_sealed(key, peer, record, expires - 1.0)[0]


def peer_of(public: bytes) -> PeerId:
    """Return libp2p's peer id of a DER public key: base58(0x12 0x20 sha256(protobuf PublicKey))."""
    protobuf = _RSA + _varint(len(public)) + public
    return PeerId(base58.b58encode(b"\x12\x20" + hashlib.sha256(protobuf).digest()).decode())


def max_record_bytes(key: str) -> int:
    """Return the most bytes that a record stored under this DHT key may have."""
    return MAX_PEER_RECORD_BYTES if key.split("/")[1:2] == ["peers"] else MAX_RECORD_BYTES


def _parts(record: bytes, most: int) -> tuple[bytes, float, bytes, bytes]:
    if len(record) > most:
        raise ProtocolError(Reason.OVERSIZE, f"a record under this key has at most {most} bytes; got {len(record)}")
    try:
        parts = read_msgpack(record, max_array_len=4)
    except Exception as error:  # for malformed bytes, msgpack raises exceptions of many classes
        raise ProtocolError(Reason.GARBAGE, f"the record is not valid msgpack ({type(error).__name__})") from None
    if not isinstance(parts, tuple) or tuple(map(type, parts)) != (bytes, float, bytes, bytes):
        raise ProtocolError(Reason.GARBAGE, "a record must have four parts: body, expiry, public key and signature")
    return parts


def _signed(key: str, peer: PeerId, body: bytes, expires: float) -> bytes:
    signed: bytes = msgpack.packb(["decentral record", key, peer, body, expires])
    return signed


def _create(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=EXPONENT, key_size=KEY_BITS)
    encoding, form = serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL
    der = key.private_bytes(encoding, form, serialization.NoEncryption())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _RSA + _varint(len(der)) + der, SECRET)


def _public_bytes(key: rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _strip(protobuf: bytes) -> bytes:
    """Return the DER key inside libp2p's PrivateKey message. Raises ProtocolError unless it is a complete RSA key."""
    if not protobuf.startswith(_RSA):
        raise ProtocolError(Reason.IDENTITY, "the file does not contain an RSA key in libp2p's format")
    body = protobuf.removeprefix(_RSA)
    for digits in range(1, min(4, len(body)) + 1):  # the key's length precedes the key, as a varint of unknown size
        if body[:digits] == _varint(len(body) - digits):
            return body[digits:]
    raise ProtocolError(Reason.IDENTITY, "the key is longer or shorter than the file says, so the file is damaged")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))

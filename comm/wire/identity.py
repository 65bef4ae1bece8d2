"""A peer's libp2p identity: the key in its state folder, and records that it signs.

The key file has libp2p's format (protobuf PrivateKey, RSA), the one that hivemind's daemon reads, so the same key
names the peer on the wire and signs what it stores. A peer id is the multihash of the public key, so every reader of
a record can check that the peer it names has signed it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import base58
import msgpack
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from decentral.core.atomic_file import SECRET, write_atomically
from decentral.core.errors import ProtocolError, UserError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason

MAX_RECORD_BYTES = 96 * 1024  # of a plan: about 1,300 spans
MAX_PEER_RECORD_BYTES = 16 * 1024  # of a peer's record, with its seal
MAX_LIFETIME_S = 2 * 3600.0  # of a record: half an hour at most, and clocks that differ by more than an hour
KEY_BITS = 2048

_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=32)
_RSA = b"\x08\x00\x12"  # protobuf: key_type = RSA, then the field of the key's bytes


class Signer(Protocol):
    """Our peer id, and how records are signed and checked: an Identity, or a simulated one."""

    @property
    def peer(self) -> PeerId: ...

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        """A record for the DHT with `body`; others can check that it is ours. It expires at that unix time."""

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        """The body and the expiry of a record that `peer` has sealed for `key`. Raises ProtocolError."""


@dataclass(frozen=True, slots=True)
class Identity:
    peer: PeerId
    key: rsa.RSAPrivateKey

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Reads the key at `path`, or makes one there that only its owner may read. Raises UserError."""
        try:
            if not path.exists():
                _create(path)
            key = serialization.load_der_private_key(_strip(path.read_bytes()), password=None)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; make room there, or use another --state-dir") from None
        except (ValueError, TypeError, UnsupportedAlgorithm, ProtocolError) as error:
            raise UserError(f"{path} holds no libp2p identity ({error}); move it away to get a new one") from None
        if not isinstance(key, rsa.RSAPrivateKey):
            raise UserError(f"{path} must hold an RSA identity; it is a {type(key).__name__}")
        return cls(peer_of(_public_bytes(key)), key)

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        """A record for the DHT: `body` with our public key and a signature over all that the record is."""
        signature = self.key.sign(_signed(key, self.peer, body, expires), _PADDING, hashes.SHA256())
        record: bytes = msgpack.packb([body, expires, _public_bytes(self.key), signature])
        return record

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        return open_sealed(key, peer, record, now)


def open_sealed(key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
    """The body and its expiry. Raises ProtocolError unless `peer` has signed it for `key` and it has not expired."""
    body, expires, public, signature = _parts(record, max_record_bytes(key))
    if peer_of(public) != peer:
        raise ProtocolError(Reason.IDENTITY, "the key is not the peer's")
    if not now < expires < now + MAX_LIFETIME_S:
        raise ProtocolError(Reason.EXPIRED, f"{expires - now:.0f} s from now")
    try:
        loaded = serialization.load_der_public_key(public)
        if not isinstance(loaded, rsa.RSAPublicKey) or not 2048 <= loaded.key_size <= 8192:
            raise ProtocolError(Reason.IDENTITY, "not an RSA key of 2048 to 8192 bits")
        loaded.verify(signature, _signed(key, peer, body, expires), _PADDING, hashes.SHA256())
    except (InvalidSignature, ValueError, UnsupportedAlgorithm) as error:
        raise ProtocolError(Reason.SIGNATURE, type(error).__name__) from None
    return body, expires


def peer_of(public: bytes) -> PeerId:
    """libp2p's peer id of a DER public key: base58(0x12 0x20 sha256(protobuf PublicKey))."""
    protobuf = _RSA + _varint(len(public)) + public
    return PeerId(base58.b58encode(b"\x12\x20" + hashlib.sha256(protobuf).digest()).decode())


def max_record_bytes(key: str) -> int:
    """The size of the largest record under this key of the DHT."""
    return MAX_PEER_RECORD_BYTES if key.split("/")[1:2] == ["peers"] else MAX_RECORD_BYTES


def _parts(record: bytes, most: int) -> tuple[bytes, float, bytes, bytes]:
    if len(record) > most:
        raise ProtocolError(Reason.OVERSIZE, f"a record of {len(record)} bytes")
    try:
        parts = msgpack.unpackb(record, use_list=False)
    except Exception as error:  # msgpack raises a dozen kinds of error for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    if not isinstance(parts, tuple) or tuple(map(type, parts)) != (bytes, float, bytes, bytes):
        raise ProtocolError(Reason.GARBAGE, "not a record")
    return parts


def _signed(key: str, peer: PeerId, body: bytes, expires: float) -> bytes:
    signed: bytes = msgpack.packb(["decentral record", key, peer, body, expires])
    return signed


def _create(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    encoding, form = serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL
    der = key.private_bytes(encoding, form, serialization.NoEncryption())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _RSA + _varint(len(der)) + der, SECRET)


def _public_bytes(key: rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _strip(protobuf: bytes) -> bytes:
    """The DER key inside libp2p's PrivateKey message."""
    if not protobuf.startswith(_RSA):
        raise ProtocolError(Reason.IDENTITY, "not an RSA key in libp2p's format")
    body = protobuf.removeprefix(_RSA)
    for digits in range(1, min(4, len(body)) + 1):  # of the length, which stands before the key
        if body[:digits] == _varint(len(body) - digits):
            return body[digits:]
    raise ProtocolError(Reason.IDENTITY, "the key is cut")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))

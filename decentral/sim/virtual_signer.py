"""Signatures of simulated peers: a keyed digest in the place of RSA, a thousand times cheaper.

No simulated fault can forge it, though a reader of this file could.
"""

import hashlib
from dataclasses import dataclass

import msgpack

from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason


class VirtualRecord(bytes):
    """A sealed record whose bytes are its signature alone. What was sealed is beside them, and all readers share it."""

    def __new__(cls, signature: bytes, key: str, peer: PeerId, body: bytes, expires: float) -> "VirtualRecord":
        return super().__new__(cls, signature)

    def __init__(self, signature: bytes, key: str, peer: PeerId, body: bytes, expires: float) -> None:
        self.sealed = key, peer, body, expires


@dataclass(frozen=True, slots=True)
class VirtualSigner:
    """A Signer (comm/wire/identity.py)."""

    peer: PeerId
    shares: bool = False  # seals are VirtualRecords; else they are whole, so that they can be encrypted

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        signature = _signature(key, self.peer, body, expires)
        if self.shares:
            return VirtualRecord(signature, key, self.peer, body, expires)
        whole: bytes = msgpack.packb([body, expires, signature])
        return whole

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        if isinstance(record, VirtualRecord):
            sealed_for, sealed_by, body, expires = record.sealed
            if sealed_for != key or sealed_by != peer:
                raise ProtocolError(Reason.SIGNATURE, "not the peer's")
        else:
            body, expires = _opened(key, peer, record)
        if not now < expires:
            raise ProtocolError(Reason.EXPIRED, f"{now - expires:.0f} s ago")
        return body, expires


def _opened(key: str, peer: PeerId, record: bytes) -> tuple[bytes, float]:
    try:
        body, expires, signature = msgpack.unpackb(record)
    except Exception as error:  # msgpack raises a dozen kinds for garbage
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    if signature != _signature(key, peer, body, expires):
        raise ProtocolError(Reason.SIGNATURE, "not the peer's")
    return body, expires


def _signature(key: str, peer: PeerId, body: bytes, expires: float) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=f"{key} {peer} {expires!r}".encode()[-64:]).digest()

"""Sign records of simulated peers with a keyed digest, which is a thousand times cheaper than RSA.

The keys are not secret, but no simulated fault forges a signature.
"""

import hashlib
from dataclasses import dataclass

import msgpack

from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason


class VirtualRecord(bytes):
    """A signed record whose bytes are only the signature; its attribute `sealed` has the contents."""

    def __new__(cls, signature: bytes, key: str, peer: PeerId, body: bytes, expires: float) -> "VirtualRecord":
        """Return a record whose bytes are the signature."""
        return super().__new__(cls, signature)

    def __init__(self, signature: bytes, key: str, peer: PeerId, body: bytes, expires: float) -> None:
        """Store what the signature covers: the DHT key, the peer, the contents, and the Unix time of expiry."""
        self.sealed = key, peer, body, expires


@dataclass(frozen=True, slots=True)
class VirtualSigner:
    """The signer of a simulated peer's DHT records; implements `Signer` (comm/wire/identity.py)."""

    peer: PeerId
    shares: bool = False  # True: `seal` returns a VirtualRecord; False: it returns plain bytes, which can be encrypted

    def seal(self, key: str, body: bytes, expires: float) -> bytes:
        """Return a signed record of `body` for a DHT key, valid until Unix time `expires`."""
        signature = _signature(key, self.peer, body, expires)
        if self.shares:
            return VirtualRecord(signature, key, self.peer, body, expires)
        whole: bytes = msgpack.packb([body, expires, signature])
        return whole

    def bare(self, key: str, peer: PeerId, sealed: bytes) -> tuple[str, bytes]:
        """Return the key and the record unchanged."""
        return key, sealed

    def open(self, key: str, peer: PeerId, record: bytes, now: float) -> tuple[bytes, float]:
        """Return the body of a peer's record under a DHT key, and the Unix time at which it expires.

        Raises:
            ProtocolError: If the record is garbage, is not signed by this peer for this key, or has expired.
        """
        if isinstance(record, VirtualRecord):
            sealed_for, sealed_by, body, expires = record.sealed
            if sealed_for != key or sealed_by != peer:
                raise ProtocolError(Reason.SIGNATURE, "the peer did not sign this record")
        else:
            body, expires = _opened(key, peer, record)
        if not now < expires:
            raise ProtocolError(Reason.EXPIRED, f"the record expired {now - expires:.0f} s ago")
        return body, expires


def _opened(key: str, peer: PeerId, record: bytes) -> tuple[bytes, float]:
    try:
        body, expires, signature = msgpack.unpackb(record)
    except Exception as error:  # msgpack raises many kinds of errors for invalid bytes
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    if signature != _signature(key, peer, body, expires):
        raise ProtocolError(Reason.SIGNATURE, "the peer did not sign this record")
    return body, expires


def _signature(key: str, peer: PeerId, body: bytes, expires: float) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=f"{key} {peer} {expires!r}".encode()[-64:]).digest()

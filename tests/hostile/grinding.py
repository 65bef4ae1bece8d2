"""Grind key pairs until their nodes are next to keys of the DHT, as the owner of an eclipse has to.

A node's id is the hash of its peer id (decentral/comm/net/dht_calls.py). This project's peers have RSA keys, of which a
core makes 16 in a second. The libp2p daemon takes Ed25519 keys too, of which it makes 15,000: an attacker uses those.
"""

import heapq
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from decentral.comm.net.dht_calls import node_id

SEED_BYTES = 32
_PRIVATE = b"\x08\x01\x12\x40"  # first bytes of libp2p's PrivateKey message: key type Ed25519, then 64 bytes of key
_IDENTITY_HASH = b"\x00\x24\x08\x01\x12\x20"  # first bytes of the peer id of an Ed25519 key, which is the key itself

Seeds = Callable[[], bytes]


def fresh_seed() -> bytes:
    """Return the secret part of a new Ed25519 key."""
    return secrets.token_bytes(SEED_BYTES)


@dataclass(frozen=True, slots=True)
class GroundName:
    """A key pair whose node is near a key of the DHT."""

    seed: bytes
    public: bytes

    @classmethod
    def of(cls, seed: bytes) -> "GroundName":
        """Return the key pair of a seed."""
        return cls(seed, Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw())

    @property
    def peer(self) -> PeerID:
        """Return libp2p's peer id of the key pair."""
        return PeerID(_IDENTITY_HASH + self.public)

    def key_file(self) -> bytes:
        """Return the content of the key file that the libp2p daemon reads."""
        return _PRIVATE + self.seed + self.public


def grind(keys: Sequence[DHTID], names: int, tries: int, seeds: Seeds = fresh_seed) -> list[list[GroundName]]:
    """Make `tries` key pairs, and return for each of the DHT's keys the `names` whose nodes are nearest, nearest first.

    Args:
        keys: Ids of keys in the DHT.
        names: How many key pairs to keep for each key.
        tries: How many key pairs to make.
        seeds: Returns the seed of the next key pair.
    """
    nearest: list[list[tuple[int, bytes]]] = [[] for _ in keys]  # heaps: the farthest kept name comes first
    for seed, node in _made(tries, seeds):
        for key, kept in zip(keys, nearest, strict=True):
            entry = (-key.xor_distance(node), seed)
            if len(kept) < names:
                heapq.heappush(kept, entry)
            else:
                heapq.heappushpop(kept, entry)
    return [[GroundName.of(seed) for _, seed in sorted(kept, reverse=True)] for kept in nearest]


def _made(tries: int, seeds: Seeds) -> Iterator[tuple[bytes, DHTID]]:
    """Yield the seeds of new key pairs, and the ids of their nodes."""
    for _ in range(tries):
        name = GroundName.of(seeds())
        yield name.seed, node_id(name.peer)

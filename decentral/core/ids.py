"""Names of things that travel between peers."""

from typing import NewType

SUFFIX_CHARS = 8

PeerId = NewType("PeerId", str)
"""Base58 of the multihash of a libp2p public key, as libp2p writes it: `QmYyQ...`."""

RunId = NewType("RunId", str)
"""The label of a run and six random hex digits: `stdlib-gpt-3fa2c1`."""


def short(peer: PeerId) -> str:
    """The last six characters of the id; the first ones are the same for every RSA identity."""
    return peer[-6:]


def suffix(peer: PeerId) -> str:
    """The end of the id that stands for a peer in others' records: 47 bits tell it from all others of a swarm."""
    return peer[-SUFFIX_CHARS:]

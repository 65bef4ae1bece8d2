"""The types of the ids that peers send to each other: peer ids and run ids."""

from typing import NewType

SUFFIX_CHARS = 8

PeerId = NewType("PeerId", str)
"""Base58 of the multihash of a libp2p public key, as libp2p writes it: `QmYyQ...`."""

RunId = NewType("RunId", str)
"""The label of a run and six random hex digits: `stdlib-gpt-3fa2c1`."""


def short(peer: PeerId) -> str:
    """Return the last six characters of the id, to show to people: the first ones are the same for all RSA keys."""
    return peer[-6:]


def suffix(peer: PeerId) -> str:
    """Return the last eight characters of the id (47 bits, unique in a swarm); records name other peers in this way."""
    return peer[-SUFFIX_CHARS:]

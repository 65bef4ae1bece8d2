"""The types of the ids that peers send to each other: peer ids and run ids."""

from typing import NewType

SUFFIX_CHARS = 8
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
MULTIHASHES = (0x00, 0x12)  # the first byte of a peer id: the key itself, or its SHA-256

PeerId = NewType("PeerId", str)
"""Base58 of the multihash of a libp2p public key, as libp2p writes it: `QmYyQ...`."""

RunId = NewType("RunId", str)
"""The label of a run and six random hex digits: `stdlib-gpt-3fa2c1`."""


def short(peer: PeerId) -> str:
    """Return the last six characters of the id, to show to people: the first ones are the same for all RSA keys."""
    return peer[-6:]


def is_whole(text: str) -> bool:
    """Return whether a base58 text has the length that its second byte tells, as every peer id has."""
    number = 0
    for char in text:
        number = 58 * number + BASE58.index(char)
    zeros = len(text) - len(text.lstrip(BASE58[0]))
    content = bytes(zeros) + number.to_bytes(-(-number.bit_length() // 8))
    return len(content) > 2 and content[0] in MULTIHASHES and content[1] == len(content) - 2


def suffix(peer: PeerId) -> str:
    """Return the last eight characters of the id (47 bits, unique in a swarm); records name other peers in this way."""
    return peer[-SUFFIX_CHARS:]

"""The names by which other peers know a peer's micro-batches: numbers of which nobody else can tell the next one.

Whoever knew it could ask for that micro-batch first, with activations of its own: the holder of the next layers answers
whoever asks for an execution that it has already. And whoever could order an origin peer's names would know one that
comes late, as audits do (comm/pipeline/audits.py). So a name is a secret permutation of the micro-batch's number, which
gives no name twice: a Feistel network of four rounds (Luby and Rackoff, 1988) with keyed blake2b. Names come in pairs;
of each one is used, by chance, and audits have the other.
"""

import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decentral.core.atomic_file import SECRET, write_atomically

HALF_BITS = 26  # of a number: twice a name is a whole number in every JSON reader
SPACE = 1 << 2 * HALF_BITS  # numbers that have a name
ROUNDS = 4
NAME_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class MicroBatchNames:
    """The names of one peer, in all its lives."""

    key: bytes

    @classmethod
    def of(cls, path: Path) -> "MicroBatchNames":
        """Those with the key in this file, which is made where there is none. While the disk takes nothing, or was
        spoilt, the names are those of a new key: two of them are the same by chance once in millions of lives."""
        with suppress(OSError):
            if len(kept := path.read_bytes()) == NAME_KEY_BYTES:
                return cls(kept)
        key = secrets.token_bytes(NAME_KEY_BYTES)
        with suppress(OSError):
            write_atomically(path, key, SECRET)
        return cls(key)

    @classmethod
    def known(cls, text: str) -> "MicroBatchNames":
        """Those that follow from a text, for a simulation that is to be the same each time."""
        return cls(hashlib.blake2b(text.encode(), digest_size=NAME_KEY_BYTES).digest())

    def pair(self, number: int) -> int:
        """The lower name of this number's pair; the other one follows it."""
        assert 0 <= number < SPACE, f"{number} has no name"
        left, right = divmod(number, 1 << HALF_BITS)
        for turn in range(ROUNDS):
            left, right = right, left ^ self._mixed(turn, right)
        return 2 * (left << HALF_BITS | right)

    def _mixed(self, turn: int, half: int) -> int:
        digest = hashlib.blake2b(half.to_bytes(4, "big"), key=self.key, digest_size=4, salt=bytes([turn])).digest()
        return int.from_bytes(digest, "big") >> 32 - HALF_BITS

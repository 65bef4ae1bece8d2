"""Names by which other peers know a peer's micro-batches: numbers that no other peer can predict or order.

A peer that could predict the next name could request that micro-batch's execution first, with activations of its own,
and the holder of the next layers would answer the origin's request with that result. A peer that could order names
would recognise audits, which repeat earlier micro-batches (`audits`).

So a name is a secret permutation of the micro-batch's number: a Feistel network of four rounds (Luby and Rackoff, 1988)
with keyed blake2b. With the same key no name is repeated. Each micro-batch has two names: one name, chosen at random,
is used for training, and the other for an audit.
"""

import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decentral.core import foreign_file
from decentral.core.atomic_file import SECRET, write_atomically

HALF_BITS = 26  # half the bits that the Feistel network permutes; a name has 53 bits, which JSON keeps exactly
SPACE = 1 << 2 * HALF_BITS
ROUNDS = 4  # with fewer rounds, a Feistel network does not resist chosen inputs and outputs
NAME_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class MicroBatchNames:
    """The names of one peer's micro-batches, derived from a secret key that the peer keeps across restarts."""

    key: bytes

    @classmethod
    def of(cls, path: Path) -> "MicroBatchNames":
        """Return the names whose key is in a file. If the file has no valid key, write a new key to the file.

        After a restart with a new key, the probability that any name repeats an older name is below one in a million.
        """
        with suppress(OSError):
            if len(kept := foreign_file.read_bytes(path, NAME_KEY_BYTES)) == NAME_KEY_BYTES:
                return cls(kept)
        key = secrets.token_bytes(NAME_KEY_BYTES)
        with suppress(OSError):
            write_atomically(path, key, SECRET)
        return cls(key)

    @classmethod
    def known(cls, text: str) -> "MicroBatchNames":
        """Return names whose key is a hash of `text`, for simulations that must be repeatable."""
        return cls(hashlib.blake2b(text.encode(), digest_size=NAME_KEY_BYTES).digest())

    def pair(self, number: int) -> int:
        """Return the lower of the two names of micro-batch `number` (0 <= number < SPACE); the other is 1 larger."""
        assert 0 <= number < SPACE, f"{number} has no name"
        left, right = divmod(number, 1 << HALF_BITS)
        for turn in range(ROUNDS):
            left, right = right, left ^ self._mixed(turn, right)
        return 2 * (left << HALF_BITS | right)

    def _mixed(self, turn: int, half: int) -> int:
        digest = hashlib.blake2b(half.to_bytes(4, "big"), key=self.key, digest_size=4, salt=bytes([turn])).digest()
        return int.from_bytes(digest, "big") >> 32 - HALF_BITS

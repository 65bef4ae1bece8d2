"""The numbers of a peer's micro-batches, none of which is used twice, whatever the disk does: `MicroBatchNumbers`."""

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from decentral.core import foreign_file, strict_json
from decentral.core.atomic_file import write_atomically
from decentral.engine.micro_batch_names import SPACE, MicroBatchNames

MOST_POSITION_BYTES = 4096
RESERVED = 1024  # this many micro-batch numbers are reserved on disk at a time; no start reuses a reserved number
ELSEWHERE = SPACE // 2  # while the disk cannot be written, micro-batch numbers are random and at least this


class MicroBatchNumbers:
    """A source of micro-batch numbers that are never used twice, not even after a restart from an old checkpoint.

    Numbers are reserved on disk in blocks of RESERVED. While the disk cannot be written, numbers come from random
    blocks above ELSEWHERE, and each new block first tries the disk again. Two random blocks overlap with a probability
    of 1e-12.
    """

    def __init__(
        self,
        reserved: int,
        write: Callable[[int], None],
        names: MicroBatchNames,
        random_below: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """Begin with `reserved` as the next number.

        Args:
            reserved: Numbers below this were reserved on disk, and may have been used.
            write: Puts a new value of `reserved` on the disk; raises OSError if that fails.
            names: The names by which other peers know the micro-batches.
            random_below: Returns a random number below its argument.
        """
        self.reserved = reserved
        self.write = write
        self.names, self.random_below = names, random_below
        self.least = reserved  # `take` returns no smaller number, so that none is used twice
        self._elsewhere: Iterator[int] = iter(())

    @classmethod
    def of(cls, folder: Path) -> "MicroBatchNumbers":
        """Return the number source of the peer with this state folder.

        The first number is read from position.json; it is 0 without that file, and random if the file is damaged.
        """
        path = folder / "position.json"
        try:
            reserved = int(strict_json.loads(foreign_file.read_text(path, MOST_POSITION_BYTES))) if path.exists() else 0
        except (OSError, ValueError, TypeError):
            reserved = secrets.randbelow(ELSEWHERE)
        names = MicroBatchNames.of(folder / "names.key")
        return cls(reserved, lambda new: write_atomically(path, json.dumps(new).encode()), names)

    def name(self, number: int) -> int:
        """Return the name of a micro-batch in training: one of its two names, at random. An audit uses the other."""
        return self.names.pair(number) + self.random_below(2)

    def take(self, wished: int) -> int:
        """Return the next unused number, at least `wished`. If no reserved number is left, reserve a block first.

        While the disk cannot be written, the number is random and at least ELSEWHERE.
        """
        for number in self._elsewhere:
            return number
        number = max(wished, self.least)
        if number >= self.reserved:
            try:
                self.write(number + RESERVED)
            except OSError:
                return self._take_elsewhere()
            self.reserved = number + RESERVED
        self.least = number + 1
        return number

    def _take_elsewhere(self) -> int:
        first = ELSEWHERE + self.random_below(ELSEWHERE - RESERVED)
        self._elsewhere = iter(range(first + 1, first + RESERVED))
        return first

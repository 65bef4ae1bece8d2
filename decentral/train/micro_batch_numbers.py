"""Numbers of drawn micro-batches that no restart gives out again, not even one from an old checkpoint.

What is on the disk says up to where they may have been given out; it is written once for RESERVED of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decentral.train import checkpoint

RESERVED = 1024  # micro-batch numbers given out for one write to the disk


@dataclass(slots=True)
class MicroBatchNumbers:
    reserved: int  # as the disk has it
    write: Callable[[int], None]
    known: int = 0  # of this process

    @classmethod
    def at(cls, reserved: int, write: Callable[[int], None]) -> "MicroBatchNumbers":
        return cls(reserved, write, reserved)

    @classmethod
    def of(cls, folder: Path) -> "MicroBatchNumbers":
        path = folder / "position.json"

        def write(reserved: int) -> None:
            checkpoint.write_atomically(path, json.dumps(reserved).encode())

        return cls.at(int(json.loads(path.read_text())) if path.exists() else 0, write)

    def take(self, wished: int) -> int:
        """The next number from `wished` on."""
        number = self.known = max(wished, self.known)
        if number >= self.reserved:
            self.reserved = number + RESERVED
            self.write(self.reserved)
        return number

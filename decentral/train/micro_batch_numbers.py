"""Numbers of drawn micro-batches that no restart gives out again, not even a restart from an old checkpoint.

The disk says up to which number they may have been given out. It is written once for every RESERVED of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from decentral.train import checkpoint

RESERVED = 1024  # micro-batch numbers given out for one write to the disk


@dataclass(slots=True)
class MicroBatchNumbers:
    reserved: int  # every number that was ever given out is below this one, as the disk has it
    write: Callable[[int], None]  # puts a new value of `reserved` on the disk
    least: int = field(init=False)  # the least number that this process may give out

    def __post_init__(self) -> None:
        self.least = self.reserved

    @classmethod
    def of(cls, folder: Path) -> "MicroBatchNumbers":
        path = folder / "position.json"

        def write(reserved: int) -> None:
            checkpoint.write_atomically(path, json.dumps(reserved).encode())

        return cls(int(json.loads(path.read_text())) if path.exists() else 0, write)

    def take(self, wished: int) -> int:
        """The next number from `wished` on. Raises OSError if the disk cannot be written."""
        number = self.least = max(wished, self.least)
        if number >= self.reserved:
            self.reserved = number + RESERVED
            self.write(self.reserved)
        return number

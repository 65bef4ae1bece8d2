"""What a peer has done so far: the numbers that its reports name and its checkpoints keep."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from decentral.core import jobs
from decentral.core.units import Seconds
from decentral.train.checkpoint import write_atomically

RESERVED = 1024  # micro-batch numbers given out for one write to the disk


@dataclass(slots=True)
class Counters:
    """A checkpoint keeps all of these but `busy_s`."""

    own_steps: int = 0  # inner steps that this peer has taken
    lr_step: int = 0  # the swarm's learning-rate step, as far as this peer knows it
    tokens: int = 0
    micro_batches: int = 0  # the number of this peer's next micro-batch
    versions: dict[int, bytes] = field(default_factory=dict)  # by fragment, in synchronous runs: comm/rounds
    busy_s: Seconds = 0.0  # time spent computing since the last step was reported

    def stepped(self, tokens: int, loss: float, micro_batches: int, steps: int = 1) -> jobs.Stepped:
        """Counts so many steps, taken with so many tokens, and reports them with the time that they took."""
        self.own_steps += steps
        self.lr_step += steps
        self.tokens += tokens
        seconds, self.busy_s = self.busy_s, 0.0
        return jobs.Stepped(self.own_steps, self.lr_step, tokens, loss, seconds, micro_batches)

    def follow(self, lr_step: int) -> None:
        """Takes over the swarm's learning-rate step where it is ahead of ours."""
        self.lr_step = max(self.lr_step, lr_step)


@dataclass(slots=True)
class MicroBatchNumbers:
    """Numbers of drawn micro-batches that no restart gives out again, not even a restart from an old checkpoint."""

    reserved: int  # every number that was ever given out is below this one, as the disk has it
    write: Callable[[int], None]  # puts a new value of `reserved` on the disk
    least: int = field(init=False)  # the least number that this process may give out

    def __post_init__(self) -> None:
        self.least = self.reserved

    @classmethod
    def of(cls, folder: Path) -> "MicroBatchNumbers":
        path = folder / "position.json"
        reserved = int(json.loads(path.read_text())) if path.exists() else 0
        return cls(reserved, lambda new: write_atomically(path, json.dumps(new).encode()))

    def take(self, wished: int) -> int:
        """The next number from `wished` on. Raises OSError if the disk cannot be written."""
        number = self.least = max(wished, self.least)
        if number >= self.reserved:
            self.reserved = number + RESERVED
            self.write(self.reserved)
        return number

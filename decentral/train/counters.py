"""What a peer has done so far: the numbers that its reports name and its checkpoints keep."""

from dataclasses import dataclass, field

from decentral.core import jobs
from decentral.core.units import Seconds


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

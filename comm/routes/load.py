"""What the executions at this peer take of its time.

Time is counted in parts of a micro-batch through the whole model, and becomes seconds by the speed that was measured at
work.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.routes.execution import BACKWARD, FORWARD, StageExecution
from decentral.comm.routes.pacing import NEWEST_WEIGHT
from decentral.comm.routes.stage import StageConfig
from decentral.core.fragments import FORWARD_PART, forward_part, share
from decentral.core.units import Seconds


@dataclass(slots=True)
class StageLoad:
    stage: StageConfig
    speed: float = 0.0  # tokens/s of the whole model, if this peer computed without a pause; 0: not measured yet
    usual_speed: float = 0.0  # mean of what the other peers' records say; 0: none says anything
    tokens: int = 0  # in the latest micro-batch
    _worked: float = 0.0  # tokens times their share of the model, since the last step
    _shares: dict[tuple[int, int], float] = field(default_factory=dict)  # parts of the model, by layers [first, last)

    def backward_done(self, execution: StageExecution, tokens: int) -> None:
        """Its forward and its backward pass are done."""
        self.tokens = tokens
        self._worked += tokens * self.share(execution.id.first, execution.last)

    def stepped(self, seconds: Seconds) -> None:
        """Measures the speed by what was computed in so many seconds of computing.

        Times are averaged, not rates, so that a device that becomes much slower shows it after a few steps.
        """
        if self._worked > 0 and seconds > 0:
            newest_s = seconds / self._worked
            self.speed = 1 / ((1 - NEWEST_WEIGHT) / self.speed + NEWEST_WEIGHT * newest_s if self.speed else newest_s)
        self._worked = 0.0

    def share(self, first: int, last: int) -> float:
        """The part of the model's parameters in layers [first, last)."""
        found = self._shares.get((first, last))
        if found is None:
            found = self._shares[first, last] = share(self.stage.cuts, first, last)
        return found

    def seconds(self, part: float) -> Seconds:
        """Seconds of computing here for this part of a micro-batch through the whole model; 0: unknown."""
        speed = self.speed or self.usual_speed
        return part * self.tokens / speed if speed else 0.0

    def span_s(self) -> Seconds:
        """Seconds of computing for an execution through the whole span."""
        return self.seconds(self.share(self.stage.first, self.stage.last))

    def execution_s(self, first: int, last: int) -> Seconds:
        """Seconds of computing until an execution through these layers is passed on."""
        return self.seconds(self.share(first, last) * forward_part(last, self.stage.layers))

    def wait_s(self, executions: Iterable[StageExecution]) -> Seconds:
        """Seconds of computing that these executions still wait for."""
        parts = 0.0
        for execution in executions:
            if execution.state is FORWARD:
                part = self.share(execution.id.first, execution.last)
                parts += forward_part(execution.last, self.stage.layers) * part
            elif execution.state is BACKWARD:
                parts += (1 - FORWARD_PART) * self.share(execution.id.first, execution.last)
        return self.seconds(parts)

    def rest_s(self, tokens: int, layer: int) -> Seconds:
        """Seconds that the usual device takes from this layer to the model's end if nothing waits; 0: unknown."""
        rest = self.share(layer, self.stage.layers)
        return tokens * rest / self.usual_speed if self.usual_speed > 0 else 0.0


__all__ = ["StageLoad"]

"""What the executions at this peer take of its memory and of its time.

Room is counted in what an execution's activations take, as parts of an execution through the whole span (Terms.room). Time is counted
in parts of a micro-batch through the whole model, and becomes seconds by the speed that was measured at work.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.routes.pacing import NEWEST_WEIGHT
from decentral.comm.routes.stage import ExecutionState, StageConfig, StageExecution
from decentral.core.jobs import FORWARD_PART, MOST_UNDER_WAY, forward_part, share
from decentral.core.units import Seconds

MOST_HELD = 4  # times the micro-batches that the memory takes: executions, with those whose backward pass is done
KEPT_PART = 8  # of the room, one part is kept for executions that enter at later layers
ROUNDING = 1e-6  # of sums of parts of the memory


@dataclass(slots=True)
class StageLoad:
    stage: StageConfig
    speed: float = 0.0  # tokens/s of the whole model, if we computed without a pause; 0: not measured yet
    usual_speed: float = 0.0  # of the others, as they say; 0: nobody does
    tokens: int = 0  # of the latest micro-batch
    _worked: float = 0.0  # tokens through our share of the model, since the last step
    _shares: dict[tuple[int, int], float] = field(default_factory=dict)  # of the model, by layers [first, last)
    _rooms: dict[tuple[int, int], float] = field(default_factory=dict)  # of the memory, by layers [first, last)

    def hold(self, stage: StageConfig) -> None:
        """This peer's place from now on."""
        self.stage = stage
        self._rooms.clear()

    # Time

    def backed(self, execution: StageExecution, tokens: int) -> None:
        """Its forward and its backward pass are done."""
        self.tokens = tokens
        self._worked += tokens * self.share(execution.id.first, execution.last)

    def stepped(self, seconds: Seconds) -> None:
        """How fast this device really is, by what it computed in so many seconds of computing.

        Times are averaged, not rates: so who becomes much slower knows it after a few steps.
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
        """Of computing here: so much of a micro-batch through the whole model."""
        speed = self.speed or self.usual_speed
        return part * self.tokens / speed if speed else 0.0

    def span_s(self) -> Seconds:
        """Of computing: an execution through the whole span."""
        return self.seconds(self.share(self.stage.first, self.stage.last))

    def execution_s(self, first: int, last: int) -> Seconds:
        """Of computing, until an execution through these layers is passed on."""
        return self.seconds(self.share(first, last) * forward_part(last, self.stage.layers))

    def wait_s(self, executions: Iterable[StageExecution]) -> Seconds:
        """Of computing that is here to be done."""
        parts = 0.0
        for execution in executions:
            if execution.state is ExecutionState.FORWARD:
                parts += forward_part(execution.last, self.stage.layers) * self.share(
                    execution.id.first, execution.last
                )
            elif execution.state is ExecutionState.BACKWARD:
                parts += (1 - FORWARD_PART) * self.share(execution.id.first, execution.last)
        return self.seconds(parts)

    def rest_s(self, tokens: int, layer: int) -> Seconds:
        """What the model from this layer on takes of the usual device, where nothing waits; 0: unknown."""
        rest = self.share(layer, self.stage.layers)
        return tokens * rest / self.usual_speed if self.usual_speed > 0 else 0.0

    # Memory

    def room_of(self, first: int, last: int) -> float:
        """That an execution through [first, last) takes."""
        found = self._rooms.get((first, last))
        if found is None:
            found = self._rooms[first, last] = self.stage.room(first, last)
        return found

    def has_room(self, first: int, executions: dict[int, StageExecution], window: int) -> bool:
        """For an execution that enters at this layer. `window`: how many of our own we would have under way.

        Executions that are only held have given their activations back: they take an answer each, and have more room. One
        place is kept for each layer behind this one at which executions may enter (buffer classes: Merlin and Schweitzer,
        1980). Else peers that hold the same layers could fill each other up with executions that wait for one another.
        """
        capacity, count, at_work, begun, own = self.stage.capacity, 0, 0.0, 0, 0.0
        for execution in executions.values():
            if execution.state is not ExecutionState.HELD:
                count, at_work = count + 1, at_work + execution.room
                if execution.own:
                    begun, own = begun + 1, own + execution.room
        more = self.room_of(first, self.stage.last)
        if count >= MOST_UNDER_WAY or len(executions) >= MOST_HELD * capacity or at_work + more > capacity + ROUNDING:
            return False
        kept = min(self.stage.behind(first), capacity // KEPT_PART)
        most = capacity - kept + ROUNDING
        if self.stage.first > 0:
            return at_work + more <= most
        if first == 0:
            return own + more <= most
        usual = own / begun if begun else 1.0
        wanted = min(window * usual, capacity - kept) - own  # nobody else can begin ours: others' can go on
        others = at_work - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING


__all__ = ["MOST_HELD", "StageLoad"]

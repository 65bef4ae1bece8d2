"""Virtual time: what is to happen, in order. Equal times happen in the order in which they were asked for."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.core.units import Seconds

Action = Callable[[], None]


class Timer:
    """Something that is to happen, and may be called off."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


@dataclass(slots=True)
class Agenda:
    now: Seconds = 0.0
    events: int = 0  # that have happened
    _heap: list[tuple[Seconds, int, Timer]] = field(default_factory=list)
    _asked: int = 0

    def at(self, when: Seconds, action: Action) -> Timer:
        """At `when`, or now if that is over."""
        self._asked += 1
        timer = Timer(action)
        heapq.heappush(self._heap, (max(when, self.now), self._asked, timer))
        return timer

    def after(self, delay_s: Seconds, action: Action) -> Timer:
        return self.at(self.now + delay_s, action)

    @property
    def next_at(self) -> Seconds | None:
        """When the next thing happens; None if nothing will."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, until: Seconds) -> None:
        """Lets everything happen up to `until`, and makes it that late."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, timer = heapq.heappop(heap)
            if timer.action is not None:
                self.now = when
                self.events += 1
                timer.action()
        self.now = max(self.now, until)

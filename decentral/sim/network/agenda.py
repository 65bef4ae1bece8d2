"""Virtual time: a queue of timed actions. Actions of equal times happen in the order in which they were asked for."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decentral.core.units import Seconds

NEAR_S = 0.25  # only actions in the present bundle of this length are sorted; later bundles wait unsorted

Action = Callable[[], None]


class Timer(list[Any]):
    """[when, number, action]: an action that may be called off. It is a list because lists are compared fast."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


@dataclass(slots=True)
class Agenda:
    """A heap of the next actions, small enough for the processor's cache, and bundles of later ones.

    Most of the timers that ten thousand peers set are called off, and those in a later bundle are then never sorted.
    """

    now: Seconds = 0.0
    events: int = 0  # actions that have happened
    _near: list[Timer] = field(default_factory=list)  # heap of the actions before `_horizon`
    _horizon: Seconds = 0.0
    _later: dict[int, list[Timer]] = field(default_factory=dict)  # bundles by their number, `when` / NEAR_S
    _order: list[int] = field(default_factory=list)  # heap of the bundles' numbers
    _asked: int = 0

    def at(self, when: Seconds, action: Action) -> Timer:
        """Lets the action happen at `when`, or now if that is over."""
        self._asked += 1
        when = when if when > self.now else self.now
        timer = Timer((when, self._asked, action))
        if when < self._horizon:
            heapq.heappush(self._near, timer)
            return timer
        number = int(when / NEAR_S)
        if number not in self._later:
            self._later[number] = []
            heapq.heappush(self._order, number)
        self._later[number].append(timer)
        return timer

    def after(self, delay_s: Seconds, action: Action) -> Timer:
        return self.at(self.now + delay_s, action)

    def run(self, until: Seconds) -> None:
        """Lets all actions up to `until` happen; `until` is the time afterwards."""
        while self._more(until):
            near = self._near
            while near and near[0][0] <= until:
                when, _, action = heapq.heappop(near)
                if action is not None:
                    self.now = when
                    self.events += 1
                    action()
            if near:
                break
        self.now = max(self.now, until)

    def _more(self, until: Seconds) -> bool:
        """Whether an action is on the heap; opens the next bundles if need be, as far as `until`."""
        while not self._near and self._order and self._order[0] * NEAR_S <= until:
            number = heapq.heappop(self._order)
            self._near = [timer for timer in self._later.pop(number) if timer[2] is not None]
            heapq.heapify(self._near)
            self._horizon = (number + 1) * NEAR_S
        return bool(self._near)


@dataclass(slots=True)
class TimeLimit:
    """A time limit that many things have, with one timer for the oldest of them instead of one for each."""

    agenda: Agenda
    lasts_s: Seconds
    _due: deque[tuple[Seconds, Callable[[], bool], Action]] = field(default_factory=deque)
    _armed: bool = False

    def watch(self, done: Callable[[], bool], late: Action) -> None:
        """Calls `late` after `lasts_s` unless `done()` by then."""
        self._due.append((self.agenda.now + self.lasts_s, done, late))
        self._arm()

    def _look(self) -> None:
        self._armed = False
        while (due := self._first()) is not None and due <= self.agenda.now:
            self._due.popleft()[2]()
        self._arm()

    def _first(self) -> Seconds | None:
        while self._due and self._due[0][1]():
            self._due.popleft()
        return self._due[0][0] if self._due else None

    def _arm(self) -> None:
        due = self._first()
        if due is not None and not self._armed:
            self._armed = True
            self.agenda.at(due, self._look)

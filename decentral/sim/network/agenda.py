"""Virtual time: a queue of timed actions. Actions with the same time run in the order in which they were scheduled."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decentral.core.units import Seconds

NEAR_S = 0.25  # actions further ahead are kept unsorted in groups; each group is for this much virtual time

Action = Callable[[], None]


class Timer(list[Any]):
    """A scheduled action that can be cancelled: [when, number, action]. It is a list, because lists sort fast."""

    __slots__ = ()

    def cancel(self) -> None:
        """Cancel the action; do nothing if the action has run."""
        self[2] = None


@dataclass(slots=True)
class Agenda:
    """Virtual time and the scheduled actions: a heap of the next actions, and unsorted groups of later actions.

    The heap is small enough for the processor's cache. Most timers of ten thousand peers are cancelled while they are
    in a group, and are never sorted.
    """

    now: Seconds = 0.0
    events: int = 0  # number of actions that have run
    _near: list[Timer] = field(default_factory=list)  # heap of the actions that are due before `_horizon`
    _horizon: Seconds = 0.0
    _later: dict[int, list[Timer]] = field(default_factory=dict)  # int(due time / NEAR_S) -> unsorted actions
    _order: list[int] = field(default_factory=list)  # heap of the keys of `_later`
    _asked: int = 0  # number of actions scheduled so far, which orders actions with the same time

    def at(self, when: Seconds, action: Action) -> Timer:
        """Schedule an action for time `when`, or for now if `when` is in the past."""
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
        """Schedule an action for `delay_s` from now."""
        return self.at(self.now + delay_s, action)

    def run(self, until: Seconds) -> None:
        """Run all actions up to time `until`, then set `now` to `until`."""
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
        """If the heap is empty, fill it from the next group that begins by `until`; return whether it has an action."""
        while not self._near and self._order and self._order[0] * NEAR_S <= until:
            number = heapq.heappop(self._order)
            self._near = [timer for timer in self._later.pop(number) if timer[2] is not None]
            heapq.heapify(self._near)
            self._horizon = (number + 1) * NEAR_S
        return bool(self._near)


@dataclass(slots=True)
class TimeLimit:
    """One time limit for many tasks. Only one timer is set at a time, for the oldest unfinished task."""

    agenda: Agenda
    lasts_s: Seconds
    # For each watched task: its deadline, whether it is done, and the action to run if it misses the deadline.
    _due: deque[tuple[Seconds, Callable[[], bool], Action]] = field(default_factory=deque)
    _armed: bool = False

    def watch(self, done: Callable[[], bool], late: Action) -> None:
        """Call `late` after `lasts_s`, unless `done()` is true by then."""
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

"""Gradients whose starter says nothing: it is asked what became of them, and what is not coming is not waited for.

    held --wait--> asked --> it counts, or it does not: as if the starter had told us
                         --> still under way: asked again, after twice the time
                         --> no answer: the starter is gone, and nothing of it will ever be settled

A Settle that was lost, a starter that was killed, and a route that went another way without us so cost a moment, and
not the time for which legs are held. Taking somebody for dead who lives costs the micro-batches that wait here their
count at this layer, no more: a leg that was given up is never counted.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.codec import Envelope
from decentral.comm.messages import MAX_LEGS, Hop, LegId, Settle, Unsettled
from decentral.comm.transport import Ask
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import earliest
from decentral.core.units import Seconds

DOUBT_S = 1.0  # a leg is held for at least so long before its starter is asked
ANSWER_S = 3.0  # a starter that needs longer for a word is gone
KEPT = 4096  # routes that a starter remembers, to answer those who ask


@dataclass(slots=True)
class Doubts:
    """At a hop: which legs to ask about, and when."""

    run: RunId
    _due: dict[LegId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # when, and how long to wait after that
    _asking: dict[PeerId, tuple[LegId, ...]] = field(default_factory=dict)
    _wake_at: Seconds | None = None
    _changed: bool = False  # since that was found

    @property
    def wake_at(self) -> Seconds | None:
        if self._changed:
            self._wake_at = earliest(at for leg, (at, _) in self._due.items() if leg.starter not in self._asking)
            self._changed = False
        return self._wake_at

    def hold(self, leg: LegId, now: Seconds, took_s: Seconds) -> None:
        """`took_s`: from here to the end of its route and back. The way back to the starter takes about as long."""
        wait_s = max(DOUBT_S, took_s / 4)
        self._due[leg] = (now + wait_s, 2 * wait_s)
        self._changed = True

    def forget(self, leg: LegId) -> None:
        self._changed |= self._due.pop(leg, None) is not None

    def ask(self, now: Seconds) -> list[Ask]:
        """One question at a time to each starter, about all of its legs that are due."""
        due: dict[PeerId, list[LegId]] = {}
        for leg, (at, _) in self._due.items():
            if at <= now and leg.starter not in self._asking:
                due.setdefault(PeerId(leg.starter), []).append(leg)
        asks = []
        self._changed |= bool(due)
        for starter, legs in due.items():
            self._asking[starter] = told = tuple(legs[:MAX_LEGS])
            for leg in told:
                wait = self._due[leg][1]
                self._due[leg] = (now + wait, 2 * wait)
            asks.append(Ask(("doubt",), starter, Envelope(Unsettled(self.run, told)), ANSWER_S))
        return asks

    def answered(self, starter: PeerId) -> tuple[LegId, ...]:
        """An answer, or none, is here: the legs that were asked about."""
        self._changed = True
        return self._asking.pop(starter, ())

    def of(self, starter: PeerId) -> list[LegId]:
        """All legs of this starter that are held here."""
        return [leg for leg in self._due if leg.starter == starter]


@dataclass(slots=True)
class Completed:
    """At a starter: the routes that it has settled lately."""

    _routes: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)  # by number: (peer, first layer)
    _order: deque[int] = field(default_factory=deque)

    def add(self, number: int, hops: Iterable[Hop]) -> None:
        self._routes[number] = frozenset((hop.peer, hop.first) for hop in hops)
        self._order.append(number)
        if len(self._order) > KEPT:
            del self._routes[self._order.popleft()]

    def answer(self, run: RunId, asker: PeerId, legs: Iterable[LegId], under_way: frozenset[int]) -> Settle:
        """What became of these legs at the asker; a restarted starter remembers none, and so gives them up."""
        over = [leg for leg in legs if leg.number not in under_way]
        count = tuple(leg for leg in over if (asker, leg.first) in self._routes.get(leg.number, ()))
        return Settle(run, count, tuple(leg for leg in over if leg not in count))


__all__ = ["Completed", "Doubts"]

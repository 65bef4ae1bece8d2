"""Gradients whose origin peer says nothing: it is asked what became of them, and what is not coming is not waited for.

    held --wait--> asked --> it counts, or it does not: as if the origin peer had told us
                         --> still under way: asked again, after twice the time
                         --> no answer: the origin peer is gone, and nothing of it will ever be settled

A CommitDecision that was lost, an origin peer that was killed, and a route that went another way without us so cost a moment, and
not the time for which executions are held. Taking somebody for dead who lives costs the micro-batches that wait here their
count at this layer, no more: an execution that was given up is never counted.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.comm.routes.tags import CommitQueryTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitDecision, CommitQuery, ExecutionId, Hop
from decentral.comm.wire.transport import Ask
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import earliest
from decentral.core.units import Seconds

IN_DOUBT_S = 1.0  # an execution is held for at least so long before its origin peer is asked
COMMIT_QUERY_S = 3.0  # an origin peer that needs longer for a word is gone
COMMITS_KEPT = 4096  # routes that an origin peer remembers, to answer those who ask


@dataclass(slots=True)
class InDoubtExecutions:
    """At a hop: which executions to ask about, and when."""

    run: RunId
    _due: dict[ExecutionId, tuple[Seconds, Seconds]] = field(
        default_factory=dict
    )  # when, and how long to wait after that
    _asking: dict[PeerId, tuple[ExecutionId, ...]] = field(default_factory=dict)
    _wake_at: Seconds | None = None
    _changed: bool = False  # since that was found

    @property
    def wake_at(self) -> Seconds | None:
        if self._changed:
            self._wake_at = earliest(
                at for execution, (at, _) in self._due.items() if execution.origin not in self._asking
            )
            self._changed = False
        return self._wake_at

    def hold(self, execution: ExecutionId, now: Seconds, took_s: Seconds) -> None:
        """`took_s`: from here to the end of its route and back. The way back to the origin peer takes about as long."""
        wait_s = max(IN_DOUBT_S, took_s / 4)
        self._due[execution] = (now + wait_s, 2 * wait_s)
        self._changed = True

    def forget(self, execution: ExecutionId) -> None:
        self._changed |= self._due.pop(execution, None) is not None

    def ask(self, now: Seconds) -> list[Ask]:
        """One question at a time to each origin peer, about all of its executions that are due."""
        due: dict[PeerId, list[ExecutionId]] = {}
        for execution, (at, _) in self._due.items():
            if at <= now and execution.origin not in self._asking:
                due.setdefault(PeerId(execution.origin), []).append(execution)
        asks = []
        self._changed |= bool(due)
        for origin, executions in due.items():
            self._asking[origin] = told = tuple(executions[:MAX_EXECUTIONS])
            for execution in told:
                wait = self._due[execution][1]
                self._due[execution] = (now + wait, 2 * wait)
            asks.append(Ask(CommitQueryTag(), origin, Envelope(CommitQuery(self.run, told)), COMMIT_QUERY_S))
        return asks

    def answered(self, origin: PeerId) -> tuple[ExecutionId, ...]:
        """An answer, or none, is here: the executions that were asked about."""
        self._changed = True
        return self._asking.pop(origin, ())

    def of(self, origin: PeerId) -> list[ExecutionId]:
        """All executions of this origin peer that are held here."""
        return [execution for execution in self._due if execution.origin == origin]


@dataclass(slots=True)
class CommitLog:
    """At an origin peer: the routes that it has settled lately."""

    _routes: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)  # by number: (peer, first layer)
    _order: deque[int] = field(default_factory=deque)

    def add(self, number: int, hops: Iterable[Hop]) -> None:
        self._routes[number] = frozenset((hop.peer, hop.first) for hop in hops)
        self._order.append(number)
        if len(self._order) > COMMITS_KEPT:
            del self._routes[self._order.popleft()]

    def answer(
        self, run: RunId, asker: PeerId, executions: Iterable[ExecutionId], under_way: frozenset[int]
    ) -> CommitDecision:
        """What became of these executions at the asker; a restarted origin peer remembers none, and so gives them up."""
        over = [execution for execution in executions if execution.number not in under_way]
        count = tuple(
            execution for execution in over if (asker, execution.first) in self._routes.get(execution.number, ())
        )
        return CommitDecision(run, count, tuple(execution for execution in over if execution not in count))


__all__ = ["CommitLog", "InDoubtExecutions"]

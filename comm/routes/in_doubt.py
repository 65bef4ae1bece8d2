"""In-doubt resolution: an origin peer that says nothing of gradients held here is asked what became of them.

    held --wait--> asked --> committed or aborted, as if the origin peer had told us by itself
                         --> still under way: asked again, after twice the time
                         --> no answer: the origin peer is gone, and its micro-batches are aborted

So a lost CommitDecision, an origin peer that was killed, and a route that left this peer aside cost a moment, and not
the time for which gradients are held. If a living origin peer is taken for dead, its micro-batches that wait here do
not count at this stage, and nothing worse: an execution that was aborted is never counted.
"""

from dataclasses import dataclass, field

from decentral.comm.routes.tags import CommitQueryTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_EXECUTIONS, CommitQuery, ExecutionId
from decentral.comm.wire.transport import Ask
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import earliest
from decentral.core.units import Seconds

IN_DOUBT_S = 1.0  # an execution is held for at least so long before its origin peer is asked
COMMIT_QUERY_S = 3.0  # deadline of a CommitQuery; an origin peer that takes longer is gone


@dataclass(slots=True)
class InDoubtExecutions:
    """Which held executions to ask about, and when."""

    run: RunId
    _due: dict[ExecutionId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # when, and the wait after that
    _asking: dict[PeerId, tuple[ExecutionId, ...]] = field(default_factory=dict)
    _wake_at: Seconds | None = None
    _changed: bool = False  # since _wake_at was found

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
        """The question to this peer was answered, or failed: the executions that it was about."""
        self._changed = True
        return self._asking.pop(origin, ())

    def of(self, origin: PeerId) -> list[ExecutionId]:
        """All executions of this origin peer that are held here."""
        return [execution for execution in self._due if execution.origin == origin]


__all__ = ["InDoubtExecutions"]

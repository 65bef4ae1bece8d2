"""Two-phase commit of a micro-batch's gradients: its origin peer decides, and every peer of its route hears the decision.

    at the origin peer    all gradients of the route are there --> commit to each hop; kept, to answer commit queries
    at a hop              gradients held --decision--> committed or aborted in the ledger

A decision names executions; it is carried out once, and only if it comes from the peer that may take it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from decentral.comm.routes.decisions import DecisionOutboxes
from decentral.comm.routes.execution import ExecutionState
from decentral.comm.routes.execution_table import ExecutionTable
from decentral.comm.wire.messages import CommitDecision, ExecutionId, Hop
from decentral.comm.wire.transport import Answered, AskFailed
from decentral.core.ids import PeerId, RunId
from decentral.core.machine import Effect
from decentral.core.reasons import Reason

COMMITS_KEPT = 4096  # routes that an origin peer remembers, to answer commit queries


@dataclass(slots=True)
class CommitLog:
    """The routes that an origin peer has committed lately."""

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
        """The decision on these executions at the asker; a restarted origin peer knows none, and so aborts them."""
        over = [execution for execution in executions if execution.number not in under_way]
        commit = tuple(one for one in over if (asker, one.first) in self._routes.get(one.number, ()))
        return CommitDecision(run, commit, tuple(execution for execution in over if execution not in commit))


@dataclass(slots=True)
class CommitProtocol:
    run: RunId
    peer: PeerId
    table: ExecutionTable
    outboxes: DecisionOutboxes
    _log: CommitLog = field(default_factory=CommitLog)

    def commit(self, id: ExecutionId, hops: Sequence[Hop]) -> None:
        """A micro-batch of ours has its gradients at every hop: from now on they count."""
        for hop in hops:
            self.outboxes.commit(PeerId(hop.peer), ExecutionId(id.origin, id.number, hop.first))
        self._log.add(id.number, hops)

    def decided(self, sender: PeerId, decision: CommitDecision) -> list[Effect]:
        """Carries out another peer's decision. Only the origin peer commits; whoever asked for an execution may abort."""
        effects: list[Effect] = []
        for id in decision.commit:
            execution = self.table.find(id)
            if execution is not None and execution.state is ExecutionState.HELD and sender == id.origin:
                effects += self.table.ledger.commit(execution.token)
                self.table.end_held(execution, Reason.COUNTED)
                self.table.remember_counted(id)
        for id in decision.abort:
            execution = self.table.find(id)
            if execution is not None and sender in (id.origin, execution.asker):
                effects += self.table.give_up(execution, Reason.MOVED)
        return effects

    def answer(self, asker: PeerId, executions: Sequence[ExecutionId]) -> CommitDecision:
        """What became of these executions at the asker, as far as this peer is their origin peer."""
        own = [execution for execution in executions if execution.origin == self.peer]
        under_way = frozenset(execution.id.number for execution in self.table.by_token.values() if execution.own)
        return self._log.answer(self.run, asker, own, under_way)

    def answered(self, event: Answered | AskFailed) -> list[Effect]:
        """The outcome of our own commit query. An origin peer that does not answer is gone."""
        asked = set(self.table.in_doubt.answered(event.peer))
        if isinstance(event, AskFailed):
            return self.decided(event.peer, CommitDecision(self.run, (), tuple(self.table.in_doubt.of(event.peer))))
        decision = event.envelope.message
        if not isinstance(decision, CommitDecision):
            return []
        commit, abort = (
            tuple(execution for execution in executions if execution in asked)
            for executions in (decision.commit, decision.abort)
        )
        return self.decided(event.peer, CommitDecision(decision.run, commit, abort))


__all__ = ["CommitProtocol"]

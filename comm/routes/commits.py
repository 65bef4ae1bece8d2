"""Two-phase commit of a micro-batch's gradients: its origin peer decides, and each peer of its route is told.

    at the origin peer    all gradients of the route are there --> commit to each hop; kept, to answer commit queries
    at a hop              gradients held --decision--> committed or aborted in the ledger

A decision names executions; it is carried out once, and only if it comes from the peer that may take it.
"""

from collections.abc import Sequence
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
COUNTED_KEPT = 4096  # executions of others that are known to have been counted


@dataclass(slots=True)
class CommitProtocol:
    run: RunId
    peer: PeerId
    table: ExecutionTable
    outboxes: DecisionOutboxes
    _routes: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)  # by number: (peer, first layer)

    def commit(self, id: ExecutionId, hops: Sequence[Hop]) -> None:
        """A micro-batch of ours has its gradients at every hop: from now on they count."""
        for hop in hops:
            self.outboxes.commit(PeerId(hop.peer), ExecutionId(id.origin, id.number, hop.first))
        self._routes[id.number] = frozenset((hop.peer, hop.first) for hop in hops)
        if len(self._routes) > COMMITS_KEPT:
            del self._routes[next(iter(self._routes))]

    def decided(self, sender: PeerId, decision: CommitDecision) -> list[Effect]:
        """Carries out another peer's decision. Only the origin peer may commit; the asker may abort, too."""
        effects: list[Effect] = []
        for id in decision.commit:
            execution = self.table.find(id)
            if execution is not None and execution.state is ExecutionState.HELD and sender == id.origin:
                effects += self.table.ledger.commit(execution.token)
                self.table.end_held(execution, Reason.COUNTED)
                self.table.counted[id] = None
                if len(self.table.counted) > COUNTED_KEPT:
                    del self.table.counted[next(iter(self.table.counted))]
        for id in decision.abort:
            execution = self.table.find(id)
            if execution is not None and sender in (id.origin, execution.asker):
                effects += self.table.give_up(execution, Reason.MOVED)
        return effects

    def answer(self, asker: PeerId, executions: Sequence[ExecutionId]) -> CommitDecision:
        """Decides on executions at the asker of which this peer is the origin. What is still under way is left out.

        A peer that was restarted knows none of its old routes, and so aborts them.
        """
        under_way = {execution.id.number for execution in self.table.by_token.values() if execution.own}
        over = [one for one in executions if one.origin == self.peer and one.number not in under_way]
        commit = tuple(one for one in over if (asker, one.first) in self._routes.get(one.number, ()))
        return CommitDecision(self.run, commit, tuple(one for one in over if one not in commit))

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

"""The executions at this peer, by token and by id, from their beginning to their end; and which passes may begin.

An execution is here until its gradients are committed or aborted, or it is given up. What the compute thread is at work
on stays, as GONE, until the thread is done with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.routes.decisions import DecisionOutboxes
from decentral.comm.routes.execution import AWAY, ENDED, GONE, HELD, ForwardedExecution, StageExecution
from decentral.comm.routes.in_doubt import InDoubtExecutions
from decentral.comm.routes.job_queue import JobQueue
from decentral.comm.routes.ledger import Ledger
from decentral.comm.routes.tags import ExecutionTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ExecutionId, Refused
from decentral.comm.wire.transport import Reply
from decentral.core.jobs import Backward, Forget, Forward
from decentral.core.machine import Effect, log
from decentral.core.reasons import Reason


@dataclass(slots=True)
class ExecutionTable:
    overlap: bool  # StageConfig.overlap
    ledger: Ledger
    outboxes: DecisionOutboxes
    in_doubt: InDoubtExecutions
    jobs: JobQueue = field(default_factory=JobQueue)
    by_token: dict[int, StageExecution] = field(default_factory=dict)
    counted: dict[ExecutionId, None] = field(default_factory=dict)  # the latest of others, the oldest first
    _by_id: dict[ExecutionId, ForwardedExecution] = field(default_factory=dict)  # but for those that are GONE
    _last_token: int = 0

    def new_token(self) -> int:
        self._last_token += 1
        return self._last_token

    def add(self, execution: StageExecution) -> None:
        self.by_token[execution.token] = execution
        if isinstance(execution, ForwardedExecution):
            self._by_id[execution.id] = execution

    def find(self, id: ExecutionId) -> ForwardedExecution | None:
        """The execution that another peer means by this id."""
        return self._by_id.get(id)

    def awaits(self, tag: ExecutionTag) -> StageExecution | None:
        """The execution that waits for the answer to this question, if one still does."""
        execution = self.by_token.get(tag.token)
        if execution is None or execution.state is not AWAY:
            return None
        hop = execution.sent
        return execution if (hop.to or hop.offers) and hop.attempts == tag.attempt else None

    # Which passes may begin

    @property
    def quiet(self) -> bool:
        """Whether no execution here is between its forward and its backward pass."""
        if self.overlap:
            return True
        waiting = self.jobs.waiting
        return all(execution.state is HELD or token in waiting for token, execution in self.by_token.items())

    @property
    def step_waits(self) -> bool:
        """Whether gradients wait for a step: forward passes that begin now would meet weights of two versions."""
        return self.ledger.waiting and not self.overlap

    def dispatch(self) -> list[Forward | Backward]:
        """The jobs that the compute thread gets now."""
        return self.jobs.dispatch(self._older_than_pending() if self.step_waits else None)

    def _older_than_pending(self) -> Callable[[int], bool]:
        """Which forward passes may begin while gradients wait for a step: those of micro-batches that are older than
        one that is between its passes here.

        They make the step wait longer, but not for ever: new micro-batches are younger. If all were kept back, two
        peers that each wait for a micro-batch whose forward pass the other one keeps back would wait until they give
        both up. The oldest of all is never kept back by one that is kept back itself (wait-die: Rosenkrantz, Stearns,
        Lewis 1978).
        """
        waiting = self.jobs.waiting
        pending = [
            execution.order
            for token, execution in self.by_token.items()
            if execution.state is not HELD and execution.state is not GONE and token not in waiting
        ]
        youngest = max(pending, default=None)
        return lambda token: youngest is not None and self.by_token[token].order < youngest

    # The end of an execution

    def give_up(self, execution: StageExecution, reason: str) -> list[Effect]:
        """Whoever waits for it is told why. If its gradients are in a sum already, they are aborted."""
        effects: list[Effect] = []
        hop = execution.next_hop
        if isinstance(execution, ForwardedExecution) and execution.request is not None:
            effects.append(Reply(execution.request, Envelope(Refused(reason))))
            execution.request = None
        if execution.own:
            tries = len(hop.tried) if hop else 0
            effects.append(log("abandoned", number=execution.id.number, reason=reason, tries=tries))
        if execution.state is HELD:
            effects += self.ledger.abort(execution.token)
            self.end_held(execution, reason)
            return effects
        if execution.state is AWAY and hop and hop.to:
            self.outboxes.abort(hop.to, execution.next_id)
        self.jobs.drop(execution.token)
        self._by_id.pop(execution.id, None)
        if execution.token in self.jobs.running:
            execution.move(GONE, reason)
            return effects
        return effects + self.let_go(execution, reason)

    def give_up_held(self, new: StageExecution) -> list[Effect]:
        """Gives up what is held of a micro-batch for layers with which it comes again: no route has both.

        Their sum would wait for the origin peer to decide, and this new execution for a step that takes the sum.
        """
        micro_batch = new.id.origin, new.id.number
        held = [
            one
            for one in self.by_token.values()
            if (one.id.origin, one.id.number) == micro_batch
            and one.state is HELD
            and one.id.first < new.last
            and new.id.first < one.last
        ]
        return [effect for one in held for effect in self.give_up(one, Reason.MOVED)]

    def let_go(self, execution: StageExecution, cause: str) -> list[Effect]:
        """The execution leaves before its backward pass, and the compute thread forgets its activations."""
        self.end(execution, cause)
        return [Forget((execution.token,))]

    def end_held(self, execution: StageExecution, cause: str) -> None:
        """The execution leaves after its backward pass."""
        self.in_doubt.forget(execution.id)
        self._by_id.pop(execution.id, None)
        self.end(execution, cause)

    def end(self, execution: StageExecution, cause: str) -> None:
        execution.move(ENDED, cause)
        self.by_token.pop(execution.token)


__all__ = ["ExecutionTable"]

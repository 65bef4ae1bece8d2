"""The table of the executions at this peer, and the queue of their passes for the training thread.

Start with `ExecutionTable`. An execution stays in the table until its gradients are committed or aborted, or until
it is given up. If it is given up during a pass, it stays in state GONE until the training thread has finished the pass.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from decentral.comm.pipeline.commits import CommitProtocol, HoldLimits
from decentral.comm.pipeline.execution import (
    AWAY,
    BACKWARD,
    GONE,
    IN_DOUBT,
    ExecutionEvent,
    ForwardedExecution,
    Paused,
    StageExecution,
)
from decentral.comm.pipeline.ledger import Ledger
from decentral.comm.pipeline.stage import StageLoad
from decentral.comm.pipeline.tags import ExecutionTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import ExecutionId, Refused
from decentral.comm.wire.transport import Effect, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import Backward, Forget, Forward
from decentral.core.journal.events import AbandonedLine
from decentral.core.machine import Log
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

COUNTED_KEPT = 4096  # we remember this many committed executions of other peers, to refuse late requests for them
PATIENT_STEPS = 2  # peers on others' routes let forward passes begin until the gradients would do for this many steps
# A peer on others' routes holds forward passes back only once it has this many gradients for each execution that its
# step would wait for. By Little's law, as many pass in the time of such a wait: pauses then cost a fifth.
PATIENT_TIMES = 4
MOST_AWAITED = 32  # such a peer waits for at most this many gradients because of PATIENT_TIMES
# The training thread has at most this many jobs, so that it can begin the next job as soon as it has finished one.
JOBS_AT_ONCE = 2


@dataclass(slots=True)
class JobQueue:
    """The passes that wait for the training thread: backward before forward, older executions before newer ones.

    An execution has one job at a time. At most JOBS_AT_ONCE jobs are at the thread. The other jobs wait in this queue,
    and can still be dropped.
    """

    running: set[int] = field(default_factory=set)  # ids (`local_id`) of the executions whose job is at the thread
    # Forward passes that wait for the next synchronous round, by StageExecution.local_id.
    early: dict[int, Forward] = field(default_factory=dict)
    # Waiting passes, sorted so that backward passes come first, then older executions.
    _ready: list[tuple[bool, int, Forward | Backward]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Return whether the training thread has as many jobs as it may get."""
        return len(self.running) >= JOBS_AT_ONCE

    @property
    def waiting(self) -> set[int]:
        """Return the ids (`local_id`) of the executions whose forward pass waits here."""
        return {local_id for is_forward, local_id, _ in self._ready if is_forward}

    def push(self, job: Forward | Backward) -> None:
        """Queue a job in its place: backward before forward, older before newer."""
        bisect.insort(self._ready, (isinstance(job, Forward), job.local_id, job))

    def drop(self, local_id: int) -> None:
        """Remove this execution's job if it still waits here."""
        self.early.pop(local_id, None)
        self._ready = [item for item in self._ready if item[1] != local_id]

    def dispatch(self, may: Callable[[int], bool] | None = None) -> list[Forward | Backward]:
        """Return the jobs that the training thread gets now, and mark them as running.

        Args:
            may: Returns, for an execution's id, whether its forward pass may begin; None if all may begin.
        """
        jobs = []
        for is_forward, local_id, job in list(self._ready):
            if self.full:
                break
            if may is None or not is_forward or may(local_id):
                self.drop(local_id)
                self.running.add(local_id)
                jobs.append(job)
        return jobs


@dataclass(slots=True)
class ExecutionTable:
    """All executions at this peer; its methods add, give up and remove executions."""

    load: StageLoad
    ledger: Ledger
    commits: CommitProtocol
    jobs: JobQueue = field(default_factory=JobQueue)
    decision_limits: HoldLimits = field(default_factory=HoldLimits)
    by_local_id: dict[int, StageExecution] = field(default_factory=dict)
    counted: dict[ExecutionId, None] = field(default_factory=dict)  # other peers' committed executions
    by_id: dict[ExecutionId, ForwardedExecution] = field(default_factory=dict)  # other peers' executions, unless GONE
    local_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, execution: StageExecution) -> None:
        """Add a new execution to the table."""
        self.by_local_id[execution.local_id] = execution
        if isinstance(execution, ForwardedExecution):
            self.by_id[execution.id] = execution

    def awaits(self, tag: ExecutionTag) -> StageExecution | None:
        """Return the execution that still waits for the answer to the question with this tag, or None."""
        execution = self.by_local_id.get(tag.local_id)
        if execution is None or execution.state is not AWAY:
            return None
        hop = execution.sent
        return execution if not isinstance(hop.place, Paused) and hop.attempts == tag.attempt else None

    @property
    def quiet(self) -> bool:
        """Return whether a step may change the weights: no execution here is between its forward and backward pass.

        With `overlap` this is always true, as stale gradients are accepted.
        """
        if self.load.stage.overlap:
            return True
        waiting = self.jobs.waiting
        return all(
            execution.state is IN_DOUBT or local_id in waiting for local_id, execution in self.by_local_id.items()
        )

    @property
    def step_waits(self) -> bool:
        """Return whether a step is due, and new forward passes have to wait for it.

        A step must not change the weights between an execution's forward and backward pass. With `overlap` a step
        may change the weights, so no pass waits.

        Peers on others' routes usually step in the origin peers' pauses. They hold new forward passes back only when
        they have the gradients of PATIENT_STEPS steps, less one micro-batch, and PATIENT_TIMES gradients for each
        execution in flight behind them or in doubt; else the route would stop once for each of its peers, and once for
        each origin peer whose micro-batches come at other times.
        """
        if self.load.stage.overlap:
            return False
        if self.load.stage.first == 0 and not self.by_id:
            return self.ledger.waiting()
        awaited = sum(one.state in (AWAY, BACKWARD, IN_DOUBT) for one in self.by_local_id.values())
        return self.ledger.waiting(PATIENT_STEPS, min(MOST_AWAITED, PATIENT_TIMES * awaited))

    def dispatch(self) -> list[Forward | Backward]:
        """Return the jobs that the training thread gets now.

        While a step is due, a forward pass begins only if its micro-batch is older than another micro-batch whose
        forward pass is done here and whose backward pass is not.
        """
        return self.jobs.dispatch(self._older_than_pending() if self.step_waits else None)

    def _older_than_pending(self) -> Callable[[int], bool]:
        """Return a function that tells, by local id, whether a forward pass may begin while gradients wait for a step.

        It may begin if its micro-batch is older than some micro-batch that is between its two passes here. Such passes
        delay the step only for a bounded time, since new micro-batches are younger. If all forward passes had to wait
        for the step, two peers could wait for each other's micro-batches: a deadlock. By this rule, the oldest
        micro-batch never waits (wait-die: Rosenkrantz, Stearns, Lewis 1978).
        """
        waiting = self.jobs.waiting
        pending = [
            execution.order
            for local_id, execution in self.by_local_id.items()
            if execution.state not in (IN_DOUBT, GONE) and local_id not in waiting
        ]
        youngest = max(pending, default=None)
        return lambda local_id: youngest is not None and self.by_local_id[local_id].order < youngest

    def give_up(self, execution: StageExecution, reason: str) -> list[Effect]:
        """End an execution before its decision: refuse its open requests, abort its gradients, and free what it keeps.

        Args:
            execution: Any execution that is not GONE or ENDED.
            reason: Sent to the peers that requested the execution; for a micro-batch of ours, written to the journal.
        """
        effects: list[Effect] = []
        hop = execution.next_hop
        if isinstance(execution, ForwardedExecution):
            effects += [Reply(request, Envelope(Refused(reason))) for request in execution.answered()]
        if execution.own:
            tries = len(hop.tried) if hop else 0
            effects.append(Log(AbandonedLine(number=execution.id.number, reason=reason, tries=tries)))
        if execution.state is IN_DOUBT:
            effects += self.ledger.abort(execution.local_id)
            self.end_in_doubt(execution, reason)
            return effects
        if execution.state is AWAY and hop and hop.to:
            self.commits.abort(hop.to, execution.next_id)
        self.jobs.drop(execution.local_id)
        self.by_id.pop(execution.id, None)
        if execution.local_id in self.jobs.running:
            execution.move(ExecutionEvent.GIVEN_UP_AT_WORK, reason)
            return effects
        return effects + self.let_go(execution, ExecutionEvent.GIVEN_UP, reason)

    def usually_decides_s(self, origin: PeerId) -> Seconds | None:
        """Return the seconds that an origin peer usually takes to decide; None if unknown or not `exact`.

        In a run with exact gradients, steps wait for silent peers, so shorter deadlines are worth more false alarms.
        """
        return self.decision_limits.usual_s(origin) if self.load.stage.exact else None

    def give_up_in_doubt(self, new: StageExecution) -> list[Effect]:
        """Give up IN_DOUBT executions of the same micro-batch whose layers overlap with those of a new execution.

        No route contains both executions. Without this method, the old execution's gradient sum would wait for the
        origin peer's decision, while the new execution would wait for the step with that sum.
        """
        micro_batch = new.id.origin, new.id.number
        overlapping = (one for one in self.by_id.values() if one.id.first < new.last and new.id.first < one.last)
        in_doubt = (one for one in overlapping if one.state is IN_DOUBT)
        old = [one for one in in_doubt if (one.id.origin, one.id.number) == micro_batch]
        return [effect for one in old for effect in self.give_up(one, Reason.MOVED)]

    def let_go(self, execution: StageExecution, event: ExecutionEvent, cause: str) -> list[Effect]:
        """Remove an execution that gets no backward pass; return the job that frees its memory."""
        self.end(execution, event, cause)
        return [Forget((execution.local_id,))]

    def end_in_doubt(self, execution: StageExecution, cause: str) -> None:
        """Remove an execution in state IN_DOUBT, and send no more queries about it."""
        self.commits.forget(execution.id)
        self.by_id.pop(execution.id, None)
        self.end(execution, ExecutionEvent.DECIDED, cause)

    def end(self, execution: StageExecution, event: ExecutionEvent, cause: str) -> None:
        """Remove an execution from the table, by an event that leads to ENDED."""
        execution.move(event, cause)
        self.by_local_id.pop(execution.local_id)

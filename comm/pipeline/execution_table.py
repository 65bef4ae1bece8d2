"""The executions at this peer, by token and by id, from their beginning to their end; and which passes may begin.

An execution is here until its gradients are committed, aborted, or given up. What the training thread is at work
on stays, as GONE, until the thread is done with it.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from decentral.comm.pipeline.commits import CommitProtocol, HoldLimits
from decentral.comm.pipeline.execution import (
    AWAY,
    GONE,
    HELD,
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

COUNTED_KEPT = 4096  # executions of others that are known to have been counted
JOBS_AT_ONCE = 2  # jobs at the training thread: one in work, one that follows without a pause


@dataclass(slots=True)
class JobQueue:
    """Work for the training thread: backward passes before forward ones, older executions before newer ones.

    An execution has one job at a time. A few jobs are at the thread; the others wait here, where they can be dropped.
    """

    running: set[int] = field(default_factory=set)  # tokens of executions whose job is at the thread
    early: dict[int, Forward] = field(default_factory=dict)  # forward passes that wait for the next round, by token
    _ready: list[tuple[bool, int, Forward | Backward]] = field(default_factory=list)  # sorted: is it forward, token

    @property
    def full(self) -> bool:
        return len(self.running) >= JOBS_AT_ONCE

    @property
    def waiting(self) -> set[int]:
        """Executions whose forward pass has not begun."""
        return {token for is_forward, token, _ in self._ready if is_forward}

    def push(self, job: Forward | Backward) -> None:
        bisect.insort(self._ready, (isinstance(job, Forward), job.token, job))

    def drop(self, token: int) -> None:
        """The job of this execution that waits here is not computed."""
        self.early.pop(token, None)
        self._ready = [item for item in self._ready if item[1] != token]

    def dispatch(self, may: Callable[[int], bool] | None = None) -> list[Forward | Backward]:
        """The jobs that the thread gets now. `may(token)`: whether that forward pass may begin; None: any may."""
        jobs = []
        for is_forward, token, job in list(self._ready):
            if self.full:
                break
            if may is None or not is_forward or may(token):
                self.drop(token)
                self.running.add(token)
                jobs.append(job)
        return jobs


@dataclass(slots=True)
class ExecutionTable:
    load: StageLoad
    ledger: Ledger
    commits: CommitProtocol
    jobs: JobQueue = field(default_factory=JobQueue)
    holds: HoldLimits = field(default_factory=HoldLimits)
    by_token: dict[int, StageExecution] = field(default_factory=dict)
    counted: dict[ExecutionId, None] = field(default_factory=dict)  # the latest of others, the oldest first
    by_id: dict[ExecutionId, ForwardedExecution] = field(default_factory=dict)  # others', but for those that are GONE
    tokens: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # for new executions

    def add(self, execution: StageExecution) -> None:
        self.by_token[execution.token] = execution
        if isinstance(execution, ForwardedExecution):
            self.by_id[execution.id] = execution

    def awaits(self, tag: ExecutionTag) -> StageExecution | None:
        """The execution that waits for the answer to this question, if one still does."""
        execution = self.by_token.get(tag.token)
        if execution is None or execution.state is not AWAY:
            return None
        hop = execution.sent
        return execution if not isinstance(hop.place, Paused) and hop.attempts == tag.attempt else None

    # Which passes may begin

    @property
    def quiet(self) -> bool:
        """Whether no execution here is between its forward and its backward pass."""
        if self.load.stage.overlap:
            return True
        waiting = self.jobs.waiting
        return all(execution.state is HELD or token in waiting for token, execution in self.by_token.items())

    @property
    def step_waits(self) -> bool:
        """Whether gradients wait for a step: forward passes that begin now would meet weights of two versions."""
        return self.ledger.waiting and not self.load.stage.overlap

    def dispatch(self) -> list[Forward | Backward]:
        """The jobs that the training thread gets now."""
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
            if execution.state not in (HELD, GONE) and token not in waiting
        ]
        youngest = max(pending, default=None)
        return lambda token: youngest is not None and self.by_token[token].order < youngest

    # The end of an execution

    def give_up(self, execution: StageExecution, reason: str) -> list[Effect]:
        """Whoever waits for it is told why. If its gradients are in a sum already, they are aborted."""
        effects: list[Effect] = []
        hop = execution.next_hop
        if isinstance(execution, ForwardedExecution):
            effects += [Reply(request, Envelope(Refused(reason))) for request in execution.answered()]
        if execution.own:
            tries = len(hop.tried) if hop else 0
            effects.append(Log(AbandonedLine(number=execution.id.number, reason=reason, tries=tries)))
        if execution.state is HELD:
            effects += self.ledger.abort(execution.token)
            self.end_held(execution, reason)
            return effects
        if execution.state is AWAY and hop and hop.to:
            self.commits.abort(hop.to, execution.next_id)
        self.jobs.drop(execution.token)
        self.by_id.pop(execution.id, None)
        if execution.token in self.jobs.running:
            execution.move(ExecutionEvent.GIVEN_UP_AT_WORK, reason)
            return effects
        return effects + self.let_go(execution, ExecutionEvent.GIVEN_UP, reason)

    def usually_decides_s(self, origin: PeerId) -> Seconds | None:
        """How long this origin peer usually takes to decide, where steps wait for it; None: unknown, or they do not."""
        return self.holds.usual_s(origin) if self.load.stage.exact else None

    def give_up_held(self, new: StageExecution) -> list[Effect]:
        """Gives up what is held of a micro-batch for layers with which it comes again: no route has both.

        Their sum would wait for the origin peer to decide, and this new execution for a step that takes the sum.
        """
        micro_batch = new.id.origin, new.id.number
        overlapping = (one for one in self.by_id.values() if one.id.first < new.last and new.id.first < one.last)
        held = [one for one in overlapping if one.state is HELD and (one.id.origin, one.id.number) == micro_batch]
        return [effect for one in held for effect in self.give_up(one, Reason.MOVED)]

    def let_go(self, execution: StageExecution, event: ExecutionEvent, cause: str) -> list[Effect]:
        """The execution leaves before its backward pass, and the training thread forgets its activations."""
        self.end(execution, event, cause)
        return [Forget((execution.token,))]

    def end_held(self, execution: StageExecution, cause: str) -> None:
        """The execution leaves after its backward pass."""
        self.commits.forget(execution.id)
        self.by_id.pop(execution.id, None)
        self.end(execution, ExecutionEvent.DECIDED, cause)

    def end(self, execution: StageExecution, event: ExecutionEvent, cause: str) -> None:
        execution.move(event, cause)
        self.by_token.pop(execution.token)

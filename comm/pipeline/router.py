"""The router: takes micro-batches through peers that each hold a part of the model.

    own micro-batch    FORWARD --ForwardRequest--> AWAY --gradient--> BACKWARD --> counted; CommitDecision to each hop
    another peer's     FORWARD --ForwardRequest--> AWAY --gradient--> BACKWARD --> IN_DOUBT --CommitDecision--> counted
    at the last stage  FORWARD ------------------------------------------------> IN_DOUBT --CommitDecision--> counted

A ForwardRequest takes the activations to the next peer. The answer brings the gradient back, once that peer and all
peers behind it are done. Each layer counts a micro-batch exactly once or not at all: gradients are held in a sum
(comm/pipeline/ledger.py) until the origin peer commits them. The names of the route's hops come back to the origin peer
with the gradient, and the origin peer commits one route per micro-batch.

Start with `Router.handle`, which passes each event to the part that handles it. execution.py has the states of a
micro-batch here, lifecycle.py the reactions to events, forwarding.py the choice of the next peer, admission.py what
begins and what is refused, commits.py the decisions, and audits.py the audits of answers by recomputation.
"""

import math
from collections.abc import Callable
from random import Random

from decentral.comm.pipeline.admission import Admission, OwnMicroBatches
from decentral.comm.pipeline.audits import RouteAudits
from decentral.comm.pipeline.commits import CommitProtocol
from decentral.comm.pipeline.execution import GONE, StageExecution
from decentral.comm.pipeline.execution_table import ExecutionTable
from decentral.comm.pipeline.forwarding import Forwarding
from decentral.comm.pipeline.in_flight import FULL, LARGE_STEP, LEAN, InFlightLimit
from decentral.comm.pipeline.ledger import Ledger
from decentral.comm.pipeline.lifecycle import ExecutionLifecycle
from decentral.comm.pipeline.stage import RouteView, StageConfig, StageLoad
from decentral.comm.pipeline.tags import (
    AuditTag,
    CommitDecisionTag,
    CommitQueryTag,
    ExecutionTag,
    OfferTag,
    PresenceTag,
)
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CommitDecision, CommitQuery, Done, ForwardRequest
from decentral.comm.wire.transport import Answered, Asked, AskFailed, Effect, Event, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import BackwardDone, Compared, ExecutionFailed, ForwardDone, Sealed, Stepped, Undone
from decentral.core.journal.events import AppliedLine
from decentral.core.machine import Log, Woke, earliest
from decentral.core.reasons import Reason
from decentral.core.units import Seconds


class Router:
    """State machine (core/machine.py) of a peer's stage executions; it does nothing until `start` or `begin_round`."""

    def __init__(self, stage: StageConfig, view: RouteView, ledger: Ledger, chance: Random | None = None) -> None:
        """Create the router of one peer.

        Args:
            stage: The layers and limits of this peer.
            view: The other peers' layers and speeds, and the weights by which micro-batches are divided among them.
            ledger: Decides which gradients count.
            chance: Chooses the answers that are audited; other peers must not be able to predict it. None: no
                answers are audited.
        """
        full = stage.overlap or stage.synchronous or stage.micro_batches_per_step >= LARGE_STEP
        stages = -(-stage.layers // (stage.last - stage.first))
        self.ledger = ledger
        self.in_flight = InFlightLimit(FULL if full else LEAN, max(2, min(stages, stage.capacity)))
        self.load, self.commits = StageLoad(stage, view), CommitProtocol(stage.run, stage.peer)
        self.table = ExecutionTable(self.load, ledger, self.commits)
        self.forwarding = Forwarding(view, self.load, self.table)
        self.admission = Admission(self.table, self.forwarding, self.in_flight)
        self.own = OwnMicroBatches(self.table, self.admission, self.forwarding)
        self.audits = RouteAudits(self.forwarding, chance)
        self.lifecycle = ExecutionLifecycle(self.table, self.admission, self.forwarding, self.audits)
        self._wake: Seconds | None = None  # cached `wake_at`; infinity: no deadline is set; None: to be computed again

    @property
    def stage(self) -> StageConfig:
        """Return the layers and limits of this peer."""
        return self.load.stage

    @property
    def active(self) -> bool:
        """Return whether this peer trains."""
        return self.admission.active

    def start(self) -> None:
        """Start training: accept and begin executions from now on."""
        self.admission.start()

    @property
    def draining(self) -> bool:
        """Return whether this peer begins no new executions and finishes those that are here."""
        return self.admission.draining

    @property
    def executions(self) -> dict[int, StageExecution]:
        """Return the executions at this peer, by StageExecution.local_id."""
        return self.table.by_local_id

    @property
    def completed(self) -> int:
        """Return how many micro-batches of our own have completed their route."""
        return self.lifecycle.completed

    @property
    def wake_at(self) -> Seconds | None:
        """Return when `handle` needs its next timer event (Woke); None if another kind of event must come first."""
        if not self.admission.active:
            return None
        if self._wake is None:
            times = (execution.wake_at() for execution in self.table.by_local_id.values())
            at = earliest((self.own.look_at, self.commits.wake_at, *times))
            self._wake = math.inf if at is None else at
        return None if self._wake == math.inf else self._wake

    @property
    def idle(self) -> bool:
        """Return whether this peer has neither an execution nor a gradient that waits for a step."""
        return not self.table.by_local_id and not self.ledger.entries and not self.ledger.sealing

    def was_stopped(self, seconds: Seconds) -> None:
        """Extend the deadlines of IN_DOUBT executions by the seconds for which this process was stopped."""
        self.lifecycle.was_stopped(seconds)
        self._wake = None

    def drain(self) -> None:
        """Accept and begin no more executions; from now on a step needs only one gradient."""
        self.admission.drain(True)
        self.ledger.expect(1)

    def set_stage(self, stage: StageConfig) -> None:
        """Set this peer's layers and limits to those of `stage`, and accept executions again after a `drain`."""
        self.load.set_stage(stage)
        self.ledger.expect(stage.micro_batches_per_step)
        self.admission.drain(False)
        self.forwarding.forget_ends()

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        """Handle an event, and return its effects: Ask, Reply, jobs for the training thread, and journal lines.

        The journal lines are `counted`, `applied`, `uncounted`, `abandoned` and `audit`.
        """
        heard: list[Effect] | None = None
        if isinstance(event, Asked):
            answer = self.admission.answer(event)
            if answer is not None:
                return [Reply(event.request, Envelope(answer))]
        elif isinstance(event, Answered | AskFailed) and isinstance(event.tag, OfferTag):
            heard = self.lifecycle.offer_heard(event, now)
            if heard is None:
                return []
        self._wake = None
        self.ledger.quiet = self.table.quiet
        effects = self._react(event, now) if heard is None else heard
        self.ledger.quiet = self.table.quiet  # the event may have changed it
        effects += self.ledger.due_jobs()
        effects += self.table.dispatch()
        return effects + self.own.begin(now) + self.commits.tell()

    def _react(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return [*self.lifecycle.overdue(now), *self.commits.ask(now, self.table.usually_decides_s)]
            case Asked(envelope=Envelope(ForwardRequest() as request)):
                return self.admission.requested(event, request, now)
            case Asked(request, sender, Envelope(CommitDecision() as decision)):
                return [*self.lifecycle.decided(sender, decision, now), Reply(request, Envelope(Done()))]
            case Asked(request, sender, Envelope(CommitQuery(executions=executions))):
                under_way = {execution.id.number for execution in self.executions.values() if execution.own}
                return [Reply(request, Envelope(self.commits.answer(sender, executions, under_way)))]
            case Answered(tag=CommitQueryTag()):
                return self.lifecycle.decided(event.peer, self.commits.answered(event), now)
            case AskFailed(tag=CommitQueryTag()):
                self.commits.unanswered(event.peer)
                return self.lifecycle.origin_is_gone(event.peer)
            case Answered(tag=CommitDecisionTag()) | AskFailed(tag=CommitDecisionTag()):
                self.commits.told(event)
            case Answered(tag=PresenceTag()) | AskFailed(tag=PresenceTag()):
                self.forwarding.scheduler.heard_from(event.peer, isinstance(event, Answered), now)
            case Answered(tag=AuditTag()) | AskFailed(tag=AuditTag()):
                return self.audits.answered(event, now)
            case Compared():
                return self.audits.compared(event, now)
            case Undone(local_id, done):
                return self.ledger.undone(local_id, done)
            case Answered(tag=ExecutionTag()) | AskFailed(tag=ExecutionTag()):
                return self.lifecycle.answered(event, now)
            case ForwardDone() | BackwardDone() | ExecutionFailed():
                self.table.jobs.running.discard(event.local_id)
                return self.lifecycle.computed(event, now)
            case Sealed(executions, slot, sound):
                self.audits.sum_complete(len(executions))
                return self.ledger.sealed(executions, slot, sound)
            case Stepped(spent=spent, executions=executions, applied=applied):
                self.load.measure_speed(spent.training)
                if executions:
                    self.audits.sum_complete(len(executions))
                told: list[Effect] = [] if applied is None else [Log(AppliedLine(of=applied))]
                return told + (self.ledger.sealed_and_applied(executions) if executions else [])
        return []

    def look_for_lost(self, is_there: Callable[[PeerId], bool], now: Seconds) -> list[Effect]:
        """Send executions at lost peers (`is_there` is false) to other peers at once, and return the effects."""
        self._wake = None
        return [*self.lifecycle.lost(is_there, now), *self.commits.tell()]

    def give_up_all(self) -> list[Effect]:
        """Give up all executions at this peer, because a layer has no holder any more, and return the effects."""
        self._wake = None
        executions = [one for one in self.executions.values() if one.state is not GONE]
        return [effect for execution in executions for effect in self.table.give_up(execution, Reason.GONE)]

    def begin_round(self, round: int, active: bool, quota: int) -> list[Effect]:
        """Enter a round of synchronous training, during which the weights do not change.

        Args:
            round: Number of the round.
            active: Whether this peer takes part in it.
            quota: How many micro-batches of its own this peer begins in it.
        """
        self._wake, self.own.quota = None, quota
        return self.admission.begin_round(round, active)

    @property
    def all_begun_are_over(self) -> bool:
        """Return whether all our own micro-batches of the round have begun, and are complete or given up."""
        return self.own.quota == 0 and not self.own.under_way

    def give_up_own(self) -> list[Effect]:
        """Give up our own micro-batches, begin no more in this round, and return the effects."""
        self._wake = None
        return self.own.give_up_all()

    def end_round(self, everything: bool = False) -> list[Effect]:
        """End all executions of the round, so that its sums get no more gradients; return the effects.

        Args:
            everything: Whether to end also those executions of the next round that other peers have sent early.
        """
        self._wake = None
        return self.admission.end_round(everything)

"""What an execution goes through at this peer, event by event: comm/pipeline/execution.py has its states.

A peer that sent the activations still has them: when the next peer is gone, late, or answers nonsense, another one
gets the same (comm/pipeline/forwarding.py). The peers before it see nothing of that but the time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.pipeline.admission import Admission, budget_s
from decentral.comm.pipeline.audits import RouteAudits
from decentral.comm.pipeline.execution import (
    AWAY,
    BACKWARD,
    FORWARD,
    GONE,
    HELD,
    ExecutionEvent,
    ForwardedExecution,
    NextHop,
    Offered,
    OwnExecution,
    Paused,
    Sent,
    StageExecution,
)
from decentral.comm.pipeline.execution_table import COUNTED_KEPT, ExecutionTable
from decentral.comm.pipeline.forwarding import Forwarding
from decentral.comm.pipeline.ledger import CommitState, GradientEntry
from decentral.comm.pipeline.next_peer import MOST_NEXT_PEERS
from decentral.comm.pipeline.tags import ForwardStatusTag, ForwardTag, OfferTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import BackwardResponse, CommitDecision, Done, Hop, Refused
from decentral.comm.wire.transport import Answered, AskFailed, Effect
from decentral.core.ids import PeerId
from decentral.core.jobs import Backward, BackwardDone, ExecutionFailed, ForwardDone
from decentral.core.latest import keep_latest
from decentral.core.reasons import SILENT, Reason
from decentral.core.units import Seconds

# Refusals that are no failure: a peer's record may be older than a change of its layers.
BUSY = frozenset((Reason.BUSY, Reason.STRANGER, Reason.NOT_READY, Reason.MOVED, Reason.SPAN, Reason.OVERSIZE))


@dataclass(slots=True)
class ExecutionLifecycle:
    table: ExecutionTable
    admission: Admission
    forwarding: Forwarding
    audits: RouteAudits
    completed: int = 0  # micro-batches of our own that got through the model
    _heard_at: dict[PeerId, Seconds] = field(default_factory=dict)  # when a next peer last answered anything

    # What the next peer says

    def offer_heard(self, event: Answered | AskFailed, now: Seconds) -> list[Effect] | None:
        """What follows from the answer to an offer; None: nothing yet, or nothing any more."""
        assert isinstance(event.tag, OfferTag)
        execution = self.table.awaits(event.tag)
        if execution is None or not isinstance(execution.sent.place, Offered):
            return None
        return self.forwarding.heard(execution, event, now)

    def answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """The next peer answered a ForwardRequest or a ForwardStatusQuery, or did not."""
        assert isinstance(event.tag, ForwardTag | ForwardStatusTag)
        if isinstance(event.tag, ForwardStatusTag):
            self.forwarding.status_heard(event.peer)
            if isinstance(event, AskFailed) and self._is_silent(event, now):
                return self._silent(event.peer, now - event.seconds, now)
        if isinstance(event, Answered):
            keep_latest(self._heard_at, event.peer, now, MOST_NEXT_PEERS)
        execution = self.table.awaits(event.tag)
        if execution is None:
            return []
        match event:
            case Answered(tag=ForwardStatusTag(), envelope=Envelope(Done())):
                self.forwarding.only_late(execution, event.peer, now)
                return []
            case Answered(tag=ForwardTag(), envelope=Envelope(Refused(reason))) if reason in BUSY:
                return self.forwarding.refused(execution, now)
            case Answered(tag=ForwardTag(), envelope=Envelope(BackwardResponse() as response, blob)):
                trusted = self.forwarding.trust.weight(event.peer, now) > 0  # it may have been found out meanwhile
                if trusted and self.forwarding.fits(execution.sent, execution.last, event.peer, response, blob):
                    self.forwarding.scheduler.served(event.peer, event.seconds)
                    execution.gradient_came(event.peer, response)
                    thin = self.forwarding.view.is_thin()
                    self.table.jobs.push(Backward(execution.token, response.layout, blob, thin))
                    return self.audits.gave_back(execution, event, now)
        return self.forwarding.missed(execution, event.peer, now)

    def _is_silent(self, event: AskFailed, now: Seconds) -> bool:
        """Whether a status query tells that nothing comes from this peer: it has answered nothing since it was asked.
        Only where steps wait is that enough to send all that it has to others."""
        heard_at = self._heard_at.get(event.peer, -math.inf)
        return self.admission.stage.exact and event.reason in SILENT and heard_at < now - event.seconds

    def _silent(self, peer: PeerId, since: Seconds, now: Seconds) -> list[Effect]:
        """The next peer has not answered what was asked `since`. All that was sent to it before that goes to others: it
        would be asked for each of them, one after another, while steps wait."""
        return self._missed(lambda to, sent_at: to == peer and sent_at <= since, now)

    def lost(self, is_there: Callable[[PeerId], bool], now: Seconds) -> list[Effect]:
        """What was sent to peers that are not there any more goes to others, whatever their deadlines."""
        return self._missed(lambda to, sent_at: not is_there(to), now)

    def _missed(self, is_lost: Callable[[PeerId, Seconds], bool], now: Seconds) -> list[Effect]:
        """What is away goes to others where this says so of the next peer and when it was sent there."""
        effects: list[Effect] = []
        for execution in list(self.table.by_token.values()):
            place = execution.sent.place if execution.state is AWAY else None
            if isinstance(place, Sent) and is_lost(place.to, place.at):
                effects += self.forwarding.missed(execution, place.to, now)
        return effects

    # What the training thread reports

    def computed(self, event: ForwardDone | BackwardDone | ExecutionFailed, now: Seconds) -> list[Effect]:
        execution = self.table.by_token.get(event.token)
        assert execution is not None, "an execution stays while it is computed"
        match event:
            case BackwardDone():
                return self._backward_done(execution, event, now)
            case _ if execution.state is GONE:
                return self.table.let_go(execution, ExecutionEvent.THREAD_DONE, "the training thread is done")
            case ForwardDone():
                return self._forward_done(execution, event, now)
            case ExecutionFailed(_, reason):
                if execution.state is BACKWARD:
                    to = execution.sent.to
                    assert to is not None
                    return self.forwarding.missed(execution, to, now)
                return self.table.give_up(execution, reason)

    def _forward_done(self, execution: StageExecution, done: ForwardDone, now: Seconds) -> list[Effect]:
        load = self.forwarding.load
        load.tokens = done.tokens
        gradients = self.admission.stage.forms(execution.last, done.sequences).gradients
        execution.forward_done(NextHop(done.tokens, done.layout, done.blob, gradients), done.sequences)
        if isinstance(execution, OwnExecution):
            execution.name(done.number)
            if self.admission.window.typical_s is None:
                execution.until = execution.started_at + budget_s(None, load.rest_s(done.tokens, 0))
        return self.forwarding.send(execution, now, "forward pass done")

    def _backward_done(self, execution: StageExecution, done: BackwardDone, now: Seconds) -> list[Effect]:
        response = execution.next_hop.response if execution.next_hop else None
        hops, loss = (response.hops, response.loss) if response else ((), done.loss)
        if isinstance(execution, OwnExecution) and not response:
            execution.name(done.number)
        entry = GradientEntry(execution.id, execution.last, done.tokens, loss, execution.own)
        self.forwarding.load.backward_done(execution, done.tokens)
        if execution.state is GONE:
            self.table.end(execution, ExecutionEvent.THREAD_DONE, "the training thread is done")
            return self.table.ledger.add(execution.token, entry, CommitState.ABORTED)
        if not isinstance(execution, ForwardedExecution):
            self.completed += 1
            route = tuple(PeerId(hop.peer) for hop in hops)
            self.admission.window.done(now - execution.started_at, route, self.admission.stage.max_own)
            self.table.commits.commit(execution.id, hops)
            self.table.end(execution, ExecutionEvent.COMPLETED, "complete")
            self.table.ledger.completed(execution.token, hops)
            return self.table.ledger.add(execution.token, entry, CommitState.COMMITTED)
        stage, until = self.admission.stage, execution.until
        if not stage.synchronous:  # there a round has its own end
            until = min(until, now + self.table.holds.limit_s(self.forwarding.load.rest_s(done.tokens, 0)))
        hops = (Hop(stage.peer, execution.id.first, execution.last), *hops)
        answer = Envelope(BackwardResponse(stage.run, loss, done.tokens, hops, done.layout), done.blob)
        execution.hold(answer, until, now)
        usual_s = self.table.usually_decides_s(PeerId(execution.id.origin))
        self.table.commits.hold(execution.id, now, now - execution.started_at, usual_s)
        effects = self.table.ledger.add(execution.token, entry, CommitState.IN_DOUBT)
        return effects + execution.replies()

    # What the origin peer decides

    def decided(self, sender: PeerId, decision: CommitDecision, now: Seconds) -> list[Effect]:
        """Carries out another peer's decision, once. Only the origin peer may commit; the last asker may abort, too."""
        effects: list[Effect] = []
        for id in decision.commit:
            execution = self.table.by_id.get(id)
            if execution is not None and execution.state is HELD and sender == id.origin:
                effects += self.table.ledger.commit(execution.token)
                self.table.holds.committed(sender, now - execution.held_at)
                self.table.end_held(execution, Reason.COUNTED)
                keep_latest(self.table.counted, id, None, COUNTED_KEPT)
        for id in decision.abort:
            execution = self.table.by_id.get(id)
            if execution is not None and self._withdraws(sender, execution):
                effects += self.table.give_up(execution, Reason.MOVED)
        return effects

    def _withdraws(self, sender: PeerId, execution: ForwardedExecution) -> bool:
        """Whether nobody wants the execution any more after this abort: an asker speaks for itself alone."""
        if sender == execution.id.origin or [*execution.askers] == [sender]:
            return True
        if execution.askers.get(sender, 0) is None:
            del execution.askers[sender]  # a question of it that waits still gets the answer
        return False

    def origin_is_gone(self, origin: PeerId) -> list[Effect]:
        """Gives up what is held of an origin peer that does not answer. Where gradients are exact also what it has
        sent here itself and has not begun: the next sum with that would wait as this one has. If it lives it asks
        another peer."""
        of_it = [one for one in self.table.by_id.values() if one.id.origin == origin]
        exact = self.table.load.stage.exact
        gone = [one for one in of_it if one.state is HELD or (exact and self._not_begun_for(origin, one))]
        return [effect for one in gone for effect in self.table.give_up(one, Reason.MOVED)]

    def _not_begun_for(self, origin: PeerId, execution: ForwardedExecution) -> bool:
        waits = execution.state is FORWARD and execution.token in self.table.jobs.waiting
        return waits and [*execution.askers] == [origin]

    # Time

    def was_stopped(self, seconds: Seconds) -> None:
        """No origin peer of what is held here could decide for so long. To be called before `overdue`, which would let
        them rest, and with them all that have not committed anything here yet."""
        for execution in self.table.by_token.values():
            if isinstance(execution, ForwardedExecution) and execution.state is HELD:
                execution.until, execution.held_at = execution.until + seconds, execution.held_at + seconds

    def overdue(self, now: Seconds) -> list[Effect]:
        """Gives up executions whose time is over, sends on those that had to wait, and asks for those that are late."""
        effects: list[Effect] = []
        for execution in list(self.table.by_token.values()):
            hop = execution.next_hop
            if execution.state is GONE:
                continue
            if now >= execution.deadline():
                if isinstance(execution, ForwardedExecution) and execution.state is HELD:
                    self.table.holds.ran_out(PeerId(execution.id.origin), now - execution.held_at, now)
                elif execution.state is AWAY and hop is not None:
                    self.forwarding.ran_out(hop, now)
                effects += self.table.give_up(execution, Reason.LATE)
            elif hop is not None and execution.state is AWAY and now >= hop.place.due:
                match hop.place:
                    case Paused():
                        effects += self.forwarding.send(execution, now, "the pause is over")
                    case Sent() as sent:
                        effects.append(self.forwarding.ask_status(execution, sent))
        return effects

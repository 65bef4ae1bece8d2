"""How each event changes an execution at this peer (`comm/pipeline/execution.py` has the states of an execution).

`ExecutionLifecycle` handles, in this order: answers of the next peer, reports of the training thread, decisions of the
origin peer, and time. A peer keeps the activations that it has sent. If the next peer is gone, late, or answers
nonsense, another peer gets the same activations (`Forwarding`); the peers before this one notice only the delay.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.comm.pipeline.admission import Admission
from decentral.comm.pipeline.audits import RouteAudits
from decentral.comm.pipeline.execution import (
    AWAY,
    BACKWARD,
    FORWARD,
    GONE,
    IN_DOUBT,
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
from decentral.core.jobs import MOST_UNDER_WAY, Backward, BackwardDone, ExecutionFailed, ForwardDone
from decentral.core.latest import keep_latest
from decentral.core.reasons import SUSPECT_GONE, Reason
from decentral.core.units import Seconds

# A refusal for one of these reasons does not count as a failure of the peer: our record of the peer may be outdated.
NOT_ITS_FAILURE = frozenset(
    (Reason.BUSY, Reason.STRANGER, Reason.NOT_READY, Reason.MOVED, Reason.SPAN, Reason.OVERSIZE)
)


@dataclass(slots=True)
class ExecutionLifecycle:
    """Applies events to executions, and returns the effects that follow."""

    table: ExecutionTable
    admission: Admission
    forwarding: Forwarding
    audits: RouteAudits
    completed: int = 0  # number of our own micro-batches that have completed their route
    _heard_at: dict[PeerId, Seconds] = field(default_factory=dict)  # when each next peer last answered

    def offer_heard(self, event: Answered | AskFailed, now: Seconds) -> list[Effect] | None:
        """Record the outcome of an Offer. After the execution's last Offer, send the execution to the best peer.

        Returns:
            None if other Offers of the execution are unanswered, or no execution waits for this Offer.
        """
        assert isinstance(event.tag, OfferTag)
        execution = self.table.awaits(event.tag)
        if execution is None or not isinstance(execution.sent.place, Offered):
            return None
        return self.forwarding.heard(execution, event, now)

    def answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """Handle the outcome of a ForwardRequest or a ForwardStatusQuery.

        A gradient begins the backward pass. A next peer that still computes gets more time. After a refusal, a failure
        or an unusable answer, the activations go to another peer.
        """
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
            case Answered(tag=ForwardTag(), envelope=Envelope(Refused(reason))) if reason in NOT_ITS_FAILURE:
                return self.forwarding.refused(execution, now)
            case Answered(tag=ForwardTag(), envelope=Envelope(BackwardResponse() as response, blob)):
                trusted = self.forwarding.trust.weight(event.peer, now) > 0  # False if an audit has suspended the peer
                if trusted and self.forwarding.fits(execution.sent, execution.last, event.peer, response, blob):
                    self.forwarding.scheduler.served(event.peer, event.seconds)
                    execution.gradient_came(event.peer, response, blob, event.seconds)
                    thin = self.forwarding.view.is_thin()
                    job = Backward(execution.local_id, response.layout, blob, thin)
                    if isinstance(execution, ForwardedExecution):
                        execution.keep_backward(job)
                    self.table.jobs.push(job)
                    return []
        return self.forwarding.missed(execution, event.peer, now)

    def _is_silent(self, event: AskFailed, now: Seconds) -> bool:
        """Return whether the next peer is gone: the status query failed, and no other answer has come since the query.

        Return False unless `stage.exact`: otherwise, no step waits for the peer, and a false alarm costs more.
        """
        heard_at = self._heard_at.get(event.peer, -math.inf)
        return self.admission.stage.exact and event.reason in SUSPECT_GONE and heard_at < now - event.seconds

    def _silent(self, peer: PeerId, since: Seconds, now: Seconds) -> list[Effect]:
        """Send to other peers all executions that were sent to a silent peer at time `since` or before.

        Without this, the peer would be asked about each of these executions in turn, while steps wait.
        """
        return self._missed(lambda to, sent_at: to == peer and sent_at <= since, now)

    def lost(self, is_there: Callable[[PeerId], bool], now: Seconds) -> list[Effect]:
        """Send to other peers, without waiting for deadlines, all executions at peers for which `is_there` is false."""
        return self._missed(lambda to, sent_at: not is_there(to), now)

    def _missed(self, is_lost: Callable[[PeerId, Seconds], bool], now: Seconds) -> list[Effect]:
        """Suspend next peers for which `is_lost(peer, sent_at)` is true, and send their executions to other peers."""
        effects: list[Effect] = []
        for execution in list(self.table.by_local_id.values()):
            place = execution.sent.place if execution.state is AWAY else None
            if isinstance(place, Sent) and is_lost(place.to, place.at):
                effects += self.forwarding.missed(execution, place.to, now)
        return effects

    def computed(self, event: ForwardDone | BackwardDone | ExecutionFailed, now: Seconds) -> list[Effect]:
        """Handle the training thread's report of a pass.

        After a forward pass, the activations go to a next peer. After a backward pass, the ledger gets the gradients.
        Then the previous peer gets its gradient or, if the micro-batch is our own, the route's peers get a commit. If a
        forward pass fails, the execution is given up. If a backward pass fails, another peer computes the gradient.
        """
        execution = self.table.by_local_id.get(event.local_id)
        assert execution is not None, "an execution stays in the table while the training thread works on it"
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
        gradients = self.admission.stage.forms(execution.last, done.sequences).gradients
        execution.forward_done(NextHop(done.tokens, done.layout, done.blob, gradients), done.sequences)
        if isinstance(execution, OwnExecution):
            execution.name(done.number)
        self.forwarding.load.forward_done(execution, done.tokens)
        if isinstance(execution, OwnExecution) and self.admission.in_flight.typical_s is None:
            limit_s = self.admission.in_flight.budget_s(self.forwarding.route_s(execution))
            execution.until = execution.started_at + limit_s
        return self.forwarding.send(execution, now, "forward pass done")

    def _backward_done(self, execution: StageExecution, done: BackwardDone, now: Seconds) -> list[Effect]:
        response = execution.next_hop.response if execution.next_hop else None
        hops, loss = (response.hops, response.loss) if response else ((), done.loss)
        effects = self.audits.gave_back(execution, done.given_norm, now) if response else []
        if isinstance(execution, OwnExecution) and not response:
            execution.name(done.number)
        undo = execution.undo if isinstance(execution, ForwardedExecution) else None
        entry = GradientEntry(execution.id, execution.last, done.tokens, loss, execution.own, undo)
        self.forwarding.load.backward_done(execution, done.tokens, forward_counted=response is not None)
        if execution.state is GONE:
            self.table.end(execution, ExecutionEvent.THREAD_DONE, "the training thread is done")
            return effects + self.table.ledger.add(execution.local_id, entry, CommitState.ABORTED)
        if not isinstance(execution, ForwardedExecution):
            self.completed += 1
            route = tuple(PeerId(hop.peer) for hop in hops)
            # If memory is counted by layers, more micro-batches than `capacity` fit that run through few of ours.
            most = MOST_UNDER_WAY if self.admission.stage.activations else self.admission.stage.capacity
            self.admission.in_flight.done(now - execution.started_at, route, most)
            self.table.commits.commit(execution.id, hops, done.tokens)
            self.table.end(execution, ExecutionEvent.COMPLETED, "complete")
            self.table.ledger.completed(execution.local_id, hops)
            return effects + self.table.ledger.add(execution.local_id, entry, CommitState.COMMITTED)
        stage, until = self.admission.stage, execution.until
        if not stage.synchronous:  # in synchronous training, gradients are held until the round ends
            took_s, route_s = now - execution.started_at, self.forwarding.whole_route_s(execution, done.tokens)
            until = min(until, now + self.table.decision_limits.limit_s(took_s, route_s))
        hops = (Hop(stage.peer, execution.id.first, execution.last), *hops)
        answer = Envelope(BackwardResponse(stage.run, loss, done.tokens, hops, done.layout), done.blob)
        execution.await_decision(answer, until, now)
        usual_s = self.table.usually_decides_s(PeerId(execution.id.origin))
        self.table.commits.ask_later(execution.id, now, now - execution.started_at, usual_s)
        effects += self.table.ledger.add(execution.local_id, entry, CommitState.IN_DOUBT)
        return effects + execution.replies()

    def decided(self, sender: PeerId, decision: CommitDecision, now: Seconds) -> list[Effect]:
        """Commit and abort executions as another peer decides; a repeated decision has no effect.

        A commit is valid only from the execution's origin peer. An abort is also valid from the only
        peer that has requested the execution.
        """
        effects: list[Effect] = []
        for id in decision.commit:
            execution = self.table.by_id.get(id)
            if execution is not None and execution.state is IN_DOUBT and sender == id.origin:
                entry = self.table.ledger.entries.get(execution.local_id)
                if entry is not None and sender in execution.askers:  # the origin peer computed all layers before ours
                    self.table.commits.credit(sender, entry.tokens * id.first)
                effects += self.table.ledger.commit(execution.local_id)
                self.table.decision_limits.committed(sender, now - execution.in_doubt_since)
                self.table.end_in_doubt(execution, Reason.COUNTED)
                keep_latest(self.table.counted, id, None, COUNTED_KEPT)
        for id in decision.abort:
            execution = self.table.by_id.get(id)
            if execution is not None and self._withdraws(sender, execution):
                effects += self.table.give_up(execution, Reason.MOVED)
        return effects

    def _withdraws(self, sender: PeerId, execution: ForwardedExecution) -> bool:
        """Return whether an abort ends the execution: the sender is the origin peer, or alone in `askers`.

        Otherwise, another requesting peer still needs the execution. Then the sender is removed from `askers` if it has
        its answer.
        """
        if sender == execution.id.origin or [*execution.askers] == [sender]:
            return True
        if execution.askers.get(sender, 0) is None:
            del execution.askers[sender]
        return False

    def origin_is_gone(self, origin: PeerId) -> list[Effect]:
        """Give up the IN_DOUBT executions of an origin peer that does not answer commit queries.

        If `stage.exact`, also give up executions that the origin peer itself sent here and that have not begun, because
        the next step would wait for them. If the origin peer still runs, it sends them to another peer.
        """
        of_it = [one for one in self.table.by_id.values() if one.id.origin == origin]
        exact = self.table.load.stage.exact
        gone = [one for one in of_it if one.state is IN_DOUBT or (exact and self._not_begun_for(origin, one))]
        return [effect for one in gone for effect in self.table.give_up(one, Reason.MOVED)]

    def _not_begun_for(self, origin: PeerId, execution: ForwardedExecution) -> bool:
        waits = execution.state is FORWARD and execution.local_id in self.table.jobs.waiting
        return waits and [*execution.askers] == [origin]

    def was_stopped(self, seconds: Seconds) -> None:
        """Extend the deadlines of IN_DOUBT executions by the seconds for which this process was stopped.

        Call this before `overdue`, which would otherwise punish origin peers for decisions that could not arrive.
        """
        for execution in self.table.by_local_id.values():
            if isinstance(execution, ForwardedExecution) and execution.state is IN_DOUBT:
                execution.until, execution.in_doubt_since = (
                    execution.until + seconds,
                    execution.in_doubt_since + seconds,
                )

    def overdue(self, now: Seconds) -> list[Effect]:
        """Give up executions past their deadline, send paused executions on, and ask next peers about late ones."""
        effects: list[Effect] = []
        for execution in list(self.table.by_local_id.values()):
            hop = execution.next_hop
            if execution.state is GONE:
                continue
            if now >= execution.deadline():
                if isinstance(execution, ForwardedExecution) and execution.state is IN_DOUBT:
                    self.table.decision_limits.ran_out(PeerId(execution.id.origin), now - execution.in_doubt_since, now)
                elif execution.state is AWAY and hop is not None:
                    self.forwarding.ran_out(hop, now)
                if execution.own:
                    self.admission.in_flight.ran_out(execution.started_at, now)
                effects += self.table.give_up(execution, Reason.LATE)
            elif hop is not None and execution.state is AWAY and now >= hop.place.due:
                match hop.place:
                    case Paused():
                        effects += self.forwarding.send(execution, now, "the pause is over")
                    case Sent() as sent:
                        effects.append(self.forwarding.ask_status(execution, sent))
        return effects

"""The way on of an execution: how far each peer carries, who is next, and what to do about a next peer that is slow or gone.

    send --few holders-------------------------> ForwardRequest --answered--> (comm/routes/router.py)
         --many--> Offer to some --all heard---> ForwardRequest --busy------> another one, or a moment's patience
         --nobody--> waits                             --late------> asked whether it is still at it
                                                       --failed----> another one gets the same activations

An execution that nobody will carry on any more is given up by whoever asked us to send it: then the answer is the reason, in
one word, instead of effects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.routes.decisions import DecisionOutboxes
from decentral.comm.routes.load import StageLoad
from decentral.comm.routes.offers import CANDIDATES, FEW, MOST_BUSY, OFFER_S, Offers, pause_s
from decentral.comm.routes.pacing import RoutingWeights, Stride, Turns
from decentral.comm.routes.stage import ExecutionState, StageConfig, StageExecution
from decentral.comm.routes.tags import ForwardStatusTag, ForwardTag, OfferTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_ROUTE_S, ExecutionId, ForwardRequest, ForwardStatusQuery, Load, Offer
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.ids import PeerId
from decentral.core.machine import Effect
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MAX_TRIES = 6  # of one execution, at whichever peers
SUCCESSOR_RETRY_S = 0.25  # where nobody holds the next layer
LEAST_S = 0.05  # less patience than this is none

Way = list[Effect] | str  # an execution's way on, or why there is none


class RouteView(Protocol):
    """What routes need to know of the swarm; peers/node/route_planner.py has it from the roster."""

    def successors(self, layer: int) -> Sequence[PeerId]:
        """Who else holds this layer, and trains."""
        ...

    def place(self, peer: PeerId) -> tuple[int, int, float]:
        """Which layers [first, last) one of them holds, and its tokens/s of the whole model."""
        ...


@dataclass(slots=True)
class Forwarding:
    stage: StageConfig
    view: RouteView
    workload: StageLoad
    outboxes: DecisionOutboxes
    turns: Turns = field(default_factory=Turns)
    prior: RoutingWeights = field(default_factory=RoutingWeights)
    _ends: dict[int, Stride[int]] = field(default_factory=dict)  # by the layer that an execution begins with

    def hold(self, stage: StageConfig) -> None:
        """This peer's place from now on."""
        self.stage, self.prior = stage, RoutingWeights()
        self._ends.clear()

    def end(self, first: int) -> int:
        """How far we carry what enters there: by the prior's flow, in turns; without one to the end of our span."""
        rates = {end: rate for end, rate in self.prior.ends.get(first, {}).items() if rate > 0}
        able = {end: 1 / rate for end, rate in rates.items() if end == self.stage.layers or self.view.successors(end)}
        return self._ends.setdefault(first, Stride()).choose(able) if able else self.stage.last

    def usual_end(self, first: int) -> int:
        """Where most of what enters there ends, without taking a turn."""
        ends = self.prior.ends.get(first, {})
        return max(ends, key=ends.__getitem__) if ends else self.stage.last

    def send(self, execution: StageExecution, now: Seconds) -> Way:
        """Asks the next peer to carry on, or waits until there is one."""
        execution.state, execution.retry_at, execution.look_at, execution.to = ExecutionState.AWAY, None, None, None
        if len(execution.tried) >= MAX_TRIES:
            return Reason.TRIED
        holders = self.view.successors(execution.last)
        peers = [peer for peer in holders if peer not in execution.tried] or list(holders)
        peers = [peer for peer in peers if peer not in execution.busy]
        if not peers:
            return self._wait(execution, now)
        rates = {peer: self.prior.rate(execution.last, self.view.place(peer)) for peer in peers}
        if len(peers) <= FEW:
            return self._send_to(execution, self.turns.choose(execution.last, peers, rates), now)
        execution.offers, execution.attempts = Offers(), execution.attempts + 1
        execution.offers.asked.update(self.turns.choose_some(execution.last, peers, rates, CANDIDATES))
        tag = OfferTag(execution.token, execution.attempts)
        offer = Envelope(Offer(self.stage.run, execution.last, execution.sequences))
        return [Ask(tag, peer, offer, OFFER_S) for peer in sorted(execution.offers.asked)]

    def heard(self, execution: StageExecution, event: Answered | AskFailed) -> bool:
        """An offer of this execution was answered, or not: whether that was the last one that it waits for."""
        assert execution.offers is not None
        answer = event.envelope.message if isinstance(event, Answered) else None
        load = answer if isinstance(answer, Load) and execution.last < answer.last <= self.stage.layers else None
        execution.offers.answered(event.peer, load, self.workload.share(execution.last, load.last) if load else 0.0)
        if load is None:
            execution.busy.append(event.peer)
        return not execution.offers.asked

    def offered(self, execution: StageExecution, now: Seconds) -> Way:
        """All offers have been heard."""
        assert execution.offers is not None
        best, execution.offers = execution.offers.best, None
        if best is not None:
            return self._send_to(execution, best, now)
        execution.refusals += CANDIDATES
        return self._after_refusal(execution, now)

    def _send_to(self, execution: StageExecution, to: PeerId, now: Seconds) -> Way:
        patience_s = min(execution.deadline() - now, MAX_ROUTE_S)
        if patience_s < LEAST_S:
            return Reason.LATE
        execution.to, execution.attempts = to, execution.attempts + 1
        execution.look_at, execution.late = now + self._deadline_s(execution, to), False
        execution.tried.append(to)
        hold_s = min(MAX_ROUTE_S, max(0.0, execution.until - now))
        name = execution.id
        place = (name.origin, name.number, execution.last, execution.sequences)
        carry = ForwardRequest(
            self.stage.run, *place, patience_s, hold_s, execution.layout, execution.round, execution.drawn
        )
        tag = ForwardTag(execution.token, execution.attempts)
        return [Ask(tag, to, Envelope(carry, execution.payload), patience_s, execution.layout[0].size)]

    def _deadline_s(self, execution: StageExecution, to: PeerId) -> Seconds:
        return self.turns.deadline_s(to, self.workload.rest_s(execution.tokens, execution.last))

    def refused(self, execution: StageExecution, now: Seconds) -> Way:
        """That peer has no room: another one, or, when all have been asked, a moment's patience."""
        assert execution.to is not None
        execution.tried.remove(execution.to)
        execution.busy.append(execution.to)
        execution.refusals += 1
        return self._after_refusal(execution, now)

    def _after_refusal(self, execution: StageExecution, now: Seconds) -> Way:
        if len(execution.busy) < MOST_BUSY:
            return self.send(execution, now)
        execution.to = None
        return self._wait(execution, now)

    def _wait(self, execution: StageExecution, now: Seconds) -> Way:
        """Until somebody holds the next layer; or has room: sooner than an execution of ours takes that will not change."""
        execution.retry_at = now + (
            pause_s(execution.refusals, self.workload.span_s()) if execution.busy else SUCCESSOR_RETRY_S
        )
        execution.busy = []
        return []

    def look_after(self, execution: StageExecution) -> Ask:
        """Its gradient should be here. Who is only slow keeps the execution, or all would be computed twice when all are."""
        assert execution.to is not None
        execution.look_at = None
        name = ExecutionId(execution.id.origin, execution.id.number, execution.last)
        tag = ForwardStatusTag(execution.token, execution.attempts)
        return Ask(tag, execution.to, Envelope(ForwardStatusQuery(self.stage.run, name)), OFFER_S)

    def only_late(self, execution: StageExecution, peer: PeerId, now: Seconds) -> None:
        if not execution.late:
            self.turns.missed(peer)
        execution.late, execution.look_at = True, now + self._deadline_s(execution, peer)

    def missed(self, execution: StageExecution, peer: PeerId, now: Seconds) -> Way:
        """No gradient from there: it costs the peer its turns, and another one gets the same activations."""
        self.turns.missed(peer)
        self.release(execution, peer)
        return self.send(execution, now)

    def release(self, execution: StageExecution, peer: PeerId) -> None:
        """Whoever carried on for us need not any more."""
        self.outboxes.release(peer, ExecutionId(execution.id.origin, execution.id.number, execution.last))


__all__ = ["Forwarding", "RouteView"]

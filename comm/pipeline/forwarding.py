"""Forward an execution: choose its last layer here and its next peer, and replace that peer if it fails.

Start with `Forwarding.send`, which gets one peer to compute the next layers:

    holders of the next layer   what this peer does
    none                        pause, and look for holders again
    up to FEW                   send a ForwardRequest to the holder whose turn it is (PeerScheduler)
    more than FEW               send Offers to CANDIDATES holders, and a ForwardRequest to the best holder that accepts
    all have refused            the same, since activations that are refused have cost a whole transfer

    answer to a ForwardRequest  what follows
    the gradient                the backward pass (comm/pipeline/lifecycle.py)
    busy                        another holder is asked; after MOST_BUSY refusals the execution pauses
    late                        the peer is asked whether it still computes; if it does, it keeps the execution
    failed                      another holder gets the same activations
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from decentral.comm.pipeline.execution import (
    ExecutionEvent,
    ForwardedExecution,
    NextHop,
    Offered,
    Sent,
    StageExecution,
)
from decentral.comm.pipeline.execution_table import ExecutionTable
from decentral.comm.pipeline.next_peer import (
    CANDIDATES,
    FEW,
    MOST_BUSY,
    OFFER_S,
    STATUS_S,
    PeerScheduler,
    Reputations,
    StrideScheduler,
    pause_s,
)
from decentral.comm.pipeline.stage import RouteView, StageConfig, StageLoad
from decentral.comm.pipeline.tags import ForwardStatusTag, ForwardTag, OfferTag, PresenceTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import (
    MAX_HOPS,
    MAX_ROUTE_S,
    BackwardResponse,
    ForwardRequest,
    ForwardStatusQuery,
    Hop,
    Load,
    Offer,
)
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect
from decentral.core.fragments import fits_one, layout_bytes
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MAX_TRIES = 6  # an execution is given up after this many failures of next peers; a busy peer has not failed
SUCCESSOR_RETRY_S = 0.25  # while no peer holds the next layer, we look for a holder once in this many seconds
MIN_PATIENCE_S = 0.05  # an execution with less time left is refused or given up, as no answer would come in time


@dataclass(slots=True)
class Forwarding:
    """Sends executions to next peers, and to other peers if the first ones are busy or silent, or answer nonsense."""

    view: RouteView
    load: StageLoad
    table: ExecutionTable
    scheduler: PeerScheduler = field(default_factory=PeerScheduler)
    trust: Reputations = field(default_factory=Reputations)
    questioned: Counter[PeerId] = field(default_factory=Counter)  # unanswered ForwardStatusQuery messages to each peer
    # For each first layer: the scheduler that chooses the layer at which executions leave this peer.
    _ends: dict[int, StrideScheduler[int]] = field(default_factory=dict)

    @property
    def stage(self) -> StageConfig:
        """Return the layers and limits of this peer."""
        return self.load.stage

    def forget_ends(self) -> None:
        """Forget the exit layers that `choose_end` has chosen, because this peer holds other layers from now on."""
        self._ends.clear()

    def choose_end(self, first: int) -> int:
        """Choose the layer at which an execution that begins with layer `first` leaves this peer.

        Successive calls choose the exit layers in proportion to the routing weights. Without weights, executions leave
        after this peer's last layer. Layers that only this peer holds it computes for its own micro-batches at once,
        since no route returns to its origin peer.
        """
        rates = {end: rate for end, rate in self.view.weights.ends.get(first, {}).items() if rate > 0}
        inner = [cut.first for cut in self.stage.cuts if first == 0 and cut.first < self.stage.last]
        alone = max((layer for layer in inner if not self.view.successors(layer)), default=-1)
        usable = [end for end in rates if end > alone and (end == self.stage.layers or self.view.successors(end))]
        costs = {end: 1 / rates[end] for end in usable}
        return self._ends.setdefault(first, StrideScheduler()).choose(costs)[0] if costs else self.stage.last

    @property
    def begun_part(self) -> float:
        """Return the share (0 to 1) of this peer's executions that the routing weights let begin at the first layer.

        It is 1.0 without weights, and in a synchronous run, in which rounds say how many micro-batches begin.
        """
        if self.stage.synchronous:
            return 1.0
        rates = {first: sum(ends.values()) for first, ends in self.view.weights.ends.items()}
        total = sum(rates.values())
        return rates.get(0, 0.0) / total if total else 1.0

    def usual_end(self, first: int) -> int:
        """Return the layer at which most executions that begin with layer `first` leave this peer."""
        ends = self.view.weights.ends.get(first, {})
        return max(ends, key=ends.__getitem__) if ends else self.stage.last

    def send(self, execution: StageExecution, now: Seconds, cause: str) -> list[Effect]:
        """Send an execution's activations, or offers of them, to next peers; pause if no peer can take them.

        `cause` says why the execution is sent now, for the text of an InvalidTransition.
        """
        successors = self.view.successors(execution.last)
        return [*self._ask_presence(execution, successors, now), *self._send(execution, successors, now, cause)]

    def _ask_presence(self, execution: StageExecution, successors: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Return Offers to peers whose suspension is over; they get no micro-batch before they answer."""
        offer = Envelope(Offer(self.stage.run, execution.last, execution.sequences, execution.drawn))
        due = self.scheduler.absent(successors, STATUS_S, now)
        return [Ask(PresenceTag(), peer, offer, STATUS_S) for peer in due]

    def _send(self, execution: StageExecution, successors: Sequence[PeerId], now: Seconds, cause: str) -> list[Effect]:
        execution.move(ExecutionEvent.SENT_ON, cause)
        hop = execution.sent
        hop.pause(now)
        if len(hop.tried) >= MAX_TRIES:
            return self.table.give_up(execution, Reason.TRIED)
        trust = {peer: self.trust.weight(peer, now) for peer in successors}
        holders = [peer for peer, weight in trust.items() if weight and peer != execution.id.origin]
        peers = [peer for peer in holders if peer not in hop.tried]
        peers = peers or [peer for peer in holders if peer != hop.tried[-1]] or holders
        peers = self.scheduler.askable(peers, now)
        peers = self.scheduler.near({peer: self.view.span_and_speed(peer)[2] for peer in peers}, now)
        if self.stage.exact and hop.refusals:  # a step waits longer for a peer without weight than for memory elsewhere
            rates = self._rates(execution.last, {peer: trust[peer] for peer in peers})
            peers = [peer for peer in peers if rates.get(peer)] or peers
        peers = [peer for peer in peers if peer not in hop.busy]
        if self.stage.exact:
            peers = [peer for peer in peers if peer not in self.questioned] or peers
        if not peers:
            return self._wait(hop, now)
        rates = self._rates(execution.last, {peer: trust[peer] for peer in peers})
        links_s = {peer: self._link_s(hop, peer) for peer in rates}
        offers = len(rates) > FEW or hop.refusals >= len(holders)
        chosen = self.scheduler.choose(execution.last, rates, links_s, CANDIDATES if offers else 1)
        if not offers:
            return self._send_to(execution, chosen[0], now)
        hop.offer(chosen)
        tag = OfferTag(execution.local_id, hop.attempts)
        offer = Envelope(Offer(self.stage.run, execution.last, execution.sequences, execution.drawn))
        return [Ask(tag, peer, offer, OFFER_S) for peer in sorted(chosen)]

    def _rates(self, layer: int, trust: Mapping[PeerId, float]) -> dict[PeerId, float]:
        """Return the weights by which peers take turns at this layer: the routing weight times the trust in the peer.

        Peers of weight zero are left out if they train alone (`_trains_alone`). If all weights are zero, all peers are
        kept, and measured durations decide.
        """
        rates = {peer: self.view.weights.rate(layer, self.view.span_and_speed(peer)) for peer in trust}
        if any(weight < 1 for weight in trust.values()):
            equal = not any(rates.values())
            rates = {peer: trust[peer] * (equal or rate) for peer, rate in rates.items()}
        if any(rates.values()):
            rates = {peer: rate for peer, rate in rates.items() if rate or not self._trains_alone(peer)}
        return rates

    def _trains_alone(self, peer: PeerId) -> bool:
        """Return whether a peer always has work of its own: it holds the whole model, and no step waits for others.

        Another peer's micro-batch then displaces a micro-batch that the peer would begin itself. Only the routing
        weights can tell whether that is worthwhile. With exact gradients it is, since peers wait for each other.
        """
        first, last, _ = self.view.span_and_speed(peer)
        return self.stage.overlap and (first, last) == (0, self.stage.layers)

    def heard(self, execution: StageExecution, event: Answered | AskFailed, now: Seconds) -> list[Effect] | None:
        """Record the outcome of an offer, and send the execution to the best peer once no offer is open.

        If no peer accepts, other peers get offers, or the execution pauses.

        Returns:
            The effects; None while other offers are open.
        """
        hop = execution.sent
        assert isinstance(hop.place, Offered)
        offers = hop.place.offers
        answer = event.envelope.message if isinstance(event, Answered) else None
        load = answer if isinstance(answer, Load) and execution.last < answer.last <= self.stage.layers else None
        if load is not None:
            load = replace(load, wait_s=self.scheduler.believable_wait_s(event.peer, load))
        part = self.load.share(execution.last, load.last) if load else 0.0
        offers.answered(event.peer, load, part, self._link_s(hop, event.peer))
        if load is None:
            hop.busy.append(event.peer)
        if offers.asked:
            return None
        if offers.best is not None:
            return self._send_to(execution, offers.best, now)
        return self._after_refusal(execution, CANDIDATES, now)

    def _send_to(self, execution: StageExecution, to: PeerId, now: Seconds) -> list[Effect]:
        patience_s = min(execution.deadline() - now, MAX_ROUTE_S)
        if patience_s < MIN_PATIENCE_S:
            return self.table.give_up(execution, Reason.LATE)
        hop, id = execution.sent, execution.next_id
        execution.events.append(("sent to", to))
        guess_s = self._guess_s(execution, to)
        look_at, due = now + self.scheduler.look_s(to, guess_s), now + self.scheduler.deadline_s(to, guess_s)
        hop.send(Sent(to, now, due, look_at))
        self.scheduler.asked(to, now)
        run, sequences, drawn = self.stage.run, execution.sequences, execution.drawn
        hold_s = min(MAX_ROUTE_S, max(0.0, execution.until - now))
        request = ForwardRequest(
            run, id.origin, id.number, id.first, sequences, patience_s, hold_s, hop.layout, execution.round, drawn
        )
        tag = ForwardTag(execution.local_id, hop.attempts)
        return [Ask(tag, to, Envelope(request, hop.payload), patience_s, hop.most_bytes)]

    def _guess_s(self, execution: StageExecution, to: PeerId) -> Seconds:
        """Return the seconds that the remaining layers and transfers take without waiting, at usual speeds."""
        hop, more = execution.sent, max(0, self.load.hops_left(execution.last) - 1)
        links_s = self._link_s(hop, to) + more * self._link_s(hop, None)
        return self.load.remaining_s(hop.tokens, execution.last) + links_s

    def _link_s(self, hop: NextHop, to: PeerId | None) -> Seconds:
        """Return the seconds to send activations to a peer (None: a typical one) and to get their gradient back."""
        return self.view.there_and_back_s(to, len(hop.payload), hop.most_bytes)

    def route_s(self, execution: StageExecution) -> Seconds:
        """Return the seconds that a micro-batch of ours takes without waiting; 0 if no speed of devices is known.

        Call this after the forward pass.
        """
        hop = execution.sent
        computing_s = self.load.remaining_s(hop.tokens, 0)
        return computing_s and computing_s + self.load.hops_left(execution.last) * self._link_s(hop, None)

    def whole_route_s(self, execution: ForwardedExecution, tokens: int) -> Seconds:
        """Return the seconds that another peer's micro-batch takes without waiting, at usual speeds and links."""
        forms = self.stage.forms(execution.id.first, execution.sequences)
        sent, received = (max(map(layout_bytes, layouts)) for layouts in (forms.entering, forms.gradients))
        links_s = self.load.hops_left(0) * self.view.there_and_back_s(None, sent, received)
        return self.load.remaining_s(tokens, 0) + links_s

    def refused(self, execution: StageExecution, now: Seconds) -> list[Effect]:
        """Ask another peer, because the next peer refused as busy; pause once MOST_BUSY peers have refused."""
        hop = execution.sent
        assert hop.to is not None
        execution.events.append(("refused by", hop.to))
        hop.tried.remove(hop.to)
        hop.busy.append(hop.to)
        return self._after_refusal(execution, 1, now)

    def _after_refusal(self, execution: StageExecution, refusals: int, now: Seconds) -> list[Effect]:
        hop = execution.sent
        hop.refusals += refusals
        if len(hop.busy) < MOST_BUSY:
            return self.send(execution, now, "another peer is asked")
        return self._wait(hop, now)

    def _wait(self, hop: NextHop, now: Seconds) -> list[Effect]:
        """Pause the execution, so that a holder of the next layer can join, or a busy holder can free memory."""
        span_s = self.load.seconds(self.load.share(self.stage.first, self.stage.last))
        hop.pause(now + (pause_s(hop.refusals, span_s) if hop.busy else SUCCESSOR_RETRY_S))
        hop.busy.clear()
        return []

    def ask_status(self, execution: StageExecution, sent: Sent) -> Ask:
        """Return the effect that asks the next peer (ForwardStatusQuery) whether it still computes this execution.

        A peer that is only slow keeps the execution: another peer might be just as slow, and would do the work again.
        """
        execution.sent.look_again(sent, math.inf, sent.late)
        self.questioned[sent.to] += 1
        tag, status_s = ForwardStatusTag(execution.local_id, execution.sent.attempts), self.scheduler.status_s(sent.to)
        return Ask(tag, sent.to, Envelope(ForwardStatusQuery(self.stage.run, execution.next_id)), status_s)

    def status_heard(self, peer: PeerId) -> None:
        """Record that a ForwardStatusQuery to this peer was answered or has failed."""
        self.questioned[peer] -= 1
        if self.questioned[peer] <= 0:
            del self.questioned[peer]

    def only_late(self, execution: StageExecution, peer: PeerId, now: Seconds) -> None:
        """Record that the next peer still computes, and set when to ask it again.

        Once the deadline of the gradient has passed, the peer is expected to be slower from now on.
        """
        sent = execution.sent.place
        assert isinstance(sent, Sent)
        if now < sent.late_at:
            execution.sent.look_again(sent, sent.late_at, sent.late)
            return
        if not sent.late:
            execution.events.append(("late at", peer))
            self.scheduler.missed(peer)
        due = now + self.scheduler.deadline_s(peer, self._guess_s(execution, peer))
        execution.sent.look_again(sent, due, late=True)

    def ran_out(self, hop: NextHop, now: Seconds) -> None:
        """Suspend the next peer of an execution whose time ran out, if that peer had the usual time to answer.

        A peer that got the activations only shortly before is not suspended.
        """
        if isinstance(hop.place, Sent) and now - hop.place.at >= self.scheduler.usual_deadline_s():
            self.scheduler.failed(hop.place.to, now)

    def missed(self, execution: StageExecution, peer: PeerId, now: Seconds) -> list[Effect]:
        """Suspend a next peer that gave no usable gradient, and send the same activations to another peer."""
        self.scheduler.failed(peer, now)
        self.table.commits.abort(peer, execution.next_id)
        return self.send(execution, now, f"no gradient from {peer}")

    def fits(self, hop: NextHop, first: int, peer: PeerId, response: BackwardResponse, blob: bytes) -> bool:
        """Return whether a response can be the gradient of the sent activations, by its layout, tokens and hops.

        Args:
            hop: The activations that were sent to the next peer.
            first: Layer with which the next peer's execution begins.
            peer: The peer that answered.
            response: Its answer, which names the hops up to the model's end.
            blob: The encoded gradient.
        """
        hops = response.hops
        return (
            response.run == self.stage.run
            and response.tokens == hop.tokens
            and fits_one(hop.gradients, response.layout, len(blob))
            and 0 < len(hops) < MAX_HOPS
            and hops[0].peer == peer
            and reaches_the_end(hops, first, self.stage.layers)
            and self.table.ledger.accepts(hops, response.loss, response.tokens)
        )


def reaches_the_end(hops: tuple[Hop, ...], first: int, layers: int) -> bool:
    """Return whether these hops lead from layer `first` to the model's end, without a gap or an overlap."""
    edges = [first, *(hop.last for hop in hops)]
    return edges[-1] == layers and all(begin == hop.first < hop.last for begin, hop in zip(edges, hops, strict=False))

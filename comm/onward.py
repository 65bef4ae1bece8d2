"""The way on of a leg: how far each peer carries, who is next, and what to do about a next peer that is slow or gone.

    send --few holders-------------------------> Carry --answered--> (comm/route.py)
         --many--> Offer to some --all heard---> Carry --busy------> another one, or a moment's patience
         --nobody--> waits                             --late------> asked whether it is still at it
                                                       --failed----> another one gets the same activations

A leg that nobody will carry on any more is given up by whoever asked us to send it: then the answer is the reason, in
one word, instead of effects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentral.comm.codec import Envelope
from decentral.comm.leg import Leg, Stage, Terms
from decentral.comm.messages import MAX_ROUTE_S, Carry, Carrying, LegId, Load, Offer
from decentral.comm.offers import CANDIDATES, FEW, MOST_BUSY, OFFER_S, Offers, pause_s
from decentral.comm.outbox import Outboxes
from decentral.comm.pace import Prior, Stride, Turns
from decentral.comm.transport import Answered, Ask, AskFailed
from decentral.comm.workload import Workload
from decentral.core.ids import PeerId
from decentral.core.machine import Effect
from decentral.core.units import Seconds

MAX_TRIES = 6  # of one leg, at whichever peers
RETRY_S = 0.25  # where nobody holds the next layer
LEAST_S = 0.05  # less patience than this is none

Way = list[Effect] | str  # a leg's way on, or why there is none


class View(Protocol):
    """What routes need to know of the swarm; peers/routing.py has it from the roster."""

    def successors(self, layer: int) -> Sequence[PeerId]:
        """Who else holds this layer, and trains."""
        ...

    def place(self, peer: PeerId) -> tuple[int, int, float]:
        """Which layers [first, last) one of them holds, and its tokens/s of the whole model."""
        ...


@dataclass(slots=True)
class Onward:
    terms: Terms
    view: View
    workload: Workload
    outboxes: Outboxes
    turns: Turns = field(default_factory=Turns)
    prior: Prior = field(default_factory=Prior)
    _ends: dict[int, Stride[int]] = field(default_factory=dict)  # by the layer that a leg begins with

    def hold(self, terms: Terms) -> None:
        """This peer's place from now on."""
        self.terms, self.prior = terms, Prior()
        self._ends.clear()

    def end(self, first: int) -> int:
        """How far we carry what enters there: by the prior's flow, in turns; without one to the end of our span."""
        rates = {end: rate for end, rate in self.prior.ends.get(first, {}).items() if rate > 0}
        able = {end: 1 / rate for end, rate in rates.items() if end == self.terms.layers or self.view.successors(end)}
        return self._ends.setdefault(first, Stride()).choose(able) if able else self.terms.last

    def usual_end(self, first: int) -> int:
        """Where most of what enters there ends, without taking a turn."""
        ends = self.prior.ends.get(first, {})
        return max(ends, key=ends.__getitem__) if ends else self.terms.last

    def send(self, leg: Leg, now: Seconds) -> Way:
        """Asks the next peer to carry on, or waits until there is one."""
        leg.stage, leg.retry_at, leg.look_at, leg.to = Stage.AWAY, None, None, None
        if len(leg.tried) >= MAX_TRIES:
            return "tried"
        holders = self.view.successors(leg.last)
        peers = [peer for peer in holders if peer not in leg.tried] or list(holders)
        peers = [peer for peer in peers if peer not in leg.busy]
        if not peers:
            return self._wait(leg, now)
        rates = {peer: self.prior.rate(leg.last, self.view.place(peer)) for peer in peers}
        if len(peers) <= FEW:
            return self._send_to(leg, self.turns.choose(leg.last, peers, rates), now)
        leg.offers, leg.attempts = Offers(), leg.attempts + 1
        leg.offers.asked.update(self.turns.choose_some(leg.last, peers, rates, CANDIDATES))
        tag = ("offer", leg.token, leg.attempts)
        offer = Envelope(Offer(self.terms.run, leg.last, leg.sequences))
        return [Ask(tag, peer, offer, OFFER_S) for peer in sorted(leg.offers.asked)]

    def heard(self, leg: Leg, event: Answered | AskFailed) -> bool:
        """An offer of this leg was answered, or not: whether that was the last one that it waits for."""
        assert leg.offers is not None
        answer = event.envelope.message if isinstance(event, Answered) else None
        load = answer if isinstance(answer, Load) and leg.last < answer.last <= self.terms.layers else None
        leg.offers.answered(event.peer, load, self.workload.share(leg.last, load.last) if load else 0.0)
        if load is None:
            leg.busy.append(event.peer)
        return not leg.offers.asked

    def offered(self, leg: Leg, now: Seconds) -> Way:
        """All offers have been heard."""
        assert leg.offers is not None
        best, leg.offers = leg.offers.best, None
        if best is not None:
            return self._send_to(leg, best, now)
        leg.refusals += CANDIDATES
        return self._after_refusal(leg, now)

    def _send_to(self, leg: Leg, to: PeerId, now: Seconds) -> Way:
        patience_s = min(leg.deadline() - now, MAX_ROUTE_S)
        if patience_s < LEAST_S:
            return "late"
        leg.to, leg.attempts = to, leg.attempts + 1
        leg.look_at, leg.late = now + self._deadline_s(leg, to), False
        leg.tried.append(to)
        hold_s = min(MAX_ROUTE_S, max(0.0, leg.until - now))
        name = leg.id
        place = (name.starter, name.number, leg.last, leg.sequences)
        carry = Carry(self.terms.run, *place, patience_s, hold_s, leg.layout, leg.round, leg.drawn)
        tag = ("route", leg.token, leg.attempts)
        return [Ask(tag, to, Envelope(carry, leg.payload), patience_s, leg.layout[0].size)]

    def _deadline_s(self, leg: Leg, to: PeerId) -> Seconds:
        return self.turns.deadline_s(to, self.workload.rest_s(leg.tokens, leg.last))

    def refused(self, leg: Leg, now: Seconds) -> Way:
        """That peer has no room: another one, or, when all have been asked, a moment's patience."""
        assert leg.to is not None
        leg.tried.remove(leg.to)
        leg.busy.append(leg.to)
        leg.refusals += 1
        return self._after_refusal(leg, now)

    def _after_refusal(self, leg: Leg, now: Seconds) -> Way:
        if len(leg.busy) < MOST_BUSY:
            return self.send(leg, now)
        leg.to = None
        return self._wait(leg, now)

    def _wait(self, leg: Leg, now: Seconds) -> Way:
        """Until somebody holds the next layer; or has room: sooner than a leg of ours takes that will not change."""
        leg.retry_at = now + (pause_s(leg.refusals, self.workload.span_s()) if leg.busy else RETRY_S)
        leg.busy = []
        return []

    def look_after(self, leg: Leg) -> Ask:
        """Its gradient should be here. Who is only slow keeps the leg, or all would be computed twice when all are."""
        assert leg.to is not None
        leg.look_at = None
        name = LegId(leg.id.starter, leg.id.number, leg.last)
        tag = ("carrying", leg.token, leg.attempts)
        return Ask(tag, leg.to, Envelope(Carrying(self.terms.run, name)), OFFER_S)

    def only_late(self, leg: Leg, peer: PeerId, now: Seconds) -> None:
        if not leg.late:
            self.turns.missed(peer)
        leg.late, leg.look_at = True, now + self._deadline_s(leg, peer)

    def missed(self, leg: Leg, peer: PeerId, now: Seconds) -> Way:
        """No gradient from there: it costs the peer its turns, and another one gets the same activations."""
        self.turns.missed(peer)
        self.release(leg, peer)
        return self.send(leg, now)

    def release(self, leg: Leg, peer: PeerId) -> None:
        """Whoever carried on for us need not any more."""
        self.outboxes.release(peer, LegId(leg.id.starter, leg.id.number, leg.last))


__all__ = ["Onward", "View"]

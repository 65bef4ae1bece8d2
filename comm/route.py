"""Micro-batches through peers that hold a part of the model each: activations on, gradients back the same way.

    ours      FORWARD --Forwarded--> AWAY --gradient--> BACKWARD --Backed--> counted; its route is settled
    others'   FORWARD --Forwarded--> AWAY --gradient--> BACKWARD --Backed--> HELD --Settle--> counted
    last hop  FORWARD ------------------------------------------> Backed --> HELD --Settle--> counted

A question (Carry) takes the activations to the next peer, and its answer brings the gradient back when all behind it is
done. So whoever asked still has what it sent: when the next peer is gone, late, or answers nonsense, another one gets
the same. Peers in front learn nothing of it but the time. A peer that is asked a second time for a leg that it has
carried already, because the peer in between is gone, sends the same gradient again.

Exactly once: gradients are held (comm/ledger.py) until the starter, to whom the route's hops come back with the
gradient, has settled them. It settles one route per micro-batch, so each layer counts it once, or not at all.

Backward passes go before forward ones, and our own new micro-batches come last.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from decentral.comm.codec import Envelope
from decentral.comm.doubt import Completed, Doubts
from decentral.comm.ledger import Entry, Ledger, Mark, reaches_the_end
from decentral.comm.leg import Leg, Stage, Terms
from decentral.comm.messages import (
    MAX_HOPS,
    MAX_LEGS,
    MAX_ROUTE_S,
    Carry,
    Carrying,
    Done,
    Hop,
    LegId,
    Load,
    Offer,
    Refused,
    Returned,
    Settle,
    Unsettled,
)
from decentral.comm.offers import CANDIDATES, FEW, MOST_BUSY, OFFER_S, Offers, pause_s
from decentral.comm.pace import FULL, LEAN, MANY, NEWEST, Prior, Stride, Turns, Window, budget_s
from decentral.comm.tally import Tally
from decentral.comm.transport import Answered, Ask, Asked, AskFailed, Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import (
    FORWARD_PART,
    MOST_UNDER_WAY,
    Backed,
    Backward,
    Draw,
    Forget,
    Forward,
    Forwarded,
    HopFailed,
    Job,
    Sealed,
    Stepped,
    forward_part,
    share,
)
from decentral.core.machine import Effect, Woke, earliest, log
from decentral.core.units import Seconds

BACKWARD, FORWARD = 0, 1  # in this order
AT_ONCE = 2  # jobs at the compute thread: one in work, one that follows without a pause
MOST_HELD = 4  # times the micro-batches that the memory takes: legs, with those whose backward pass is done
KEPT_PART = 8  # of the room, one part is kept for legs that enter at later layers
MAX_TRIES = 6  # of one leg, at whichever peers
RETRY_S = 0.25  # where nobody holds the next layer
BUSY = ("busy", "not-ready", "moved", "span", "oversize")  # nobody's fault: a record may be older than a span
LEAST_S = 0.05  # less patience than this is none
ROUNDING = 1e-6  # of sums of parts of the memory
SHARE = 0.9  # of the asker's patience, after which we give up: it then still has time for another peer
GRACE_S = 1.0  # for a Settle that is on its way when its starter's time is over
SETTLE_S = 5.0  # deadline of a Settle
SETTLES_KEPT = 4096  # legs that wait to be settled or released at one peer; older ones run out of time there


class View(Protocol):
    """What routes need to know of the swarm; peers/node.py has it from the roster."""

    def successors(self, layer: int) -> Sequence[PeerId]:
        """Who else holds this layer, and trains."""
        ...

    def place(self, peer: PeerId) -> tuple[int, int, float]:
        """Which layers [first, last) one of them holds, and its tokens/s of the whole model."""
        ...


@dataclass(slots=True)
class Outbox:
    """What a peer is to be told about legs; one question at a time."""

    count: list[LegId] = field(default_factory=list)
    release: list[LegId] = field(default_factory=list)
    asking: bool = False


@dataclass(slots=True)
class Routes:
    terms: Terms
    view: View
    active: bool = False  # from Started on
    draining: bool = False  # no new legs: those that are here are brought to their end
    legs: dict[int, Leg] = field(default_factory=dict)
    window: Window = field(init=False)
    turns: Turns = field(default_factory=Turns)
    prior: Prior = field(default_factory=Prior)
    _tokens: int = 0  # of the latest micro-batch
    speed: float = 0.0  # tokens/s of the whole model, if we computed without a pause; 0: not measured yet
    usual_speed: float = 0.0  # of the others, as they say; 0: nobody does
    ledger: Ledger | Tally = field(init=False)
    quota: int | None = None  # micro-batches that we may still begin; None: as many as the window has room for
    completed: int = 0
    doubts: Doubts = field(init=False)
    _settled: Completed = field(default_factory=Completed)
    round: int = 0
    _by_id: dict[LegId, int] = field(default_factory=dict)
    _counted: dict[LegId, None] = field(default_factory=dict)  # the latest of others
    _ready: list[tuple[int, int, Job]] = field(default_factory=list)  # heap: backward first, then the older
    _running: set[int] = field(default_factory=set)
    _outboxes: dict[PeerId, Outbox] = field(default_factory=dict)
    _last_token: int = 0
    _shares: dict[tuple[int, int], float] = field(default_factory=dict)  # of the model, by layers [first, last)
    _rooms: dict[tuple[int, int], float] = field(default_factory=dict)  # of the memory, by layers [first, last)
    _look_at: Seconds | None = None
    _wake: Seconds | None = None  # the earliest wish of all; infinite: none; None: to be looked for
    _ends: dict[int, Stride[int]] = field(default_factory=dict)  # by the layer that a leg begins with
    _worked: float = 0.0  # tokens through our share of the model, since the last step
    _early: list[tuple[int, Job]] = field(default_factory=list)  # of the next round: by token

    def __post_init__(self) -> None:
        terms = self.terms
        full = terms.overlap or terms.synchronous or terms.at_least >= MANY
        stages = -(-terms.layers // (terms.last - terms.first))
        self.window = Window(terms.most, FULL if full else LEAN, max(2, min(stages, terms.capacity)))
        self.ledger = Tally() if terms.synchronous else Ledger(terms.at_least, terms.slots)
        self.doubts = Doubts(self.terms.run)

    @property
    def wake_at(self) -> Seconds | None:
        """Looked for once after each event: it takes a look at every leg."""
        if not self.active:
            return None
        if self._wake is None:
            at = earliest((self._look_at, self.doubts.wake_at, *(leg.wake_at() for leg in self.legs.values())))
            self._wake = math.inf if at is None else at
        return None if self._wake == math.inf else self._wake

    @property
    def idle(self) -> bool:
        """Whether no leg is here, and no gradient waits for a step."""
        return not self.legs and not self.ledger.entries and not self.ledger.sealing

    def drain(self) -> None:
        """Takes no more legs; gradients need not wait for more of them before a step."""
        self.draining, self.ledger.at_least = True, 1

    def hold(self, terms: Terms) -> None:
        """This peer's place from now on; legs are taken again."""
        self.terms, self.draining, self.ledger.at_least = terms, False, terms.at_least
        self.window.most, self.prior = terms.most, Prior()
        self._ends.clear()
        self._rooms.clear()

    def handle(self, event: object, now: Seconds) -> list[Effect]:
        if isinstance(event, Asked):
            said = self._said(event)
            if said is not None:
                return [Reply(event.request, Envelope(said))]
        elif isinstance(event, Answered | AskFailed) and event.tag[0] == "offer" and self._heard(event):
            return []
        self._wake = None
        self.ledger.quiet = self._quiet()
        effects = self._react(event, now)
        effects += self.ledger.look(self._quiet())
        return effects + self._dispatch() + self._begin_more(now) + self._tell()

    def _react(self, event: object, now: Seconds) -> list[Effect]:
        match event:
            case Woke():
                return self._overdue(now) + list(self.doubts.ask(now))
            case Asked(envelope=Envelope(Carry() as carry)):
                return self._asked(event, carry, now)
            case Asked(request, sender, Envelope(Settle() as told)):
                return [*self._told(sender, told), Reply(request, Envelope(Done()))]
            case Asked(request, sender, Envelope(Unsettled(legs=legs))):
                return [Reply(request, Envelope(self._what_became(sender, legs)))]
            case Answered(tag=("doubt",), peer=peer, envelope=Envelope(Settle() as told)):
                return self._told(peer, self._only(told, self.doubts.answered(peer)))
            case Answered(tag=("doubt",), peer=peer):
                self.doubts.answered(peer)
            case AskFailed(tag=("doubt",), peer=peer):
                self.doubts.answered(peer)
                return self._told(peer, Settle(self.terms.run, (), tuple(self.doubts.of(peer))))
            case Answered(tag=("offer", int() as token, *_)) | AskFailed(tag=("offer", int() as token, *_)):
                return self._offered(self.legs[token], now)
            case Answered(tag=("carrying", int() as token, int() as attempt), peer=peer, envelope=Envelope(Done())):
                leg = self._awaited(token, attempt)
                return self._only_late(leg, peer, now) if leg else []
            case Answered(tag=("carrying", int() as token, int() as attempt)):
                leg = self._awaited(token, attempt)
                return self._missed(leg, event.peer, now) if leg else []
            case AskFailed(tag=("route" | "carrying", int() as token, int() as attempt), peer=peer):
                leg = self._awaited(token, attempt)
                return self._missed(leg, peer, now) if leg else []
            case Answered(tag=("route", int() as token, int() as attempt)):
                return self._answered(event, self._awaited(token, attempt), now)
            case Answered(tag=("settle",), peer=peer) | AskFailed(tag=("settle",), peer=peer):
                self._outboxes.setdefault(peer, Outbox()).asking = False
            case Forwarded() | Backed() | HopFailed():
                self._running.discard(event.token)
                return self._computed(event, now)
            case Sealed(tokens, slot):
                return self.ledger.sealed(tokens, slot)
            case Stepped(seconds=seconds, legs=legs):
                self._measure(seconds)
                return self.ledger.stepped(legs) if legs else []
        return []

    def _measure(self, seconds: Seconds) -> None:
        """How fast this device really is, by what it computed in so many seconds of computing.

        Times are averaged, not rates: so who becomes much slower knows it after a few steps.
        """
        if self._worked > 0 and seconds > 0:
            newest_s = seconds / self._worked
            self.speed = 1 / ((1 - NEWEST) / self.speed + NEWEST * newest_s if self.speed else newest_s)
        self._worked = 0.0

    def _end(self, first: int) -> int:
        """How far we carry what enters there: by the prior's flow, in turns; without one to the end of our span."""
        rates = {end: rate for end, rate in self.prior.ends.get(first, {}).items() if rate > 0}
        able = {end: 1 / rate for end, rate in rates.items() if end == self.terms.layers or self.view.successors(end)}
        return self._ends.setdefault(first, Stride()).choose(able) if able else self.terms.last

    # Others' micro-batches

    def _said(self, event: Asked) -> Load | Done | Refused | None:
        """What is answered to questions that change nothing: there are many more of them than of legs."""
        match event.envelope.message:
            case Offer() as offer:
                return self._load(offer)
            case Carrying(leg=name):
                leg = self.legs.get(self._by_id.get(name, -1))
                return Done() if leg is not None and leg.asker == event.sender else Refused("gone")
        return None

    def _asked(self, event: Asked, carry: Carry, now: Seconds) -> list[Effect]:
        name = LegId(carry.starter, carry.number, carry.first)
        if name in self._by_id:
            return self._asked_again(self.legs[self._by_id[name]], event, carry, now)
        refusal = self._refusal(event, carry)
        if refusal:
            return [Reply(event.request, Envelope(Refused(refusal)))]
        leg = self._new_leg(name, self._end(carry.first), now, event.sender)
        leg.request, leg.sequences, leg.round = event.request, carry.sequences, carry.round
        self._extend(leg, carry, now)
        effects = self._supersede(leg)
        self._by_id[name] = leg.token
        job = Forward(leg.token, carry.first, leg.last, carry.sequences, carry.layout, event.envelope.blob)
        if carry.round > self.round:
            self._early.append((leg.token, job))
        else:
            heapq.heappush(self._ready, (FORWARD, leg.token, job))
        return effects

    def _supersede(self, new: Leg) -> list[Effect]:
        """Of a micro-batch that comes again by another way, what was held for the same layers: no route has both.

        Its sum would wait to be settled, and this leg for a step that takes the sum.
        """
        if self.terms.synchronous:
            return []
        same = [leg for leg in self.legs.values() if (leg.id.starter, leg.id.number) == (new.id.starter, new.id.number)]
        held = [leg for leg in same if leg.stage is Stage.HELD and leg.id.first < new.last and new.id.first < leg.last]
        return [effect for leg in held for effect in self._give_up(leg, "moved")]

    def _refusal(self, event: Asked, carry: Carry) -> str:
        """Why not, in one word; empty if we take it."""
        terms = self.terms
        if not self.active:
            return "not-ready"
        if LegId(carry.starter, carry.number, carry.first) in self._counted:
            return "counted"  # an old question that took its time: its asker has long had an answer to a later one
        if terms.size(carry) == 0 or carry.starter == terms.peer:
            return "span"
        if carry.layout != terms.layout(carry.first, carry.sequences) or len(event.envelope.blob) != terms.size(carry):
            return "shape"
        if carry.patience_s < LEAST_S or carry.round < self.round:
            return "late"
        if carry.round > self.round + 1:
            return "not-ready"
        return "" if self._room(carry.first) and not self.draining else "busy"

    def _load(self, offer: Offer) -> Load | Refused:
        """How soon we would be through with one more leg."""
        terms = self.terms
        if not self.active or self.draining:
            return Refused("not-ready")
        if not terms.begins(offer.first):
            return Refused("span")
        if not self._room(offer.first):
            return Refused("busy")
        ends = self.prior.ends.get(offer.first, {})
        last = max(ends, key=ends.__getitem__) if ends else terms.last
        part = self._share(offer.first, last) * forward_part(last, terms.layers)
        return Load(terms.run, self._wait_s(), self._seconds(part), last)

    def _share(self, first: int, last: int) -> float:
        """The part of the model's parameters in layers [first, last)."""
        found = self._shares.get((first, last))
        if found is None:
            found = self._shares[first, last] = share(self.terms.cuts, first, last)
        return found

    def _seconds(self, part: float) -> Seconds:
        """Of computing: so much of a micro-batch through the whole model."""
        speed = self.speed or self.usual_speed
        return part * self._tokens / speed if speed else 0.0

    def _wait_s(self) -> Seconds:
        """Of computing that is here to be done."""
        parts = 0.0
        for leg in self.legs.values():
            if leg.stage is Stage.FORWARD:
                parts += forward_part(leg.last, self.terms.layers) * self._share(leg.id.first, leg.last)
            elif leg.stage is Stage.BACKWARD:
                parts += (1 - FORWARD_PART) * self._share(leg.id.first, leg.last)
        return self._seconds(parts)

    def _room(self, first: int) -> bool:
        """For a leg that enters at this layer.

        Legs that are only held have given their activations back: they take an answer each, and have more room. One
        place is kept for each layer behind this one at which legs may enter (buffer classes: Merlin and Schweitzer,
        1980). Else peers that hold the same layers could fill each other up with legs that wait for one another.
        """
        capacity, count, at_work, begun, own = self.terms.capacity, 0, 0.0, 0, 0.0
        for leg in self.legs.values():
            if leg.stage is not Stage.HELD:
                count, at_work = count + 1, at_work + leg.room
                if leg.own:
                    begun, own = begun + 1, own + leg.room
        more = self._room_of(first, self.terms.last)
        if count >= MOST_UNDER_WAY or len(self.legs) >= MOST_HELD * capacity or at_work + more > capacity + ROUNDING:
            return False
        kept = min(self.terms.behind(first), capacity // KEPT_PART)
        most = capacity - kept + ROUNDING
        if self.terms.first > 0:
            return at_work + more <= most
        if first == 0:
            return own + more <= most
        usual = own / begun if begun else 1.0
        wanted = min(self.window.size * usual, capacity - kept) - own  # nobody else can begin ours: others' can go on
        others = at_work - own + more
        return others <= capacity // KEPT_PART + ROUNDING or others + own + wanted <= capacity + ROUNDING

    def _room_of(self, first: int, last: int) -> float:
        found = self._rooms.get((first, last))
        if found is None:
            found = self._rooms[first, last] = self.terms.room(first, last)
        return found

    def _asked_again(self, leg: Leg, event: Asked, carry: Carry, now: Seconds) -> list[Effect]:
        """Whoever asked before has been given up, or is gone: the new asker gets the answer."""
        effects: list[Effect] = []
        if leg.request is not None:
            effects.append(Reply(leg.request, Envelope(Refused("moved"))))
        leg.request, leg.asker = event.request, event.sender
        self._extend(leg, carry, now)
        if leg.answer is not None:
            effects.append(Reply(event.request, leg.answer))
            leg.request = None
        return effects

    def _extend(self, leg: Leg, carry: Carry, now: Seconds) -> None:
        leg.answer_by = now + SHARE * carry.patience_s
        leg.until = now + carry.hold_s + GRACE_S

    def _told(self, sender: PeerId, told: Settle) -> list[Effect]:
        effects: list[Effect] = []
        for name in told.count:
            leg = self.legs.get(self._by_id.get(name, -1))
            if leg is not None and leg.stage is Stage.HELD and sender == name.starter:
                effects += self.ledger.settle(leg.token)
                self._remove(leg)
                self._counted[name] = None
                if len(self._counted) > SETTLES_KEPT:
                    del self._counted[next(iter(self._counted))]
        for name in told.release:
            leg = self.legs.get(self._by_id.get(name, -1))
            if leg is not None and sender in (name.starter, leg.asker):
                effects += self._give_up(leg, "moved")
        return effects

    def _what_became(self, asker: PeerId, legs: Sequence[LegId]) -> Settle:
        ours = [leg for leg in legs if leg.starter == self.terms.peer]
        under_way = frozenset(leg.id.number for leg in self.legs.values() if leg.own)
        return self._settled.answer(self.terms.run, asker, ours, under_way)

    def _only(self, told: Settle, asked: Sequence[LegId]) -> Settle:
        """Of an answer, what the question was about."""
        known = set(asked)
        count, release = (tuple(leg for leg in legs if leg in known) for legs in (told.count, told.release))
        return Settle(told.run, count, release)

    # The way on

    def _send(self, leg: Leg, now: Seconds) -> list[Effect]:
        """Asks the next peer to carry on, or waits until there is one."""
        leg.stage, leg.retry_at, leg.look_at, leg.to = Stage.AWAY, None, None, None
        if len(leg.tried) >= MAX_TRIES:
            return self._give_up(leg, "tried")
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

    def _heard(self, event: Answered | AskFailed) -> bool:
        """Whether we have to hear from others, too, before the leg goes on; or nobody waits for this any more."""
        _, token, attempt = event.tag
        leg = self._awaited(int(token), int(attempt))
        if leg is None or leg.offers is None:
            return True
        answer = event.envelope.message if isinstance(event, Answered) else None
        load = answer if isinstance(answer, Load) and leg.last < answer.last <= self.terms.layers else None
        leg.offers.answered(event.peer, load, self._share(leg.last, load.last) if load else 0.0)
        if load is None:
            leg.busy.append(event.peer)
        return bool(leg.offers.asked)

    def _offered(self, leg: Leg, now: Seconds) -> list[Effect]:
        assert leg.offers is not None
        best, leg.offers = leg.offers.best, None
        if best is not None:
            return self._send_to(leg, best, now)
        leg.refusals += CANDIDATES
        return self._after_refusal(leg, now)

    def _send_to(self, leg: Leg, to: PeerId, now: Seconds) -> list[Effect]:
        patience_s = min(leg.deadline() - now, MAX_ROUTE_S)
        if patience_s < LEAST_S:
            return self._give_up(leg, "late")
        leg.to, leg.attempts = to, leg.attempts + 1
        leg.look_at, leg.late = now + self.turns.deadline_s(to, self._guess_s(leg, leg.last)), False
        leg.tried.append(to)
        hold_s = min(MAX_ROUTE_S, max(0.0, leg.until - now))
        name = leg.id
        place = (name.starter, name.number, leg.last, leg.sequences)
        carry = Carry(self.terms.run, *place, patience_s, hold_s, leg.layout, leg.round)
        tag = ("route", leg.token, leg.attempts)
        return [Ask(tag, to, Envelope(carry, leg.payload), patience_s, leg.layout[0].size)]

    def _guess_s(self, leg: Leg, first: int) -> Seconds:
        """What the model from this layer on takes of the usual device."""
        rest = self._share(first, self.terms.layers)
        return leg.tokens * rest / self.usual_speed if self.usual_speed > 0 else 0.0

    def _awaited(self, token: int, attempt: int) -> Leg | None:
        """The leg that waits for the answer to this attempt, or offer."""
        leg = self.legs.get(token)
        waits = leg and leg.stage is Stage.AWAY and (leg.to or leg.offers)
        return leg if leg and waits and leg.attempts == attempt else None

    def _answered(self, event: Answered, leg: Leg | None, now: Seconds) -> list[Effect]:
        if leg is None:
            return []
        returned = event.envelope.message
        if isinstance(returned, Refused) and returned.reason in BUSY:
            return self._not_now(leg, now)
        if not isinstance(returned, Returned) or not self._fits(leg, event.peer, returned, event.envelope.blob):
            return self._missed(leg, event.peer, now)
        self.turns.served(event.peer, event.seconds)
        leg.stage, leg.hops, leg.loss = Stage.BACKWARD, returned.hops, returned.loss
        job = Backward(leg.token, returned.layout, event.envelope.blob)
        heapq.heappush(self._ready, (BACKWARD, leg.token, job))
        return []

    def _fits(self, leg: Leg, peer: PeerId, returned: Returned, blob: bytes) -> bool:
        hops = returned.hops
        return (
            returned.run == self.terms.run
            and returned.tokens == leg.tokens
            and returned.layout == leg.layout[:1]
            and len(blob) == leg.layout[0].size
            and 0 < len(hops) < MAX_HOPS
            and hops[0].peer == peer
            and reaches_the_end(hops, leg.last, self.terms.layers)
        )

    def _not_now(self, leg: Leg, now: Seconds) -> list[Effect]:
        """That peer has no room: another one, or, when all have been asked, a moment's patience."""
        assert leg.to is not None
        leg.tried.remove(leg.to)
        leg.busy.append(leg.to)
        leg.refusals += 1
        return self._after_refusal(leg, now)

    def _after_refusal(self, leg: Leg, now: Seconds) -> list[Effect]:
        if len(leg.busy) < MOST_BUSY:
            return self._send(leg, now)
        leg.to = None
        return self._wait(leg, now)

    def _wait(self, leg: Leg, now: Seconds) -> list[Effect]:
        """Until somebody holds the next layer; or has room: sooner than a leg of ours takes that will not change."""
        leg_s = self._seconds(self._share(self.terms.first, self.terms.last))
        leg.retry_at = now + (pause_s(leg.refusals, leg_s) if leg.busy else RETRY_S)
        leg.busy = []
        return []

    def _look_after(self, leg: Leg) -> Ask:
        """Its gradient should be here. Who is only slow keeps the leg, or all would be computed twice when all are."""
        assert leg.to is not None
        leg.look_at = None
        name = LegId(leg.id.starter, leg.id.number, leg.last)
        tag = ("carrying", leg.token, leg.attempts)
        return Ask(tag, leg.to, Envelope(Carrying(self.terms.run, name)), OFFER_S)

    def _only_late(self, leg: Leg, peer: PeerId, now: Seconds) -> list[Effect]:
        if not leg.late:
            self.turns.missed(peer)
        leg.late, leg.look_at = True, now + self.turns.deadline_s(peer, self._guess_s(leg, leg.last))
        return []

    def _missed(self, leg: Leg, peer: PeerId, now: Seconds) -> list[Effect]:
        """No gradient from there: it costs the peer its turns, and another one gets the same activations."""
        self.turns.missed(peer)
        self._outbox(peer).release.append(LegId(leg.id.starter, leg.id.number, leg.last))
        return self._send(leg, now)

    # What the compute thread reports

    def _computed(self, event: Forwarded | Backed | HopFailed, now: Seconds) -> list[Effect]:
        leg = self.legs.get(event.token)
        assert leg is not None, "a leg stays while it is computed"
        match event:
            case Forwarded():
                return self._forwarded(leg, event, now)
            case Backed():
                return self._backed(leg, event, now)
            case HopFailed(_, reason):
                return self._hop_failed(leg, reason, now)

    def _forwarded(self, leg: Leg, done: Forwarded, now: Seconds) -> list[Effect]:
        if leg.stage is Stage.GONE:
            return self._let_go(leg)
        if leg.own:
            leg.id = LegId(self.terms.peer, done.number, 0)
        self._tokens = done.tokens
        leg.sequences, leg.tokens, leg.layout, leg.payload = done.sequences, done.tokens, done.layout, done.blob
        if leg.own and self.window.typical_s() is None:
            leg.until = leg.began + budget_s(None, self._guess_s(leg, 0))
        return self._send(leg, now)

    def _backed(self, leg: Leg, done: Backed, now: Seconds) -> list[Effect]:
        at_the_end = leg.last == self.terms.layers
        loss = done.loss if at_the_end else leg.loss
        entry = Entry(leg.id, leg.last, done.tokens, loss, leg.own)
        if leg.own and at_the_end:
            entry = replace(entry, leg=LegId(self.terms.peer, done.number, 0))
        self._tokens = done.tokens
        self._worked += done.tokens * self._share(leg.id.first, leg.last)
        if leg.stage is Stage.GONE:
            self.legs.pop(leg.token)
            return self.ledger.add(leg.token, entry, Mark.VOID)
        if leg.own:
            return self._complete(leg, entry, now)
        leg.stage, leg.payload = Stage.HELD, b""
        self.doubts.hold(leg.id, now, now - leg.began)
        hops = (Hop(self.terms.peer, leg.id.first, leg.last), *leg.hops)
        leg.answer = Envelope(Returned(self.terms.run, loss, done.tokens, hops, done.layout), done.blob)
        effects = self.ledger.add(leg.token, entry, Mark.HELD)
        if leg.request is not None:
            effects.append(Reply(leg.request, leg.answer))
            leg.request = None
        return effects

    def _complete(self, leg: Leg, entry: Entry, now: Seconds) -> list[Effect]:
        """The whole route's gradients are there: from now on they count."""
        for hop in leg.hops:
            self._outbox(PeerId(hop.peer)).count.append(LegId(leg.id.starter, leg.id.number, hop.first))
        self.window.done(now - leg.began, tuple(PeerId(hop.peer) for hop in leg.hops))
        self.completed += 1
        self._settled.add(leg.id.number, leg.hops)
        self._remove(leg)
        if isinstance(self.ledger, Tally):
            self.ledger.ways[leg.token] = leg.hops
        return self.ledger.add(leg.token, entry, Mark.SETTLED)

    def _hop_failed(self, leg: Leg, reason: str, now: Seconds) -> list[Effect]:
        if leg.stage is Stage.GONE:
            return self._let_go(leg)
        if leg.stage is Stage.BACKWARD:
            assert leg.to is not None
            return self._missed(leg, leg.to, now)
        return self._give_up(leg, reason)

    # The end of a leg

    def _overdue(self, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        for leg in list(self.legs.values()):
            if leg.stage is Stage.GONE:
                continue
            if now >= leg.deadline():
                effects += self._give_up(leg, "late")
            elif leg.retry_at is not None and now >= leg.retry_at:
                effects += self._send(leg, now)
            elif leg.stage is Stage.AWAY and leg.look_at is not None and now >= leg.look_at:
                effects.append(self._look_after(leg))
        return effects

    def _give_up(self, leg: Leg, reason: str) -> list[Effect]:
        """Its gradients, if they are in a sum already, must not count."""
        effects: list[Effect] = []
        if leg.request is not None:
            effects.append(Reply(leg.request, Envelope(Refused(reason))))
        if leg.own:
            effects.append(log("abandoned", number=leg.id.number, reason=reason, tries=len(leg.tried)))
        if leg.stage is Stage.HELD:
            effects += self.ledger.void(leg.token)
            self._remove(leg)
            return effects
        if leg.stage is Stage.AWAY and leg.to:
            self._outbox(leg.to).release.append(LegId(leg.id.starter, leg.id.number, leg.last))
        queued = [item for item in self._ready if item[1] == leg.token]
        if queued:
            self._ready = [item for item in self._ready if item[1] != leg.token]
            heapq.heapify(self._ready)
        self._by_id.pop(leg.id, None)
        if leg.token in self._running:
            leg.stage, leg.request = Stage.GONE, None
            return effects
        return effects + self._let_go(leg)

    def _let_go(self, leg: Leg) -> list[Effect]:
        self.legs.pop(leg.token)
        return [Forget((leg.token,))]

    def _remove(self, leg: Leg) -> None:
        self.doubts.forget(leg.id)
        self.legs.pop(leg.token)
        self._by_id.pop(leg.id, None)

    # Work for the compute thread

    def _quiet(self) -> bool:
        """Whether no leg here is between its forward and its backward pass."""
        if self.terms.overlap:
            return True
        waiting = {token for priority, token, _ in self._ready if priority == FORWARD}
        return all(leg.stage is Stage.HELD or token in waiting for token, leg in self.legs.items())

    def _draining(self) -> bool:
        """Whether gradients wait for a step: what came between now would be computed with weights of two versions."""
        return self.ledger.waiting and not self.terms.overlap

    def _dispatch(self) -> list[Effect]:
        jobs: list[Effect] = []
        while self._ready and len(self._running) < AT_ONCE:
            if self._ready[0][0] == FORWARD and self._draining():
                break
            _, token, job = heapq.heappop(self._ready)
            self._running.add(token)
            jobs.append(job)
        return jobs

    def _begin_more(self, now: Seconds) -> list[Effect]:
        """Our own micro-batches, as many as the window has room for, while the compute thread has nothing better."""
        jobs: list[Effect] = []
        self._look_at = None
        alone = self.terms.last == self.terms.layers and not self.terms.synchronous
        if not self.active or self.draining or self.terms.first > 0 or alone:
            return jobs
        own = sum(leg.own for leg in self.legs.values())
        while self._has_room(own):
            end = self._end(0)
            if end < self.terms.layers and not self.view.successors(end):
                self._look_at = now + RETRY_S
                break
            leg = self._new_leg(LegId(self.terms.peer, 0, 0), end, now, self.terms.peer)
            leg.own, leg.until = True, now + budget_s(self.window.typical_s())
            self._running.add(leg.token)
            jobs.append(Draw(leg.token, leg.last))
            own += 1
            self.quota = None if self.quota is None else self.quota - 1
        return jobs

    def _has_room(self, own: int) -> bool:
        idle = len(self._running) < AT_ONCE and self._room(0)
        return idle and own < self.window.size and self.quota != 0 and not self._draining()

    def _new_leg(self, name: LegId, last: int, now: Seconds, asker: PeerId) -> Leg:
        self._last_token += 1
        room = self._room_of(name.first, last)
        leg = Leg(self._last_token, name, last, room, False, now, now, now, asker, round=self.round)
        self.legs[leg.token] = leg
        return leg

    # Synchronous rounds

    def begin_round(self, round: int, active: bool, quota: int) -> list[Effect]:
        """The weights are those of this round. Micro-batches that came early are of it now."""
        self.round, self.active, self.quota, self._wake = round, active, quota, None
        early, self._early = self._early, []
        effects: list[Effect] = []
        for token, job in early:
            leg = self.legs.get(token)
            if leg is not None and leg.stage is Stage.FORWARD and active:
                heapq.heappush(self._ready, (FORWARD, token, job))
            elif leg is not None:
                effects += self._give_up(leg, "not-ready")
        return effects

    @property
    def all_begun_are_over(self) -> bool:
        """Whether our own micro-batches of the round are through, or given up."""
        return self.quota == 0 and not any(leg.own and leg.stage is not Stage.GONE for leg in self.legs.values())

    def give_up_own(self) -> list[Effect]:
        """Nobody is left to carry what we begin."""
        self.quota, self._wake = 0, None
        own = [leg for leg in self.legs.values() if leg.own and leg.stage is not Stage.GONE]
        return [effect for leg in own for effect in self._give_up(leg, "gone")]

    def end_round(self, everything: bool = False) -> list[Effect]:
        """Nothing more of it counts: what is under way is let go of. `everything`: also what came early."""
        self._wake = None
        effects: list[Effect] = []
        for leg in list(self.legs.values()):
            if leg.stage is Stage.GONE or (leg.round > self.round and not everything):
                continue
            if leg.stage is Stage.HELD:
                self._remove(leg)
            else:
                effects += self._give_up(leg, "late")
        return effects

    # What others are told

    def _outbox(self, peer: PeerId) -> Outbox:
        box = self._outboxes.setdefault(peer, Outbox())
        del box.count[:-SETTLES_KEPT], box.release[:-SETTLES_KEPT]
        return box

    def _tell(self) -> list[Effect]:
        effects: list[Effect] = []
        for peer, box in list(self._outboxes.items()):
            if box.asking:
                continue
            if not (box.count or box.release):
                del self._outboxes[peer]
                continue
            told = Settle(self.terms.run, tuple(box.count[:MAX_LEGS]), tuple(box.release[:MAX_LEGS]))
            del box.count[:MAX_LEGS], box.release[:MAX_LEGS]
            box.asking = True
            effects.append(Ask(("settle",), peer, Envelope(told), SETTLE_S))
        return effects


__all__ = ["Routes", "View"]

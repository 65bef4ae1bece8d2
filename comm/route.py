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

This file is a leg's life. Who is next is comm/onward.py; what the legs take of memory and time, comm/workload.py; what
the compute thread gets first, comm/work.py (our own new micro-batches come last); what others are told, comm/outbox.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from decentral.comm.codec import Envelope
from decentral.comm.doubt import Completed, Doubts
from decentral.comm.ledger import Entry, Ledger, Mark, reaches_the_end
from decentral.comm.leg import Leg, Stage, Terms
from decentral.comm.messages import (
    MAX_HOPS,
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
from decentral.comm.onward import LEAST_S, RETRY_S, Onward, View, Way
from decentral.comm.outbox import Outboxes
from decentral.comm.pace import FULL, LEAN, MANY, Window, budget_s
from decentral.comm.tally import Tally
from decentral.comm.transport import Answered, Asked, AskFailed, Reply
from decentral.comm.work import Work
from decentral.comm.workload import Workload
from decentral.core.ids import PeerId
from decentral.core.jobs import Backed, Backward, Draw, Forget, Forward, Forwarded, HopFailed, Sealed, Stepped
from decentral.core.machine import Effect, Woke, earliest, log
from decentral.core.units import Seconds

BUSY = ("busy", "not-ready", "moved", "span", "oversize")  # nobody's fault: a record may be older than a span
SHARE = 0.9  # of the asker's patience, after which we give up: it then still has time for another peer
GRACE_S = 1.0  # for a Settle that is on its way when its starter's time is over
UNDER_WAY = (Stage.FORWARD, Stage.AWAY, Stage.BACKWARD)
COUNTED_KEPT = 4096  # legs of others that are known to have been counted


@dataclass(slots=True)
class Routes:
    terms: Terms
    view: View
    active: bool = False  # from Started on
    draining: bool = False  # no new legs: those that are here are brought to their end
    legs: dict[int, Leg] = field(default_factory=dict)
    window: Window = field(init=False)
    work: Work = field(default_factory=Work)
    workload: Workload = field(init=False)
    outboxes: Outboxes = field(init=False)
    onward: Onward = field(init=False)
    ledger: Ledger | Tally = field(init=False)
    quota: int | None = None  # micro-batches that we may still begin; None: as many as the window has room for
    completed: int = 0
    doubts: Doubts = field(init=False)
    _settled: Completed = field(default_factory=Completed)
    round: int = 0
    _by_id: dict[LegId, int] = field(default_factory=dict)
    _counted: dict[LegId, None] = field(default_factory=dict)  # the latest of others
    _last_token: int = 0
    _look_at: Seconds | None = None
    _wake: Seconds | None = None  # the earliest wish of all; infinite: none; None: to be looked for
    _early: list[Forward] = field(default_factory=list)  # of the next round

    def __post_init__(self) -> None:
        terms = self.terms
        full = terms.overlap or terms.synchronous or terms.at_least >= MANY
        stages = -(-terms.layers // (terms.last - terms.first))
        self.window = Window(terms.most, FULL if full else LEAN, max(2, min(stages, terms.capacity)))
        self.ledger = Tally() if terms.synchronous else Ledger(terms.at_least, terms.slots)
        self.doubts, self.outboxes = Doubts(terms.run), Outboxes(terms.run)
        self.workload = Workload(terms)
        self.onward = Onward(terms, self.view, self.workload, self.outboxes)

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
        self.window.most = terms.most
        self.workload.hold(terms)
        self.onward.hold(terms)

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
        effects += self.work.dispatch(self._is_older() if self._draining() else None)
        return effects + self._begin_more(now) + self.outboxes.tell()

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
                heard = self.legs[token]
                return self._on(heard, self.onward.offered(heard, now))
            case Answered(tag=("route" | "carrying", *_)) | AskFailed(tag=("route" | "carrying", *_)):
                leg = self._awaited(event)
                return self._from_next(leg, event, now) if leg else []
            case Answered(tag=("settle",), peer=peer) | AskFailed(tag=("settle",), peer=peer):
                self.outboxes.told(peer)
            case Forwarded() | Backed() | HopFailed():
                self.work.done(event.token)
                return self._computed(event, now)
            case Sealed(tokens, slot):
                return self.ledger.sealed(tokens, slot)
            case Stepped(seconds=seconds, legs=legs):
                self.workload.stepped(seconds)
                return self.ledger.stepped(legs) if legs else []
        return []

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
        leg = self._new_leg(name, self.onward.end(carry.first), now, event.sender)
        leg.drawn = carry.drawn
        leg.request, leg.sequences, leg.round = event.request, carry.sequences, carry.round
        self._extend(leg, carry, now)
        effects = self._supersede(leg)
        self._by_id[name] = leg.token
        job = Forward(leg.token, carry.first, leg.last, carry.sequences, carry.layout, event.envelope.blob)
        if carry.round > self.round:
            self._early.append(job)
        else:
            self.work.push(job)
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
        return "" if self._has_room(carry.first) and not self.draining else "busy"

    def _load(self, offer: Offer) -> Load | Refused:
        """How soon we would be through with one more leg."""
        terms = self.terms
        if not self.active or self.draining:
            return Refused("not-ready")
        if not terms.begins(offer.first):
            return Refused("span")
        if not self._has_room(offer.first):
            return Refused("busy")
        last = self.onward.usual_end(offer.first)
        wait_s = self.workload.wait_s(self.legs.values())
        return Load(terms.run, wait_s, self.workload.leg_s(offer.first, last), last)

    def _has_room(self, first: int) -> bool:
        return self.workload.has_room(first, self.legs, self.window.size)

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
                if len(self._counted) > COUNTED_KEPT:
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

    # What the next peer says

    def _awaited(self, event: Answered | AskFailed) -> Leg | None:
        """The leg that waits for this answer."""
        _, token, attempt = event.tag
        leg = self.legs.get(int(token))
        waits = leg and leg.stage is Stage.AWAY and (leg.to or leg.offers)
        return leg if leg and waits and leg.attempts == attempt else None

    def _heard(self, event: Answered | AskFailed) -> bool:
        """Whether an answer to an offer changes nothing: others are still to be heard, or the leg has gone on."""
        leg = self._awaited(event)
        return leg is None or leg.offers is None or not self.onward.heard(leg, event)

    def _on(self, leg: Leg, way: Way) -> list[Effect]:
        return self._give_up(leg, way) if isinstance(way, str) else way

    def _from_next(self, leg: Leg, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        match event:
            case Answered(tag=("carrying", *_), envelope=Envelope(Done())):
                self.onward.only_late(leg, event.peer, now)
                return []
            case Answered(tag=("route", *_), envelope=Envelope(Refused(reason))) if reason in BUSY:
                return self._on(leg, self.onward.refused(leg, now))
            case Answered(tag=("route", *_), envelope=Envelope(Returned() as said, blob)) if self._fits(
                leg, event.peer, said, blob
            ):
                self.onward.turns.served(event.peer, event.seconds)
                leg.stage, leg.hops, leg.loss = Stage.BACKWARD, said.hops, said.loss
                self.work.push(Backward(leg.token, said.layout, blob))
                return []
        return self._on(leg, self.onward.missed(leg, event.peer, now))

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
        self.workload.tokens = done.tokens
        leg.sequences, leg.tokens, leg.layout, leg.payload = done.sequences, done.tokens, done.layout, done.blob
        if leg.own and self.window.typical_s() is None:
            leg.until = leg.began + budget_s(None, self.workload.rest_s(leg.tokens, 0))
        return self._on(leg, self.onward.send(leg, now))

    def _backed(self, leg: Leg, done: Backed, now: Seconds) -> list[Effect]:
        at_the_end = leg.last == self.terms.layers
        loss = done.loss if at_the_end else leg.loss
        entry = Entry(leg.id, leg.last, done.tokens, loss, leg.own)
        if leg.own and at_the_end:
            entry = replace(entry, leg=LegId(self.terms.peer, done.number, 0))
        self.workload.backed(leg, done.tokens)
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
            self.outboxes.count(PeerId(hop.peer), LegId(leg.id.starter, leg.id.number, hop.first))
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
            return self._on(leg, self.onward.missed(leg, leg.to, now))
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
                effects += self._on(leg, self.onward.send(leg, now))
            elif leg.stage is Stage.AWAY and leg.look_at is not None and now >= leg.look_at:
                effects.append(self.onward.look_after(leg))
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
            self.onward.release(leg, leg.to)
        self.work.drop(leg.token)
        self._by_id.pop(leg.id, None)
        if leg.token in self.work.running:
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
        waiting = self.work.waiting
        return all(leg.stage is Stage.HELD or token in waiting for token, leg in self.legs.items())

    def _draining(self) -> bool:
        """Whether gradients wait for a step: what came between now would be computed with weights of two versions."""
        return self.ledger.waiting and not self.terms.overlap

    def _is_older(self) -> Callable[[int], bool]:
        """While gradients wait for a step: which forward passes may still begin. Those of micro-batches that are older
        than one that is between its passes here.

        They make the step wait longer, but not for ever: what is new is younger. Were all kept back, two peers that
        each wait for a micro-batch whose forward pass the other one keeps back would wait until they give them up. So
        the oldest of all is kept back by none that is kept back itself (wait-die: Rosenkrantz, Stearns, Lewis 1978).
        """
        waiting = self.work.waiting
        between = [leg.order for token, leg in self.legs.items() if leg.stage in UNDER_WAY and token not in waiting]
        youngest = max(between, default=None)
        return lambda token: youngest is not None and self.legs[token].order < youngest

    def _begin_more(self, now: Seconds) -> list[Effect]:
        """Our own micro-batches, as many as the window has room for, while the compute thread has nothing better."""
        jobs: list[Effect] = []
        self._look_at = None
        alone = self.terms.last == self.terms.layers and not self.terms.synchronous
        if not self.active or self.draining or self.terms.first > 0 or alone:
            return jobs
        own = sum(leg.own for leg in self.legs.values())
        while self._may_begin(own):
            end = self.onward.end(0)
            if end < self.terms.layers and not self.view.successors(end):
                self._look_at = now + RETRY_S
                break
            leg = self._new_leg(LegId(self.terms.peer, 0, 0), end, now, self.terms.peer)
            leg.own, leg.until = True, now + budget_s(self.window.typical_s())
            jobs.append(self.work.begin(Draw(leg.token, leg.last)))
            own += 1
            self.quota = None if self.quota is None else self.quota - 1
        return jobs

    def _may_begin(self, own: int) -> bool:
        idle = not self.work.full and self._has_room(0)
        return idle and own < self.window.size and self.quota != 0 and not self._draining()

    def _new_leg(self, name: LegId, last: int, now: Seconds, asker: PeerId) -> Leg:
        self._last_token += 1
        room = self.workload.room_of(name.first, last)
        leg = Leg(self._last_token, name, last, room, False, now, now, now, asker, now, round=self.round)
        self.legs[leg.token] = leg
        return leg

    # Synchronous rounds

    def begin_round(self, round: int, active: bool, quota: int) -> list[Effect]:
        """The weights are those of this round. Micro-batches that came early are of it now."""
        self.round, self.active, self.quota, self._wake = round, active, quota, None
        early, self._early = self._early, []
        effects: list[Effect] = []
        for job in early:
            leg = self.legs.get(job.token)
            if leg is not None and leg.stage is Stage.FORWARD and active:
                self.work.push(job)
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


__all__ = ["Routes"]
